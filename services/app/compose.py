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
from services.runtime.config import Settings, read_secret
from services.runtime.identity import KeyDirectory
from services.runtime.informer import Informer
from services.runtime.leadership import Election
from services.runtime.machine import default_engine_threads
from services.runtime.secrets import Ticket, issue_ticket
from services.scheduler.fleet_view import FleetLimits
from services.scheduler.flow_queue import QueueLimits
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
    election = _election(environment, "controlplane", _leader(environment))
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


def scheduler(environment: Environment) -> Role:
    """The scheduler: places for whoever asks while it leads; a standby otherwise."""
    settings = environment.settings
    service = SchedulerService(
        read_secret(settings.ticket_key_file).encode(),
        term_settings(settings),
        environment.clock,
        environment.rng,
    )
    leader = _leader(environment)
    election = _election(environment, "scheduler", leader)

    async def open_doors() -> None:
        # Only now does the address answer, and only then may others be sent to it.
        environment.supervisor.spawn("election", election.run())
        environment.supervisor.spawn("scheduler", service.run(election))

    server = environment.server(
        Service(
            scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            SchedulerServicer(service, environment.clock, leader_id=leader.leader_id),
        )
    )
    return Role(server, start=_nothing, open=open_doors)


def worker(environment: Environment) -> Role:
    """The worker: its agent, and the engines that the agent starts."""
    settings, clock = environment.settings, environment.clock
    directory = _directory(environment)
    host = SequenceHost(changed=_ignore)
    agent = WorkerAgent(
        WorkerIdentity(
            worker_id=settings.worker_id,
            address=settings.advertised,
            zone=settings.zone,
            labels=settings.labels,
            device=settings.device,
            memory_bytes=settings.memory_bytes,
            lease_ttl_s=settings.lease_ttl_s,
        ),
        settings=EngineSettings(
            device=settings.device,
            threads=settings.engine_threads or default_engine_threads(),
            kv_memory_bytes=settings.kv_memory_bytes,
            token_budget=settings.token_budget,
            max_sequences=settings.max_sequences,
            null_step_s=settings.null_step_s,
        ),
        host=host,
        store=environment.store,
        files=_model_files(environment),
        clock=clock,
        supervisor=environment.supervisor,
    )
    reporter = Reporter(
        directory,
        environment.internal_token,
        clock,
        environment.supervisor,
        agent.take_snapshot,
        hear_leader=agent.hear_leader,
        rng=environment.rng,
    )
    host.changed = reporter.changed
    environment.closing.push_async_callback(reporter.close)

    async def open_doors() -> None:
        environment.supervisor.spawn("agent", agent.run())
        reporter.start()
        environment.closing.push_async_callback(agent.close)

    identity = environment.identity()
    server = environment.server(
        Service(
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            WorkerServicer(host, agent, clock),
        ),
        identity=identity,
    )
    return Role(server, start=_nothing, open=open_doors, drain=agent.drain)


def gateway(environment: Environment) -> Role:
    """The gateway: both faces over one service."""
    settings, clock, supervisor = environment.settings, environment.clock, environment.supervisor
    identity = environment.identity()
    service = _gateway_service(environment, identity)

    def received() -> Received:
        return Received(clock.monotonic_s(), int(clock.unix_s() * 1e6), environment.ids.request_id())

    server = environment.server(
        Service(
            inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            InferenceServicer(service, received, heartbeat_s=settings.heartbeat_s),
        ),
        identity=identity,
    )

    def not_ready() -> str:
        return "this gateway is shutting down" if service.draining else ""

    app = build_app(
        service,
        identity,
        clock,
        environment.ids,
        max_body_bytes=settings.max_body_bytes,
        not_ready=not_ready,
    )
    host, _, port = settings.http_listen.rpartition(":")
    http = HttpServer(app, host, int(port))

    async def open_doors() -> None:
        await http.start()
        supervisor.spawn("renew", service.renew_forever())

    async def drain(timeout_s: float) -> None:
        await service.drain(timeout_s)
        await http.stop(1.0)

    return Role(server, start=_nothing, open=open_doors, drain=drain)


