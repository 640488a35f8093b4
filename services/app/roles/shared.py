"""Parts that several roles use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.adapters.grpc.chunk_peers import ChunkPeers
from services.adapters.grpc.leader_calls import LeaderCalls
from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.adapters.model_files.cache import RESERVE_BYTES, ModelFiles
from services.adapters.model_files.swarm import Swarm
from services.adapters.redis.limiter import RedisLimiter
from services.adapters.redis.topologies import RedisAccess
from services.app.environment import Environment
from services.core.records import Leader, dump, leader_key
from services.core.swarm import ChunkPeer
from services.rpc.channel import RoleChannel
from services.rpc.server import RpcService
from services.runtime.certificates import renewed_context
from services.runtime.config import read_password
from services.runtime.fleet_state.leadership import Election
from services.worker.chunk_servicer import ChunkServicer

Calls = TypeVar("Calls", bound=LeaderCalls)


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


def open_calls(environment: Environment, calls: type[Calls], role: str = "controlplane") -> Calls:
    """Return the calls to a role's leader, which follow the store from now on."""
    directory = open_directory(environment, role)
    opened = calls(directory, environment.internal_token, environment.clock, environment.certificates)
    environment.closing.push_async_callback(opened.close)
    return opened


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


def open_model_files(environment: Environment) -> ModelFiles:
    """Return the cache of a gateway, which is small and comes from the registry alone."""
    return _model_files(environment, _registry(environment))


def open_shared_files(
    environment: Environment, found_damaged: Callable[[], None] = lambda: None
) -> tuple[ModelFiles, RpcService]:
    """Return the cache of a node that runs models, and the service by which other nodes fetch from it."""
    settings, registry = environment.settings, _registry(environment)
    peers = ChunkPeers(environment.internal_token, environment.certificates)
    environment.closing.push_async_callback(peers.close)
    swarm = Swarm(
        registry,
        peers,
        ChunkPeer(settings.advertised, environment.role, settings.zone),
        environment.clock,
        environment.rng,
        upload_bytes_per_s=settings.model_upload_bytes_per_s,
        download_bytes_per_s=settings.model_download_bytes_per_s,
    )
    environment.supervisor.spawn("swarm", swarm.announce())
    environment.metrics.counted(
        "fairway_worker_model_chunk_bytes_total",
        "Bytes of model files of versions that nodes share: from_registry, from_peer, and sent to_peer",
        swarm.traffic,
        ("way",),
    )
    service = RpcService(
        worker_pb2.DESCRIPTOR.services_by_name["ChunkService"],
        worker_pb2_grpc.add_ChunkServiceServicer_to_server,
        ChunkServicer(swarm.shared),
    )
    return _model_files(environment, registry, found_damaged, swarm), service


def _registry(environment: Environment) -> RegistryClient:
    channel = RoleChannel(environment.settings.registry, "registry", environment.certificates)
    environment.closing.push_async_callback(channel.close)
    return RegistryClient(channel, environment.internal_token)


def _model_files(
    environment: Environment,
    registry: RegistryClient,
    found_damaged: Callable[[], None] = lambda: None,
    swarm: Swarm | None = None,
) -> ModelFiles:
    settings = environment.settings
    root: Path = settings.state_dir / "models"
    return ModelFiles(
        registry,
        root,
        environment.clock,
        max_bytes=settings.model_cache_bytes,
        # Those of a gateway serve all tenants: they use the reserve.
        reserve_bytes=max(RESERVE_BYTES, settings.disk_reserve_bytes * (environment.role != "gateway")),
        found_damaged=found_damaged,
        swarm=swarm,
    )
