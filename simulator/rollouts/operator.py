"""The operator of a simulated rollout, with the production methods over the network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

from services.controlplane.rollouts.records import ENDED, RolloutPhase
from services.controlplane.rollouts.resource import Rollouts, RolloutView
from services.core.errors import FairwayError
from simulator.fleet.assembly import SimFleet
from simulator.fleet.rollout_watch import SignedStore
from simulator.kernel.process import Process
from simulator.rollouts.script import NAME, CandidateKind, kind_of, rollout

_BEGIN_S: Final = 2.0
_LOOK_S: Final = 0.25
_ABORT_WITHIN_S: Final = 14.0


class Operator:
    """A plan of a run: starts the seed's rollout, aborts it where its kind demands that, awaits its end."""

    def __init__(self, seed: int) -> None:
        self._kind = kind_of(seed)
        self._seed = seed
        self._rng = Random(f"operator {seed}")
        self.phase: RolloutPhase | None = None  # the phase that it read last

    async def run(self, fleet: SimFleet) -> None:
        process = Process("operator", fleet.loop, self._rng)
        rollouts = Rollouts(SignedStore(process, fleet.network, fleet.routes), process.clock)
        await fleet.wait(_BEGIN_S)
        await self._until_done(fleet, lambda: rollouts.create(rollout(self._seed), request_id="start"))
        abort_s: float | None = None
        aborts = self._kind is CandidateKind.ABORTED
        while self.phase not in ENDED:
            await fleet.wait(_LOOK_S)
            try:
                found = (await rollouts.get(NAME)).stored.record
            except FairwayError:
                continue
            self.phase = found.phase
            if found.phase in (RolloutPhase.RUNNING, RolloutPhase.SOAKING) and abort_s is None:
                abort_s = fleet.loop.now_s + self._rng.uniform(0.0, _ABORT_WITHIN_S)
            if aborts and abort_s is not None and fleet.loop.now_s >= abort_s:
                aborts = False
                await self._until_done(fleet, lambda: rollouts.abort(NAME, request_id="abort"))

    async def _until_done(self, fleet: SimFleet, call: Callable[[], Awaitable[RolloutView]]) -> None:
        while True:
            try:
                await call()
            except FairwayError:
                await fleet.wait(2 * _LOOK_S)
            else:
                return
