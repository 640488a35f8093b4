"""`make drill-safety`: 300 streams under a safety pack, while gateways, workers and its classifier fail.

On two gateways, two workers for the language model and one for the bundled classifier. The pack redacts,
blocks by lists, and ends what the classifier finds; with ``hold`` it waits for the classifier. Each output is
known, since most are constrained to it: `tests/e2e/screened_streams.py` decides what of it is safe. Meanwhile
the classifier's worker is stopped and killed, both workers of the model and both gateways are killed, and a
version of the pack that intervenes in a crowd of further requests is rolled out as a canary: its gate must
roll it back by the intervention rate. Clients whose stream breaks send it again with its key.

``unsafe_delivered``: calls that received a text that the pack may not let pass. ``lost``: streams without one
terminal event, or with another text than undisturbed. ``verdicts_repeated``: verdicts of text that a client
had before, and finds that are recorded again; ``verdicts_skipped``: tokens without a verdict, and finds
without a record, by the gateways' logs and the audit log. A killed gateway takes the entries of its last
second along, of the audit log alone; they are printed. The last line is ``RESULT {json}``. All four must be
0, the rollout rolled back, and ``broken_streams``, calls that broke after their first text, above 0: with
fewer than 100 streams a kill may find none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import psutil

from fairway.cli.fleet.options import BUNDLED_CLASSIFIER
from fairway.cli.state import StateDir
from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc, worker_pb2
from services.gateway.safety.record import AUDITED
from tests.e2e.screened_streams import (
    KINDS,
    Attempt,
    Case,
    Oracle,
    Recorded,
    Reference,
    Stream,
    Tally,
    attempt,
    pack,
    recorded,
)
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, kill, processes
from tests.support.updating import admin_of

PACK: Final = "strict"
TENANT: Final = "guarded"
STREAMS: Final = 300
AT_ONCE: Final = 12
CANDIDATES: Final = 6  # of each kind
FROZEN_S: Final = 4.0
WHOLE_S: Final = 120.0
GIVEN_UP_S: Final = 180.0
RETRIED_S: Final = 0.25
CROWD_PER_S: Final = 4.0
ROLLED_BACK_S: Final = 240.0
AUDITED_S: Final = 30.0
SELECTORS: Final = {"worker-0": "lm", "worker-1": "lm", "worker-2": "judge"}
# The share of the streams that have ended when a fault begins, its name, and what it befalls.
FAULTS: Final = (
    (0.10, "stop", "worker-2"),
    (0.25, "kill", "worker-0"),
    (0.40, "kill", "gateway-1"),
    (0.55, "kill", "worker-2"),
    (0.70, "kill", "gateway"),
    (0.85, "kill", "worker-1"),
)


@dataclass(slots=True)
class SafetyDrill:
    """The installation, its clients, and what they received."""

    stack: Stack
    admin: AdminClient
    stubs: Sequence[inference_pb2_grpc.InferenceServiceAsyncStub]
    secret: str
    streams: list[Stream] = field(default_factory=list)
    ended: int = 0
    # Streams that may begin: those until the next fault, and as many as run at once.
    admitted: int = 0
    killed: list[tuple[str, float]] = field(default_factory=list)  # gateways, and when, in Unix seconds
    crowd: Counter[str] = field(default_factory=Counter)  # answers

    async def references(self) -> dict[Reference, Attempt]:
        """Return the cases whose outputs are clear, with their undisturbed runs under the pack."""
        oracle, found, stub = Oracle(), dict[Reference, Attempt](), self.stubs[0]
        cases = [Case(kind, number) for kind in KINDS for number in range(CANDIDATES)]
        asked = [case.generation(self.stack.model) for case in cases]
        raw = await asyncio.gather(*(attempt(stub, self.stack.api_key, one, 0) for one in asked))
        screened = await asyncio.gather(*(attempt(stub, self.secret, one, 0) for one in asked))
        for case, output, received in zip(cases, raw, screened, strict=True):
            assert not output.failure, output.failure
            reference = await asyncio.to_thread(oracle.reference, case, output)
            if reference is not None:
                problem = Stream(reference, [received]).problem(received)
                assert not problem, f"undisturbed, {case}: {problem}: {received}"
                found[reference] = received
        kinds = Counter(one.case.kind for one in found)
        print(f"cases: {dict(kinds)}", flush=True)
        assert len(kinds) == len(KINDS), "each kind has a case"
        return found

    async def stream(self, number: int, stream: Stream) -> None:
        """Send a request until its end was received, from the other gateway after each break."""
        generation = stream.reference.case.generation(
            self.stack.model, f"stream-{number}", f"session-{number}"
        )
        began_s = time.monotonic()
        for turn in itertools.count(number):
            gateway = turn % len(self.stubs)
            stream.attempts.append(await attempt(self.stubs[gateway], self.secret, generation, gateway))
            retried = stream.last.failure.startswith("UNAVAILABLE")
            if not retried or time.monotonic() - began_s > GIVEN_UP_S:
                break
            await asyncio.sleep(RETRIED_S)
        self.ended += 1

    async def all_streams(self, references: Sequence[Reference], count: int) -> None:
        turns = asyncio.Semaphore(AT_ONCE)
        self.streams = [Stream(references[number % len(references)]) for number in range(count)]

        async def one(number: int, stream: Stream) -> None:
            async with turns:
                while number >= self.admitted:
                    await asyncio.sleep(0.05)
                await self.stream(number, stream)

        await asyncio.gather(*(one(number, stream) for number, stream in enumerate(self.streams)))

    @contextlib.asynccontextmanager
    async def crowded(self) -> AsyncIterator[None]:
        """Send short requests inside, each of a session of its own; a gate needs some hundred."""

        async def one(number: int) -> None:
            generation = pb.Generation(
                model=self.stack.model, prompt="crowd", max_output_tokens=1, session_key=f"crowd-{number}"
            )
            found = await attempt(self.stubs[number % len(self.stubs)], self.secret, generation, 0)
            self.crowd[found.failure.partition(":")[0] or "served"] += 1

        async def arrive() -> None:
            async with asyncio.TaskGroup() as group:
                for number in itertools.count():
                    group.create_task(one(number))
                    await asyncio.sleep(1.0 / CROWD_PER_S)

        arriving = asyncio.create_task(arrive())
        try:
            yield
        finally:
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)

    # --- faults ------------------------------------------------------------------------------------

    async def faults(self) -> None:
        """Inject each fault once its share of the streams has ended, and all is whole again."""
        for share, what, name in FAULTS:
            first = round(share * len(self.streams))
            self.admitted = first + AT_ONCE
            while self.ended < first:
                await asyncio.sleep(0.02)
            print(f"  {what} {name} after {self.ended} streams", flush=True)
            if what == "stop":
                with stopped(self.stack, name):
                    await asyncio.sleep(FROZEN_S)
                continue
            if name.startswith("gateway"):
                self.killed.append((name, time.time()))
                kill(gateway_pid(self.stack, name))
            else:
                kill(self.stack.worker_pid(name))
            await asyncio.to_thread(self.stack.wait_ready, WHOLE_S)
            await self.stack.wait_workers(is_whole, WHOLE_S)
        self.admitted = len(self.streams)

    async def rollout(self) -> str:
        """Roll the crowd's version out, and return why it was rolled back; empty if it was not."""
        wanted = cp.Rollout(
            metadata=cp.Metadata(name="crowded"),
            deployment=PACK,
            strategy=cp.ROLLOUT_STRATEGY_CANARY,
            arms=[cp.RolloutArm(name="canary", version="crowded")],
            gate=cp.RolloutGate(min_sessions=30),
        )
        for ratio in (0.5, 1.0):
            wanted.steps.add(weight_ratio=ratio, min_requests=100).hold.FromSeconds(3600)
        began_s = time.monotonic()
        await self.admin.rollouts.create(wanted)
        while time.monotonic() - began_s < ROLLED_BACK_S:
            found = await self.admin.rollouts.get("crowded")
            if found.phase == cp.ROLLOUT_PHASE_ABORTED:
                why = "; ".join(one.message for one in found.history if one.what == "GATE_FAILED")
                print(f"  rolled back after {time.monotonic() - began_s:.0f} s: {why}", flush=True)
                return why
            await asyncio.sleep(0.5)
        print("  not rolled back", flush=True)
        return ""

    # --- what is recorded --------------------------------------------------------------------------

    async def tally(self) -> Tally:
        tally, state = Tally(), StateDir.at(self.stack.state)
        logs = [state.log(f"gateway{at}") for at in ("", "-1")]
        verdicts = recorded(logs, "safety.judged", "idempotency.continued")
        noted = recorded(logs, "safety.intervened", "idempotency.continued")
        finds = recorded(logs, "safety.intervened")
        entries = await self.audited({key for one in self.streams for key in keys_of(finds, one)})
        for stream in self.streams:
            tally.spans(stream, verdicts.get(stream.request_id, ()))
            tally.finds(stream, noted.get(stream.request_id, ()))
        mine = (line for one in self.streams for line in finds.get(one.request_id, ()))
        taken = tally.audited(mine, entries, self.killed)
        continued = sum(any("tokens" in one.fields for one in lines) for lines in verdicts.values())
        print(f"verdicts: {sum(map(len, verdicts.values()))}; {continued} streams continued elsewhere")
        print(f"finds: {sum(map(len, finds.values()))}; a killed gateway took {taken} audit entries along")
        return tally

    async def audited(self, wanted: set[str]) -> Counter[str]:
        """Return the finds of the audit log, by request and resource, once those wanted are there."""
        deadline_s = time.monotonic() + AUDITED_S
        while True:
            entries = await self.admin.audit.list(action=AUDITED, limit=None, timeout_s=60)
            found = Counter[str]()
            for one in entries:
                found[f"{one.request_id} {one.resource}"] += max(1, one.count)
            if wanted <= found.keys() or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(1.0)


