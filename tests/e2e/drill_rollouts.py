"""`make drill-rollouts`: versions with known faults are rolled out under load, on two workers with the null
executor.

A good version must reach all traffic; a slow one, a failing one, one of twice the cost, one with outputs of
another length and one that crashes on some prompts must be rolled back without an operator. So must a failing
one by its gate where all traffic moves at once (``green-failing``, ``instant-failing``), and by the burn
alert of an objective where its gate counts no errors (``burn``). Steps and windows are shortened.
``--runs N``: per kind; ``--kinds a,b``: only these.

Measured: ``actuation_s``, from an abort until the last new request of the aborted version began;
``rollback_s``, from a rollback until its last request ended; ``ab_memory_ratio``, the memory of an A/B test
of two versions with equal weights on one worker, over that of one version (``arms_memory``; kind ``memory``).
What was not measured is null. A client whose requests name the candidate streams ``LONG_TOKENS`` each, so
that a rollback finds a stream that has begun. The last line is ``RESULT {json}``. The drill fails where a
kind ended otherwise, for another reason than its fault, or after more than ``MOST_REQUESTS`` of the
candidate; where an abort took more than 5 s, a rollback more than 60 s, or the memory is more than 1.1 times
that of one version.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from bench.overhead import quantile
from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.worker.engine.load.loading import WARM_UP_TOKENS
from tests.e2e.arms_memory import measure
from tests.support.faulty_versions import CRASHING_ID, VersionFault, write_version
from tests.support.stack import ROOT, Stack, metadata
from tests.support.updating import admin_of, publish

NAME: Final = "drill"
SESSIONS: Final = 600
TOKENS: Final = 10
PROMPT_TOKENS: Final = 16
LONG_PROMPT_TOKENS: Final = (
    WARM_UP_TOKENS + 16
)  # of some requests: the recorded traffic has them, so a probe has
LONGEST_S: Final = 240.0
# What an abort and a rollback as a whole may take, in seconds, and an A/B test of what one version takes.
LARGEST: Final = {"actuation_p95_s": 5.0, "rollback_p95_s": 60.0, "ab_memory_ratio": 1.1}
MEMORY: Final = "memory"
STEPS: Final = (0.1, 0.34, 1.0)
SETTINGS: Final = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support/rollout_faults'}",
    "FAIRWAY_QUEUE_TTL_S": "5",
    "FAIRWAY_SHEDDING": "false",
}
# Requests of the candidate, by which its fault is detected.
MOST_REQUESTS: Final = 3000
# Where all traffic moves at once, the longest time with it.
FULL_SOAK_S: Final = 45
WITH_TRAFFIC: Final = (cp.ROLLOUT_PHASE_RUNNING, cp.ROLLOUT_PHASE_SOAKING)
LONG_TOKENS: Final = 300
# The event of the rollback, and what its message contains one of.
REASONS: Final[Mapping[VersionFault, Mapping[str, tuple[str, ...]]]] = {
    VersionFault.SLOW: {"GATE_FAILED": ("ttft_p95", "itl_p95", "cost")},
    VersionFault.FAILING: {"GATE_FAILED": ("error_ratio", "broken_ratio")},
    VersionFault.GARBAGE: {"GATE_FAILED": ("output_length",)},
    # Requests wait while its engine starts again: that may show before its errors do.
    VersionFault.CRASHING: {
        "GATE_FAILED": ("error_ratio", "broken_ratio", "ttft_p95", "itl_p95"),
        "ENGINE_CRASHES": ("crashed",),
    },
    VersionFault.UNANSWERING: {"PROBE_FAILED": ("",)},
    VersionFault.COSTLY: {"GATE_FAILED": ("cost",)},
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A rollout: what its version does wrong, how it moves traffic, what is judged, and why it ends."""

    fault: VersionFault
    strategy: cp.RolloutStrategy.ValueType = cp.ROLLOUT_STRATEGY_CANARY
    # Empty: all metrics.
    metrics: tuple[str, ...] = ()
    # Whether an objective promises availability meanwhile.
    promised: bool = False
    # See REASONS; empty: those of its fault.
    reasons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


