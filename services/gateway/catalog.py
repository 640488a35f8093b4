"""The model catalog: the served model names, their versions, and the facts about a version.

A request is resolved once, to a route; every later step uses the route's digest, so a request never mixes two
versions. A version's tokenizer and template are loaded once, on first use.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from operator import is_not
from pathlib import Path
from typing import Final, Protocol

import structlog

from services.core.aliases import ALIASES, Alias
from services.core.errors import (
    FairwayError,
    NoWorkerAvailable,
    ResidencyUnavailable,
    Unavailable,
    VersionGone,
)
from services.core.fleet import replicas_in
from services.core.generation import GenerationSpec
from services.core.limits import Price
from services.core.manifest import Manifest
from services.core.records import (
    DEPLOYMENTS,
    REGION_LABEL,
    SCALED,
    Deployment,
    LoadedVersion,
    Meta,
    Priority,
    VersionState,
    Worker,
)
from services.core.rollouts.routes import ModelRoute, SplitCaller, is_drawn
from services.core.scaling import Scaled
from services.gateway.splits import ShadowArm, Splits, pin_refused
from services.gateway.text.text_model import TextModel, Texts, is_text_file
from services.ports.clock import Clock
from services.runtime.fleet_state.informer import RecordView, Versioned
from services.runtime.identity import model_not_found

log = structlog.get_logger()

MAX_LOADED: Final = 32
MAX_REMEMBERED: Final = 512
LOAD_TIMEOUT_S: Final = 60.0
WARM_S: Final = 1.0
MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why no replica could be loaded. ``retry_unix_s`` is 0 when no new attempt is scheduled."""

    reason: str
    retry_unix_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """The version of one request, and what is known of it."""

    # The clients' name of the model.
    model: str
    deployment: Deployment
    # The version of the request's arm in a split, else the deployment's, or the version before it while that
    # still takes new requests.
    version_digest: str
    # Revision of the split, or of the deployment.
    route_revision: int
    # 0 for a deployment of 0 replicas, even if another deployment runs its version.
    ready_replicas: int
    # Set when every replica failed: a stable reason, and the time of the next attempt.
    failure: LoadFailure | None = None
    # The arm of the split; empty without one.
    arm: str = ""
    # The rollout's step, where chance decided the arm.
    step: str = ""
    exact: bool = False  # promise of all replicas that are ready


@dataclass(frozen=True, slots=True)
class Waking:
    """A deployment without replicas that its load may start: how long requests wait, or why they do not."""

    hold_s: float
    failure: FairwayError | None = None
    tenant: str = ""  # the tenant whose own nodes run it; empty: shared nodes


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """The route of an earlier run, which later runs keep."""

    version_digest: str
    route_revision: int


class ModelFilesPort(Protocol):
    async def fetch(self, model: str, digest: str, *, only: Callable[[str], bool] | None = None) -> Path:
        """Return a folder with the verified files of a version for which ``only`` returns True."""

    async def readable(self, model: str, digest: str) -> Manifest:
        """Return the manifest; of an adapter with the weights of its base."""

    def pin(self, folder: Path) -> None: ...

    def unpin(self, folder: Path) -> None: ...


