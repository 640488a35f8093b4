"""Errors, times and bounds of rows on the wire."""

from __future__ import annotations

import pytest
from msgspec import structs

from fairway.v1 import worker_pb2
from services.core.errors import DeadlineUnmeetable, FairwayError, InvalidInput, PoisonedInput, QueueFull
from services.core.fixed_cost.rows import RowEnd, RowSpec
from services.core.records import Priority
from services.rpc import bounds
from services.rpc.convert.rows import row_end_from_proto, row_end_to_proto, row_from_proto, row_to_proto


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
