"""Parts that several roles use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.adapters.model_files.cache import RESERVE_BYTES, ModelFiles
from services.adapters.redis.limiter import RedisLimiter
from services.adapters.redis.topologies import RedisAccess
from services.app.environment import Environment
from services.core.records import Leader, dump, leader_key
from services.rpc.channel import RoleChannel
from services.runtime.certificates import renewed_context
from services.runtime.config import read_password
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


def redis_access(environment: Environment) -> RedisAccess:
    file, certificates = environment.settings.redis_password_file, environment.store_certificates
    return RedisAccess(
        None if file is None else read_password(file),
        None if certificates is None else renewed_context(certificates, server=False, verify_peer=True),
    )


def open_redis(environment: Environment) -> RedisLimiter:
    """Return the limiter's store, which connects with the first call."""
    settings = environment.settings
    redis = RedisLimiter(settings.redis_url, environment.clock, access=redis_access(environment))
    environment.closing.push_async_callback(redis.close)
    return redis


def open_model_files(
    environment: Environment, found_damaged: Callable[[], None] = lambda: None
) -> ModelFiles:
    """Return the cache of model files. A gateway's are small and serve all tenants: they use the reserve."""
    settings = environment.settings
    channel = RoleChannel(settings.registry, "registry", environment.certificates)
    environment.closing.push_async_callback(channel.close)
    client = RegistryClient(channel, environment.internal_token)
    root: Path = settings.state_dir / "models"
    return ModelFiles(
        client,
        root,
        environment.clock,
        max_bytes=settings.model_cache_bytes,
        reserve_bytes=max(RESERVE_BYTES, settings.disk_reserve_bytes * (environment.role == "worker")),
        found_damaged=found_damaged,
    )
