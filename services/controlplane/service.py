"""Tenants, keys, deployments and nodes as operators make and see them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from services.controlplane.fleet import Fleet, Replica, decode, fleet_of, replicas_of
from services.controlplane.policy.assign import Unplaced, plan
from services.controlplane.resources import REQUEST_TTL_S, Resources, Stored, Together, fingerprint_of
from services.core.errors import Conflict, FailedPrecondition, InvalidInput, NotFound, UnsupportedFeature
from services.core.manifest import is_digest
from services.core.paging import page_of
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    KEYS,
    NODES,
    ROOT,
    TENANTS,
    WORKERS,
    ApiKey,
    Deployment,
    KeyRole,
    Meta,
    Node,
    Tag,
    Tenant,
    VersionState,
    Worker,
    dump,
    load,
    tag_key,
    version_key,
)
from services.ports.clock import Clock
from services.ports.store import Committed, Entry, ModRevisionIs, Put, Store
from services.runtime import secrets

log = structlog.get_logger()

_TAG: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_KEYS_OF_TENANT: Final = ROOT + "guards/tenant-keys/"
_NODE_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment with what the fleet makes of it. ``message`` says why it is not at its replicas."""

    stored: Stored[Deployment]
    replicas: tuple[Replica, ...]
    message: str

    @property
    def ready(self) -> int:
        states = (replica.loaded.state for replica in self.replicas if replica.loaded is not None)
        return sum(state is VersionState.READY for state in states)


@dataclass(frozen=True, slots=True)
class NodeView:
    """A worker as operators see it: what they said of it, and what it says of itself while it lives."""

    node: Node
    mod_revision: int
    worker: Worker | None
    incarnation: int


