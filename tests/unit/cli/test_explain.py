"""What ``fairway explain`` shows of a row: the objective that applied, and how its window was derived."""

from __future__ import annotations

from fairway.cli.commands.placements import ROWS, RowLine
from fairway.v1 import common_pb2
from fairway.v1 import scheduler_pb2 as pb


def cells(line: RowLine) -> dict[str, str]:
    return {column.header: column.cell(line) for column in ROWS}


def test_the_objective_that_applied_is_shown() -> None:
    window = common_pb2.BatchWindow(
        linger_s=0.02, objective_s=0.04, target_s=0.05, compute_s=0.015, transport_s=0.005, reached_rows=7
    )
    found = cells(RowLine(pb.RowsExplanation(target_s=2.0), pb.RowTrip(window=window)))
    assert found["objective"] == "2000.0 ms"
    assert found["window"].startswith(
        "20.0 ms = 40.0 ms left of 50.0 ms - 15.0 ms compute - 5.0 ms transport;"
    )
    assert cells(RowLine(pb.RowsExplanation(), pb.RowTrip()))["objective"] == "none"
