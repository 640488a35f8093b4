"""What a worker tells again, since no answer came, is charged once."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.adapters.links.report_deltas import DeltaKeeper
from services.core.fleet import PoolSnapshot, ReportSnapshot, SequenceUsage, TenantTokens
from services.core.records import Priority
from services.scheduler.term import Term
from services.scheduler.term_streams import Report
from tests.unit.scheduler.model import DIGEST, SETTINGS, ManualClock

POOL = PoolSnapshot(DIGEST, 64, 0, 16, 0, 0, 8, 1024)
MAX_REPORTS = 64  # without an answer; so many may be told again one by one


@dataclass
class Worker:
    """Reports to a term over streams that break; the test says which reports and answers arrive."""

    term: Term
    keeper: DeltaKeeper = field(default_factory=DeltaKeeper)
    produced: int = 0
    ended: int = 0

    def connect(self) -> None:
        self.keeper.stream_opened()
        self.reporter = self.term.streams.open_reporter(lambda: None)

    def lose_stream(self) -> None:
        self.term.streams.close_reporter(self.reporter)
        self.term.step()
        self.connect()

    def report(self, output: int = 0, *, arrives: bool = True, answered: bool = True) -> None:
        self.produced += output
        usage: tuple[SequenceUsage, ...] = ()
        if output:
            self.ended += 1
            usage = (SequenceUsage(f"r{self.ended}", 0, "acme", DIGEST, 8, output, ended=True),)
        tokens = (TenantTokens("acme", DIGEST, 0, output),) if output else ()
        epoch = self.term.epoch
        snapshot = ReportSnapshot("w1", 100, "w1:1", pools=(POOL,), epoch=epoch, tenants=tokens, usage=usage)
        number, report = self.keeper.next_report(snapshot)
        if arrives:
            self.term.streams.send(Report(self.reporter, number, report))
            self.term.step()
            if answered:
                assert self.reporter.applied == number
                self.keeper.confirm(number)

    def settle(self) -> None:
        """All that is to be told again is told, and answered."""
        for _ in range(2 * MAX_REPORTS):
            self.report()

    @property
    def charged(self) -> float:
        """Output tokens that the tenant was charged for; an output token weighs 2."""
        account = self.term.queue.ledger.shares(DIGEST)[Priority.STANDARD].find("acme")
        return 0.0 if account is None else account.served / 2.0


@pytest.fixture
def worker() -> Worker:
    return new_worker()


def new_worker() -> Worker:
    term = Term(5, SETTINGS, ManualClock(), Random(1))
    term.queue.ledger.shares(DIGEST)[Priority.STANDARD].enter("acme", 1.0)
    worker = Worker(term)
    worker.connect()
    return worker


def test_tokens_of_a_report_whose_answer_was_lost_are_charged_once(worker: Worker) -> None:
    worker.report(100, answered=False)
    worker.lose_stream()
    worker.settle()
    assert worker.charged == worker.produced == 100


def test_of_several_reports_without_an_answer_those_that_arrived_are_charged_once(
    worker: Worker,
) -> None:
    worker.report(100, answered=False)
    worker.report(20, answered=False)
    worker.report(3, arrives=False)
    worker.lose_stream()
    worker.report(4000, answered=False)
    worker.lose_stream()
    worker.settle()
    assert worker.charged == worker.produced == 4123


def test_a_last_word_that_is_said_again_teaches_nothing_new(worker: Worker) -> None:
    """How long outputs are is learnt from each sequence once, however often its end is told."""
    outputs = worker.term.queue.ledger.outputs
    untaught = outputs.policy.default_tokens
    for _ in range(outputs.policy.min_samples - 1):
        worker.report(7, answered=False)
        worker.lose_stream()
    worker.settle()
    assert outputs.predict("acme", DIGEST) == untaught
    worker.report(7)
    assert outputs.predict("acme", DIGEST) < untaught


def test_another_leader_is_told_of_what_no_answer_confirmed(worker: Worker) -> None:
    worker.report(100, answered=False)
    after = new_worker()
    after.keeper, after.produced = worker.keeper, worker.produced
    after.connect()
    after.settle()
    assert after.charged == 100


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans(), st.booleans()), max_size=30))
def test_nothing_is_charged_twice_or_lost(turns: list[tuple[int, bool, bool, bool]]) -> None:
    """A stream carries reports in order: what follows a report that is lost is lost too."""
    worker = new_worker()
    arrives = True
    for output, lost, answered, breaks in turns:
        arrives = arrives and not lost
        worker.report(output, arrives=arrives, answered=answered)
        if breaks:
            worker.lose_stream()
            arrives = True
    worker.lose_stream()
    worker.settle()
    assert worker.charged == worker.produced
