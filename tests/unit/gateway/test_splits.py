"""A request's arm in the catalog: all or nothing, stable where the view is old, refused where it may not
choose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.core.errors import PermissionDenied, Unavailable, VersionGone
from services.core.records import WORKERS, LoadedVersion, VersionState, Worker
from services.core.rollouts.routes import (
    ROUTES,
    WHOLE_BP,
    ModelRoute,
    RouteArm,
    SplitCaller,
    SplitRules,
    Withdrawal,
    split,
)
from services.gateway import splits as module

OLD, NEW = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
CALLER = SplitCaller("acme", "session")


def put(fleet: Any, weight_bp: int, *, rules: SplitRules | None = None, revision: int = 50) -> ModelRoute:
    arms = (RouteArm("stable", OLD, WHOLE_BP - weight_bp), RouteArm("canary", NEW, weight_bp))
    route = ModelRoute("chat-small", "salt", arms, rules or SplitRules(), step="r1/2")
    fleet.routes.put(ROUTES + "chat-small", route, revision)
    return route


def load(fleet: Any, state: VersionState = VersionState.READY) -> None:
    both = tuple(LoadedVersion("chat-small", "tiny", digest, state) for digest in (OLD, NEW))
    fleet.workers.put(WORKERS + "w0", Worker("w0", "w0:1", versions=both))


def test_a_request_is_resolved_to_one_arm_at_the_revision_of_the_split(fleet: Any) -> None:
    load(fleet)
    put(fleet, WHOLE_BP)
    route = fleet.catalog.resolve("chat-small", CALLER)
    assert (route.version_digest, route.arm, route.route_revision) == (NEW, "canary", 50)
    assert route.deployment.version_digest == OLD
    stable = fleet.catalog.resolve("chat-small")
    assert (stable.version_digest, stable.arm, stable.route_revision) == (OLD, "stable", 50)
    assert [one.version_digest for one in fleet.catalog.routes()] == [OLD]
    assert (route.step, stable.step) == ("r1/2", "")
    assert fleet.catalog.resolve("chat-small", replace(CALLER, pin=NEW)).step == ""


def test_an_arm_that_no_worker_serves_gets_no_traffic(fleet: Any) -> None:
    put(fleet, WHOLE_BP)
    assert fleet.catalog.resolve("chat-small", CALLER).arm == "stable"
    load(fleet, VersionState.LOADING)
    assert fleet.catalog.resolve("chat-small", CALLER).arm == "stable"
    load(fleet, VersionState.RESTARTING)  # it returns soon: the session stays where it is
    assert fleet.catalog.resolve("chat-small", CALLER).arm == "canary"


def test_an_old_view_gives_the_stable_arm_only(fleet: Any) -> None:
    load(fleet)
    put(fleet, WHOLE_BP)
    fleet.routes.aged_s = module.MAX_AGE_S + 0.1
    assert fleet.catalog.resolve("chat-small", CALLER).arm == "stable"
    with pytest.raises(Unavailable):
        fleet.catalog.resolve("chat-small", replace(CALLER, pin=NEW))
    assert fleet.catalog.resolve("chat-small", replace(CALLER, pin=OLD)).arm == "stable"
    fleet.routes.aged_s = module.MAX_AGE_S
    assert fleet.catalog.resolve("chat-small", CALLER).arm == "canary"


def test_a_request_names_a_version(fleet: Any) -> None:
    load(fleet)
    put(fleet, 0)
    assert fleet.catalog.resolve("chat-small", replace(CALLER, pin=NEW)).version_digest == NEW
    with pytest.raises(VersionGone):
        fleet.catalog.resolve("chat-small", replace(CALLER, pin="sha256:" + "00" * 32))
    put(fleet, 0, rules=SplitRules(pins=False))
    with pytest.raises(PermissionDenied) as caught:
        fleet.catalog.resolve("chat-small", replace(CALLER, pin=NEW))
    assert caught.value.metadata["field"] == "version"


def test_without_a_split_the_serving_version_may_be_named(fleet: Any) -> None:
    assert fleet.catalog.resolve("chat-small", replace(CALLER, pin=OLD)).version_digest == OLD
    with pytest.raises(VersionGone):
        fleet.catalog.resolve("chat-small", replace(CALLER, pin=NEW))


def test_an_aborted_arm_gets_no_request(fleet: Any) -> None:
    load(fleet)
    route = put(fleet, WHOLE_BP)
    closed = replace(route, arms=split(route, {}, closed=("canary",)))
    fleet.routes.put(ROUTES + "chat-small", closed, 51)
    found = fleet.catalog.resolve("chat-small", CALLER)
    assert (found.arm, found.route_revision) == ("stable", 51)
    with pytest.raises(VersionGone):
        fleet.catalog.resolve("chat-small", replace(CALLER, pin="canary"))


async def test_the_text_model_of_an_arm_is_loaded_before_it_has_traffic(fleet: Any) -> None:
    put(fleet, 0)
    digests = fleet.catalog._digests_of(fleet.catalog.resolve("chat-small"))
    assert digests == {OLD, NEW}
    await fleet.catalog.text_model(NEW)


def test_a_refusal_gives_a_gateway_whose_view_is_old_the_successor(fleet: Any) -> None:
    load(fleet)
    put(fleet, WHOLE_BP)
    fleet.routes.aged_s = module.MAX_AGE_S + 0.1
    assert fleet.catalog.resolve("chat-small", CALLER).version_digest == OLD
    fleet.splits.withdraw(Withdrawal(OLD, 60, NEW))
    route = fleet.catalog.resolve("chat-small", CALLER)
    assert (route.version_digest, route.route_revision, route.step) == (NEW, 60, "")
    assert fleet.catalog.model_of(NEW) == "tiny"
    with pytest.raises(VersionGone):
        fleet.catalog.resolve("chat-small", replace(CALLER, pin=OLD))
    fleet.splits.withdraw(Withdrawal(NEW, 70, "sha256:" + "ef" * 32))
    assert fleet.catalog.resolve("chat-small", CALLER).route_revision == 70, "the next cutover"
    put(fleet, 0, revision=61)
    assert fleet.catalog.resolve("chat-small", CALLER).version_digest == OLD, "the view is newer: reverted"


def test_a_refusal_counts_for_a_view_from_before_the_rollout_too(fleet: Any) -> None:
    assert fleet.catalog.resolve("chat-small", CALLER).version_digest == OLD
    fleet.splits.withdraw(Withdrawal(OLD, 60, NEW))
    assert fleet.catalog.resolve("chat-small", CALLER).version_digest == NEW


def test_what_is_withdrawn_is_bounded(fleet: Any) -> None:
    splits = fleet.splits
    for number in range(module.MAX_WITHDRAWN + 1):
        splits.withdraw(Withdrawal(f"v{number}", 1, NEW))
    assert splits.withdrawal_of("v0", 0) is None
    assert splits.withdrawal_of("v1", 0) is not None


NOWHERE = "sha256:" + "00" * 32


@pytest.mark.parametrize(
    ("arms", "fault"),
    [
        ((), "malformed"),
        ((RouteArm("stable", OLD, 50), RouteArm("canary", NEW, 10_000)), "malformed"),
        ((RouteArm("stable", OLD, 0, closed=True), RouteArm("canary", NEW, 10_000)), "malformed"),
        ((RouteArm("stable", OLD, 0), RouteArm("canary", NOWHERE, 10_000)), "no_worker"),
        ((RouteArm("stable", NOWHERE, 10_000),), "no_worker"),
    ],
)
def test_a_route_written_by_hand_that_leads_nowhere_is_served_by_the_stable_version_and_reported(
    fleet: Any, arms: tuple[RouteArm, ...], fault: str
) -> None:
    load(fleet)
    assert fleet.catalog.route_faults() == []
    fleet.routes.put(ROUTES + "chat-small", ModelRoute("chat-small", "by hand", arms), 50)
    for number in range(20):
        caller = SplitCaller("acme", f"session-{number}")
        assert fleet.catalog.resolve("chat-small", caller).version_digest == OLD
    assert fleet.catalog.route_faults() == [("chat-small", fault)]
    put(fleet, 5000)
    assert fleet.catalog.route_faults() == []
