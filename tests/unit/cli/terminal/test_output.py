"""What the command line writes is what it was given."""

from __future__ import annotations

import io
import json

import pytest
import yaml
from rich.console import Console

from fairway.cli.flags import Format
from fairway.cli.terminal import output
from fairway.cli.terminal.formats import document_of, text_of, write_part
from fairway.cli.terminal.table import Column, line_of, show_rows, table_of, visible
from fairway.v1 import controlplane_pb2 as cp

COLUMNS: tuple[Column[tuple[str, str]], ...] = (
    Column("name", lambda item: item[0]),
    Column("age", lambda item: "1d", wide=True),
    Column("state", lambda item: item[1]),
)


def _console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=60), file


@pytest.mark.parametrize("text", ["y = a[:b:]", "\tif x:\n\t\treturn", "a\rb", "[bold]x[/]", "x" * 200])
def test_plain_text_is_not_changed(text: str) -> None:
    console, file = _console()
    output.plain(console, text, end="")
    assert file.getvalue() == text


def test_table_has_tabs_and_no_header_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(COLUMNS, [("a-rather-long-name", "ready"), ("b", "")])
    assert capsys.readouterr().out == "a-rather-long-name\tready\nb\t\n"


def test_wide_columns_stand_after_the_others() -> None:
    assert [column.header for column in visible(COLUMNS, wide=True)] == ["name", "state", "age"]
    assert [column.header for column in visible(COLUMNS, wide=False)] == ["name", "state"]


def test_cell_cannot_break_its_line() -> None:
    assert line_of(COLUMNS, ("a\tb", "c\nd")) == "a b\t1d\tc d"


def test_brackets_in_a_cell_are_no_markup() -> None:
    console, file = _console(terminal=True)
    console.print(table_of(COLUMNS, [("[/closed] [red]", "")]))
    assert "[/closed] [red]" in file.getvalue()
    assert "NAME" in file.getvalue()


def test_document_has_the_names_of_the_proto_and_values_that_are_not_set() -> None:
    tenant = cp.Tenant(metadata=cp.Metadata(name="acme"), requests_per_minute=5)
    found = document_of(tenant)
    assert found["metadata"]["name"] == "acme"
    assert (found["requests_per_minute"], found["max_concurrency"]) == (5, 0)
    assert (found["tokens_per_minute"], found["disabled"]) == ("0", False)


@pytest.mark.parametrize("text", ["no", "1e3", "2027-01-31", "a: b", "- x", "ü\n"])
def test_formats_read_back_to_the_same(text: str) -> None:
    value = {"name": text, "list": [text], "on": True}
    assert yaml.safe_load(text_of(value, Format.YAML)) == value
    assert json.loads(text_of(value, Format.JSON)) == value


def test_parts_of_a_stream_can_be_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        write_part({"n": number, "text": "a\nb"}, Format.JSON)
    assert [json.loads(line)["n"] for line in capsys.readouterr().out.splitlines()] == [0, 1]
    for number in range(2):
        write_part({"n": number}, Format.YAML)
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == [{"n": 0}, {"n": 1}]