class ControlPlaneService:
    """Stateless: every answer comes from the store, every write is conditional on what was read."""

    def __init__(
        self, store: Store, clock: Clock, *, new_secret: Callable[[], bytes] = secrets.new_secret
    ) -> None:
        self._store = store
        self._clock = clock
        self._new_secret = new_secret
        self._tenants = Resources(store, clock, TENANTS, Tenant, with_meta=_tenant_meta)
        self._keys = Resources(store, clock, KEYS, ApiKey, with_meta=_key_meta)
        self._deployments = Resources(store, clock, DEPLOYMENTS, Deployment, with_meta=_deployment_meta)

    # --- tenants ---------------------------------------------------------------------------------

    async def create_tenant(self, tenant: Tenant, *, request_id: str = "") -> Stored[Tenant]:
        _require_offered(tenant)
        created = await self._tenants.create(tenant, request_id=request_id)
        log.info("tenant.created", tenant=tenant.meta.name)
        return created

    async def get_tenant(self, name: str) -> Stored[Tenant]:
        return await self._tenants.get(name)

    async def list_tenants(self, *, size: int = 0, token: str = "") -> tuple[tuple[Stored[Tenant], ...], str]:
        return await self._tenants.page(size=size, token=token)

    async def update_tenant(self, tenant: Tenant, *, etag: str = "", request_id: str = "") -> Stored[Tenant]:
        """Replace a tenant. Its limits hold for the next request that a gateway admits."""
        _require_offered(tenant)
        updated = await self._tenants.update(
            tenant.meta.name,
            lambda _: tenant,
            etag=etag,
            request_id=request_id,
            fingerprint=fingerprint_of(b"update" + dump(tenant)),
        )
        log.info("tenant.updated", tenant=tenant.meta.name)
        return updated

    async def delete_tenant(self, name: str, *, etag: str = "") -> None:
        """Remove a tenant. Raises FailedPrecondition while it has keys."""
        guard = await self._store.get(_KEYS_OF_TENANT + name)
        owned = [key.record.meta.name for key in await self._keys.all() if key.record.tenant == name]
        if owned:
            raise FailedPrecondition(
                f"tenant {name} has {len(owned)} keys, {owned[0]} among them; delete them first",
                name=name,
                keys=len(owned),
            )
        # A key made since the look at the keys moved the guard, and the commit fails.
        unmoved = ModRevisionIs(_KEYS_OF_TENANT + name, guard.mod_revision if guard else 0)
        await self._tenants.delete(name, etag=etag, together=Together(conditions=(unmoved,)))
        log.info("tenant.deleted", tenant=name)

    # --- keys ------------------------------------------------------------------------------------

    async def create_key(self, key: ApiKey, *, request_id: str = "") -> tuple[Stored[ApiKey], str]:
        """Return a new key and its text, which is stored nowhere.

        The same request id again cannot repeat a text that nobody has: it answers with a new one, and the
        first stays good for the ten minutes in which its answer may still arrive.
        """
        name = key.meta.name
        if key.expire_unix_s and key.expire_unix_s <= self._clock.unix_s():
            raise InvalidInput("expire_time is in the past", field="key.expire_time")
        together = await self._owner_of(key)
        text, hashed = secrets.new_key(name, self._new_secret())
        made = await self._keys.create(
            replace(key, secret_hash=hashed, previous_secret_hash="", previous_expire_unix_s=0.0),
            request_id=request_id,
            fingerprint=_content_of(key),
            together=together,
        )
        if made.replayed:
            return await self.rotate_key(name, grace_s=REQUEST_TTL_S)
        log.info("key.created", key=name, role=key.role.value, tenant=key.tenant)
        return made, text

    async def get_key(self, name: str) -> Stored[ApiKey]:
        return await self._keys.get(name)

    async def list_keys(self, *, size: int = 0, token: str = "") -> tuple[tuple[Stored[ApiKey], ...], str]:
        return await self._keys.page(size=size, token=token)

    async def delete_key(self, name: str, *, etag: str = "") -> None:
        """Remove a key; gateways refuse it as soon as they hear of it."""
        await self._keys.delete(name, etag=etag)
        log.info("key.deleted", key=name)

    async def update_key(self, wanted: ApiKey, *, etag: str = "", request_id: str = "") -> Stored[ApiKey]:
        """Replace a key's models, expiry and labels. Its role, tenant and secret stay; others are refused."""

        def changed(key: ApiKey) -> ApiKey:
            if wanted.role is not key.role or wanted.tenant != key.tenant:
                raise InvalidInput("the role and the tenant of a key never change", field="key.role")
            if key.role is KeyRole.ADMIN and wanted.models:
                raise InvalidInput("an admin key has no models", field="key.models")
            meta = replace(key.meta, labels=wanted.meta.labels)
            return replace(key, meta=meta, models=wanted.models, expire_unix_s=wanted.expire_unix_s)

        stored = await self._keys.update(
            wanted.meta.name,
            changed,
            etag=etag,
            request_id=request_id,
            fingerprint=fingerprint_of(b"update" + dump(wanted)),
        )
        log.info("key.updated", key=wanted.meta.name)
        return stored

    async def rotate_key(self, name: str, *, grace_s: float) -> tuple[Stored[ApiKey], str]:
        """Return the key with a new text; the old one is good for ``grace_s`` more seconds."""
        text, hashed = secrets.new_key(name, self._new_secret())

        def rotated(key: ApiKey) -> ApiKey:
            return replace(
                key,
                secret_hash=hashed,
                previous_secret_hash=key.secret_hash if grace_s > 0 else "",
                previous_expire_unix_s=self._clock.unix_s() + grace_s if grace_s > 0 else 0.0,
            )

        stored = await self._keys.update(name, rotated)
        log.info("key.rotated", key=name, grace_s=grace_s)
        return stored, text

    async def _owner_of(self, key: ApiKey) -> Together:
        """What ties a key to its tenant: the tenant is there, and whoever deletes it learns of the key."""
        if key.role is KeyRole.ADMIN:
            if key.tenant or key.models:
                raise InvalidInput("an admin key has no tenant and no models", field="key.tenant")
            return Together()
        if not key.tenant:
            raise InvalidInput("a tenant key needs its tenant", field="key.tenant")
        entry = await self._store.get(TENANTS + key.tenant)
        if entry is None:
            raise FailedPrecondition(f"there is no tenant {key.tenant}", tenant=key.tenant)
        return Together(
            conditions=(ModRevisionIs(entry.key, entry.mod_revision),),
            operations=(Put(_KEYS_OF_TENANT + key.tenant, key.meta.name.encode()),),
        )

    # --- deployments -----------------------------------------------------------------------------

    async def create_deployment(self, deployment: Deployment, *, request_id: str = "") -> DeploymentView:
        """Store a deployment whose version is pinned to a digest. Raises NotFound for an unknown version."""
        pinned = await self._pinned(deployment)
        fingerprint = _deployment_content(deployment)
        stored = await self._deployments.create(pinned, request_id=request_id, fingerprint=fingerprint)
        log.info("deployment.created", deployment=deployment.meta.name, version_digest=pinned.version_digest)
        return await self._view(stored)

    async def get_deployment(self, name: str) -> DeploymentView:
        return await self._view(await self._deployments.get(name))

    async def list_deployments(
        self, *, size: int = 0, token: str = ""
    ) -> tuple[tuple[DeploymentView, ...], str]:
        page, following = await self._deployments.page(size=size, token=token)
        fleet = await self.fleet()
        unplaced = unplaced_in(fleet)
        return tuple(view_of(stored, fleet, unplaced) for stored in page), following

    async def update_deployment(
        self, deployment: Deployment, *, etag: str = "", request_id: str = ""
    ) -> DeploymentView:
        """Replace a deployment. A tag is resolved again, so naming it again follows where it moved."""
        pinned = await self._pinned(deployment)
        stored = await self._deployments.update(
            deployment.meta.name,
            lambda _: pinned,
            etag=etag,
            request_id=request_id,
            fingerprint="update " + _deployment_content(deployment),
        )
        log.info("deployment.updated", deployment=deployment.meta.name, version_digest=pinned.version_digest)
        return await self._view(stored)

    async def delete_deployment(self, name: str, *, etag: str = "") -> None:
        """Remove a deployment; its replicas are taken off their workers."""
        await self._deployments.delete(name, etag=etag)
        log.info("deployment.deleted", deployment=name)

    async def fleet(self) -> Fleet:
        """Return the fleet as it is stored now."""
        listings = [await self._store.list(p) for p in (DEPLOYMENTS, WORKERS, NODES, ASSIGNMENTS)]
        return fleet_of(decode(entry) for listing in listings for entry in listing.entries)

    async def _view(self, stored: Stored[Deployment]) -> DeploymentView:
        fleet = await self.fleet()
        return view_of(stored, fleet, unplaced_in(fleet))

    async def _pinned(self, deployment: Deployment) -> Deployment:
        digest = deployment.version
        if not is_digest(digest):
            if not _TAG.fullmatch(digest):
                raise InvalidInput("version is neither a digest nor a tag", field="deployment.version")
            tag = await self._store.get(tag_key(deployment.model, digest))
            if tag is None:
                raise NotFound(
                    f"model {deployment.model} has no tag {digest}", model=deployment.model, tag=digest
                )
            digest = load(tag.value, Tag).digest
        if await self._store.get(version_key(deployment.model, digest)) is None:
            raise NotFound(
                f"model {deployment.model} has no version {digest}", model=deployment.model, digest=digest
            )
        return replace(deployment, version_digest=digest)

    # --- nodes -----------------------------------------------------------------------------------

    async def get_node(self, name: str) -> NodeView:
        """Return a worker that lives or that operators spoke of. Raises NotFound."""
        node, worker = await self._store.get(NODES + name), await self._store.get(WORKERS + name)
        if node is None and worker is None:
            raise NotFound(f"there is no node {name}", name=name)
        return _node_view(name, node, worker)

    async def list_nodes(self, *, size: int = 0, token: str = "") -> tuple[tuple[NodeView, ...], str]:
        nodes = {e.key.removeprefix(NODES): e for e in (await self._store.list(NODES)).entries}
        workers = {e.key.removeprefix(WORKERS): e for e in (await self._store.list(WORKERS)).entries}
        names = sorted({*nodes, *workers})
        views = [_node_view(name, nodes.get(name), workers.get(name)) for name in names]
        return page_of(views, lambda view: view.node.worker_id, size=size, token=token)

    async def cordon(self, name: str) -> NodeView:
        """Give a node no new work."""
        return await self._set_node(name, lambda node: replace(node, cordoned=True))

    async def uncordon(self, name: str) -> NodeView:
        """Let a node have work again; a drain that goes on ends."""
        return await self._set_node(name, lambda node: replace(node, cordoned=False, draining=False))

    async def drain(self, name: str) -> NodeView:
        """Give a node no new work and move what it has; returns at once, the node's versions tell how far."""
        return await self._set_node(name, lambda node: replace(node, cordoned=True, draining=True))

    async def _set_node(self, name: str, change: Callable[[Node], Node]) -> NodeView:
        for _ in range(_NODE_TRIES):
            view = await self.get_node(name)
            node = change(view.node)
            done = await self._store.commit(
                [Put(NODES + name, dump(node))], [ModRevisionIs(NODES + name, view.mod_revision)]
            )
            if isinstance(done, Committed):
                log.info("node.updated", node=name, cordoned=node.cordoned, draining=node.draining)
                return replace(view, node=node, mod_revision=done.revision)
        raise Conflict(f"node {name} is being changed by others; try again", name=name)


