"""The control plane: resources, and the reconciler that acts while this process leads."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from fairway.keda import externalscaler_pb2, externalscaler_pb2_grpc
from fairway.v1 import (
    controlplane_pb2,
    controlplane_pb2_grpc,
    slis_pb2,
    slis_pb2_grpc,
    usage_pb2,
    usage_pb2_grpc,
)
from services.adapters.alertmanager import Alertmanager
from services.adapters.grpc.leader_calls import GrpcPlane, GrpcQueues, LeadingPlane
from services.adapters.grpc.worker_steps import GrpcSteps
from services.adapters.node_command import CommandNodes
from services.adapters.redis.limiter import RedisLimiter
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.console import ConsoleServer
from services.app.roles.ledger import open_ledger, open_tile_store
from services.app.roles.shared import leader_record, open_calls, open_election, open_redis
from services.app.roles.slis import open_objectives
from services.controlplane.alert_sender import AlertSender, alert_posts
from services.controlplane.audit_log import AuditSequencer
from services.controlplane.audit_reads import AuditReader
from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import FleetRecord
from services.controlplane.fleet import decode as decode_fleet
from services.controlplane.objectives.servicer import SliServicer
from services.controlplane.objectives.store import SliStore
from services.controlplane.reconciler import Reconciler
from services.controlplane.resources.accounts import Sealer, bootstrap
from services.controlplane.rollouts.controller import RolloutController
from services.controlplane.scaling.controller import ScalingController, advancing
from services.controlplane.scaling.keda import KedaServicer
from services.controlplane.scaling.nodes import NodeController
from services.controlplane.scaling.policy.nodes import NodeLimits
from services.controlplane.scaling.policy.scaler import ScalerTuning
from services.controlplane.scaling.servicer import ScalingListing
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.controlplane.spend_alerts import SpendAlerts
from services.controlplane.store_events import StoreEvents
from services.controlplane.telemetry import (
    AlertTelemetry,
    NodeTelemetry,
    ReconcilerTelemetry,
    ScalingTelemetry,
)
from services.controlplane.timelines.collector import Timelines, TimelineSources
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.servicer import ListPrices, UsageServicer
from services.controlplane.usage.settler import UsageSettler
from services.core.batches import BATCH_OWNERS, BATCHES, BatchRecord, OwnerRecord
from services.core.limits import Price
from services.core.records import DEPLOYMENTS, ROOT, WORKERS, Deployment, Worker
from services.ports.nodes import NodeProvider
from services.rpc.server import RpcService
from services.runtime.audit import AuditedStore
from services.runtime.config import ConfigError
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.runtime.identity import KeyDirectory
from services.runtime.process.health import Check


def controlplane(environment: Environment) -> Role:
    """The control plane: resources, and the reconciler that acts while this process leads."""
    settings, store, clock = environment.settings, environment.store, environment.clock
    election = open_election(environment, "controlplane", leader_record(environment))
    fleet: Informer[FleetRecord | None] = Informer(store, ROOT, decode_fleet, clock, rng=environment.rng)
    environment.exported.informer(fleet)
    rounds = ReconcilerTelemetry(clock, environment.metrics, leads=lambda: election.epoch is not None)
    levels, senders = _open_alerts(environment, election)
    recorder = EventRecorder(store, clock)
    keys = environment.identity()
    limiter = open_redis(environment)
    audited, reader, sequencer = _open_audit(environment, election)
    service = ControlPlaneService(audited, clock, Sealer(environment.internal_token.encode()), limiter)
    alerts = SpendAlerts(store, service.budgets, election, clock, events=recorder, telemetry=levels)
    queues, leader = open_calls(environment, GrpcQueues, "scheduler"), open_calls(environment, GrpcPlane)
    ledger, usage = open_ledger(environment, election, leader)
    slis, sums, burning, diagnoses = open_objectives(
        environment, election, service.objectives, recorder, levels, lambda: _workers_of(fleet), leader
    )
    settler = UsageSettler(ledger, limiter, clock, price_of=partial(_price_of, fleet))
    stores = StoreEvents(
        _stores(environment, limiter), election, clock, events=recorder, ping=limiter.connect
    )
    scaler, scaling = _open_scaling(environment, fleet, election, queues, slis, leader)
    timelines = _open_timelines(environment, fleet, queues, slis, leader)
    reconciler = _open_reconciler(environment, fleet, election, rounds, recorder, slis, scaler)
    rollouts = RolloutController(audited, fleet, election, clock, slis=slis)

    async def start() -> None:
        await environment.store.found(environment.ids.store_generation())
        if settings.admin_key_file is not None:
            await bootstrap(audited, clock, settings.admin_key_file)
        await _start_nodes(environment, fleet, election, scaler)
        for name, run in (
            ("fleet informer", fleet.run),
            ("election", election.run),
            ("reconciler", reconciler.run),
            ("rollouts", rollouts.run),
            ("event recorder", recorder.run),
            ("usage ledger", ledger.run),
            ("usage settler", settler.run),
            ("spend alerts", alerts.run),
            ("store events", stores.run),
            ("service level indicators", slis.run),
            ("objective alerts", burning.run),
        ):
            environment.supervisor.spawn(name, run())

    pages = usage, sums, scaling, timelines, diagnoses
    servicer = ControlPlaneServicer(
        service, store, queues, *pages, audit=reader, require_current=keys.require_current
    )
    reports = UsageServicer(ledger, ListPrices(store)), SliServicer(slis)
    services = _services(servicer, *reports, KedaServicer(fleet))
    checks = (*_checks(rounds, ledger, sequencer), *senders)
    return _served(environment, services, keys, start, checks)


def _open_reconciler(
    environment: Environment,
    fleet: Informer[FleetRecord | None],
    election: Election,
    rounds: ReconcilerTelemetry,
    recorder: EventRecorder,
    slis: SliStore,
    scaler: ScalingController,
) -> Reconciler:
    return Reconciler(
        environment.store,
        fleet,
        election,
        environment.clock,
        rounds,
        events=recorder,
        probes=slis.probes,
        likely=scaler.likely,
        residency=lambda: scaler.residency,
    )


def _served(
    environment: Environment,
    services: tuple[RpcService, ...],
    identity: KeyDirectory,
    start: Callable[[], Awaitable[None]],
    checks: tuple[Check, ...],
) -> Role:
    """Return the role, with the console where the settings have its address. It calls the first service."""
    role = Role(environment.server(*services, identity=identity), start=start, checks=checks)
    listen = environment.settings.console_listen
    if listen is None:
        return role
    console = ConsoleServer(environment, services[:1], identity, listen)
    return replace(role, open=console.start, drain=console.stop)


def _workers_of(fleet: Informer[FleetRecord | None]) -> list[Worker]:
    return [held.record for held in fleet.view.values() if isinstance(held.record, Worker)]


def _services(
    servicer: ControlPlaneServicer, usage: UsageServicer, slis: SliServicer, scaler: KedaServicer
) -> tuple[RpcService, ...]:
    """Return what operators call, what gateways and workers report to, and what an autoscaler reads."""
    return (
        RpcService(
            controlplane_pb2.DESCRIPTOR.services_by_name["ControlPlaneService"],
            controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
            servicer,
        ),
        RpcService(
            usage_pb2.DESCRIPTOR.services_by_name["UsageService"],
            usage_pb2_grpc.add_UsageServiceServicer_to_server,
            usage,
        ),
        RpcService(
            slis_pb2.DESCRIPTOR.services_by_name["SliService"],
            slis_pb2_grpc.add_SliServiceServicer_to_server,
            slis,
        ),
        RpcService(
            externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"],
            externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server,
            scaler,
        ),
    )


def _open_alerts(environment: Environment, election: Election) -> tuple[AlertTelemetry, list[Check]]:
    """Return what exports alerts, and a check for each Alertmanager that they are sent to from now on."""

    def leads() -> bool:
        return election.epoch is not None

    levels = AlertTelemetry(environment.metrics, leads=leads)
    posts, checks = alert_posts(environment.metrics), list[Check]()
    for number, url in enumerate(environment.settings.alertmanagers):
        post = Alertmanager(url).post
        sender = AlertSender(levels.alerts, post, environment.clock, leads=leads, posts=posts)
        environment.supervisor.spawn(f"alerts to {url}", sender.run())
        checks.append(Check(f"alertmanager_{number}", sender.problem, withdraws=False))
    return levels, checks


def _open_audit(
    environment: Environment, election: Election
) -> tuple[AuditedStore, AuditReader, AuditSequencer]:
    settings, tiles = environment.settings, open_tile_store(environment)
    audited, pending = environment.audited_store()
    sequencer = AuditSequencer(
        environment.store,
        tiles,
        pending,
        election,
        environment.clock,
        key_file=settings.audit_key_file,
        checkpoint_file=settings.audit_checkpoint_file,
        new_id=environment.ids.source_id,
    )
    environment.supervisor.spawn("audit log", sequencer.run())
    return audited, AuditReader(audited, tiles), sequencer


async def _open_provider(environment: Environment) -> NodeProvider | None:
    settings, argv = environment.settings, shlex.split(environment.settings.node_command)
    if argv:
        return CommandNodes(argv, timeout_s=settings.node_command_timeout_s)
    if not settings.node_namespace:
        return None
    try:
        from services.adapters.node_workloads import KubernetesNodes, open_cluster
    except ModuleNotFoundError as error:
        text = "FAIRWAY_NODE_NAMESPACE needs kubernetes-asyncio: install the extra fairway[kubernetes]"
        raise ConfigError(text) from error
    cluster = await open_cluster(settings.node_kubeconfig)
    environment.closing.push_async_callback(cluster.close)
    return KubernetesNodes(cluster, settings.node_namespace, environment.clock.sleep)


async def _start_nodes(
    environment: Environment,
    fleet: Informer[FleetRecord | None],
    election: Election,
    scaler: ScalingController,
) -> None:
    """Start what orders nodes, if there is a provider of them."""
    settings, provider = environment.settings, await _open_provider(environment)
    if provider is None:
        return
    nodes = NodeController(
        environment.store,
        fleet,
        election,
        environment.clock,
        provider=provider,
        limits=NodeLimits(settings.node_limit, settings.node_order_s, settings.node_idle_s),
        new_id=environment.ids.source_id,
        telemetry=NodeTelemetry(environment.metrics, leads=lambda: election.epoch is not None),
        growth_variance=scaler.growth_variance,
        leaving=lambda: tuple(scaler.residency.leaving),
    )
    environment.supervisor.spawn("nodes", nodes.run())


def _open_scaling(
    environment: Environment,
    fleet: Informer[FleetRecord | None],
    election: Election,
    queues: GrpcQueues,
    slis: SliStore,
    leader: LeadingPlane,
) -> tuple[ScalingController, ScalingListing]:
    """Return what decides about replicas from now on, and the queries of it."""
    batches = environment.informer(BATCHES, BatchRecord)
    owners = environment.informer(BATCH_OWNERS, OwnerRecord)
    controller = ScalingController(
        environment.store,
        fleet,
        election,
        environment.clock,
        loads=queues.loads,
        burn_of=slis.burn_of,
        batches=lambda: advancing(batches.view, owners.view),
        tuning=ScalerTuning(settle_s=environment.settings.scaling_settle_s),
        telemetry=ScalingTelemetry(environment.metrics, leads=lambda: election.epoch is not None),
    )
    environment.supervisor.spawn("scaling", controller.run())
    return controller, ScalingListing(environment.store, controller, leader)


def _open_timelines(
    environment: Environment,
    fleet: Informer[FleetRecord | None],
    queues: GrpcQueues,
    slis: SliStore,
    leader: LeadingPlane,
) -> Timelines:
    """Return the timelines of requests; those of slow and failed ones are collected from now on."""

    def address_of(worker_id: str) -> str:
        held = fleet.view.get(WORKERS + worker_id)
        return held.record.address if held is not None and isinstance(held.record, Worker) else ""

    steps = GrpcSteps(environment.internal_token, environment.certificates)
    sources = TimelineSources(slis, queues, steps, address_of, leader)
    timelines = Timelines(sources, environment.clock, environment.metrics)
    environment.supervisor.spawn("timelines", timelines.run())
    return timelines


def _stores(environment: Environment, redis: RedisLimiter) -> dict[str, Callable[[], str]]:
    """Return the problem of each store."""
    return {
        "etcd": environment.store.silence,
        "Redis": lambda: redis.problem,
        "storage": environment.storage_problem,
    }


def _price_of(fleet: Informer[FleetRecord | None], model: str) -> Price:
    held = fleet.view.get(DEPLOYMENTS + model)
    return held.record.price if held is not None and isinstance(held.record, Deployment) else Price()


def _checks(rounds: ReconcilerTelemetry, ledger: UsageLedger, audit: AuditSequencer) -> tuple[Check, ...]:
    return (
        Check("rounds", rounds.problem),
        Check("usage", ledger.problem, withdraws=False),
        Check("audit", audit.problem, withdraws=False),
    )
