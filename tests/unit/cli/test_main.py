"""Every command says how it is used; nothing ends in a traceback; a terminal is asked, a pipe is not."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.main import app, main, run
from fairway.cli.terminal.output import confirm

ROOT = Path(__file__).resolve().parents[3]
GROUPS = {
    "models": {"list", "publish", "versions", "show", "tag", "untag", "delete", "collect-garbage"},
    "deployments": {"list", "show", "create", "update", "scale", "delete"},
    "tenants": {"list", "show", "create", "update", "disable", "enable", "delete"},
    "keys": {"list", "show", "create", "rotate", "update", "revoke"},
    "budgets": {"list", "show", "create", "update", "delete"},
    "quarantine": {"list", "lift"},
    "nodes": {"list", "show", "cordon", "uncordon", "drain", "delete"},
}
SINGLE = {"up", "down", "status", "complete", "chat", "queue", "slis", "events", "version"}


def _commands() -> dict[str, Any]:
    """Every command by its words."""
    root: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            found |= {f"{name} {inner}": each for inner, each in command.commands.items()}
        else:
            found[name] = command
    return found


def test_every_command_is_there() -> None:
    wanted = SINGLE | {f"{group} {name}" for group, names in GROUPS.items() for name in names}
    assert wanted <= set(_commands())


@pytest.mark.parametrize("name", sorted(set(_commands()) - {"bootstrap"}))
def test_help_has_examples_and_a_text_for_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*name.split(), "--help"])
    assert not caught.value.code
    said = capsys.readouterr().out
    assert f"Usage: fairway {name}" in said
    examples = said.partition("\n  Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert f"fairway {name}" in examples[0]
    assert all(line.startswith("    ") for line in examples), "examples are one paragraph"


def test_options_of_a_group_stand_in_the_place_of_their_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["budgets", "create", "--help"])
    options = capsys.readouterr().out.partition("Options:")[2]
    places = [options.index(flag) for flag in ("--each-user", "--per-month", "--per-day", "--currency")]
    assert places == sorted(places)


@pytest.mark.parametrize("arguments", [["--nope"], ["nodes"], [], ["nodes", "list", "--timeout", "x"]])
def test_wrong_use_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == ExitCode.USAGE
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "--help" in said.out + said.err


def test_what_nobody_thought_of_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = typer.Typer()

    @broken.command()
    def divide() -> None:
        """Fail."""
        raise ZeroDivisionError("by zero")

    monkeypatch.delenv("FAIRWAY_CLI_DEBUG", raising=False)
    assert run(broken, []) == ExitCode.FAILED
    said = capsys.readouterr().err
    assert said.startswith("error UNEXPECTED: ZeroDivisionError: by zero\nnext: ")
    monkeypatch.setenv("FAIRWAY_CLI_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(broken, [])


def test_without_a_terminal_only_yes_confirms() -> None:
    confirm("Delete everything?", yes=True)
    with pytest.raises(CliError) as caught:
        confirm("Delete everything?", yes=False)
    assert (caught.value.reason, caught.value.exit_code) == ("NOT_CONFIRMED", ExitCode.USAGE)
    assert "--yes" in caught.value.next_step


def test_the_version_is_also_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["--version"]) == 0
    shown = capsys.readouterr().out
    assert run(app, ["version"]) == 0
    assert capsys.readouterr().out == shown != ""


@contextmanager
def _terminal(*arguments: str, settings: dict[str, str] | None = None) -> Iterator[tuple[Any, int]]:
    """A command whose three streams are one terminal, and the terminal's other end."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **(settings or {})}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what the background job of a shell ignores
    with subprocess.Popen(
        [sys.executable, "-m", "fairway.cli.main", *arguments],
        cwd=ROOT,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def _read_until(terminal: int, text: str) -> str:
    """Return what came up to and with ``text``, or until the end."""
    said = b""
    while text.encode() not in said:
        try:
            piece = os.read(terminal, 1024)
        except OSError:  # Linux says EIO when the other end is closed
            break
        said += piece
    return said.decode()


def _until_it_reads(pid: int) -> None:
    """Return once the process sleeps: the prompt is written a moment before the terminal is read."""
    asleep = 0
    while asleep < 10:
        asleep = asleep + 1 if psutil.Process(pid).status() == psutil.STATUS_SLEEPING else 0
        time.sleep(0.02)


AWAY = ("--controlplane", "127.0.0.1:9", "--admin-key", "k")


@pytest.mark.parametrize(("answer", "reason", "code"), [("n", "NOT_CONFIRMED", 1), ("y", "UNAVAILABLE", 6)])
def test_terminal_is_asked_before_something_goes(answer: str, reason: str, code: int) -> None:
    with _terminal("tenants", "delete", "acme", *AWAY) as (process, terminal):
        assert "Delete the tenant acme? [y/N]" in _read_until(terminal, "[y/N]")
        os.write(terminal, f"{answer}\n".encode())
        assert reason in _read_until(terminal, "next")
        assert process.wait(timeout=60) == code


@pytest.mark.parametrize(
    "command",
    [
        ("tenants", "delete", "acme"),
        ("tenants", "disable", "acme"),
        ("keys", "revoke", "ci"),
        ("nodes", "delete", "worker-9"),
        ("deployments", "delete", "chat"),
        ("budgets", "delete", "acme"),
        ("objectives", "delete", "fast"),
    ],
)
def test_without_a_terminal_nothing_goes_unless_it_is_confirmed(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, [*command, *AWAY]) == ExitCode.USAGE
    refused = capsys.readouterr().err
    assert refused.startswith("error NOT_CONFIRMED: ")
    assert "next: add --yes" in refused
    assert run(app, [*command, "--yes", *AWAY]) == ExitCode.UNAVAILABLE


def test_yes_is_not_asked() -> None:
    with _terminal("keys", "revoke", "ci", "--yes", *AWAY) as (process, terminal):
        said = _read_until(terminal, "next")
        assert "[y/N]" not in said
        assert process.wait(timeout=60) == 6


@pytest.mark.parametrize(("settings", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_color_is_for_terminals_that_want_it(settings: dict[str, str], colored: bool) -> None:
    with _terminal("nodes", "list", *AWAY, settings=settings) as (_, terminal):
        assert ("\x1b[1;31m" in _read_until(terminal, "next")) == colored


def test_interrupt_at_the_prompt_of_a_terminal_asks_for_another_one() -> None:
    chat = ("chat", "--grpc", "127.0.0.1:9", "--api-key", "k", "--model", "m")
    with _terminal(*chat) as (process, terminal):
        _read_until(terminal, "> ")
        _until_it_reads(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert "Ctrl-D or /quit ends" in _read_until(terminal, "second Ctrl-C.")
        os.write(terminal, b"/help\n")
        assert "/reset" in _read_until(terminal, "stops an answer.")
        os.write(terminal, b"/quit\n")
        assert process.wait(timeout=60) == 0


def test_prefill_apart_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["deployments", "create", "chat", "--prefill-replicas", "2"])
    assert ended.value.code == ExitCode.USAGE
    message = " ".join(capsys.readouterr().err.split())
    assert "--prefill-replicas" in message
    assert "every replica prefills and decodes" in message
    assert "--itl and --shape" in message
