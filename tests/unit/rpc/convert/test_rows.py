"""A row and its end arrive as they were sent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fairway.v1 import worker_pb2
from services.core.errors import DeadlineUnmeetable, FairwayError, InvalidInput, PoisonedInput, QueueFull
from services.core.fixed_cost.rows import RawTensor, RowEnd, RowSpec
from services.core.records import Priority
from services.rpc import bounds
from services.rpc.convert.rows import row_end_from_proto, row_end_to_proto, row_from_proto, row_to_proto

short = st.text(st.characters(codec="utf-8"), max_size=8)
uint64 = st.integers(0, 2**64 - 1)
tensors = st.lists(
    st.builds(
        RawTensor,
        name=short,
        datatype=st.sampled_from(["FP32", "INT64"]),
        shape=st.lists(st.integers(0, 2**30), max_size=3).map(tuple),
        data=st.binary(max_size=16),
    ),
    max_size=3,
).map(tuple)
micros = st.integers(0, 2**40).map(lambda us: us / 1e6)
rows = st.builds(
    RowSpec,
    request_id=short,
    row=st.integers(0, 65535),
    tenant_id=short,
    version_digest=short,
    inputs=tensors,
    priority=st.sampled_from(Priority),
    route_revision=uint64,
    incarnation=uint64,
    epoch=uint64,
    time_left_s=st.integers(0, 86_400 * 64).map(lambda parts: parts / 64),  # exact as nanoseconds too
    traceparent=short,
    target_s=st.integers(0, 3_600_000).map(lambda ms: ms / 1000),
    waited_s=st.integers(0, 86_400_000).map(lambda ms: ms / 1000),
)
ends = st.builds(
    RowEnd,
    outputs=tensors,
    lost=st.booleans(),
    device_s=micros,
    wait_s=micros,
    batch_rows=st.integers(0, 2**32 - 1),
    batch_cause=short,
)


@settings(deadline=None)
@given(uint64, rows)
def test_a_row_arrives_as_it_was_sent(handle: int, spec: RowSpec) -> None:
    message = worker_pb2.StartRow.FromString(row_to_proto(handle, spec).SerializeToString())
    assert message.handle == handle
    assert row_from_proto(message) == spec


@settings(deadline=None)
@given(uint64, ends)
def test_the_end_of_a_row_arrives_as_it_was_sent(handle: int, end: RowEnd) -> None:
    message = worker_pb2.RowFinished.FromString(row_end_to_proto(handle, end).SerializeToString())
    assert message.handle == handle
    assert row_end_from_proto(message) == end


@pytest.mark.parametrize("kind", [InvalidInput, QueueFull, DeadlineUnmeetable, PoisonedInput])
def test_the_error_of_a_row_keeps_its_class_and_text(kind: type[FairwayError]) -> None:
    found = row_end_from_proto(row_end_to_proto(1, RowEnd(error=kind("why"))))
    assert type(found.error) is kind
    assert found.error.message == "why"
    assert structs.replace(found, error=None) == RowEnd()


@pytest.mark.parametrize("metadata", [{"deaths": 3}, {"deaths": 0}, {}])
def test_a_condemned_row_arrives_with_the_processes_that_it_ended(metadata: dict[str, int]) -> None:
    error = PoisonedInput("why", **metadata)
    message = worker_pb2.RowFinished.FromString(row_end_to_proto(1, RowEnd(error=error)).SerializeToString())
    found = row_end_from_proto(message).error
    assert found is not None
    assert found.metadata == error.metadata


def test_the_smallest_time_left_is_not_none_at_all() -> None:
    spec = RowSpec("r", 0, "t", "v", (), Priority.BATCH, time_left_s=1e-12)
    assert row_from_proto(row_to_proto(1, spec)).time_left_s > 0


def test_a_target_is_within_its_bounds_and_never_none_at_all() -> None:
    spec = RowSpec("r", 0, "t", "v", (), Priority.BATCH, target_s=1e-6, waited_s=1e6)
    message = row_to_proto(1, spec)
    bounds.check(message, "row.")
    found = row_from_proto(message)
    assert (found.target_s, found.waited_s) == (0.001, 86_400.0)


def test_a_row_out_of_bounds_is_found_alone() -> None:
    request = worker_pb2.ExecuteRequest(rows=[worker_pb2.StartRow(handle=1)])
    bounds.check_but(request, "starts", "rows")
    with pytest.raises(InvalidInput):
        bounds.check(request.rows[0], "row.")
    with pytest.raises(InvalidInput):
        bounds.check_but(worker_pb2.ExecuteRequest(rows=[worker_pb2.StartRow()] * 4097), "starts", "rows")
