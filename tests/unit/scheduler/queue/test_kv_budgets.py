"""A tenant with a KV budget waits for itself: nobody waits for it, and it gets nobody's room."""

from __future__ import annotations

from services.core.errors import KvBudgetExceeded
from services.core.generation import Grant
from tests.unit.scheduler.model import BLOCK, DIGEST
from tests.unit.scheduler.queue_rig import Rig


def held_by(rig: Rig, tenant: str = "acme") -> int:
    return sum(rig.queue.ledger.budget_tokens(DIGEST, tenant).values())


def test_grants_stop_at_the_share_and_others_go_on() -> None:
    rig = Rig(20)
    mine = [rig.ask(2, kv_share=0.25) for _ in range(6)]
    others = [rig.ask(2, tenant="beta") for _ in range(4)]
    found = rig.turn()
    assert [one in found for one in mine] == [True, True, False, False, False, False]
    assert all(isinstance(found[one], Grant) for one in others), "others do not wait for it"
    assert held_by(rig) <= 0.25 * 20 * BLOCK
    later = [rig.ask(2, tenant="beta") for _ in range(4)]
    found = rig.turn()
    assert all(isinstance(found[one], Grant) for one in later), "it has no earmark on the worker"


def test_a_returned_grant_gives_its_budget_back() -> None:
    rig = Rig(20)
    first, second = rig.ask(5, kv_share=0.25), rig.ask(5, kv_share=0.25)
    assert set(rig.turn()) == {first}
    rig.queue.cancel(1, first, rig.now_s)
    assert set(rig.turn()) == {second}
    rig.queue.check_integrity()


def test_a_request_that_alone_exceeds_the_share_is_refused_by_name() -> None:
    rig = Rig(20)
    number = rig.ask(6, kv_share=0.25)
    error = rig.turn()[number]
    assert isinstance(error, KvBudgetExceeded)
    assert "--kv-share" in str(error)


def test_the_share_holds_for_each_worker() -> None:
    rig = Rig(20, 20)
    mine = [rig.ask(5, kv_share=0.25) for _ in range(3)]
    found = rig.turn()
    workers = [one.worker_id for one in found.values() if isinstance(one, Grant)]
    assert sorted(workers) == ["w0", "w1"]
    assert mine[2] not in found


def test_one_at_its_budget_here_and_without_room_there_keeps_nobody_waiting() -> None:
    rig = Rig(20, 20)
    rig.reserved[1] = 20
    rig.report(1)
    rig.ask(5, kv_share=0.25)
    assert len(rig.turn()) == 1
    waits = rig.ask(5, kv_share=0.25)
    for _ in range(6):
        other = rig.ask(2, tenant="beta")
        found = rig.turn()
        assert isinstance(found[other], Grant), "it has an earmark on a worker where it may not start"
        assert waits not in found
