"""Deltas of a worker are told to the leader at least once, and none is lost with a stream."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.adapters.links.report_deltas import DeltaKeeper, PrefixBacklog
from services.core.fleet import PoolSnapshot, ReportSnapshot, SequenceUsage, TenantTokens
from services.core.records import Priority


def snapshot(epoch: int = 1, seen: tuple[int, ...] = (), *tokens: tuple[str, int, int]) -> ReportSnapshot:
    uses = tuple(TenantTokens(tenant, "d", prefill, output) for tenant, prefill, output in tokens)
    return ReportSnapshot("w1", 1, "h:1", epoch=epoch, grants_seen=seen, tenants=uses)


def test_a_report_carries_its_own_deltas_and_an_answer_confirms_them() -> None:
    keeper = DeltaKeeper()
    made = snapshot(1, (1, 2), ("a", 3, 4))
    assert keeper.next_report(made) == (1, replace(made, deltas_number=1))
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
    assert (number, report.grants_seen, report.deltas_number) == (1, (2, 3, 4), 2)
    assert {(use.tenant, use.prefill, use.output) for use in report.tenants} == {("a", 2, 5), ("b", 1, 1)}
    assert not keeper.behind
    _, report = keeper.next_report(snapshot(1, (5,)))
    assert (report.grants_seen, report.deltas_number) == ((5,), 3)
    assert report.tenants == (TenantTokens("a", "d", 1, 1),)
    assert keeper.next_report(snapshot())[1].deltas_number == 0, "it tells of nothing"


def test_a_new_leader_hears_no_grants_of_the_old_one_but_all_tokens() -> None:
    keeper = DeltaKeeper()
    keeper.next_report(snapshot(1, (7, 8), ("a", 1, 2)))
    keeper.stream_opened()
    _, report = keeper.next_report(snapshot(2, (1,)))
    assert report.grants_seen == (1,)
    assert report.tenants == (TenantTokens("a", "d", 1, 2),)


def test_rows_and_their_device_time_add_up_like_tokens() -> None:
    keeper = DeltaKeeper()
    use = TenantTokens("a", "d", 0, 0, Priority.BATCH, 0, 3, 1500)
    keeper.keep(replace(snapshot(), tenants=(use,)))
    _, report = keeper.next_report(replace(snapshot(), tenants=(replace(use, rows=2, device_us=500),)))
    assert report.tenants == (replace(use, rows=5, device_us=2000),)


def test_a_snapshot_that_is_not_sent_is_kept() -> None:
    keeper = DeltaKeeper()
    keeper.keep(snapshot(1, (1,), ("a", 1, 1)))
    assert keeper.next_report(snapshot(1, (2,)))[1] == replace(
        snapshot(1, (1, 2), ("a", 1, 1)), deltas_number=1
    )


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


def test_tokens_are_kept_apart_by_class_and_cached_ones_are_counted() -> None:
    keeper = DeltaKeeper()
    batch, paid = Priority.BATCH, Priority.INTERACTIVE
    uses = (TenantTokens("a", "d", 10, 1, batch, 4), TenantTokens("a", "d", 20, 2, paid, 8))
    keeper.keep(replace(snapshot(), tenants=uses))
    _, report = keeper.next_report(replace(snapshot(), tenants=uses[:1]))
    assert report.tenants == (TenantTokens("a", "d", 20, 2, batch, 8), TenantTokens("a", "d", 20, 2, paid, 8))


def word(number: int, output: int) -> SequenceUsage:
    return SequenceUsage(f"req_{number}", 0, "a", "d", 10, output, ended=True)


def test_the_last_word_on_a_sequence_counts_also_across_streams() -> None:
    keeper = DeltaKeeper(max_usage=2)
    _, report = keeper.next_report(replace(snapshot(), usage=(word(1, 1), word(2, 1), word(3, 1))))
    assert report.usage == (word(1, 1), word(2, 1))
    keeper.next_report(replace(snapshot(), usage=(word(1, 9),)))
    keeper.stream_opened()
    told = [use for _ in range(2) for use in keeper.next_report(snapshot())[1].usage]
    assert {use.request_id: use.output_tokens for use in told} == {"req_1": 9, "req_2": 1, "req_3": 1}


def test_usage_is_bounded_and_the_oldest_is_dropped() -> None:
    keeper = DeltaKeeper(max_usage=1, max_usage_kept=3)
    _, report = keeper.next_report(replace(snapshot(), usage=tuple(word(n, 1) for n in range(5))))
    assert report.usage == (word(2, 1),)
    assert keeper.usage_dropped == 2


def test_tokens_are_bounded_however_long_no_leader_answers() -> None:
    """On each stream what the one before left goes first; what comes meanwhile waits."""
    keeper = DeltaKeeper(max_tenants=1, max_tenants_kept=3)
    for number in range(9):
        keeper.next_report(snapshot(1, (), (f"tenant-{number}", 2, 1)))
        keeper.stream_opened()
    assert keeper.tokens_dropped == 5 * 3
    told = [use.tenant for _ in range(9) for use in keeper.next_report(snapshot())[1].tenants]
    assert told == ["tenant-0", "tenant-6", "tenant-7", "tenant-8"]


def test_the_first_report_of_a_stream_asks_for_a_whole_snapshot() -> None:
    keeper = DeltaKeeper()
    assert keeper.first
    keeper.keep(snapshot())
    assert keeper.first
    keeper.next_report(snapshot())
    assert not keeper.first
    keeper.stream_opened()
    assert keeper.first


def test_prefix_changes_of_a_broken_stream_are_void() -> None:
    keeper = DeltaKeeper(prefixes=PrefixBacklog(max_pool_changes=1, max_kept=2))
    pool = PoolSnapshot("d", 64, 0, 16, 0, 0, 8, 1024, prefix_added=(1, 2))
    _, report = keeper.next_report(replace(snapshot(), pools=(pool,)))
    assert report.pools[0].prefix_added == (1,)
    keeper.stream_opened()
    _, report = keeper.next_report(replace(snapshot(), pools=(replace(pool, prefix_added=(7,)),)))
    assert report.pools[0].prefix_added == (7,)
    keeper.next_report(replace(snapshot(), pools=(replace(pool, prefix_added=(1, 2, 3, 4)),)))
    assert keeper.overflowed
    keeper.stream_opened()
    assert not keeper.overflowed


def test_a_word_that_waits_is_newer_than_one_that_was_not_answered() -> None:
    keeper = DeltaKeeper(max_usage=1)
    keeper.next_report(replace(snapshot(), usage=(word(1, 1),)))
    keeper.next_report(replace(snapshot(), usage=(word(2, 1), word(1, 9))))
    keeper.stream_opened()
    told = [use for _ in range(3) for use in keeper.next_report(snapshot())[1].usage]
    assert {use.request_id: use.output_tokens for use in told} == {"req_1": 9, "req_2": 1}