def keys_of(finds: dict[str, list[Recorded]], stream: Stream) -> Iterator[str]:
    for one in finds.get(stream.request_id, ()):
        yield f"{stream.request_id} {one.identity}"


def is_whole(workers: dict[str, worker_pb2.GetWorkerResponse]) -> bool:
    versions = [version for one in workers.values() for version in one.versions]
    return len(versions) == len(SELECTORS) and all(
        one.state == worker_pb2.VERSION_STATE_READY for one in versions
    )


def gateway_pid(stack: Stack, name: str) -> int:
    """Return the process that listens where the gateway does."""
    position = 0 if name == "gateway" else int(name.partition("-")[2])
    port = int(stack.endpoints["gateways"][position].rpartition(":")[2])
    for process in processes(stack.state):
        with contextlib.suppress(psutil.Error):
            if any(one.laddr.port == port for one in process.net_connections() if one.status == "LISTEN"):
                return int(process.pid)
    raise AssertionError(f"no process listens for {name}")


@contextlib.contextmanager
def stopped(stack: Stack, name: str) -> Iterator[None]:
    """Stop every process of a worker, and let them go on."""
    worker = psutil.Process(stack.worker_pid(name))
    found = [worker, *worker.children(recursive=True)]
    for process in found:
        process.suspend()
    try:
        yield
    finally:
        for process in found:
            process.resume()


