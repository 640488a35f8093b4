"""The safety packs of requests: which versions a request obeys, fetched, joined and compiled once.

A request obeys the pack of its version and that of its tenant, joined by ``stricter``. A pack that cannot be
read refuses the request: what nobody judged is never sent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

import structlog
from msgspec.structs import replace

from fairway.formats.limits import POLICY_NAME
from fairway.formats.probe import PROBE
from fairway.formats.safety import SafetyPack, Scope, check_policy, stricter
from services.adapters.threads import in_thread
from services.core.errors import FailedPrecondition, FairwayError, ModelNotFound, Unavailable
from services.core.records import Priority, Tenant
from services.core.rollouts.routes import SplitCaller
from services.core.safety import SafetyPins
from services.gateway.catalog import ModelCatalog, ModelFilesPort, Route
from services.gateway.safety.lists import TextRules
from services.ports.clock import Clock

log = structlog.get_logger()

MAX_KEPT: Final = 64
LOAD_TIMEOUT_S: Final = 30.0
_PATIENCE_S: Final = 10.0  # long enough for a registry to restart
_PAUSE_S: Final = 0.5
_RETRY_S: Final = 2.0
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CompiledPack:
    """A pack, and its lists by what they judge."""

    pack: SafetyPack
    rules: Mapping[Scope, TextRules]


@dataclass(frozen=True, slots=True)
class SafetyTerms:
    """What a request obeys. ``shadow``: a further pack, which only flags: its rollout compares the two.

    ``probed``: whether every replica of the request's version has a probe.
    """

    pins: SafetyPins
    compiled: CompiledPack
    shadow: CompiledPack | None = None
    probed: bool = True

    @property
    def pack(self) -> SafetyPack:
        return self.compiled.pack

    def require_probe(self, model: str) -> None:
        """Return if outputs come with the scores that the pack judges, or may lack them.

        Raises FailedPrecondition.
        """
        if self.pack.probe is None or self.probed or self.pack.fail == "open":
            return
        name = self.pins.deployment or "of its version"
        raise FailedPrecondition(
            f"the safety pack {name} judges by a probe, and a replica of {model} has none: publish {model} "
            f"with {PROBE} for an engine that reads it, or take the probe out of the pack",
            model=model,
            pack=name,
        )


@dataclass(frozen=True, slots=True)
class _Policy:
    """The safety_policy.json of a version; without one, neither digest nor pack."""

    digest: str = ""
    pack: SafetyPack | None = None
    has_probe: bool = False


class SafetyPacks:
    """Keeps the ``MAX_KEPT`` packs and joined packs that were used last."""

    def __init__(self, catalog: ModelCatalog, files: ModelFilesPort, clock: Clock) -> None:
        self._catalog = catalog
        self._files = files
        self._clock = clock
        self._policies = _Loads[str, _Policy]()
        self._joined = _Loads[tuple[str, str], CompiledPack]()

    async def terms(
        self, model: str, version_digest: str, tenant: Tenant, session_key: str
    ) -> SafetyTerms | None:
        """Return what a new request obeys; None for nothing. ``model`` is the version's in the registry.

        Raises Unavailable while a pack cannot be read, FailedPrecondition for one that is damaged.
        """
        own = await self._policy(model, version_digest)
        pins = SafetyPins(default_digest=own.digest)
        if tenant.safety_pack:
            pack, name = tenant.safety_pack, tenant.meta.name
            try:
                pins = self._routed(pins, pack, name, session_key, tenant.max_priority)
            except ModelNotFound as error:
                # Its deployment is older than its assignment, and is on its way here.
                raise Unavailable(
                    f"this gateway does not have the safety pack {pack} yet",
                    retry_after_s=_RETRY_S,
                ) from error
        return await self._terms(own, pins, version_digest)

    async def pinned(self, model: str, version_digest: str, pins: SafetyPins) -> SafetyTerms | None:
        """Return what an earlier run of a request obeyed, with the pack of the version that runs it now.

        Raises as ``terms``.
        """
        own = await self._policy(model, version_digest)
        return await self._terms(own, replace(pins, default_digest=own.digest), version_digest)

    async def named(self, deployment: str, tenant: str, session_key: str) -> SafetyTerms:
        """Return the pack of a deployment alone. Raises ModelNotFound, and as ``terms``."""
        pins = self._routed(SafetyPins(), deployment, tenant, session_key, Priority.STANDARD)
        found = await self._terms(_Policy(), pins)
        assert found is not None, "a routed pack has a version"
        return found

    def _routed(
        self, pins: SafetyPins, deployment: str, tenant: str, session_key: str, highest: Priority
    ) -> SafetyPins:
        """Return the pins with the version that the deployment's route gives to the session."""
        route = self._catalog.resolve_pack(deployment, SplitCaller(tenant, session_key, highest))
        return replace(
            pins,
            deployment=deployment,
            model=route.deployment.model,
            pack_digest=route.version_digest,
            step=route.step,
            shadow_digest=self._shadow(route, tenant, session_key),
        )

    def _shadow(self, route: Route, tenant: str, session_key: str) -> str:
        caller = SplitCaller(tenant, session_key)
        arm = self._catalog.shadow_arm(caller, route.model, route.step, route.version_digest)
        return "" if arm is None else arm.version_digest

    async def _terms(self, own: _Policy, pins: SafetyPins, version_digest: str = "") -> SafetyTerms | None:
        if own.pack is None and not pins.pack_digest:
            return None
        enforced = await self._compiled(own, pins.model, pins.pack_digest)
        shadow = None
        if pins.shadow_digest:
            try:
                shadow = await self._compiled(own, pins.model, pins.shadow_digest)
            except FairwayError as error:  # it decides nothing, so it refuses nothing
                log.warning("safety_pack.shadow_unread", digest=pins.shadow_digest, reason=error.reason)
        on_replicas = self._catalog.is_probed(version_digest)
        return SafetyTerms(pins, enforced, shadow, own.has_probe if on_replicas is None else on_replicas)

    async def _policy(self, model: str, version_digest: str) -> _Policy:
        return await self._policies.get(version_digest, partial(self._read, model, version_digest))

    async def _compiled(self, own: _Policy, model: str, digest: str) -> CompiledPack:
        """Return the version's own pack, joined with the tenant's unless ``digest`` is empty."""
        tenants = await self._policy(model, digest) if digest else _Policy()
        if digest and tenants.pack is None:
            raise FailedPrecondition(f"the version {digest} is no safety pack", digest=digest)
        key = own.digest, tenants.digest
        return await self._joined.get(key, lambda: in_thread(compiled, own.pack, tenants.pack))

    async def _read(self, model: str, version_digest: str) -> _Policy:
        """Return the policy of a version. Raises Unavailable, FailedPrecondition."""
        until_s = self._clock.monotonic_s() + _PATIENCE_S
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                while True:
                    try:
                        return await self._fetched(model, version_digest)
                    except Unavailable:
                        if self._clock.monotonic_s() > until_s:
                            raise
                    await self._clock.sleep(_PAUSE_S)
        except ValueError as error:
            raise FailedPrecondition(
                f"the safety policy of {model} {version_digest} is refused: {error}; publish it again",
                model=model,
                digest=version_digest,
            ) from error
        except (TimeoutError, OSError, FairwayError) as error:
            log.warning("safety_pack.unread", model=model, digest=version_digest, error=repr(error))
            raise Unavailable(
                f"the safety pack of {model} {version_digest} cannot be read now; nothing is sent unjudged",
                retry_after_s=_RETRY_S,
                model=model,
                digest=version_digest,
            ) from error

    async def _fetched(self, model: str, version_digest: str) -> _Policy:
        manifest = await self._files.readable(model, version_digest)
        digests = {one.path: one.digest for one in manifest.files}
        digest = digests.get(POLICY_NAME, "")
        if not digest:
            return _Policy(has_probe=PROBE in digests)
        folder = await self._files.fetch(model, version_digest, only=lambda path: path == POLICY_NAME)
        self._files.pin(folder)
        try:
            data = await in_thread((folder / POLICY_NAME).read_bytes)
        finally:
            self._files.unpin(folder)
        return _Policy(digest, await in_thread(check_policy, data), PROBE in digests)


