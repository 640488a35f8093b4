"""The installation under test: the bundled model with its probe, a classifier, and a tenant for each pack."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from bench.batched.systems import Installation
from bench.safety.planted import BLOCKED, PHRASES
from bench.stack import CHECKPOINT
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc

MODEL: Final = "tiny-probed"
CLASSIFIER: Final = "safety-demo"
WINDOW_TOKENS: Final = 32
EVERY_TOKENS: Final = 16
CONTEXT_TOKENS: Final = 64
# What the demonstration models find too often in safe Python only flags: two labels, and all of the probe.
LABELS: Final = {"insult": "noted", "secret": "noted", "threat": "harm", "self_harm": "harm"}
VARIANTS: Final = ("none", "light", "whole")
_SAFETY: Final = Path("models/safety")
_READY_S: Final = 60.0

Metadata = tuple[tuple[str, str], ...]


def pack(variant: str) -> dict[str, Any]:
    """Return the pack of a variant: what is listed is blocked or redacted, finds of models end or flag."""
    lists = [
        {"category": "words", "phrases": PHRASES[:BLOCKED], "scopes": ["output"]},
        {"category": "names", "phrases": PHRASES[BLOCKED:], "scopes": ["output"]},
    ]
    classifier = {
        "model": CLASSIFIER,
        "labels": LABELS,
        "threshold": 0.99,
        "scopes": ["output"],
        "every_tokens": EVERY_TOKENS,
        "context_tokens": CONTEXT_TOKENS,
    }
    return {
        "categories": {
            "words": {"action": "block"},
            "names": {"action": "redact"},
            "harm": {"action": "block"},
            "noted": {"action": "flag"},
        },
        "lists": lists,
        "personal_data": [{"category": "names", "kinds": ["email", "card", "iban", "phone"]}],
        "probe": {"category": "noted", "threshold": 0.99},
        "classifiers": [classifier] if variant == "whole" else [],
        "window_tokens": WINDOW_TOKENS,
        "fail": "hold",
        "hold_s": 60.0,
    }


@dataclass(frozen=True, slots=True)
class SafetyStack:
    """An installation, and the credentials of the tenant that obeys each variant's pack."""

    made: Installation
    keys: Mapping[str, Metadata]

    @property
    def grpc(self) -> str:
        return str(self.made.endpoints["grpc"])

    @property
    def state(self) -> Path:
        return self.made.state

    def replicas(self, count: int) -> None:
        """Return once both models run on so many workers."""
        for name in (MODEL, CLASSIFIER):
            self.made.fairway("deployments", "update", name, "--replicas", str(count), "--wait")

    def kill_worker(self, name: str) -> None:
        pids = json.loads((self.state / "endpoints.json").read_text())["pids"]
        os.kill(int(pids[name]), 9)


@contextlib.contextmanager
def started(folder: Path, workers: int = 2) -> Iterator[SafetyStack]:
    """Bring the installation up in ``folder``, each model on one worker, and down again."""
    made = Installation(folder / "state", {})
    made.fairway("up", "--detach", "--no-model", "--workers", str(workers))
    try:
        made = Installation(made.state, json.loads((made.state / "endpoints.json").read_text()))
        model = folder / "model"
        shutil.copytree(CHECKPOINT, model)
        for probe in (_SAFETY / "probe").glob("*.safetensors"):
            shutil.copy(probe, model)
        made.deploy(MODEL, model)
        made.fairway("deployments", "update", MODEL, "--output-form", "hermes", "--wait")
        made.deploy(CLASSIFIER, _SAFETY / "classifier")
        stack = SafetyStack(made, {variant: _tenant(made, folder, variant) for variant in VARIANTS})
        _until_obeyed(stack)
        yield stack
    finally:
        made.fairway("down")


def _tenant(made: Installation, folder: Path, variant: str) -> Metadata:
    name = f"with-{variant}"
    made.fairway("tenants", "create", name)
    key = json.loads(made.fairway("keys", "create", name, "--tenant", name, "--output", "json"))
    if variant != "none":
        file = folder / f"{variant}.json"
        file.write_text(json.dumps(pack(variant)))
        made.fairway("policies", "create", str(file), "--name", variant)
        made.fairway("policies", "assign", "--tenant", name, "--pack", variant)
    return (("authorization", f"Bearer {key['secret']}"),)


def _until_obeyed(stack: SafetyStack) -> None:
    """Return once a request of each tenant is accepted under its pack. Raises SystemExit."""
    deadline_s, problem = time.monotonic() + _READY_S, ""
    request = pb.CompleteRequest(generation=pb.Generation(model=MODEL, prompt="a", max_output_tokens=2))
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        left = list(VARIANTS)
        while left and time.monotonic() < deadline_s:
            try:
                accepted = stub.Complete(request, metadata=stack.keys[left[0]], timeout=10).accepted
            except grpc.RpcError as error:
                problem = str(error)
            else:
                problem = f"a request of {left[0]} obeys {accepted.safety.deployment!r}"
                if accepted.safety.deployment == ("" if left[0] == "none" else left[0]):
                    del left[0]
                    continue
            time.sleep(0.1)
    if left:
        raise SystemExit(f"{left} do not serve after {_READY_S:g} s: {problem}")
