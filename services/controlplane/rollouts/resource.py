"""Rollouts: the operations of operators.

Each writes state, route and deployment in one transaction, whichever control plane answers it: an abort
needs no leader. The leader's controller and operators exclude each other by the revisions that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog

from services.controlplane.fleet import Fleet, FleetSnapshot, read_snapshot, readable
from services.controlplane.resources.deployments import pinned_version, require_trust, states_in
from services.controlplane.resources.resources import Resources, Stored
from services.controlplane.rollouts.fit import ArmFit, by_worker, fit_by_worker, fit_of
from services.controlplane.rollouts.policy.advance import RolloutFacts, facts_of
from services.controlplane.rollouts.policy.operate import (
    Promotion,
    abort,
    pause,
    promote,
    resume,
    revert,
)
from services.controlplane.rollouts.records import (
    Rollout,
    RolloutPhase,
    check_by_worker,
    check_rollout,
    with_defaults,
)
from services.controlplane.rollouts.writes import RolloutContext, effects
from services.core.errors import Conflict, DoesNotFit, EtagMismatch, FailedPrecondition
from services.core.fleet import replicas_in
from services.core.records import (
    DEPLOYMENTS,
    ROLLOUTS,
    SCALED,
    Deployment,
    VersionRecord,
    VersionState,
    dump,
    version_key,
)
from services.core.rollouts.routes import ROUTES, ModelRoute
from services.core.scaling import Scaled
from services.ports.clock import Clock
from services.ports.store import Condition, ModRevisionIs, Operation, Store
from services.runtime.idempotent_writes import WriteSet
from services.runtime.version_trust import VersionTrust

log = structlog.get_logger()
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout and what the fleet reports of it. ``fits`` is set for a start that is only planned."""

    stored: Stored[Rollout]
    facts: RolloutFacts
    route: ModelRoute | None = None
    route_revision: int = 0
    fits: tuple[ArmFit, ...] = ()


