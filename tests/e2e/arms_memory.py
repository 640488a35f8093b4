"""The memory of an A/B test on one worker with real weights, for `make drill-rollouts`.

``same``: the arm differs in its chat template and sampling defaults. ``different``: it has other weights.
Measured: what the worker's ledger grants, and the proportional resident memory of the worker's processes,
before the test and while both arms serve.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import worker_pb2
from tests.support.faulty_versions import CHECKPOINT
from tests.support.stack import Stack, metadata
from tests.support.updating import admin_of, publish

NAME = "arms"
LOADED_S = 300.0  # an engine starts
SETTLED_S = 60.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one worker."""

    weights: int
    working: int
    kv: int
    pss: int  # of all its processes
    engines: int

    @property
    def granted(self) -> int:
        return self.weights + self.working + self.kv

    def ratio(self, alone: Memory) -> float:
        """Return the larger of what is granted and what is resident, over that of one version."""
        return max(self.granted / alone.granted, self.pss / alone.pss)

    def __str__(self) -> str:
        parts = {"weights": self.weights, "working": self.working, "kv": self.kv, "pss": self.pss}
        shown = ", ".join(f"{name} {size_bytes / MIB:.1f} MiB" for name, size_bytes in parts.items())
        return f"{shown}, {self.engines} engine(s)"


async def memory_of(stack: Stack) -> Memory:
    (worker,) = (await stack.workers()).values()
    versions = worker.versions
    process = psutil.Process(stack.worker_pid(worker.worker_id))
    processes = [process, *process.children(recursive=True)]
    return Memory(
        sum(one.weight_bytes for one in versions),
        sum(one.working_bytes for one in versions),
        sum(one.kv_bytes for one in versions),
        sum(one.memory_full_info().pss for one in processes),
        len({one.engine_pid for one in versions}),
    )


def write_versions(folder: Path) -> dict[str, Path]:
    found = {name: folder / name for name in ("stable", "same", "different")}
    for path in found.values():
        shutil.copytree(CHECKPOINT, path)
    settings = found["same"] / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    settings.write_text(json.dumps({**fields, "chat_template": "{{ messages[-1]['content'] }}"}))
    sampling = found["same"] / "generation_config.json"
    sampling.write_text(json.dumps({**json.loads(sampling.read_text()), "temperature": 0.3}))
    weights = found["different"] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    begins = 8 + int.from_bytes(content[:8], "little")
    content[begins::2] = bytes(byte ^ 1 for byte in content[begins::2])  # the last bit of each bfloat16
    weights.write_bytes(content)
    return found


async def measure(stack: Stack, folder: Path) -> dict[str, float]:
    """Return the ratio of an A/B test's memory over that of one version, for each kind of arm."""
    for tag, path in write_versions(folder).items():
        await asyncio.to_thread(publish, stack, path, NAME, tag)
    ratios: dict[str, float] = {}
    async with admin_of(stack) as admin:
        await admin.deployments.create(
            cp.Deployment(metadata=cp.Metadata(name=NAME), model=NAME, version="stable", replicas=1)
        )
        await admin.deployments.wait_ready(NAME)
        await serve(stack)
        alone = await settled(stack, versions=1)
        print(f"one version: {alone}", flush=True)
        for arm in ("same", "different"):
            both = await measured_of(stack, admin, arm)
            ratios[arm] = both.ratio(alone)
            print(f"an A/B test with {arm} weights: {both}; {ratios[arm]:.3f} times", flush=True)
            assert both.kv <= alone.kv, "two versions have more KV than one"
    return ratios


async def measured_of(stack: Stack, admin: AdminClient, arm: str) -> Memory:
    """Return the memory while both arms of a test serve; then abort it."""
    started = await admin.rollouts.create(
        cp.Rollout(
            metadata=cp.Metadata(name=f"{NAME}-{arm}"),
            deployment=NAME,
            strategy=cp.ROLLOUT_STRATEGY_AB,
            arms=[cp.RolloutArm(name="arm", version=arm, weight_ratio=0.5)],
        )
    )
    name = started.metadata.name
    await in_phase(admin, name, cp.ROLLOUT_PHASE_RUNNING)
    digests = {await serve(stack, session=f"session-{number}") for number in range(24)}
    assert len(digests) == 2, "one arm got no request"
    both = await settled(stack, versions=2)
    await admin.rollouts.abort(name, reason="measured")
    await stack.wait_workers(lambda state: all(len(one.versions) == 1 for one in state.values()), 120)
    await in_phase(admin, name, cp.ROLLOUT_PHASE_ABORTED)
    return both


async def in_phase(admin: AdminClient, name: str, phase: cp.RolloutPhase.ValueType) -> None:
    """Return once the rollout is in the phase."""
    async with asyncio.timeout(LOADED_S):
        while (await admin.rollouts.get(name)).phase != phase:
            await asyncio.sleep(0.2)


async def serve(stack: Stack, *, session: str = "") -> str:
    """Return the version that answered a request."""
    generation = pb.Generation(
        model=NAME, token_ids=pb.TokenIds(ids=[5, 6, 7, 8]), max_output_tokens=8, session_key=session
    )
    async with stack.inference() as stub:
        request = pb.CompleteRequest(generation=generation)
        answer = await stub.Complete(request, metadata=metadata(stack.api_key), timeout=60)
    digest: str = answer.accepted.version_digest
    return digest


async def settled(stack: Stack, *, versions: int) -> Memory:
    """Return the memory once all versions are READY and no pool moves for two seconds."""
    until_s = time.monotonic() + SETTLED_S
    before: tuple[int, ...] = ()
    still_s = time.monotonic()
    while time.monotonic() < until_s:
        (worker,) = (await stack.workers()).values()
        ready = [one for one in worker.versions if one.state == worker_pb2.VERSION_STATE_READY]
        now = tuple(one.kv_bytes for one in ready)
        if now != before or len(ready) != versions:
            before, still_s = now, time.monotonic()
        if time.monotonic() - still_s > 2.0:
            return await memory_of(stack)
        await asyncio.sleep(0.2)
    raise AssertionError("the pools did not settle")
