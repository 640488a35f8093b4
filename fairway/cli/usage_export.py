"""Usage records as CSV and Parquet, with the same columns."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.terminal.cells import enum_name
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import usage_pb2

MICROS: Final = 1_000_000
_TEXTS: Final = ("tenant", "key", "user", "model", "version_digest")
_COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")


def rows_of(records: Sequence[cp.UsageRecord], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per record. Money is in currency units, device time in seconds; times are UTC."""
    return [_row(record, labels) for record in records]


def csv_of(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({**row, "time": f"{row['time']:%Y-%m-%dT%H:%M:%SZ}"})
    return text.getvalue()


def write_parquet(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Write a Parquet file to stdout. Raises CliError without pyarrow, or when stdout is a terminal."""
    if sys.stdout.isatty():
        raise CliError(
            "BINARY_OUTPUT",
            "a Parquet file is not for a terminal",
            next_step="add `> usage.parquet`",
            exit_code=ExitCode.USAGE,
        )
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as exc:
        raise CliError(
            "PYARROW_MISSING",
            "Parquet files are written by pyarrow, which is not installed",
            next_step="install it with `pip install 'fairway[parquet]'`, or use -o csv",
        ) from exc
    columns = {name: [row[name] for row in rows] for name in names}
    schema = pyarrow.schema([(name, _type_of(name, pyarrow)) for name in names])
    parquet.write_table(pyarrow.table(columns, schema=schema), sys.stdout.buffer)


def names_of(labels: Sequence[str]) -> list[str]:
    """Return the names of the columns, in order."""
    money = ("device_seconds", "list_cost", "measured_cost")
    return ["time", *_TEXTS, *(f"label:{name}" for name in labels), "source", *_COUNTS, *money]


def _row(record: cp.UsageRecord, labels: Sequence[str]) -> dict[str, Any]:
    return {
        "time": datetime.fromtimestamp(record.hour.seconds, UTC),
        **{name: getattr(record, name) for name in (*_TEXTS, *_COUNTS)},
        **{f"label:{name}": record.labels.get(name, "") for name in labels},
        "source": enum_name(usage_pb2.UsageSource.Name, record.source, "USAGE_SOURCE_"),
        "device_seconds": record.device_us / 1e6,
        "list_cost": record.list_cost_micros / MICROS,
        "measured_cost": record.measured_cost_micros / MICROS,
    }


def _type_of(name: str, pyarrow: Any) -> Any:
    if name == "time":
        return pyarrow.timestamp("ms", tz="UTC")
    if name in _COUNTS:
        return pyarrow.uint64()
    if name in ("device_seconds", "list_cost", "measured_cost"):
        return pyarrow.float64()
    return pyarrow.string()
