"""Options shared by several commands, each with one name, one meaning and one help text."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from fairway.cli import completion
from fairway.cli.terminal.cells import parse_moment, parse_money, parse_span
from fairway.v1 import common_pb2
from fairway.v1.controlplane_pb2 import Isolation, KeyRole, Metadata


class Format(StrEnum):
    """The output format of a result."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


class PriorityName(StrEnum):
    BATCH = "batch"
    STANDARD = "standard"
    INTERACTIVE = "interactive"

    @property
    def proto(self) -> common_pb2.Priority.ValueType:
        return common_pb2.Priority.Value(f"PRIORITY_{self.name}")


class IsolationName(StrEnum):
    PACKED = "packed"
    PARTITIONED = "partitioned"
    DEDICATED = "dedicated"

    @property
    def proto(self) -> Isolation.ValueType:
        return Isolation.Value(f"ISOLATION_{self.name}")


class RoleName(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"
    AUDITOR = "auditor"
    ADMIN = "admin"
    TENANT_ADMIN = "tenant-admin"
    TENANT = "tenant"

    @property
    def proto(self) -> KeyRole.ValueType:
        return KeyRole.Value(f"KEY_ROLE_{self.name}")

    @property
    def of_tenant(self) -> bool:
        return self in (RoleName.TENANT, RoleName.TENANT_ADMIN)


def span_s(text: str | float) -> float:
    """Return an option's span in seconds. Raises BadParameter."""
    try:
        return parse_span(str(text))
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def timeout_s(text: str | float) -> float:
    """Return an option's time limit in seconds, above 0. Raises BadParameter."""
    seconds = span_s(text)
    if not seconds:
        raise typer.BadParameter("a time limit is above 0")
    return seconds


def parse_future(text: str) -> datetime:
    """Return an option's moment; a span counts from now on."""
    return _moment(text, past=False)


def parse_past(text: str) -> datetime:
    """Return an option's moment; a span counts back from now."""
    return _moment(text, past=True)


def money(text: str | int) -> int:
    """Return an option's amount in millionths. Raises BadParameter."""
    try:
        return parse_money(str(text))
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def key_values(texts: list[str] | None, *, flag: str) -> dict[str, str]:
    """Return `key=value` options as a mapping. Raises BadParameter for another form."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{text!r} is not of the form key=value", param_hint=flag)
        found[key] = value
    return found


def replace_labels(metadata: Metadata, texts: list[str] | None) -> None:
    """Replace all labels by those of `--label`; None, without the option: keep them."""
    if texts is not None:
        metadata.labels.clear()
        metadata.labels.update(key_values(texts, flag="--label"))


def optional(kind: Any, flag: str, help_: str, **settings: Any) -> object:
    """Return an option of an OptionGroup, which its command receives only if it was given."""
    return Annotated[kind | None, typer.Option(flag, help=help_, **settings)]


def optional_span(flag: str, help_: str, metavar: str = "SPAN") -> object:
    """Return an option that is a time span, in seconds."""
    return optional(float, flag, help_, parser=span_s, metavar=metavar)


def optional_money(flag: str, help_: str) -> object:
    """Return an option that is an amount, in millionths."""
    return optional(int, flag, help_, parser=money, metavar="AMOUNT")


def _moment(text: str, *, past: bool) -> datetime:
    try:
        return parse_moment(text, now=datetime.now(UTC), past=past)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


NameArgument = Annotated[
    str,
    typer.Argument(help="Lower-case letters, digits, hyphens and dots.", autocompletion=completion.names),
]
OutputOption = Annotated[Format, typer.Option("--output", "-o", help="Output format.")]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Print every further change, until Ctrl-C.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
EtagOption = Annotated[
    str, typer.Option("--etag", help="Apply only if this is still its etag (see `show -o json`).")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Return once it is done, or report why it is not.")]
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label. Repeatable.")
]
