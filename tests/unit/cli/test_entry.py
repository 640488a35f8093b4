"""Ctrl-C before the command line is imported ends with one line."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from fairway.cli.entry import main


class _Interrupted(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt


def test_ctrl_c_while_importing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fairway.cli.main", _Interrupted("fairway.cli.main"))
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_command_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fairway", "version"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "fairway" in capsys.readouterr().out
