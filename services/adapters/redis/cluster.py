"""The scripts on a Redis cluster: each call goes to the master that has the slot of its tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import redis.exceptions
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from services.adapters.redis.reservation_calls import key
from services.adapters.redis.scripts import AWAY, RedisScripts, Script
from services.adapters.redis.topologies import credentials_of, is_cluster, nodes_of
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock

_REDIRECTS: Final = 3
_REFRESH_S: Final = 1.0  # between searches for the nodes after a failure
T = TypeVar("T")


class ClusterScripts:
    """``RedisScripts`` of every master. The caller closes it.

    The map of slots is read again when a node redirects a call, and at most once a second when it fails.
    """

    def __init__(
        self, url: str, clock: Clock, *, timeout_s: float, password: str | None, repeatable: bool
    ) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._repeatable = repeatable
        self._credentials = credentials_of(url, password)
        self._cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in nodes_of(url)],
            require_full_coverage=False,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **self._credentials,
        )
        self._registered: list[tuple[str, ...]] = []
        self._nodes: dict[tuple[str, int], RedisScripts] = {}
        self._refreshing = asyncio.Lock()
        self._refreshed_s = -_REFRESH_S
        self._known = False

    def script(self, *names: str) -> Script:
        """Register and return the script that joins these files."""
        self._registered.append(names)
        return Script.of(names)

    @property
    def breaker_open(self) -> bool:
        """A master counts as unavailable."""
        return any(node.breaker_open for node in self._nodes.values())

    @property
    def available_since_s(self) -> float:
        """The monotonic time at which a master was last found available again."""
        return max((node.available_since_s for node in self._nodes.values()), default=self._refreshed_s)

    async def connect(self) -> None:
        """Return once every master responded and has the scripts. Raises StoreUnavailable."""
        await self._refresh(seen_s=self._refreshed_s)
        for node in list(self._nodes.values()):
            await node.connect()

    async def run(
        self, tenant_id: str, script: Script, keys: Sequence[str], arguments: Sequence[str | int | bytes]
    ) -> Any:
        return await self._routed(tenant_id, lambda node: node.run(tenant_id, script, keys, arguments))

    async def hash(self, tenant_id: str, key: str) -> Mapping[bytes, bytes]:
        return await self._routed(tenant_id, lambda node: node.hash(tenant_id, key))

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()
        await self._cluster.aclose()

    async def _routed(self, tenant_id: str, call: Callable[[RedisScripts], Awaitable[T]]) -> T:
        for _ in range(_REDIRECTS):
            seen_s = self._refreshed_s
            if not self._known:
                await self._refresh(seen_s=seen_s)
            try:
                return await call(self._node_of(tenant_id))
            except StoreUnavailable as error:
                moved = isinstance(error.__cause__, redis.exceptions.MovedError)
                if moved or self._clock.monotonic_s() - seen_s >= _REFRESH_S:
                    await self._refresh(seen_s=seen_s)
                if not moved:
                    raise
        raise StoreUnavailable("the slots of the Redis cluster move all the time", retry_after_s=1.0)

    def _node_of(self, tenant_id: str) -> RedisScripts:
        try:
            found = self._cluster.nodes_manager.get_node_from_slot(key_slot(key(tenant_id).encode()))
        except redis.exceptions.RedisError as error:
            raise StoreUnavailable("no node has the slot of the tenant", retry_after_s=1.0) from error
        address = (str(found.host), int(found.port))
        if address not in self._nodes:
            self._nodes[address] = self._open(address)
        return self._nodes[address]

    def _open(self, address: tuple[str, int]) -> RedisScripts:
        host, port = address
        scheme = "rediss" if self._credentials.get("ssl") else "redis"
        node = RedisScripts(
            f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}",
            self._clock,
            timeout_s=self._timeout_s,
            password=self._credentials["password"],
            username=self._credentials.get("username"),
            repeatable=self._repeatable,
        )
        for names in self._registered:
            node.script(*names)
        return node

    async def _refresh(self, *, seen_s: float) -> None:
        """Read the map of slots, unless another call did since ``seen_s``. Raises StoreUnavailable."""
        async with self._refreshing:
            if self._known and self._refreshed_s != seen_s:
                return
            self._refreshed_s = self._clock.monotonic_s()
            try:
                async with asyncio.timeout(2 * self._timeout_s):
                    await self._cluster.nodes_manager.initialize()
            except AWAY as error:
                raise StoreUnavailable(
                    f"no node of the Redis cluster answers: {type(error).__name__}", retry_after_s=1.0
                ) from error
            self._known = True
            masters = {
                (str(node.host), int(node.port)) for node in self._cluster.nodes_manager.nodes_cache.values()
            }
            for address in [address for address in self._nodes if address not in masters]:
                await self._nodes.pop(address).close()


def open_scripts(
    url: str, clock: Clock, *, timeout_s: float, password: str | None = None, repeatable: bool = False
) -> RedisScripts | ClusterScripts:
    """Return the scripts of the Redis at the URL. The caller closes them.

    ``timeout_s`` bounds each connection attempt and each batch. ``repeatable``: a second run of any script
    admits nothing more, so a batch whose connection broke is sent once more.

    A password in the URL takes precedence over ``password``, which keeps it out of the environment.
    """
    kind = ClusterScripts if is_cluster(url) else RedisScripts
    return kind(url, clock, timeout_s=timeout_s, password=password, repeatable=repeatable)
