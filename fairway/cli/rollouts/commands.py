"""`fairway rollouts`: traffic from one version to another, judged on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import EtagOption, Format, OutputOption, WatchOption, YesOption, key_values
from fairway.cli.rollouts.terms import TERMS, StrategyName, arms_of, rollout_of
from fairway.cli.rollouts.view import phase_name, show_history, show_plan, show_status, strategy_name
from fairway.cli.terminal.cells import age
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.listing import Resource, add_list, add_show, resource
from fairway.cli.terminal.output import confirm, out, plain
from fairway.cli.terminal.table import Column
from fairway.client import NotFound
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="Rollouts: move a deployment's traffic to another version.", no_args_is_help=True)

_ENDED: Final = (cp.ROLLOUT_PHASE_COMPLETED, cp.ROLLOUT_PHASE_ABORTED, cp.ROLLOUT_PHASE_REVERTED)
_POLL_S: Final = 1.0
RolloutArgument = Annotated[
    str,
    typer.Argument(help="A rollout, or a deployment for its newest one.", autocompletion=completion.names),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Kept in the history.")]
AcceptOption = Annotated[
    list[str] | None,
    typer.Option(
        "--accept", metavar="METRIC=REASON", help="A metric that no longer counts; the reason is kept."
    ),
]
ROLLOUTS: Final[Resource[cp.Rollout]] = resource(
    "rollout",
    (
        Column("name", lambda rollout: rollout.metadata.name),
        Column("deployment", lambda rollout: rollout.deployment, drop=1),
        Column("strategy", strategy_name, drop=2),
        Column("phase", phase_name),
        Column("message", lambda rollout: rollout.message, least=40),
        Column("age", lambda rollout: age(rollout.metadata), wide=True),
        Column("etag", lambda rollout: rollout.metadata.etag, wide=True),
    ),
    lambda admin: admin.rollouts,
)
add_list(app, ROLLOUTS, about="List the rollouts and how far they are.")
add_show(app, ROLLOUTS, about="Show a rollout with all its fields.")


@command(
    app,
    "start",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway rollouts start chat --to v2",
        "fairway rollouts start chat --to v2 --steps 1,10,50,100 --hold 10m --dry-run",
        "fairway rollouts start chat --to v2 --strategy blue-green --soak 30m",
        "fairway rollouts start chat --to v2 --strategy shadow --fraction 20",
        "fairway rollouts start chat --strategy ab --arm terse=v2:30 --metric ttft_p95",
    ),
    groups=(TERMS,),
)
async def start(
    connection: Connection,
    deployment: Annotated[str, typer.Argument(help="The deployment.", autocompletion=completion.deployments)],
    terms: Mapping[str, Any],
    to: Annotated[str, typer.Option("--to", help="A digest or a tag.")] = "",
    arm: Annotated[
        list[str] | None,
        typer.Option("--arm", metavar="NAME=VERSION:PERCENT", help="An arm of an A/B test. Repeatable."),
    ] = None,
    strategy: Annotated[
        StrategyName, typer.Option("--strategy", help="How traffic moves.")
    ] = StrategyName.CANARY,
    name: Annotated[str, typer.Option("--name", help="Default: the deployment and the time.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its memory only.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Load a version beside the present one, and move traffic to it step by step."""
    name = name or f"{deployment}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    wanted = rollout_of(name, deployment, strategy, arms_of(to, arm), terms)
    starting = connection.admin.rollouts.create(wanted, dry_run=dry_run)
    found = await checked(starting, what=f"cannot start a rollout of {deployment}")
    if dry_run and output not in DOCUMENTS:
        show_plan(found)
    else:
        ROLLOUTS.write_one(found, output)


