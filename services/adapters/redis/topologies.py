"""Where Redis is: a server, a group watched by Sentinels, or a cluster.

    redis://HOST:PORT/DB, rediss://..., unix://...       one server
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE         the master that the Sentinels name
    redis+cluster://HOST:PORT,HOST:PORT                  the masters of a cluster, each with its slots

``rediss+...`` uses TLS to the data nodes. Sentinels are asked without a password.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from services.core.errors import FailedPrecondition

Nodes = tuple[tuple[str, int], ...]
_SENTINELS_TRIED: Final = 3  # within the time of one connection attempt
_DEFAULT_PORTS: Final = {"sentinel": 26379, "cluster": 6379}


def is_cluster(url: str) -> bool:
    return urlsplit(url).scheme in ("redis+cluster", "rediss+cluster")


def connection_pool(url: str, password: str | None, timeout_s: float, *, username: str | None = None) -> Any:
    """Return a pool whose connections reach the server, or the present master of the URL's service."""
    once: dict[str, Any] = {"socket_timeout": None, "socket_connect_timeout": None, "retry": _once()}
    if username is not None:
        once["username"] = username
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


async def close_pool(pool: Any) -> None:
    await pool.aclose()
    for sentinel in pool.sentinel_manager.sentinels if isinstance(pool, SentinelConnectionPool) else ():
        await sentinel.aclose()


def _once() -> Retry:
    return Retry(NoBackoff(), 0)


def nodes_of(url: str) -> Nodes:
    """Return the addresses in the URL of a group or a cluster. Raises FailedPrecondition."""
    kind = urlsplit(url).scheme.partition("+")[2]
    found = []
    for part in urlsplit(url).netloc.rpartition("@")[2].split(","):
        host, _, port = part.rpartition(":")
        if not host:
            host, port = part, str(_DEFAULT_PORTS[kind])
        if not host or not port.isdecimal():
            raise FailedPrecondition(f"FAIRWAY_REDIS_URL has an address that is not HOST:PORT: {part!r}")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)


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
