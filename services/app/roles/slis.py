"""The service level indicators: what gateways measure, and the store of the leading control plane."""

from __future__ import annotations

from services.adapters.grpc.slis import GrpcSlis
from services.app.environment import Environment
from services.app.roles.ledger import open_ledger_store
from services.app.roles.shared import open_directory
from services.controlplane.objectives.store import SliStore
from services.core.records import OBJECTIVES, Objective
from services.gateway.slis.recorder import SliRecorder
from services.gateway.slis.reporter import SliReporter
from services.runtime.fleet_state.leadership import Election
from services.runtime.fleet_state.objectives import ObjectiveIndex


def open_sli_store(environment: Environment, election: Election) -> SliStore:
    """Return the store of a control plane, which counts by the objectives of the fleet state."""
    objectives = ObjectiveIndex(environment.informer(OBJECTIVES, Objective))
    return SliStore(open_ledger_store(environment), environment.clock, election, lambda: objectives.by_class)


def open_sli_recorder(environment: Environment) -> SliRecorder:
    """Return the recorder of a gateway; what it counts is reported from now on."""
    recorder = SliRecorder(environment.metrics, zone=environment.settings.zone)
    calls = GrpcSlis(
        open_directory(environment, "controlplane"), environment.internal_token, environment.clock
    )
    environment.closing.push_async_callback(calls.close)
    reporter = SliReporter(
        recorder, calls, environment.clock, environment.ids.source_id(), metrics=environment.metrics
    )
    environment.closing.push_async_callback(reporter.close)
    environment.supervisor.spawn("service level indicators", reporter.run())
    return recorder
