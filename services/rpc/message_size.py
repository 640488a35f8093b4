"""Size limits of request messages, derived from the (bounds) of the protos and checked before decoding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from fairway.v1 import options_pb2
from services.core.errors import InvalidInput, OverQuota
from services.rpc.channel import MAX_MESSAGE_BYTES

MALFORMED: Final = "the request is not a valid message of this method"

_LEAST_BYTES: Final = 64 * 1024  # room for fields that a newer client sends
_LEAST_FIELDS: Final = 1024
_MOST_FIELDS: Final = 256 * 1024
# Of tenants' methods. A conversation of 2,048 turns has up to 128 calls in each of them, but not in all.
_MOST_TENANT_FIELDS: Final = 36 * 1024
# A field takes two bytes or more, so a shorter message cannot cost much and is not scanned.
_CHEAP_BYTES: Final = 32 * 1024
_TAG_BYTES: Final = 12  # largest size of a tag and a length; most take two
_STRINGS: Final = FieldDescriptor.CPPTYPE_STRING
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """``fields``: tags of one message at all depths; 0 for messages of services, which are trusted."""

    max_bytes: int
    fields: int = 0
    type: Descriptor | None = None


PUBLIC: Final = MessageLimits(4096)


def limits_of(method: Any) -> MessageLimits:
    """Return the size of the largest request within its field bounds, at most the transport's bound."""
    size, fields = _largest(method.input_type)
    access = list(method.GetOptions().Extensions[options_pb2.access])
    internal = access == [options_pb2.ACCESS_INTERNAL]
    most = _MOST_TENANT_FIELDS if options_pb2.ACCESS_TENANT in access else _MOST_FIELDS
    return MessageLimits(
        min(max(size, _LEAST_BYTES), MAX_MESSAGE_BYTES),
        0 if internal else min(2 * fields + _LEAST_FIELDS, most),
        method.input_type,
    )


def check_raw(raw: bytes, limits: MessageLimits) -> None:
    """Return if the encoded message is within its limits. Raises OverQuota (bytes) or InvalidInput."""
    if len(raw) > limits.max_bytes:
        raise OverQuota(f"the request is larger than {limits.max_bytes} bytes", max_bytes=limits.max_bytes)
    if limits.fields and len(raw) > _CHEAP_BYTES and limits.type is not None:
        try:
            _count_fields(raw, limits.type, limits.fields)
        except (DecodeError, IndexError):
            raise InvalidInput(MALFORMED) from None


@lru_cache(maxsize=1024)
def _largest(descriptor: Descriptor) -> tuple[int, int]:
    """Return bytes and tags of the largest message of a type, which must not contain itself."""
    size = fields = 0
    for field in descriptor.fields:
        bounds = field.GetOptions().Extensions[options_pb2.bounds]
        items = bounds.max_items if field.is_repeated else 1
        if field.message_type is not None:
            # A map's strings have the bounds of the map; its entries state none.
            entry = field.message_type.GetOptions().map_entry
            inner_size, inner_fields = _largest(field.message_type)
            size += items * (inner_size + _TAG_BYTES + (2 * bounds.max_bytes if entry else 0))
            fields += items * (inner_fields + 1)
        elif field.cpp_type == _STRINGS:
            size, fields = size + items * (bounds.max_bytes + _TAG_BYTES), fields + items
        else:  # a repeated number is one field: every encoder packs it
            size, fields = size + items * _TAG_BYTES, fields + 1
    return size, fields


Table = dict[int, Any]


@lru_cache(maxsize=1024)
def _table(descriptor: Descriptor) -> Table:
    """Return the types of the fields that are messages, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


def _count_fields(raw: bytes, descriptor: Descriptor, most: int) -> None:
    """Return if the message has at most ``most`` tags at all depths. Strings and numbers are skipped."""
    position, end, table = 0, len(raw), _table(descriptor)
    outer: list[tuple[int, Table]] = []
    left = most
    while True:
        while position >= end:
            if not outer:
                return
            end, table = outer.pop()
        left -= 1
        if left < 0:
            raise InvalidInput(f"the request has more than {most} fields and elements", max_fields=most)
        tag, position = _varint(raw, position)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = _varint(raw, position)
            if position + length > end:
                raise DecodeError(MALFORMED)
            inner = table.get(tag >> 3)
            if inner is None:
                position += length
            else:
                outer.append((end, table))
                end, table = position + length, _table(inner)
        elif kind == _VARINT:
            _, position = _varint(raw, position)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:  # groups, which proto3 does not have
            raise DecodeError(MALFORMED)


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = raw[position]
    if value < 0x80:
        return value, position + 1
    value &= 0x7F
    for shift in range(7, 70, 7):
        position += 1
        byte = raw[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
    raise DecodeError(MALFORMED)
