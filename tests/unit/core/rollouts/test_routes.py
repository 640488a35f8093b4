"""The split of a model name: sticky, exact, and under its rules."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.records import Priority, dump, load
from services.core.rollouts.routes import (
    WHOLE_BP,
    ModelRoute,
    PinRefused,
    RouteArm,
    Shadow,
    SplitCaller,
    SplitRules,
    choose_arm,
    is_drawn,
    is_shadowed,
    point_of,
    split,
)

OLD, NEW, OTHER = ("sha256:" + two * 32 for two in ("ab", "cd", "ef"))
STEPS_BP = (0, 100, 500, 2500, 5000, 10_000)


def route(weight_bp: int = 0, rules: SplitRules | None = None, salt: str = "s1") -> ModelRoute:
    arms = (RouteArm("stable", OLD, WHOLE_BP - weight_bp, 2), RouteArm("canary", NEW, weight_bp))
    return ModelRoute("chat", salt, arms, rules if rules is not None else SplitRules())


def arm_of(found: ModelRoute, tenant: str = "acme", session: str = "s", **more: object) -> str:
    chosen = choose_arm(found, SplitCaller(tenant, session, **more))  # type: ignore[arg-type]
    assert isinstance(chosen, RouteArm)
    return chosen.name


def test_100_000_sessions_never_flip_back_through_all_steps() -> None:
    """Each moves at most once, to the canary, and each weight is met within five standard errors."""
    sessions = [SplitCaller(f"t{number % 37}", f"session-{number}") for number in range(100_000)]
    before: list[bool] = [False] * len(sessions)
    for weight_bp in STEPS_BP:
        found = route(weight_bp)
        now = [choose_arm(found, caller) is found.arms[1] for caller in sessions]
        assert all(new or not old for old, new in zip(before, now, strict=True)), "a session went back"
        share = weight_bp / WHOLE_BP
        error = math.sqrt(share * (1 - share) * len(sessions))
        assert abs(sum(now) - share * len(sessions)) <= 5 * error
        before = now
    assert all(before)


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, WHOLE_BP), st.integers(0, WHOLE_BP))
def test_a_larger_weight_only_adds_sessions(tenant: str, session: str, one: int, two: int) -> None:
    low, high = sorted((one, two))
    if arm_of(route(low), tenant, session) == "canary":
        assert arm_of(route(high), tenant, session) == "canary"


def test_the_parts_of_a_session_are_delimited() -> None:
    assert point_of("a", "bc", "d") != point_of("ab", "c", "d") != point_of("a", "b", "cd")


def test_another_salt_draws_other_sessions() -> None:
    sessions = [f"s{number}" for number in range(4000)]
    one, two = (
        {name for name in sessions if arm_of(route(2500, salt=salt), session=name) == "canary"}
        for salt in ("s1", "s2")
    )
    assert 0.15 < len(one & two) / len(one) < 0.35  # independent: a quarter of a quarter


def test_arms_of_an_ab_test_have_their_shares() -> None:
    arms = (RouteArm("a", OLD, 5000), RouteArm("b", NEW, 3000), RouteArm("c", OTHER, 2000))
    found = ModelRoute("chat", "s", arms)
    found.check_integrity()
    counts = Counter(arm_of(found, session=f"s{number}") for number in range(20_000))
    assert counts["a"] == pytest.approx(10_000, abs=400)
    assert counts["b"] == pytest.approx(6_000, abs=400)
    assert counts["c"] == pytest.approx(4_000, abs=400)


def test_lists_and_overrides_come_before_the_hash() -> None:
    rules = SplitRules(allow=("in", "both"), deny=("both",), overrides={"fixed": "canary", "back": "stable"})
    found = route(WHOLE_BP, rules)
    assert [arm_of(found, tenant) for tenant in ("in", "both", "other", "fixed", "back")] == [
        "canary",
        "stable",
        "stable",
        "canary",
        "stable",
    ]


def test_an_override_to_an_unknown_or_closed_arm_is_ignored() -> None:
    found = route(0, SplitRules(overrides={"acme": "gone", "beta": "canary"}))
    assert arm_of(found) == "stable"
    assert arm_of(replace(found, arms=split(found, {}, closed=("canary",))), "beta") == "stable"


def test_only_what_chance_decides_is_compared() -> None:
    found = route(5000, SplitRules(allow=("acme", "fixed"), overrides={"fixed": "canary"}))
    assert is_drawn(found, SplitCaller("acme", "s"))
    assert not is_drawn(found, SplitCaller("acme", "s", pin="canary"))
    assert not is_drawn(found, SplitCaller("fixed", "s"))
    assert not is_drawn(found, SplitCaller("other", "s"))


def test_the_weight_of_a_class_is_capped() -> None:
    found = route(5000, SplitRules(class_caps_bp={Priority.INTERACTIVE: 100}))
    sessions = [f"s{number}" for number in range(10_000)]
    paid = {one for one in sessions if arm_of(found, session=one, highest=Priority.INTERACTIVE) == "canary"}
    rest = {one for one in sessions if arm_of(found, session=one) == "canary"}
    assert len(paid) == pytest.approx(100, abs=50)
    assert len(rest) == pytest.approx(5000, abs=250)
    assert paid < rest


@pytest.mark.parametrize(
    ("weight_bp", "cap_bp"), [(5000, 100), (2500, 2000), (9900, 500), (500, 500), (500, 0)]
)
def test_the_compared_sessions_of_a_capped_class_are_split_as_those_of_the_others(
    weight_bp: int, cap_bp: int
) -> None:
    """Else the arms would serve unequal mixes of the classes, and equal versions would seem different."""
    found = route(weight_bp, SplitRules(class_caps_bp={Priority.INTERACTIVE: cap_bp}))
    callers = [SplitCaller("acme", f"s{number}", Priority.INTERACTIVE) for number in range(20_000)]
    compared = [caller for caller in callers if is_drawn(found, caller)]
    canary = sum(choose_arm(found, caller) is found.arms[1] for caller in compared)
    assert canary == pytest.approx(cap_bp / WHOLE_BP * len(callers), abs=5 * math.sqrt(cap_bp * 2) + 1)
    stable = canary * (WHOLE_BP - weight_bp) / weight_bp
    assert len(compared) - canary == pytest.approx(stable, rel=0.35, abs=30)
    assert all(is_drawn(found, replace(caller, highest=Priority.STANDARD)) for caller in callers[:100])


def test_no_session_of_a_class_that_is_capped_between_several_arms_is_compared() -> None:
    one = route(5000, SplitRules(class_caps_bp={Priority.INTERACTIVE: 100}))
    stable, canary = one.arms
    two = replace(one, arms=(replace(stable, weight_bp=4000), canary, RouteArm("other", OTHER, 1000)))
    assert not is_drawn(two, SplitCaller("acme", "s", Priority.INTERACTIVE))
    assert is_drawn(two, SplitCaller("acme", "s"))


def test_a_request_names_its_version() -> None:
    found = route(0)
    assert arm_of(found, pin=NEW) == "canary"
    assert arm_of(found, pin="canary") == "canary"
    assert arm_of(found, pin=OLD) == "stable"
    assert choose_arm(found, SplitCaller("acme", "s", pin=OTHER)) == PinRefused(allowed=True)
    closed = replace(found, arms=split(found, {}, closed=("canary",)))
    assert choose_arm(closed, SplitCaller("acme", "s", pin="canary")) == PinRefused(allowed=True)


def test_pins_may_be_forbidden_but_for_the_stable_version() -> None:
    for rules in (SplitRules(pins=False), SplitRules(deny=("acme",))):
        found = route(5000, rules)
        assert choose_arm(found, SplitCaller("acme", "s", pin="canary")) == PinRefused(allowed=False)
        assert arm_of(found, pin=OLD) == "stable"


def test_the_shadow_s_share_is_independent_of_the_arm() -> None:
    found = replace(route(5000), shadow=Shadow("canary", 2000))
    sessions = [SplitCaller("acme", f"s{number}") for number in range(10_000)]
    copied = [one for one in sessions if is_shadowed(found, one)]
    assert len(copied) == pytest.approx(2000, abs=200)
    assert sum(choose_arm(found, one) is found.arms[1] for one in copied) == pytest.approx(1000, abs=150)
    assert not any(is_shadowed(replace(found, rules=SplitRules(deny=("acme",))), one) for one in sessions)


def test_split_gives_the_rest_to_the_stable_arm_and_closes_an_arm() -> None:
    found = replace(route(5000), arms=split(route(0), {"canary": 100}))
    found.check_integrity()
    assert [arm.weight_bp for arm in found.arms] == [9900, 100]
    aborted = replace(found, arms=split(found, {}, closed=("canary",)))
    aborted.check_integrity()
    assert [(arm.weight_bp, arm.closed) for arm in aborted.arms] == [(WHOLE_BP, False), (0, True)]
    assert split(aborted, {})[1].closed, "what is closed stays closed"


@pytest.mark.parametrize(
    "arms",
    [
        (),
        (RouteArm("a", OLD, 9000), RouteArm("b", NEW, 900)),
        (RouteArm("a", OLD, 9000), RouteArm("a", NEW, 1000)),
        (RouteArm("a", OLD, 9000), RouteArm("b", OLD, 1000)),
        (RouteArm("a", OLD, 9000), RouteArm("b", NEW, 1000, closed=True)),
        (RouteArm("a", OLD, 10_000, closed=True),),
    ],
)
def test_a_wrong_split_is_found(arms: tuple[RouteArm, ...]) -> None:
    with pytest.raises(AssertionError):
        ModelRoute("chat", "s", arms).check_integrity()


def test_a_route_is_stored_as_it_is() -> None:
    rules = SplitRules(False, ("a",), ("b",), {"c": "canary"}, {Priority.BATCH: 100})
    found = replace(route(2500, rules), shadow=Shadow("canary", 100))
    assert load(dump(found), ModelRoute) == found
