"""The split of a model name's traffic between versions, and the choice of a request's version. Pure.

Consistent hashing: the session's point depends on the rollout's salt, the tenant and the session key, not on
the weights. Arms other than the stable one take adjacent ranges from 0 on, and the stable arm takes the
rest. A weight that grows therefore adds sessions to its arm and removes none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from services.core.records import ROOT, Priority

ROUTES: Final = ROOT + "routes/"
WHOLE_BP: Final = 10_000
# The tenant of the copies for shadow versions. No tenant's name has parentheses.
SHADOW_TENANT: Final = "(shadow)"
_POINTS: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class RouteArm:
    """One version of a split. ``weight_bp``: its share in basis points; the stable arm takes the rest.

    ``replicas``: on how many workers it runs. ``closed``: it was aborted; workers refuse to start a request
    that was resolved before the route's revision. ``kv_bp``: the traffic that it gets KV memory for, which
    may come soon.
    """

    name: str
    version_digest: str
    weight_bp: int = 0
    replicas: int = 1
    closed: bool = False
    kv_bp: int = 0


@dataclass(frozen=True, slots=True)
class Shadow:
    """Copies of ``fraction_bp`` of the requests go to an arm; at most ``max_concurrency`` on one gateway."""

    arm: str
    fraction_bp: int
    max_concurrency: int = 8


@dataclass(frozen=True, slots=True)
class SplitRules:
    """Which tenants take part in a split, and how.

    ``pins``: a request may name the version of an open arm. ``allow``: only these tenants are split; empty:
    all. ``deny``: not split until a version is final. ``overrides``: the arm of a tenant, by tenant.
    ``class_caps_bp``: the largest weight of the arms that are not stable, together, by the highest class of a
    tenant.
    """

    pins: bool = True
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    class_caps_bp: dict[Priority, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """The split of one deployment's traffic. Key: ``ROUTES`` and the deployment's name.

    ``arms[0]`` is the stable one. The revision of the key is the route revision of the requests. ``step``:
    unique for the rollout and its step; the arms of one step are compared. ``by_worker``: no worker runs two
    of the arms, and the stable one leaves them one worker at a time.
    """

    deployment: str
    salt: str
    arms: tuple[RouteArm, ...]
    rules: SplitRules = field(default_factory=SplitRules)
    shadow: Shadow | None = None
    step: str = ""
    by_worker: bool = False

    @property
    def stable(self) -> RouteArm:
        return self.arms[0]

    def arm(self, name: str) -> RouteArm | None:
        return next((one for one in self.arms if one.name == name), None)

    @property
    def fault(self) -> str:
        """Return why it is no split, as one that was written by hand; empty for one that can be followed."""
        names = [arm.name for arm in self.arms]
        digests = [arm.version_digest for arm in self.arms]
        checks = {
            "a split has an arm": bool(names),
            "two arms have one name": len(set(names)) == len(names),
            "two arms have one version": len(set(digests)) == len(digests),
            "a weight is no share": all(0 <= arm.weight_bp <= WHOLE_BP for arm in self.arms),
            "the weights are not the whole": sum(arm.weight_bp for arm in self.arms) == WHOLE_BP,
            "a closed arm has traffic": not any(arm.closed and arm.weight_bp for arm in self.arms),
            "the stable arm is closed": not any(arm.closed for arm in self.arms[:1]),
        }
        return next((text for text, holds in checks.items() if not holds), "")

    def check_integrity(self) -> None:
        """Raise AssertionError for a split that is no split."""
        assert not self.fault, self.fault


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Workers refuse requests for a version that were resolved before ``route_revision``.

    ``successor_digest``: the version that such a request gets instead.
    """

    version_digest: str
    route_revision: int
    successor_digest: str = ""


@dataclass(frozen=True, slots=True)
class RevisedRoute:
    """A stored route and its revision."""

    route: ModelRoute
    revision: int


@dataclass(frozen=True, slots=True)
class SplitCaller:
    """Whose request is resolved. ``highest``: the tenant's highest class; ``pin``: the version or arm it
    names.
    """

    tenant: str
    session_key: str
    highest: Priority = Priority.STANDARD
    pin: str = ""


@dataclass(frozen=True, slots=True)
class PinRefused:
    """The request names a version that it cannot have; ``allowed``: whether the route permits pins."""

    allowed: bool


