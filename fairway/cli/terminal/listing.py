"""`list`, `show`, `delete` and `--watch` for every resource; a Resource contains the differences."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Generic, TypeVar

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import EtagOption, Format, NameArgument, OutputOption, WatchOption, YesOption
from fairway.cli.terminal.cells import age, duration, enum_name, labels, moment, show_bytes, show_money
from fairway.cli.terminal.formats import DOCUMENTS, document_of, show_deleted, write_document
from fairway.cli.terminal.output import confirm, out, plain
from fairway.cli.terminal.table import Column, show_rows
from fairway.cli.watch import Watch, follow
from fairway.client import AdminClient
from fairway.client.admin.resources import Reading, plural_of
from fairway.v1 import controlplane_pb2 as cp

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


T = TypeVar("T", bound=Message)
K = TypeVar("K", cp.Tenant, cp.Key, cp.Budget, cp.Objective, cp.Deployment, cp.Rollout, cp.Node, cp.Alias)


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """One kind of resource that a server lists.

    ``plural`` is also the name of the list in a document.
    """

    singular: str  # name in messages
    plural: str  # name in messages and documents
    server: Server  # the server that lists it
    columns: tuple[Column[T], ...]  # columns of its tables
    # Returns all of them.
    all: Callable[[Connection], Awaitable[Sequence[T]]] | None = None
    # Returns one by name.
    get: Callable[[Connection, str], Awaitable[T]] | None = None
    # Follows their changes.
    watch: Watch[T] | None = None

    async def show_all(self, connection: Connection, output: Format, *, watch: bool) -> None:
        """Print all of them, or with ``watch`` also every change, until the task is cancelled."""
        if watch:
            assert self.watch is not None
            await follow(connection, self.watch, self.columns, output)
        else:
            assert self.all is not None
            self.write_list(await self.all(connection), output)

    async def change(
        self, connection: Connection, name: str, change: Callable[[T], None], etag: str, output: Format
    ) -> None:
        """Change one of the control plane's and print it."""
        changing = getattr(connection.admin, self.plural).change(name, change, etag=etag)
        self.write_one(await checked(changing, what=f"cannot change the {self.singular} {name}"), output)

    def write_list(self, items: Sequence[T], output: Format) -> None:
        """Print a listing: a table, or one document with a list in it."""
        if output in DOCUMENTS:
            write_document({self.plural: [document_of(item) for item in items]}, output)
        else:
            show_rows(self.columns, items, wide=output is Format.WIDE)

    def write_one(self, item: T, output: Format) -> None:
        """Print one resource: its row, or the resource as a document."""
        if output in DOCUMENTS:
            write_document(document_of(item), output)
        else:
            show_rows(self.columns, [item], wide=output is Format.WIDE)


def write_shown(item: Message, output: Format) -> None:
    """Print one resource with all its fields: a line for each that is set, or a document."""
    if output in DOCUMENTS:
        write_document(document_of(item), output)
    else:
        plain(out(), "\n".join(lines_of(item)))


def metadata_columns() -> tuple[Column[Any], ...]:
    """Return the columns that close the wide table of a resource."""
    return (
        Column("labels", lambda item: labels(item.metadata), wide=True),
        Column("age", lambda item: age(item.metadata), wide=True),
        Column("etag", lambda item: item.metadata.etag, wide=True),
    )


def resource(
    singular: str, columns: tuple[Column[K], ...], kind: Callable[[AdminClient], Reading[K]]
) -> Resource[K]:
    """Return one kind of resource of the control plane; its tables begin with the name."""
    plural = plural_of(singular)
    name: tuple[Column[K], ...] = (Column("name", lambda item: item.metadata.name),)

    async def listed(connection: Connection) -> Sequence[K]:
        return await checked(kind(connection.admin).list(), what=f"cannot list the {plural}")

    async def get(connection: Connection, name: str) -> K:
        what = f"cannot show the {singular} {name}"
        return await checked(kind(connection.admin).get(name), what=what)

    watch: Watch[K] = Watch(
        singular, f"the {plural}", lambda connection, lost: kind(connection.admin).watch(on_lost=lost)
    )
    return Resource(singular, plural, Server.CONTROLPLANE, name + columns, listed, get, watch)


def add_list(app: typer.Typer, resource: Resource[Any], *, about: str) -> None:
    """Add the command `list` to ``app``."""
    plural = resource.plural

    async def listed(
        connection: Connection, output: OutputOption = Format.TABLE, watch: WatchOption = False
    ) -> None:
        await resource.show_all(connection, output, watch=watch)

    listed.__doc__ = about
    examples = (
        f"fairway {plural} list",
        f"fairway {plural} list -o json | jq '.{plural}[]'",
        f"fairway {plural} list --watch",
    )
    command(app, "list", to=resource.server, examples=examples)(listed)


def add_show(app: typer.Typer, resource: Resource[Any], *, about: str) -> None:
    """Add the command `show` to ``app``."""

    async def shown(
        connection: Connection,
        name: NameArgument,
        output: OutputOption = Format.TABLE,
    ) -> None:
        assert resource.get is not None
        write_shown(await resource.get(connection, name), output)

    shown.__doc__ = about
    examples = (f"fairway {resource.plural} show NAME", f"fairway {resource.plural} show NAME -o json")
    command(app, "show", to=resource.server, examples=examples)(shown)


def add_delete(
    app: typer.Typer,
    resource: Resource[Any],
    *,
    question: str,
    about: str,
    examples: Sequence[str],
    verb: str = "delete",
) -> None:
    """Add the command ``verb`` to ``app``. ``question`` precedes the deletion; it may contain {name}."""

    async def deleted(
        connection: Connection,
        name: NameArgument,
        etag: EtagOption = "",
        yes: YesOption = False,
        output: OutputOption = Format.TABLE,
    ) -> None:
        confirm(question.format(name=name), yes=yes)
        deletion = getattr(connection.admin, resource.plural).delete(name, etag=etag)
        await checked(deletion, what=f"cannot {verb} the {resource.singular} {name}")
        show_deleted(name, output)

    deleted.__doc__ = about
    command(app, verb, to=resource.server, examples=examples)(deleted)
