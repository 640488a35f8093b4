"""Workers with a bug each."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from services.core.generation import FinishReason, Grant, NotAdmittedReason, StartSpec
from services.core.poison.suspicion import LossCause, StepRole
from services.worker.slots.version_slot import VersionSlot
from services.worker.streams.admission import FallbackAdmission, FallbackRules, GrantFence
from services.worker.streams.charges import UsageAccounting
from services.worker.streams.host import SequenceHost
from services.worker.streams.live_sequence import WorkerSequence
from services.worker.streams.outbox import Outbox
from services.worker.streams.sequences import SequenceTable
from simulator.fleet.nodes.worker_node import WorkerNode


class TakesEveryGrant(WorkerNode):
    """Starts whatever a gateway shows: grants of earlier lives, of earlier leaders, and used ones."""

    def make_host(self) -> SequenceHost:
        host = super().make_host()
        host.grants = _NoBook()
        return host


class TakesWhatNobodyGranted(WorkerNode):
    """Starts what a gateway placed by itself, whatever leader it hears."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        rules = FallbackRules(after_s=0.0)
        return SequenceHost(changed=made.changed, fallback=FallbackAdmission(self.process.clock, rules))


class GivesUnboundedCredit(WorkerNode):
    """Lets gateways place on all that it has."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        rules = FallbackRules(credit_ratio=1.0)
        return SequenceHost(changed=made.changed, fallback=FallbackAdmission(self.process.clock, rules))


class BooksTooMuch(WorkerNode):
    """Reserves a block that belongs to no sequence with each one that it starts."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Greedy(changed=made.changed)


class AsksNoProbe(WorkerNode):
    """Takes requests for whatever version has loaded."""

    def start(self) -> None:
        self.worker.agent._slots = _Trusted()
        super().start()


class ForgetsDeviceTime(WorkerNode):
    """Reports no share of the steps that were under way when a sequence ended."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Forgetting(changed=made.changed, device=made.device)


class LosesSequences(WorkerNode):
    """Forgets to tell of the sequences of an engine that is gone."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Forgetful(changed=made.changed)


class _NoBook(GrantFence):
    def check(self, grant: Grant) -> NotAdmittedReason | None:
        super().check(grant)
        return None


class _Greedy(SequenceHost):
    def start(self, outbox: Outbox, handle: int, spec: StartSpec) -> NotAdmittedReason | None:
        refusal = super().start(outbox, handle, spec)
        if refusal is None:
            self._tables[spec.grant.version_digest].kv.blocks += 1
        return refusal


class _Forgetting(SequenceHost):
    def add(self, table: SequenceTable) -> None:
        table.charges = _AtOnce(self.tally, self.device)
        super().add(table)


class _AtOnce(UsageAccounting):
    def add_ended(self, sequence: WorkerSequence, reason: FinishReason, now_s: float) -> None:
        super().add_ended(sequence, reason, now_s)
        self.settle((sequence.number,))


class _Forgetful(SequenceHost):
    def remove(
        self, table: SequenceTable, cause: LossCause = LossCause.OUTSIDE, members: Collection[int] = ()
    ) -> None:
        self._tables.pop(table.versions.first, None)
        self.changed()


class StartsWhileDraining(WorkerNode):
    """Takes new sequences although it drains."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Undrained(changed=made.changed)


class StartsClosedVersions(WorkerNode):
    """Closes its version for a moment after each start, and takes new sequences of it all the same."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Reopened(changed=made.changed)


class BooksTooMuchForAMoment(WorkerNode):
    """Reserves a block that belongs to no sequence with each one that it starts, and frees it soon after."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Healing(changed=made.changed)


class BooksTooMuchNowAndThen(WorkerNode):
    """Has a block too much for a moment, twice a second, whether anything starts or ends or not."""

    def start(self) -> None:
        super().start()
        self.process.supervisor.spawn("bug", self._now_and_then())

    async def _now_and_then(self) -> None:
        while True:
            await self.process.clock.sleep(0.5)
            for table in self.host.tables():
                _book(table, 1)
                await self.process.clock.sleep(HEALED_S)
                _book(table, -1)


HEALED_S = 0.01


class _Undrained(SequenceHost):
    def _refusal(self, spec: StartSpec) -> NotAdmittedReason | None:
        draining, self.draining = self.draining, False
        try:
            return super()._refusal(spec)
        finally:
            self.draining = draining


class _Reopened(SequenceHost):
    def _refusal(self, spec: StartSpec) -> NotAdmittedReason | None:
        self._closed_to.clear()
        refusal = super()._refusal(spec)
        self._closed_to.add(spec.grant.version_digest)
        return refusal


class _Healing(SequenceHost):
    def start(self, outbox: Outbox, handle: int, spec: StartSpec) -> NotAdmittedReason | None:
        refusal = super().start(outbox, handle, spec)
        if refusal is None:
            table = self._tables[spec.grant.version_digest]
            _book(table, 1)
            asyncio.get_running_loop().call_later(HEALED_S, _book, table, -1)
        return refusal


def _book(table: SequenceTable, blocks: int) -> None:
    table.kv.blocks += blocks


class TakesKillsForFaults(WorkerNode):
    """Reports an engine that was killed from outside as one that ended by itself."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Blaming(changed=made.changed, device=made.device)


class _Blaming(SequenceHost):
    def remove(
        self, table: SequenceTable, cause: LossCause = LossCause.OUTSIDE, members: Collection[int] = ()
    ) -> None:
        super().remove(table, LossCause.FAULT, members)


class BlamesBystanders(WorkerNode):
    """Reports each sequence of an engine that ended as the only one that it computed."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _BlamingAll(changed=made.changed, device=made.device)


class _BlamingAll(SequenceHost):
    def add(self, table: SequenceTable) -> None:
        super().add(table)
        table.__class__ = _EachAlone


class _EachAlone(SequenceTable):
    def _lose_all(self, cause: LossCause, members: Collection[int]) -> None:
        for sequence in list(self._live.values()):
            self._end(sequence, FinishReason.ENGINE_LOST, loss=(cause, StepRole.ALONE))


class _Trusted(dict[str, VersionSlot]):
    def setdefault(self, digest: str, slot: VersionSlot) -> VersionSlot:
        slot.probed = True
        return super().setdefault(digest, slot)
