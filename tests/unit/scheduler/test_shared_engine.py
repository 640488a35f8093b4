"""Versions of one engine: what one takes is the others' too, and their queues take turns."""

from __future__ import annotations

from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.core.generation import Grant
from services.core.records import Priority
from services.scheduler.fleet.roster import EngineGroups
from tests.unit.scheduler.model import BLOCK
from tests.unit.scheduler.queue_rig import Rig

A, B, C = ("sha256:" + letter * 64 for letter in "abc")


class Arms(Rig):
    """One worker whose engine serves A and B."""

    def share(self, *, reserved: int = 0, total: int = 10, engine: str = A) -> None:
        pools = tuple(
            PoolSnapshot(digest, total, reserved, BLOCK, 0, 0, self.slots, total * BLOCK, engine=engine)
            for digest in (A, B)
        )
        seen, self.seen[0] = tuple(self.seen[0]), []
        snapshot = ReportSnapshot("w0", 1, "h:1", pools=pools, epoch=1, grants_seen=seen)
        self.queue.touch(self.fleet.apply(0, snapshot, self.now_s))

    def room(self, digest: str) -> int:
        self.fleet.check_integrity()
        return self.fleet.candidates(digest)["w0"].kv_tokens_room // BLOCK

    def granted(self) -> list[int]:
        return [number for number, found in self.turn().items() if isinstance(found, Grant)]


def test_a_grant_of_one_version_takes_the_room_of_both_until_it_is_back() -> None:
    rig = Arms(10)
    rig.share()
    asked = rig.ask(4, digest=A)
    rig.queue.run_pass(rig.now_s)
    assert [rig.room(digest) for digest in (A, B)] == [6, 6]
    assert rig.fleet.candidates(B)["w0"].slots == rig.slots - 1
    assert [rig.ask(8, digest=B), rig.ask(6, digest=B)] == [2, 3]
    assert rig.granted() == [asked, 3], "8 blocks were granted of 6"
    assert rig.room(A) == 0


def test_room_that_one_version_returns_is_tried_by_the_other() -> None:
    rig = Arms(10)
    rig.share()
    asked = rig.ask(10, digest=A)
    rig.queue.run_pass(rig.now_s)
    waits = rig.ask(10, digest=B)
    rig.queue.run_pass(rig.now_s)
    rig.queue.cancel(1, asked, rig.now_s)
    assert rig.granted() == [asked, waits]


def test_an_engine_of_its_own_shares_nothing() -> None:
    rig = Arms(10)
    rig.share(engine="")
    rig.ask(4, digest=A)
    rig.queue.run_pass(rig.now_s)
    assert [rig.room(digest) for digest in (A, B)] == [6, 10]


def test_queues_of_one_engine_take_turns_by_class_and_arrival() -> None:
    rig = Arms(10)
    rig.share(reserved=10)
    asked = []
    for number in range(8):
        rig.now_s += 0.001
        asked.append(rig.ask(2, digest=B if number % 4 == 3 else A))
    rig.now_s += 0.001
    urgent = rig.ask(2, digest=B, priority=Priority.INTERACTIVE)
    assert rig.granted() == []
    rig.share()
    assert sorted(rig.granted()) == sorted([urgent, *asked[:4]]), "one version took what the other waited for"


def test_groups_follow_the_reports() -> None:
    engines = EngineGroups()

    def pools(engine: str, *digests: str) -> list[PoolSnapshot]:
        return [PoolSnapshot(digest, 1, 0, 1, 0, 0, 1, 1, engine=engine) for digest in digests]

    engines.learn("w0", pools("", A))
    assert engines.versions_of(A) == (A,)
    engines.learn("w0", pools(A, A, B))
    engines.learn("w1", pools(B, B, C))
    assert engines.versions_of(C) == (A, B, C), "both compete with B"
    engines.learn("w1", pools("", C))
    assert engines.versions_of(B) == (A, B)
    assert engines.versions_of(C) == (C,)
    engines.learn("w0", ())
    assert engines.versions_of(A) == (A,)
