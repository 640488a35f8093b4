"""Shell completion of resource names, within ``TIMEOUT_S``. A failure completes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final

import typer

from fairway.cli import targets
from fairway.cli.calls import admin_client
from fairway.cli.errors import CliError
from fairway.cli.terminal.cells import short_digest
from fairway.client import AdminClient

TIMEOUT_S: Final = 1.0
_GROUPS: Final = ("tenants", "keys", "budgets", "objectives", "deployments", "aliases", "rollouts", "nodes")
_LIMIT: Final = 200  # names: enough for a shell's list
_Read = Callable[[AdminClient], Awaitable[Iterable[str]]]


def names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the resources of the command's group; none for `create`."""
    group = ctx.parent.info_name if ctx.parent is not None else None
    if ctx.info_name == "create" or group not in _GROUPS:
        return []
    return _completions(ctx, incomplete, lambda admin: _named(getattr(admin, group)))


def tenants(ctx: typer.Context, incomplete: str) -> list[str]:
    return _completions(ctx, incomplete, lambda admin: _named(admin.tenants))


def deployments(ctx: typer.Context, incomplete: str) -> list[str]:
    return _completions(ctx, incomplete, lambda admin: _named(admin.deployments))


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the registry's models."""

    async def read(admin: AdminClient) -> Iterable[str]:
        return [model.name for model in await admin.models.list(limit=_LIMIT)]

    return _completions(ctx, incomplete, read)


def versions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the tags and short digests of the named model, or of the model with the deployment's name."""
    model = str(ctx.params.get("model") or ctx.params.get("name") or "")

    async def read(admin: AdminClient) -> Iterable[str]:
        found = await admin.models.versions(model, limit=_LIMIT)
        tags = [tag for version in found for tag in version.tags]
        return [*tags, *(short_digest(version.digest) for version in found)]

    return _completions(ctx, incomplete, read) if model else []


async def _named(kind: Any) -> Iterable[str]:
    return [item.metadata.name for item in await kind.list(limit=_LIMIT)]


def _completions(ctx: typer.Context, incomplete: str, read: _Read) -> list[str]:
    try:
        found = asyncio.run(_query(ctx, read))
    except Exception:  # no address, key or answer, or a rejection: the shell completes nothing
        return []
    return sorted({name for name in found if name.startswith(incomplete)})


async def _query(ctx: typer.Context, read: _Read) -> Iterable[str]:
    state_dir = Path(ctx.params.get("state_dir") or targets.DEFAULT_STATE_DIR)
    key = str(ctx.params.get("admin_key") or "")
    wanted, tls_dir = {}, None
    finds = {"controlplane": targets.controlplane, "registry": targets.registry}
    # The client has one key: a server that the command names must not get that of another one.
    for server in [each for each in finds if ctx.params.get(each)] or finds:
        try:
            target = finds[server](str(ctx.params.get(server) or ""), key, state_dir)
        except CliError:
            continue  # the command has no option for it
        wanted[server], key, tls_dir = target.address, target.key, target.tls_dir
    client = admin_client(**wanted, admin_key=key, call_s=TIMEOUT_S, tls_dir=tls_dir)
    async with asyncio.timeout(TIMEOUT_S), client as admin:
        return await read(admin)
