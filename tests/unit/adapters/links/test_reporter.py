"""The reporter over local links: what a leader hears, in which order, and what a new stream begins with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from services.adapters.links.report_deltas import DeltaKeeper, PrefixBacklog
from services.adapters.links.reporter import Reporter, ReporterSettings
from services.core.errors import FairwayError, InvalidInput, NoLeader
from services.core.fleet import PoolSnapshot, ReportSnapshot, TenantCounter, TenantTokens
from services.core.records import Priority
from services.ports.streams import ReportAnswer
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.support.local_reports import LocalReportLinks
from tests.support.waiting import until

COUNTER = TenantCounter("a", "d", Priority.STANDARD, 5.0)
POOL = PoolSnapshot("d", 64, 0, 16, 0, 0, 8, 1024)
ROWS = replace(POOL, digest="r", kv_blocks_total=0, max_sequences=0, row_slots=400)


class Leader:
    """A scheduler of this process. Implements ``ReportStreams``; it answers when the test says so."""

    def __init__(self) -> None:
        self.epoch = 0
        self.streams: list[LeaderStream] = []

    def open_report(self, wake: Callable[[], None]) -> LeaderStream:
        if not self.epoch:
            raise NoLeader("this scheduler does not lead")
        self.streams.append(LeaderStream(self.epoch, wake))
        return self.streams[-1]


class LeaderStream:
    def __init__(self, epoch: int, wake: Callable[[], None]) -> None:
        self.epoch = epoch
        self.reports: list[ReportSnapshot] = []
        self.closed = False
        self._wake = wake
        self._answers: list[ReportAnswer] = []
        self._error: FairwayError | None = None

    def report(self, number: int, snapshot: ReportSnapshot) -> None:
        if self._error is not None and not isinstance(self._error, InvalidInput):  # a refusal is an answer
            raise self._error
        self.reports.append(snapshot)
        assert number == len(self.reports)

    def take(self) -> ReportAnswer | None:
        if self._error is not None:
            raise self._error
        return self._answers.pop(0) if self._answers else None

    def close(self) -> None:
        self.closed = True

    def reported_beyond(self, number: int) -> bool:
        return len(self.reports) > number

    def answer(self, answer: ReportAnswer) -> None:
        self._answers.append(answer)
        self._wake()

    def fail(self, error: FairwayError) -> None:
        self._error = error
        self._wake()


class Worker:
    def __init__(self) -> None:
        self.happened: list[str] = []
        self.counters: list[TenantCounter] = []
        self.seen: list[int] = []
        self.prefixes: list[int] = []
        self.incarnation = 100
        self.pools: tuple[PoolSnapshot, ...] = (POOL,)
        self.tokens: tuple[TenantTokens, ...] = ()

    def snapshot(self, whole: bool) -> ReportSnapshot:
        self.happened.append("whole" if whole else "changes")
        seen, self.seen = tuple(self.seen), []
        added, self.prefixes = tuple(self.prefixes), []
        tokens, self.tokens = self.tokens, ()
        pools = tuple(replace(pool, prefix_added=added) for pool in self.pools)
        return ReportSnapshot(
            "w", self.incarnation, "h:1", pools=pools, epoch=3, grants_seen=seen, tenants=tokens
        )

    def on_leader(self, epoch: int) -> None:
        self.happened.append(f"epoch {epoch}")


@asynccontextmanager
async def reporting(
    leader: Leader,
    worker: Worker,
    deltas: DeltaKeeper | None = None,
    *,
    answer_s: float = 20.0,
    rows_gap_s: float = 0.001,
) -> AsyncGenerator[Reporter, None]:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    reporter = Reporter(
        LocalReportLinks(leader, clock),
        clock,
        supervisor,
        worker.snapshot,
        on_leader=worker.on_leader,
        on_counters=worker.counters.extend,
        settings=ReporterSettings(
            gap_s=0.002,
            tight_gap_s=0.001,
            rows_gap_s=rows_gap_s,
            beat_s=0.02,
            max_unanswered=4,
            answer_s=answer_s,
        ),
        rng=Random(1),
        deltas=deltas,
    )
    reporter.start()
    try:
        yield reporter
    finally:
        await reporter.close()
        await supervisor.close()
        assert supervisor.healthy


@pytest.fixture
def leader() -> Leader:
    made = Leader()
    made.epoch = 3
    return made


async def test_a_leader_is_heard_before_the_first_snapshot_which_is_whole(leader: Leader) -> None:
    worker = Worker()
    async with reporting(leader, worker) as reporter:
        await until(lambda: leader.streams and len(leader.streams[0].reports) > 1)
        assert worker.happened[:3] == ["epoch 3", "whole", "changes"]
        assert reporter.last_epoch == 3
        leader.streams[0].answer(ReportAnswer(3, 1, (COUNTER,)))
        await until(lambda: worker.counters)
        assert worker.counters == [COUNTER]
    assert leader.streams[0].closed


async def test_a_new_stream_begins_whole_with_what_was_not_answered(leader: Leader) -> None:
    worker = Worker()
    worker.seen = [7]
    async with reporting(leader, worker):
        await until(lambda: leader.streams and len(leader.streams[0].reports) > 1)
        leader.streams[0].answer(ReportAnswer(3, 1))
        worker.seen = [8]
        await until(lambda: any(8 in report.grants_seen for report in leader.streams[0].reports))
        leader.epoch = 3
        leader.streams[0].fail(NoLeader("it is over"))
        await until(lambda: len(leader.streams) > 1 and leader.streams[1].reports)
        assert leader.streams[1].reports[0].grants_seen == (8,)
        assert worker.happened.count("whole") == 2


async def test_reports_stop_while_none_is_answered(leader: Leader) -> None:
    worker = Worker()
    async with reporting(leader, worker):
        await until(lambda: leader.streams and len(leader.streams[0].reports) == 4)
        await asyncio.sleep(0.1)
        assert len(leader.streams[0].reports) == 4
        leader.streams[0].answer(ReportAnswer(3, 4))
        await until(lambda: len(leader.streams[0].reports) > 4)


async def test_an_older_leader_is_not_followed(leader: Leader) -> None:
    worker = Worker()
    async with reporting(leader, worker) as reporter:
        await until(lambda: leader.streams and leader.streams[0].reports)
        leader.epoch = 2
        leader.streams[0].fail(NoLeader("it is over"))
        await until(lambda: len(leader.streams) > 2)
        assert not any(stream.reports for stream in leader.streams[1:])
        assert "epoch 2" not in worker.happened
        leader.epoch = 4
        await until(lambda: reporter.last_epoch == 4)


async def test_a_worker_without_an_incarnation_reports_nothing_and_loses_nothing(leader: Leader) -> None:
    worker = Worker()
    worker.incarnation = 0
    worker.seen = [5]
    async with reporting(leader, worker) as reporter:
        await until(lambda: worker.happened.count("whole") > 2)
        assert not leader.streams[0].reports
        worker.incarnation = 101
        reporter.changed()
        await until(lambda: leader.streams[0].reports)
        assert leader.streams[0].reports[0].grants_seen == (5,)


async def test_prefix_changes_that_overflow_end_the_stream_for_a_whole_one(leader: Leader) -> None:
    worker = Worker()
    deltas = DeltaKeeper(prefixes=PrefixBacklog(max_pool_changes=1, max_kept=2))
    async with reporting(leader, worker, deltas):
        await until(lambda: leader.streams and leader.streams[0].reports)
        worker.prefixes = [1, 2, 3, 4, 5]
        await until(lambda: len(leader.streams) > 1 and leader.streams[1].reports)
        assert leader.streams[0].closed
        assert worker.happened.count("whole") == 2


async def test_a_leader_that_beats_and_answers_no_report_is_given_up(leader: Leader) -> None:
    """Its beats alone keep no stream; what it did not answer goes into the next."""
    worker = Worker()
    worker.seen = [7]
    async with reporting(leader, worker, answer_s=0.05):
        await until(lambda: leader.streams and leader.streams[0].reports)

        def beat() -> bool:
            if len(leader.streams) == 1:
                leader.streams[0].answer(ReportAnswer(3, 0))
            return len(leader.streams) > 1 and len(leader.streams[1].reports) > 0

        await until(beat)
        assert leader.streams[0].closed
        assert leader.streams[1].reports[0].grants_seen == (7,)


async def test_a_few_beats_of_the_past_end_no_stream(leader: Leader) -> None:
    """After a pause of this process, beats that came before the answer are read late."""
    worker = Worker()
    async with reporting(leader, worker, answer_s=0.0):
        await until(lambda: leader.streams and leader.streams[0].reports)
        for _ in range(50):
            stream, reported = leader.streams[0], len(leader.streams[0].reports)
            for number in (reported - 1, reported - 1, reported):
                stream.answer(ReportAnswer(3, number))
            await until(partial(stream.reported_beyond, reported))
        assert len(leader.streams) == 1


@pytest.mark.parametrize("used", [0, 299])
async def test_a_worker_of_rows_alone_with_room_reports_at_their_gap(leader: Leader, used: int) -> None:
    worker = Worker()
    worker.pools = (replace(ROWS, running=used),)
    async with reporting(leader, worker, rows_gap_s=3600.0) as reporter:
        await until(lambda: leader.streams and leader.streams[0].reports)
        for _ in range(20):
            reporter.changed()
            await asyncio.sleep(0.005)
        assert len(leader.streams[0].reports) == 1


@pytest.mark.parametrize(
    "pools", [(), (POOL, ROWS), (replace(ROWS, running=200, waiting=100),)], ids=["none", "both", "full"]
)
async def test_a_full_worker_one_with_sequences_and_one_without_versions_do_not_wait_for_the_gap_of_rows(
    leader: Leader, pools: tuple[PoolSnapshot, ...]
) -> None:
    worker = Worker()
    worker.pools = pools
    async with reporting(leader, worker, rows_gap_s=3600.0):
        await until(lambda: leader.streams and len(leader.streams[0].reports) > 1)


async def test_a_report_that_every_link_refuses_is_dropped_and_counted() -> None:
    leader, worker = Leader(), Worker()
    deltas = DeltaKeeper()
    used = TenantTokens("a", "d", 7, 5, Priority.STANDARD, 0, 0, 0)
    leader.epoch = 1
    worker.tokens = (used,)
    async with reporting(leader, worker, deltas):
        for number in range(5):
            stream = await nth_stream(leader, number)
            assert not deltas.tokens_dropped
            stream.fail(InvalidInput("tenants[0].prefill_tokens is too large"))
        stream = await nth_stream(leader, 5)
        assert deltas.tokens_dropped == 12
        assert stream.reports[0].tenants == ()


async def nth_stream(leader: Leader, number: int) -> LeaderStream:
    """Return a stream that received a report."""
    await until(lambda: len(leader.streams) > number and bool(leader.streams[number].reports))
    return leader.streams[number]
