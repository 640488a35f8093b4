"""Tenants, keys, deployments and nodes: what they have in common once, and what each has besides.

What these methods take and return are the messages of ``fairway.v1.controlplane_pb2``, as the server sends
them: ``metadata.etag`` names the state that a value was read in.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from google.protobuf.duration_pb2 import Duration

from fairway.client.admin import wait as admin_wait
from fairway.client.admin.calls import Service
from fairway.client.admin.watch import News, OnLost, watch_resources
from fairway.client.errors import Conflict
from fairway.client.values import checked_timeout_s
from fairway.v1 import controlplane_pb2 as cp

T = TypeVar("T", cp.Tenant, cp.Key, cp.Deployment, cp.Node)
R = TypeVar("R")
_TRIES: Final = 4
_ETAG_MISMATCH: Final = "ETAG_MISMATCH"


async def read_change_write(
    etag: str,
    read: Callable[[], Awaitable[R]],
    write: Callable[[R, str], Awaitable[R]],
    etag_of: Callable[[R], str],
) -> R:
    """Return what ``write`` made of what ``read`` found, with nobody's change in between lost.

    Without an ``etag`` of the caller's, a change by someone else in between is read and the own one made
    again, a few times. Raises Conflict.
    """
    for attempt in range(1, _TRIES + 1):
        found = await read()
        try:
            return await write(found, etag or etag_of(found))
        except Conflict as error:
            if etag or error.reason != _ETAG_MISMATCH or attempt == _TRIES:
                raise
    raise AssertionError("the last try returns or raises")


class Reading(Generic[T]):
    """What every kind can do. ``timeout_s`` None: that of the client's options, here and below."""

    def __init__(self, service: Service, noun: str, kind: cp.ResourceKind.ValueType) -> None:
        """``noun``: as the methods of the service name it, such as "Tenant"."""
        self._service = service
        self._noun = noun
        self._field = noun.lower()
        self._kind = kind

    async def list(self, *, limit: int | None = None, timeout_s: float | None = None) -> Sequence[T]:
        """Return all of them, or the first ``limit``, in the order of their names."""
        plural = f"{self._noun}s"
        return await self._service.pages(f"List{plural}", plural.lower(), limit=limit, timeout_s=timeout_s)

    async def get(self, name: str, *, timeout_s: float | None = None) -> T:
        """Return the one of that name. Raises NotFound."""
        answer = await self._service.call(f"Get{self._noun}", name=name, timeout_s=timeout_s)
        return self._of(answer)

    async def delete(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> None:
        """Return once it is gone. With ``etag``, only if nobody changed it since; raises Conflict."""
        await self._service.change(f"Delete{self._noun}", name=name, etag=etag, timeout_s=timeout_s)

    def watch(self, *, on_lost: OnLost | None = None) -> AsyncGenerator[News[T], None]:
        """Yield a Snapshot of what is there, then Changed and Deleted, until it is closed.

        It outlives connections and goes on after the last revision that it told; what changed around a break
        may be told twice. ``on_lost`` hears why, and in how many seconds it goes on. Another Snapshot comes
        where the server does not remember the changes in between. Close it, with ``contextlib.aclosing``.
        """
        return watch_resources(self._service, self._kind, self._named, on_lost)

    async def _changed(self, verb: str, *, timeout_s: float | None, **fields: Any) -> T:
        return self._of(await self._service.change(f"{verb}{self._noun}", timeout_s=timeout_s, **fields))

    def _of(self, answer: Any) -> T:
        return getattr(answer, self._field)  # type: ignore[no-any-return]

    def _named(self, change: cp.ResourceChange) -> tuple[str, T] | None:
        if change.WhichOneof("resource") != self._field:
            return None
        item: Any = getattr(change, self._field)
        return item.metadata.name, item


class Writing(Reading[T]):
    """Kinds whose values are written whole."""

    async def update(self, item: T, *, timeout_s: float | None = None) -> T:
        """Replace what is stored, if ``metadata.etag`` is still its etag (empty: whatever it is).

        Raises Conflict, with the reason ETAG_MISMATCH, when somebody changed it since.
        """
        return await self._changed("Update", timeout_s=timeout_s, **{self._field: item})

    async def change(
        self, name: str, change: Callable[[T], None], *, etag: str = "", timeout_s: float | None = None
    ) -> T:
        """Read it, let ``change`` alter it, write it; anew where somebody was faster, unless with ``etag``.

        The time is that of each call. Raises Conflict.
        """

        async def write(item: T, etag: str) -> T:
            self._prepare(item)
            change(item)
            item.metadata.etag = etag
            return await self.update(item, timeout_s=timeout_s)

        return await read_change_write(
            etag, lambda: self.get(name, timeout_s=timeout_s), write, lambda item: item.metadata.etag
        )

    def _prepare(self, item: T) -> None:
        """Make what was read what is to be written, before it is changed."""


class Tenants(Writing[cp.Tenant]):
    """The unit of quotas and isolation."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, "Tenant", cp.RESOURCE_KIND_TENANT)

    async def create(self, tenant: cp.Tenant, *, timeout_s: float | None = None) -> cp.Tenant:
        """Return it as it is stored. Raises Conflict for a name that is taken."""
        return await self._changed("Create", tenant=tenant, timeout_s=timeout_s)


class Keys(Writing[cp.Key]):
    """What opens the data plane for a tenant, and the control plane for operators.

    An update leaves role, tenant and secret as they are.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service, "Key", cp.RESOURCE_KIND_KEY)

    async def create(self, key: cp.Key, *, timeout_s: float | None = None) -> cp.CreateKeyResponse:
        """Return the key and its ``secret``, which is not to be had again."""
        answer: cp.CreateKeyResponse = await self._service.change("CreateKey", key=key, timeout_s=timeout_s)
        return answer

    async def rotate(
        self, name: str, *, grace_s: float = 0.0, etag: str = "", timeout_s: float | None = None
    ) -> cp.RotateKeyResponse:
        """Return the key and its new ``secret``; the old one is good for ``grace_s``."""
        grace = Duration()
        grace.FromMicroseconds(round(grace_s * 1e6))
        answer: cp.RotateKeyResponse = await self._service.change(
            "RotateKey", name=name, grace=grace, etag=etag, timeout_s=timeout_s
        )
        return answer


