"""Commands that call a server: their common options, their client and their `--help` text."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

import typer

from fairway.cli import targets
from fairway.cli.calls import CALL_TIMEOUT_S, admin_client, certificate_problem
from fairway.cli.errors import CliError
from fairway.cli.flags import timeout_s
from fairway.cli.targets import (
    DEFAULT_STATE_DIR,
    AdminKeyOption,
    ControlPlaneOption,
    RegistryOption,
    StateDirOption,
    Target,
)
from fairway.client import AdminClient

WAIT_S: Final = 600.0

TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        parser=timeout_s,
        metavar="SPAN",
        help="Time limit of a call (default 15s), or with --wait of the wait (default 10m).",
        show_default=False,
    ),
]


class Server(Enum):
    """The server that a command calls. The value is its resolver in ``targets`` and its options."""

    CONTROLPLANE = (targets.controlplane, ("controlplane", ControlPlaneOption), ("admin_key", AdminKeyOption))
    REGISTRY = (targets.registry, ("registry", RegistryOption), ("admin_key", AdminKeyOption))


@dataclass(frozen=True, slots=True)
class Connection:
    """An open client of the servers that a command calls. ``timeout_s`` is the --timeout option, if given."""

    admin: AdminClient
    timeout_s: float | None

    @property
    def wait_s(self) -> float:
        """Time limit of a wait that consists of many calls."""
        return WAIT_S if self.timeout_s is None else self.timeout_s


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options that several commands have. The command receives those that were given as one mapping.

    ``parameter``: of the command; ``prefix``: of the options' own names, which are the mapping's keys.
    """

    parameter: str
    prefix: str
    options: Mapping[str, object]

    def parameters(self) -> list[inspect.Parameter]:
        """Return the options as parameters of the command, in the place of ``parameter``."""
        return [_option(self.prefix + field, each, None) for field, each in self.options.items()]


def command(
    app: typer.Typer,
    name: str,
    *,
    to: Server,
    examples: Sequence[str],
    groups: Sequence[OptionGroup] = (),
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., Coroutine[Any, Any, None]]]:
    """Return a decorator that makes a coroutine a command of ``app``.

    The coroutine's first parameter is the Connection, the others are the command's own; the options of the
    connection and of ``groups`` are added to them. Its docstring and ``examples`` form the `--help` text.
    """
    find, address_option, key_option = to.value

    def register(run: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
        gathered = {group.parameter: group for group in groups}
        own: list[inspect.Parameter] = []
        for each in list(inspect.signature(run, eval_str=True).parameters.values())[1:]:
            found = gathered.get(each.name)
            own += [each] if found is None else found.parameters()
        added = [
            _option(address_option[0], address_option[1], ""),
            _option(key_option[0], key_option[1], ""),
            _option("state_dir", StateDirOption, DEFAULT_STATE_DIR),
            _option("timeout", TimeoutOption, None),
        ]

        def entry(**values: Any) -> None:
            address, key = values.pop(address_option[0]), values.pop(key_option[0])
            state_dir, timeout_s = values.pop("state_dir"), values.pop("timeout")
            for group in groups:
                found = {field: values.pop(group.prefix + field) for field in group.options}
                values[group.parameter] = {
                    field: value for field, value in found.items() if value is not None
                }
            target = find(address, key, state_dir)
            asyncio.run(connected(to, target, timeout_s, run, values))

        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *added)]
        entry.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        entry.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, help=help_text(run.__doc__ or "", examples))(entry)
        return run

    return register


def help_text(text: str, examples: Sequence[str]) -> str:
    """Return a help text with one example per line."""
    listed = "\n".join(f"  {example}" for example in examples)
    return f"{inspect.cleandoc(text)}\n\n\b\nExamples:\n{listed}"


def _option(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


async def connected(
    server: Server,
    target: Target,
    timeout_s: float | None,
    run: Callable[..., Coroutine[Any, Any, object]],
    values: dict[str, Any],
) -> None:
    """Run a command's coroutine with an open connection to the target, as its first argument."""
    is_registry = server is Server.REGISTRY
    client = admin_client(
        controlplane="" if is_registry else target.address,
        registry=target.address if is_registry else "",
        admin_key=target.key,
        call_s=CALL_TIMEOUT_S if timeout_s is None else timeout_s,
        tls_dir=target.tls_dir,
    )
    async with client as admin:
        try:
            await run(Connection(admin, timeout_s), **values)
        except CliError as exc:
            # A server that refuses a certificate closes the connection without a reason.
            if exc.reason == "UNAVAILABLE" and (problem := certificate_problem(target.tls_dir)):
                exc.message = f"{exc.message}; {problem}"
            raise
