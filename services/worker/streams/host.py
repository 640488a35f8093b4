"""The sequences and rows of one worker: admission, and the table that runs each of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.core.errors import InvalidInput
from services.core.fixed_cost.rows import RowSpec
from services.core.fleet import TenantCounter
from services.core.generation import FallbackGrant, NotAdmittedReason, StartSpec
from services.core.poison.suspicion import LossCause
from services.core.records import SHARED_NODES, Priority
from services.core.rollouts.routes import Withdrawal
from services.ports.streams import StepFrame
from services.worker.streams.admission import FallbackAdmission, GrantFence
from services.worker.streams.charges import DeviceTime, Tally
from services.worker.streams.kv import PrefixSet
from services.worker.streams.live_row import LiveRow, RowTable
from services.worker.streams.live_sequence import WorkerSequence
from services.worker.streams.outbox import Outbox
from services.worker.streams.sequences import SequenceTable, ServedVersion

_MAX_LEFT: Final = 8


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A version whose engine has the weights of its successor, until the worker reports it no more."""

    withdrawal: Withdrawal
    until_s: float

    def refusal(self, spec: StartSpec) -> NotAdmittedReason:
        """Return why it is not started: its successor has its place, unless the version is deployed again."""
        is_older = spec.generation.route_revision < self.withdrawal.route_revision
        return NotAdmittedReason.STALE_ROUTE if is_older else NotAdmittedReason.NOT_READY


