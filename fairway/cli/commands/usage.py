"""`fairway usage`: what was used, and what it cost."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, LabelOption, key_values, parse_past
from fairway.cli.terminal.cells import enum_name, moment, show_money
from fairway.cli.terminal.formats import document_of, write_document
from fairway.cli.terminal.output import out, plain
from fairway.cli.terminal.table import Column, show_rows
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


_LABEL: Final = "label:"
_NAMES: Final = {
    usage_pb2.USAGE_SOURCE_IDLE: "(idle)",
    usage_pb2.USAGE_SOURCE_UNATTRIBUTED: "(unattributed)",
}
_DIMENSIONS: Final = ("tenant", "key", "user", "model", "version")
_GRANULARITIES: Final = {"hour": cp.USAGE_GRANULARITY_HOUR, "day": cp.USAGE_GRANULARITY_DAY}


class UsageFormat(StrEnum):
    """The output format of usage records."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Grouping:
    """By what records are summed, in the order of the options."""

    names: tuple[str, ...]
    dimensions: tuple[cp.UsageDimension.ValueType, ...]
    labels: tuple[str, ...]
    granularity: cp.UsageGranularity.ValueType


@dataclass(slots=True)
class UsageLine:
    """A row of the table: its names, and the sum of the records that have them."""

    names: tuple[str, ...]
    record: cp.UsageRecord = field(default_factory=cp.UsageRecord)

    def add(self, record: cp.UsageRecord) -> None:
        for name in _SUMMED:
            setattr(self.record, name, getattr(self.record, name) + getattr(record, name))


_SUMMED: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "device_us",
    "list_cost_micros",
    "measured_cost_micros",
)


_Tenant = Annotated[
    str, typer.Option("--tenant", help="Only this tenant.", autocompletion=completion.tenants)
]
_Key = Annotated[str, typer.Option("--key", help="Only requests with this key.")]
_User = Annotated[str, typer.Option("--user", help="Only requests of this end user.")]
_Model = Annotated[str, typer.Option("--model", help="Only this deployment.")]
_By = Annotated[
    list[str] | None,
    typer.Option(
        "--by",
        metavar="WHAT",
        help="Sum by tenant, key, user, model, version, day, hour or label:NAME. Repeatable.",
    ),
]
_Since = Annotated[
    datetime | None,
    typer.Option(
        "--since",
        parser=parse_past,
        metavar="WHEN",
        help="From then on: a time span such as 7d, or a time. Default: the start of the day, UTC.",
    ),
]
_Until = Annotated[
    datetime | None,
    typer.Option("--until", parser=parse_past, metavar="WHEN", help="Until then. Default: now."),
]
_Output = Annotated[UsageFormat, typer.Option("--output", "-o", help="Output format.")]


def add(app: typer.Typer) -> None:
    """Add the command `usage` to ``app``."""

    @command(
        app,
        "usage",
        to=Server.CONTROLPLANE,
        examples=(
            "fairway usage",
            "fairway usage --since 7d --by day --by tenant",
            "fairway usage --tenant acme --by label:cost-centre --by model",
            "fairway usage --since 30d --by day --by key -o csv > usage.csv",
        ),
    )
    async def usage(
        connection: Connection,
        tenant: _Tenant = "",
        key: _Key = "",
        user: _User = "",
        model: _Model = "",
        label: LabelOption = None,
        by: _By = None,
        since: _Since = None,
        until: _Until = None,
        output: _Output = UsageFormat.TABLE,
    ) -> None:
        """Show tokens, device time and cost, in whole hours. Records are complete after a few seconds.

        Cost is given at list price, and as measured: device time by the price of the device. --label selects
        requests by the labels of their keys.
        """
        groups = _grouping(by or ["tenant"])
        listing = connection.admin.usage.list(
            tenant=tenant,
            key=key,
            user=user,
            model=model,
            labels=key_values(label, flag="--label"),
            group_by=groups.dimensions,
            group_by_labels=groups.labels,
            granularity=groups.granularity,
            start_time=since,
            end_time=until,
        )
        _write(await checked(listing, what="cannot list the usage"), groups, output)


