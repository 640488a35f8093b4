"""Deployments: the operations of operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from services.controlplane.fleet import read_snapshot, readable
from services.controlplane.resources.resources import Resources, Stored
from services.controlplane.resources.status import DeploymentView, deployment_view, unplaced_in
from services.controlplane.rollouts.records import Rollout
from services.controlplane.scaling.policy.deployment import replica_cost
from services.core.aliases import ALIASES
from services.core.errors import AlreadyExists, FailedPrecondition, InvalidInput, NotFound
from services.core.manifest import is_digest, is_tag
from services.core.outputs.forms import named_form
from services.core.paging import page_of
from services.core.records import (
    DEPLOYMENTS,
    GATEWAY_EXECUTOR,
    ROLLOUTS,
    ROOT,
    TENANTS,
    WORKERS,
    Deployment,
    Tag,
    Tenant,
    VersionRecord,
    Worker,
    dump,
    model_users_key,
    pack_users_key,
    tag_key,
    version_key,
)
from services.core.rollouts.routes import ROUTES
from services.core.scaling import Scaling
from services.ports.clock import Clock
from services.ports.store import Delete, ModRevisionIs, Operation, Put, Store
from services.runtime.idempotent_writes import WriteSet
from services.runtime.version_trust import VersionTrust

log = structlog.get_logger()
DEPLOYMENT_HISTORY: Final = ROOT + "deployment-history/"
MAX_REVISIONS: Final = 32
_MOST_DROPPED: Final = 64  # most old states that one commit drops: it has 128 operations
_WITH_WEIGHTS: Final = ("torch", "vllm")  # executors that can replace the weights of a version
_SEE_VERSIONS: Final = "see `fairway models versions"


@dataclass(frozen=True, slots=True)
class DeploymentRevision:
    """A state that a deployment had from a time on. ``cause``: update, or the rollout that ended in it.

    Each change stores one, in its transaction and under a key of its own, named by the time of the change. So
    concurrent changes of different deployments, and retries of one, never conflict here. It outlives the
    deployment: the ledger reads the prices of late reports in it.
    """

    time_unix_s: float
    deployment: Deployment
    cause: str = ""


async def revisions_of(
    store: Store, name: str, *, since_revision: int = 0
) -> tuple[tuple[str, DeploymentRevision], ...]:
    """Return the states that were stored since a revision with their names, the newest first."""
    entries = [one for one in (await store.list(_prefix(name))).entries if one.mod_revision >= since_revision]
    found = [(entry.key.rpartition("/")[2], readable(entry, DeploymentRevision)) for entry in entries]
    return tuple((key, one) for key, one in reversed(found) if one is not None)


def states_in(keys: Iterable[str], name: str) -> tuple[str, ...]:
    """Return the keys of a deployment's stored states among these, the oldest first."""
    prefix = _prefix(name)
    return tuple(sorted(key for key in keys if key.startswith(prefix)))


def kept(
    deployment: Deployment, time_unix_s: float, cause: str, *, states: Sequence[str]
) -> Sequence[Operation]:
    """Return the writes that keep a state and drop the oldest ``states`` beyond ``MAX_REVISIONS``."""
    surplus = states[: min(max(0, len(states) + 1 - MAX_REVISIONS), _MOST_DROPPED)]
    key = f"{_prefix(deployment.meta.name)}{round(time_unix_s * 1e6):017d}"
    revision = DeploymentRevision(time_unix_s, deployment, cause)
    return [*(Delete(old) for old in surplus), Put(key, dump(revision))]


def _prefix(name: str) -> str:
    return f"{DEPLOYMENT_HISTORY}{name}/"


