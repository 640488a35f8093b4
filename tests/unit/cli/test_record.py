from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairway.cli.fleet.record import FleetRecord, ProcessId, lock_installation, sweep, wait_for_end

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait(timeout=5)


def _identity(pid: int) -> ProcessId:
    found = ProcessId.of(pid)
    assert found is not None
    return found


def _record(**children: ProcessId) -> FleetRecord:
    return FleetRecord(_identity(os.getpid()), children, dict.fromkeys(children, "127.0.0.1:1"), "ready")


def test_another_life_of_the_same_id_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    real = _identity(sleeper.pid)
    assert real.alive
    reused = ProcessId(sleeper.pid, real.start - 100)
    assert not reused.alive
    reused.signal(signal.SIGKILL)
    reused.signal_group(signal.SIGKILL)
    assert sleeper.poll() is None


def test_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    identity = _identity(sleeper.pid)
    sleeper.kill()
    assert wait_for_end([identity], timeout_s=5)  # it is not reaped before the fixture ends
    assert ProcessId.of(sleeper.pid) is None


def test_sweep_ends_what_is_left_and_spares_reused_ids(sleeper: subprocess.Popen[bytes]) -> None:
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        reused = ProcessId(bystander.pid, 1.0)
        assert sweep(_record(left=_identity(sleeper.pid), reused=reused), patience_s=5) == ["left"]
        assert sleeper.wait(timeout=5) == -signal.SIGTERM
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(timeout=5)


def test_sweep_kills_what_ignores_sigterm() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], start_new_session=True, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        sweep(_record(stubborn=_identity(process.pid)), patience_s=0.3)
        assert process.wait(timeout=5) == -signal.SIGKILL


def test_record_round_trip(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    record = _record(one=_identity(sleeper.pid))
    record.save(tmp_path / "fleet.json")
    assert FleetRecord.load(tmp_path / "fleet.json") == record


@pytest.mark.parametrize("text", ["", "{}", '{"supervisor": []}', '{"supervisor": [1, 2], "children": 5}'])
def test_broken_record_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "fleet.json").write_text(text)
    assert FleetRecord.load(tmp_path / "fleet.json") is None


def test_one_supervisor_holds_the_lock(tmp_path: Path) -> None:
    first = lock_installation(tmp_path / "lock")
    assert first is not None
    assert lock_installation(tmp_path / "lock") is None
    first.close()
    second = lock_installation(tmp_path / "lock")
    assert second is not None
    second.close()
