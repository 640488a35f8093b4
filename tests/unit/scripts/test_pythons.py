"""Which interpreters of a machine the tests are run on."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from scripts import pythons
from scripts.pythons import Python

FLOOR, AFTER, NEWEST, BEYOND = (
    Python(version, "/" + ".".join(map(str, version)))
    for version in ((3, 11, 2), (3, 11, 7), (3, 13, 0), (3, 14, 0))
)
ANCIENT = Python((3, 10, 13), "/3.10.13")


def test_the_oldest_below_3_11_4_and_the_newest_with_wheels_are_chosen() -> None:
    assert pythons.chosen([NEWEST, AFTER, FLOOR, ANCIENT, BEYOND]) == (FLOOR, NEWEST)
    assert pythons.chosen([AFTER, BEYOND]) == (None, AFTER)
    assert pythons.chosen([FLOOR]) == (FLOOR, FLOOR)
    assert pythons.chosen([ANCIENT, BEYOND]) == (None, None)


def test_all_interpreters_of_the_path_are_found_and_broken_ones_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in (("one", f'exec {sys.executable} "$@"'), ("two", "echo 3.11.1"), ("bad", "exit 1")):
        (tmp_path / folder).mkdir()
        script = tmp_path / folder / "python3"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(pythons, "FOLDERS", (str(tmp_path / "t*"), str(tmp_path / "bad")))
    monkeypatch.setenv("PATH", str(tmp_path / "one"))
    found = pythons.probed(pythons.candidates())
    assert found == [
        Python(sys.version_info[:3], str(tmp_path / "one" / "python3")),
        Python((3, 11, 1), str(tmp_path / "two" / "python3")),
    ]


def test_what_was_not_found_is_printed_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(pythons, "probed", lambda _: [NEWEST])

    def passing(python: Python, part: str, arguments: object) -> int:
        ran.append(python.name)
        return 0

    monkeypatch.setattr(pythons, "run", passing)
    assert pythons.main(["floor"]) == 0
    assert ran == ["3.13.0"]
    printed = capsys.readouterr().out
    assert "below 3.11.4: none is here, not tested" in printed
    assert "3.13.0 (/3.13.0)" in printed
    monkeypatch.setattr(pythons, "run", lambda python, part, arguments: 3)
    assert pythons.main(["all"]) == 1
    assert "failed on 3.13.0" in capsys.readouterr().out


def test_the_floor_tests_exist() -> None:
    assert [each for each in pythons.FLOOR_TESTS if not Path(pythons.ROOT, each).exists()] == []
