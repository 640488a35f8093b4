"""`fairway login`, `logout` and `whoami`: the caller of commands that are given no key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC
from typing import Annotated, Final

import typer

from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command, help_text
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption
from fairway.cli.terminal.cells import role_name
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.output import err, out, plain
from fairway.http_json import FetchFailed
from fairway.login import LoginFailed, load, log_in, log_out, login_file, save

_SCOPE: Final = "openid offline_access"


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Convert failures inside into a CliError."""
    try:
        yield
    except (LoginFailed, FetchFailed, OSError) as exc:
        raise CliError(
            "LOGIN_FAILED",
            f"{what}: {exc}",
            next_step="try again, or pass a key with --api-key or --admin-key",
            exit_code=ExitCode.UNAUTHENTICATED,
        ) from exc


def _printable(text: str) -> str:
    return "".join(each for each in text if each.isprintable())


def login(
    issuer: Annotated[str, typer.Option("--issuer", help="URL of the OpenID provider.")] = "",
    client_id: Annotated[str, typer.Option("--client-id", help="Name of this client there.")] = "",
    scope: Annotated[str, typer.Option("--scope", help="What the token is for.")] = _SCOPE,
    audience: Annotated[
        str, typer.Option("--audience", help="Audience to request, where the provider needs it.")
    ] = "",
) -> None:
    known = load(login_file())
    issuer = issuer or (known.issuer if known else "")
    client_id = client_id or (known.client_id if known else "")
    if not (issuer and client_id):
        raise typer.BadParameter("the first login needs --issuer and --client-id")

    def show(page: str, code: str) -> None:
        plain(err(), f"Open {_printable(page)} in a browser and confirm the code {_printable(code)}")

    asked = {"scope": scope, **({"audience": audience} if audience else {})}
    with _failures("nobody was logged in"):
        found = log_in(issuer, client_id, asked=asked, show=show)
        save(login_file(), found)
    plain(err(), "Logged in. Commands without a key use this login.")


def logout() -> None:
    with _failures("the login was removed here, but not revoked at its provider"):
        found = log_out(login_file())
    plain(err(), "Logged out." if found else "Nobody was logged in.")


def add(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command(
        "login",
        help=help_text(
            "Log in at an OpenID provider, by a code that a browser confirms.",
            ("fairway login --issuer https://id.example.com --client-id fairway", "fairway login"),
        ),
    )(login)
    app.command(
        "logout",
        help=help_text("Remove the login from this machine and revoke it.", ("fairway logout",)),
    )(logout)

    @command(app, "whoami", to=Server.CONTROLPLANE, examples=("fairway whoami", "fairway whoami -o json"))
    async def whoami(connection: Connection, output: OutputOption = Format.TABLE) -> None:
        """Show who the control plane takes the caller for, and its role."""
        found = await checked(connection.admin.caller(), what="the caller is unknown")
        if output in DOCUMENTS:
            write_document(document_of(found), output)
            return
        parts = [role_name(found.role), found.subject or f"key {found.key}"]
        if found.tenant:
            parts.append(f"of tenant {found.tenant}")
        if found.issuer:
            parts.append(f"by {found.issuer}")
        if found.HasField("expire_time"):
            parts.append(f"until {found.expire_time.ToDatetime(tzinfo=UTC):%Y-%m-%d %H:%M:%S}Z")
        plain(out(), " ".join(parts))