class SequenceHost:
    """Admits sequences on this worker. Implements ``ports.worker_stream.WorkerStreams``.

    ``changed`` is called whenever the worker's free capacity or its readiness changed.
    """

    def __init__(
        self,
        *,
        changed: Callable[[], None],
        not_admitted: Callable[[NotAdmittedReason], None] = lambda _: None,
        fallback: FallbackAdmission | None = None,
        device: DeviceTime | None = None,
    ) -> None:
        """Without ``fallback`` only a leader's grants are admitted; without ``device`` no device time is
        reported."""
        self._not_admitted = not_admitted
        self._fallback = fallback
        self.grants = GrantFence()
        self.tally = Tally()
        self.device = device
        self.counters = FairnessCounters()
        self.draining = False
        # Versions of which no request that was resolved at an older revision is started, by digest.
        self.withdrawals: Mapping[str, Withdrawal] = {}
        self.changed = changed
        # The node group whose sequences and rows alone are admitted, and the one that follows it.
        self.node_group = SHARED_NODES
        self._next_group = SHARED_NODES
        self._tables: dict[str, SequenceTable] = {}
        self._row_tables: dict[str, RowTable] = {}
        self._replaced: dict[str, _Replaced] = {}  # versions whose engines have other weights now
        self._replacing: set[str] = set()  # versions whose weights are about to go: none is admitted
        self._closed_to: set[str] = set()  # versions that finish their sequences and admit no new ones
        # Cached and shared prefixes of ended engines, by version.
        self._left_prefixes: dict[str, tuple[PrefixSet, PrefixSet]] = {}

    def note_change(self) -> None:
        """Call ``changed``, which may be replaced after construction."""
        self.changed()

    def on_leader(self, epoch: int) -> None:
        """Record a contact with a leader: reject grants of lower epochs, and fallback placements."""
        self.grants.on_leader(epoch)
        if self._fallback is not None:
            self._fallback.record_contact()

    def assign_group(self, node_group: str) -> None:
        """Admit sequences and rows of this group alone, once none of the present group runs.

        Until then none is admitted, so that no batch has members of two groups. Call it again until
        ``node_group`` is that group.
        """
        was = self.node_group, self._next_group
        self._next_group = node_group
        if not self.running:
            self.node_group = node_group
        if was != (self.node_group, self._next_group):
            self.changed()

    def _is_of_group(self, node_group: str) -> bool:
        return node_group == self.node_group == self._next_group

    def open(self, wake: Callable[[], None]) -> GatewaySequences:
        return GatewaySequences(self, wake)

    def add(self, table: SequenceTable) -> None:
        """Admit sequences for the table's version from now on."""
        self._serve(table, table.versions.first)

    def join(self, table: SequenceTable, version: ServedVersion) -> None:
        """Admit sequences for one more version of a table from now on."""
        table.versions.add(version)
        self._serve(table, version.version_digest)

    def replace(
        self, table: SequenceTable, withdrawal: Withdrawal, successor: ServedVersion, *, until_s: float
    ) -> None:
        """Admit sequences for the successor of a version whose weights are gone; none of that one runs.

        Until a time, by the monotonic clock, the version before is reported as one that takes sequences:
        those that wait for it in the scheduler's queue are then refused here, and get the successor.
        """
        self._closed_to.discard(withdrawal.version_digest)
        self._replacing.discard(withdrawal.version_digest)
        self._replaced[withdrawal.version_digest] = _Replaced(withdrawal, until_s)
        self.join(table, successor)

    def drop_replaced(self, table: SequenceTable) -> None:
        """Report the versions no more whose weights the table's engine had before."""
        for digest in [digest for digest in table.versions if digest in self._replaced]:
            self.leave(table, digest)

    def withdrawal_of(self, version_digest: str) -> Withdrawal:
        """Return what a refusal of the version with STALE_ROUTE names."""
        replaced = self._replaced.get(version_digest)
        return self.withdrawals[version_digest] if replaced is None else replaced.withdrawal

    def leave(self, table: SequenceTable, version_digest: str) -> None:
        """Remove one of several versions of a table; its remaining sequences end with ENGINE_LOST."""
        del self._tables[version_digest]
        self._replaced.pop(version_digest, None)
        self._closed_to.discard(version_digest)
        table.leave(version_digest)
        self.changed()

    def _serve(self, table: SequenceTable, version_digest: str) -> None:
        if version_digest in self._replaced:  # it comes back in an engine of its own
            self.leave(self._tables[version_digest], version_digest)
        assert version_digest not in self._tables, "the version has an engine already"
        self._tables[version_digest] = table
        self._closed_to.discard(version_digest)
        if (left := self._left_prefixes.pop(version_digest, None)) is not None:
            table.kv.cached.follow(left[0])
            table.kv.shared.reported.follow(left[1])
        self.changed()

    def remove(
        self, table: SequenceTable, cause: LossCause = LossCause.OUTSIDE, members: Collection[int] = ()
    ) -> None:
        """Remove a table; its remaining sequences end with ENGINE_LOST. ``members``: those of the step that
        ran."""
        if self._tables.get(table.versions.first) is table:
            for version_digest in table.versions:
                del self._tables[version_digest]
                self._replaced.pop(version_digest, None)
                self._replacing.discard(version_digest)
                self._closed_to.discard(version_digest)
            table.lost(cause, members)
            self._leave_prefixes(table)
            self.changed()

    def _leave_prefixes(self, table: SequenceTable) -> None:
        """Retain the reported prefixes, in case a version returns before a report without it."""
        for version_digest in table.versions:
            self._left_prefixes[version_digest] = table.kv.cached, table.kv.shared.reported
        while len(self._left_prefixes) > _MAX_LEFT:
            del self._left_prefixes[next(iter(self._left_prefixes))]

    def close_version(self, version_digest: str, closed: bool) -> None:
        """Stop, or resume, admitting new sequences of a loaded version."""
        (self._closed_to.add if closed else self._closed_to.discard)(version_digest)
        self.changed()

    def note_replacing(self, version_digest: str, replacing: bool) -> None:
        """Stop admitting sequences of a version whose weights are being replaced, or resume it."""
        (self._replacing.add if replacing else self._replacing.discard)(version_digest)
        self.changed()

    def least_route_revision(self, version_digest: str) -> int:
        """Return the revision from which on requests for a version are started; 0: any."""
        found = self.withdrawals.get(version_digest)
        return 0 if found is None else found.route_revision

    def takes(self, version_digest: str) -> bool:
        """Whether new sequences of the version are admitted if there is free capacity."""
        table, rows = self._tables.get(version_digest), self._row_tables.get(version_digest)
        if (table is None or table.stalled) and (rows is None or not rows.ready):
            return False
        closed = self.draining or version_digest in self._closed_to or version_digest in self._replacing
        return not closed and self.node_group == self._next_group

    def table(self, version_digest: str) -> SequenceTable | None:
        return self._tables.get(version_digest)

    def tables(self) -> Sequence[SequenceTable]:
        """Return each table once, whatever its versions."""
        return tuple(dict.fromkeys(self._tables.values()))

    def table_of(self, sequence: WorkerSequence) -> SequenceTable:
        return self._tables[sequence.spec.grant.version_digest]

    @property
    def running(self) -> int:
        return sum(map(len, self.tables())) + sum(map(len, self._row_tables.values()))

    def start(self, outbox: Outbox, handle: int, spec: StartSpec) -> NotAdmittedReason | None:
        """Start the sequence, or return why it is rejected. The grant counts as seen in both cases."""
        grant = spec.grant
        if isinstance(grant, FallbackGrant):
            refusal = self._fallback_refusal(grant)
        else:
            refusal = self.grants.check(grant)
        if refusal is None:
            refusal = self._refusal(spec)
        if refusal is None:
            table = self._tables[spec.grant.version_digest]
            if not table.start(outbox, handle, spec):
                refusal = NotAdmittedReason.NOT_READY
            elif self._fallback is not None and isinstance(grant, FallbackGrant):
                self._fallback.started()
        if refusal is not None:
            self._not_admitted(refusal)
            self.changed()  # the scheduler's estimate of the free capacity was wrong
        return refusal

    def start_row(self, outbox: Outbox, handle: int, spec: RowSpec) -> NotAdmittedReason | None:
        """Start the row, or return why it is rejected."""
        refusal = self._row_refusal(spec)
        if refusal is None:
            self._row_tables[spec.version_digest].start(outbox, handle, spec)
        else:
            self._not_admitted(refusal)
        self.changed()
        return refusal

    def sweep(self, now_s: float) -> None:
        """Apply the time limits of every table, and report the device's time when it is due."""
        for table in self._all_tables():
            table.sweep(now_s)
        for digest in [digest for digest, one in self._replaced.items() if now_s >= one.until_s]:
            self.leave(self._tables[digest], digest)
        if self.device is not None:
            self.device.sweep(now_s)

    def close(self) -> None:
        """Report the rest of the device's time, after the last engine has ended."""
        if self.device is not None:
            self.device.close()

    def reset_silence(self) -> None:
        """Reset the stall detection after a pause of this process, in which it read no messages."""
        for table in self._all_tables():
            table.reset_silence()

    def check_integrity(self) -> None:
        """Raise AssertionError when a table is inconsistent."""
        for table in self._all_tables():
            table.check_integrity()

    # --- rows -----------------------------------------------------------------------------------

    def add_rows(self, table: RowTable) -> None:
        """Admit rows for the table's version while it is ready."""
        assert table.version_digest not in self._row_tables, "the version has a batcher already"
        self._row_tables[table.version_digest] = table
        self._closed_to.discard(table.version_digest)
        self.changed()

    def remove_rows(self, table: RowTable) -> None:
        """Remove a table, which has ended its rows."""
        if self._row_tables.get(table.version_digest) is table:
            del self._row_tables[table.version_digest]
            self._closed_to.discard(table.version_digest)
            self.changed()

    def row_table(self, version_digest: str) -> RowTable | None:
        return self._row_tables.get(version_digest)

    def row_tables(self) -> Iterable[RowTable]:
        return self._row_tables.values()

    def _row_refusal(self, spec: RowSpec) -> NotAdmittedReason | None:
        if spec.incarnation != self.grants.incarnation or not spec.incarnation:
            return NotAdmittedReason.STALE_INCARNATION
        if 0 < spec.epoch < self.grants.epoch:
            return NotAdmittedReason.STALE_EPOCH
        if self.draining:
            return NotAdmittedReason.DRAINING
        table = self._row_tables.get(spec.version_digest)
        if table is None or not table.ready:
            return NotAdmittedReason.NOT_READY
        if not self._is_of_group(spec.node_group):
            return NotAdmittedReason.OTHER_NODE_GROUP
        if spec.route_revision < self.least_route_revision(spec.version_digest):
            return NotAdmittedReason.STALE_ROUTE
        if spec.version_digest in self._closed_to:
            return NotAdmittedReason.DRAINING
        if not table.has_room:
            return NotAdmittedReason.NO_ROOM
        if spec.epoch or (
            self._fallback is not None and self._fallback.takes_row(table.alone, table.row_slots)
        ):
            return None
        return NotAdmittedReason.NO_FALLBACK

    # --- inside ---------------------------------------------------------------------------------

    def _all_tables(self) -> tuple[SequenceTable | RowTable, ...]:
        return (*self.tables(), *self._row_tables.values())

    def _refusal(self, spec: StartSpec) -> NotAdmittedReason | None:
        if self.draining:
            return NotAdmittedReason.DRAINING
        digest = spec.grant.version_digest
        table = self._tables.get(digest)
        if table is None or spec.generation.version_digest != digest:
            return NotAdmittedReason.NOT_READY
        if not self._is_of_group(spec.node_group):
            return NotAdmittedReason.OTHER_NODE_GROUP
        if self._is_stale(spec):
            return NotAdmittedReason.STALE_ROUTE
        if (replaced := self._replaced.get(digest)) is not None:
            return replaced.refusal(spec)
        if digest in self._closed_to or digest in self._replacing:
            return NotAdmittedReason.DRAINING
        if table.stalled:
            return NotAdmittedReason.NOT_READY
        if not table.has_room(spec) or not table.kv.within_budget(spec):
            return NotAdmittedReason.NO_ROOM
        if isinstance(spec.grant, FallbackGrant) and not self._has_credit(table, spec):
            return NotAdmittedReason.NO_FALLBACK
        return None

    def _is_stale(self, spec: StartSpec) -> bool:
        """Whether the route that the request was resolved by is withdrawn. What has output goes on."""
        least = self.least_route_revision(spec.grant.version_digest)
        has_output = spec.produced_ids or spec.scored_tokens or spec.begun
        return spec.generation.route_revision < least and not has_output

    def _fallback_refusal(self, grant: FallbackGrant) -> NotAdmittedReason | None:
        if self._fallback is None:
            return NotAdmittedReason.NO_FALLBACK
        return self._fallback.refusal(grant, incarnation=self.grants.incarnation, epoch=self.grants.epoch)

    def _has_credit(self, table: SequenceTable, spec: StartSpec) -> bool:
        credit = 0 if self._fallback is None else self._fallback.credit_blocks(table.limits.kv_blocks_total)
        return table.kv.fallback_blocks + table.kv.needed_blocks(spec) <= credit


