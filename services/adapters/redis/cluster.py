"""The scripts on a Redis cluster: each call goes to the master that has the slot of its tenant."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, TypeVar

import redis.exceptions
from redis.crc import key_slot

from services.adapters.redis.reservation_calls import slots_key
from services.adapters.redis.scripts import AWAY, RedisScripts, Script
from services.adapters.redis.topologies import (
    NO_ACCESS,
    Node,
    RedisAccess,
    SlotMap,
    is_cluster,
    node_url,
    nodes_of,
    read_slots,
)
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock

_REDIRECTS: Final = 3
_MAP_NODES: Final = 4  # nodes that are asked for the map of slots
_REFRESH_S: Final = 1.0  # interval of reading the map after failures
T = TypeVar("T")


class ClusterScripts:
    """``RedisScripts`` of every master. The caller closes it.

    The map of slots is read again when a node redirects a call, and at most once a second when one fails.
    """

    def __init__(
        self, url: str, clock: Clock, *, timeout_s: float, access: RedisAccess, repeatable: bool
    ) -> None:
        self._url = url
        self._clock = clock
        self._timeout_s = timeout_s
        self._access = access
        self._repeatable = repeatable
        self._registered: list[tuple[str, ...]] = []
        self._nodes: dict[Node, RedisScripts] = {}
        self._slots: SlotMap = ()
        self._reading = asyncio.Lock()
        self._read_s = clock.monotonic_s() - _REFRESH_S

    def script(self, *names: str) -> Script:
        """Register and return the script that joins these files."""
        self._registered.append(names)
        return Script.of(names)

    @property
    def breaker_open(self) -> bool:
        """A master counts as unavailable."""
        return any(node.breaker_open for node in self._nodes.values())

    @property
    def problem(self) -> str:
        return next((node.problem for node in self._nodes.values() if node.problem), "")

    @property
    def available_since_s(self) -> float:
        """The monotonic time at which a master was last found available again."""
        return max((node.available_since_s for node in self._nodes.values()), default=self._read_s)

    async def connect(self) -> None:
        """Return once every master responded and has the scripts. Raises StoreUnavailable."""
        await self._read_map(self._read_s)
        for _, address in self._slots:
            await self._node(address).connect()

    async def run(
        self, tenant_id: str, script: Script, keys: Sequence[str], arguments: Sequence[str | int | bytes]
    ) -> Any:
        return await self._routed(tenant_id, lambda node: node.run(tenant_id, script, keys, arguments))

    async def hash(self, tenant_id: str, key: str) -> Mapping[bytes, bytes]:
        return await self._routed(tenant_id, lambda node: node.hash(tenant_id, key))

    async def memory(self) -> tuple[int, int]:
        """Return what the fullest master has used, and the most that it may."""
        if not self._slots:
            await self._read_map(self._read_s)
        found = [await self._node(address).memory() for address in {node for _, node in self._slots}]
        return max(found, key=lambda one: one[0] / one[1] if one[1] else 0.0)

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()

    async def _routed(self, tenant_id: str, call: Callable[[RedisScripts], Awaitable[T]]) -> T:
        slot = key_slot(slots_key(tenant_id).encode())
        for _ in range(_REDIRECTS):
            if not self._slots:
                await self._read_map(self._read_s)
            read_s = self._read_s
            try:
                at = bisect_right(self._slots, slot, key=itemgetter(0)) - 1
                return await call(self._node(self._slots[at][1]))
            except StoreUnavailable as error:
                moved = isinstance(error.__cause__, redis.exceptions.MovedError)
                if moved or self._clock.monotonic_s() - read_s >= _REFRESH_S:
                    await self._read_map(read_s)
                if not moved:
                    raise
        raise StoreUnavailable("the slots of the Redis cluster move all the time", retry_after_s=1.0)

    def _node(self, address: Node) -> RedisScripts:
        if address not in self._nodes:
            node = self._nodes[address] = RedisScripts(
                node_url(self._url, address),
                self._clock,
                timeout_s=self._timeout_s,
                access=self._access,
                repeatable=self._repeatable,
            )
            for names in self._registered:
                node.script(*names)
        return self._nodes[address]

    async def _read_map(self, seen_s: float) -> None:
        """Read the map of slots, unless it was read since ``seen_s``. Raises StoreUnavailable."""
        async with self._reading:
            if self._read_s != seen_s:
                return
            self._read_s = self._clock.monotonic_s()
            known = dict.fromkeys([address for _, address in self._slots] + list(nodes_of(self._url)))
            for address in list(known)[:_MAP_NODES]:
                try:
                    found = await read_slots(node_url(self._url, address), self._access, self._timeout_s / 2)
                except AWAY:
                    continue
                if found:
                    self._slots = found
                    break
            else:
                raise StoreUnavailable("no node of the Redis cluster has its map", retry_after_s=1.0)
            masters = {address for _, address in self._slots}
            for address in [address for address in self._nodes if address not in masters]:
                await self._nodes.pop(address).close()


def open_scripts(
    url: str, clock: Clock, *, timeout_s: float, access: RedisAccess = NO_ACCESS, repeatable: bool = False
) -> RedisScripts | ClusterScripts:
    """Return the scripts of the Redis at the URL. The caller closes them.

    ``timeout_s`` bounds each connection attempt and each batch. ``repeatable``: a second run of any script
    admits nothing more, so a batch whose connection broke is sent once more.
    """
    kind = ClusterScripts if is_cluster(url) else RedisScripts
    return kind(url, clock, timeout_s=timeout_s, access=access, repeatable=repeatable)
