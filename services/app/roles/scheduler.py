"""The scheduler: places for whoever asks while it leads; a standby otherwise."""

from __future__ import annotations

from fairway.v1 import (
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.shared import leader_record, nothing, open_election
from services.rpc.server import Service
from services.runtime.config import Settings, read_secret
from services.runtime.health import Check
from services.scheduler.fleet_view import FleetLimits
from services.scheduler.flow_queue import QueueLimits
from services.scheduler.service import SchedulerService
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import TermSettings


def scheduler(environment: Environment) -> Role:
    """The scheduler: places for whoever asks while it leads; a standby otherwise."""
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

    async def open_doors() -> None:
        # Only now does the address answer, and only then may others be sent to it.
        environment.supervisor.spawn("election", election.run())
        environment.supervisor.spawn("scheduler", service.run(election))

    server = environment.server(
        Service(
            scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            SchedulerServicer(service, environment.clock, leader_id=me.leader_id),
        )
    )
    return Role(server, start=nothing, open=open_doors, checks=(Check("decisions", service.problem),))


def term_settings(settings: Settings) -> TermSettings:
    """The scheduler's limits from the process settings."""
    return TermSettings(
        fleet=FleetLimits(grant_ttl_s=settings.grant_ttl_s),
        queue=QueueLimits(
            predicted_output_tokens=settings.predicted_output_tokens, max_per_pool=settings.queue_limit
        ),
    )
