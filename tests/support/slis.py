"""Service level indicators of a control plane: a store that a test fills, and what it is filled with."""

from __future__ import annotations

from collections.abc import Sequence

from services.controlplane.objectives.store import SliStore
from services.core.arms import ArmKey, SliKey, SliReport, SliSums
from services.core.records import Priority
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor
from tests.support.election import StaticElection
from tests.support.memory_ledger import MemoryLedger
from tests.support.waiting import until

DIGEST = "sha256:" + "a" * 64


class Measurements:
    """The indicators of a control plane, and the reports of one gateway to it."""

    def __init__(self, clock: Clock, *, leads: bool = True) -> None:
        self.election = StaticElection(1 if leads else None)
        self.store = SliStore(MemoryLedger(), clock, self.election, dict)
        self._clock = clock
        self._sent = 0

    async def start(self, supervisor: Supervisor) -> None:
        supervisor.spawn("indicators", self.store.run())
        await until(lambda: self.store.leads or self.election.epoch is None)

    def report(self, key: SliKey, sums: SliSums, *, age_s: float = 0.0) -> None:
        self._sent += 1
        report = SliReport(self._clock.unix_s() - age_s, {key: sums}, {})
        assert self.store.report("gateway", self._sent, 1, [report]).last == self._sent


def key_of(
    model: str = "chat",
    digest: str = DIGEST,
    tenant: str = "acme",
    priority: Priority = Priority.STANDARD,
    zone: str = "a",
) -> SliKey:
    return SliKey(ArmKey(model, digest), tenant, priority, zone)


def sums_of(ttft_s: Sequence[float] = (), itl_s: Sequence[float] = (), **counts: int) -> SliSums:
    """Return sums with these latencies; the prompts differ in size."""
    sums = SliSums(**counts)  # type: ignore[arg-type]
    for at, value in enumerate(ttft_s):
        sums.ttft_of(at % 3).add(value)
    for value in itl_s:
        sums.itl.add(value)
    return sums
