"""Messages of the public and the internal API, drawn by their descriptors and within their bounds."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from fairway.v1 import options_pb2

M = TypeVar("M", bound=Message)
# Beyond 2**40, a number of milliseconds does not come back from seconds.
_INTEGERS: Final = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_INT32: 2**31 - 1,
    FieldDescriptor.TYPE_SINT32: 2**31 - 1,
    FieldDescriptor.TYPE_UINT64: 2**40,
    FieldDescriptor.TYPE_INT64: 2**40,
    FieldDescriptor.TYPE_FIXED64: 2**40,
}
_MICROSECONDS: Final = {
    "google.protobuf.Duration": st.integers(1, 86_400 * 10**6),
    "google.protobuf.Timestamp": st.integers(1, 2 * 10**15),
}
_text: Final = st.text(st.characters(codec="utf-8"), max_size=4)


def messages(kind: type[M]) -> st.SearchStrategy[M]:
    """Draw messages with any of their fields; of a oneof at most one, and of enums never the unspecified."""
    return _contents(kind.DESCRIPTOR).map(lambda contents: kind(**contents))


@st.composite
def _contents(draw: st.DrawFn, kind: Any) -> dict[str, Any]:
    if kind.full_name in _MICROSECONDS:
        seconds, micros = divmod(draw(_MICROSECONDS[kind.full_name]), 10**6)
        return {"seconds": seconds, "nanos": micros * 1000}
    found: dict[str, Any] = {}
    for field in kind.fields:
        beside = field.containing_oneof.fields if field.containing_oneof is not None else ()
        skipped = field.type != FieldDescriptor.TYPE_ENUM and draw(st.integers(0, 3)) == 0
        if not skipped and all(one.name not in found for one in beside):
            found[field.name] = draw(_field(field))
    return found


def _field(field: Any) -> st.SearchStrategy[Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return st.dictionaries(*(_one(kind.fields_by_name[name]) for name in ("key", "value")), max_size=2)
    return st.lists(_one(field), max_size=3) if field.is_repeated else _one(field)


def _one(field: Any) -> st.SearchStrategy[Any]:
    most = field.GetOptions().Extensions[options_pb2.bounds].max or 2**40
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            return messages(message_factory.GetMessageClass(field.message_type))
        case FieldDescriptor.TYPE_ENUM:
            return st.sampled_from([one.number for one in field.enum_type.values if one.number])
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_STRING:
            return _text
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=4)
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return st.integers(0, 100 * int(min(most, 1000))).map(lambda parts: parts / 100)
    return st.integers(0, int(min(most, _INTEGERS[field.type])))
