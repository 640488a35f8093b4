"""Checks that every request field is within the bounds stated in the protos, before any handler runs.

The bounds are field options (``fairway/v1/options.proto``), compiled once per message type into a list of
checks. A field without bounds is a bug: a test finds it.

Those checks build a dotted path for each value, which an error names. A message that is within its bounds,
as nearly all are, needs none: one function per message type takes less than half the time. It returns False
where it is not sure, and the checks decide.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Callable, Sized
from functools import lru_cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from fairway.v1 import options_pb2
from services.core.errors import InvalidInput

Fits = Callable[[Message], bool]

INTEGERS: Final = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)
REALS: Final = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
DURATION: Final = "google.protobuf.Duration"
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_MAX_DEPTH: Final = 16
_STRINGS: Final = (FieldDescriptor.CPPTYPE_STRING,)
_WELL_KNOWN: Final = (DURATION, "google.protobuf.Timestamp")

ValueCheck = Callable[[Any, str], None]
FieldCheck = Callable[[Message, str], None]


def fits(message: Message) -> bool:
    """Return True only if every field, at every depth, is within its bounds."""
    return _compiled(message.DESCRIPTOR)(message)


@lru_cache(maxsize=1024)
def _compiled(descriptor: Descriptor) -> Fits:
    """Return the check of a type, which must not contain itself."""
    scope: dict[str, Any] = {"isfinite": math.isfinite}
    lines = ["def fits(m):"]
    for number, field in enumerate(descriptor.fields):
        lines += [f"    {line}" for line in _lines(field, number, scope)]
    lines.append("    return True")
    exec("\n".join(lines), scope)
    found: Fits = scope["fits"]
    return found


def _lines(field: FieldDescriptor, number: int, scope: dict[str, Any]) -> list[str]:
    """Return the statements that check one field. They return False at the first value out of bounds."""
    bounds = field.GetOptions().Extensions[options_pb2.bounds]
    name, found = field.name, []
    if bounds.required:
        there = f"m.HasField({name!r})" if field.has_presence else f"m.{name}"
        found.append(f"if not {there}: return False")
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return [*found, f"if len(m.{name}): return False"]
    refusal = _refusal(field, bounds, number, scope)
    if field.is_repeated:
        found += [f"vs = m.{name}", f"if len(vs) > {bounds.max_items}: return False"]
        if refusal and not (field.cpp_type in INTEGERS and bounds.any):
            found += ["for v in vs:", f"    if {refusal}: return False"]
    elif refusal and field.has_presence:
        found += [f"if m.HasField({name!r}):", f"    v = m.{name}", f"    if {refusal}: return False"]
    elif refusal:
        found += [f"v = m.{name}", f"if {refusal}: return False"]
    return found


def _refusal(field: FieldDescriptor, bounds: options_pb2.Bounds, number: int, scope: dict[str, Any]) -> str:
    """Return an expression that is true for a value ``v`` out of bounds; empty: every value is within."""
    low = repr(bounds.min) if bounds.HasField("min") else "float('-inf')"
    high = repr(bounds.max) if bounds.HasField("max") else "float('inf')"
    message = field.message_type
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        longer = f"len(v) > {bounds.max_bytes}"
        if field.type == FieldDescriptor.TYPE_BYTES:
            return "v" if bounds.pattern else longer  # empty, or it is not sure
        longer = f"({longer} or not (v.isascii() or len(v) * 4 <= {bounds.max_bytes}))"
        if not bounds.pattern:
            return longer
        scope[f"matches_{number}"] = re.compile(bounds.pattern).fullmatch
        return f"{longer} or (v and not matches_{number}(v))"
    if field.cpp_type in REALS:
        # A bound is compared as a double here: a float that equals it may be refused, and then is not sure.
        return f"not (isfinite(v) and {low} <= v <= {high})"
    if field.cpp_type in INTEGERS:
        return "" if bounds.any else f"not {low} <= v <= {high}"
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        scope[f"known_{number}"] = frozenset(field.enum_type.values_by_number)
        return f"v not in known_{number}"
    if message is None or message.full_name == _TIMESTAMP:
        return ""
    if message.full_name == DURATION:
        least = low if bounds.HasField("min") else "0.0"
        return f"not {least} <= v.seconds + v.nanos / 1e9 <= {bounds.max!r}"
    scope[f"fits_{number}"] = _compiled(message)
    return f"not fits_{number}(v)"


def check(message: Message, path: str = "") -> None:
    """Return if every field, at every depth, is within its bounds; longer ``hashed`` ones are hashed first.

    Raises InvalidInput for the first that is not; its metadata has ``field``, a dotted path.
    """
    if fits(message):
        return
    for _, field_check in _named_checks(message.DESCRIPTOR):
        field_check(message, path)


def check_but(message: Message, *entries: str) -> None:
    """Check every field, but of the repeated fields ``entries`` only the number of elements."""
    most, checks = _checks_but(message.DESCRIPTOR, entries)
    for name, max_items in most:
        _check_count(getattr(message, name), max_items, name)
    for field_check in checks:
        field_check(message, "")


@lru_cache(maxsize=64)
def _checks_but(
    descriptor: Descriptor, entries: tuple[str, ...]
) -> tuple[tuple[tuple[str, int], ...], tuple[FieldCheck, ...]]:
    """Return the most elements of each of the fields, and the checks of the other fields."""
    most = tuple((name, _bounds(descriptor.fields_by_name[name]).max_items) for name in entries)
    return most, tuple(check for name, check in _named_checks(descriptor) if name not in entries)


def _check_count(values: Sized, max_items: int, path: str) -> None:
    if len(values) > max_items:
        raise _fail(path, f"has {len(values)} elements; at most {max_items} are taken")


def _bounds(field: FieldDescriptor) -> options_pb2.Bounds:
    return field.GetOptions().Extensions[options_pb2.bounds]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _value_field(field: FieldDescriptor) -> FieldDescriptor:
    """Return the field that describes an element: itself, or the value of a map."""
    return _entry_field(field, "value") if _is_map(field) else field


def _entry_field(field: FieldDescriptor, name: str) -> FieldDescriptor:
    assert field.message_type is not None
    return field.message_type.fields_by_name[name]


@lru_cache(maxsize=1024)
def _named_checks(descriptor: Descriptor) -> tuple[tuple[str, FieldCheck], ...]:
    """Return the checks of a message type, each with the name of its field."""
    found: list[tuple[str, FieldCheck]] = []
    for field in descriptor.fields:
        bounds = _bounds(field)
        if bounds.required:
            found.append((field.name, _required(field)))
        value_check = _value_check(_value_field(field), bounds)
        if _is_map(field):
            found.append((field.name, _map_check(field, bounds, value_check)))
        elif field.is_repeated:
            found.append((field.name, _repeated_check(field, bounds, value_check)))
        elif bounds.hashed:
            found.append((field.name, _hashing(field, bounds.max_bytes)))
        elif value_check is not None:
            found.append((field.name, _singular_check(field, value_check)))
    return tuple(found)


def _fail(path: str, text: str) -> InvalidInput:
    return InvalidInput(f"{path} {text}", field=path)


def _plain(value: float) -> str:
    """Format whole numbers with all their digits, others in short form."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:g}"


