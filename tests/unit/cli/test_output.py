"""What the command line writes is what it was given."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fairway.cli import output


def _console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=60), file


@pytest.mark.parametrize("text", ["y = a[:b:]", "\tif x:\n\t\treturn", "a\rb", "[bold]x[/]", "x" * 200])
def test_plain_text_is_not_changed(text: str) -> None:
    console, file = _console()
    output.plain(console, text, end="")
    assert file.getvalue() == text


def test_table_has_tabs_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = _console()
    monkeypatch.setattr(output, "out", lambda: console)
    output.show_table(("name", "state"), [("a-rather-long-name", "ready"), ("b", "")])
    assert file.getvalue() == "a-rather-long-name\tready\nb\t\n"


def test_brackets_in_a_cell_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = _console(terminal=True)
    monkeypatch.setattr(output, "out", lambda: console)
    output.show_table(("name",), [("[/closed] [red]",)])
    assert "[/closed] [red]" in file.getvalue()
