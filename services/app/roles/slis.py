"""The service level indicators: what gateways measure, and the store of the leading control plane."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.adapters.grpc.leader_calls import GrpcSlis, LeadingPlane
from services.app.environment import Environment
from services.app.roles.ledger import open_ledger_store
from services.app.roles.shared import open_calls
from services.controlplane.diagnosis.listing import Diagnoses
from services.controlplane.diagnosis.store import SampleStore
from services.controlplane.event_log import EventRecorder
from services.controlplane.objectives.alerts import ObjectiveAlerts
from services.controlplane.objectives.servicer import SliListing
from services.controlplane.objectives.store import SliStore
from services.controlplane.resources.objectives import Objectives
from services.controlplane.telemetry import AlertTelemetry
from services.core.records import OBJECTIVES, Objective, Worker
from services.gateway.slis import SliRecorder, SliReporter
from services.runtime.fleet_state.indexes import ObjectiveIndex
from services.runtime.fleet_state.leadership import Election


def open_objectives(
    environment: Environment,
    election: Election,
    objectives: Objectives,
    recorder: EventRecorder,
    telemetry: AlertTelemetry,
    workers: Callable[[], Iterable[Worker]],
    leader: LeadingPlane,
) -> tuple[SliStore, SliListing, ObjectiveAlerts, Diagnoses]:
    """Return the store of what gateways measure, the queries of it, the alerts of the objectives and the
    diagnoses."""
    clock, index = environment.clock, ObjectiveIndex(environment.informer(OBJECTIVES, Objective))
    ledger = open_ledger_store(environment)
    samples = SampleStore(
        ledger,
        clock,
        workers=workers,
        installation=lambda: environment.store.generation,
        rng=environment.rng,
    )
    slis = SliStore(ledger, clock, election, lambda: index.by_class, samples)
    alerts = ObjectiveAlerts(
        environment.store,
        objectives,
        slis,
        election,
        clock,
        events=recorder,
        telemetry=telemetry,
    )
    diagnoses = Diagnoses(samples, leader, clock, leads=lambda: slis.leads)
    return slis, SliListing(slis, leader, workers=workers), alerts, diagnoses


def open_sli_recorder(environment: Environment) -> SliRecorder:
    """Return the recorder of a gateway; what it counts is reported from now on."""
    settings = environment.settings
    recorder = SliRecorder(
        environment.metrics,
        zone=settings.zone,
        gateway=settings.advertised,
        rng=environment.rng,
        log_s=lambda: environment.log_stream.spent_s,
    )
    reporter = SliReporter(
        recorder,
        open_calls(environment, GrpcSlis),
        environment.clock,
        environment.ids.source_id(),
        metrics=environment.metrics,
    )
    environment.closing.push_async_callback(reporter.close)
    environment.supervisor.spawn("service level indicators", reporter.run())
    return recorder