def prepare(stack: Stack, folder: Path) -> str:
    """Deploy both models on their workers, and the pack for a tenant. Returns a key of the tenant."""
    cli = CommandLine(stack.state)
    cli("deployments", "update", stack.model, "--selector", "runs=lm", "--replicas", "2", "--wait")
    cli("deployments", "update", BUNDLED_CLASSIFIER, "--selector", "runs=judge", "--replicas", "1", "--wait")
    for tag, crowd in (("latest", False), ("crowded", True)):
        file = folder / f"{tag}.json"
        file.write_bytes(pack(crowd=crowd))
        cli("policies", "create", str(file), "--name", PACK, "--tag", tag)
    cli("tenants", "create", TENANT)
    secret = cli("keys", "create", TENANT, "--tenant", TENANT).out.strip()
    cli("policies", "assign", "--tenant", TENANT, "--pack", PACK)
    return secret


async def run(stack: Stack, secret: str, streams: int) -> dict[str, object]:
    async with contextlib.AsyncExitStack() as opened:
        admin = await opened.enter_async_context(admin_of(stack))
        channels = [
            await opened.enter_async_context(grpc.aio.insecure_channel(address))
            for address in stack.endpoints["gateways"]
        ]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        drill = SafetyDrill(stack, admin, stubs, secret)
        async with asyncio.timeout(60):
            for stub in stubs:
                warm = Case("safe", 0).generation(stack.model)
                while (found := await attempt(stub, secret, warm, 0)).failure:
                    await asyncio.sleep(0.2)
                assert found.accepted is not None
                assert found.accepted.safety.deployment == PACK, "the tenant obeys it"
        undisturbed = await drill.references()
        references = list(undisturbed)
        random.Random(1).shuffle(references)
        began_s = time.monotonic()
        async with drill.crowded():
            rolling = asyncio.create_task(drill.rollout())
            running = asyncio.create_task(drill.all_streams(references, streams))
            await asyncio.sleep(0)
            await asyncio.gather(running, drill.faults())
            why = await rolling
        print(f"{streams} streams in {time.monotonic() - began_s:.0f} s; crowd: {dict(drill.crowd)}")
        return report(drill, undisturbed, await drill.tally(), why)


