"""Tenants, keys, budgets, deployments, rollouts and nodes: their common operations, and those of each kind.

Arguments and results are the messages of ``fairway.v1.controlplane_pb2``, as the server sends them.
``metadata.etag`` identifies the state that was read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

from fairway.client.admin.calls import Service, duration_of
from fairway.client.admin.watch import (
    WAIT_S,
    OnLost,
    WatchUpdate,
    until_drained,
    until_ready,
    watch_resources,
)
from fairway.client.errors import Conflict, NotFound
from fairway.client.values import checked_timeout_s
from fairway.v1 import controlplane_pb2 as cp

T = TypeVar("T", cp.Tenant, cp.Key, cp.Budget, cp.Objective, cp.Deployment, cp.Rollout, cp.Node, cp.Alias)
R = TypeVar("R")
_TRIES: Final = 4
_ETAG_MISMATCH: Final = "ETAG_MISMATCH"


async def read_change_write(
    etag: str,
    read: Callable[[], Awaitable[R]],
    write: Callable[[R, str], Awaitable[R]],
    etag_of: Callable[[R], str],
) -> R:
    """Return the result of ``write`` applied to the result of ``read``, without a lost concurrent change.

    Without the caller's ``etag``, a concurrent change causes a new read and write, a few times. Raises
    Conflict.
    """
    for attempt in range(1, _TRIES + 1):
        found = await read()
        try:
            return await write(found, etag or etag_of(found))
        except Conflict as error:
            if etag or error.reason != _ETAG_MISMATCH or attempt == _TRIES:
                raise
    raise AssertionError("the last try returns or raises")


def plural_of(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


class Reading(Generic[T]):
    """Operations of every kind. ``timeout_s`` None: the client's options apply, here and below."""

    _noun: ClassVar[str]  # the name in the service's methods

    def __init__(self, service: Service) -> None:
        self._service = service
        self._field = self._noun.lower()
        self._kind = cp.ResourceKind.Value(f"RESOURCE_KIND_{self._noun.upper()}")

    async def list(self, *, limit: int | None = None, timeout_s: float | None = None) -> Sequence[T]:
        """Return all of them, or the first ``limit``, in the order of their names."""
        plural = plural_of(self._noun)
        return await self._service.pages(f"List{plural}", plural.lower(), limit=limit, timeout_s=timeout_s)

    async def get(self, name: str, *, timeout_s: float | None = None) -> T:
        """Return the one of that name. Raises NotFound."""
        answer = await self._service.call(f"Get{self._noun}", name=name, timeout_s=timeout_s)
        return self._of(answer)

    async def delete(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> None:
        """Return once it is deleted. With ``etag``, only if it is unchanged since; raises Conflict."""
        await self._service.change(f"Delete{self._noun}", name=name, etag=etag, timeout_s=timeout_s)

    def watch(self, *, on_lost: OnLost | None = None) -> AsyncGenerator[WatchUpdate[T], None]:
        """Yield a Snapshot of the present resources, then Changed and Deleted, until it is closed.

        It survives lost connections and continues after the last yielded revision; a change near the
        interruption may be yielded twice. ``on_lost`` receives the error and the pause in seconds. Another
        Snapshot is yielded if the server no longer has the changes in between. Close it, with
        ``contextlib.aclosing``.
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
    """Kinds whose values are replaced as a whole."""

    async def update(self, item: T, *, timeout_s: float | None = None) -> T:
        """Replace the stored value if ``metadata.etag`` is still its etag (empty: unconditionally).

        Raises Conflict with the reason ETAG_MISMATCH when it was changed since.
        """
        return await self._changed("Update", timeout_s=timeout_s, **{self._field: item})

    async def change(
        self, name: str, change: Callable[[T], None], *, etag: str = "", timeout_s: float | None = None
    ) -> T:
        """Read it, apply ``change``, write it. Without ``etag`` this is repeated after a concurrent change.

        ``timeout_s`` applies to each call. Raises Conflict.
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
        """Convert the value read into the value to write, before it is changed."""


class Tenants(Writing[cp.Tenant]):
    """The unit of quotas and isolation."""

    _noun = "Tenant"

    async def create(self, tenant: cp.Tenant, *, timeout_s: float | None = None) -> cp.Tenant:
        """Return it as stored. Raises Conflict for a name that is taken."""
        return await self._changed("Create", tenant=tenant, timeout_s=timeout_s)

    async def erase(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> cp.Tenant:
        """Destroy the keys of all that is stored of a tenant, and disable it. Cannot be undone."""
        answer: cp.EraseTenantResponse = await self._service.change(
            "EraseTenant", name=name, etag=etag, timeout_s=timeout_s
        )
        return answer.tenant

    async def rotate_key(self, name: str, *, timeout_s: float | None = None) -> None:
        """Seal what is stored from now on with another data key."""
        await self._service.change("RotateTenantKey", name=name, timeout_s=timeout_s)


class Keys(Writing[cp.Key]):
    """Keys of tenants for the data plane and of operators for the control plane.

    An update leaves role, tenant and secret unchanged.
    """

    _noun = "Key"

    async def create(self, key: cp.Key, *, timeout_s: float | None = None) -> cp.CreateKeyResponse:
        """Return the key and its ``secret``, which cannot be read again."""
        answer: cp.CreateKeyResponse = await self._service.change("CreateKey", key=key, timeout_s=timeout_s)
        return answer

    async def rotate(
        self, name: str, *, grace_s: float = 0.0, etag: str = "", timeout_s: float | None = None
    ) -> cp.RotateKeyResponse:
        """Return the key and its new ``secret``; the old one stays valid for ``grace_s``."""
        answer: cp.RotateKeyResponse = await self._service.change(
            "RotateKey", name=name, grace=duration_of(grace_s), etag=etag, timeout_s=timeout_s
        )
        return answer


class Budgets(Writing[cp.Budget]):
    """What the requests of a tenant, a key or an end user may cost. Their scope never changes."""

    _noun = "Budget"

    async def create(self, budget: cp.Budget, *, timeout_s: float | None = None) -> cp.Budget:
        """Return it as stored. Raises Conflict for a name that is taken."""
        return await self._changed("Create", budget=budget, timeout_s=timeout_s)


class Objectives(Writing[cp.Objective]):
    """What the requests of a model and class are promised, and what was measured. Model and class never
    change."""

    _noun = "Objective"

    async def create(self, objective: cp.Objective, *, timeout_s: float | None = None) -> cp.Objective:
        """Return it as stored. Raises Conflict for a name that is taken."""
        return await self._changed("Create", objective=objective, timeout_s=timeout_s)


class Aliases(Writing[cp.Alias]):
    """Model names for several deployments, of which the smallest that meets a request serves it."""

    _noun = "Alias"

    async def create(self, alias: cp.Alias, *, timeout_s: float | None = None) -> cp.Alias:
        """Return it as stored. Raises Conflict for a name that is taken."""
        return await self._changed("Create", alias=alias, timeout_s=timeout_s)


class Deployments(Writing[cp.Deployment]):
    """Which versions run, and on how many workers.

    ``create`` and ``update`` resolve a tag once. ``change`` keeps the running version, even if its tag was
    moved since, unless it sets ``version``.
    """

    _noun = "Deployment"

    async def create(self, deployment: cp.Deployment, *, timeout_s: float | None = None) -> cp.Deployment:
        """Return it as stored. Raises Conflict for a name that is taken."""
        return await self._changed("Create", deployment=deployment, timeout_s=timeout_s)

    def _prepare(self, item: cp.Deployment) -> None:
        if item.status.tag_digest not in ("", item.version_digest):
            item.version = item.version_digest  # a tag in ``version`` would be resolved again
        item.ClearField("status")

    async def scale(
        self, name: str, replicas: int, *, etag: str = "", timeout_s: float | None = None
    ) -> cp.Deployment:
        """Run the same version on another number of workers."""

        def change(deployment: cp.Deployment) -> None:
            deployment.replicas = replicas

        return await self.change(name, change, etag=etag, timeout_s=timeout_s)

    async def history(
        self, name: str, *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[cp.DeploymentRevision]:
        """Return the states that it had, the newest first; about the last 32. Raises NotFound."""
        return await self._service.pages(
            "ListDeploymentRevisions", "revisions", limit=limit, timeout_s=timeout_s, name=name
        )

    async def rollback(
        self, name: str, revision: str = "", *, etag: str = "", timeout_s: float | None = None
    ) -> cp.Deployment:
        """Give it an earlier state again, except for its replicas; without ``revision`` the one before.

        Returns it as stored; ``wait_ready`` waits for its replicas. Raises NotFound without such a state.
        """
        states = await self.history(name, timeout_s=timeout_s)
        present = await self.get(name, timeout_s=timeout_s)
        found = next((one for one in states if _is_before(one, present, revision)), None)
        if found is None:
            what = f"the deployment {name} had no other state {revision}".rstrip()
            raise NotFound(what, reason="NOT_FOUND", metadata={"name": name})

        def change(deployment: cp.Deployment) -> None:
            replicas, metadata = deployment.replicas, cp.Metadata()
            metadata.CopyFrom(deployment.metadata)
            deployment.CopyFrom(found.deployment)
            deployment.version, deployment.replicas = found.deployment.version_digest, replicas
            metadata.labels.clear()
            metadata.labels.update(found.deployment.metadata.labels)
            deployment.metadata.CopyFrom(metadata)
            deployment.ClearField("status")

        return await self.change(name, change, etag=etag, timeout_s=timeout_s)

    async def wait_ready(
        self,
        name: str,
        *,
        timeout_s: float = WAIT_S,
        report: Callable[[cp.Deployment], None] | None = None,
    ) -> cp.Deployment:
        """Return it once it has exactly its replicas, all READY. ``report`` receives every value read.

        Raises WaitFailed, with the reason, as soon as a replica fails permanently; DeadlineExceeded.
        """
        checked_timeout_s(timeout_s)
        return await until_ready(lambda: self.get(name), report, timeout_s=timeout_s)


def _is_before(revision: cp.DeploymentRevision, present: cp.Deployment, name: str) -> bool:
    """Whether it is the named state; without a name, whether it differs from the present one."""
    if name:
        return revision.name == name
    return _state(revision.deployment) != _state(present)


def _state(deployment: cp.Deployment) -> bytes:
    """Return what a rollback restores."""
    found = cp.Deployment()
    found.CopyFrom(deployment)
    for field in ("status", "replicas", "version"):
        found.ClearField(field)
    found.metadata.Clear()
    found.metadata.labels.update(deployment.metadata.labels)
    return found.SerializeToString(deterministic=True)


class Rollouts(Reading[cp.Rollout]):
    """The passage of a deployment's traffic from its version to others. They are kept when they have
    ended.
    """

    _noun = "Rollout"

    async def create(
        self, rollout: cp.Rollout, *, dry_run: bool = False, timeout_s: float | None = None
    ) -> cp.Rollout:
        """Start it, or return its plan with ``dry_run``. Raises FailedPrecondition for what does not fit."""
        return await self._changed("Create", rollout=rollout, dry_run=dry_run, timeout_s=timeout_s)

    async def promote(
        self,
        name: str,
        *,
        to_end: bool = False,
        arm: str = "",
        accepted: Mapping[str, str] | None = None,
        etag: str = "",
        timeout_s: float | None = None,
    ) -> cp.Rollout:
        """Go to the next step, to all traffic, or to an arm. ``accepted``: metrics that no longer count."""
        fields = {"name": name, "to_end": to_end, "arm": arm, "accepted": accepted or {}, "etag": etag}
        return await self._changed("Promote", timeout_s=timeout_s, **fields)

    async def pause(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> cp.Rollout:
        """Stay at the present step; failures still roll back."""
        return await self._changed("Pause", name=name, etag=etag, timeout_s=timeout_s)

    async def resume(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> cp.Rollout:
        return await self._changed("Resume", name=name, etag=etag, timeout_s=timeout_s)

    async def abort(
        self, name: str, *, reason: str = "", etag: str = "", timeout_s: float | None = None
    ) -> cp.Rollout:
        """Move every new request back to the stable version."""
        return await self._changed("Abort", name=name, reason=reason, etag=etag, timeout_s=timeout_s)

    async def revert(
        self, name: str, *, reason: str = "", etag: str = "", timeout_s: float | None = None
    ) -> cp.Rollout:
        """Give the deployment its version before again, in any phase; once final, by an update."""
        return await self._changed("Revert", name=name, reason=reason, etag=etag, timeout_s=timeout_s)


class Nodes(Reading[cp.Node]):
    """The workers. ``delete`` removes a disconnected one and its assignment."""

    _noun = "Node"

    async def cordon(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> cp.Node:
        """Assign no new work to a node; its present work stays."""
        return await self._changed("Cordon", name=name, etag=etag, timeout_s=timeout_s)

    async def uncordon(self, name: str, *, etag: str = "", timeout_s: float | None = None) -> cp.Node:
        """Allow new work on a node again. This ends a running drain."""
        return await self._changed("Uncordon", name=name, etag=etag, timeout_s=timeout_s)

    async def drain(
        self, name: str, *, ends_in_s: float = 0.0, etag: str = "", timeout_s: float | None = None
    ) -> cp.Node:
        """Start to move its work to other nodes and return at once. No request fails.

        ``ends_in_s``: time until the node ends; what runs shortly before moves in any case. 0: it stays.
        """
        ends_in = duration_of(ends_in_s)
        return await self._changed("Drain", name=name, ends_in=ends_in, etag=etag, timeout_s=timeout_s)

    async def assign(
        self, name: str, tenant: str = "", *, etag: str = "", timeout_s: float | None = None
    ) -> cp.Node:
        """Assign a node to a tenant, or to all. Replicas of others leave it at once."""
        return await self._changed("Assign", name=name, tenant=tenant, etag=etag, timeout_s=timeout_s)

    async def wait_drained(
        self,
        name: str,
        *,
        timeout_s: float = WAIT_S,
        report: Callable[[cp.Node], None] | None = None,
    ) -> cp.Node:
        """Return it once it has no assignment and no sequence. ``report`` receives every value read.

        Raises WaitFailed if it is not, or no longer, draining; DeadlineExceeded.
        """
        checked_timeout_s(timeout_s)
        return await until_drained(lambda: self.get(name), report, timeout_s=timeout_s)