class GatewaySequences:
    """One gateway's stream. Implements ``ports.worker_stream.WorkerStream``."""

    def __init__(self, host: SequenceHost, wake: Callable[[], None]) -> None:
        self._host = host
        self._outbox = Outbox(wake)
        self._closed = False

    def start(self, handle: int, spec: StartSpec) -> None:
        self._check_unused(handle)
        refusal = self._host.start(self._outbox, handle, spec)
        self._answer(handle, refusal, spec.grant.version_digest)

    def start_row(self, handle: int, spec: RowSpec) -> None:
        self._check_unused(handle)
        refusal = self._host.start_row(self._outbox, handle, spec)
        self._answer(handle, refusal, spec.version_digest)

    def _answer(self, handle: int, refusal: NotAdmittedReason | None, version_digest: str) -> None:
        if refusal is NotAdmittedReason.STALE_ROUTE:
            self._outbox.withdraw(self._host.withdrawal_of(version_digest))
        if refusal is not None:
            self._outbox.refuse(handle, refusal)

    def _check_unused(self, handle: int) -> None:
        if handle in self._outbox.live or handle in self._outbox.rows:
            raise InvalidInput("the handle is in use on this stream", field="handle", handle=handle)

    def refuse(self, handle: int, reason: NotAdmittedReason) -> None:
        self._outbox.refuse(handle, reason)

    def credit(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        grants: dict[str, list[tuple[WorkerSequence, int]]] = {}
        live = self._outbox.live
        for handle, count in zip(handles, tokens, strict=False):
            if (sequence := live.get(handle)) is not None and count:
                grants.setdefault(sequence.spec.grant.version_digest, []).append((sequence, count))
        for digest, credited in grants.items():
            if (table := self._host.table(digest)) is not None:
                table.credit(credited)

    def cancel(self, handles: Sequence[int]) -> None:
        cancelled: dict[str, list[WorkerSequence]] = {}
        rows: dict[str, list[LiveRow]] = {}
        for handle in handles:
            if (row := self._outbox.drop_row(handle)) is not None:
                rows.setdefault(row.spec.version_digest, []).append(row)
            if (sequence := self._outbox.drop(handle)) is not None:
                cancelled.setdefault(sequence.spec.grant.version_digest, []).append(sequence)
        for digest, sequences in cancelled.items():
            if (table := self._host.table(digest)) is not None:
                table.cancel(sequences)
        for digest, dropped in rows.items():
            if (row_table := self._host.row_table(digest)) is not None:
                row_table.cancel(dropped)

    @property
    def only_accepted(self) -> bool:
        return self._outbox.only_accepted

    def take(self) -> StepFrame | None:
        return self._outbox.take()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.cancel([*self._outbox.live, *self._outbox.rows])


MAX_COUNTERS: Final = 4096


class FairnessCounters:
    """The latest counter of each tenant. Bounded: the least recently updated one is dropped."""

    def __init__(self, *, most: int = MAX_COUNTERS) -> None:
        self._most = most
        self._counters: dict[tuple[str, str, Priority], TenantCounter] = {}

    def store(self, counters: Iterable[TenantCounter]) -> None:
        """Store the leader's counters."""
        for counter in counters:
            key = counter.tenant, counter.digest, counter.priority
            self._counters.pop(key, None)
            self._counters[key] = counter
        while len(self._counters) > self._most:
            del self._counters[next(iter(self._counters))]

    def all(self) -> tuple[TenantCounter, ...]:
        return tuple(self._counters.values())
