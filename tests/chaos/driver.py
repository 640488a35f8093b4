"""Runs drills against a fleet: traffic, fault, healing, and everything that must hold afterwards."""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from fairway.v1 import inference_pb2 as pb
from services.core.errors import FairwayError
from tests.chaos.checker import (
    Allowance,
    Reference,
    judge,
    process_leaks,
    still_taken,
    unhealed,
)
from tests.chaos.drills import Drill
from tests.chaos.faults import FillDisk, Lift, inject
from tests.chaos.fleet import Fleet
from tests.chaos.load import Client, Spec, Traffic, now_s
from tests.chaos.outcome import End, Outcome
from tests.chaos.report import Row
from tests.support.stack import metadata

NEAR_TIE: Final = 1e-3
STREAMING: Final = 3  # streams under way before the fault
WARM_S: Final = 20.0
AFTER_S: Final = 2.0
REST_S: Final = 12.0
PROBE_S: Final = 10.0
POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Bench:
    """What all drills of a run share. ``keys``: the API key of each drill's tenant, by drill."""

    fleet: Fleet
    client: Client
    specs: Sequence[Spec]
    references: Mapping[int, Reference]
    keys: Mapping[str, str]
    seed: int
    rate_per_s: float
    patience: float

    async def run(self, drill: Drill) -> Row:
        """Return the row of one drill. What goes wrong is in it, not raised."""
        row = Row(drill.name, limits=(drill.silence_s * self.patience, drill.heal_s * self.patience))
        if any(isinstance(fault, FillDisk) for fault in drill.faults) and not self.fleet.small_disk:
            row.skipped = "a small disk can be mounted by root only"
            return row
        key = self.keys[drill.name]
        seed = zlib.crc32(f"{self.seed}/{drill.name}".encode())
        traffic = Traffic(self.client, self.specs, key, seed=seed, rate_per_s=self.rate_per_s)
        traffic.start()
        try:
            await self._disturb(drill, row, traffic, key)
        except (AssertionError, OSError, RuntimeError, grpc.aio.AioRpcError, FairwayError) as error:
            row.wrong.append(f"the drill itself failed: {error!r}")
        finally:
            await traffic.stop()
        await self._judge(drill, row, traffic.outcomes, key)
        await self._rest(drill, row)
        return row

    async def _disturb(self, drill: Drill, row: Row, traffic: Traffic, key: str) -> None:
        await until(lambda: _is(traffic.streaming >= STREAMING, "no streams"), WARM_S * self.patience)
        before = {target: await self.fleet.pid_of(target) for target in drill.replaced}
        lifts: list[Lift] = []
        try:
            for fault in drill.faults:
                what, lift = await inject(fault, self.fleet)
                lifts.append(lift)
                row.what.append(what)
            await asyncio.sleep(drill.hold_s)
        finally:
            for lift in reversed(lifts):
                await lift()
        lifted_s = now_s()
        missing = await until(lambda: self._healed(before, key), drill.heal_s * self.patience)
        row.heal_s = now_s() - lifted_s
        if missing:
            row.wrong.append(f"not healed after {row.heal_s:.1f} s: {missing}")
        await asyncio.sleep(AFTER_S)

    async def _healed(self, before: Mapping[str, int], key: str) -> str:
        """Return what is missing until the fleet is whole again, "" when nothing is."""
        absent = set(self.fleet.expected_processes()) - set(self.fleet.pids())
        if absent:
            return f"{', '.join(sorted(absent))} does not run"
        for target, pid in before.items():
            if await self.fleet.pid_of(target) == pid:
                return f"{target} is still process {pid}"
        missing = unhealed(await self.fleet.holdings(), replicas=self.fleet.options.replicas)
        if missing:
            return missing
        probes = [self._probe(gateway, key) for gateway in self.client.names]
        return "; ".join(filter(None, await asyncio.gather(*probes)))

    async def _probe(self, gateway: str, key: str) -> str:
        outcome = await self.client.run(
            self.specs[1], key, gateway=gateway, timeout_s=PROBE_S * self.patience
        )
        if outcome.end is not End.FINISHED:
            return f"a probe by {gateway} ended with {outcome.end} {outcome.reason} {outcome.message}"
        return f"{gateway} did not answer itself" if outcome.moves else ""

    async def _judge(self, drill: Drill, row: Row, outcomes: list[Outcome], key: str) -> None:
        allowance = Allowance(
            drill.silence_s * self.patience, frozenset(drill.gateways), frozenset(drill.reasons)
        )
        verdict = judge(outcomes, self.references, allowance)
        row.requests = len(outcomes)
        row.finished = sum(outcome.end is End.FINISHED for outcome in outcomes)
        row.resumed = sum(outcome.resumes > 0 for outcome in outcomes)
        row.moved = sum(outcome.moves > 0 for outcome in outcomes)
        row.deferred = sum(outcome.deferrals > 0 for outcome in outcomes)
        row.parted, row.silence_s = len(verdict.parted), verdict.longest_silence_s
        row.lost, row.wrong = verdict.lost, row.wrong + verdict.wrong
        if not row.finished:
            row.wrong.append("no request finished: the drill shows nothing")
        sampled = 0
        for outcome in verdict.parted:
            if not self.references[outcome.spec].greedy:
                sampled += 1  # a draw on the boundary between two tokens may fall to either
                continue
            margin = await self._margin(outcome, key)
            if margin >= NEAR_TIE:
                row.wrong.append(
                    f"request {outcome.number} has other tokens than the undisturbed run, at a margin of"
                    f" {margin:g}, after {outcome.resumes} resumes"
                )
        if sampled > max(1, row.resumed // 8):
            row.wrong.append(f"{sampled} sampled requests have other tokens than the undisturbed run")

    async def _margin(self, outcome: Outcome, key: str) -> float:
        """Return how far apart, in log probability, the tokens are where they first differ."""
        left, right = outcome.ids, self.references[outcome.spec].ids
        place = next(
            (at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None
        )
        if place is None:
            return math.inf
        generation = self.specs[outcome.spec].generation(self.client.model, place + 1)
        generation.logprobs = 20
        answer = await self.client.stub(self.client.names[0]).Complete(
            pb.CompleteRequest(generation=generation), metadata=metadata(key), timeout=60
        )
        at = answer.choices[0].logprobs[place]
        found = dict(zip(at.top_ids, at.top_logprobs, strict=True))
        return abs(found.get(left[place], -math.inf) - found.get(right[place], math.inf))

    async def _rest(self, drill: Drill, row: Row) -> None:
        """Nothing runs any more: nothing may be held, and no process may be there that should not."""

        async def free() -> str:
            if taken := still_taken(await self.fleet.holdings()):
                return taken
            grants = await self.fleet.grants_outstanding()
            return f"the scheduler counts {grants} grants as outstanding" if grants else ""

        async def whole() -> str:
            leaks = process_leaks(self.fleet.found_processes(), self.fleet.expected_processes())
            return "; ".join(leaks)

        for check in (free, whole):
            if missing := await until(check, REST_S * self.patience):
                row.leaks.append(missing)

    async def slots_free(self, drill: Drill, row: Row) -> None:
        """Note when Redis holds no slot of the drill's tenant; runs beside the drills that follow."""
        began_s = now_s()

        async def none() -> str:
            held = await self.fleet.limiter.concurrency(drill.name)
            return f"{held} slots of {drill.name} are held" if held else ""

        missing = await until(none, drill.slots_s * self.patience)
        row.slots_s = now_s() - began_s
        if missing:
            row.leaks.append(f"{missing} after {row.slots_s:.0f} s")


async def until(missing: Callable[[], Awaitable[str]], timeout_s: float) -> str:
    """Return "" once nothing is missing, else what still is after ``timeout_s``."""
    deadline_s = now_s() + timeout_s
    while True:
        try:
            found = await missing()
        except (grpc.aio.AioRpcError, FairwayError, LookupError, OSError, AssertionError) as error:
            found = f"it does not answer: {error!r:.300}"
        if not found or now_s() >= deadline_s:
            return found
        await asyncio.sleep(POLL_S)


async def _is(condition: bool, otherwise: str) -> str:
    return "" if condition else otherwise


@contextmanager
def state_root(given: str, name: str) -> Iterator[Path]:
    """Yield the folder of a run's logs and state: the given one, or one that is removed afterwards."""
    root = Path(given or tempfile.mkdtemp(prefix=f"fairway-{name}-"))
    try:
        yield root
    finally:
        if not given:
            shutil.rmtree(root, ignore_errors=True)