def _gateway_service(environment: Environment, identity: KeyDirectory) -> GatewayService:
    settings, clock = environment.settings, environment.clock
    threads = ThreadPoolExecutor(_TOKENISER_THREADS, "tokenise")
    environment.closing.callback(threads.shutdown, wait=False, cancel_futures=True)
    catalog = ModelCatalog(
        environment.informer(DEPLOYMENTS, Deployment),
        environment.informer(WORKERS, Worker),
        _model_files(environment),
        clock,
        executor=threads,
    )
    environment.supervisor.spawn("warm text models", catalog.warm_forever())
    return GatewayService(
        validator=Validator(catalog, identity, environment.rng, executor=threads),
        identity=identity,
        catalog=catalog,
        ports=_gateway_ports(environment),
        limits=GatewayLimits(queue_ttl_s=settings.queue_ttl_s, heartbeat_s=settings.heartbeat_s),
    )


def _gateway_ports(environment: Environment) -> Ports:
    settings, clock, supervisor = environment.settings, environment.clock, environment.supervisor
    token = environment.internal_token
    gateway_id = f"{settings.advertised}/{environment.ids.request_id()}"
    limiter = RedisLimiter(settings.redis_url, clock)
    environment.closing.push_async_callback(limiter.close)
    workers = GrpcWorkers(token, gateway_id, clock, supervisor)
    environment.closing.push_async_callback(workers.close)
    placement = GrpcPlacement(_directory(environment), token, gateway_id, clock, supervisor, environment.rng)
    environment.closing.push_async_callback(placement.close)
    ticket_key = read_secret(settings.ticket_key_file).encode()

    def sign_ticket(tenant_id: str, request_id: str, expire_unix_s: float) -> bytes:
        return issue_ticket(ticket_key, Ticket(tenant_id, request_id, int(expire_unix_s) + 1))

    return Ports(
        limiter=FallbackLimiter(limiter, MemoryLimiter(clock, local=True), clock),
        placement=placement,
        workers=workers,
        clock=clock,
        supervisor=supervisor,
        rng=environment.rng,
        sign_ticket=sign_ticket,
        new_incident=environment.ids.incident_id,
        error_of=by_reason,
    )


def term_settings(settings: Settings) -> TermSettings:
    """The scheduler's limits from the process settings."""
    return TermSettings(
        fleet=FleetLimits(grant_ttl_s=settings.grant_ttl_s),
        queue=QueueLimits(
            predicted_output_tokens=settings.predicted_output_tokens, max_per_pool=settings.queue_limit
        ),
    )


ROLES: Final[Mapping[str, Callable[[Environment], Role]]] = {
    "registry": registry,
    "controlplane": controlplane,
    "scheduler": scheduler,
    "worker": worker,
    "gateway": gateway,
}


async def _nothing() -> None:
    return None


def _ignore() -> None:
    return None


def _leader(environment: Environment) -> Leader:
    return Leader(leader_id=environment.ids.request_id(), address=environment.settings.advertised)


def _election(environment: Environment, role: str, leader: Leader) -> Election:
    return Election(
        environment.store,
        leader_key(role),
        dump(leader),
        environment.settings.leader_ttl_s,
        environment.clock,
        rng=environment.rng,
    )


def _directory(environment: Environment) -> SchedulerDirectory:
    directory = SchedulerDirectory(environment.store, environment.clock)
    environment.supervisor.spawn("scheduler directory", directory.run())
    return directory


def _model_files(environment: Environment) -> ModelFiles:
    settings = environment.settings
    channel = open_channel(settings.registry)
    environment.closing.push_async_callback(channel.close)
    client = RegistryClient(channel, environment.internal_token)
    root: Path = settings.state_dir / "models"
    return ModelFiles(client, root, environment.clock, max_bytes=settings.model_cache_bytes)