class ModelCatalog:
    """Reads the fleet state; owns the loaded text models and evicts the least recently used first."""

    def __init__(
        self,
        deployments: RecordView[Deployment],
        workers: RecordView[Worker],
        files: ModelFilesPort,
        clock: Clock,
        *,
        texts: Texts,
        splits: Splits,
        scaled: RecordView[Scaled],
        sized: RecordView[Alias],
        aliases: Mapping[str, str] | None = None,
        batch_price_ratio: float = 1.0,
    ) -> None:
        """``aliases`` are further names of deployments, none of which is a deployment's name.
        ``batch_price_ratio`` times the list price is what requests of the lowest class cost.
        """
        self._batch_price_ratio = batch_price_ratio
        self._aliases = dict(aliases or {})
        self.texts = texts
        self._splits = splits
        self._scaled = scaled
        self._sized = sized
        self._deployments = deployments
        self._workers = workers
        self._files = files
        self._clock = clock
        self._loaded: OrderedDict[str, TextModel] = OrderedDict()
        self._loading: dict[str, asyncio.Lock] = {}
        self._models: OrderedDict[str, str] = OrderedDict()
        # One index per view: views are immutable and change rarely.
        self._indexed: Mapping[str, Versioned[Worker]] | None = None
        self._index: dict[str, _Ready] = {}
        self._routes: dict[str, Route] = {}  # routes of names without a split, by deployment
        self._routed: tuple[object, object] = None, None  # the views that these were made from
        self._ready_of: dict[str, Counter[str]] = {}
        self._restarting_of: dict[str, Counter[str]] = {}

    def resolve(self, model: str, caller: SplitCaller | None = None) -> Route:
        """Return the route of a model name for a caller; without one, that of the stable version.

        Raises ModelNotFound, with the same message for every name; for a caller that names a version, the
        errors of ``Splits.choose``.
        """
        requested, model = model, self.named(model)
        held = self._held(model)
        if held is None or not held.record.version_digest or held.record.of_pack:
            raise model_not_found(requested)
        split = self._split(held.record)
        if split is not None:
            return self._unless_withdrawn(self._arm(held.record, split, caller), caller)
        route = self._unless_withdrawn(self._served(held), caller)
        if caller is not None and caller.pin and caller.pin != route.version_digest:
            raise pin_refused(model, caller.pin, allowed=True)
        return route

    def resolve_pack(self, deployment: str, caller: SplitCaller) -> Route:
        """Return the route of a safety pack for a caller. Raises ModelNotFound."""
        held = self._held(deployment)
        if held is None or not held.record.of_pack:
            raise model_not_found(deployment)
        split = self._split(held.record)
        return self._served(held) if split is None else self._arm(held.record, split, caller)

    def resolve_pinned(self, model: str, pinned: PinnedVersion) -> Route:
        """Return the route of an earlier run, even if the name now has another route.

        Raises VersionGone when the name has another route and no worker has the version any more.
        """
        model = self.named(model)
        held = self._held(model)
        if held is not None and held.record.version_digest == pinned.version_digest:
            self._remember(held.record.model, held.record.version_digest)
            return replace(self._route(held.record, held.mod_revision), route_revision=pinned.route_revision)
        found = self._on_workers(pinned.version_digest)
        if found is None:
            raise VersionGone(
                "the version that began this output is no longer served; send the request with a new "
                "idempotency key",
                model=model,
                version_digest=pinned.version_digest,
            )
        deployment = Deployment(Meta(model), found.model, "", pinned.version_digest, replicas=1)
        self._remember(found.model, pinned.version_digest)
        return self._route(deployment, pinned.route_revision)

    def model_of(self, version_digest: str) -> str:
        """Return the registry's name of the model of a version that was resolved. Raises ModelNotFound."""
        model = self._models.get(version_digest)
        if model is None:
            raise model_not_found(version_digest)
        return model

    def named(self, model: str) -> str:
        """Return the name of the deployment that a client's name of a model stands for."""
        return self._aliases.get(model, model)

    def alias(self, model: str) -> Alias | None:
        """Return the alias of several sizes that a name stands for; None for other names."""
        name = self.named(model)
        found = self._sized.view.get(ALIASES + name)
        return None if found is None or DEPLOYMENTS + name in self._deployments.view else found.record

    def sized(self) -> list[Alias]:
        """Return the aliases of several sizes, by name."""
        return [one.record for _, one in sorted(self._sized.view.items())]

    def aliases_of(self, deployment: str) -> list[str]:
        """Return the further names of a deployment, sorted."""
        return sorted(alias for alias, name in self._aliases.items() if name == deployment)

    def shadow_of(self, tenant: str, spec: GenerationSpec) -> ShadowArm | None:
        """Return the arm that gets a copy of an admitted request, None for no copy."""
        caller = SplitCaller(tenant, spec.session_key)
        return self.shadow_arm(caller, spec.model, spec.step, spec.version_digest)

    def shadow_arm(self, caller: SplitCaller, model: str, step: str, version_digest: str) -> ShadowArm | None:
        """Return the arm that a request of a version is compared with, None for none."""
        return self._splits.shadow_of(caller, model, step, version_digest)

    def serves(self, model: str, version_digest: str) -> bool:
        """Return whether a worker has a version, or the deployment or an open arm of its split names it."""
        held, split = self._deployments.view.get(DEPLOYMENTS + model), self._splits.of(model)
        if held is not None and held.record.version_digest == version_digest:
            return True
        arms = split.record.arms if split is not None else ()
        if any(arm.version_digest == version_digest and not arm.closed for arm in arms):
            return True
        return self._on_workers(version_digest) is not None

    def _on_workers(self, version_digest: str) -> LoadedVersion | None:
        """Return a worker's entry of a version that stays there."""
        versions = (version for worker in self._workers.view.values() for version in worker.record.versions)
        return next(
            (
                version
                for version in versions
                if version.version_digest == version_digest and version.state not in _LEAVING
            ),
            None,
        )

    def has(self, model: str) -> bool:
        """Whether the deployment of a model has this name, or stands behind it."""
        held = self._deployments.view.get(DEPLOYMENTS + self.named(model))
        return held is not None and not held.record.of_pack

    def price(self, model: str, priority: Priority) -> Price:
        """Return what a class of requests pays for a deployment; nothing costs where it was deleted."""
        held = self._deployments.view.get(DEPLOYMENTS + model)
        price = held.record.price if held is not None else Price()
        return price.times(self._batch_price_ratio) if priority is Priority.BATCH else price

    def require_servable(self, route: Route, residency: str = "") -> None:
        """Return unless the deployment has 0 replicas, or every one failed. Raises NoWorkerAvailable.

        Raises ResidencyUnavailable unless the deployment selects workers of the region ``residency`` alone.

        A worker that runs the same version for another deployment does not serve this one.
        """
        if residency and route.deployment.node_selector.get(REGION_LABEL) != residency:
            raise ResidencyUnavailable(
                f"the data of this tenant stays in {residency}, and {route.model} may run elsewhere: use a "
                f"deployment with the selector {REGION_LABEL}={residency}",
                model=route.model,
                residency=residency,
            )
        waking = self.waking(route.model)
        if waking is not None:
            if waking.failure is not None:
                raise waking.failure
            return
        if not route.deployment.replicas:
            raise NoWorkerAvailable(
                f"the deployment {route.model} has 0 replicas, so no worker serves it; an operator starts it "
                f"with `fairway deployments update {route.model} --replicas 1`",
                retry_after_s=MAX_RETRY_S,
                model=route.model,
                cause="NO_REPLICAS",
            )
        failure = route.failure
        if failure is None:
            return
        left_s = failure.retry_unix_s - self._clock.unix_s() if failure.retry_unix_s else MAX_RETRY_S
        raise NoWorkerAvailable(
            f"{route.model} could not be loaded on any of its workers ({failure.reason}); "
            "see the status of its deployment",
            retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, left_s)),
            model=route.model,
            cause=failure.reason,
        )

    def waking(self, model: str) -> Waking | None:
        """Return how a request of a deployment waits that has no replica and may start one; None for others.

        Its failure is why the last start failed, until the next one, or that an operator keeps it at zero.
        """
        model = self.named(model)
        held, decided = self._deployments.view.get(DEPLOYMENTS + model), self._scaled.view.get(SCALED + model)
        scaling = None if held is None else held.record.scaling
        if held is None or scaling is None:
            return None
        found = Scaled(model, held.record.replicas) if decided is None else decided.record
        self._refresh()
        if (scaling.min_replicas and found.replicas) or self._ready_of.get(model):
            return None
        now_unix_s, held_for = self._clock.unix_s(), Waking(found.hold_s, tenant=held.record.tenant)
        if found.failure and found.retry_unix_s > now_unix_s:
            left_s = found.retry_unix_s - now_unix_s
            failure = NoWorkerAvailable(
                f"{model} could not be started: {found.failure}; the next start is in {left_s:.0f} s",
                retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, left_s)),
                model=model,
                cause="START_FAILED",
            )
            return replace(held_for, failure=failure)
        if not found.replicas and (scaling.frozen or scaling.pinned(now_unix_s) == 0):
            what = "froze" if scaling.frozen else "set"
            failure = NoWorkerAvailable(
                f"an operator {what} {model} at 0 replicas: `fairway scaling explain {model}`",
                retry_after_s=MAX_RETRY_S,
                model=model,
                cause="NO_REPLICAS",
            )
            return replace(held_for, failure=failure)
        return held_for

    def routes(self) -> list[Route]:
        """Return every route, by name; of a split the stable one."""
        return [self.resolve(name) for name in self.names()]

    def names(self) -> Iterator[str]:
        """Yield the deployments of models that have a version, by name."""
        held = self._deployments.view
        return (
            record.meta.name
            for key in sorted(held)
            if (record := held[key].record).version_digest and not record.of_pack
        )

    def max_context_tokens(self, version_digest: str) -> int:
        """Return the bound of prompt and output tokens together; 0 while it is unknown.

        The lower of the model's own bound and the capacity of the largest ready worker.
        """
        on_workers = self._ready(version_digest).max_model_len
        loaded = self._loaded.get(version_digest)
        known = [size for size in (on_workers, loaded.max_context_tokens if loaded else 0) if size]
        return min(known, default=0)

    def is_probed(self, version_digest: str) -> bool | None:
        """Return whether all ready replicas of a version have its probe; None without one that is ready."""
        known = self._ready(version_digest)
        return known.probed == known.replicas if known.replicas else None

    def loaded_text_model(self, version_digest: str) -> TextModel | None:
        """Return what ``text_model`` returns, if it is loaded."""
        return self._loaded.get(version_digest)

    async def text_model(self, version_digest: str) -> TextModel:
        """Return the tokenizer, template and defaults of a version.

        Raises NotFound, IntegrityError or FailedPrecondition for an unusable version, and Unavailable when
        its files cannot be fetched now.
        """
        loaded = self._loaded.get(version_digest)
        if loaded is not None:
            self._loaded.move_to_end(version_digest)
            return loaded
        lock = self._loading.setdefault(version_digest, asyncio.Lock())
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S), lock:
                if version_digest not in self._loaded:
                    self._keep(version_digest, await self._load(version_digest))
                return self._loaded[version_digest]
        except TimeoutError:
            raise Unavailable("the model's tokenizer is still being fetched", retry_after_s=5.0) from None
        finally:
            if not lock.locked():
                self._loading.pop(version_digest, None)

    async def warm_forever(self) -> None:
        """Load the text models of each deployment before its first request, and before an arm or an update
        has any.

        A task of the process.
        """
        while True:
            for route in self.routes():
                for digest in self._digests_of(route) - self._loaded.keys():
                    if len(self._loaded) >= MAX_LOADED:
                        break
                    try:
                        await self.text_model(digest)
                    except FairwayError as error:
                        log.info("text_model.warm_failed", model=route.model, reason=error.reason)
            await self._clock.sleep(WARM_S)

    def check_integrity(self) -> None:
        assert len(self._loaded) <= MAX_LOADED, "more text models are kept than the bound allows"
        assert len(self._models) <= MAX_REMEMBERED, "more versions are remembered than the bound allows"

    async def _load(self, version_digest: str) -> TextModel:
        model = self.model_of(version_digest)
        loaded = await self.texts.load(version_digest, lambda: self._folder(model, version_digest))
        manifest = await self._files.readable(model, version_digest)
        loaded = replace(loaded, weights_digest=manifest.weights_digest, base_digest=manifest.base_digest)
        log.info("text_model.loaded", version_digest=version_digest, vocab_size=loaded.vocab_size)
        return loaded

    @asynccontextmanager
    async def _folder(self, model: str, version_digest: str) -> AsyncIterator[Path]:
        """Provide the folder of a version's text files while the context is open; fetches missing files."""
        folder = await self._files.fetch(model, version_digest, only=is_text_file)
        self._files.pin(folder)
        try:
            yield folder
        finally:
            self._files.unpin(folder)

    def _keep(self, version_digest: str, loaded: TextModel) -> None:
        self._loaded[version_digest] = loaded
        while len(self._loaded) > MAX_LOADED:
            evicted, _ = self._loaded.popitem(last=False)
            self.texts.unload(evicted)

    def _remember(self, model: str, version_digest: str) -> None:
        """Store the model of a digest: a request outlives a change of its deployment."""
        self._models[version_digest] = model
        self._models.move_to_end(version_digest)
        while len(self._models) > MAX_REMEMBERED:
            self._models.popitem(last=False)

    def _digests_of(self, route: Route) -> set[str]:
        """Return the versions that requests for a model name may get, now or soon."""
        split = self._splits.of(route.model)
        arms = split.record.arms if split is not None else ()
        for arm in arms:
            self._remember(route.deployment.model, arm.version_digest)
        return {route.version_digest, route.deployment.version_digest, *(arm.version_digest for arm in arms)}

    def _held(self, model: str) -> Versioned[Deployment] | None:
        """Return the deployment, with the replicas that scaling decided."""
        held, decided = self._deployments.view.get(DEPLOYMENTS + model), self._scaled.view.get(SCALED + model)
        if held is None or decided is None:
            return held
        return replace(held, record=held.record.scaled_by(decided.record))

    def _arm(self, deployment: Deployment, split: Versioned[ModelRoute], caller: SplitCaller | None) -> Route:
        """Return the route to the caller's arm of a split."""
        self._refresh()
        name = deployment.meta.name
        ready, restarting = (found.get(name, _NO_REPLICAS) for found in (self._ready_of, self._restarting_of))
        arm = self._splits.choose(
            split.record,
            caller,
            serves=lambda digest: deployment.of_pack or bool(ready.get(digest) or restarting.get(digest)),
        )
        self._remember(deployment.model, arm.version_digest)
        of_arm = replace(deployment, version_digest=arm.version_digest)
        step = split.record.step if caller is not None and is_drawn(split.record, caller) else ""
        route = self._route(of_arm, split.mod_revision)
        return replace(route, deployment=deployment, arm=arm.name, step=step)

    def _split(self, deployment: Deployment) -> Versioned[ModelRoute] | None:
        """Return the split of a deployment; None also for one by which nobody could be served, as its stable
        version is on no worker and is not the deployment's."""
        split = self._splits.of(deployment.meta.name)
        if split is None or deployment.of_pack:
            return split
        digest = split.record.stable.version_digest
        if digest != deployment.version_digest and self._on_workers(digest) is None:
            return None
        return split

    def route_faults(self) -> list[tuple[str, str]]:
        """Return the models whose stored route cannot be followed as it is, each with a stable reason."""
        return list(self._splits.faults(on_workers=lambda digest: self._on_workers(digest) is not None))

    def _unless_withdrawn(self, route: Route, caller: SplitCaller | None) -> Route:
        """Return the route, or that to its version's successor where workers refuse it by this revision.

        Raises VersionGone for a caller that names the version.
        """
        found = self._splits.withdrawal_of(route.version_digest, route.route_revision)
        if found is None:
            return route
        if caller is not None and caller.pin:
            raise pin_refused(route.model, caller.pin, allowed=True)
        self._remember(route.deployment.model, found.successor_digest)
        successor = replace(route.deployment, version_digest=found.successor_digest)
        to_successor = replace(self._route(successor, found.route_revision), deployment=route.deployment)
        return self._unless_withdrawn(to_successor, caller)

    def _served(self, held: Versioned[Deployment]) -> Route:
        """Return the route to the version that takes new requests."""
        self._refresh()
        name = held.record.meta.name
        found = self._routes.get(name)
        if found is None:
            found = self._routes[name] = self._serving(held.record, held.mod_revision)
        self._remember(held.record.model, held.record.version_digest)
        if (digest := found.version_digest) != held.record.version_digest:
            self._remember(self._ready(digest).model, digest)
        return found

    def _serving(self, deployment: Deployment, mod_revision: int) -> Route:
        name = deployment.meta.name
        digest = deployment.serving_digest(
            self._ready_of.get(name, _NO_REPLICAS), self._restarting_of.get(name, _NO_REPLICAS)
        )
        if digest == deployment.version_digest:
            return self._route(deployment, mod_revision)
        before = replace(deployment, version_digest=digest)
        return replace(self._route(before, mod_revision), deployment=deployment)

    def _route(self, deployment: Deployment, mod_revision: int) -> Route:
        known = self._ready(deployment.version_digest)
        # A replica that no worker reports yet may be loading, unless as many failed as are wanted.
        failed = not known.may_serve and known.failed >= max(
            1, min(deployment.replicas, len(self._workers.view))
        )
        return Route(
            model=deployment.meta.name,
            deployment=deployment,
            version_digest=deployment.version_digest,
            route_revision=mod_revision,
            ready_replicas=known.replicas if deployment.replicas else 0,
            exact=0 < known.replicas == known.exact,
            failure=known.failure if failed else None,
        )

    def _ready(self, version_digest: str) -> _Ready:
        self._refresh()
        return self._index.get(version_digest, _NOWHERE)

    def _refresh(self) -> None:
        workers, routed = self._workers.view, (self._deployments.view, self._scaled.view)
        if workers is not self._indexed or any(map(is_not, routed, self._routed)):
            self._routes.clear()
            self._routed = routed
        if workers is not self._indexed:
            self._index = _index(workers)
            records = [held.record for held in workers.values()]
            self._ready_of = replicas_in(VersionState.READY, records)
            self._restarting_of = replicas_in(VersionState.RESTARTING, records)
            self._indexed = workers


