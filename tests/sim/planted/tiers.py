"""Parts of a fleet with a bug each in the isolation of tenants."""

from __future__ import annotations

import asyncio
import dataclasses
from random import Random

from msgspec.structs import replace

from services.core.fixed_cost.rows import RawTensor
from services.core.generation import NotAdmittedReason, StartSpec
from services.core.records import IsolationTier
from services.scheduler.fleet.view import FleetView
from services.scheduler.policy.placement.candidate import PlaceQuery
from services.scheduler.policy.placement.choose import Chosen, NoWorker, PlacementProfile
from services.scheduler.service import SchedulerService
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import Term
from services.worker.streams.host import SequenceHost
from services.worker.streams.outbox import Outbox
from simulator.fleet.clients.row_client import RowsEnded, SimRows
from simulator.fleet.nodes.gateway_node import TICKET_KEY, GatewayNode
from simulator.fleet.nodes.plane_node import SchedulerNode
from simulator.fleet.nodes.worker_node import WorkerNode
from simulator.fleet.spec import FleetSpec


class SpillsOver(SchedulerNode):
    """Places a tenant whose node has no room on those of another group."""

    def make_service(self, spec: FleetSpec, telemetry: SchedulerTelemetry) -> SchedulerService:
        process = self.process
        return _Spilling(TICKET_KEY, spec.term, process.clock, process.rng, telemetry=telemetry)


class _Spilling(SchedulerService):
    def new_term(self, epoch: int) -> Term:
        term = super().new_term(epoch)
        term.fleet.__class__ = _AnyGroup
        return term


class _AnyGroup(FleetView):
    def choose(
        self, digest: str, query: PlaceQuery, profile: PlacementProfile, rng: Random
    ) -> Chosen | NoWorker:
        found = super().choose(digest, query, profile, rng)
        if isinstance(found, Chosen) or not query.node_group:
            return found
        return super().choose(digest, replace(query, node_group=""), profile, rng)


class RefusesNobody(SchedulerNode):
    """Lets everybody wait for a node of its group."""

    def make_service(self, spec: FleetSpec, telemetry: SchedulerTelemetry) -> SchedulerService:
        process = self.process
        return _Patient(TICKET_KEY, spec.term, process.clock, process.rng, telemetry=telemetry)


class _Patient(SchedulerService):
    def new_term(self, epoch: int) -> Term:
        term = super().new_term(epoch)
        term.fleet.__class__ = _LacksNothing
        return term


class _LacksNothing(FleetView):
    def lacks_group(self, digest: str, node_group: str, now_s: float) -> bool:
        return False


class ForgetsTiersOfRows(GatewayNode):
    """Sends the rows of every tenant to the shared nodes."""

    def run_rows(
        self, sim_rows: SimRows, rows: tuple[tuple[RawTensor, ...], ...], ended: RowsEnded
    ) -> asyncio.Task[None]:
        tenant = self._tenants[sim_rows.tenant]
        self._tenants[sim_rows.tenant] = dataclasses.replace(tenant, isolation=IsolationTier.PACKED)
        return super().run_rows(sim_rows, rows, ended)


class TakesEveryGroup(WorkerNode):
    """Admits whoever comes, whatever group it is of."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Open(changed=made.changed, fallback=made._fallback, device=made.device)


class _Open(SequenceHost):
    def _is_of_group(self, node_group: str) -> bool:
        return True


class ForgetsShares(WorkerNode):
    """Runs every tenant as if it had no KV budget."""

    def make_host(self) -> SequenceHost:
        made = super().make_host()
        return _Unbounded(changed=made.changed, fallback=made._fallback, device=made.device)


class _Unbounded(SequenceHost):
    def start(self, outbox: Outbox, handle: int, spec: StartSpec) -> NotAdmittedReason | None:
        return super().start(outbox, handle, dataclasses.replace(spec, kv_share=0.0))