def _grouping(names: Sequence[str]) -> Grouping:
    """Return the grouping. Raises BadParameter."""
    labels = tuple(name.removeprefix(_LABEL) for name in names if name.startswith(_LABEL))
    plain_names = [name for name in names if not name.startswith(_LABEL)]
    times = [name for name in plain_names if name in _GRANULARITIES]
    unknown = [name for name in plain_names if name not in (*_DIMENSIONS, *_GRANULARITIES)]
    if unknown or len(times) > 1:
        what = f"{unknown[0]!r} is unknown" if unknown else "day and hour exclude each other"
        raise typer.BadParameter(what, param_hint="--by")
    dimensions = [cp.UsageDimension.Value(f"USAGE_DIMENSION_{name.upper()}") for name in _DIMENSIONS]
    return Grouping(
        tuple(dict.fromkeys(names)),
        tuple(number for name, number in zip(_DIMENSIONS, dimensions, strict=True) if name in plain_names),
        tuple(dict.fromkeys(labels)),
        _GRANULARITIES[times[0]] if times else cp.USAGE_GRANULARITY_UNSPECIFIED,
    )


def _write(records: Sequence[cp.UsageRecord], groups: Grouping, output: UsageFormat) -> None:
    if output in (UsageFormat.JSON, UsageFormat.YAML):
        write_document({"records": [document_of(record) for record in records]}, Format(output.value))
        return
    names = names_of(groups.labels)
    if output is UsageFormat.CSV:
        plain(out(), csv_of(rows_of(records, groups.labels), names), end="")
    elif output is UsageFormat.PARQUET:
        write_parquet(rows_of(records, groups.labels), names)
    else:
        show_rows(columns_of(groups.names), lines_of(records, groups.names), wide=output is UsageFormat.WIDE)


def lines_of(records: Sequence[cp.UsageRecord], names: Sequence[str]) -> list[UsageLine]:
    """Return the rows of the table, sorted by their names, and their total."""
    lines: dict[tuple[str, ...], UsageLine] = {}
    total = UsageLine(("total", *[""] * (len(names) - 1)))
    for record in records:
        key = tuple(_name(record, name) for name in names)
        lines.setdefault(key, UsageLine(key)).add(record)
        total.add(record)
    return [*(lines[key] for key in sorted(lines)), total]


def columns_of(names: Sequence[str]) -> tuple[Column[UsageLine], ...]:
    return (
        *(_named(at, name.removeprefix(_LABEL)) for at, name in enumerate(names)),
        Column("requests", lambda line: str(line.record.requests), drop=1),
        Column("input", lambda line: str(line.record.prompt_tokens), drop=3),
        Column("cached", lambda line: str(line.record.cached_tokens), drop=5),
        Column("output", lambda line: str(line.record.output_tokens), drop=2),
        Column("device s", lambda line: f"{line.record.device_us / 1e6:.1f}", drop=4),
        Column("list", lambda line: show_money(line.record.list_cost_micros)),
        Column("measured", lambda line: show_money(line.record.measured_cost_micros)),
    )


def _named(at: int, header: str) -> Column[UsageLine]:
    return Column(header, lambda line: line.names[at], key=True)


def _name(record: cp.UsageRecord, name: str) -> str:
    """Return what a record has for a dimension. Time of devices is named in the place of the tenant."""
    if name in _GRANULARITIES:
        return moment(record.hour) if name == "hour" else f"{record.hour.ToDatetime(tzinfo=UTC):%Y-%m-%d}"
    if name.startswith(_LABEL):
        found = record.labels.get(name.removeprefix(_LABEL), "")
    else:
        found = record.version_digest if name == "version" else str(getattr(record, name))
    return found or _NAMES.get(record.source, "-")
