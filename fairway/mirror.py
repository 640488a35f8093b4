"""A value and a message with the same fields, converted both ways."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from itertools import count
from typing import Any, Final, Generic, TypeVar

import msgspec
from google.protobuf.message import Message

V = TypeVar("V")
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=Enum)
_numbers: Final = count()  # numbers of the functions that compiled code calls


@dataclass(frozen=True, slots=True)
class Pair:
    """How one field of a value is written to a message and read back. ``name``: the message's field."""

    name: str
    write: Callable[[Any], Any] | None = None  # None: as it is
    read: Callable[[Any], Any] | None = None
    unset: bool = False  # the value's default is not written
    zero: bool = False  # 0 or an empty text in a message is the value's default
    unread: bool = False  # written alone: messages of clients do not decide it


class Mirror(Generic[V, M]):
    """Converts ``value`` to ``message`` and back. Fields pair by name unless ``pairs`` says otherwise.

    Every field of the value has a counterpart, which is checked at construction: a field that only the value
    has fails the start, unless it is named in ``apart``: then callers write it by name, and give it to
    ``from_proto`` by name where it has no default. The message may have more; ``to_proto`` takes them. A pair
    that is a mirror of the same message lays the fields of its value beside the others.

    A repeated field is read as a tuple and a map as a dict; an absent field is read as the value's default.

    All functions are compiled once from the names of the fields, as dataclasses compile their constructors:
    they are on the path of every placement.
    """

    def __init__(
        self,
        value: type[V],
        message: type[M],
        pairs: Mapping[str, Pair | Mirror[Any, M]] | None = None,
        apart: Collection[str] = (),
    ) -> None:
        known = message.DESCRIPTOR.fields_by_name
        self._scope: dict[str, Any] = {"Message": message}
        self._read = ""  # the expression of a value of the message ``it``
        self.writes: list[tuple[str, str]] = []  # a field of the message and the expression of its content
        reads, missing = [], []
        self.value, self.message, self.pairs = value, message, dict(pairs or {})
        defaults = _defaults(value)
        if unknown := {*self.pairs, *apart} - defaults.keys():
            raise TypeError(f"{value.__name__} has no {', '.join(sorted(unknown))}")
        for name, default in defaults.items():
            pair = self.pairs.get(name, Pair(name))
            if name in apart:
                continue
            if isinstance(pair, Mirror):
                self._scope |= pair._scope
                self.writes += [(to, code.format(it=f"{{it}}.{name}")) for to, code in pair.writes]
                reads.append(f"{name}={pair._read}")
            elif pair.name not in known:
                missing.append(pair.name)
            else:
                self.writes.append((pair.name, self._written(name, pair, default)))
                if not pair.unread:
                    reads.append(f"{name}={self._reading(pair, known[pair.name], default)}")
        if missing:
            raise TypeError(f"{message.DESCRIPTOR.name} has no {', '.join(missing)} of {value.__name__}")
        made = self._use(value)
        self._read = f"{made}({', '.join(reads)})"
        writes = ", ".join(f"{to}={code.format(it='it')}" for to, code in self.writes)
        more = ", **more" if apart or len(reads) < len(defaults) else ""
        to_proto: Callable[..., M] = eval(f"lambda it, **more: Message({writes}, **more)", self._scope)
        from_proto: Callable[..., V] = eval(f"lambda it{more}: {self._read[:-1]}{more})", self._scope)
        as_fields: Callable[[V], dict[str, Any]] = eval(f"lambda it: dict({writes})", self._scope)
        self.to_proto = to_proto  # writer of a value's message, with more fields by name
        self.from_proto = from_proto  # errors are those of the value's constructor and of the pairs
        self.as_fields = as_fields  # writer of a value's fields, for a message that holds more than one value

    def each(self, name: str) -> Pair:
        """Return how a tuple of such values is written to a repeated field, and read back."""
        return Pair(
            name,
            lambda values: list(map(self.to_proto, values)),
            lambda messages: tuple(map(self.from_proto, messages)),
        )

    def one(self, name: str, *, unset: bool = False) -> Pair:
        """Return how such a value is written to a field, and read back."""
        return Pair(name, self.to_proto, self.from_proto, unset)

    def _use(self, found: Any) -> str:
        """Return a name for it in the compiled code."""
        name = f"used_{next(_numbers)}"
        self._scope[name] = found
        return name

    def _written(self, name: str, pair: Pair, default: Callable[[], Any] | None) -> str:
        it = f"{{it}}.{name}"
        code = f"{self._use(pair.write)}({it})" if pair.write else it
        if not pair.unset or default is None:
            return code
        absent = default()
        unset = f"{it} is None" if absent is None else f"{it} == {self._use(absent)}"
        return f"(None if {unset} else {code})"

    def _reading(self, pair: Pair, field: Any, default: Callable[[], Any] | None) -> str:
        it = f"it.{pair.name}"
        entries = field.message_type is not None and field.message_type.GetOptions().map_entry
        read = pair.read or (dict if entries else tuple if field.is_repeated else None)
        code = f"{self._use(read)}({it})" if read else it
        if default is None:
            return code
        if pair.zero:
            return f"({code} or {self._use(default)}())"
        if field.has_presence:
            return f"({code} if it.HasField({pair.name!r}) else {self._use(default)}())"
        return code


def numbers_of(kind: Iterable[E], numbers: Any) -> dict[E, Any]:
    """Return the number of each member in an enum of messages, which has the same names behind its prefix."""
    prefix = numbers.DESCRIPTOR.values[0].name.removesuffix("UNSPECIFIED")
    return {one: numbers.Value(prefix + one.name) for one in kind}


def enum_pair(name: str, numbers: Mapping[E, Any], unspecified: E | None = None) -> Pair:
    """Return the pair of an enum. ``unspecified``: what 0 is read as; None: a KeyError."""
    back = {number: one for one, number in numbers.items()}
    if unspecified is not None:
        back[0] = unspecified
    return Pair(name, numbers.__getitem__, back.__getitem__)


def _defaults(value: type[Any]) -> dict[str, Callable[[], Any] | None]:
    """Return how the default of each field is made; None: it has none."""
    found: Any = fields(value) if is_dataclass(value) else msgspec.structs.fields(value)
    return {one.name: _default(one.default, one.default_factory) for one in found}


def _default(default: Any, factory: Any) -> Callable[[], Any] | None:
    if default is not MISSING and default is not msgspec.NODEFAULT:
        return lambda: default
    return factory if callable(factory) else None
