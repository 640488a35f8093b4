"""Which rows a worker admits, who it is leased to, and how their ends leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from services.core.errors import InvalidInput
from services.core.fixed_cost.rows import RawTensor, RowEnd, RowSpec
from services.core.fleet import PoolSnapshot, TenantTokens
from services.core.generation import NotAdmittedReason
from services.core.records import Priority
from services.core.rollouts.routes import Withdrawal
from services.worker.agent.report import WorkerIdentity, take_snapshot
from services.worker.streams.admission import FallbackAdmission, FallbackRules
from services.worker.streams.charges import Tally
from services.worker.streams.host import SequenceHost
from services.worker.streams.live_row import LiveRow
from services.worker.streams.outbox import MAX_FRAME_ROW_BYTES, Outbox
from tests.support.clocks import HandClock

DIGEST = "sha256:" + "e" * 64
SPEC = RowSpec("r1", 0, "t1", DIGEST, (), Priority.STANDARD, route_revision=3, incarnation=5, epoch=2)


@dataclass
class Table:
    """Implements ``RowTable``: keeps its rows."""

    version_digest: str = DIGEST
    ready: bool = True
    has_room: bool = True
    row_slots: int = 16
    rows: list[LiveRow] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    @property
    def alone(self) -> int:
        return sum(not row.spec.epoch for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def start(self, outbox: Outbox, handle: int, spec: RowSpec) -> None:
        row = LiveRow(spec, outbox, handle, len(self.rows), 0.0, 0.0)
        outbox.rows[handle] = row
        self.rows.append(row)

    def cancel(self, rows: Sequence[LiveRow]) -> None:
        self.cancelled += [row.handle for row in rows]

    def sweep(self, now_s: float) -> None: ...

    def reset_silence(self) -> None: ...

    def report(self, *, ready: bool) -> PoolSnapshot:
        return PoolSnapshot(self.version_digest, 0, 0, 1, 0, len(self), 0, 0, ready=ready, row_slots=400)

    def check_integrity(self) -> None: ...


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def host(table: Table) -> SequenceHost:
    host = SequenceHost(changed=lambda: None)
    host.grants.registered(5)
    host.on_leader(2)
    host.add_rows(table)
    return host


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"incarnation": 4}, NotAdmittedReason.STALE_INCARNATION),
        ({"incarnation": 0}, NotAdmittedReason.STALE_INCARNATION),
        ({"epoch": 1}, NotAdmittedReason.STALE_EPOCH),
        ({"version_digest": "sha256:other"}, NotAdmittedReason.NOT_READY),
        ({"route_revision": 2}, NotAdmittedReason.STALE_ROUTE),
        ({"epoch": 0}, NotAdmittedReason.NO_FALLBACK),  # a leader answers
        ({}, None),
    ],
)
def test_a_row_of_another_life_leader_or_route_is_not_admitted(
    fields: dict[str, Any], reason: NotAdmittedReason | None, host: SequenceHost, table: Table
) -> None:
    host.withdrawals = {DIGEST: Withdrawal(DIGEST, 3)}
    stream = host.open(lambda: None)
    stream.start_row(1, structs.replace(SPEC, **fields))
    frame = stream.take()
    assert (frame.not_admitted if frame is not None else []) == ([] if reason is None else [(1, reason)])
    assert len(table) == (reason is None)


def test_rows_without_a_leader_have_a_part_of_the_slots(host: SequenceHost, table: Table) -> None:
    clock = HandClock()
    host._fallback = FallbackAdmission(clock, FallbackRules(after_s=1.5, credit_ratio=0.25))
    host.on_leader(3)
    alone, outbox = structs.replace(SPEC, epoch=0), Outbox(lambda: None)
    clock.now_s += 1.4
    assert host.start_row(outbox, 1, alone) is NotAdmittedReason.NO_FALLBACK
    clock.now_s += 0.2
    for handle in range(4):
        assert host.start_row(outbox, handle, alone) is None
    assert host.start_row(outbox, 9, alone) is NotAdmittedReason.NO_FALLBACK
    assert host.start_row(outbox, 9, structs.replace(SPEC, epoch=3)) is None
    host.on_leader(3)
    table.rows.clear()
    assert host.start_row(outbox, 10, alone) is NotAdmittedReason.NO_FALLBACK


def test_a_worker_that_drains_is_full_or_restarts_admits_none(host: SequenceHost, table: Table) -> None:
    table.has_room = False
    assert host.start_row(Outbox(lambda: None), 1, SPEC) is NotAdmittedReason.NO_ROOM
    host.close_version(DIGEST, True)
    assert host.start_row(Outbox(lambda: None), 1, SPEC) is NotAdmittedReason.DRAINING
    table.ready = False
    assert host.start_row(Outbox(lambda: None), 1, SPEC) is NotAdmittedReason.NOT_READY
    assert not host.takes(DIGEST)
    host.draining = True
    assert host.start_row(Outbox(lambda: None), 1, SPEC) is NotAdmittedReason.DRAINING


def test_a_handle_is_of_one_row_and_a_cancel_reaches_its_table(host: SequenceHost, table: Table) -> None:
    stream = host.open(lambda: None)
    stream.start_row(1, SPEC)
    with pytest.raises(InvalidInput):
        stream.start_row(1, SPEC)
    stream.start_row(2, SPEC)
    stream.start_row(3, SPEC)
    assert host.running == 3
    table.rows[1].end(RowEnd())
    stream.cancel([1, 2, 99])
    assert table.cancelled == [1]
    assert stream.take() is None, "a cancelled row is named no more"
    stream.close()
    assert table.cancelled == [1, 3]


def test_ends_leave_in_frames_of_bounded_size(host: SequenceHost, table: Table) -> None:
    stream = host.open(lambda: None)
    outputs = (RawTensor("x", "FP32", (1,), bytes(MAX_FRAME_ROW_BYTES // 2)),)
    for handle in range(1, 4):
        stream.start_row(handle, SPEC)
    for row in table.rows:
        row.end(RowEnd(outputs))
    frames = [frame.rows for frame in iter(stream.take, None)]
    assert [[handle for handle, _ in rows] for rows in frames] == [[1, 2], [3]]


def test_the_report_has_the_pool_and_what_tenants_used(host: SequenceHost) -> None:
    host.tally.add_rows(("t1", DIGEST, Priority.BATCH), 2, 0.001)
    host.tally.add_rows(("t1", DIGEST, Priority.BATCH), 1, 0.0005)
    report = take_snapshot(host, WorkerIdentity("w1", "a:1"), whole=True)
    assert [pool.row_slots for pool in report.pools] == [400]
    assert report.tenants == (TenantTokens("t1", DIGEST, 0, 0, Priority.BATCH, 0, 3, 1500),)
    assert Tally().take(1) == ()
