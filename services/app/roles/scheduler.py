"""The scheduler: places requests while it leads; a standby otherwise."""

from __future__ import annotations

from typing import Final

from fairway.v1 import (
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.shared import leader_record, nothing, open_election
from services.rpc.server import RpcService
from services.runtime.config import Settings, read_secret
from services.runtime.process.health import Check
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.health.worker_health import HealthPolicy
from services.scheduler.policy.health.ejection import EjectionPolicy
from services.scheduler.policy.overload.pressure import ServiceTargets
from services.scheduler.policy.overload.shedding import SheddingPolicy
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.queue.index import QueueLimits
from services.scheduler.service import SchedulerService
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import TermSettings

_PREFIX_BLOCKS: Final = 262_144  # 35 MB


def scheduler(environment: Environment) -> Role:
    """The scheduler: places requests while it leads; a standby otherwise."""
    settings = environment.settings
    service = SchedulerService(
        read_secret(settings.ticket_key_file).encode(),
        term_settings(settings),
        environment.clock,
        environment.rng,
        telemetry=SchedulerTelemetry(
            environment.metrics,
            environment.clock,
            tracing=environment.tracing,
            lines=environment.request_lines,
        ),
    )
    me = leader_record(environment)
    election = open_election(environment, "scheduler", me)

    async def start_serving() -> None:
        # Publish this address only after the server accepts connections on it.
        environment.supervisor.spawn("election", election.run())
        environment.supervisor.spawn("scheduler", service.run(election))

    server = environment.server(
        RpcService(
            scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            SchedulerServicer(service, environment.clock, leader_id=me.leader_id),
        )
    )
    return Role(server, start=nothing, open=start_serving, checks=(Check("decisions", service.problem),))


def term_settings(settings: Settings) -> TermSettings:
    """The scheduler's limits from the process settings."""
    return TermSettings(
        fleet=FleetLimits(
            grant_ttl_s=settings.grant_ttl_s,
            prefix_blocks=_PREFIX_BLOCKS if settings.prefix_routing else 0,
        ),
        queue=QueueLimits(
            predicted_output_tokens=settings.predicted_output_tokens,
            output_quantile=settings.output_quantile,
            max_per_pool=settings.queue_limit,
        ),
        order=OrderPolicy(
            class_head_start_s=settings.class_head_start_s,
            bypass_window_tokens=settings.bypass_window_tokens,
        ),
        health=HealthPolicy(ejection=EjectionPolicy(outlier_ratio=settings.ejection_ratio)),
        shedding=SheddingPolicy(
            enabled=settings.shedding,
            targets=ServiceTargets(
                interactive_s=settings.ttft_target_interactive_s,
                standard_s=settings.ttft_target_standard_s,
            ),
        ),
    )