def _required(field: FieldDescriptor) -> FieldCheck:
    name, has_presence = field.name, field.has_presence

    def check_required(message: Message, path: str) -> None:
        if not (message.HasField(name) if has_presence else getattr(message, name)):
            raise _fail(path + name, "is required")

    return check_required


def _singular_check(field: FieldDescriptor, value_check: ValueCheck) -> FieldCheck:
    name, has_presence = field.name, field.has_presence

    def check_singular(message: Message, path: str) -> None:
        if not has_presence or message.HasField(name):
            value_check(getattr(message, name), path + name)

    return check_singular


def _hashing(field: FieldDescriptor, max_bytes: int) -> FieldCheck:
    name = field.name

    def hash_longer(message: Message, _: str) -> None:
        value = getattr(message, name).encode()
        if len(value) > max_bytes:
            setattr(message, name, hashlib.sha256(value).hexdigest())

    return hash_longer


def _repeated_check(
    field: FieldDescriptor, bounds: options_pb2.Bounds, value_check: ValueCheck | None
) -> FieldCheck:
    name, max_items = field.name, bounds.max_items
    if field.cpp_type in INTEGERS and bounds.any:  # token ids: the type is the bound
        value_check = None

    def check_repeated(message: Message, path: str) -> None:
        values = getattr(message, name)
        _check_count(values, max_items, path + name)
        if value_check is not None:
            for index, value in enumerate(values):
                value_check(value, f"{path}{name}[{index}]")

    return check_repeated


