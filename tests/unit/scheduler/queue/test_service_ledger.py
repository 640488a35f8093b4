"""What tenants are charged: nothing twice, nothing lost, however a grant ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
from msgspec import structs

from services.core.fleet import MAX_COUNTER_TOKENS, ReportSnapshot, SequenceUsage, TenantCounter, TenantTokens
from services.core.generation import Grant
from services.core.output_quantile import OutputPolicy
from services.core.records import Priority
from services.scheduler.queue import service_ledger
from services.scheduler.queue.service_ledger import LedgerPolicy, ServiceLedger
from tests.unit.scheduler.model import DIGEST, place_spec

STANDARD = Priority.STANDARD
PROMPT, PREDICTED = 100, 50
EXPECTED = PROMPT + 2.0 * PREDICTED


class Rig:
    ledger_type: ClassVar[type[ServiceLedger]] = ServiceLedger

    def __init__(self, *, min_samples: int = 1_000_000, **policy: float) -> None:
        outputs = OutputPolicy(min_samples=min_samples)
        self.ledger = self.ledger_type(LedgerPolicy(outputs=outputs, **policy))  # type: ignore[arg-type]
        self.shares = self.ledger.shares(DIGEST)[STANDARD]
        self.number = 0
        self.shares.enter("acme", 1.0)

    def grant(self, request: str = "", *, worker: str = "w0", life: int = 1, now_s: float = 0.0) -> Grant:
        self.number += 1
        grant = Grant(worker, "h:1", life, 1, self.number, 10, 2.0, DIGEST)
        spec = replace(
            place_spec(prompt_tokens=PROMPT), request_id=request or f"req_{self.number}", tenant_id="acme"
        )
        cost = self.ledger.cost(PROMPT, PREDICTED, 0)
        self.ledger.granted(grant, spec, predicted_tokens=PREDICTED, cost_tokens=cost, now_s=now_s)
        return grant

    def report(
        self,
        prefill: int = 0,
        output: int = 0,
        *,
        left: SequenceUsage | None = None,
        seen: tuple[int, ...] = (),
        worker: str = "w0",
        life: int = 1,
        counters: tuple[TenantCounter, ...] = (),
        cached: int = 0,
    ) -> tuple[TenantCounter, ...]:
        tokens = TenantTokens("acme", DIGEST, prefill, output, STANDARD, cached)
        snapshot = ReportSnapshot(
            worker,
            life,
            "h:1",
            grants_seen=seen,
            tenants=(tokens,) if prefill or output else (),
            usage=() if left is None else (left,),
            counters=counters,
        )
        found = self.ledger.report(snapshot)
        self.ledger.check_integrity()
        return found

    @property
    def value(self) -> float:
        account = self.shares.find("acme")
        assert account is not None
        return account.value


def usage(request: str, output: int, *, ended: bool = True, prompt: int = PROMPT) -> SequenceUsage:
    return SequenceUsage(request, 0, "acme", DIGEST, prompt, output, ended=ended)


def test_a_sequence_is_charged_ahead_and_in_the_end_what_it_used() -> None:
    rig = Rig()
    rig.grant("req_a")
    assert rig.value == EXPECTED
    told = rig.report(PROMPT, 10, seen=(1,))
    assert rig.value == EXPECTED
    assert told[0].virtual_tokens == PROMPT + 20.0, "what is expected is no other leader's to know"
    told = rig.report(0, 10, left=usage("req_a", 20))
    assert rig.value == PROMPT + 40.0
    assert told == (TenantCounter("acme", DIGEST, STANDARD, PROMPT + 40.0, PROMPT + 40.0),)
    assert rig.ledger.open_advances == 0


def test_a_sequence_without_output_is_charged_its_prefill_beside_another() -> None:
    rig = Rig(min_samples=1)
    rig.grant("req_a")
    rig.grant("req_b")
    rig.report(PROMPT, 0, left=usage("req_a", 0))
    assert rig.value == PROMPT + EXPECTED
    assert rig.ledger.outputs.predict("acme", DIGEST) > 1, "others are predicted by it"


def test_what_came_from_the_cache_is_charged_less() -> None:
    rig = Rig()
    rig.report(PROMPT, 0, cached=60)
    assert rig.value == pytest.approx(40.0 + 6.0)


def test_a_grant_that_lapses_unseen_is_given_back_and_one_that_was_seen_is_not() -> None:
    rig = Rig(hold_s=5.0)
    rig.grant("req_a")
    rig.grant("req_b")
    rig.report(seen=(2,))
    rig.ledger.expire(4.9)
    assert rig.value == 2 * EXPECTED
    rig.ledger.expire(5.0)
    assert rig.value == EXPECTED


def test_a_grant_that_its_gateway_gives_back_costs_nothing() -> None:
    rig = Rig()
    grant = rig.grant()
    rig.ledger.returned(grant)
    rig.ledger.returned(grant)
    assert rig.value == 0.0
    rig.ledger.check_integrity()


def test_a_worker_that_begins_another_life_gives_its_advances_back() -> None:
    rig = Rig()
    rig.grant("req_a")
    rig.report(PROMPT, 5, seen=(1,))
    rig.report(life=2)
    assert rig.value == PROMPT + 10.0


@pytest.mark.parametrize("last_word", [True, False])
def test_a_sequence_that_is_placed_again_is_charged_for_what_was_computed(last_word: bool) -> None:
    """The first run's advance ends with the second grant, if its worker did not end it before."""
    rig = Rig()
    rig.grant("req_a")
    rig.report(PROMPT, 10, seen=(1,), left=usage("req_a", 10, ended=False) if last_word else None)
    rig.number = 7
    rig.grant("req_a", worker="w1")
    assert rig.value == (PROMPT + 20.0) + EXPECTED
    rig.report(left=usage("req_a", 10, ended=False))
    assert rig.value == (PROMPT + 20.0) + EXPECTED, "the old worker's last word is not the new run's"
    rig.report(PROMPT + 10, 15, worker="w1", left=usage("req_a", 25))
    assert rig.value == (PROMPT + 20.0) + (PROMPT + 10 + 30.0)