class Deployments(Writing[cp.Deployment]):
    """Which versions are kept running, on how many workers.

    ``create`` and ``update`` resolve a tag, and it stays at that version. ``change`` keeps the version that
    runs, also where its tag moved since, unless it sets ``version``.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service, "Deployment", cp.RESOURCE_KIND_DEPLOYMENT)

    async def create(self, deployment: cp.Deployment, *, timeout_s: float | None = None) -> cp.Deployment:
        """Return it as it is stored. Raises Conflict for a name that is taken."""
        return await self._changed("Create", deployment=deployment, timeout_s=timeout_s)

    def _prepare(self, item: cp.Deployment) -> None:
        if item.status.tag_digest not in ("", item.version_digest):
            item.version = item.version_digest  # a tag that is named again is resolved again
        item.ClearField("status")

    async def scale(
        self, name: str, replicas: int, *, etag: str = "", timeout_s: float | None = None
    ) -> cp.Deployment:
        """Run the same version on another number of workers."""

        def change(deployment: cp.Deployment) -> None:
            deployment.replicas = replicas

        return await self.change(name, change, etag=etag, timeout_s=timeout_s)

    async def wait_ready(
        self,
        name: str,
        *,
        timeout_s: float = admin_wait.WAIT_S,
        report: Callable[[cp.Deployment], None] | None = None,
    ) -> cp.Deployment:
        """Return it once exactly its replicas are there, all READY. ``report`` hears it at every look.

        Raises WaitFailed, with the reason, as soon as a replica fails for good; DeadlineExceeded.
        """
        checked_timeout_s(timeout_s)
        return await admin_wait.until_ready(lambda: self.get(name), report, timeout_s=timeout_s)


class Nodes(Reading[cp.Node]):
    """The workers. ``delete`` forgets one that is gone, and what was assigned to it."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, "Node", cp.RESOURCE_KIND_NODE)

    async def cordon(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> cp.Node:
        """Give it no new work; what it has stays."""
        return await self._changed("Cordon", name=name, etag=etag, timeout_s=timeout_s)

    async def uncordon(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> cp.Node:
        """Let it have work again. A drain that goes on ends."""
        return await self._changed("Uncordon", name=name, etag=etag, timeout_s=timeout_s)

    async def drain(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> cp.Node:
        """Begin to move what it has to others; returns at once. No request fails by it."""
        return await self._changed("Drain", name=name, etag=etag, timeout_s=timeout_s)

    async def wait_drained(
        self,
        name: str,
        *,
        timeout_s: float = admin_wait.WAIT_S,
        report: Callable[[cp.Node], None] | None = None,
    ) -> cp.Node:
        """Return it once nothing is assigned to it and nothing runs. ``report`` hears it at every look.

        Raises WaitFailed where it is not draining, or not any more; DeadlineExceeded.
        """
        checked_timeout_s(timeout_s)
        return await admin_wait.until_drained(lambda: self.get(name), report, timeout_s=timeout_s)