GREEN, INSTANT = cp.ROLLOUT_STRATEGY_BLUE_GREEN, cp.ROLLOUT_STRATEGY_INSTANT
KINDS: Final[Mapping[str, Kind]] = {
    **{fault.value: Kind(fault) for fault in VersionFault},
    # Twice the device time is slower too: only the cost is judged there.
    VersionFault.COSTLY.value: Kind(VersionFault.COSTLY, metrics=("cost",)),
    "green-good": Kind(VersionFault.GOOD, GREEN),
    "green-failing": Kind(VersionFault.FAILING, GREEN),
    "green-slow": Kind(VersionFault.SLOW, GREEN),
    "instant-good": Kind(VersionFault.GOOD, INSTANT),
    "instant-failing": Kind(VersionFault.FAILING, INSTANT),
    "burn": Kind(
        VersionFault.FAILING,
        metrics=("cost",),
        promised=True,
        reasons={"BURN_RATE": ("burns the error budget of availability",)},
    ),
}


@dataclass(frozen=True, slots=True)
class Installation:
    """The null executor's step, the clients, and the kinds that are rolled out on it."""

    step_s: float
    clients: int
    kinds: tuple[str, ...]
    long_streams: bool = True


# A device that never idles spends 1 / throughput on a token, however long its steps are: the cost shows only
# under a load that lets it idle.
INSTALLATIONS: Final = (
    Installation(0.02, 32, tuple(kind for kind in KINDS if kind != VersionFault.COSTLY)),
    Installation(0.004, 2, (VersionFault.COSTLY.value,), long_streams=False),
)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: when it began and ended, and the version that was accepted last for it."""

    began_s: float
    ended_s: float
    version_digest: str
    failure: str


@dataclass(slots=True)
class Load:
    """Clients with sessions, some of whose prompts crash a crashing version."""

    sent: list[Sent] = field(default_factory=list)
    long: list[Sent] = field(default_factory=list)
    open: Counter[str] = field(default_factory=Counter)
    candidate: str = ""  # the version that has traffic now

    @asynccontextmanager
    async def running(self, stack: Stack, clients: int, *, long_streams: bool) -> AsyncIterator[None]:
        stopping = asyncio.Event()
        async with grpc.aio.insecure_channel(stack.endpoints["grpc"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self._client(stack, stub, random.Random(number), stopping))
                if long_streams:
                    group.create_task(self._long_streams(stack, stub, stopping))
                try:
                    yield
                finally:
                    stopping.set()

    async def _client(
        self,
        stack: Stack,
        stub: inference_pb2_grpc.InferenceServiceAsyncStub,
        rng: random.Random,
        stopping: asyncio.Event,
    ) -> None:
        while not stopping.is_set():
            first = CRASHING_ID if rng.random() < 0.02 else rng.randrange(400)
            tokens = PROMPT_TOKENS if rng.random() > 0.05 else LONG_PROMPT_TOKENS
            generation = pb.Generation(
                model=NAME,
                token_ids=pb.TokenIds(ids=[first, *(rng.randrange(400) for _ in range(tokens - 1))]),
                max_output_tokens=TOKENS,
                session_key=f"session-{rng.randrange(SESSIONS)}",
            )
            self.sent.append(await self._send(stack, stub, generation))

    async def _long_streams(
        self, stack: Stack, stub: inference_pb2_grpc.InferenceServiceAsyncStub, stopping: asyncio.Event
    ) -> None:
        """Send requests that name the candidate, one after the other: chance does not draw them."""
        while not stopping.is_set():
            if not self.candidate:
                await asyncio.sleep(0.1)
                continue
            generation = pb.Generation(
                model=NAME,
                token_ids=pb.TokenIds(ids=range(1, 16)),
                max_output_tokens=LONG_TOKENS,
                version=self.candidate,
            )
            self.long.append(await self._send(stack, stub, generation))

    async def _send(
        self,
        stack: Stack,
        stub: inference_pb2_grpc.InferenceServiceAsyncStub,
        generation: pb.Generation,
    ) -> Sent:
        began_s, digest, failure = time.monotonic(), "", ""
        try:
            async for event in stub.Generate(
                pb.GenerateRequest(generation=generation), metadata=metadata(stack.api_key), timeout=60
            ):
                if event.HasField("accepted"):
                    self.open[digest] -= bool(digest)
                    digest = event.accepted.version_digest
                    self.open[digest] += 1
        except grpc.aio.AioRpcError as error:
            failure = f"{error.code().name}: {error.details()}"
            await asyncio.sleep(0.05)
        if digest:
            self.open[digest] -= 1
        return Sent(began_s, time.monotonic(), digest, failure)


@dataclass(frozen=True, slots=True)
class Run:
    """One rollout's outcome. Times in seconds; None where nothing was rolled back."""

    name: str
    phase: str
    why: str
    took_s: float
    canary_requests: int
    actuation_s: float | None
    rollback_s: float | None

    @property
    def right(self) -> bool:
        if KINDS[self.name].fault is VersionFault.GOOD:
            return self.phase == "COMPLETED"
        return self.phase == "ABORTED" and self.is_its_fault and self.canary_requests <= MOST_REQUESTS

    @property
    def is_its_fault(self) -> bool:
        """Whether it was rolled back for the fault that its version has."""
        what, _, message = self.why.partition(" ")
        kind = KINDS[self.name]
        return any(word in message for word in (kind.reasons or REASONS[kind.fault]).get(what, ()))