def test_an_advance_that_nobody_ends_lapses_with_its_age() -> None:
    rig = Rig(max_age_s=300.0)
    rig.grant()
    rig.report(seen=(1,))
    rig.ledger.expire(299.0)
    assert rig.value == EXPECTED
    rig.ledger.expire(300.0)
    assert rig.value == 0.0


def test_a_new_leader_starts_from_the_highest_counter_and_what_came_since() -> None:
    rig = Rig()

    def counter(tokens: float) -> tuple[TenantCounter, ...]:
        return (TenantCounter("acme", DIGEST, STANDARD, tokens),)

    rig.report(10, 0, counters=counter(1000.0))
    assert rig.value == 1010.0
    rig.report(5, 0, worker="w1", counters=counter(1200.0))
    assert rig.value == 1215.0
    rig.report(worker="w1", counters=counter(1215.0))
    assert rig.value == 1215.0, "its own counter comes back with a new stream"


def test_the_last_word_on_a_sequence_teaches_the_prediction() -> None:
    rig = Rig()
    rig.grant("req_a")
    rig.report(PROMPT, 60, left=usage("req_a", 60))
    assert rig.ledger.outputs.level(DIGEST) > rig.ledger.outputs.policy.quantile
    level = rig.ledger.outputs.level(DIGEST)
    rig.grant("req_b")
    rig.report(left=usage("req_b", 5, ended=False))
    rig.ledger.submitted(replace(place_spec(), request_id="req_b"))
    assert rig.ledger.outputs.level(DIGEST) > level, "it was preempted"


@pytest.mark.parametrize(("after_s", "starts_from"), [(4.9, 500.0), (5.0, 2000.0)])
def test_whoever_asks_a_new_leader_again_in_time_stays_where_it_was(
    after_s: float, starts_from: float
) -> None:
    rig = Rig()
    words = {"acme": 2000.0, "behind": 500.0}
    rig.report(counters=tuple(TenantCounter(name, DIGEST, STANDARD, at, 500.0) for name, at in words.items()))
    rig.ledger.expire(0.0)
    rig.ledger.expire(after_s)
    assert rig.shares.enter("behind", 1.0).value == starts_from


