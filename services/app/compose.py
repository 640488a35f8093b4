"""The only place that builds a role from its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from fairway.v1 import (
    controlplane_pb2,
    controlplane_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.adapters.fallback_limiter import FallbackLimiter
from services.adapters.folder_blobs import FolderBlobs
from services.adapters.grpc_placement import GrpcPlacement
from services.adapters.grpc_reporter import Reporter
from services.adapters.grpc_worker import GrpcWorkers
from services.adapters.memory_limiter import MemoryLimiter
from services.adapters.model_files import ModelFiles
from services.adapters.redis_limiter import RedisLimiter
from services.adapters.registry_client import RegistryClient
from services.adapters.scheduler_directory import SchedulerDirectory
from services.app.environment import Environment
from services.app.process import Role
from services.controlplane.bootstrap import bootstrap
from services.controlplane.fleet import FleetRecord
from services.controlplane.fleet import decode as decode_fleet
from services.controlplane.reconciler import Reconciler
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.core.records import (
    DEPLOYMENTS,
    ROOT,
    WORKERS,
    Deployment,
    Leader,
    Worker,
    dump,
    leader_key,
)
from services.gateway.catalog import ModelCatalog
from services.gateway.events import Received
from services.gateway.http_server import HttpServer
from services.gateway.openai_http import build_app
from services.gateway.service import GatewayLimits, GatewayService, Ports
from services.gateway.servicer import InferenceServicer
from services.gateway.validate import Validator
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from services.rpc.channel import open_channel
from services.rpc.server import Service
from services.rpc.status import by_reason
from services.runtime.config import read_secret
from services.runtime.informer import Informer
from services.runtime.leadership import Election
from services.runtime.secrets import Ticket, issue_ticket
from services.scheduler.service import SchedulerService
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.term import TermSettings
from services.worker.agent import WorkerAgent, WorkerIdentity
from services.worker.host import SequenceHost
from services.worker.servicer import WorkerServicer
from services.worker.version_slot import EngineSettings

_TOKENISER_THREADS: Final = 2


def registry(environment: Environment) -> Role:
    """The registry: versions in the store, chunks in a folder."""
    service = RegistryService(
        environment.store, FolderBlobs(environment.settings.state_dir / "blobs"), environment.clock
    )
    server = environment.server(
        Service(
            registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
            registry_pb2_grpc.add_RegistryServiceServicer_to_server,
            RegistryServicer(service),
        ),
        identity=environment.identity(),
    )
    return Role(server, start=_nothing)


def controlplane(environment: Environment) -> Role:
    """The control plane: resources, and the reconciler of whoever leads."""
    settings, store, clock = environment.settings, environment.store, environment.clock
    election = _election(environment, "controlplane")
    fleet: Informer[FleetRecord | None] = Informer(store, ROOT, decode_fleet, clock, rng=environment.rng)
    reconciler = Reconciler(store, fleet, election, leader_key("controlplane"), clock)
    service = ControlPlaneService(store, clock)

    async def start() -> None:
        if settings.admin_key_file is not None:
            await bootstrap(store, clock, settings.admin_key_file)
        environment.supervisor.spawn("fleet informer", fleet.run())
        environment.supervisor.spawn("election", election.run())
        environment.supervisor.spawn("reconciler", reconciler.run())

    server = environment.server(
        Service(
            controlplane_pb2.DESCRIPTOR.services_by_name["ControlPlaneService"],
            controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
            ControlPlaneServicer(service, store),
        ),
        identity=environment.identity(),
    )
    return Role(server, start=start)
