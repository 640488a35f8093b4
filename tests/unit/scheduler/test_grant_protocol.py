"""The races that the grant protocol is made for, one history each, and the bug that each would catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.core.errors import Conflict
from services.scheduler.fleet.view import FleetView
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.term_streams import Report
from tests.unit.scheduler.model import BLOCK, DIGEST, Fleet, ModelGateway, place_spec
from tests.unit.scheduler.planted import (
    CountsNoGrantAnew,
    ForgetsOutstandingGrants,
    GivesBackTwice,
    HearsOldStreams,
    HonoursAnyEpoch,
    KeepsWhatAStreamLeft,
    KeepsWhatIsShared,
    LapsesWithoutMargin,
    LeansOften,
    SettlesAllOnReport,
    SharesNothing,
    fleet_with,
)

History = Callable[[Fleet], None]


def connected(fleet: Fleet) -> ModelGateway:
    fleet.deliver(0)
    fleet.term.step()
    return fleet.gateways[0]


def ask(fleet: Fleet, blocks: int, gateway: ModelGateway | None = None) -> int:
    """Submit a placement of that many blocks and let the scheduler turn."""
    gateway = fleet.gateways[0] if gateway is None else gateway
    spec = place_spec(
        prompt_tokens=blocks * BLOCK - 1, max_output_tokens=1, arrival_s=fleet.clock.now_s, queue_ttl_s=3600.0
    )
    number = fleet.submit(gateway, spec)
    fleet.term.step()
    fleet.receive(gateway)
    return number


def use_all(fleet: Fleet, *, arrive: bool = True) -> None:
    for gateway in fleet.gateways:
        while gateway.held:
            fleet.use(gateway, 0)
    while arrive and fleet.starts:
        fleet.arrive(0)


def room_blocks(fleet: Fleet) -> int:
    return fleet.term.fleet.candidates(DIGEST)["w0"].kv_tokens_room // BLOCK


def a_second_grant_before_any_report(fleet: Fleet) -> None:
    connected(fleet)
    ask(fleet, 6)
    ask(fleet, 6)
    use_all(fleet)
    assert fleet.workers[0].reserved == 6
    assert len(fleet.term.queue) == 1


def a_report_from_before_the_start(fleet: Fleet) -> None:
    connected(fleet)
    ask(fleet, 6)
    fleet.report(fleet.workers[0])  # taken before the grant arrives there
    use_all(fleet)
    fleet.deliver(0)
    ask(fleet, 6)
    use_all(fleet)
    assert fleet.workers[0].reserved == 6
    fleet.report(fleet.workers[0])
    fleet.deliver(0)
    assert room_blocks(fleet) == 4


def an_older_streams_report_after_a_newer_ones(fleet: Fleet) -> None:
    connected(fleet)
    worker = fleet.workers[0]
    fleet.report(worker)  # still on its way when the worker opens another stream
    ask(fleet, 6)
    use_all(fleet)
    fleet.open_stream(worker, break_first=False)
    fleet.deliver(0, 1)
    assert room_blocks(fleet) == 4
    fleet.deliver(0, 0)
    fleet.term.step()
    ask(fleet, 6)
    use_all(fleet)
    assert worker.reserved == 6


def seen_grants_of_an_unanswered_report(fleet: Fleet) -> None:
    connected(fleet)
    worker = fleet.workers[0]
    ask(fleet, 6)
    use_all(fleet)
    fleet.report(worker)
    for streams in fleet.reports:
        streams.clear()  # the stream broke, and the report with it
    fleet.open_stream(worker)
    fleet.deliver(0)
    assert room_blocks(fleet) == 4, "the grant is counted on one side"


def a_cancelled_grant_twice(fleet: Fleet) -> None:
    gateway = connected(fleet)
    first = ask(fleet, 5)
    ask(fleet, 4)
    fleet.cancel(gateway, first)
    fleet.term.step()
    fleet.cancel(gateway, first)
    fleet.term.step()
    assert room_blocks(fleet) == 6
    ask(fleet, 6)
    ask(fleet, 5)
    use_all(fleet)
    assert fleet.workers[0].reserved == 10


def an_unread_grant_of_a_closed_stream(fleet: Fleet) -> None:
    gateway = connected(fleet)
    fleet.submit(gateway, place_spec(prompt_tokens=8 * BLOCK - 1, max_output_tokens=1))
    fleet.term.step()  # granted, never read
    assert room_blocks(fleet) == 2
    fleet.term.streams.close_session(gateway.session)
    fleet.term.step()
    assert room_blocks(fleet) == 10, "nobody saw it: the room is there at once"


def a_lost_grant_lapses(fleet: Fleet) -> None:
    gateway = connected(fleet)
    ask(fleet, 8)
    gateway.held.clear()
    fleet.advance(2.0)
    assert room_blocks(fleet) == 2, "it may still be on its way"
    fleet.advance(3.0)
    assert room_blocks(fleet) == 10


def a_start_at_the_last_moment(fleet: Fleet) -> None:
    connected(fleet)
    ask(fleet, 8)
    fleet.clock.now_s += 1.0
    use_all(fleet, arrive=False)
    fleet.clock.now_s += 0.4
    fleet.report(fleet.workers[0])
    fleet.deliver(0)
    ask(fleet, 8)
    use_all(fleet)
    assert fleet.workers[0].reserved == 8


def a_grant_of_the_leader_before(fleet: Fleet) -> None:
    connected(fleet)
    ask(fleet, 8)
    use_all(fleet, arrive=False)  # on its way when the next leader comes
    before = fleet.workers[0].snapshot()
    fleet.new_leader()
    assert before.epoch == 1
    fleet.reports[0].clear()
    fleet.workers[0].epoch = 1  # it has not heard: its report says so
    fleet.report(fleet.workers[0])
    fleet.deliver(0)
    ask(fleet, 8)
    use_all(fleet)
    assert fleet.workers[0].reserved == 8
    fleet.workers[0].on_leader(2)
    fleet.report(fleet.workers[0])
    fleet.deliver(0)
    assert room_blocks(fleet) == 2


def another_life_forgets_and_numbers_go_on(fleet: Fleet) -> None:
    gateway = connected(fleet)
    ask(fleet, 8)
    old = gateway.held.pop().grant
    fleet.restart(fleet.workers[0])
    fleet.deliver(0)
    assert room_blocks(fleet) == 10
    ask(fleet, 8)
    new = gateway.held[0].grant
    assert (new.incarnation, new.sequence) == (old.incarnation + 1, old.sequence + 1)
    fleet.starts.append((0.0, old))
    use_all(fleet)
    assert fleet.workers[0].reserved == 8, "the old life's grant is refused"


def the_life_before_is_not_heard_any_more(fleet: Fleet) -> None:
    connected(fleet)
    worker = fleet.workers[0]
    old = worker.snapshot()
    fleet.restart(worker)
    fleet.deliver(0)
    ask(fleet, 8)
    use_all(fleet)
    late = fleet.term.streams.open_reporter(lambda: None)  # the old process is still there
    fleet.term.streams.send(Report(late, 1, replace(old, epoch=1, grants_seen=(1, 2, 3))))
    fleet.term.step()
    assert isinstance(late.error, Conflict)
    assert room_blocks(fleet) == 2


def a_timeout_lets_the_others_go(fleet: Fleet) -> None:
    gateway = connected(fleet)
    ask(fleet, 8)
    use_all(fleet)
    short = place_spec(prompt_tokens=9 * BLOCK, arrival_s=fleet.clock.now_s, queue_ttl_s=1.0)
    fleet.submit(gateway, short)
    for _ in range(4):  # as many as may pass it, and one more
        ask(fleet, 1)
        use_all(fleet)
        if len(fleet.workers[0].running) > 1:
            fleet.finish(fleet.workers[0], 1)
        fleet.report(fleet.workers[0])
        fleet.deliver(0)
    assert len(fleet.term.queue) == 2, "the big one is waited for"
    fleet.clock.now_s += 1.0
    fleet.report(fleet.workers[0])
    fleet.reports[0].clear()
    fleet.term.step()
    assert len(fleet.term.queue) == 0, "both ended in one turn"


def a_silent_worker_gets_nothing(fleet: Fleet) -> None:
    connected(fleet)
    fleet.clock.now_s += 2.6
    ask(fleet, 1)
    assert not fleet.term.fleet.candidates(DIGEST)["w0"].reporting
    assert len(fleet.term.queue) == 1
    fleet.report(fleet.workers[0])
    fleet.deliver(0)
    assert len(fleet.term.queue) == 0


def a_broken_stream_stops_placing(fleet: Fleet) -> None:
    connected(fleet)
    fleet.break_stream(fleet.workers[0])
    ask(fleet, 1)
    assert len(fleet.term.queue) == 1
    fleet.open_stream(fleet.workers[0])
    fleet.deliver(0)
    assert len(fleet.term.queue) == 0


def ask_shared(fleet: Fleet) -> int:
    """Submit a placement of 5 blocks, 4 of which hold a prefix that all of these begin with."""
    gateway = fleet.gateways[0]
    spec = place_spec(
        prompt_tokens=66,
        max_output_tokens=1,
        arrival_s=fleet.clock.now_s,
        queue_ttl_s=3600.0,
        prefix_hashes=(7,),
    )
    number = fleet.submit(gateway, spec)
    fleet.term.step()
    fleet.receive(gateway)
    return number


def two_that_share(fleet: Fleet) -> None:
    """Leave a worker of 10 blocks with two sequences of 5, which have 4 of them in common."""
    connected(fleet)
    ask_shared(fleet)
    ask_shared(fleet)
    use_all(fleet)
    worker = fleet.workers[0]
    assert worker.reserved == 10, "each computes its own"
    worker.prefill()
    fleet.report(worker)
    fleet.deliver(0)
    assert (worker.reserved, room_blocks(fleet)) == (6, 4)


def a_shared_prefix_counts_once(fleet: Fleet) -> None:
    two_that_share(fleet)
    worker = fleet.workers[0]
    for left in (3, 2, 1, 0):
        ask_shared(fleet)
        assert room_blocks(fleet) == left, "one block more each"
        use_all(fleet)
        fleet.report(worker)
        fleet.deliver(0)
        assert (worker.reserved, room_blocks(fleet)) == (10 - left, left)
    ask_shared(fleet)
    assert len(fleet.term.queue) == 1


def two_on_their_way_to_a_prefix_that_is_evicted(fleet: Fleet) -> None:
    two_that_share(fleet)
    ask_shared(fleet)
    ask_shared(fleet)
    worker = fleet.workers[0]
    ask(fleet, 2)
    use_all(fleet, arrive=False)
    fleet.finish(worker, 0)
    fleet.finish(worker, 0)
    worker.evict()
    use_all(fleet)
    assert worker.reserved <= 10


def a_prefix_that_nobody_shares_any_more(fleet: Fleet) -> None:
    two_that_share(fleet)
    ask_shared(fleet)
    worker = fleet.workers[0]
    assert room_blocks(fleet) == 3
    fleet.finish(worker, 0)
    fleet.finish(worker, 0)
    worker.evict()
    fleet.report(worker)
    fleet.deliver(0)
    assert room_blocks(fleet) == 5, "the grant on its way needs all of its blocks again"
    ask(fleet, 6)
    use_all(fleet)
    assert worker.reserved == 5


def sharing_that_a_lost_report_told_of(fleet: Fleet) -> None:
    two_that_share(fleet)
    worker = fleet.workers[0]
    fleet.finish(worker, 0)
    fleet.finish(worker, 0)
    fleet.report(worker)  # shared no more
    for streams in fleet.reports:
        streams.clear()
    fleet.open_stream(worker)
    fleet.deliver(0)
    assert room_blocks(fleet) == 10
    ask_shared(fleet)
    assert room_blocks(fleet) == 5, "the first report of a stream says all that is shared"


HISTORIES: tuple[tuple[History, type[FleetView] | type[FlowQueue] | None], ...] = (
    (a_second_grant_before_any_report, ForgetsOutstandingGrants),
    (a_report_from_before_the_start, SettlesAllOnReport),
    (an_older_streams_report_after_a_newer_ones, HearsOldStreams),
    (seen_grants_of_an_unanswered_report, None),
    (a_cancelled_grant_twice, GivesBackTwice),
    (an_unread_grant_of_a_closed_stream, None),
    (a_lost_grant_lapses, LapsesWithoutMargin),
    (a_start_at_the_last_moment, LapsesWithoutMargin),
    (a_grant_of_the_leader_before, HonoursAnyEpoch),
    (another_life_forgets_and_numbers_go_on, None),
    (the_life_before_is_not_heard_any_more, None),
    (a_timeout_lets_the_others_go, None),
    (a_silent_worker_gets_nothing, None),
    (a_broken_stream_stops_placing, None),
    (a_shared_prefix_counts_once, SharesNothing),
    (two_on_their_way_to_a_prefix_that_is_evicted, LeansOften),
    (a_prefix_that_nobody_shares_any_more, KeepsWhatIsShared),
    (a_prefix_that_nobody_shares_any_more, CountsNoGrantAnew),
    (sharing_that_a_lost_report_told_of, KeepsWhatAStreamLeft),
)


@pytest.mark.parametrize("history", [history for history, _ in HISTORIES], ids=lambda found: found.__name__)
def test_history(history: History) -> None:
    fleet = Fleet(1, (10,))
    history(fleet)
    fleet.term.check_integrity()


@pytest.mark.parametrize(
    ("history", "bug"), [found for found in HISTORIES if found[1]], ids=lambda found: found.__name__
)
def test_history_catches_its_bug(history: History, bug: type[FleetView] | type[FlowQueue]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        history(fleet_with(bug)(1, (10,)))
