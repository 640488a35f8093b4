"""Parts that several roles use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.grpc.usage import GrpcUsage
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.adapters.model_files.cache import ModelFiles
from services.adapters.usage.outbox import DiskOutbox
from services.app.environment import Environment
from services.core.errors import FailedPrecondition
from services.core.records import Leader, dump, leader_key
from services.rpc.channel import open_channel
from services.runtime.fleet_state.leadership import Election


async def nothing() -> None:
    return None


def leader_record(environment: Environment) -> Leader:
    return Leader(leader_id=environment.ids.request_id(), address=environment.settings.advertised)


def open_election(environment: Environment, role: str, leader: Leader) -> Election:
    election = Election(
        environment.store,
        leader_key(role),
        dump(leader),
        environment.settings.leader_ttl_s,
        environment.clock,
        rng=environment.rng,
    )
    environment.exported.election(role, election)
    return election


def open_directory(environment: Environment, role: str = "scheduler") -> SchedulerDirectory:
    """Return the directory of a role's leader, which follows the store from now on."""
    directory = SchedulerDirectory(environment.store, environment.clock, role=role)
    environment.exported.informer(directory.informer)
    environment.supervisor.spawn(f"{role} directory", directory.run())
    return directory


def open_usage_outbox(environment: Environment) -> DiskOutbox:
    """Return the process's outbox of usage events. ``start_outbox`` follows before the first event."""
    reports = GrpcUsage(
        open_directory(environment, "controlplane"), environment.internal_token, environment.clock
    )
    environment.closing.push_async_callback(reports.close)
    outbox = DiskOutbox(
        environment.settings.state_dir / "usage",
        environment.ids.request_id().replace("req_", "src-"),
        reports,
        environment.clock,
        metrics=environment.metrics,
    )
    environment.closing.push_async_callback(outbox.close)
    return outbox


async def start_outbox(environment: Environment, outbox: DiskOutbox) -> None:
    """Own the outbox's folder, and deliver from now on. Raises FailedPrecondition when another process owns
    it."""
    try:
        await outbox.recover()
    except OSError as error:
        raise FailedPrecondition(f"the folder of usage events cannot be used: {error.strerror}") from error
    environment.supervisor.spawn("usage outbox", outbox.run())


def open_model_files(
    environment: Environment, found_damaged: Callable[[], None] = lambda: None
) -> ModelFiles:
    settings = environment.settings
    channel = open_channel(settings.registry)
    environment.closing.push_async_callback(channel.close)
    client = RegistryClient(channel, environment.internal_token)
    root: Path = settings.state_dir / "models"
    return ModelFiles(
        client,
        root,
        environment.clock,
        max_bytes=settings.model_cache_bytes,
        found_damaged=found_damaged,
    )