def rollout(kind: Kind, version: str) -> cp.Rollout:
    found = cp.Rollout(
        metadata=cp.Metadata(name=version),
        deployment=NAME,
        strategy=kind.strategy,
        arms=[cp.RolloutArm(name="canary", version=version)],
        gate=cp.RolloutGate(metrics=kind.metrics, min_sessions=30),
    )
    full = kind.strategy != cp.ROLLOUT_STRATEGY_CANARY
    for ratio in STEPS[-1:] if full else STEPS:
        step = found.steps.add(weight_ratio=ratio, min_requests=150)
        step.hold.FromSeconds(0 if full else 3)
    found.soak.FromSeconds(FULL_SOAK_S if full else 3)
    found.gate.patience.FromSeconds(90)
    return found


@asynccontextmanager
async def promised(admin: AdminClient, kind: Kind) -> AsyncIterator[None]:
    """Promise availability during a run of a kind that needs it."""
    if not kind.promised:
        yield
        return
    await admin.objectives.create(
        cp.Objective(metadata=cp.Metadata(name=NAME), model=NAME, availability=0.999)
    )
    await asyncio.sleep(2.0)  # the leading control plane counts from when it receives it
    try:
        yield
    finally:
        await admin.objectives.delete(NAME)


async def roll_out(admin: AdminClient, load: Load, kind: str, version: str) -> Run:
    """Run one rollout to its end."""
    began_s = time.monotonic()
    started = await admin.rollouts.create(rollout(KINDS[kind], version))
    name, digest = started.metadata.name, started.arms[0].version_digest
    back_s: float | None = None
    while True:
        found = await admin.rollouts.get(name)
        load.candidate = digest if found.phase in WITH_TRAFFIC else ""
        if found.phase == cp.ROLLOUT_PHASE_ROLLING_BACK and back_s is None:
            back_s = time.monotonic() - (time.time() - found.history[-1].time.ToNanoseconds() / 1e9)
        ended = found.phase in (cp.ROLLOUT_PHASE_COMPLETED, cp.ROLLOUT_PHASE_ABORTED)
        if ended or time.monotonic() - began_s > LONGEST_S:
            break
        await asyncio.sleep(0.1)
    if not ended:
        print_evidence(found)
        await admin.rollouts.abort(name, reason="the drill's time is over")
        await asyncio.sleep(10.0)
    while load.open[digest] and found.phase == cp.ROLLOUT_PHASE_ABORTED:
        await asyncio.sleep(0.05)
    load.candidate = ""
    mine = [one for one in load.sent if one.version_digest == digest]
    long = [one for one in load.long if one.version_digest == digest]
    late = [one.began_s - back_s for one in mine if back_s is not None and one.began_s > back_s]
    ends = [one.ended_s - back_s for one in [*mine, *long] if back_s is not None and one.ended_s > back_s]
    return Run(
        kind,
        cp.RolloutPhase.Name(found.phase).removeprefix("ROLLOUT_PHASE_"),
        "; ".join(f"{entry.what} {entry.message}" for entry in found.history[-2:]),
        time.monotonic() - began_s,
        len(mine),
        None if back_s is None else max(late, default=0.0),
        None if back_s is None else max(ends, default=0.0),
    )


