"""A gateway's view of the routes: which arm of a model name a request goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from services.core.errors import PermissionDenied, Unavailable, VersionGone
from services.core.rollouts.routes import (
    ROUTES,
    ModelRoute,
    PinRefused,
    RouteArm,
    SplitCaller,
    Withdrawal,
    choose_arm,
    is_shadowed,
)
from services.runtime.fleet_state.informer import RecordView, Versioned

# The store confirms an idle view every 6 s.
MAX_AGE_S: Final = 15.0
MAX_WITHDRAWN: Final = 512


@dataclass(frozen=True, slots=True)
class ShadowArm:
    """Where the copy of a request goes, and how many copies may run at once on a gateway."""

    version_digest: str
    route_revision: int
    max_concurrency: int


class AgedView(RecordView[ModelRoute], Protocol):
    """The routes, and when the store last confirmed them: an ``Informer``."""

    def age_s(self) -> float: ...


class Splits:
    """Reads the routes. A view older than ``max_age_s`` may not show an abort: it gives the stable arm
    only.
    """

    def __init__(self, routes: AgedView, *, max_age_s: float = MAX_AGE_S) -> None:
        self._routes = routes
        self._max_age_s = max_age_s
        self._read: Mapping[str, Versioned[ModelRoute]] = {}  # the view that was checked last
        self._faulty = frozenset[str]()  # the keys of its routes that are no split
        self._withdrawn: OrderedDict[str, Withdrawal] = OrderedDict()  # what workers refuse, by version

    def is_current(self) -> bool:
        return self._routes.age_s() <= self._max_age_s

    def of(self, model: str) -> Versioned[ModelRoute] | None:
        """Return the split of a model name with its revision, None without one or where it is none."""
        view, key = self._routes.view, ROUTES + model
        if view is not self._read:
            self._read = view
            self._faulty = frozenset(key for key, held in view.items() if held.record.fault)
        return view.get(key) if key not in self._faulty else None

    def faults(self, *, on_workers: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        """Yield the model of each route that cannot be followed as it is stored, and why: it is no split
        (``malformed``), or no worker has the version of an arm with traffic (``no_worker``)."""
        for key, held in sorted(self._routes.view.items()):
            model = key.removeprefix(ROUTES)
            if held.record.fault:
                yield model, "malformed"
            elif not all(on_workers(arm.version_digest) for arm in held.record.arms if arm.weight_bp):
                yield model, "no_worker"

    def withdraw(self, withdrawal: Withdrawal) -> None:
        """Record what a worker refuses: it may be newer than this gateway's view of the routes."""
        self._withdrawn[withdrawal.version_digest] = withdrawal
        self._withdrawn.move_to_end(withdrawal.version_digest)
        while len(self._withdrawn) > MAX_WITHDRAWN:
            self._withdrawn.popitem(last=False)

    def withdrawal_of(self, version_digest: str, route_revision: int) -> Withdrawal | None:
        """Return why workers refuse requests for a version that were resolved at a revision, and what these
        get; None while that is not known, or the revision is as new."""
        found = self._withdrawn.get(version_digest)
        return found if found and found.successor_digest and route_revision < found.route_revision else None

    def choose(
        self, route: ModelRoute, caller: SplitCaller | None, *, serves: Callable[[str], bool]
    ) -> RouteArm:
        """Return the arm of a request; without a caller the stable one.

        ``serves``: whether a version has a replica. An arm without one is passed over, unless the request
        names it. Raises PermissionDenied, VersionGone or Unavailable for a named version that the caller
        cannot have.
        """
        if caller is None:
            return route.stable
        found = choose_arm(route, caller)
        if isinstance(found, PinRefused):
            raise pin_refused(route.deployment, caller.pin, allowed=found.allowed)
        if found is route.stable:
            return found
        if not self.is_current():
            if caller.pin:
                raise Unavailable(
                    f"this gateway last read the routes more than {self._max_age_s:g} s ago and serves the "
                    "stable version only; send it later",
                    retry_after_s=5.0,
                    model=route.deployment,
                )
            return route.stable
        return found if caller.pin or serves(found.version_digest) else route.stable

    def shadow_of(self, caller: SplitCaller, model: str, step: str, version_digest: str) -> ShadowArm | None:
        """Return the arm that gets a copy of a request of a version, None for no copy.

        Only requests whose arm chance decided in the present step are copied: others are not compared.
        """
        held = self.of(model) if step and self.is_current() else None
        if held is None or held.record.shadow is None or held.record.step != step:
            return None
        shadow = held.record.shadow
        arm = held.record.arm(shadow.arm)
        if arm is None or arm.closed or arm.version_digest == version_digest:
            return None
        if not is_shadowed(held.record, caller):
            return None
        return ShadowArm(arm.version_digest, held.mod_revision, shadow.max_concurrency)


def pin_refused(model: str, version: str, *, allowed: bool) -> PermissionDenied | VersionGone:
    """Return the error for a request that names a version which it cannot have."""
    if not allowed:
        return PermissionDenied(f"requests for {model} may not name a version", field="version", model=model)
    return VersionGone(f"{model} does not serve the version {version}", model=model, version=version)
