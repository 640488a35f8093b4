"""A placement runs on the nodes of its group, waits for them or is refused by name, and never spills."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import IsolationUnavailable
from services.core.generation import Grant
from tests.unit.scheduler.queue_rig import Rig

ACME = "dedicated/acme"
BETA = "partitioned/beta"


def rig_of(*groups: str, blocks: int = 10) -> Rig:
    rig = Rig(*[blocks] * len(groups))
    rig.groups = list(groups)
    for index in range(len(groups)):
        rig.report(index)
    return rig


def worker_of(found: Any) -> str:
    assert isinstance(found, Grant), found
    return found.worker_id


def test_each_group_has_its_nodes_alone() -> None:
    rig = rig_of("", ACME, BETA)
    shared, acme, beta = rig.ask(2), rig.ask(2, node_group=ACME), rig.ask(2, tenant="beta", node_group=BETA)
    found = rig.turn()
    assert [worker_of(found[one]) for one in (shared, acme, beta)] == ["w0", "w1", "w2"]


def test_what_has_no_room_on_its_nodes_waits_although_others_have_room() -> None:
    rig = rig_of("", ACME)
    first = rig.ask(10, node_group=ACME)
    assert worker_of(rig.turn()[first]) == "w1"
    waits, shared = rig.ask(4, node_group=ACME), rig.ask(4, tenant="other")
    found = rig.turn()
    assert waits not in found
    assert worker_of(found[shared]) == "w0", "one that waits for its nodes holds up nobody"
    rig.free(1, 10)
    assert worker_of(rig.turn()[waits]) == "w1"


def test_the_loss_of_the_last_node_refuses_by_name_or_waits_as_the_tenant_chose() -> None:
    rig = rig_of("", ACME)
    rig.ask(1, node_group=ACME)
    rig.turn()
    rig.now_s += 3.0
    rig.report(0)
    rig.queue.touch(rig.fleet.close_stream(1))
    refused, waits = rig.ask(1, node_group=ACME), rig.ask(1, node_group=ACME, isolation_waits=True, ttl=9.0)
    found = rig.turn()
    assert isinstance(found[refused], IsolationUnavailable)
    assert "dedicated/acme" in str(found[refused])
    assert waits not in found
    rig.report(1)
    assert worker_of(rig.turn()[waits]) == "w1"


def test_one_that_waited_in_vain_is_refused_by_name() -> None:
    rig = rig_of("")
    rig.turn()
    waits = rig.ask(1, node_group=ACME, isolation_waits=True, ttl=2.0)
    assert not rig.turn()
    rig.now_s += 2.0
    assert isinstance(rig.turn()[waits], IsolationUnavailable)


def test_a_new_leader_lets_its_workers_report_before_it_refuses() -> None:
    rig = rig_of("")
    early = rig.ask(1, node_group=ACME, ttl=10.0)
    assert not rig.turn()
    rig.groups[0] = ACME
    rig.report(0)
    assert worker_of(rig.turn()[early]) == "w0"


def test_a_shared_request_does_not_start_on_the_only_node_with_room_which_is_assigned() -> None:
    rig = rig_of(ACME)
    waits = rig.ask(1)
    assert not rig.turn()
    rig.groups[0] = ""
    rig.report(0)
    assert worker_of(rig.turn()[waits]) == "w0"


def test_a_search_in_vain_for_one_group_does_not_stand_for_another() -> None:
    rig = rig_of(ACME, *[""] * 9)
    rig.ask(10, node_group=ACME)
    rig.turn()
    waits, shared = rig.ask(4, node_group=ACME), rig.ask(4, tenant="other")
    found = rig.turn()
    assert waits not in found
    assert worker_of(found[shared]) != "w0"


GROUPS = st.sampled_from(["", ACME, BETA])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(GROUPS, min_size=1, max_size=4),
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), GROUPS, st.integers(1, 9)),
            st.tuples(st.just("assign"), GROUPS, st.integers(0, 3)),
            st.tuples(st.just("free"), GROUPS, st.integers(0, 3)),
            st.tuples(st.just("turn"), GROUPS, st.integers(0, 3)),
        ),
        max_size=30,
    ),
)
def test_no_grant_is_ever_on_a_node_of_another_group(
    groups: list[str], operations: list[tuple[str, str, int]]
) -> None:
    rig, asked = rig_of(*groups), {}
    for kind, group, number in [*operations, ("turn", "", 0)]:
        index = number % len(groups)
        if kind == "ask":
            tenant = group.partition("/")[2] or "other"
            asked[rig.ask(number, tenant=tenant, node_group=group, isolation_waits=True)] = group
        elif kind == "assign":
            rig.groups[index] = group
            rig.report(index)
        elif kind == "free":
            rig.free(index, rig.reserved[index])
        else:
            for placement, found in rig.turn().items():
                if isinstance(found, Grant):
                    assert rig.groups[int(found.worker_id[1:])] == asked[placement]
