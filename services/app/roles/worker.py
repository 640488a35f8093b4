"""The worker: its agent, and the engines that the agent starts."""

from __future__ import annotations

from pathlib import Path

from fairway.engines.environment import default_folder
from fairway.v1 import (
    worker_pb2,
    worker_pb2_grpc,
)
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.leader_streams import StreamReportLinks
from services.adapters.links.reporter import Reporter
from services.adapters.model_files.cache import ModelFiles
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.ledger import open_usage_outbox, start_outbox
from services.app.roles.shared import open_directory, open_shared_files
from services.gateway.text.child import TextProcessCheck
from services.ports.clock import Clock
from services.rpc.server import RpcService
from services.runtime.config import Settings
from services.runtime.process.folders import compile_folder
from services.runtime.process.health import Check
from services.runtime.process.machine import default_engine_threads, device_type
from services.runtime.version_trust import VersionTrust
from services.worker.agent.agent import WorkerAgent
from services.worker.agent.device_telemetry import export_devices, peak_flops
from services.worker.agent.report import WorkerIdentity
from services.worker.servicer import WorkerServicer
from services.worker.slots.engine_process import ENGINE_MODULE, process_launcher
from services.worker.slots.engine_settings import RETIRE_MARGIN_S, EngineSettings
from services.worker.slots.followed_engine import Followers, led_launcher
from services.worker.slots.spare_engine import SpareEngine
from services.worker.slots.version_files import VersionFiles
from services.worker.streams.admission import FallbackAdmission, FallbackRules
from services.worker.streams.charges import DeviceKind, DeviceTime
from services.worker.streams.host import SequenceHost
from services.worker.telemetry import WorkerTelemetry, export_levels


def worker(environment: Environment) -> Role:
    """The worker: its agent, and the engines that the agent starts."""
    settings, clock = environment.settings, environment.clock
    schedulers = open_directory(environment)
    telemetry = WorkerTelemetry(
        environment.metrics, clock=clock, tracing=environment.tracing, lines=environment.request_lines
    )
    outbox = open_usage_outbox(environment)
    device = DeviceTime(_device_kind(settings), outbox, clock, residents=lambda: agent.residents())
    host = SequenceHost(
        changed=lambda: None,
        not_admitted=telemetry.not_admitted,
        fallback=_fallback(settings, clock, telemetry),
        device=device,
    )
    files, chunks = open_shared_files(environment, telemetry.found_damaged)
    agent = _agent(environment, host, files, telemetry)
    _export(environment, agent, files, device)
    reporter = Reporter(
        StreamReportLinks(GrpcStreams(environment.internal_token, environment.certificates), schedulers),
        clock,
        environment.supervisor,
        agent.take_snapshot,
        on_leader=agent.on_leader,
        on_counters=agent.on_counters,
        rng=environment.rng,
    )
    host.changed = reporter.changed
    environment.closing.push_async_callback(reporter.close)

    async def start() -> None:
        await files.own()
        await start_outbox(environment, outbox)

    async def start_serving() -> None:
        environment.supervisor.spawn("agent", agent.run())
        reporter.start()
        environment.closing.push_async_callback(agent.close)

    identity = environment.identity()
    server = environment.server(
        RpcService(
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            WorkerServicer(host, agent, clock),
        ),
        chunks,
        identity=identity,
    )
    return Role(
        server,
        start=start,
        open=start_serving,
        drain=agent.drain,
        checks=(
            Check("engines", agent.problem),
            Check("usage", lambda: outbox.problem or outbox.notice, withdraws=False),
        ),
        named=lambda: {f"version/{digest}": moves for digest, moves in agent.moving().items()},
    )


