"""A flow queue over workers that take every grant, for tests of what it decides."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from prometheus_client import generate_latest

from services.core.errors import (
    FairwayError,
)
from services.core.fleet import Granted, PlacementRefused, PoolSnapshot, ReportSnapshot
from services.core.generation import Grant
from services.core.records import Priority
from services.runtime.telemetry.metrics import Metrics
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.policy.placement.choose import PlacementProfile
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.policy.step_time import StepTimes
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.index import QueueLimits
from services.scheduler.queue.rules import PRODUCTION, QueueDiscipline
from services.scheduler.telemetry import SchedulerTelemetry
from tests.support.metrics import values
from tests.unit.scheduler.model import BLOCK, DIGEST, ManualClock, place_spec


class Rig:
    """A queue over workers of one pool each, on a clock of the test's."""

    def __init__(
        self,
        *totals: int,
        limits: QueueLimits | None = None,
        order: OrderPolicy | None = None,
        slots: int = 64,
        discipline: QueueDiscipline = PRODUCTION,
    ) -> None:
        self.now_s = 1000.0
        self.slots = slots
        self.fleet = FleetView(1, FleetLimits(), StepTimes())
        self.metrics = Metrics()
        self.telemetry = SchedulerTelemetry(self.metrics, ManualClock())
        self.queue = FlowQueue(
            self.fleet,
            limits if limits is not None else QueueLimits(),
            order if order is not None else OrderPolicy(max_bypasses=3, lookahead=8),
            PlacementProfile(),
            Random(1),
            discipline=discipline,
            observer=self.telemetry,
        )
        self.totals = list(totals)
        self.groups = [""] * len(totals)
        self.reserved = [0] * len(totals)
        self.seen: list[list[int]] = [[] for _ in totals]
        self.number = 0
        for index in range(len(totals)):
            self.report(index)

    def report(
        self,
        index: int,
        *,
        ready: bool = True,
        draining: bool = False,
        digest: str = DIGEST,
        running: int = 0,
        yields: int = 0,
    ) -> None:
        pool = PoolSnapshot(
            digest,
            self.totals[index],
            self.reserved[index],
            BLOCK,
            running,
            0,
            self.slots,
            self.totals[index] * BLOCK,
            ready=ready,
            yields_to_rank=yields,
        )
        seen, self.seen[index] = tuple(self.seen[index]), []
        snapshot = ReportSnapshot(
            f"w{index}", 1, "h:1", pools=(pool,), epoch=1, grants_seen=seen, draining=draining
        )
        snapshot = replace(snapshot, node_group=self.groups[index])
        self.queue.touch(self.fleet.apply(index, snapshot, self.now_s))

    def ask(
        self,
        blocks: int,
        *,
        priority: Priority = Priority.STANDARD,
        ttl: float = 60.0,
        excluded: tuple[str, ...] = (),
        digest: str = DIGEST,
        tenant: str = "acme",
        left_s: float | None = None,
        output: int = 1,
        **fields: Any,
    ) -> int:
        self.number += 1
        spec = place_spec(
            prompt_tokens=blocks * BLOCK - 1,
            max_output_tokens=output,
            priority=priority,
            arrival_s=self.now_s,
            queue_ttl_s=ttl,
            excluded_workers=excluded,
            digest=digest,
            tenant=tenant,
        )
        spec = replace(spec, deadline_left_s=left_s, request_id=f"req_{self.number}", **fields)
        self.queue.submit(1, self.number, spec, spec.arrival_unix_us, self.now_s)
        return self.number

    def turn(self) -> dict[int, Grant | FairwayError]:
        """One turn of the owner; grants start on their workers at once."""
        self.queue.touch(self.fleet.expire(self.now_s))
        self.queue.run_pass(self.now_s)
        self.queue.expire(self.now_s)
        self.queue.run_pass(self.now_s)
        self.queue.check_integrity()
        assert sum(self.counted("fairway_scheduler_queue_placements").values()) == len(self.queue)
        self.fleet.check_integrity()
        found: dict[int, Grant | FairwayError] = {}
        for _, outcome in self.queue.take_outcomes():
            assert outcome.placement_id not in found
            if isinstance(outcome, Granted):
                grant = found[outcome.placement_id] = outcome.grant
                index = int(grant.worker_id[1:])
                self.reserved[index] += grant.kv_blocks
                self.seen[index].append(grant.sequence)
            else:
                assert isinstance(outcome, PlacementRefused)
                found[outcome.placement_id] = outcome.error
        return found

    def counted(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return values(generate_latest(self.metrics.registry).decode(), name)

    def free(self, index: int, blocks: int) -> None:
        self.reserved[index] -= blocks
        self.report(index)
