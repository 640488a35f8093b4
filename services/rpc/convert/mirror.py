"""A core value and a message with the same fields, converted both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

V = TypeVar("V")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Pair:
    """How one field of a value is written to a message and read back. ``name``: the message's field."""

    name: str
    write: Callable[[Any], Any] | None = None  # None: as it is
    read: Callable[[Any], Any] | None = None


class Mirror(Generic[V, M]):
    """Converts ``value`` to ``message`` and back. Fields pair by name unless ``pairs`` says otherwise.

    Every field of the value has a counterpart, which is checked at construction: a field that only the value
    has fails the start. The message may have more; ``to_proto`` takes them. A repeated field is a tuple.

    Both functions are compiled once from the names of the fields, as dataclasses compile their constructors:
    they are on the path of every placement.
    """

    def __init__(self, value: type[V], message: type[M], pairs: Mapping[str, Pair] | None = None) -> None:
        names: Iterable[str] = (
            getattr(value, "__struct_fields__", None) or vars(value)["__dataclass_fields__"]
        )
        found = {name: (pairs or {}).get(name, Pair(name)) for name in names}
        fields = message.DESCRIPTOR.fields_by_name
        if missing := [pair.name for pair in found.values() if pair.name not in fields]:
            raise TypeError(f"{message.DESCRIPTOR.name} has no {', '.join(missing)} of {value.__name__}")
        scope: dict[str, Any] = {"Value": value, "Message": message, "tuple": tuple}
        writes, reads = [], []
        for name, pair in found.items():
            read = pair.read or (tuple if fields[pair.name].is_repeated else None)
            scope |= {f"write_{name}": pair.write, f"read_{name}": read}
            writes.append(f"{pair.name}=" + (f"write_{name}(it.{name})" if pair.write else f"it.{name}"))
            reads.append(f"{name}=" + (f"read_{name}(it.{pair.name})" if read else f"it.{pair.name}"))
        to_proto: Callable[..., M] = eval(f"lambda it, **more: Message({', '.join(writes)}, **more)", scope)
        from_proto: Callable[[M], V] = eval(f"lambda it: Value({', '.join(reads)})", scope)
        self.to_proto = to_proto  # of a value, with more fields by name
        self.from_proto = from_proto  # errors are those of the value's constructor and of the pairs

    def each(self, name: str) -> Pair:
        """Return how a tuple of such values is written to a repeated field, and read back."""
        return Pair(
            name,
            lambda values: list(map(self.to_proto, values)),
            lambda messages: tuple(map(self.from_proto, messages)),
        )