_LEAVING: Final = (VersionState.DRAINING, VersionState.FAILED)


@dataclass(frozen=True, slots=True)
class _Ready:
    """The workers of a version: how many run it, and the longest sequence that fits on one of them.

    ``may_serve``: workers that run it or may yet run it; ``failed``: those on which it failed.
    """

    model: str = ""
    replicas: int = 0
    exact: int = 0  # replicas whose engines promise exact outputs
    probed: int = 0  # replicas whose engines have the version's probe
    max_model_len: int = 0
    may_serve: int = 0
    failed: int = 0
    failure: LoadFailure | None = None

    def joined(self, version: LoadedVersion) -> _Ready:
        if version.state in (VersionState.READY, VersionState.RETIRING):
            longest = max(self.max_model_len, version.max_model_len)
            return replace(
                self,
                replicas=self.replicas + 1,
                exact=self.exact + ("exact" in version.capabilities),
                probed=self.probed + ("probe" in version.capabilities),
                max_model_len=longest,
                may_serve=self.may_serve + 1,
            )
        if version.state is not VersionState.FAILED:
            return replace(self, may_serve=self.may_serve + (version.state is not VersionState.DRAINING))
        retries = [one for one in (version.retry_unix_s, _retry_of(self.failure)) if one]
        failure = LoadFailure(version.reason or VersionState.FAILED.upper(), min(retries, default=0.0))
        return replace(self, failed=self.failed + 1, failure=failure)


def _retry_of(failure: LoadFailure | None) -> float:
    return 0.0 if failure is None else failure.retry_unix_s


_NOWHERE: Final = _Ready()
_NO_REPLICAS: Final[Mapping[str, int]] = {}


def _index(workers: Mapping[str, Versioned[Worker]]) -> dict[str, _Ready]:
    found: dict[str, _Ready] = {}
    for held in workers.values():
        for version in held.record.versions if not held.record.draining else ():
            digest = version.version_digest
            found[digest] = found.get(digest, _Ready(version.model)).joined(version)
    return found
