"""Deployments of one version: the load of its pool is divided, none of it twice and none of it lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controlplane.fleet import Fleet
from services.controlplane.scaling.controller import sharers
from services.controlplane.scaling.policy.shared_versions import SharedVersions, Sharer
from services.core.estimates.pool_load import ClassLoad, GroupLoad, PoolLoad
from services.core.records import AssignedVersion, Assignment, Deployment, Meta, Priority, Worker
from services.core.scaling import Scaling

DIGEST, OTHER, ACME = "sha256:a", "sha256:b", "dedicated/acme"
CHAT, BOT = Sharer("chat", "", 1, 4), Sharer("bot", "", 1, 2)


def load_of(*groups: GroupLoad, reporter: int = 1, **arrived: float) -> PoolLoad:
    """Return a load with as much work arrived as waits."""
    classes = (
        ClassLoad(Priority.STANDARD, 10.0, count, count, deployment="" if name == "rows" else name)
        for name, count in arrived.items()
    )
    return PoolLoad(tuple(classes), 5.0, reporter=reporter, groups=groups)


def divided(load: PoolLoad, *several: Sharer, by: SharedVersions | None = None) -> dict[str, PoolLoad]:
    found = (by or SharedVersions()).divide({DIGEST: load}, {DIGEST: several})
    return {name: one[DIGEST] for name, one in found.items()}


def arrived(load: PoolLoad) -> float:
    return sum(one.arrived for one in load.classes)


def test_each_is_scaled_for_the_requests_that_name_it() -> None:
    found = divided(load_of(chat=90.0, bot=10.0), CHAT, BOT)
    assert {name: arrived(one) for name, one in found.items()} == {"chat": 90.0, "bot": 10.0}
    assert [one.waiting for one in found["chat"].classes] == [90.0]
    assert found["bot"].rate == 5.0


def test_rows_are_divided_by_the_most_replicas() -> None:
    found = divided(load_of(rows=60.0), CHAT, BOT)
    assert {name: arrived(one) for name, one in found.items()} == {"chat": 40.0, "bot": 20.0}


def test_one_at_zero_is_served_by_another_of_its_nodes_which_is_scaled_for_it() -> None:
    asleep, own = replace(BOT, replicas=0), Sharer("own", ACME, 1, 9)
    found = divided(load_of(chat=90.0, bot=10.0, own=1.0), CHAT, asleep, own)
    assert {name: arrived(one) for name, one in found.items()} == {"chat": 100.0, "bot": 0.0, "own": 1.0}
    found = divided(load_of(chat=90.0, bot=10.0), replace(CHAT, replicas=0), asleep)
    assert {name: arrived(one) for name, one in found.items()} == {"chat": 90.0, "bot": 10.0}


def test_a_held_request_starts_the_deployment_that_it_names_on_the_nodes_of_its_tenant() -> None:
    asleep, own = replace(BOT, replicas=0), Sharer("own", ACME, 0, 1)
    held = GroupLoad("", "bot", held=3), GroupLoad(ACME, "own", held=2), GroupLoad(ACME, "chat", held=1)
    found = divided(load_of(*held), replace(CHAT, replicas=0), asleep, own)
    assert {name: one.held for name, one in found.items()} == {"chat": 0, "bot": 3, "own": 2}
    rows = GroupLoad(ACME, held=7)
    assert {name: one.held for name, one in divided(load_of(rows), CHAT, own).items()} == {
        "chat": 0,
        "own": 7,
    }
    older = replace(load_of(), held=4)
    assert divided(older, CHAT)["chat"].held == 4


def test_what_runs_keeps_one_of_several_on_the_same_nodes() -> None:
    own = Sharer("own", ACME, 1, 1)
    runs = load_of(GroupLoad("", running=5), GroupLoad(ACME, running=2))
    found = divided(runs, CHAT, BOT, own)
    assert {name: one.running for name, one in found.items()} == {"chat": 0, "bot": 5, "own": 2}
    found = divided(runs, CHAT, replace(BOT, replicas=0), own)
    assert (found["chat"].running, found["bot"].running) == (5, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans()),
        max_size=12,
    )
)
def test_work_is_never_counted_twice_or_lost(rounds: list[tuple[int, int, int, bool, bool]]) -> None:
    """Also where deployments reach and leave zero; and counts never fall, which would begin them anew."""
    by, totals, before = (
        SharedVersions(),
        dict.fromkeys(("chat", "bot", "rows"), 0.0),
        {"chat": 0.0, "bot": 0.0},
    )
    for chat, bot, rows, has_chat, has_bot in rounds:
        for name, count in zip(totals, (chat, bot, rows), strict=True):
            totals[name] += count
        several = replace(CHAT, replicas=int(has_chat)), replace(BOT, replicas=int(has_bot))
        found = divided(load_of(reporter=1, **totals), *several, by=by)
        assert sum(map(arrived, found.values())) == pytest.approx(sum(totals.values()))
        for name, one in found.items():
            assert arrived(one) >= before[name]
            before[name] = arrived(one)


def test_another_reporter_begins_anew() -> None:
    by = SharedVersions()
    divided(load_of(chat=90.0), CHAT, by=by)
    found = divided(load_of(chat=3.0, reporter=2), CHAT, by=by)["chat"]
    assert (arrived(found), found.reporter) == (3.0, 2)


def test_a_scaled_deployment_shares_the_versions_that_it_gets_and_has() -> None:
    def deployment(name: str, digest: str, tenant: str = "", scaling: Scaling | None = None) -> Deployment:
        return Deployment(Meta(name), "m", "latest", digest, 1, tenant=tenant, scaling=scaling)

    fleet = Fleet(
        deployments=(
            deployment("chat", OTHER, scaling=Scaling(0, 4)),
            deployment("fixed", DIGEST),
            deployment("own", DIGEST, "acme", Scaling(0, 2)),
        ),
        workers=(Worker("w0", "w0:1"),),
        assignments=(Assignment("w0", (AssignedVersion("chat", "m", DIGEST),)),),
        groups={"acme": ACME},
    )
    chat = Sharer("chat", "", 1, 4)
    assert sharers(fleet, {"chat", "own"}) == {
        OTHER: [chat],
        DIGEST: [chat, Sharer("fixed", "", 1, 1), Sharer("own", ACME, 1, 2)],
    }