def report(
    drill: SafetyDrill, undisturbed: dict[Reference, Attempt], tally: Tally, rolled_back: str
) -> dict[str, object]:
    """Print what was wrong, and return the figures."""
    unsafe = [one for one in drill.streams for call in one.attempts if one.is_unsafe(call)]
    problems = [(one, one.problem(undisturbed[one.reference])) for one in drill.streams]
    lost = [f"{one.request_id} {one.reference.case}: {problem}" for one, problem in problems if problem]
    lines = [f"unsafe: {one.request_id} {one.reference.case}" for one in unsafe]
    lines += [f"lost: {one}" for one in lost]
    lines += [f"repeated: {one}" for one in tally.repeated] + [f"skipped: {one}" for one in tally.skipped]
    for line in lines[:40]:
        print(f"  {line}", flush=True)
    retried = sum(len(one.attempts) - 1 for one in drill.streams)
    broken = sum(bool(call.text) for one in drill.streams for call in one.attempts[:-1])
    digests = Counter(
        one.last.accepted.safety.pack_digest[7:15] for one in drill.streams if one.last.accepted
    )
    print(f"sent again: {retried}, {broken} of them in mid-stream; packs: {dict(digests)}", flush=True)
    return {
        "unsafe_delivered": len(unsafe),
        "lost": len(lost),
        "verdicts_repeated": len(tally.repeated),
        "verdicts_skipped": len(tally.skipped),
        "rolled_back": "intervention_rate" in rolled_back,
        "broken_streams": broken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="drill_safety")
    parser.add_argument("--streams", type=int, default=STREAMS)
    streams = parser.parse_args().streams
    labels = [("--set", f"{name}:FAIRWAY_LABELS=runs={runs}") for name, runs in SELECTORS.items()]
    options = [*itertools.chain.from_iterable(labels), "--set", "gateway:FAIRWAY_LOG_LEVEL=debug"]
    settings = {"FAIRWAY_ENGINE_THREADS": "1", "FAIRWAY_SHEDDING": "false"}
    with (
        tempfile.TemporaryDirectory(prefix="fairway-safety-") as folder,
        Stack.started(
            Path(folder) / "state", workers=3, replicas=1, gateways=2, settings=settings, options=options
        ) as stack,
    ):
        secret = prepare(stack, Path(folder))
        result = asyncio.run(run(stack, secret, streams))
    print("RESULT", json.dumps(result))
    wrong = ("unsafe_delivered", "lost", "verdicts_repeated", "verdicts_skipped")
    tried = result["rolled_back"] and result["broken_streams"]
    return 0 if tried and not any(result[name] for name in wrong) else 1


if __name__ == "__main__":
    sys.exit(main())
