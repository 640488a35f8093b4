"""An installation beyond the loopback address, with the certificates that `fairway up` makes."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fairway.client import tls_credentials
from fairway.v1 import worker_pb2, worker_pb2_grpc
from tests.support.stack import Stack, fairway, metadata


@pytest.fixture(scope="module")
def secured(installations: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("secured") / "state"
    with Stack.started(state, workers=1, replicas=1, options=("--host", "0.0.0.0")) as running:
        yield running


def complete(stack: Stack) -> str:
    """Return the text of one completion over HTTPS."""
    body = json.dumps(
        {"model": stack.model, "prompt": "def f(n):", "max_tokens": 8, "temperature": 0}
    ).encode()
    headers = {"Authorization": f"Bearer {stack.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.http}/v1/completions", body, headers)
    trusted = ssl.create_default_context(cafile=Path(stack.endpoints["tls_dir"]) / "ca.crt")
    with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_faces_have_tls_and_every_certificate_is_replaced_under_load(secured: Stack) -> None:
    assert secured.http.startswith("https://")
    expected, done, answers = complete(secured), threading.Event(), list[object]()

    def load() -> None:
        while not done.is_set():
            try:
                answers.append(complete(secured))
            except Exception as error:
                answers.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    at = ("--state-dir", str(secured.state))
    try:
        fairway("certs", "rotate", *at)
        fairway("certs", "rotate", "--ca", *at)
        fairway("nodes", "list", *at)
        fairway("complete", "def f(n):", "--max-tokens", "8", *at)
        fairway("status", *at)
    finally:
        done.set()
        thread.join()
    assert len(answers) > 10
    assert set(answers) == {expected}


async def test_a_workers_certificate_with_the_admin_key_opens_no_worker(secured: Stack) -> None:
    (address,) = secured.endpoints["workers"]
    own = tls_credentials(secured.state / "certs" / "worker-0")
    async with grpc.aio.secure_channel(address, own) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker_pb2_grpc.WorkerServiceStub(channel).GetWorker(
                worker_pb2.GetWorkerRequest(), metadata=metadata(secured.endpoints["admin_key"]), timeout=10
            )
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert await secured.workers(), "an operator's certificate does"