class Deployments:
    """Stateless. Only a create or an update resolves a tag. A tag that moves affects the next create or
    update, not a running deployment.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._kind = Resources(store, clock, DEPLOYMENTS, Deployment)
        self._trust = VersionTrust(store, clock)

    async def create(self, deployment: Deployment, *, request_id: str = "") -> DeploymentView:
        """Store a deployment whose version is pinned to a digest. Raises NotFound for an unknown version."""
        request = self._kind.request("create", deployment, request_id)
        stored = await self._kind.replayed(request)
        if stored is None:
            name = deployment.meta.name
            if await self._store.get(ALIASES + name) is not None:
                raise AlreadyExists(f"an alias has the name {name}: give the deployment another", name=name)
            pinned, together = await self._pinned(deployment)
            alone = ModRevisionIs(ALIASES + name, 0)
            together = replace(together, conditions=(alone, *together.conditions))
            together = await self._with_history(pinned, together, "create")
            stored = await self._kind.create(pinned, request, together=together)
            log.info(
                "deployment.created", deployment=deployment.meta.name, digest=stored.record.version_digest
            )
        return await self._view(stored)

    async def get(self, name: str) -> DeploymentView:
        snapshot = await read_snapshot(self._store)
        entry = snapshot.entries.get(self._kind.key(name))
        if entry is None:
            raise self._kind.not_found(name)
        return deployment_view(self._kind.stored(entry), snapshot, unplaced_in(snapshot.fleet))

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[DeploymentView, ...], str]:
        """Return a page with the fleet status of each deployment, all as of one revision."""
        snapshot = await read_snapshot(self._store)
        found = self._kind.by_name(snapshot.under(DEPLOYMENTS))
        page, following = page_of(found, lambda stored: stored.record.meta.name, size=size, token=token)
        unplaced = unplaced_in(snapshot.fleet)
        return tuple(deployment_view(stored, snapshot, unplaced) for stored in page), following

    async def update(self, deployment: Deployment, *, etag: str = "", request_id: str = "") -> DeploymentView:
        """Replace a deployment. Resolves its tag again, so repeating the tag picks up its new version."""
        request = self._kind.request("update", deployment, request_id, etag=etag)
        stored = await self._kind.replayed(request)
        if stored is None:
            name = deployment.meta.name
            before = await self._store.get(self._kind.key(name))
            present = None if before is None else before.load(Deployment)
            serving = "" if present is None else present.version_digest
            pinned, together = await self._pinned(deployment, serving=serving)
            if present is not None and present.of_pack != pinned.of_pack:
                raise InvalidInput(
                    f"{name} cannot change between a model and a safety pack: create another deployment",
                    field="deployment.model",
                )
            is_split, routed = await self._route(name)

            def change(old: Deployment) -> Deployment:
                if is_split and old.version_digest != pinned.version_digest:
                    raise _in_rollout(name)
                return pinned

            conditions = (*routed.conditions, *together.conditions)
            together = WriteSet(conditions, (*routed.operations, *together.operations))
            together = await self._with_history(pinned, together, "update")
            stored = await self._kind.update(name, change, request, etag=etag, together=together)
            log.info(
                "deployment.updated", deployment=deployment.meta.name, digest=stored.record.version_digest
            )
        return await self._view(stored)

    async def delete(self, name: str, *, etag: str = "", request_id: str = "") -> None:
        """Remove a deployment; the planner then removes its replicas from their workers.

        Raises FailedPrecondition while a rollout of it is open, or a tenant has it as its safety pack.
        """
        request = self._kind.request("delete", name, request_id, etag=etag)
        is_split, routed = await self._route(name)
        if is_split:
            raise _in_rollout(name)
        guard = await self._store.get(pack_users_key(name))
        await self._require_no_tenant(name)
        # A tenant that got the pack after that read moved the guard; the commit then fails.
        unmoved = ModRevisionIs(pack_users_key(name), 0 if guard is None else guard.mod_revision)
        operations = (*routed.operations, Delete(pack_users_key(name)))
        alone = WriteSet((*routed.conditions, unmoved), operations)
        await self._kind.delete(name, request, etag=etag, together=alone)
        log.info("deployment.deleted", deployment=name)

    async def history(self, name: str) -> tuple[tuple[str, DeploymentRevision], ...]:
        """Return the states that the deployment had, the newest first, without those of an earlier one of
        that name. Raises NotFound.
        """
        created = (await self._kind.get(name)).create_revision
        return await revisions_of(self._store, name, since_revision=created)

    async def _with_history(self, pinned: Deployment, together: WriteSet, cause: str) -> WriteSet:
        name = pinned.meta.name
        states = [entry.key for entry in (await self._store.list(_prefix(name))).entries]
        operations = kept(pinned, self._clock.unix_s(), cause, states=states)
        return replace(together, operations=(*together.operations, *operations))

    async def _route(self, name: str) -> tuple[bool, WriteSet]:
        """Return whether a rollout splits the deployment's traffic, and the condition that it is unchanged.

        A route without an open rollout was written by hand: the writes delete it. It is read before the
        rollouts, since one that opens later writes it.
        """
        route = await self._store.get(ROUTES + name)
        if route is None:
            return False, WriteSet((ModRevisionIs(ROUTES + name, 0),))
        rollouts = [readable(entry, Rollout) for entry in (await self._store.list(ROLLOUTS)).entries]
        is_split = any(one and one.deployment == name and not one.ended for one in rollouts)
        unchanged = ModRevisionIs(route.key, route.mod_revision)
        return is_split, WriteSet((unchanged,), () if is_split else (Delete(route.key),))

    async def _require_no_tenant(self, name: str) -> None:
        for entry in (await self._store.list(TENANTS)).entries:
            found = readable(entry, Tenant)
            if found is not None and found.safety_pack == name:
                tenant = found.meta.name
                raise FailedPrecondition(
                    f"the requests of tenant {tenant} obey the safety pack {name}: give it another by "
                    f"`fairway policies assign --tenant {tenant}`",
                    name=name,
                    tenant=tenant,
                )

    async def names_by_version(self) -> dict[str, list[str]]:
        """Return the deployments of each version digest, by name."""
        names: dict[str, list[str]] = {}
        for stored in await self._kind.all():
            names.setdefault(stored.record.version_digest, []).append(stored.record.meta.name)
        return names

    async def _view(self, stored: Stored[Deployment]) -> DeploymentView:
        snapshot = await read_snapshot(self._store)
        return deployment_view(stored, snapshot, unplaced_in(snapshot.fleet))

    async def _pinned(self, deployment: Deployment, *, serving: str = "") -> tuple[Deployment, WriteSet]:
        """Return the deployment with its digest, and the condition that the version still exists.

        The version that it is ``serving`` needs no signature: workers decide whether they load it again.
        """
        if deployment.price.cached_micros > deployment.price.input_micros:
            raise InvalidInput(
                "cached prompt tokens cannot cost more than others", field="deployment.price.cached_micros"
            )
        if deployment.output_form:
            try:
                named_form(deployment.output_form)
            except ValueError as error:
                raise InvalidInput(f"output_form {error}", field="deployment.output_form") from error
        if deployment.tenant and await self._store.get(TENANTS + deployment.tenant) is None:
            raise NotFound(f"there is no tenant {deployment.tenant}", tenant=deployment.tenant)
        if deployment.scaling is not None:
            listing = await self._store.list(WORKERS)
            workers = [found for entry in listing.entries if (found := readable(entry, Worker)) is not None]
            check_scaling(deployment, deployment.scaling, workers)
        version, together = await pinned_version(
            self._store, deployment.model, deployment.version, field="deployment.version"
        )
        if version.digest != serving:
            await require_trust(self._trust, version)
        executor = version.executor(deployment.executor, field="deployment.executor")
        if executor == GATEWAY_EXECUTOR:
            _require_no_workers(deployment)
        if deployment.devices > 1 and executor != "vllm":
            raise InvalidInput(
                f"executor {executor} runs on one device: tensor_parallel and pipeline_parallel are for vllm",
                field="deployment.tensor_parallel",
            )
        if deployment.in_place_s is not None and (kept := _keeps_weights(version, executor)):
            raise InvalidInput(
                f"{kept} has no weights to replace in place: leave in_place out",
                field="deployment.in_place",
            )
        return replace(deployment, version_digest=version.digest, executor=executor), together


def _keeps_weights(version: VersionRecord, executor: str) -> str:
    """Return what of a version has no weights that could be replaced; empty where it has."""
    if executor not in _WITH_WEIGHTS:
        return f"executor {executor}"
    if version.base_digest:
        return "an adapter"
    return "a fixed-cost model" if version.kind == "fixed-cost" else ""


def _require_no_workers(pack: Deployment) -> None:
    """Return if the deployment of a safety pack asks for nothing that workers have. Raises InvalidInput."""
    named = {
        "replicas": pack.replicas,
        "scaling": pack.scaling,
        "node_selector": pack.node_selector,
        "tensor_parallel": pack.devices > 1,
        "output_form": pack.output_form,
        "tenant": pack.tenant,
    }
    for field, value in named.items():
        if value:
            raise InvalidInput(
                f"{pack.model} is a safety pack: gateways apply it, so its deployment has no {field}; "
                "leave it out, and set replicas to 0",
                field=f"deployment.{field}",
            )


def check_scaling(deployment: Deployment, scaling: Scaling, workers: Sequence[Worker]) -> None:
    """Return if the bounds agree with each other and with what the live nodes cost. Raises InvalidInput."""
    field, least = "deployment.scaling.", scaling.min_replicas
    if least > scaling.max_replicas:
        raise InvalidInput(
            f"min_replicas {least} is above max_replicas {scaling.max_replicas}: raise the maximum or lower "
            "the minimum",
            field=field + "min_replicas",
        )
    if scaling.idle_s and least:
        raise InvalidInput(
            f"an idle time needs min_replicas 0, and it is {least}: the last replica never leaves",
            field=field + "idle",
        )
    if scaling.override_until_unix_s and scaling.override_replicas is None:
        raise InvalidInput(
            "override_until needs override_replicas, which it ends", field=field + "override_until"
        )
    if not scaling.max_cost_per_hour or not workers:
        return
    cost, least = replica_cost(deployment, workers), max(1, least)
    if not cost:
        raise InvalidInput(
            "no live node that may run it states what it costs: set FAIRWAY_COST_PER_HOUR on the workers",
            field=field + "max_cost_per_hour",
        )
    if least * cost > scaling.max_cost_per_hour:
        raise InvalidInput(
            f"{least} replicas cost up to {least * cost:g} per hour on the live nodes, and "
            f"{scaling.max_cost_per_hour:g} is allowed: allow that much, or lower min_replicas",
            field=field + "max_cost_per_hour",
        )


def _in_rollout(name: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"a rollout of {name} is open: finish it, or undo it by `fairway rollouts revert {name}`",
        name=name,
    )


async def require_trust(trust: VersionTrust, version: VersionRecord) -> None:
    """Return if the signer policies let the version be deployed. Raises as ``VersionTrust.require``."""
    await trust.require(
        version.model, version.digest, base_model=version.base_model, base_digest=version.base_digest
    )


async def pinned_version(
    store: Store, model: str, version: str, *, field: str
) -> tuple[VersionRecord, WriteSet]:
    """Return the version of a tag or digest, and the condition that the version still exists.

    Raises NotFound; InvalidInput that names the ``field``.
    """
    digest = version
    if not is_digest(digest):
        if not is_tag(digest):
            raise InvalidInput("version is neither a digest nor a tag", field=field)
        tag = await store.get(tag_key(model, digest))
        if tag is None:
            raise NotFound(
                f"model {model} has no tag {digest}; {_SEE_VERSIONS} {model}`", model=model, tag=digest
            )
        digest = tag.load(Tag).digest
    entry = await store.get(version_key(model, digest))
    if entry is None:
        message = f"model {model} has no version {digest}; {_SEE_VERSIONS} {model}`"
        raise NotFound(message, model=model, digest=digest)
    return entry.load(VersionRecord), WriteSet(
        conditions=(ModRevisionIs(entry.key, entry.mod_revision),),
        operations=(Put(model_users_key(model), b""),),
    )
