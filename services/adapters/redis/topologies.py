"""Where Redis is: a server, a group watched by Sentinels, or a cluster.

    redis://HOST:PORT/DB, rediss://..., unix://...       one server
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE         the master that the Sentinels name
    redis+cluster://HOST:PORT,HOST:PORT                  the masters of a cluster, each with its slots

``rediss+...`` uses TLS to the data nodes. Sentinels are reached without TLS and without a password.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from services.core.errors import FailedPrecondition

Node = tuple[str, int]  # host and port
SlotMap = tuple[tuple[int, Node], ...]  # the first slot of each range and its master, in order
_SENTINELS_TRIED: Final = 3  # within the time of one connection attempt
_DEFAULT_PORTS: Final = {"sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """What Redis accepts besides the URL. A password in the URL takes precedence over ``password``.

    ``contexts`` returns the present certificate and authorities for rediss:// URLs; without it Redis is
    verified by the system's authorities.
    """

    password: str | None = None
    contexts: Callable[[], SSLContext] | None = None


NO_ACCESS: Final = RedisAccess()


def is_cluster(url: str) -> bool:
    return urlsplit(url).scheme in ("redis+cluster", "rediss+cluster")


def connection_pool(url: str, access: RedisAccess, timeout_s: float) -> Any:
    """Return a pool whose connections reach the server, or the present master of the URL's service."""
    pool = _pool(url, access.password, timeout_s)
    if access.contexts is not None and urlsplit(url).scheme.startswith("rediss"):
        pool.connection_class = _renewed(pool.connection_class, access.contexts)
    return pool


def _renewed(kind: type[Any], contexts: Callable[[], SSLContext]) -> type[Any]:
    """Return the kind of connection with the present context at each connect: the library would keep one."""

    class Renewed(kind):  # type: ignore[misc]
        def _connection_arguments(self) -> Any:
            return {**super()._connection_arguments(), "ssl": contexts()}

    return Renewed


def _pool(url: str, password: str | None, timeout_s: float) -> Any:
    once: dict[str, Any] = {"socket_timeout": None, "socket_connect_timeout": None, "retry": _once()}
    if urlsplit(url).scheme not in ("redis+sentinel", "rediss+sentinel"):
        return redis.asyncio.ConnectionPool.from_url(url, password=password, **once)
    service = urlsplit(url).path.strip("/")
    if not service:
        raise FailedPrecondition("FAIRWAY_REDIS_URL names no service: redis+sentinel://HOST:PORT/SERVICE")
    part_s = timeout_s / _SENTINELS_TRIED
    asking = {"socket_timeout": part_s, "socket_connect_timeout": part_s, "retry": _once()}
    sentinels = Sentinel(list(nodes_of(url)), sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    once |= credentials_of(url, password)
    return SentinelConnectionPool(service, sentinels, **once)  # type: ignore[no-untyped-call]


async def read_slots(url: str, access: RedisAccess, timeout_s: float) -> SlotMap:
    """Return the map of a cluster, as the node at the URL has it. Raises what a connection does."""
    connection = connection_pool(url, access, timeout_s).make_connection()
    try:
        async with asyncio.timeout(timeout_s):
            await connection.connect()
            await connection.send_command("CLUSTER", "SLOTS")
            ranges = await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)
    host = urlsplit(url).hostname or ""  # a node that has no name yet is the one that was asked
    found = (((start, (master[0].decode() or host, master[1]))) for start, _, master, *_ in ranges)
    return tuple(sorted(found))


async def close_pool(pool: Any) -> None:
    await pool.aclose()
    for sentinel in pool.sentinel_manager.sentinels if isinstance(pool, SentinelConnectionPool) else ():
        await sentinel.aclose()


def _once() -> Retry:
    return Retry(NoBackoff(), 0)


def nodes_of(url: str) -> tuple[Node, ...]:
    """Return the addresses in the URL of a group or a cluster. Raises FailedPrecondition."""
    kind = urlsplit(url).scheme.partition("+")[2]
    found = []
    for part in urlsplit(url).netloc.rpartition("@")[2].split(","):
        host, colon, port = part.rpartition(":")
        if not colon:
            host, port = part, str(_DEFAULT_PORTS[kind])
        if not host or not port.isdecimal():
            raise FailedPrecondition(f"FAIRWAY_REDIS_URL has an address that is not HOST:PORT: {part!r}")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)


def node_url(url: str, node: Node) -> str:
    """Return the URL of one node of a cluster, with the credentials of the cluster's."""
    split, host = urlsplit(url), f"[{node[0]}]" if ":" in node[0] else node[0]
    login = split.netloc.rpartition("@")[0]
    return f"{split.scheme.partition('+')[0]}://{login and login + '@'}{host}:{node[1]}"


def credentials_of(url: str, password: str | None) -> dict[str, Any]:
    """Return user, password and TLS of the data nodes. A password in the URL takes precedence."""
    split = urlsplit(url)
    user, _, own = split.netloc.rpartition("@")[0].partition(":")
    found: dict[str, Any] = {"password": unquote(own) or password}
    if user:
        found["username"] = unquote(user)
    if split.scheme.startswith("rediss"):
        found["ssl"] = True
    return found