class Rollouts:
    """Stateless, except for the store."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._kind = Resources(store, clock, ROLLOUTS, Rollout)
        self._trust = VersionTrust(store, clock)

    async def create(self, rollout: Rollout, *, request_id: str = "", dry_run: bool = False) -> RolloutView:
        """Start a rollout, or with ``dry_run`` return its plan. Nothing is written where it does not fit.

        Raises DoesNotFit with the figures, FailedPrecondition while another rollout or an update is under
        way.
        """
        check_rollout(rollout)
        request = self._kind.request("create", rollout, request_id)
        stored = None if dry_run else await self._kind.replayed(request)
        if stored is not None:
            return await self._view(stored)
        snapshot = await read_snapshot(self._store)
        context = _context_of(snapshot, rollout.deployment)
        _require_calm(snapshot, context)
        prepared, together = await self._prepared(rollout, context.deployment)
        sizes = await self._sizes(prepared, context.deployment)
        prepared, fits = _fitted(prepared, context.wanted, snapshot.fleet, sizes)
        if dry_run:
            return RolloutView(Stored(prepared, 0, 0), _facts(prepared, context.wanted, snapshot), fits=fits)
        if _short(fits):
            raise _does_not_fit(prepared, fits)
        writes = effects(prepared, context)
        unchanged = ModRevisionIs(DEPLOYMENTS + rollout.deployment, context.deployment_revision)
        together = _both(WriteSet([unchanged, *together.conditions], together.operations), writes)
        stored = await self._kind.create(prepared, request, together=together)
        log.info("rollout.created", rollout=rollout.meta.name, strategy=rollout.strategy)
        return await self._view(stored)

    async def get(self, name: str) -> RolloutView:
        return await self._view(await self._kind.get(name))

    async def page(self, *, size: int = 0, token: str = "") -> tuple[tuple[Stored[Rollout], ...], str]:
        return await self._kind.page(size=size, token=token)

    async def abort(
        self, name: str, *, reason: str = "", etag: str = "", request_id: str = ""
    ) -> RolloutView:
        """Move every new request back to the stable version, now."""
        change = partial(abort, reason=reason, now_unix_s=self._clock.unix_s())
        return await self._change(name, change, ("abort", reason), etag=etag, request_id=request_id)

    async def revert(
        self, name: str, *, reason: str = "", etag: str = "", request_id: str = ""
    ) -> RolloutView:
        """Give the deployment the version before again, in any phase.

        Raises FailedPrecondition where another change of the deployment came after the rollout.
        """
        change = partial(revert, reason=reason, now_unix_s=self._clock.unix_s())
        return await self._change(name, change, ("revert", reason), etag=etag, request_id=request_id)

    async def pause(self, name: str, *, etag: str = "", request_id: str = "") -> RolloutView:
        change = partial(pause, now_unix_s=self._clock.unix_s())
        return await self._change(name, change, ("pause", ""), etag=etag, request_id=request_id)

    async def resume(self, name: str, *, etag: str = "", request_id: str = "") -> RolloutView:
        change = partial(resume, now_unix_s=self._clock.unix_s())
        return await self._change(name, change, ("resume", ""), etag=etag, request_id=request_id)

    async def promote(
        self, name: str, promotion: Promotion, *, etag: str = "", request_id: str = ""
    ) -> RolloutView:
        """Go to the next step, or to all traffic, once its replicas are READY."""
        change = partial(promote, promotion=promotion, now_unix_s=self._clock.unix_s())
        content = ("promote", dump(promotion).decode())
        return await self._change(name, change, content, etag=etag, request_id=request_id)

    async def _change(
        self,
        name: str,
        change: Callable[[Rollout], Rollout],
        content: tuple[str, str],
        *,
        etag: str,
        request_id: str,
    ) -> RolloutView:
        """Apply a change with its effects; again where the leader's controller was faster."""
        request = self._kind.request(content[0], (name, content[1]), request_id, etag=etag)
        for _ in range(_TRIES):
            if (stored := await self._kind.replayed(request)) is not None:
                return await self._view(stored)
            old = await self._kind.get(name)
            if etag and etag != old.etag:
                raise EtagMismatch(
                    f"rollout {name} has etag {old.etag}, not {etag}; read it again", name=name, etag=etag
                )
            after = change(old.record)
            if after == old.record:
                return await self._view(old)
            context = await self._context(after.deployment)
            together = effects(after, context)
            if after.phase is RolloutPhase.RESTORING:
                together = _both(await self._restorable(after, context), together)
            try:
                stored = await self._kind.update(
                    name, partial(_instead, after), request, etag=old.etag, together=together
                )
            except (EtagMismatch, Conflict):
                continue
            log.info("rollout.changed", rollout=name, verb=content[0], phase=after.phase)
            return await self._view(stored)
        raise Conflict(f"rollout {name} is being changed by others; try again", name=name)

    async def _view(self, stored: Stored[Rollout]) -> RolloutView:
        snapshot = await read_snapshot(self._store)
        rollout = stored.record
        deployment = next(
            (one for one in snapshot.fleet.deployments if one.meta.name == rollout.deployment), None
        )
        if deployment is None:
            return RolloutView(stored, RolloutFacts(0, {}))
        routed = next(
            (one for one in snapshot.fleet.routes if one.route.deployment == rollout.deployment), None
        )
        facts = _facts(rollout, deployment, snapshot)
        if routed is None or rollout.ended:
            return RolloutView(stored, facts)
        return RolloutView(stored, facts, routed.route, routed.revision)

    async def _context(self, deployment: str) -> RolloutContext:
        """Return the stored deployment and route. Raises NotFound."""
        return _context_of(await read_snapshot(self._store), deployment)

    async def _prepared(self, rollout: Rollout, deployment: Deployment) -> tuple[Rollout, WriteSet]:
        """Return the rollout with its versions pinned, and the conditions that they still exist."""
        arms, conditions, operations = [], list[Condition](), list[Operation]()
        for number, arm in enumerate(rollout.arms):
            field = f"rollout.arms[{number}].version"
            version, together = await pinned_version(self._store, deployment.model, arm.version, field=field)
            version.executor(deployment.executor, field=field)  # raises for one that does not serve it
            await require_trust(self._trust, version)
            arms.append(replace(arm, version_digest=version.digest))
            conditions += together.conditions
            operations = list(together.operations)
        digests = [arm.version_digest for arm in arms]
        if deployment.version_digest in digests or len(set(digests)) != len(digests):
            raise FailedPrecondition(
                f"each arm needs a version of its own, other than the deployment's {deployment.version}",
                name=rollout.meta.name,
            )
        now_unix_s = self._clock.unix_s()
        return (
            replace(
                with_defaults(rollout, of_pack=deployment.of_pack),
                arms=tuple(arms),
                salt=f"{rollout.meta.name}/{now_unix_s:.6f}",
                stable_version=deployment.version,
                stable_digest=deployment.version_digest,
                phase=RolloutPhase.LOADING,
                phase_unix_s=now_unix_s,
                step_unix_s=now_unix_s,
                message="the versions are loaded beside the stable one",
            ),
            WriteSet(conditions, operations),
        )

    async def _restorable(self, rollout: Rollout, context: RolloutContext) -> WriteSet:
        """Return the conditions that the version before still exists. Raises FailedPrecondition, NotFound."""
        name, deployment = rollout.meta.name, context.deployment
        if context.route is not None and context.route.salt != rollout.salt:
            raise FailedPrecondition(
                f"another rollout of {deployment.meta.name} is open: revert that one", name=name
            )
        if deployment.version_digest != rollout.final_arm.version_digest:
            raise FailedPrecondition(
                f"{deployment.meta.name} got {deployment.version} after rollout {name}: "
                "`fairway deployments rollback` has its earlier versions",
                name=name,
            )
        _, together = await pinned_version(self._store, deployment.model, rollout.stable_digest, field="name")
        return together

    async def _sizes(self, rollout: Rollout, deployment: Deployment) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for arm in rollout.arms:
            entry = await self._store.get(version_key(deployment.model, arm.version_digest))
            if entry is not None:
                sizes[arm.version_digest] = entry.load(VersionRecord).size_bytes
        return sizes