def test_a_tenant_that_is_new_to_the_next_leader_starts_where_the_others_are() -> None:
    """The floor in a counter is the present one, although nothing entered, left or was granted meanwhile."""
    before, after = Rig(), Rig()
    after.shares.enter("new", 1.0)  # before the worker's first report
    counters = before.report(10_000)
    assert counters == (TenantCounter("acme", DIGEST, STANDARD, 10_000.0, 10_000.0),)
    after.report(counters=counters)
    found = after.shares.find("new")
    assert found is not None
    assert found.value == after.value == 10_000.0


def test_rows_of_fixed_cost_models_are_charged_their_device_milliseconds_over_the_weight() -> None:
    ledger = ServiceLedger(LedgerPolicy())
    ledger.shares(DIGEST)[Priority.STANDARD].enter("acme", 2.0)
    rows = TenantTokens("acme", DIGEST, 0, 0, rows=3, device_us=12_000)
    (counter,) = ledger.report(ReportSnapshot("w1", 1, "h:1", tenants=(rows,)))
    assert counter.virtual_tokens == 6.0
    later = ServiceLedger(LedgerPolicy())
    later.report(ReportSnapshot("w1", 1, "h:1", counters=(counter,)))
    assert later.shares(DIGEST)[Priority.STANDARD].enter("acme", 2.0).value == 6.0


def test_no_counter_is_told_that_the_next_leader_would_not_take() -> None:
    """Else one worker's nonsense would keep each worker that served the tenant from the next leader."""
    rig = Rig()
    (told,) = rig.report(10**19)
    assert told.virtual_tokens == MAX_COUNTER_TOKENS


def test_open_advances_and_pools_are_bounded() -> None:
    rig = Rig()
    for number in range(service_ledger.MAX_POOLS + 50):
        rig.ledger.shares(f"sha256:{number}")
    assert sum(1 for _ in rig.ledger.pools()) <= service_ledger.MAX_POOLS
    assert rig.ledger.shares(DIGEST)[STANDARD] is rig.shares, "somebody waits there"


class ForgetsLapses(ServiceLedger):
    def expire(self, now_s: float) -> None: ...


class ForgetsReturns(ServiceLedger):
    def returned(self, grant: Grant) -> None: ...


class BelievesAnyWorker(ServiceLedger):
    """Takes a last word on a sequence for the run of another worker."""

    def _left(self, last: SequenceUsage, worker_id: str) -> None:
        advance = self._requests.get((last.request_id, last.choice))
        super()._left(last, worker_id if advance is None else advance.worker_id)


class RestoresOnTop(ServiceLedger):
    """Adds what an earlier leader counted instead of starting from the highest."""

    def _restore(self, counters: Sequence[TenantCounter]) -> None:
        for counter in counters:
            self._charge(TenantTokens(counter.tenant, DIGEST, round(counter.virtual_tokens), 0), "w0")


class ReportsAnOldFloor(ServiceLedger):
    def _counter(self, use: TenantTokens) -> TenantCounter | None:
        found = super()._counter(use)
        return None if found is None else structs.replace(found, floor_tokens=0.0)


PLANTED: dict[type[ServiceLedger], Callable[[], None]] = {
    ForgetsLapses: test_a_grant_that_lapses_unseen_is_given_back_and_one_that_was_seen_is_not,
    ForgetsReturns: test_a_grant_that_its_gateway_gives_back_costs_nothing,
    BelievesAnyWorker: lambda: test_a_sequence_that_is_placed_again_is_charged_for_what_was_computed(True),
    ReportsAnOldFloor: test_a_tenant_that_is_new_to_the_next_leader_starts_where_the_others_are,
    RestoresOnTop: test_a_new_leader_starts_from_the_highest_counter_and_what_came_since,
}


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_bug_is_caught(kind: type[ServiceLedger]) -> None:
    Rig.ledger_type = kind
    try:
        with pytest.raises(AssertionError):
            PLANTED[kind]()
    finally:
        Rig.ledger_type = ServiceLedger
