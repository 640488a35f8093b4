"""`fairway aliases`: a model name for several deployments, of which the smallest that fits serves."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import (
    EtagOption,
    Format,
    LabelOption,
    NameArgument,
    OutputOption,
    key_values,
    replace_labels,
)
from fairway.cli.terminal.cells import enum_name
from fairway.cli.terminal.listing import Resource, add_delete, add_list, add_show, metadata_columns, resource
from fairway.cli.terminal.table import Column
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(
    help="Aliases: model names of which the smallest fitting deployment serves.", no_args_is_help=True
)
_CAPABILITIES: Final = {"tools": cp.CAPABILITY_TOOLS, "schemas": cp.CAPABILITY_SCHEMAS}
_NUMBERS: Final = {"quality": "quality", "context": "context_tokens"}
_Sizes = Annotated[
    list[str],
    typer.Option(
        "--size",
        metavar="DEPLOYMENT[:quality=N,context=N,tools,schemas]",
        help="A deployment and what it is for; repeated, the smallest first.",
    ),
]


def sizes_of(texts: list[str]) -> list[cp.AliasSize]:
    """Return the sizes of `--size` options. Raises BadParameter for another form."""
    return [_size(text) for text in texts]


def _size(text: str) -> cp.AliasSize:
    deployment, _, declared = text.partition(":")
    size = cp.AliasSize(deployment=deployment)
    for part in filter(None, declared.split(",")):
        name, _, value = part.partition("=")
        if name in _NUMBERS and value.isdecimal():
            setattr(size, _NUMBERS[name], int(value))
        elif part in _CAPABILITIES:
            size.capabilities.append(_CAPABILITIES[part])
        else:
            raise typer.BadParameter(
                f"{part!r} is none of quality=N, context=N, tools and schemas", param_hint="--size"
            )
    return size


def _shown(size: cp.AliasSize) -> str:
    parts = [f"{name}={value}" for name, field in _NUMBERS.items() if (value := getattr(size, field))]
    parts += [enum_name(cp.Capability.Name, one, "CAPABILITY_") for one in size.capabilities]
    return size.deployment + (f":{','.join(parts)}" if parts else "")


ALIASES: Final[Resource[cp.Alias]] = resource(
    "alias",
    (
        Column("sizes", lambda alias: " ".join(map(_shown, alias.sizes))),
        *metadata_columns(),
    ),
    lambda admin: admin.aliases,
)
add_list(app, ALIASES, about="List the aliases and their sizes, the smallest first.")
add_show(app, ALIASES, about="Show an alias with all its fields.")


@command(
    app,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway aliases create auto --size chat-small --size chat-large:quality=60,tools,schemas",
        "fairway aliases create long --size chat-small:context=4000 --size chat-long",
    ),
)
async def create_alias(
    connection: Connection,
    name: NameArgument,
    size: _Sizes,
    label: LabelOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Name several deployments as one model. The first that meets a request serves it, at its own price."""
    wanted = cp.Alias(
        metadata=cp.Metadata(name=name, labels=key_values(label, flag="--label")), sizes=sizes_of(size)
    )
    made = await checked(connection.admin.aliases.create(wanted), what=f"cannot create the alias {name}")
    ALIASES.write_one(made, output)


@command(
    app,
    "update",
    to=Server.CONTROLPLANE,
    examples=("fairway aliases update auto --size chat-small --size chat-large:tools",),
)
async def update_alias(
    connection: Connection,
    name: NameArgument,
    size: _Sizes,
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Replace all sizes. They apply from the next request on.

    --label replaces all present labels.
    """
    wanted = sizes_of(size)

    def change(alias: cp.Alias) -> None:
        alias.ClearField("sizes")
        alias.sizes.extend(wanted)
        replace_labels(alias.metadata, label)

    await ALIASES.change(connection, name, change, etag, output)


add_delete(
    app,
    ALIASES,
    question="Delete the alias {name}? Requests that name it are refused.",
    about="Delete an alias. Its deployments stay.",
    examples=("fairway aliases delete auto", "fairway aliases delete auto --yes"),
)
