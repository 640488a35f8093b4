"""Nothing is lost or changed on the way through the wire's messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairway.v1 import scheduler_pb2
from services.core.errors import InvalidInput, QueueFull, QueueTimeout
from services.core.fixed_cost.explained import RowsExplanation, RowTrip
from services.core.fixed_cost.rows import BatchWindow
from services.core.fixed_cost.slots import SlotDemand, SlotLease, SlotReturn
from services.core.fleet import (
    PlacementFrame,
    PlacementRefused,
    PoolMember,
    PoolPressure,
    PoolSnapshot,
    ReportedSequence,
    ReportSnapshot,
    SequenceUsage,
    TenantCounter,
    TenantTokens,
)
from services.core.generation import Grant, PlaceSpec
from services.core.records import Priority
from services.rpc.bounds import check
from services.rpc.convert import scheduler as convert

U32, U64 = st.integers(0, 1 << 20), st.integers(0, (1 << 64) - 1)
TOKENS = st.integers(0, 10**12)
NAME = st.text("abcdef0123456789-", min_size=1, max_size=20)
TTL = st.integers(0, 3_600_000).map(lambda ms: ms / 1000)
PRIORITY = st.sampled_from(list(Priority))
HASHES = st.lists(U64, max_size=5).map(tuple)

places = st.builds(
    PlaceSpec,
    request_id=NAME,
    choice=st.integers(0, 15),
    tenant_id=NAME,
    priority=PRIORITY,
    model=NAME,
    version_digest=NAME,
    route_revision=U64,
    prompt_tokens=U32,
    max_output_tokens=st.integers(1, 1 << 20),
    arrival_unix_us=U64,
    queue_ttl_s=TTL,
    ticket=st.binary(min_size=1, max_size=64),
    excluded_workers=st.lists(NAME, max_size=3).map(tuple),
    prefix_hashes=HASHES,
    deadline_left_s=st.none() | st.integers(1, 86_400_000).map(lambda ms: ms / 1000),
    tenant_weight=st.floats(0.001, 1e6),
    attempt=st.integers(0, 1000),
    ttft_target_s=st.none() | st.integers(1, 3_600_000).map(lambda ms: ms / 1000),
    over_quota=st.booleans(),
    committed_tokens_per_minute=st.integers(0, 10**12),
    begun=st.booleans(),
)
grants = st.builds(
    Grant,
    worker_id=NAME,
    address=NAME,
    incarnation=U64,
    epoch=U64,
    sequence=U64,
    kv_blocks=U32,
    ttl_s=st.integers(0, 600_000).map(lambda ms: ms / 1000),
    version_digest=NAME,
    route_revision=U64,
)
pools = st.builds(
    PoolSnapshot,
    digest=NAME,
    kv_blocks_total=U32,
    kv_blocks_reserved=U32,
    block_size=st.integers(1, 4096),
    running=U32,
    waiting=U32,
    max_sequences=U32,
    max_model_len=U32,
    queued_prefill_tokens=U32,
    ready=st.booleans(),
    steps=U64,
    step_seconds=st.floats(0, 1e9),
    prefill_tokens=U64,
    decode_tokens=U64,
    attended_tokens=U64,
    long_prefills=U32,
    prefix_added=HASHES,
    prefix_removed=HASHES,
    prefix_shared=HASHES,
    prefix_unshared=HASHES,
)
reports = st.builds(
    ReportSnapshot,
    worker_id=NAME,
    incarnation=U64,
    address=NAME,
    zone=NAME,
    draining=st.booleans(),
    pools=st.lists(pools, max_size=3, unique_by=lambda pool: pool.digest).map(tuple),
    epoch=U64,
    grants_seen=st.lists(U64, max_size=5).map(tuple),
    tenants=st.lists(st.builds(TenantTokens, NAME, NAME, TOKENS, TOKENS, PRIORITY, TOKENS), max_size=3).map(
        tuple
    ),
    live=st.lists(
        st.builds(ReportedSequence, NAME, st.integers(0, 15), NAME, NAME, U32, PRIORITY, st.booleans()),
        max_size=3,
    ).map(tuple),
    usage=st.lists(
        st.builds(
            SequenceUsage,
            *(NAME, st.integers(0, 15), NAME, NAME, U32, U32, U32),
            ended=st.booleans(),
            placed_alone=st.booleans(),
            priority=PRIORITY,
        ),
        max_size=3,
    ).map(tuple),
    counters=st.lists(
        st.builds(TenantCounter, NAME, NAME, PRIORITY, st.floats(0, 1e12), st.floats(0, 1e12)), max_size=3
    ).map(tuple),
    device_type=NAME,
    cost_per_hour=st.floats(0, 1e6),
)


@given(number=U64, spec=places)
def test_a_placement_survives_and_is_within_bounds(number: int, spec: PlaceSpec) -> None:
    message = convert.place_to_proto(number, spec, spec.queue_ttl_s)
    check(message)
    wire = scheduler_pb2.PlaceRequest.FromString(message.SerializeToString())
    assert convert.place_from_proto(wire) == (number, spec)


@given(snapshot=reports)
def test_a_report_survives_and_is_within_bounds(snapshot: ReportSnapshot) -> None:
    message = convert.report_to_proto(snapshot, 3, full=True)
    check(message)
    wire = scheduler_pb2.ReportRequest.FromString(message.SerializeToString())
    assert wire.report == 3
    assert convert.report_from_proto(wire) == snapshot
    assert not convert.report_to_proto(snapshot, 4, full=False).live


def test_a_refusal_keeps_kind_text_and_time() -> None:
    refusals = [
        PlacementRefused(1, QueueFull("full", retry_after_s=1.5)),
        PlacementRefused(2, QueueTimeout("late")),
    ]
    frame = convert.frame_from_proto(convert.frame_to_proto(PlacementFrame(1, tuple(refusals))), 1)
    errors = [outcome.error for outcome in frame.outcomes if isinstance(outcome, PlacementRefused)]
    assert [(type(e), e.message, e.retry_after_s) for e in errors] == [
        (QueueFull, "full", 1.5),
        (QueueTimeout, "late", None),
    ]


def test_a_version_listed_twice_is_no_report() -> None:
    pool = scheduler_pb2.PoolReport(version_digest="d", block_size=16)
    with pytest.raises(InvalidInput):
        convert.report_from_proto(scheduler_pb2.ReportRequest(worker_id="w", pools=[pool, pool]))


def test_what_a_gateway_is_told_of_pools_survives() -> None:
    pressures = (PoolPressure("sha256:a", 0.25, 1.5),)
    members = (PoolMember("w1", "h:1", 7, "sha256:a", 640, 1280, 16, 3, 2048, row_slots=9),)
    message = convert.frame_to_proto(PlacementFrame(5, pressures=pressures, members=members))
    message.leadership.epoch = 5
    assert convert.frame_from_proto(message, 5) == PlacementFrame(5, pressures=pressures, members=members)


def test_a_message_that_is_no_heartbeat_says_nothing_of_pressure_and_workers() -> None:
    frame = convert.frame_from_proto(convert.frame_to_proto(PlacementFrame(5)), 5)
    assert (frame.pressures, frame.members) == (None, None)


demands = st.builds(SlotDemand, NAME, NAME, U32, st.floats(0.001, 1e6), PRIORITY)
returns = st.builds(SlotReturn, NAME, NAME, NAME, U64)
leases = st.builds(SlotLease, NAME, NAME, U64, U64, NAME, NAME, U32, TTL, U64)


@given(st.lists(demands, max_size=3), st.lists(returns, max_size=3))
def test_demands_and_returns_survive_and_are_within_bounds(
    wanted: list[SlotDemand], returned: list[SlotReturn]
) -> None:
    message = convert.slots_to_proto(wanted, returned, {})
    check(message)
    wire = scheduler_pb2.ConnectRequest.FromString(message.SerializeToString())
    assert convert.slots_from_proto(wire) == (wanted, returned)


def test_explanations_survive_and_are_within_bounds() -> None:
    window = BatchWindow(32, -0.001, 0.04, 0.03, 0.0, 7, 12.5, 3.0, 0.25)
    trips = (
        RowTrip(0, "w1", 7, 3, 16, 0.001, 0.02, outcome="LOST"),
        RowTrip(0, "w2", 7, 4, 16, 0.03, 0.02, 0.004, 7, "idle", window),
    )
    found = RowsExplanation("acme", "m", "sha256:1", Priority.STANDARD, 5.0, 1, 0.05, trips, "g1", 0.5)
    message = convert.slots_to_proto((), (), {"req_1": found, "req_2": None})
    check(message)
    wire = scheduler_pb2.ConnectRequest.FromString(message.SerializeToString())
    assert convert.explained_from_proto(wire) == {"req_1": found, "req_2": None}
    frame = PlacementFrame(5, questions=("req_1",))
    assert convert.frame_from_proto(convert.frame_to_proto(frame), 5) == frame
