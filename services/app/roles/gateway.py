"""The gateway: the gRPC and HTTP faces over one service."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from fairway.inference import v2_pb2, v2_pb2_grpc
from fairway.v1 import (
    inference_pb2,
    inference_pb2_grpc,
)
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.leader_streams import StreamPlacementLinks
from services.adapters.links.muxed_placement import MuxedPlacement
from services.adapters.links.muxed_workers import MuxedWorkers
from services.adapters.model_files.cache import ModelFiles
from services.adapters.quarantine import StoreQuarantine
from services.adapters.usage.outbox import DiskOutbox
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.gateway_batches import open_batches
from services.app.roles.gateway_quotas import GatewayQuotas
from services.app.roles.ledger import open_usage_outbox, start_outbox
from services.app.roles.shared import (
    open_directory,
    open_model_files,
)
from services.app.roles.slis import open_sli_recorder
from services.core.aliases import ALIASES, Alias
from services.core.output_quantile import OutputPolicy, OutputQuantiles
from services.core.records import (
    BUDGETS,
    DEPLOYMENTS,
    OBJECTIVES,
    QUARANTINE,
    SCALED,
    WORKERS,
    Budget,
    Deployment,
    Objective,
    Worker,
)
from services.core.rollouts.routes import ROUTES, ModelRoute
from services.core.scaling import Scaled
from services.gateway.batches.service import BatchService
from services.gateway.catalog import ModelCatalog
from services.gateway.erasure import Erasure
from services.gateway.events import Received
from services.gateway.faces.grpc.servicer import InferenceServicer
from services.gateway.faces.openai.exchange import HttpLimits
from services.gateway.faces.openai.routes import ObserveExchange, build_app
from services.gateway.faces.openai.server import HttpServer
from services.gateway.faces.predict.routes import PredictServicer
from services.gateway.faces.responses.background import ResponseParts
from services.gateway.fallback import FallbackSettings, GatewayFallback
from services.gateway.idempotency.service import IdempotentService
from services.gateway.idempotency.telemetry import KeyedTelemetry
from services.gateway.idempotency.types import KeyedLimits, KeyedPorts
from services.gateway.poison import PoisonGate
from services.gateway.requests.egress import EgressGate
from services.gateway.requests.quotas import RequestQuotas
from services.gateway.requests.validate import Validator
from services.gateway.residency import ResidentWorkers
from services.gateway.response_cache import ResponseCache, count_lookups
from services.gateway.responses.store import ResponseStore
from services.gateway.rows.leases import AloneSettings, GatewayLeases
from services.gateway.rows.prefills import PrefilledRows
from services.gateway.rows.runner import LeasedRows, RowExplanations, RowLimits
from services.gateway.rows.service import RowsService
from services.gateway.rows.work import RowsParts
from services.gateway.safety.packs import SafetyPacks
from services.gateway.safety.record import SafetyRecord
from services.gateway.safety.requests import SafetyDesk
from services.gateway.safety.verdicts import Judges, RowClassifiers
from services.gateway.service import GatewayService
from services.gateway.service import drain as drain_service
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.splits import Splits
from services.gateway.telemetry import (
    GatewayTelemetry,
    export_levels,
    export_route_faults,
    export_upstream,
)
from services.gateway.text.pool import TextProcesses
from services.gateway.text.tokenise import PrefixNames
from services.ports.poison.quarantine import Quarantined
from services.ports.rows import RowRunner
from services.ports.streams import StreamClient
from services.rpc.interceptors.arrival import arrival
from services.rpc.server import RpcService
from services.rpc.status import by_reason
from services.runtime.certificates import renewed_context
from services.runtime.config import Settings, read_secret
from services.runtime.fleet_state.indexes import ObjectiveIndex, TenantBudgets
from services.runtime.identity import KeyDirectory
from services.runtime.process.health import Check
from services.runtime.secrets import (
    event_ids_secret,
    issue_ticket,
    prefix_secret,
    quarantine_secret,
    record_names_secret,
)
from services.runtime.telemetry.metrics import Metrics

log = structlog.get_logger()

_NAMING_THREADS: Final = 2
_PLACED_BLOCKS: Final = 1024  # 64 Ki tokens


def gateway(environment: Environment) -> Role:
    """The gateway: the gRPC and HTTP faces over one service."""
    settings, clock, supervisor = environment.settings, environment.clock, environment.supervisor
    identity = environment.identity()
    files = open_model_files(environment)
    outbox = open_usage_outbox(environment)
    quotas = GatewayQuotas(environment, identity)
    gateway_id = f"{settings.advertised}/{environment.ids.request_id()}"
    service, rows = _gateway_services(environment, identity, files, quotas, gateway_id, outbox)

    def not_ready() -> str:
        return "; ".join(environment.health.problems())

    server = environment.server(
        *_rpc_services(service, rows, _receiver(environment), not_ready, settings.heartbeat_s),
        identity=identity,
    )

    responses = _response_parts(environment, quotas, gateway_id)
    batches = open_batches(environment, service, rows, identity, gateway_id, quotas.gateways, quotas.cipher)
    http = _http_server(environment, service, rows, batches.service, identity, not_ready, responses)
    erasure = Erasure(
        quotas.rings,
        environment.store,
        batches.service.files,
        clock,
        erase_records=quotas.erase,
        may_hold=identity.may_hold,
    )
    export_levels(
        environment.metrics,
        running=lambda: service.running,
        buffered_tokens=lambda: service.buffered_tokens,
        http_connections=http.table,
    )

    async def start() -> None:
        await files.own()
        await start_outbox(environment, outbox)
        await quotas.start()

    async def start_serving() -> None:
        await quotas.register()
        await http.start()
        supervisor.spawn("renew", service.renew_forever())
        supervisor.spawn("flush records", service.flush_forever())
        supervisor.spawn("erasure", erasure.run())
        batches.start()

    async def drain(timeout_s: float) -> None:
        await batches.close()
        http.drain()
        await drain_service(service, clock, timeout_s)
        await http.stop(1.0)

    draining = Check("draining", lambda: "this gateway is shutting down" if service.draining else "")
    usage = Check("usage", lambda: _usage_problem(settings, outbox), withdraws=False)
    return Role(
        server, start=start, open=start_serving, drain=drain, checks=(draining, usage, *quotas.checks())
    )


def _receiver(environment: Environment) -> Callable[[], Received]:
    """Return what notes the arrival of the RPC that runs in the present task."""
    clock = environment.clock

    def received() -> Received:
        arrived, now_s = arrival(), clock.monotonic_s()
        at_s = now_s if arrived.at_s is None else arrived.at_s
        face = "session" if arrived.at_s is None else "grpc"
        unix_us = int((clock.unix_s() - (now_s - at_s)) * 1e6)
        request_id = environment.ids.request_id()
        return Received(at_s, unix_us, request_id, face, arrived.traceparent, attempt=arrived.attempt)

    return received


def _rpc_services(
    service: GatewayService,
    rows: RowsService,
    received: Callable[[], Received],
    not_ready: Callable[[], str],
    heartbeat_s: float,
) -> list[RpcService]:
    return [
        RpcService(
            inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            InferenceServicer(service, rows, received, heartbeat_s=heartbeat_s),
        ),
        RpcService(
            v2_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
            v2_pb2_grpc.add_GRPCInferenceServiceServicer_to_server,
            PredictServicer(rows, received, not_ready),
        ),
    ]


def _response_parts(environment: Environment, quotas: GatewayQuotas, gateway_id: str) -> ResponseParts:
    settings = environment.settings
    names_secret = record_names_secret(_ticket_key(settings))
    store = ResponseStore(quotas.stored_responses, names_secret, gateway_id, environment.clock)
    return ResponseParts(
        store, environment.supervisor, environment.ids.incident_id, settings.idempotency_tombstone_s
    )


def _http_server(
    environment: Environment,
    service: GatewayService,
    rows: RowsService,
    batches: BatchService,
    identity: KeyDirectory,
    not_ready: Callable[[], str],
    responses: ResponseParts,
) -> HttpServer:
    settings = environment.settings
    app = build_app(
        service,
        rows,
        batches,
        identity,
        environment.clock,
        environment.ids,
        responses,
        event_secret=event_ids_secret(_ticket_key(settings)),
        not_ready=not_ready,
        observe=_http_observer(environment.metrics),
        cors_origins=settings.cors_origins,
        audit=environment.audit,
        limits=HttpLimits(settings.max_body_bytes, status_wait_s=settings.status_wait_s),
    )
    host, _, port = settings.http_listen.rpartition(":")
    certificates = environment.client_tls(settings.http_listen)
    return HttpServer(
        app,
        host,
        int(port),
        max_body_bytes=settings.max_body_bytes,
        context=None
        if certificates is None
        else renewed_context(certificates, server=True, verify_peer=False),
    )


def _http_observer(metrics: Metrics) -> ObserveExchange:
    exchanges = metrics.histogram(
        "fairway_http_exchange_seconds",
        "From the head of an HTTP request until its answer is complete; status 0: no answer",
        ("route", "status"),
    )
    return lambda route, status, elapsed_s: exchanges.observe(elapsed_s, route, str(status))


def _gateway_services(
    environment: Environment,
    identity: KeyDirectory,
    files: ModelFiles,
    quotas: GatewayQuotas,
    gateway_id: str,
    outbox: DiskOutbox,
) -> tuple[IdempotentService, RowsService]:
    """Return the service of generations and that of fixed-cost models."""
    settings, clock = environment.settings, environment.clock
    threads = ThreadPoolExecutor(_NAMING_THREADS, "prefixes")
    environment.closing.callback(threads.shutdown, wait=False, cancel_futures=True)
    texts = TextProcesses(clock, environment.supervisor, environment.metrics)
    environment.supervisor.spawn("text processes", texts.run())
    splits = Splits(environment.informer(ROUTES, ModelRoute), max_age_s=settings.route_max_age_s)
    catalog = ModelCatalog(
        environment.informer(DEPLOYMENTS, Deployment),
        live := environment.informer(WORKERS, Worker),
        files,
        clock,
        texts=texts,
        scaled=environment.informer(SCALED, Scaled),
        sized=environment.informer(ALIASES, Alias),
        splits=splits,
        aliases=settings.model_aliases,
        batch_price_ratio=settings.batch_price_ratio,
    )
    environment.supervisor.spawn("warm text models", catalog.warm_forever())
    export_route_faults(environment.metrics, catalog.route_faults)
    limits = _limits(settings)
    prefixes = PrefixNames(prefix_secret(_ticket_key(settings)), threads)
    validator = Validator(catalog, identity, environment.rng, prefixes=prefixes)
    bound = partial(ResidentWorkers, live=live, residency_of=identity.residency)
    ports, runner = _gateway_ports(environment, quotas, gateway_id, bound, catalog, splits)
    ports = replace(
        ports,
        report_usage=outbox.add,
        serves=catalog.serves,
        gate=EgressGate(identity.record, lambda: len(quotas.gateways.view), clock, environment.metrics),
        waking=catalog.waking,
        packs=SafetyPacks(catalog, files, clock),
        unrecorded=lambda: outbox.problem if settings.outage_usage == "closed" else "",
    )
    ports = _judging(environment, catalog, runner, ports, Judges(catalog, validator, ports, limits))
    service = IdempotentService(
        replace(_keyed_ports(environment, quotas, gateway_id, limits), report_usage=outbox.add),
        validator=validator,
        identity=identity,
        catalog=catalog,
        ports=ports,
        limits=limits,
    )
    prefills = PrefilledRows(ports, settings.queue_ttl_s)
    parts = RowsParts(validator, catalog, RequestQuotas(identity, ports), ports, runner, prefills)
    return service, RowsService(service, identity, parts)


def _judging(
    environment: Environment, catalog: ModelCatalog, runner: RowRunner, ports: Ports, judges: Judges
) -> Ports:
    """Return the ports with what judges texts by safety packs."""
    record = SafetyRecord(environment.metrics, ports.telemetry.slis, environment.audit)
    classifiers = RowClassifiers(catalog, runner, ports, judges)
    desk = SafetyDesk(classifiers, record, environment.clock, environment.supervisor)
    return replace(ports, safety=desk)


def _keyed_ports(
    environment: Environment, quotas: GatewayQuotas, gateway_id: str, limits: GatewayLimits
) -> KeyedPorts:
    settings = environment.settings
    return KeyedPorts(
        store=quotas.records,
        limiter=quotas.limiter,
        clock=environment.clock,
        telemetry=KeyedTelemetry(environment.metrics),
        new_incident=environment.ids.incident_id,
        names_secret=record_names_secret(_ticket_key(settings)),
        owner=gateway_id,
        window_tokens=limits.window_tokens,
        limits=KeyedLimits(detach_grace_s=settings.detach_grace_s, renew_s=settings.idempotency_lease_s / 3),
    )


def _usage_problem(settings: Settings, outbox: DiskOutbox) -> str:
    """Return the outbox's problem and what it does to requests, else what is set aside; empty without any."""
    if not outbox.problem:
        return outbox.notice
    rejected = settings.outage_usage == "closed"
    return (
        f"{outbox.problem}; requests of tenants with budgets are {'rejected' if rejected else 'not recorded'}"
    )


