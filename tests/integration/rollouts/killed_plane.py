"""A control plane as a process of its own, which kills itself before or after its n-th commit of a rollout.

``python -m tests.integration.rollouts.killed_plane ETCD NUMBER before|after VERDICT`` (number 0: never).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from services.adapters.etcd.store import EtcdStore
from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import FleetRecord, decode
from services.controlplane.objectives.policy.gates import GateReport, Verdict
from services.controlplane.reconciler import Reconciler
from services.controlplane.rollouts.controller import RolloutController
from services.controlplane.rollouts.records import Rollout, RolloutPhase
from services.core.arms import ArmKey, ArmWindow, GateWindow
from services.core.records import ROLLOUTS, ROOT, BurnAlert, Leader, Priority, Sli, dump, leader_key
from services.core.rollouts.routes import ModelRoute
from services.ports.store import Committed, Condition, ConditionFailed, Operation
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election

CLOCK = SystemClock()
KEY = leader_key("controlplane")


class KillingStore(EtcdStore):
    """Kills the process around the n-th commit that changes a rollout."""

    number, when, seen = 0, "before", 0

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        counted = any(one.key.startswith(ROLLOUTS) for one in operations)
        self.seen += counted
        due = counted and self.seen == self.number
        if due and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = await super().commit(operations, conditions)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


class NoSlis:
    """Nothing is measured."""

    def arms_of(self, window: GateWindow) -> dict[str, ArmWindow]:
        return {}

    def lasted_s(self, window: GateWindow) -> float:
        return 0.0

    def counting_s(self) -> float:
        return 60.0

    def arm_alerts(self, arm: ArmKey, since_unix_s: float) -> dict[tuple[Priority, Sli], BurnAlert]:
        return {}


class JudgedController(RolloutController):
    """Its gates have one verdict; RUNNING beyond the second step only where that is a failure."""

    verdict = Verdict.PASS

    def reports(self, rollout: Rollout, route: ModelRoute | None) -> dict[str, GateReport]:
        if rollout.phase is not RolloutPhase.RUNNING:
            return {}
        failing = self.verdict is Verdict.FAIL and rollout.step < 2
        verdict = Verdict.PASS if failing else self.verdict
        return {arm.name: GateReport(verdict, (), 40, 40) for arm in rollout.arms}


async def main(endpoint: str, number: int, when: str, verdict: str) -> None:
    store = KillingStore([endpoint], CLOCK)
    store.number, store.when = number, when
    informer: Informer[FleetRecord | None] = Informer(store, ROOT, decode, CLOCK)
    election = Election(store, KEY, dump(Leader(f"p{os.getpid()}", "")), 1, CLOCK)
    reconciler = Reconciler(store, informer, election, CLOCK, events=EventRecorder(store, CLOCK))
    controller = JudgedController(store, informer, election, CLOCK, slis=NoSlis())
    controller.verdict = Verdict(verdict)
    await asyncio.gather(informer.run(), election.run(), reconciler.run(), controller.run())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
