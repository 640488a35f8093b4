"""Tables and files of usage records."""

from __future__ import annotations

import csv
import io

import pytest
import typer
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.cli.commands.usage import _grouping, columns_of, csv_of, lines_of, names_of, rows_of
from fairway.cli.terminal.table import table_of
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import usage_pb2

HOUR = Timestamp(seconds=1_800_000_000)
RECORDS = [
    cp.UsageRecord(
        tenant="acme",
        hour=HOUR,
        requests=60,
        prompt_tokens=3480,
        cached_tokens=2832,
        output_tokens=2302,
        device_us=6_400_000,
        list_cost_micros=5194,
        measured_cost_micros=2145,
        labels={"cost-centre": "vision, lab"},
        source=usage_pb2.USAGE_SOURCE_GATEWAY,
    ),
    cp.UsageRecord(
        tenant="acme",
        hour=HOUR,
        requests=1,
        output_tokens=8,
        list_cost_micros=6,
        source=usage_pb2.USAGE_SOURCE_WORKER,
    ),
    cp.UsageRecord(
        hour=HOUR, device_us=96_900_000, measured_cost_micros=32_313, source=usage_pb2.USAGE_SOURCE_IDLE
    ),
]


def test_rows_are_summed_over_sources_with_an_idle_line_and_a_total() -> None:
    lines = lines_of(RECORDS, ["tenant"])
    assert [(line.names, line.record.requests, line.record.device_us) for line in lines] == [
        (("(idle)",), 0, 96_900_000),
        (("acme",), 61, 6_400_000),
        (("total",), 61, 103_300_000),
    ]


@pytest.mark.parametrize("names", [["tenant"], ["day", "tenant"], ["hour", "tenant", "model"]])
def test_tables_fit_eighty_columns(names: list[str]) -> None:
    table = table_of(columns_of(names), lines_of(RECORDS, names), width=80)
    assert str(table.columns[0].header) == names[0].upper()
    assert {"LIST", "MEASURED"} <= {str(column.header) for column in table.columns}


def test_csv_has_a_row_per_record_and_money_with_decimals() -> None:
    names = names_of(["cost-centre"])
    rows = list(csv.DictReader(io.StringIO(csv_of(rows_of(RECORDS, ["cost-centre"]), names))))
    assert len(rows) == 3
    assert rows[0]["label:cost-centre"] == "vision, lab"
    assert rows[0]["time"] == "2027-01-15T08:00:00Z"
    assert (float(rows[0]["list_cost"]), float(rows[0]["device_seconds"])) == (0.005194, 6.4)
    assert [row["source"] for row in rows] == ["gateway", "worker", "idle"]


def test_what_can_be_grouped_by() -> None:
    found = _grouping(["day", "label:team", "user", "tenant"])
    assert found.dimensions == (cp.USAGE_DIMENSION_TENANT, cp.USAGE_DIMENSION_USER)
    assert (found.labels, found.granularity) == (("team",), cp.USAGE_GRANULARITY_DAY)
    for wrong in (["week"], ["day", "hour"]):
        with pytest.raises(typer.BadParameter):
            _grouping(wrong)
