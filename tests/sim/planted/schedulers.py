"""Schedulers with a bug each. A term makes its parts itself: a variant takes the place of one at once."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from msgspec.structs import replace

from services.scheduler.fleet.view import FleetView
from services.scheduler.overload.pool_load import Overload
from services.scheduler.policy.overload.shedding import SheddingOrder, ShedRank
from services.scheduler.policy.placement.candidate import PlaceQuery
from services.scheduler.policy.placement.choose import Chosen, NoWorker, PlacementProfile
from services.scheduler.policy.queue.fairness import Account, FairShares
from services.scheduler.queue.service_ledger import ServiceLedger, Shares
from services.scheduler.service import SchedulerService
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import Term
from simulator.fleet.nodes.gateway_node import TICKET_KEY
from simulator.fleet.nodes.plane_node import SchedulerNode
from simulator.fleet.spec import FleetSpec
from simulator.lab.baselines import ARRIVAL


class ShedsWhoComes(SchedulerNode):
    """Refuses whoever comes while the model is overloaded, however low those are that wait."""

    def make_service(self, spec: FleetSpec, telemetry: SchedulerTelemetry) -> SchedulerService:
        process = self.process
        return _ShedsWhoComes(TICKET_KEY, spec.term, process.clock, process.rng, telemetry=telemetry)


class GrantsAnywhere(SchedulerNode):
    """Grants on any worker that it knows of, whatever it knows of it."""

    def make_service(self, spec: FleetSpec, telemetry: SchedulerTelemetry) -> SchedulerService:
        process = self.process
        return _GrantsAnywhere(TICKET_KEY, spec.term, process.clock, process.rng, telemetry=telemetry)


class GrantsEjected(SchedulerNode):
    """Grants on workers that it tries no more, or not yet again."""

    def make_service(self, spec: FleetSpec, telemetry: SchedulerTelemetry) -> SchedulerService:
        process = self.process
        return _GrantsEjected(TICKET_KEY, spec.term, process.clock, process.rng, telemetry=telemetry)


class _ShedsWhoComes(SchedulerService):
    def new_term(self, epoch: int) -> Term:
        term = super().new_term(epoch)
        term.overload.__class__ = _NoVictims
        return term


class _NoVictims(Overload):
    def _pool(self, digest: str):  # type: ignore[no-untyped-def]
        pool = super()._pool(digest)
        pool.order.__class__ = _NobodyGoes
        return pool


class _NobodyGoes(SheddingOrder[Any]):
    def victim_for(self, rank: ShedRank, *, retried: bool) -> None:
        return None


class _GrantsAnywhere(SchedulerService):
    def new_term(self, epoch: int) -> Term:
        term = super().new_term(epoch)
        term.fleet.__class__ = _Unfiltered
        return term


class _GrantsEjected(SchedulerService):
    def new_term(self, epoch: int) -> Term:
        term = super().new_term(epoch)
        term.fleet.__class__ = _Lenient
        return term


class _Lenient(FleetView):
    def choose(
        self, digest: str, query: PlaceQuery, profile: PlacementProfile, rng: Random
    ) -> Chosen | NoWorker:
        found = super().choose(digest, query, profile, rng)
        shut = [
            name
            for name, held in self.candidates(digest).items()
            if held.ejected and held.ready and held.reporting
        ]
        if isinstance(found, Chosen) and shut:
            return replace(found, worker_id=rng.choice(shut))
        return found


class _Unfiltered(FleetView):
    def choose(
        self, digest: str, query: PlaceQuery, profile: PlacementProfile, rng: Random
    ) -> Chosen | NoWorker:
        found = super().choose(digest, query, profile, rng)
        shut = [name for name, held in self.candidates(digest).items() if not held.serving]
        if isinstance(found, Chosen) and shut:
            return replace(found, worker_id=rng.choice(shut))
        return found


class FirstComeFirstServed(SchedulerNode):
    """Serves by arrival, whoever was served what."""

    def make_service(self, spec: FleetSpec, telemetry: SchedulerTelemetry) -> SchedulerService:
        process = self.process
        term = dataclasses.replace(spec.term, discipline=ARRIVAL)
        return SchedulerService(TICKET_KEY, term, process.clock, process.rng, telemetry=telemetry)


class IgnoresWeights(SchedulerNode):
    """Serves every tenant as if its weight were 1."""

    def make_service(self, spec: FleetSpec, telemetry: SchedulerTelemetry) -> SchedulerService:
        process = self.process
        return _IgnoresWeights(TICKET_KEY, spec.term, process.clock, process.rng, telemetry=telemetry)


class _IgnoresWeights(SchedulerService):
    def new_term(self, epoch: int) -> Term:
        term = super().new_term(epoch)
        term.queue.ledger.__class__ = _Equal
        return term


class _Equal(ServiceLedger):
    def shares(self, digest: str) -> Shares:
        found = super().shares(digest)
        for shares in found.values():
            shares.__class__ = _EqualShares
        return found


class _EqualShares(FairShares):
    def weigh(self, account: Account, weight: float) -> None:
        super().weigh(account, 1.0)