@command(
    app,
    "status",
    to=Server.CONTROLPLANE,
    examples=("fairway rollouts status chat", "fairway rollouts status chat --watch"),
)
async def status(
    connection: Connection,
    name: RolloutArgument,
    watch: WatchOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show the arms, their gates and the evidence; with --watch until the rollout has ended."""
    shown = b""
    while True:
        found = await _found(connection, name)
        data = found.SerializeToString(deterministic=True)
        if data != shown:
            shown = data
            _show(found, output, again=watch)
        if not watch or found.phase in _ENDED:
            return
        await asyncio.sleep(_POLL_S)


@command(app, "history", to=Server.CONTROLPLANE, examples=("fairway rollouts history chat",))
async def history(connection: Connection, name: RolloutArgument, output: OutputOption = Format.TABLE) -> None:
    """Show what happened in a rollout, with the evidence of each decision."""
    found = await _found(connection, name)
    if output in DOCUMENTS:
        write_document({"history": [document_of(entry) for entry in found.history]}, output)
    else:
        show_history(found.history)


@command(
    app,
    "promote",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway rollouts promote chat",
        "fairway rollouts promote chat --to-end",
        "fairway rollouts promote chat --accept cost='longer answers are wanted'",
        "fairway rollouts promote chat --arm terse",
    ),
)
async def promote(
    connection: Connection,
    name: RolloutArgument,
    to_end: Annotated[bool, typer.Option("--to-end", help="To all traffic.")] = False,
    arm: Annotated[str, typer.Option("--arm", help="Of an A/B test: the arm that gets all traffic.")] = "",
    accept: AcceptOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Go to the next step without waiting for its gate; a failed gate still rolls back."""
    rollout = (await _found(connection, name)).metadata.name
    accepted = key_values(accept, flag="--accept")
    await _changed(
        connection.admin.rollouts.promote(rollout, to_end=to_end, arm=arm, accepted=accepted, etag=etag),
        f"cannot promote the rollout {rollout}",
        output,
    )


@command(app, "pause", to=Server.CONTROLPLANE, examples=("fairway rollouts pause chat",))
async def pause(
    connection: Connection,
    name: RolloutArgument,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Stay at the present step. A failed gate still rolls back."""
    rollout = (await _found(connection, name)).metadata.name
    pausing = connection.admin.rollouts.pause(rollout, etag=etag)
    await _changed(pausing, f"cannot pause the rollout {rollout}", output)


@command(app, "resume", to=Server.CONTROLPLANE, examples=("fairway rollouts resume chat",))
async def resume(
    connection: Connection,
    name: RolloutArgument,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Go on with a paused rollout; the hold of its step begins anew."""
    rollout = (await _found(connection, name)).metadata.name
    resuming = connection.admin.rollouts.resume(rollout, etag=etag)
    await _changed(resuming, f"cannot resume the rollout {rollout}", output)


@command(
    app,
    "abort",
    to=Server.CONTROLPLANE,
    examples=("fairway rollouts abort chat", "fairway rollouts abort chat --reason 'odd answers' --yes"),
)
async def abort(
    connection: Connection,
    name: RolloutArgument,
    reason: ReasonOption = "",
    etag: EtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Move every new request back to the stable version, now."""
    rollout = (await _found(connection, name)).metadata.name
    confirm(f"Abort {rollout}? Every new request gets the stable version.", yes=yes)
    aborting = connection.admin.rollouts.abort(rollout, reason=reason, etag=etag)
    await _changed(aborting, f"cannot abort the rollout {rollout}", output)


@command(
    app,
    "revert",
    to=Server.CONTROLPLANE,
    examples=("fairway rollouts revert chat", "fairway rollouts revert chat --reason 'odd answers' --yes"),
)
async def revert(
    connection: Connection,
    name: RolloutArgument,
    reason: ReasonOption = "",
    etag: EtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Give the deployment its version before again, also once the rollout is final."""
    found = await _found(connection, name)
    rollout, version = found.metadata.name, found.stable_version
    confirm(f"Revert {rollout}? Every new request gets {version}, once that is loaded.", yes=yes)
    reverting = connection.admin.rollouts.revert(rollout, reason=reason, etag=etag)
    await _changed(reverting, f"cannot revert the rollout {rollout}", output)


async def _found(connection: Connection, name: str) -> cp.Rollout:
    """Return the rollout of this name, or the newest one of the deployment of this name. Raises CliError."""
    what = f"cannot show the rollout {name}"

    async def read() -> cp.Rollout | None:
        try:
            return await connection.admin.rollouts.get(name)
        except NotFound:
            return None

    if (found := await checked(read(), what=what)) is not None:
        return found
    every = await checked(connection.admin.rollouts.list(), what="cannot list the rollouts")
    of_deployment = [one for one in every if one.deployment == name]
    if not of_deployment:
        raise CliError(
            "NOT_FOUND",
            f"there is no rollout {name}, and none of a deployment {name}",
            next_step="`fairway rollouts list` shows what is there",
            exit_code=ExitCode.REFUSED,
        )
    newest = max(of_deployment, key=lambda one: one.metadata.create_time.ToNanoseconds())
    return await checked(connection.admin.rollouts.get(newest.metadata.name), what=what)


async def _changed(change: Coroutine[Any, Any, cp.Rollout], what: str, output: Format) -> None:
    _show(await checked(change, what=what), output, again=False)


def _show(rollout: cp.Rollout, output: Format, *, again: bool) -> None:
    if output in DOCUMENTS:
        write_document(document_of(rollout), output)
        return
    if again:
        plain(out(), f"--- {datetime.now(UTC):%H:%M:%S}")
    show_status(rollout)
