"""The systemd unit: it names what exists, nothing in it is expanded, and systemd accepts it."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairway.cli.commands.lifecycle import unit_of
from fairway.cli.errors import CliError
from fairway.cli.fleet.options import UpOptions
from fairway.cli.state import StateDir
from tests.support.stack import ROOT

SECTIONS = ("Unit", "Service", "Install")


def read_unit(text: str) -> dict[str, dict[str, str]]:
    """Return a unit's settings by section; fails for a line that is neither, or that occurs twice."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line[1:-1]
            assert line == f"[{section}]"
            assert section in set(SECTIONS) - set(found)
            found[section] = {}
            continue
        name, equals, value = line.partition("=")
        assert all((equals, name.isalnum(), value, name not in found[section])), line
        found[section][name] = value
    return found


def arguments(command: str) -> list[str]:
    """Return the arguments of ExecStart, read by the rules of systemd's manual."""
    found, at = list[str](), 0
    while at < len(command):
        assert command[at] == '"', "every argument is quoted"
        at, text = at + 1, ""
        while command[at] != '"':
            if command[at] == "\\":
                at += 1
                assert command[at] in '"\\'
            elif command[at] == "%" or (command[at] == "$" and found):
                assert command[at + 1] == command[at], "nothing is expanded"
                at += 1
            text += command[at]
            at += 1
        found.append(text)
        at += 1
        assert command[at : at + 1] in ("", " ")
        at += 1
    return found


def drawn_names(count: int) -> list[str]:
    rng = random.Random(8)
    return ["".join(rng.choice("ab %$\"'\\{}~;#ä-") for _ in range(rng.randint(1, 12))) for _ in range(count)]


@pytest.mark.parametrize("system", [False, True])
def test_the_unit_starts_this_installation_and_drains_it(tmp_path: Path, system: bool) -> None:
    for name in ("plain", *drawn_names(200)):
        state = StateDir.at(tmp_path / f"x{name}")
        unit = read_unit(unit_of(state, None, system=system))
        program, *rest = arguments(unit["Service"]["ExecStart"])
        assert rest[-3:] == ["up", "--state-dir", str(state.root)]
        assert Path(program).is_file()
        assert Path(unit["Service"]["WorkingDirectory"].replace("%%", "%")) == Path.cwd()
        assert unit["Service"]["KillMode"] == "mixed", "the stores outlive the roles that drain"
        assert unit["Service"]["Restart"] == "on-failure"
        assert ("User" in unit["Service"]) is system


def test_the_stop_has_time_for_the_drain_of_each_process(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path)
    options = UpOptions(
        state_dir=str(tmp_path), gateways=2, settings=(("gateway", "FAIRWAY_DRAIN_S", "100"),)
    )
    unit = read_unit(unit_of(state, options, system=False))
    stores, gateways, workers, others = 2 * 10, 2 * 105, 64 * 15, 3 * 15
    assert float(unit["Service"]["TimeoutStopSec"]) > stores + gateways + workers + others


def test_a_unit_has_no_secret_and_no_path_that_breaks_its_lines(tmp_path: Path) -> None:
    options = UpOptions(state_dir=str(tmp_path), environment=(("FAIRWAY_REDIS_URL", "redis://:hunter2@h"),))
    assert "hunter2" not in unit_of(StateDir.at(tmp_path), options, system=True)
    with pytest.raises(CliError, match="cannot contain"):
        unit_of(StateDir.at(tmp_path / "a\nExecStartPost=b"), None, system=True)


def command(*options: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fairway.cli.main", "service", *options],
        cwd=ROOT,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": str(home / "config")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_is_written_for_systemd_and_replaces_only_its_own(tmp_path: Path) -> None:
    here = ("--state-dir", str(tmp_path / "one"))
    for _ in range(2):
        done = command("--install", *here, home=tmp_path)
        assert done.returncode == 0, done.stderr
    path = tmp_path / "config" / "systemd" / "user" / "fairway.service"
    assert path.read_text() == command(*here, home=tmp_path).stdout
    other = command("--install", "--state-dir", str(tmp_path / "two"), home=tmp_path)
    assert other.returncode == 4
    assert "--name" in other.stderr
    assert str(tmp_path / "one") in path.read_text()
    assert command("--name", "../fairway", home=tmp_path).returncode == 2
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        for each in (path, Path(path.with_name("odd.service"))):
            if each != path:
                each.write_text(unit_of(StateDir.at(tmp_path / 'a %h $x "q" \'y'), None, system=True))
            verified = subprocess.run(
                [analyze, "verify", str(each)], capture_output=True, text=True, timeout=60, check=False
            )
            assert (verified.returncode, verified.stderr) == (0, ""), verified.stderr
