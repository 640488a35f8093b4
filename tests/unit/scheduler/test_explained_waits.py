"""What operators are told of a placement that waits: by the queue that looks, through the log."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fairway.cli.commands.placements import DECISIONS
from fairway.v1 import scheduler_pb2 as pb
from services.core.decisions import QUEUED
from services.core.fleet import LONG_PROMPT_TOKENS, PoolSnapshot, ReportSnapshot
from services.core.generation import PlaceSpec
from services.rpc.convert.scheduler import decision_to_proto
from services.scheduler.explain.decision_log import DecisionLog
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.policy.placement.choose import PlacementProfile
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.policy.step_time import StepTimes
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.index import QueueLimits
from tests.support.clocks import HandClock
from tests.unit.scheduler.model import BLOCK, DIGEST, place_spec

BACKLOG_TOKENS = 1 << 20
SOME_TOKENS = 1500  # queued: too much for one that gives way, and for nobody else


class Rig:
    """A queue over equal workers that tells a decision log, as a term composes them."""

    def __init__(self, workers: int, *, blocks: int = 64) -> None:
        profile = PlacementProfile()
        self.clock = HandClock(1000.0)
        self.log = DecisionLog(self.clock, profile)
        self.fleet = FleetView(1, FleetLimits(), StepTimes())
        self.queue = FlowQueue(
            self.fleet,
            QueueLimits(),
            OrderPolicy(),
            profile,
            Random(1),
            observer=self.log,
            decisions=self.log,
        )
        self.blocks = blocks
        self.workers = workers
        self.asked = 0
        self.report()

    def report(self, *, taken: int = 0, prefill: int = 0, ready: bool = True) -> None:
        """Each worker reports so many blocks taken and prompt tokens queued; the queue is passed over."""
        for index in range(self.workers):
            pool = PoolSnapshot(
                DIGEST, self.blocks, taken, BLOCK, 0, 0, 8, 0, queued_prefill_tokens=prefill, ready=ready
            )
            seen = tuple(range(1, self.asked + 1))
            told = ReportSnapshot(f"w{index}", 1, "h:1", pools=(pool,), epoch=1, grants_seen=seen)
            self.queue.touch(self.fleet.apply(index, told, self.clock.now_s))
        self.turn()

    def ask(self, *, blocks: int = 4, tenant: str = "acme", kv_share: float = 0.0) -> str:
        self.asked += 1
        name = f"req_{self.asked}"
        spec: PlaceSpec = replace(
            place_spec(prompt_tokens=blocks * BLOCK - 1, max_output_tokens=1, tenant=tenant),
            request_id=name,
            kv_share=kv_share,
        )
        self.queue.submit(1, self.asked, spec, spec.arrival_unix_us, self.clock.now_s)
        return name

    def turn(self) -> None:
        self.queue.run_pass(self.clock.now_s)
        self.queue.check_integrity()
        self.log.check_integrity()

    def told(self, request_id: str) -> pb.PlacementDecision:
        """Return what an operator is told, over the wire."""
        (decision,) = self.log.explain(request_id)
        return decision_to_proto(decision)


def rejected(decision: pb.PlacementDecision) -> dict[str, int]:
    return {one.filter: one.workers for one in decision.rejections}


def cell(decision: pb.PlacementDecision, header: str) -> str:
    """Return what `fairway explain` shows of it."""
    (column,) = (column for column in DECISIONS if column.header == header)
    return column.cell(decision)


@pytest.mark.parametrize("workers", [1, 4, 40])
def test_one_that_waits_for_kv_says_so(workers: int) -> None:
    rig = Rig(workers)
    rig.report(taken=62)
    name = rig.ask()
    rig.turn()
    rig.report(taken=61)  # hopeless: nobody is looked for
    told = rig.told(name)
    assert (told.outcome, told.looks, told.looks_without_room) == (QUEUED, 1, 1)
    assert cell(told, "why").startswith("no room at 1 of 1 looks")
    rig.ask(blocks=1)
    rig.report(taken=63)
    assert rig.told(name).looks_without_room == 2
    rig.report()
    told = rig.told(name)
    assert (told.outcome, told.looks, told.looks_without_room) == ("GRANTED", 3, 2)
    assert cell(told, "why").startswith("no room at 2 of 3 looks")


@pytest.mark.parametrize("workers", [4, 40])
def test_one_that_waits_behind_queued_prompts_names_the_filter_at_every_look(workers: int) -> None:
    """Also where a look everywhere was futile, and is not done again."""
    rig = Rig(workers)
    rig.report(prefill=BACKLOG_TOKENS)
    names = [rig.ask() for _ in range(3)]
    for _ in range(3):
        rig.turn()
        rig.queue.touch([DIGEST])
    for name in names:
        told = rig.told(name)
        assert rejected(told) == {"has_prefill_room": workers}
        assert (told.looks, told.looks_without_room, told.looks_giving_way) == (3, 0, 0)
        assert cell(told, "looks") == "3"
        assert cell(told, "why").startswith(f"has_prefill_room:{workers}(w")


def test_why_it_waited_is_not_forgotten_by_a_look_that_names_nothing() -> None:
    rig = Rig(40)
    rig.report(prefill=BACKLOG_TOKENS)
    name = rig.ask()
    rig.turn()
    small = rig.ask(blocks=1)
    rig.report(taken=62, prefill=BACKLOG_TOKENS)
    told = rig.told(name)
    assert (told.looks, told.looks_without_room) == (2, 1)
    assert rejected(told) == {"has_prefill_room": 40}
    rig.report()
    told = rig.told(name)
    assert (told.outcome, rejected(told)) == ("GRANTED", {"has_prefill_room": 40})
    assert rig.told(small).outcome == "GRANTED"


def test_one_that_gives_way_says_so() -> None:
    """The whale holds more than its share and has more waiting; the other is there to hold something."""
    rig = Rig(8)
    rig.ask(tenant="small")
    for _ in range(4):
        rig.ask(tenant="whale")
    rig.turn()
    waiting = [rig.ask(tenant="whale") for _ in range(6)]
    other = rig.ask(tenant="small")
    rig.report(prefill=SOME_TOKENS, taken=8)
    told = rig.told(waiting[0])
    assert (told.outcome, told.looks, told.looks_giving_way) == (QUEUED, 1, 1)
    assert rejected(told) == {"has_prefill_room": 8}
    assert cell(told, "why").startswith("yielding at 1")
    told = rig.told(other)
    assert (told.outcome, told.looks_giving_way) == ("GRANTED", 0)


def test_one_whose_tenant_is_at_its_kv_budget_says_so() -> None:
    """It goes to a worker where its tenant has budget left, and waits only where none is."""
    rig = Rig(2)
    names = [rig.ask(blocks=12, kv_share=0.25) for _ in range(3)]
    rig.turn()
    first, second, third = map(rig.told, names)
    assert [first.outcome, second.outcome, third.outcome] == ["GRANTED", "GRANTED", QUEUED]
    assert {first.worker_id, second.worker_id} == {"w0", "w1"}
    assert (first.looks_over_budget, second.looks_over_budget) == (0, 1)
    assert (third.looks, third.looks_over_budget) == (1, 1)
    assert cell(third, "why") == "at its KV budget at 1; within_kv_budget:2"


def test_one_whose_tenant_has_its_share_of_long_prompts_says_so() -> None:
    blocks = LONG_PROMPT_TOKENS // BLOCK + 1
    rig = Rig(2, blocks=2 * blocks)
    names = [rig.ask(blocks=blocks) for _ in range(4)]
    rig.turn()
    waits = [told for name in names if (told := rig.told(name)).outcome == QUEUED]
    assert waits
    assert rejected(waits[0]) == {"within_long_share": 2}
    assert waits[0].looks_without_room == 0


def test_one_that_waits_for_a_worker_to_load_says_so() -> None:
    rig = Rig(3)
    rig.report(ready=False)
    name = rig.ask()
    rig.turn()
    told = rig.told(name)
    assert (told.looks, told.looks_without_room, rejected(told)) == (1, 0, {"ready": 3})
    rig.report()
    assert rig.told(name).outcome == "GRANTED"
