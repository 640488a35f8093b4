"""SIGKILL of the ledger and of a source before every change that they make to files.

No event is lost or booked twice.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.tidy.sources import ROOT

ONCE: Final = [1, 20, 2_000_000]
SLICES: Final = 8


def child(folder: Path, kill_before: int, what: str) -> tuple[list[str], dict[str, Any], int]:
    """Return the events that were safe, the last line, and the exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.usage.kill_child", str(folder), str(kill_before), what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '{"changes'))]
    safe = [name for line in lines if isinstance(line, list) for name in line]
    ended = [line for line in lines if isinstance(line, dict)]
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return safe, ended[-1] if ended else {}, done.returncode


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many changes a life makes that nobody kills."""
    safe, ended, code = child(tmp_path_factory.mktemp("whole"), 0, "fill")
    assert code == 0
    assert ended["booked"] == dict.fromkeys(safe, ONCE)
    assert ended["changes"] > 20
    return int(ended["changes"])


@pytest.mark.parametrize("part", range(SLICES))
def test_killed_before_each_change(tmp_path: Path, changes: int, part: int) -> None:
    for kill_before in range(1 + part, changes + 1, SLICES):
        folder = tmp_path / str(kill_before)
        folder.mkdir()
        safe, _, code = child(folder, kill_before, "fill")
        assert code == -signal.SIGKILL, kill_before
        _, ended, code = child(folder, 0, "recover")
        assert code == 0
        found = ended["booked"]
        assert {name: found.get(name) for name in safe} == dict.fromkeys(safe, ONCE), kill_before
        # What was synced in the moment of the kill may be there as well, and then it is whole or in part.
        assert all(amounts[0] <= 1 and amounts[2] <= ONCE[2] for amounts in found.values()), kill_before
