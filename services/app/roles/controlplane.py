"""The control plane: resources, and the reconciler that acts while this process leads."""

from __future__ import annotations

from typing import Final

from fairway.v1 import (
    controlplane_pb2,
    controlplane_pb2_grpc,
    usage_pb2,
    usage_pb2_grpc,
)
from services.adapters.blobs.s3_bucket import open_bucket
from services.adapters.grpc.queues import GrpcQueues
from services.adapters.grpc.usage import GrpcUsage
from services.adapters.ledger.folder import FolderLedger
from services.adapters.ledger.s3 import S3Ledger
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.shared import leader_record, open_directory, open_election
from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import FleetRecord
from services.controlplane.fleet import decode as decode_fleet
from services.controlplane.reconciler import Reconciler
from services.controlplane.resources.bootstrap import bootstrap
from services.controlplane.resources.sealing import Sealer
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.controlplane.telemetry import ReconcilerTelemetry
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.listing import UsageListing
from services.controlplane.usage.servicer import UsageServicer
from services.controlplane.usage.telemetry import LedgerTelemetry
from services.core.records import (
    ROOT,
    leader_key,
)
from services.ports.ledger_store import LedgerStore
from services.rpc.server import Service
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.runtime.process.health import Check

_DAY_S: Final = 86_400.0


def controlplane(environment: Environment) -> Role:
    """The control plane: resources, and the reconciler that acts while this process leads."""
    settings, store, clock = environment.settings, environment.store, environment.clock
    election = open_election(environment, "controlplane", leader_record(environment))
    fleet: Informer[FleetRecord | None] = Informer(store, ROOT, decode_fleet, clock, rng=environment.rng)
    environment.exported.informer(fleet)
    rounds = ReconcilerTelemetry(clock, environment.metrics, leads=lambda: election.epoch is not None)
    recorder = EventRecorder(store, clock)
    reconciler = Reconciler(
        store, fleet, election, leader_key("controlplane"), clock, rounds, events=recorder
    )
    identity = environment.identity()
    service = ControlPlaneService(store, clock, Sealer(environment.internal_token.encode()))
    queues = GrpcQueues(open_directory(environment), environment.internal_token, clock)
    environment.closing.push_async_callback(queues.close)
    ledger, listing = _usage(environment, election)

    async def start() -> None:
        await environment.store.found(environment.ids.store_generation())
        if settings.admin_key_file is not None:
            await bootstrap(store, clock, settings.admin_key_file)
        environment.supervisor.spawn("fleet informer", fleet.run())
        environment.supervisor.spawn("election", election.run())
        environment.supervisor.spawn("reconciler", reconciler.run())
        environment.supervisor.spawn("event recorder", recorder.run())
        environment.supervisor.spawn("usage ledger", ledger.run())

    server = environment.server(
        Service(
            controlplane_pb2.DESCRIPTOR.services_by_name["ControlPlaneService"],
            controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
            ControlPlaneServicer(service, store, queues, listing, require_current=identity.require_current),
        ),
        Service(
            usage_pb2.DESCRIPTOR.services_by_name["UsageService"],
            usage_pb2_grpc.add_UsageServiceServicer_to_server,
            UsageServicer(ledger),
        ),
        identity=identity,
    )
    return Role(server, start=start, checks=(Check("rounds", rounds.problem),))


def _usage(environment: Environment, election: Election) -> tuple[UsageLedger, UsageListing]:
    """The usage ledger, and the queries of it."""
    settings, clock = environment.settings, environment.clock
    telemetry = LedgerTelemetry(environment.metrics, waiting=lambda: ledger.waiting)
    ledger = UsageLedger(
        open_ledger_store(environment),
        clock,
        election,
        writer=environment.ids.request_id(),
        retention_s=settings.usage_retention_days * _DAY_S,
        telemetry=telemetry,
    )
    leader = GrpcUsage(open_directory(environment, "controlplane"), environment.internal_token, clock)
    environment.closing.push_async_callback(leader.close)
    return ledger, UsageListing(ledger, leader, clock)


def open_ledger_store(environment: Environment) -> LedgerStore:
    """Return the store of the settings. Raises ConfigError, StoreUnavailable for an unusable folder."""
    settings = environment.settings
    if settings.usage_dir is None and settings.blob_store != "folder":
        return S3Ledger(open_bucket(settings, environment.clock))
    return FolderLedger(settings.usage_dir or settings.state_dir / "usage")