def _both(one: WriteSet, other: WriteSet) -> WriteSet:
    return WriteSet([*one.conditions, *other.conditions], [*one.operations, *other.operations])


def _instead(after: Rollout, _before: Rollout) -> Rollout:
    return after


def _facts(rollout: Rollout, deployment: Deployment, snapshot: FleetSnapshot) -> RolloutFacts:
    workers = snapshot.fleet.workers
    return facts_of(rollout, deployment.replicas, workers, {}, {}, of_pack=deployment.of_pack)


def _context_of(snapshot: FleetSnapshot, name: str) -> RolloutContext:
    entry = snapshot.entries.get(DEPLOYMENTS + name)
    if entry is None:
        raise FailedPrecondition(f"there is no deployment {name}", name=name)
    deployment, states = entry.load(Deployment), states_in(snapshot.entries, name)
    routed, decided = snapshot.entries.get(ROUTES + name), snapshot.entries.get(SCALED + name)
    scaled = None if decided is None else readable(decided, Scaled)
    if routed is None:
        return RolloutContext(deployment, entry.mod_revision, scaled=scaled, states=states)
    # A route without an open rollout was written by hand: the write deletes it, or writes over it.
    route = readable(routed, ModelRoute) if name in snapshot.fleet.in_rollout else None
    return RolloutContext(deployment, entry.mod_revision, route, routed.mod_revision, scaled, states)


def _require_calm(snapshot: FleetSnapshot, context: RolloutContext) -> None:
    """Return while neither a rollout nor an update of the deployment is under way."""
    deployment = context.wanted
    name = deployment.meta.name
    if name in snapshot.fleet.in_rollout:
        raise FailedPrecondition(
            f"another rollout of {name} is open: finish or revert it first", name=name, deployment=name
        )
    if deployment.of_pack:
        return
    if not deployment.replicas:
        raise FailedPrecondition(f"the deployment {name} has 0 replicas", name=name)
    ready: Mapping[str, int] = replicas_in(VersionState.READY, snapshot.fleet.workers).get(name, {})
    if not ready.get(deployment.version_digest):
        raise FailedPrecondition(
            f"no replica of {name} is READY in version {deployment.version}: a rollout needs a stable one",
            name=name,
        )
    by_hand = [one.route.arms for one in snapshot.fleet.routes if one.route.deployment == name]
    split = {arm.version_digest for arms in by_hand for arm in arms} | {deployment.version_digest}
    if any(count for digest, count in ready.items() if digest not in split):
        raise FailedPrecondition(f"an update of {name} is under way: wait for its end", name=name)


def _fitted(
    rollout: Rollout, deployment: Deployment, fleet: Fleet, sizes: Mapping[str, int]
) -> tuple[Rollout, tuple[ArmFit, ...]]:
    """Return the rollout as it will go, with both versions at once or worker by worker, and how it fits.

    What does not fit in either way is returned as it was, with the reason as its message. Raises
    FailedPrecondition where an operator wants it worker by worker and it cannot go so.
    """
    if deployment.of_pack and not rollout.by_worker:
        return rollout, ()
    fits = () if rollout.by_worker else fit_of(rollout, deployment, fleet, sizes)
    if not rollout.by_worker and not _short(fits):
        return rollout, fits
    impossible = check_by_worker(rollout, deployment.replicas)
    going = by_worker(rollout, deployment.replicas)
    impossible = impossible or check_by_worker(going, deployment.replicas)
    if rollout.by_worker and impossible:
        raise FailedPrecondition(impossible, name=rollout.meta.name)
    if not impossible:
        in_place = fit_by_worker(going, deployment, fleet, sizes)
        if not _short(in_place):
            least = deployment.replicas - 1
            message = f"worker by worker: {least} of {deployment.replicas} replicas serve meanwhile"
            return replace(going, message=message), in_place
        if rollout.by_worker:
            return replace(going, message="does not fit in the place of the stable version"), in_place
        impossible = "it does not fit in the place of the stable version either"
    return replace(rollout, message=f"does not fit beside the stable version; {impossible}"), fits


def _short(fits: Sequence[ArmFit]) -> bool:
    return any(fit.missing for fit in fits)


def _does_not_fit(rollout: Rollout, fits: tuple[ArmFit, ...]) -> DoesNotFit:
    short = next(fit for fit in fits if fit.missing)
    why = "; ".join(f"{worker}: {reason}" for worker, reason in short.rejected)
    where = "in the place of" if rollout.by_worker else "beside"
    message = f"{short.missing} replicas of {short.name} do not fit {where} the stable version ({why})"
    if not rollout.by_worker:
        message += f"; {rollout.message.partition('; ')[2]}"
    return DoesNotFit(message, name=rollout.meta.name, arm=short.name, needed_bytes=short.needed_bytes)
