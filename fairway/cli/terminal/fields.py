"""One resource for a reader: a line per field that is set, parts indented; documents have all fields."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.cli.terminal.cells import duration, enum_name, moment, show_bytes
from fairway.cli.terminal.money import show_money

_FIRST: Final = ("name", "model", "digest")
_LAST: Final = ("labels", "create_time", "update_time", "etag")
_STEP: Final = "  "


def lines_of(message: Message, indent: str = "") -> Iterator[str]:
    """Yield `name: value` lines: the name first, then the fields as the proto orders them, times last."""
    found = [(field, value) for field, value in message.ListFields() if field.name != "metadata"]
    metadata = getattr(message, "metadata", None)
    if isinstance(metadata, Message):
        found = [*metadata.ListFields(), *found]
    found.sort(key=lambda each: _place(each[0].name))
    for field, value in found:
        yield from _field(field, value, indent)


def _place(name: str) -> int:
    return _LAST.index(name) + 1 if name in _LAST else -(name in _FIRST)


def _field(field: FieldDescriptor, value: Any, indent: str) -> Iterator[str]:
    name = field.name.removesuffix("_micros").removesuffix("_bytes").replace("_", " ")
    label = f"{indent}{name}:"
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        yield f"{label} " + ", ".join(f"{key}={value[key]}" for key in sorted(value))
    elif not field.is_repeated:
        yield from _one(field, value, label, indent)
    elif field.message_type is None:
        yield f"{label} " + ", ".join(_text(field, each) for each in value)
    else:
        yield label
        for each in value:
            lines = list(lines_of(each, indent + 2 * _STEP))
            yield from (f"{indent}{_STEP}- {line.lstrip()}" for line in lines[:1])
            yield from lines[1:]


def _one(field: FieldDescriptor, value: Any, label: str, indent: str) -> Iterator[str]:
    if isinstance(value, Message) and not isinstance(value, Timestamp | Duration):
        yield label
        yield from lines_of(value, indent + _STEP)
    else:
        yield f"{label} {_text(field, value)}"


def _text(field: FieldDescriptor, value: Any) -> str:
    if isinstance(value, Timestamp):
        return moment(value)
    if isinstance(value, Duration):
        return duration(value)
    if field.enum_type is not None:
        names = zip(*(each.name for each in field.enum_type.values), strict=False)
        prefix = "".join(each[0] for each in takewhile(lambda each: len({*each}) == 1, names))
        numbers = field.enum_type.values_by_number
        return enum_name(lambda number: numbers[number].name, value, prefix)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and field.name.endswith("_micros"):
        return show_money(value)
    if isinstance(value, int) and field.name.endswith(("_bytes", "size")):
        return show_bytes(value)
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join((value.hex() if isinstance(value, bytes) else str(value)).split())
