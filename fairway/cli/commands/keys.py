"""`fairway keys`: API keys of tenants for the data plane and of operators for the control plane."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import (
    EtagOption,
    Format,
    LabelOption,
    NameArgument,
    OutputOption,
    YesOption,
    key_values,
    parse_future,
    replace_labels,
    span_s,
)
from fairway.cli.limit_options import LIMITS, set_limits, show_limits
from fairway.cli.terminal.cells import age, enum_name, labels, moment
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.listing import Resource, add_delete, add_list, add_show, resource
from fairway.cli.terminal.output import confirm, err, out, plain
from fairway.cli.terminal.table import Column
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="API keys of tenants and of operators.", no_args_is_help=True)

ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="A model that the key may use. Repeatable; without it: all models of the tenant.",
        autocompletion=completion.deployments,
    ),
]
ExpiresOption = Annotated[
    datetime | None,
    typer.Option(
        "--expires",
        parser=parse_future,
        metavar="WHEN",
        help="Expiry: a time span such as 90d, or a time such as 2027-01-31.",
    ),
]


def _expiry(key: cp.Key) -> str:
    if not key.HasField("expire_time"):
        return "never"
    expired = key.expire_time.ToDatetime(tzinfo=UTC) <= datetime.now(UTC)
    return moment(key.expire_time) + (" (expired)" if expired else "")


KEYS: Final[Resource[cp.Key]] = resource(
    "key",
    (
        Column("name", lambda key: key.metadata.name),
        Column("role", lambda key: enum_name(cp.KeyRole.Name, key.role, "KEY_ROLE_")),
        Column("tenant", lambda key: key.tenant),
        Column("expires", _expiry),
        Column("models", lambda key: ",".join(key.models) or "all", wide=True),
        Column("limits", lambda key: show_limits(key.limits), wide=True),
        Column("labels", lambda key: labels(key.metadata), wide=True),
        Column("age", lambda key: age(key.metadata), wide=True),
        Column("etag", lambda key: key.metadata.etag, wide=True),
    ),
    lambda admin: admin.keys,
)
add_list(app, KEYS, about="List the keys, without their secrets.")
add_show(app, KEYS, about="Show a key, without its secret.")


@command(
    app,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway keys create ci --tenant acme --expires 90d",
        "fairway keys create kiosk --tenant acme --model fairway-tiny --requests-per-minute 60",
        "fairway keys create ops-anna --admin",
        "export FAIRWAY_API_KEY=$(fairway keys create laptop)",
    ),
    groups=(LIMITS,),
)
async def create(
    connection: Connection,
    name: NameArgument,
    limits: Mapping[str, Any],
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of the key.", autocompletion=completion.tenants)
    ] = "default",
    admin: Annotated[
        bool, typer.Option("--admin", help="Create an operator's key, without a tenant.")
    ] = False,
    model: ModelsOption = None,
    expires: ExpiresOption = None,
    label: LabelOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Create a key and print its secret. The secret is shown only once."""
    wanted = cp.Key(
        metadata=cp.Metadata(name=name, labels=key_values(label, flag="--label")),
        role=cp.KEY_ROLE_ADMIN if admin else cp.KEY_ROLE_TENANT,
        tenant="" if admin else tenant,
        models=model or (),
    )
    if expires is not None:
        wanted.expire_time.FromDatetime(expires)
    set_limits(wanted.limits, limits)
    made = await checked(connection.admin.keys.create(wanted), what=f"cannot create the key {name}")
    _show_secret(made.key, made.secret, output)


@command(
    app,
    "rotate",
    to=Server.CONTROLPLANE,
    examples=("fairway keys rotate ci --grace 24h", "fairway keys rotate leaked"),
)
async def rotate(
    connection: Connection,
    name: NameArgument,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            parser=span_s,
            metavar="SPAN",
            help="How long the old secret stays valid.",
            show_default="0s",
        ),
    ] = 0.0,
    etag: EtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Give a key a new secret and print it. The old one stays valid for the grace period, 0 by default."""
    if not grace:
        confirm(
            f"Rotate the key {name} without a grace period? The old secret is rejected at once.",
            yes=yes,
        )
    rotation = connection.admin.keys.rotate(name, grace_s=grace, etag=etag)
    made = await checked(rotation, what=f"cannot rotate the key {name}")
    _show_secret(made.key, made.secret, output)


@command(
    app,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway keys update ci --expires 30d",
        "fairway keys update ci --no-expiry",
        "fairway keys update kiosk --model fairway-tiny --model other",
        "fairway keys update kiosk --all-models",
    ),
    groups=(LIMITS,),
)
async def update(
    connection: Connection,
    name: NameArgument,
    limits: Mapping[str, Any],
    model: ModelsOption = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="Allow all models of the tenant.")] = False,
    expires: ExpiresOption = None,
    no_expiry: Annotated[bool, typer.Option("--no-expiry", help="Remove the expiry.")] = False,
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Change the given fields of a key and keep the rest. Its role, tenant and secret stay.

    --label replaces all present labels.
    """
    if (model and all_models) or (expires and no_expiry):
        raise typer.BadParameter("--model and --all-models, --expires and --no-expiry exclude each other")

    def change(key: cp.Key) -> None:
        if model or all_models:
            del key.models[:]
            key.models.extend(model or ())
        if expires is not None:
            key.expire_time.FromDatetime(expires)
        if no_expiry:
            key.ClearField("expire_time")
        set_limits(key.limits, limits)
        replace_labels(key.metadata, label)

    changed = connection.admin.keys.change(name, change, etag=etag)
    KEYS.write_one(await checked(changed, what=f"cannot change the key {name}"), output)


add_delete(
    app,
    KEYS,
    question="Revoke the key {name}? Requests with it are rejected from now on.",
    about="Delete a key. Requests with it are rejected from then on.",
    examples=("fairway keys revoke ci", "fairway keys revoke leaked --yes"),
    verb="revoke",
)


def _show_secret(key: cp.Key, secret: str, output: Format) -> None:
    """Print only the secret, for scripts, or the key and the secret as a document."""
    if output in DOCUMENTS:
        write_document({"key": document_of(key), "secret": secret}, output)
        return
    plain(out(), secret)
    plain(err(), f"This is the secret of the key {key.metadata.name}. It is not stored and not shown again.")
