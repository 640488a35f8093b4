"""The `fairway` command."""

from __future__ import annotations

import copy
import os
import platform
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Final

import grpc
import typer
from typer.models import CommandInfo

from fairway.cli.commands import (
    accounts,
    aliases,
    audit,
    batches,
    capacity,
    certs,
    deployments,
    diagnose,
    engines,
    events,
    lifecycle,
    login,
    nodes,
    placements,
    policies,
    reliability,
    rollouts,
    scaling,
    signatures,
    usage,
)
from fairway.cli.commands.chat import chat
from fairway.cli.commands.complete import complete
from fairway.cli.commands.simulate import calibrate, simulate
from fairway.cli.commands.status import logs, status
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.output import OutputClosed, err, out, plain, show_error


def fairway_version() -> str:
    """Return the version of the installed package, "unknown" in a bare source tree."""
    try:
        return version("fairway")
    except PackageNotFoundError:
        return "unknown"


def _version_option(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show:
        show_version()
        raise typer.Exit


def show_version(output: OutputOption = Format.TABLE) -> None:
    """Show the version of this command.

    \b
    Examples:
      fairway version
      fairway version -o json
    """
    found = {"fairway": fairway_version(), "python": platform.python_version(), "grpc": grpc.__version__}
    if output in DOCUMENTS:
        write_document(found, output)
    elif output is Format.WIDE:
        plain(out(), "  ".join(f"{name} {value}" for name, value in found.items()))
    else:
        plain(out(), f"fairway {found['fairway']}")


DEBUG: Final = "FAIRWAY_CLI_DEBUG"
COMPLETION: Final = "_FAIRWAY_COMPLETE"  # set by the shell's completion, which needs all commands
# Base class of typer's usage errors: bad parameter, missing argument, unknown option.
_WrongUse: Final[type[Exception]] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Serve language models to many tenants. `fairway up` starts everything on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback(invoke_without_command=True)(_version_option)
for each in (lifecycle.up, lifecycle.down, lifecycle.service, status, logs, complete, chat):
    app.command()(each)
app.add_typer(batches.app, name="batches")
app.add_typer(certs.app, name="certs")
app.add_typer(signatures.app, name="models")
app.add_typer(deployments.app, name="deployments")
app.add_typer(aliases.app, name="aliases")
app.add_typer(policies.app, name="policies")
app.add_typer(rollouts.app, name="rollouts")
app.add_typer(scaling.app, name="scaling")
app.add_typer(engines.app, name="engines")
app.add_typer(accounts.tenants, name="tenants")
app.add_typer(accounts.keys, name="keys")
app.add_typer(accounts.budgets, name="budgets")
app.add_typer(deployments.objectives, name="objectives")
app.add_typer(reliability.quarantine, name="quarantine")
app.add_typer(nodes.app, name="nodes")
app.add_typer(capacity.app, name="capacity")
app.add_typer(audit.app, name="audit")
app.add_typer(reliability.requests, name="requests")
placements.add_queue(app)
usage.add(app)
reliability.add_slis(app)
diagnose.add_diagnose(app)
placements.add(app)
events.add(app)
login.add(app)
app.command()(lifecycle.bootstrap)
app.command()(simulate)
app.command()(calibrate)
app.command("version")(show_version)


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit: 0, or a code of ``ExitCode``, with the reason and the next step on stderr."""
    code = run(app, argv)
    if code == ExitCode.INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would end the exit with a traceback
    sys.exit(code)


def run(commands: typer.Typer, argv: list[str] | None) -> int:
    """Run one of ``commands`` and return its exit code. Every failure becomes a readable message."""
    try:
        code = _part_of(commands, argv)(args=argv, prog_name="fairway", standalone_mode=False)
    except CliError as error:
        show_error(error)
        return int(error.exit_code)
    except OutputClosed:
        return int(ExitCode.OUTPUT_CLOSED)
    except KeyboardInterrupt:
        code = int(ExitCode.INTERRUPTED)
    except typer.Abort:
        show_error(CliError("ABORTED", "nothing was changed", next_step="add --yes to skip the confirmation"))
        return int(ExitCode.FAILED)
    except _WrongUse as exc:
        return _wrong_use(exc)
    except Exception as exc:  # the top of the program
        if os.environ.get(DEBUG):
            raise
        what = f"{type(exc).__name__}: {exc}"
        step = f"this is a bug of the command line; {DEBUG}=1 shows where, and a report helps"
        show_error(CliError("UNEXPECTED", what, next_step=step))
        return int(ExitCode.FAILED)
    if code == ExitCode.INTERRUPTED:
        plain(err(), "interrupted")
    return code if isinstance(code, int) else 0


def _part_of(commands: typer.Typer, argv: list[str] | None) -> typer.Typer:
    """Return the commands without those that the first argument does not name; all if it names none.

    Typer reads the signature of every command that it is given, which takes longer than most commands.
    """
    arguments = sys.argv[1:] if argv is None else argv
    kept = {*arguments[:1]}
    part = copy.copy(commands)
    part.registered_commands = [each for each in commands.registered_commands if _name_of(each) in kept]
    part.registered_groups = [each for each in commands.registered_groups if each.name in kept]
    names = {*map(_name_of, part.registered_commands), *(each.name for each in part.registered_groups)}
    return part if kept and names >= kept and COMPLETION not in os.environ else commands


def _name_of(command: CommandInfo) -> str:
    return command.name or getattr(command.callback, "__name__", "").replace("_", "-")


def _wrong_use(exc: Exception) -> int:
    """Print the usage error and how to get help."""
    context = getattr(exc, "ctx", None)
    path = context.command_path if context is not None else "fairway"
    message = exc.format_message()  # type: ignore[attr-defined]
    if type(exc).__name__ == "NoArgsIsHelpError":
        plain(out(), message)
    else:
        show_error(CliError("USAGE", message, next_step=f"`{path} --help` shows the usage, with examples"))
    return int(ExitCode.USAGE)


if __name__ == "__main__":
    main()
