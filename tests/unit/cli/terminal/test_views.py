"""Captures of every list and explain view; `python -m tests.unit.cli.terminal.views` writes them anew."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import fairway.cli
from fairway.cli.terminal import table
from fairway.cli.terminal.listing import Resource
from fairway.cli.terminal.output import out
from fairway.cli.terminal.table import Column, show_rows
from tests.unit.cli.terminal.views import GOLDEN, VIEWS, capture


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_as_its_capture(name: str) -> None:
    found = capture(name)
    assert found == (GOLDEN / f"{name}.txt").read_text()
    narrow = found.partition("\n\n")[0].splitlines()
    assert all(len(line) <= 80 for line in narrow)
    assert len({*narrow}) == len(narrow), "rows are the same"


def _columns() -> Iterator[tuple[str, Any]]:
    for module in pkgutil.walk_packages(fairway.cli.__path__, "fairway.cli."):
        for name, value in vars(importlib.import_module(module.name)).items():
            columns = value.columns if isinstance(value, Resource) else value
            if isinstance(columns, tuple) and columns and isinstance(columns[0], Column):
                yield f"{module.name}.{name}", columns


def test_every_view_has_a_capture() -> None:
    captured = [columns for columns, _ in VIEWS.values()]
    assert not [name for name, found in _columns() if not any(found is one for one in captured)]
    assert {path.stem for path in GOLDEN.iterdir()} == VIEWS.keys()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("explain", ("no room at 7 of 9 looks", "not_draining")),
        ("events", ("out of memory",)),
        ("usage", ("LIST", "MEASURED")),
        ("slis", ("interactive", "standard", "TTFT")),
        ("requests", ("req_" + "a" * 24, "QUEUE_TIMEOUT", "queue 12s")),
        ("queue", ("interactive:3.5s standard:35s",)),
    ],
)
def test_80_columns_have_what_the_view_is_for(name: str, words: tuple[str, ...]) -> None:
    narrow = (GOLDEN / f"{name}.txt").read_text().partition("\n\n")[0]
    assert [word for word in words if word not in narrow] == []


@pytest.mark.parametrize("name", VIEWS)
def test_wide_leaves_nothing_out(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert out().is_terminal
    columns, items = VIEWS[name]
    show_rows(columns, items, wide=True)
    shown = " ".join(capsys.readouterr().out.split())
    for item in items:
        for column in columns:
            cell = " ".join(column.cell(item).split())
            assert cell in shown or table._shown(cell) in shown
