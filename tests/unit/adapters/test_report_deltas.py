"""Deltas of a worker are told to the leader at least once, and none is lost with a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.adapters.report_deltas import DeltaKeeper
from services.core.fleet import ReportSnapshot, TenantTokens


def snapshot(epoch: int = 1, seen: tuple[int, ...] = (), *tokens: tuple[str, int, int]) -> ReportSnapshot:
    uses = tuple(TenantTokens(tenant, "d", prefill, output) for tenant, prefill, output in tokens)
    return ReportSnapshot("w1", 1, "h:1", epoch=epoch, grants_seen=seen, tenants=uses)


def test_a_report_carries_its_own_deltas_and_an_answer_confirms_them() -> None:
    keeper = DeltaKeeper()
    assert keeper.next_report(snapshot(1, (1, 2), ("a", 3, 4))) == (1, snapshot(1, (1, 2), ("a", 3, 4)))
    assert keeper.unconfirmed == 1
    assert keeper.confirm(1)
    assert not keeper.confirm(1)
    keeper.stream_opened()
    assert keeper.next_report(snapshot(1, (3,))) == (1, snapshot(1, (3,)))


def test_what_was_not_answered_goes_first_on_the_next_stream() -> None:
    keeper = DeltaKeeper()
    keeper.next_report(snapshot(1, (1,), ("a", 1, 0)))
    keeper.next_report(snapshot(1, (2,), ("a", 2, 5), ("b", 1, 1)))
    keeper.next_report(snapshot(1, (3,)))
    keeper.confirm(1)
    keeper.stream_opened()
    assert keeper.unconfirmed == 0
    number, report = keeper.next_report(snapshot(1, (4,), ("a", 1, 1)))
    assert number == 1
    assert report.grants_seen == (2, 3, 4)
    assert {(use.tenant, use.prefill, use.output) for use in report.tenants} == {("a", 3, 6), ("b", 1, 1)}


def test_a_new_leader_hears_no_grants_of_the_old_one_but_all_tokens() -> None:
    keeper = DeltaKeeper()
    keeper.next_report(snapshot(1, (7, 8), ("a", 1, 2)))
    keeper.stream_opened()
    _, report = keeper.next_report(snapshot(2, (1,)))
    assert report.grants_seen == (1,)
    assert report.tenants == (TenantTokens("a", "d", 1, 2),)


def test_a_snapshot_that_is_not_sent_is_kept() -> None:
    keeper = DeltaKeeper()
    keeper.keep(snapshot(1, (1,), ("a", 1, 1)))
    assert keeper.next_report(snapshot(1, (2,)))[1] == snapshot(1, (1, 2), ("a", 1, 1))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("report"), st.integers(0, 5)),
            st.tuples(st.just("confirm"), st.integers(1, 6)),
            st.tuples(st.just("break"), st.just(0)),
        ),
        max_size=40,
    )
)
def test_every_delta_is_told_within_bounds_and_confirmed_ones_once(actions: list[tuple[str, int]]) -> None:
    keeper = DeltaKeeper(max_seen=3, max_tenants=2)
    made = 0
    told: dict[int, None] = {}
    confirmed: set[int] = set()
    sent: list[tuple[int, tuple[int, ...]]] = []
    for action, value in [*actions, *[("report", 0)] * 60]:
        if action == "report":
            fresh = tuple(range(made + 1, made + value + 1))
            made += value
            number, report = keeper.next_report(snapshot(1, fresh))
            assert len(report.grants_seen) <= 3
            assert not confirmed & set(report.grants_seen), "a confirmed delta was told again"
            sent.append((number, report.grants_seen))
            told.update(dict.fromkeys(report.grants_seen))
        elif action == "confirm" and sent:
            keeper.confirm(value)
            confirmed |= {seen for number, group in sent if number <= value for seen in group}
        elif action == "break":
            keeper.stream_opened()
            sent.clear()
    assert set(told) == set(range(1, made + 1)), "a delta was lost"