def _map_check(
    field: FieldDescriptor, bounds: options_pb2.Bounds, value_check: ValueCheck | None
) -> FieldCheck:
    name, max_items = field.name, bounds.max_items
    key = _entry_field(field, "key")
    key_check = _string_check(bounds) if key.cpp_type in _STRINGS else None

    def check_map(message: Message, path: str) -> None:
        values = getattr(message, name)
        if len(values) > max_items:
            raise _fail(path + name, f"has {len(values)} entries; at most {max_items} are taken")
        for map_key in values:
            if key_check is not None:
                key_check(map_key, f"{path}{name} key")
            if value_check is not None:
                value_check(values[map_key], f"{path}{name}[{str(map_key)[:32]}]")

    return check_map


def _value_check(field: FieldDescriptor, bounds: options_pb2.Bounds) -> ValueCheck | None:
    if field.cpp_type in _STRINGS:
        return _string_check(bounds)
    if field.cpp_type in REALS:
        return _number_check(bounds, real=True, single=field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT)
    if field.cpp_type in INTEGERS:
        return None if bounds.any else _number_check(bounds, real=False)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return _enum_check(field)
    if field.message_type is not None and field.message_type.full_name == DURATION:
        return _duration_check(bounds)
    if field.message_type is not None and field.message_type.full_name not in _WELL_KNOWN:
        return _message_check
    return None


def _message_check(value: Message, path: str) -> None:
    if path.count(".") >= _MAX_DEPTH:
        raise _fail(path, f"is nested deeper than {_MAX_DEPTH} levels")
    check(value, path + ".")


def _string_check(bounds: options_pb2.Bounds) -> ValueCheck:
    max_bytes = bounds.max_bytes
    pattern = re.compile(bounds.pattern) if bounds.pattern else None

    def check_string(value: str | bytes, path: str) -> None:
        # A code point takes at most four bytes: most strings are decided without encoding them.
        size = len(value) if isinstance(value, bytes) else len(value) * 4
        if size > max_bytes and isinstance(value, str):
            size = len(value) if len(value) > max_bytes else len(value.encode())
        if size > max_bytes:
            raise _fail(path, f"is longer than {max_bytes} bytes")
        if pattern is not None and value and not pattern.fullmatch(str(value)):
            raise _fail(path, f"does not match {pattern.pattern}")

    return check_string


def _number_check(bounds: options_pb2.Bounds, *, real: bool, single: bool = False) -> ValueCheck:
    low = bounds.min if bounds.HasField("min") else -math.inf
    high = bounds.max if bounds.HasField("max") else math.inf
    if single:  # 0.01 as float32 is less than as float64, but equals the bound
        low, high = struct.unpack("ff", struct.pack("ff", low, high))

    def check_number(value: float, path: str) -> None:
        if real and not math.isfinite(value):
            raise _fail(path, "is not a finite number")
        if not low <= value <= high:
            raise _fail(path, f"is {_plain(value)}; it must be from {_plain(low)} to {_plain(high)}")

    return check_number


def _enum_check(field: FieldDescriptor) -> ValueCheck:
    assert field.enum_type is not None
    name, known = field.enum_type.name, frozenset(field.enum_type.values_by_number)

    def check_enum(value: int, path: str) -> None:
        if value not in known:
            raise _fail(path, f"is {value}, which is no value of {name}")

    return check_enum


def _duration_check(bounds: options_pb2.Bounds) -> ValueCheck:
    low = bounds.min if bounds.HasField("min") else 0.0
    high = bounds.max

    def check_duration(value: Any, path: str) -> None:
        seconds = value.seconds + value.nanos / 1e9
        if not low <= seconds <= high:
            raise _fail(path, f"is {seconds:g} s; it must be from {low:g} to {high:g} s")

    return check_duration