def _limits(settings: Settings) -> GatewayLimits:
    return GatewayLimits(
        queue_ttl_s=settings.queue_ttl_s,
        heartbeat_s=settings.heartbeat_s,
        placed_prefix_blocks=_PLACED_BLOCKS if settings.prefix_routing else 0,
    )


def _ticket_key(settings: Settings) -> bytes:
    return read_secret(settings.ticket_key_file).encode()


def _response_cache(
    environment: Environment, quotas: GatewayQuotas, gateway_id: str, splits: Splits
) -> ResponseCache | None:
    lookups = count_lookups(environment.metrics)  # exported by every gateway, with or without a cache
    if quotas.responses is None:
        return None
    secret = record_names_secret(_ticket_key(environment.settings))
    return ResponseCache(quotas.responses, secret, gateway_id, lookups, splits.is_current)


def _open_placement(
    environment: Environment,
    streams: StreamClient,
    gateway_id: str,
    leases: GatewayLeases,
    explanations: RowExplanations,
) -> MuxedPlacement:
    """Return the client of the leading scheduler; its search for the leader has started."""
    settings = environment.settings
    placement = MuxedPlacement(
        StreamPlacementLinks(streams, open_directory(environment), gateway_id, zone=settings.zone),
        environment.clock,
        environment.supervisor,
        environment.rng,
        fallback=GatewayFallback(
            environment.rng,
            FallbackSettings(
                after_s=settings.fallback_after_s,
                max_age_s=settings.fallback_max_age_s,
                predicted_output_tokens=settings.predicted_output_tokens,
            ),
        ),
        on_frame=leases.on_frame,
        explain=explanations.find,
    )
    environment.closing.push_async_callback(placement.close)
    placement.start()  # receives the fleet before the first request
    return placement


