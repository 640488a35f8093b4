"""What the difference of two states is told as."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controlplane.policy.assign import Unplaced
from services.controlplane.policy.events import (
    MAX_MESSAGE_CHARS,
    Observed,
    events_between,
    kind_of,
)
from services.controlplane.reconciler import PLACED, UNPLACED, placement_events_of
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    KEYS,
    NODES,
    QUARANTINE,
    TENANTS,
    WORKERS,
    ApiKey,
    AssignedVersion,
    Assignment,
    Deployment,
    KeyRole,
    Leader,
    LoadedVersion,
    Meta,
    Node,
    Tag,
    Tenant,
    VersionRecord,
    VersionState,
    Worker,
    leader_key,
    tag_key,
    version_key,
)
from services.core.token_bucket import TokenBucket
from services.ports.poison.quarantine import Quarantined

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
TENANT = Tenant(Meta("acme"))
KEY = ApiKey(Meta("k"), KeyRole.TENANT, "h1", tenant="acme")
DEPLOYMENT = Deployment(Meta("d"), "m", "prod", OLD, 2)
POISON = Quarantined(OLD, "f", "d", 2, 0.0)
LOADING = LoadedVersion("d", "m", OLD, VersionState.LOADING)
FAILED = replace(
    LOADING, state=VersionState.FAILED, reason="DOES_NOT_FIT", message="too big", failed_attempts=1
)
READY = replace(LOADING, state=VersionState.READY, kv_blocks_total=9)


def worker(*versions: LoadedVersion, draining: bool = False) -> Worker:
    return Worker("w0", "w0:1", versions=versions, draining=draining)


def reasons(key: str, before: Observed | None, after: Observed | None) -> list[str]:
    old = {} if before is None else {key: before}
    new = {} if after is None else {key: after}
    return [one.reason for one in events_between(old, new, (key,))]


@pytest.mark.parametrize(("deaths", "text"), [(2, "ended 2 engines alone"), (0, "raised an exception alone")])
def test_the_event_of_a_quarantined_input_has_what_it_did(deaths: int, text: str) -> None:
    (event,) = events_between({}, {QUARANTINE + "v/f": replace(POISON, deaths=deaths)}, (QUARANTINE + "v/f",))
    assert event.message.endswith(text)


@pytest.mark.parametrize(
    ("key", "before", "after", "told"),
    [
        (TENANTS + "acme", None, TENANT, ["TENANT_CREATED"]),
        (TENANTS + "acme", TENANT, replace(TENANT, disabled=True), ["TENANT_DISABLED"]),
        (TENANTS + "acme", TENANT, replace(TENANT, max_concurrency=3), ["TENANT_UPDATED"]),
        (TENANTS + "acme", TENANT, None, ["TENANT_DELETED"]),
        (TENANTS + "acme", TENANT, replace(TENANT, safety_pack="strict"), ["SAFETY_PACK_ASSIGNED"]),
        (
            TENANTS + "acme",
            replace(TENANT, safety_pack="strict"),
            replace(TENANT, disabled=True),
            ["TENANT_DISABLED", "SAFETY_PACK_ASSIGNED"],
        ),
        (QUARANTINE + "v/f", None, POISON, ["INPUT_QUARANTINED"]),
        (QUARANTINE + "v/f", POISON, replace(POISON, deaths=3), []),
        (QUARANTINE + "v/f", POISON, None, ["INPUT_RELEASED"]),
        (KEYS + "k", None, KEY, ["KEY_CREATED"]),
        (KEYS + "k", KEY, replace(KEY, secret_hash="h2"), ["KEY_ROTATED"]),
        (KEYS + "k", KEY, replace(KEY, models=("m",)), ["KEY_UPDATED"]),
        (KEYS + "k", KEY, None, ["KEY_DELETED"]),
        (DEPLOYMENTS + "d", None, DEPLOYMENT, ["DEPLOYMENT_CREATED"]),
        (DEPLOYMENTS + "d", DEPLOYMENT, replace(DEPLOYMENT, replicas=3), ["DEPLOYMENT_SCALED"]),
        (
            DEPLOYMENTS + "d",
            DEPLOYMENT,
            replace(DEPLOYMENT, version_digest=NEW, node_selector={"gpu": "a"}),
            ["DEPLOYMENT_VERSION_CHANGED", "DEPLOYMENT_UPDATED"],
        ),
        (DEPLOYMENTS + "d", DEPLOYMENT, None, ["DEPLOYMENT_DELETED"]),
        (NODES + "w0", None, Node("w0", cordoned=True), ["NODE_CORDONED"]),
        (NODES + "w0", None, Node("w0", cordoned=True, draining=True), ["NODE_DRAINING", "NODE_DRAINED"]),
        (NODES + "w0", Node("w0", cordoned=True), Node("w0"), ["NODE_UNCORDONED"]),
        (NODES + "w0", Node("w0"), None, ["NODE_DELETED"]),
        (WORKERS + "w0", None, worker(LOADING), ["NODE_JOINED", "VERSION_LOADING"]),
        (WORKERS + "w0", worker(LOADING), worker(READY), ["VERSION_READY"]),
        (WORKERS + "w0", worker(LOADING), worker(FAILED), ["VERSION_FAILED"]),
        (WORKERS + "w0", worker(FAILED), worker(replace(FAILED, failed_attempts=2)), ["VERSION_FAILED"]),
        (WORKERS + "w0", worker(FAILED), worker(replace(LOADING, failed_attempts=1)), []),
        (WORKERS + "w0", worker(READY), worker(replace(READY, engine_restarts=1)), ["ENGINE_RESTARTED"]),
        (WORKERS + "w0", worker(LOADING), worker(replace(LOADING, progress_ratio=0.5)), []),
        (WORKERS + "w0", worker(), None, ["NODE_LOST"]),
        (WORKERS + "w0", worker(draining=True), None, ["NODE_LEFT"]),
        (
            ASSIGNMENTS + "w0",
            Assignment("w0", (AssignedVersion("d", "m", OLD),)),
            Assignment("w0", (AssignedVersion("d", "m", NEW),)),
            ["VERSION_ASSIGNED", "VERSION_UNASSIGNED"],
        ),
        (tag_key("m", "prod"), Tag("m", "prod", OLD), Tag("m", "prod", NEW), ["TAG_MOVED"]),
        (tag_key("m", "prod"), None, Tag("m", "prod", NEW), ["TAG_CREATED"]),
        (tag_key("m", "prod"), Tag("m", "prod", NEW), None, ["TAG_DELETED"]),
        (version_key("m", OLD), None, VersionRecord("m", OLD, 1, 0.0), ["VERSION_REGISTERED"]),
        (leader_key("scheduler"), None, Leader("a", "a:1"), ["LEADER_ELECTED"]),
        (leader_key("scheduler"), Leader("a", "a:1"), Leader("b", "b:1"), ["LEADER_ELECTED"]),
        (leader_key("scheduler"), Leader("a", "a:1"), None, ["LEADER_GONE"]),
    ],
)
def test_each_change_has_its_reason(
    key: str, before: Observed | None, after: Observed | None, told: list[str]
) -> None:
    assert kind_of(key) is type(after if after is not None else before)
    assert reasons(key, before, after) == told
    if before is not None and after is not None:
        assert reasons(key, after, after) == []


def test_a_failure_says_the_figures_and_the_attempt() -> None:
    (one,) = events_between({}, {WORKERS + "w0": worker(FAILED)}, (WORKERS + "w0",))[1:]
    assert (one.resource, one.warning) == ("d", True)
    assert one.message == "aaaaaaaaaaaa on w0: attempt 1 failed: DOES_NOT_FIT too big"


def test_a_node_is_drained_once_its_last_version_is_gone() -> None:
    node = Node("w0", cordoned=True, draining=True)
    held = Assignment("w0", (AssignedVersion("d", "m", OLD),))
    state: dict[str, Observed] = {NODES + "w0": node, ASSIGNMENTS + "w0": held, WORKERS + "w0": worker(READY)}
    unassigned: dict[str, Observed] = state | {ASSIGNMENTS + "w0": Assignment("w0")}
    told = events_between(state, unassigned, (ASSIGNMENTS + "w0",))
    assert [one.reason for one in told] == ["VERSION_UNASSIGNED"], "its last sequences still run"
    gone = unassigned | {WORKERS + "w0": worker()}
    assert [one.reason for one in events_between(unassigned, gone, (WORKERS + "w0",))] == ["NODE_DRAINED"]


def test_secrets_and_hashes_are_in_no_message() -> None:
    key = replace(KEY, secret_hash="e" * 64)
    for one in events_between({KEYS + "k": KEY}, {KEYS + "k": key}, (KEYS + "k",)):
        assert "e" * 64 not in one.message


@given(st.text(min_size=1))
def test_messages_are_bounded(text: str) -> None:
    failed = replace(FAILED, message=text * 1000)
    for one in events_between({}, {WORKERS + "w0": worker(failed)}, (WORKERS + "w0",)):
        assert len(one.message) <= MAX_MESSAGE_CHARS


def test_what_cannot_be_placed_is_told_when_it_begins_and_when_it_ends() -> None:
    short = Unplaced("d", 1, (("w0", "no_memory: needs 9 MiB, 1 of 5 MiB are free"), ("w1", "cordoned")))
    told, news = placement_events_of({}, [short], "d")
    assert [one.reason for one in news] == [UNPLACED]
    assert "1 no_memory (w0 needs 9 MiB, 1 of 5 MiB are free)" in news[0].message
    moved = replace(
        short, rejected=(("w0", "no_memory: needs 9 MiB, 2 of 5 MiB are free"), ("w1", "cordoned"))
    )
    assert placement_events_of(told, [moved], "d") == (told, ()), "figures that move are no news"
    _, news = placement_events_of(told, [replace(short, rejected=(("w0", "cordoned"),))], "d")
    assert [one.reason for one in news] == [UNPLACED], "another reason is"
    assert [one.reason for one in placement_events_of(told, [], "d")[1]] == [PLACED]
    assert placement_events_of({"d": ""}, [short], "d")[1] == (), "an earlier leader told it"
    assert placement_events_of(told, [], ()) == ({}, ()), "one that was deleted is not placed"


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(rate_per_s=2.0, burst=10)
    assert bucket.take(50, 0.0) == 10
    assert bucket.take(1, 0.1) == 0
    assert bucket.take(50, 1.0) == 2
    assert bucket.take(50, 1000.0) == 10