def choose_arm(route: ModelRoute, caller: SplitCaller) -> RouteArm | PinRefused:
    """Return the arm of a request. A pin comes first, then the tenant's override, then the lists and the
    hash.
    """
    rules = route.rules
    if caller.pin:
        return _pinned(route, caller)
    named = route.arm(rules.overrides.get(caller.tenant, ""))
    if named is not None and not named.closed:
        return named
    if not _takes_part(rules, caller.tenant):
        return route.stable
    cap_bp = rules.class_caps_bp.get(caller.highest, WHOLE_BP)
    point, start_bp = point_of(route.salt, caller.tenant, caller.session_key), 0
    for arm in route.arms[1:]:
        end_bp = min(start_bp + arm.weight_bp, cap_bp)
        if _bound(start_bp) <= point < _bound(end_bp):
            return arm
        start_bp = max(start_bp, end_bp)
    return route.stable


def is_drawn(route: ModelRoute, caller: SplitCaller) -> bool:
    """Whether chance decides the request's arm, so that it counts in the comparison of the arms."""
    return (
        not caller.pin
        and caller.tenant not in route.rules.overrides
        and _takes_part(route.rules, caller.tenant)
        and _is_balanced(route, caller)
    )


def is_shadowed(route: ModelRoute, caller: SplitCaller) -> bool:
    """Whether a copy of the session's requests goes to the shadow. Independent of the session's arm."""
    if route.shadow is None or not _takes_part(route.rules, caller.tenant):
        return False
    point = point_of(f"{route.salt}/shadow", caller.tenant, caller.session_key)
    return point < _bound(route.shadow.fraction_bp)


def point_of(salt: str, tenant: str, session_key: str) -> int:
    """Return the session's point, uniform in 0..2**64-1. The parts are delimited: no two share one text."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (salt, tenant, session_key):
        data = part.encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(4, "big") + data)
    return int.from_bytes(digest.digest(), "big")


def split(
    route: ModelRoute, weights_bp: dict[str, int], *, closed: tuple[str, ...] = ()
) -> tuple[RouteArm, ...]:
    """Return the arms with new weights of all but the stable one, which takes the rest."""
    rest_bp = WHOLE_BP - sum(weights_bp.values())
    assert rest_bp >= 0, "the weights are more than the whole"
    arms = [
        RouteArm(
            arm.name,
            arm.version_digest,
            weights_bp.get(arm.name, 0),
            arm.replicas,
            arm.closed or arm.name in closed,
        )
        for arm in route.arms[1:]
    ]
    stable = route.stable
    return (RouteArm(stable.name, stable.version_digest, rest_bp, stable.replicas), *arms)


def _pinned(route: ModelRoute, caller: SplitCaller) -> RouteArm | PinRefused:
    named = next((arm for arm in route.arms if caller.pin in (arm.version_digest, arm.name)), None)
    if named is not None and named == route.stable:
        return named
    allowed = route.rules.pins and _takes_part(route.rules, caller.tenant)
    if named is None or named.closed or not allowed:
        return PinRefused(allowed)
    return named


def _is_balanced(route: ModelRoute, caller: SplitCaller) -> bool:
    """Whether a session counts so that each class has the same share of both arms' sessions.

    If a class is capped, fewer sessions of the stable arm count. Between several capped arms no choice
    of sessions does that, and none counts.
    """
    weight_bp = sum(arm.weight_bp for arm in route.arms[1:])
    cap_bp = route.rules.class_caps_bp.get(caller.highest, WHOLE_BP)
    if cap_bp >= weight_bp:
        return True
    if len(route.arms) > 2:
        return False
    point = point_of(route.salt, caller.tenant, caller.session_key)
    counted_bp = cap_bp * (WHOLE_BP - weight_bp) // weight_bp  # part of the stable arm's sessions that counts
    return point < _bound(cap_bp) or point >= _bound(WHOLE_BP - counted_bp)


def _takes_part(rules: SplitRules, tenant: str) -> bool:
    return tenant not in rules.deny and (not rules.allow or tenant in rules.allow)


def _bound(weight_bp: int) -> int:
    """Return the first point beyond a weight."""
    return weight_bp * _POINTS // WHOLE_BP