def _require_offered(tenant: Tenant) -> None:
    """Raises UnsupportedFeature for a limit that nothing would hold: a promise is refused, not ignored."""
    if tenant.tokens_per_minute:
        raise UnsupportedFeature("token rates are not offered yet", field="tenant.tokens_per_minute")
    if tenant.weight != 1.0:
        raise UnsupportedFeature("weights are not offered yet", field="tenant.weight")


def unplaced_in(fleet: Fleet) -> dict[str, Unplaced]:
    """Return what the planner cannot place, by deployment: one plan for the whole fleet."""
    actions = plan(fleet.deployments, fleet.workers, fleet.nodes, fleet.assignments)
    return {action.deployment: action for action in actions if isinstance(action, Unplaced)}


def view_of(stored: Stored[Deployment], fleet: Fleet, unplaced: Mapping[str, Unplaced]) -> DeploymentView:
    """Join a deployment with its replicas, and with the planner's reason for those it cannot place."""
    name = stored.record.meta.name
    replicas = replicas_of(fleet, name)
    return DeploymentView(stored, replicas, _message(replicas, unplaced.get(name)))


def _message(replicas: tuple[Replica, ...], unplaced: Unplaced | None) -> str:
    parts: list[str] = []
    if unplaced is not None:
        counts: dict[str, int] = {}
        for _, why in unplaced.rejected:
            counts[why] = counts.get(why, 0) + 1
        told = ", ".join(f"{count} {why}" for why, count in sorted(counts.items())) or "there is none"
        parts.append(f"no worker for {unplaced.missing} replicas: {told}")
    for replica in replicas:
        if replica.loaded is not None and replica.loaded.state is VersionState.FAILED:
            parts.append(f"{replica.worker_id}: {replica.loaded.message}")
    return "; ".join(parts)[:1024]


def _node_view(name: str, node: Entry | None, worker: Entry | None) -> NodeView:
    return NodeView(
        Node(name) if node is None else load(node.value, Node),
        0 if node is None else node.mod_revision,
        None if worker is None else load(worker.value, Worker),
        0 if worker is None else worker.create_revision,
    )


def _content_of(key: ApiKey) -> str:
    bare = replace(key, secret_hash="", previous_secret_hash="", previous_expire_unix_s=0.0)
    return fingerprint_of(dump(bare))


def _deployment_content(deployment: Deployment) -> str:
    return fingerprint_of(dump(replace(deployment, version_digest="")))


def _tenant_meta(record: Tenant, meta: Meta) -> Tenant:
    return replace(record, meta=meta)


def _key_meta(record: ApiKey, meta: Meta) -> ApiKey:
    return replace(record, meta=meta)


def _deployment_meta(record: Deployment, meta: Meta) -> Deployment:
    return replace(record, meta=meta)
