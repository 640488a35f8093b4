"""etcd loses its data under a running installation: it says so, serves on, refuses changes, and heals.

A member that is started again with the same name and addresses has the cluster id of before, so only what is
stored in it shows that it is another store.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.core.manifest import sha256_of
from services.rpc.channel import auth_metadata
from services.rpc.status import from_rpc_error
from tests.support.stack import Stack

DATA_ROLES = ("gateway", "scheduler", "worker")
NOTICED_S = 20.0
HEALED_S = 60.0
CANARY_S = 10.0  # most of it is the change from a leader to fallback placement and back


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("fairway") / "state"
    with Stack.started(state, workers=2, replicas=2, settings={"FAIRWAY_SHEDDING": "false"}) as running:
        yield running


class Etcd:
    """The installation's etcd: its supervisor starts it again on its port, with what lies in its folder."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.data = stack.state / "state" / "etcd"

    def _pid(self) -> int:
        deadline_s = time.monotonic() + 30.0
        while not (found := self._stack.pids("etcdbin/etcd")):
            assert time.monotonic() < deadline_s, "the supervisor does not start etcd"
            time.sleep(0.05)
        return found[0]

    def copy(self, target: Path) -> None:
        """A crash-consistent backup."""
        os.kill(self._pid(), signal.SIGSTOP)
        try:
            shutil.copytree(self.data, target)
        finally:
            os.kill(self._pid(), signal.SIGCONT)

    def exchange(self, source: Path | None) -> None:
        """Return once etcd was killed, its data replaced by a copy of ``source`` or nothing, and it runs."""
        pid = self._pid()
        staged = self.data.with_name("etcd-next")
        if source is None:
            staged.mkdir(mode=0o700)
        else:
            shutil.copytree(source, staged)
        os.kill(pid, signal.SIGKILL)
        self.data.rename(self.data.with_name(f"etcd-of-{pid}"))
        staged.rename(self.data)
        deadline_s = time.monotonic() + 30.0
        while self._pid() == pid:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def readyz(stack: Stack, name: str) -> tuple[int, str]:
    url = f"http://{stack.endpoints['metrics'][name]}/readyz"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def reports_store(stack: Stack, name: str) -> bool:
    return "store: " in readyz(stack, name)[1]


def is_ready(stack: Stack, name: str) -> bool:
    return readyz(stack, name) == (200, "ready\n")


def eventually(holds: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)


def complete(stack: Stack, *, timeout_s: float = 20.0) -> str:
    """Return the text of a small completion over HTTP."""
    request = urllib.request.Request(
        f"{stack.http}/v1/completions",
        json.dumps({"model": stack.model, "prompt": "one two", "max_tokens": 8, "temperature": 0}).encode(),
        {"authorization": f"Bearer {stack.api_key}", "content-type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as answer:
        return str(json.load(answer)["choices"][0]["text"])


class Canary(threading.Thread):
    """Somebody's requests, one after the other, until ``end``."""

    def __init__(self, stack: Stack, expected: str) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self._expected = expected
        self._ended = threading.Event()
        self.served = 0
        self.failures: list[str] = []
        self.worst_s = 0.0

    def run(self) -> None:
        while not self._ended.wait(0.2):
            start_s = time.monotonic()
            try:
                text = complete(self._stack)
            except urllib.error.HTTPError as error:
                self.failures.append(f"{error.code} {error.read()[:200]!r}")
            except OSError as error:
                self.failures.append(repr(error))
            else:
                self.served += 1
                self.failures += [] if text == self._expected else [text]
            self.worst_s = max(self.worst_s, time.monotonic() - start_s)

    def end(self) -> None:
        self._ended.set()
        self.join()


async def create_tenant(stack: Stack, name: str) -> None:
    async with stack.channel(stack.endpoints["controlplane"]) as channel:
        await controlplane_pb2_grpc.ControlPlaneServiceStub(channel).CreateTenant(
            cp.CreateTenantRequest(tenant=cp.Tenant(metadata=cp.Metadata(name=name))),
            metadata=auth_metadata(stack.endpoints["admin_key"]),
            timeout=10,
        )


async def set_tag(stack: Stack) -> None:
    async with stack.channel(stack.endpoints["registry"]) as channel:
        await registry_pb2_grpc.RegistryServiceStub(channel).SetTag(
            registry_pb2.SetTagRequest(model="m", tag="t", digest=sha256_of(b"")),
            metadata=auth_metadata(stack.endpoints["admin_key"]),
            timeout=10,
        )


async def refusal_of(call: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), from_rpc_error(caught.value).reason, caught.value.details() or ""


def test_etcd_wiped_and_restored_under_a_running_installation(stack: Stack, tmp_path: Path) -> None:
    etcd = Etcd(stack)
    names = [name for name in stack.endpoints["metrics"] if name.rstrip("-0123456789") != "supervisor"]
    asyncio.run(create_tenant(stack, "before"))
    etcd.copy(tmp_path / "backup")
    for number in range(30):
        asyncio.run(create_tenant(stack, f"lost-{number}"))
    expected = complete(stack)
    pids = {name: stack.pids(f"services {name.rstrip('-0123456789')}") for name in names}

    canary = Canary(stack, expected)
    canary.start()
    etcd.exchange(None)
    for name in names:
        eventually(partial(reports_store, stack, name), NOTICED_S, f"{name} says nothing")
        status, text = readyz(stack, name)
        assert "restore etcd from its backup" in text
        assert status == (200 if name.startswith(DATA_ROLES) else 503), name
    for call in (create_tenant(stack, "meanwhile"), set_tag(stack)):
        code, reason, text = asyncio.run(refusal_of(call))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STORE_REPLACED")
        assert "docs/operations/backup.md" in text

    served = canary.served
    time.sleep(2)
    assert canary.served > served, "serving goes on with the last state"

    etcd.exchange(tmp_path / "backup")
    for name in names:
        eventually(partial(is_ready, stack, name), HEALED_S, f"{name} stays so")
    asyncio.run(create_tenant(stack, "lost-1"))  # it was made after the backup, so it is free again
    code, reason, _ = asyncio.run(refusal_of(create_tenant(stack, "before")))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS")
    eventually(lambda: _leads(stack), HEALED_S, "no scheduler leads")
    served = canary.served
    time.sleep(2)
    canary.end()
    assert canary.served > served
    assert canary.failures == []
    assert canary.worst_s < CANARY_S
    assert pids == {name: stack.pids(f"services {name.rstrip('-0123456789')}") for name in names}, "a restart"


def _leads(stack: Stack) -> bool:
    async def queues() -> None:
        async with stack.channel(stack.endpoints["controlplane"]) as channel:
            await controlplane_pb2_grpc.ControlPlaneServiceStub(channel).ListQueues(
                cp.ListQueuesRequest(), metadata=auth_metadata(stack.endpoints["admin_key"]), timeout=5
            )

    try:
        asyncio.run(queues())
    except grpc.aio.AioRpcError:
        return False
    return True