class _Loads(Generic[K, V]):
    """Values that are made once for all that wait for them; the ``MAX_KEPT`` used last are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._making: dict[K, _Turn] = {}

    async def get(self, key: K, make: Callable[[], Awaitable[V]]) -> V:
        """Return the value of a key. A failure is raised to all that wait for it, and not kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        turn = self._making.setdefault(key, _Turn())
        try:
            async with turn.lock:
                if key not in self._kept:
                    self._kept[key] = await turn.made(make)
                    while len(self._kept) > MAX_KEPT:
                        self._kept.popitem(last=False)
                return self._kept[key]
        finally:
            if not turn.lock.locked():
                self._making.pop(key, None)


class _Turn:
    """One making of a value, and those that wait for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._failure: FairwayError | None = None

    async def made(self, make: Callable[[], Awaitable[V]]) -> V:
        if self._failure is not None:
            raise self._failure
        try:
            return await make()
        except FairwayError as error:
            self._failure = error
            raise


def compiled(own: SafetyPack | None, tenants: SafetyPack | None) -> CompiledPack:
    """Return what obeys both packs, of which one may be absent. Takes a thread for long lists."""
    pack = stricter(own, tenants) if own is not None and tenants is not None else own or tenants
    assert pack is not None, "one of them is a pack"
    return CompiledPack(pack, {"input": TextRules(pack, "input"), "output": TextRules(pack, "output")})