def _agent(
    environment: Environment, host: SequenceHost, files: ModelFiles, telemetry: WorkerTelemetry
) -> WorkerAgent:
    clock, supervisor, settings = environment.clock, environment.supervisor, environment.settings
    texts, engines = TextProcessCheck(clock, supervisor), engine_settings(settings)
    trust = VersionTrust(environment.store, clock)
    spare = SpareEngine(ENGINE_MODULE)
    environment.closing.callback(spare.close)
    return WorkerAgent(
        worker_identity(settings),
        settings=engines,
        host=host,
        store=environment.store,
        files=lambda version: VersionFiles(version, files, texts, clock, trust),
        launch=led_launcher(
            process_launcher(
                clock,
                supervisor,
                engines.timeouts,
                vllm_dir=vllm_folder(settings),
                ranks_address=settings.ranks_address,
                spare=spare,
            ),
            Followers(
                settings.worker_id,
                settings.followers,
                settings.ranks_address,
                GrpcStreams(environment.internal_token, environment.certificates),
            ),
            clock,
            supervisor,
        ),
        clock=clock,
        supervisor=supervisor,
        telemetry=telemetry,
    )


def vllm_folder(settings: Settings) -> Path:
    """The folder of vLLM's environment."""
    return settings.vllm_dir or default_folder("vllm", settings.state_dir)


def worker_identity(settings: Settings) -> WorkerIdentity:
    """The worker's identity, from the process settings."""
    return WorkerIdentity(
        worker_id=settings.worker_id,
        address=settings.advertised,
        zone=settings.zone,
        labels=settings.labels,
        slice=settings.slice,
        device=settings.device,
        memory_bytes=settings.memory_bytes,
        devices=settings.devices * (1 + len(settings.followers)),
        lease_ttl_s=settings.lease_ttl_s,
        device_type=settings.device_type or device_type(settings.device),
        cost_per_hour=settings.cost_per_hour,
    )


def engine_settings(settings: Settings) -> EngineSettings:
    """The engines' start settings, from the process settings."""
    return EngineSettings(
        device=settings.device,
        dtype=settings.engine_dtype,
        threads=settings.engine_threads or default_engine_threads(),
        kv_memory_bytes=settings.kv_memory_bytes,
        token_budget=settings.token_budget,
        max_sequences=settings.max_sequences,
        itl_target_s=settings.itl_target_s,
        batch_window_s=settings.batch_window_s,
        mode=settings.engine_mode,
        operators=settings.engine_operators,
        operators_cache=str(compile_folder(settings.state_dir)),
        prefix_cache=settings.prefix_cache,
        speculation=settings.speculation,
        max_proposals=settings.max_proposals,
        null_step_s=settings.null_step_s,
        request_log_per_s=settings.request_log_per_s,
        devices=settings.devices,
        followers=settings.followers,
        # A request accepted for a version is placed within the queue's time to live, or it ends.
        retire_s=settings.queue_ttl_s + RETIRE_MARGIN_S,
    )


def _device_kind(settings: Settings) -> DeviceKind:
    identity = worker_identity(settings)
    return DeviceKind(identity.worker_id, identity.device_type, identity.cost_per_hour)


def _fallback(settings: Settings, clock: Clock, telemetry: WorkerTelemetry) -> FallbackAdmission:
    rules = FallbackRules(settings.fallback_after_s, settings.fallback_credit_ratio)
    return FallbackAdmission(clock, rules, started=telemetry.fallback_started)


def _export(environment: Environment, agent: WorkerAgent, files: ModelFiles, device: DeviceTime) -> None:
    assignments, lease = agent.views
    environment.exported.informer(assignments)
    environment.exported.lease("worker", lease)
    export_levels(environment.metrics, agent.levels)
    identity, settings = worker_identity(environment.settings), environment.settings
    peak = peak_flops(identity, settings.engine_dtype, settings.device_peak_flops)
    export_devices(environment.metrics, identity, peak)
    environment.metrics.level(
        "fairway_worker_model_cache_bytes",
        "Model files on the local disk, unfinished downloads included",
        lambda: float(files.kept_bytes),
    )
    environment.metrics.counted(
        "fairway_worker_device_idle_seconds_total",
        "Time since the start in which no engine of the worker was in a step",
        lambda: (((), device.idle_s),),
    )
