"""The `fairway` command."""

from __future__ import annotations

import sys

import typer

from fairway.cli.commands import generate, lifecycle, resources
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.output import err, plain, show_error

app = typer.Typer(
    help="Serve language models to many tenants. `fairway up` starts everything on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(lifecycle.up)
app.command()(lifecycle.down)
app.command()(lifecycle.status)
app.add_typer(resources.models, name="models")
app.add_typer(resources.deployments, name="deployments")
app.add_typer(resources.keys, name="keys")
app.add_typer(resources.tenants, name="tenants")
app.add_typer(resources.nodes, name="nodes")
app.command()(generate.complete)
app.command()(generate.chat)


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit: 0, or a code of ``ExitCode``, with the reason and the next step on stderr."""
    try:
        app(args=argv)
    except CliError as exc:
        show_error(exc)
        sys.exit(int(exc.exit_code))
    except KeyboardInterrupt:
        plain(err(), "interrupted")
        sys.exit(int(ExitCode.INTERRUPTED))


if __name__ == "__main__":
    main()