def _gateway_ports(
    environment: Environment,
    quotas: GatewayQuotas,
    gateway_id: str,
    bound: Callable[[MuxedWorkers], ResidentWorkers],
    catalog: ModelCatalog,
    splits: Splits,
) -> tuple[Ports, LeasedRows]:
    """Return what requests act through, and what runs the rows of fixed-cost models.

    ``bound`` keeps what is sent to workers in the regions of tenants.
    """
    settings, clock, supervisor = environment.settings, environment.clock, environment.supervisor
    streams = GrpcStreams(environment.internal_token, environment.certificates)
    alone = AloneSettings(after_s=settings.fallback_after_s, max_age_s=settings.fallback_max_age_s)
    leases = GatewayLeases(clock, alone)
    explanations = RowExplanations()
    placement = _open_placement(environment, streams, gateway_id, leases, explanations)
    workers = MuxedWorkers(
        streams, gateway_id, clock, supervisor, unsent=placement.give_back, withdrawn=splits.withdraw
    )
    environment.closing.push_async_callback(workers.close)
    resident = bound(workers)
    rows = LeasedRows(
        resident,
        placement,
        leases,
        clock,
        supervisor,
        RowLimits(queue_ttl_s=settings.queue_ttl_s),
        waking=catalog.waking,
        explanations=explanations,
    )
    environment.closing.push_async_callback(rows.close)
    export_upstream(
        environment.metrics,
        worker_streams=lambda: workers.links,
        placements_pending=lambda: placement.pending,
        scheduler_connected=lambda: placement.connected,
    )
    telemetry = _telemetry(environment)
    ports = Ports(
        limiter=quotas.limiter,
        placement=placement,
        workers=resident,
        clock=clock,
        supervisor=supervisor,
        rng=environment.rng,
        sign_ticket=partial(issue_ticket, _ticket_key(settings)),
        new_incident=environment.ids.incident_id,
        error_of=by_reason,
        pressure=placement.pressure,
        ttft_target_s=ObjectiveIndex(environment.informer(OBJECTIVES, Objective)).ttft_target_s,
        budgets_of=TenantBudgets(environment.informer(BUDGETS, Budget)).of,
        outputs=_output_quantiles(settings),
        responses=_response_cache(environment, quotas, gateway_id, splits),
        telemetry=telemetry,
        poisons=_poison_gate(environment, telemetry),
    )
    return ports, rows


def _output_quantiles(settings: Settings) -> OutputQuantiles:
    policy = OutputPolicy(settings.output_quantile, default_tokens=settings.predicted_output_tokens)
    return OutputQuantiles(policy)


def _telemetry(environment: Environment) -> GatewayTelemetry:
    return GatewayTelemetry(
        environment.metrics,
        clock=environment.clock,
        tracing=environment.tracing,
        lines=environment.request_lines,
        slis=open_sli_recorder(environment),
    )


def _poison_gate(environment: Environment, telemetry: GatewayTelemetry) -> PoisonGate:
    quarantined = environment.informer(QUARANTINE, Quarantined)
    return PoisonGate(
        StoreQuarantine(environment.store, quarantined, environment.clock),
        secret=quarantine_secret(_ticket_key(environment.settings)),
        clock=environment.clock,
        supervisor=environment.supervisor,
        telemetry=telemetry,
    )