async def drill(
    stack: Stack, folder: Path, kinds: list[str], runs: int, installation: Installation
) -> list[Run]:
    found: list[Run] = []
    publish(stack, write_version(folder / "stable", VersionFault.GOOD, 0), NAME, "stable")
    async with admin_of(stack) as admin:
        await admin.deployments.create(
            cp.Deployment(
                metadata=cp.Metadata(name=NAME), model=NAME, version="stable", replicas=2, executor="null"
            )
        )
        await admin.deployments.wait_ready(NAME)
        load = Load()
        async with load.running(stack, installation.clients, long_streams=installation.long_streams):
            await asyncio.sleep(3.0)
            for number in range(1, runs + 1):
                for kind in kinds:
                    tag, fault = f"{kind}-{number}", KINDS[kind].fault
                    written = write_version(folder / tag, fault, number)
                    await asyncio.to_thread(publish, stack, written, NAME, tag)
                    async with promised(admin, KINDS[kind]):
                        run = await roll_out(admin, load, kind, tag)
                    print(f"{tag}: {'right' if run.right else 'WRONG'} {run}", flush=True)
                    found.append(run)
                    if not run.right:
                        print_evidence(await admin.rollouts.get(tag))
                    if run.phase == "COMPLETED" and fault is not VersionFault.GOOD:
                        await admin.deployments.rollback(NAME)  # or the next run compares it with itself
                        await admin.deployments.wait_ready(NAME)
                    if run.phase == "COMPLETED":
                        await asyncio.sleep(2.0)
        failures = Counter(one.failure.partition("(")[0][:120] for one in load.sent if one.failure)
        broken = [one.failure for one in load.long if one.failure and one.version_digest]
        print(f"long streams: {len(load.long)}, failed after they began: {broken[:5]}", flush=True)
        print(f"requests: {len(load.sent)}; failures: {dict(failures.most_common(5))}", flush=True)
    return found


def print_evidence(rollout: cp.Rollout) -> None:
    evidence = [one for entry in rollout.history for one in entry.evidence]
    evidence += [one for arm in rollout.arm_status for one in arm.evidence]
    for one in evidence:
        print(f"  {one}".replace("\n", " "), flush=True)


def run_installation(installation: Installation, kinds: list[str], runs: int) -> list[Run]:
    settings = {**SETTINGS, "FAIRWAY_NULL_STEP_S": str(installation.step_s)}
    with (
        tempfile.TemporaryDirectory(prefix="fairway-rollouts-") as folder,
        Stack.started(
            Path(folder) / "state", workers=2, replicas=2, settings=settings, options=["--no-model"]
        ) as stack,
    ):
        return asyncio.run(drill(stack, Path(folder), kinds, runs, installation))


def measure_memory() -> float:
    with (
        tempfile.TemporaryDirectory(prefix="fairway-arms-") as folder,
        Stack.started(Path(folder) / "state", workers=1, replicas=1, options=["--no-model"]) as stack,
    ):
        return asyncio.run(measure(stack, Path(folder)))["same"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="drill_rollouts")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--kinds", default=",".join([MEMORY, *KINDS]))
    arguments = parser.parse_args()
    named = arguments.kinds.split(",")
    if unknown := set(named) - {MEMORY, *KINDS}:
        parser.error(f"there is no kind {', '.join(sorted(unknown))}: {', '.join([MEMORY, *KINDS])}")
    memory_ratio = round(measure_memory(), 3) if MEMORY in named else None
    found: list[Run] = []
    for installation in INSTALLATIONS:
        wanted = [kind for kind in installation.kinds if kind in named]
        if wanted:
            found += run_installation(installation, wanted, arguments.runs)
    good = [run for run in found if KINDS[run.name].fault is VersionFault.GOOD]
    bad = [run for run in found if KINDS[run.name].fault is not VersionFault.GOOD]
    actuations = [run.actuation_s for run in bad if run.actuation_s is not None]
    rollbacks = [run.rollback_s for run in bad if run.rollback_s is not None]
    result = {
        "good_promoted_ratio": _ratio(good),
        "bad_rolled_back_ratio": _ratio(bad),
        "actuation_p95_s": round(quantile(actuations, 0.95), 3) if actuations else None,
        "rollback_p95_s": round(quantile(rollbacks, 0.95), 3) if rollbacks else None,
        "ab_memory_ratio": memory_ratio,
    }
    failures = failures_of(result)
    for failure in failures:
        print(f"FAILED: {failure}", flush=True)
    print("RESULT", json.dumps(result))
    return 1 if failures else 0


def failures_of(result: Mapping[str, float | None]) -> list[str]:
    """Return which demands the figures miss. What was not measured misses none."""
    missed = [
        f"{name} is {value}, below 1"
        for name in ("good_promoted_ratio", "bad_rolled_back_ratio")
        if (value := result[name]) is not None and value < 1.0
    ]
    return missed + [
        f"{name} is {value}, above {most:g}"
        for name, most in LARGEST.items()
        if (value := result[name]) is not None and value > most
    ]


def _ratio(runs: list[Run]) -> float | None:
    return sum(run.right for run in runs) / len(runs) if runs else None


if __name__ == "__main__":
    sys.exit(main())
