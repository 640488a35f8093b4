"""The supervisor with small processes: they listen on a port, or misbehave as they are told."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fairway.cli.errors import CliError
from fairway.cli.fleet.ports import choose_ports
from fairway.cli.fleet.probes import tcp_open
from fairway.cli.fleet.progress import Phase
from fairway.cli.fleet.record import FleetRecord, ProcessId, wait_for_end
from fairway.cli.fleet.supervisor import ProcessSpec, ProcessSupervisor, bound_log, rotate_log, tail

ROOT = Path(__file__).resolve().parents[3]
LISTENER = """
import os, signal, socket, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "family" in sys.argv:
    subprocess.Popen(["sleep", "300"])
if "slow" in sys.argv:
    while not os.path.exists(sys.argv[-1]):
        time.sleep(0.05)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
while True:
    server.accept()[0].close()
"""


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, Phase, str]] = []

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        self.events.append((name, phase, detail))

    def close(self) -> None:
        return

    def names(self, phase: Phase) -> list[str]:
        return [name for name, each, _ in self.events if each == phase]


def _specs(folder: Path, *names: str, flags: tuple[str, ...] = (), stop_s: float = 5.0) -> list[ProcessSpec]:
    ports = choose_ports(names, fixed={}, remembered={}, preferred={})
    return [
        ProcessSpec(
            name=name,
            argv=(sys.executable, "-c", LISTENER, str(ports[name]), *flags),
            env=dict(os.environ),
            log=folder / f"{name}.log",
            probe=tcp_open(f"127.0.0.1:{ports[name]}"),
            address=f"127.0.0.1:{ports[name]}",
            start_s=20.0,
            stop_s=stop_s,
        )
        for name in names
    ]


async def _until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_start_that_takes_long_is_reported_again(tmp_path: Path) -> None:
    progress, go = Recorder(), tmp_path / "go"
    supervisor = ProcessSupervisor(progress, tmp_path / "fleet.json", report_s=0.2)
    starting = asyncio.create_task(supervisor.start(_specs(tmp_path, "a", flags=("slow", str(go)))))
    try:
        await _until(lambda: progress.names("starting").count("a") >= 3)
        go.touch()
        await starting
        assert progress.events[-1][:2] == ("a", "ready")
        count = len(progress.events)
        await asyncio.sleep(0.3)
        assert len(progress.events) == count, "nothing is reported of a process that serves"
    finally:
        await supervisor.stop()


async def test_starts_records_and_stops_in_reverse_order(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    await supervisor.start(_specs(tmp_path, "first"))
    await supervisor.start(_specs(tmp_path, "second", "third"))
    supervisor.mark_ready()
    record = FleetRecord.load(tmp_path / "fleet.json")
    assert record is not None
    assert record.phase == "ready"
    assert record.supervisor.pid == os.getpid()
    assert {name: child.pid for name, child in record.children.items()} == supervisor.pids
    await supervisor.stop()
    assert recorder.names("stopped") == ["third", "second", "first"]
    assert not any(child.alive for child in record.children.values())
    assert not (tmp_path / "fleet.json").exists()


async def test_dead_child_is_restarted_on_its_port(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    await supervisor.start(_specs(tmp_path, "one"))
    before = supervisor.pids["one"]
    os.kill(before, signal.SIGKILL)
    await _until(lambda: recorder.names("ready") == ["one", "one"])
    assert supervisor.pids["one"] != before
    assert any("SIGKILL" in detail for _, phase, detail in recorder.events if phase == "restarting")
    record = FleetRecord.load(tmp_path / "fleet.json")
    assert record is not None
    assert record.children["one"].pid == supervisor.pids["one"]
    await supervisor.stop()


async def test_full_disk_stops_neither_restart_nor_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    await supervisor.start(_specs(tmp_path, "one"))

    def full(record: FleetRecord, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(FleetRecord, "save", full)
    os.kill(supervisor.pids["one"], signal.SIGKILL)
    await _until(lambda: recorder.names("ready") == ["one", "one"])
    os.kill(supervisor.pids["one"], signal.SIGKILL)
    await _until(lambda: recorder.names("ready") == ["one", "one", "one"])
    await supervisor.stop()
    assert recorder.names("stopped") == ["one"]
    assert any("No space left" in detail for name, _, detail in recorder.events if name == "record")


async def test_child_that_cannot_be_started_now_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    place = tmp_path / "place"
    place.mkdir()
    (spec,) = (replace(spec, cwd=place) for spec in _specs(tmp_path, "one"))
    await supervisor.start([spec])
    place.rmdir()  # stands for whatever keeps a process from being started
    os.kill(supervisor.pids["one"], signal.SIGKILL)
    await _until(lambda: recorder.names("failed"))
    place.mkdir()
    await _until(lambda: len(recorder.names("ready")) == 2)
    await supervisor.stop()


async def test_child_whose_log_cannot_be_opened_is_restarted_without(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    (spec,) = _specs(tmp_path, "one")
    await supervisor.start([spec])
    spec.log.rename(tmp_path / "aside")
    spec.log.mkdir()
    os.kill(supervisor.pids["one"], signal.SIGKILL)
    await _until(lambda: len(recorder.names("ready")) == 2)
    assert not recorder.names("failed")
    await supervisor.stop()


class FullDisk(Recorder):
    """Takes events, and refuses to write them once ``full``."""

    full = False

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        super().event(name, phase, detail)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_events_that_cannot_be_written_stop_no_restart(tmp_path: Path) -> None:
    recorder = FullDisk()
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    await supervisor.start(_specs(tmp_path, "one"))
    recorder.full = True
    for lives in (2, 3):
        os.kill(supervisor.pids["one"], signal.SIGKILL)
        await _until(lambda lives=lives: len(recorder.names("ready")) == lives)  # type: ignore[misc]
    await supervisor.stop()
    assert recorder.names("stopped") == ["one"]


async def test_restart_also_ends_what_the_dead_child_started(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    await supervisor.start(_specs(tmp_path, "parent", flags=("family",)))
    group = supervisor.pids["parent"]
    os.kill(group, signal.SIGKILL)
    await _until(lambda: len(recorder.names("ready")) == 2)
    assert _members(group) == []
    await supervisor.stop()


async def test_silent_child_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairway.cli.fleet.supervisor._HEALTH_POLL_S", 0.1)
    recorder = Recorder()
    (spec,) = _specs(tmp_path, "one")
    silent = asyncio.Event()

    async def probe() -> str:
        return "no answer at all" if silent.is_set() else ""

    spec = ProcessSpec(
        **{**{name: getattr(spec, name) for name in spec.__slots__}, "probe": probe, "silence_s": 0.3}
    )
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    await supervisor.start([spec])
    before = supervisor.pids["one"]
    silent.set()
    await _until(lambda: recorder.names("restarting"))
    silent.clear()
    await _until(lambda: len(recorder.names("ready")) == 2)
    assert supervisor.pids["one"] != before
    await supervisor.stop()


async def test_child_that_dies_at_start_is_told_with_its_last_lines(tmp_path: Path) -> None:
    (good,) = _specs(tmp_path, "good")
    bad = ProcessSpec(
        name="bad",
        argv=(sys.executable, "-c", "import sys; sys.exit('the disk is upside down')"),
        env=dict(os.environ),
        log=tmp_path / "bad.log",
        probe=tcp_open("127.0.0.1:9"),
        address="127.0.0.1:9",
    )
    supervisor = ProcessSupervisor(Recorder(), tmp_path / "fleet.json")
    with pytest.raises(CliError, match="the disk is upside down") as caught:
        await supervisor.start([good, bad])
    assert caught.value.reason == "START_FAILED"
    assert "exit code 1" in caught.value.message
    assert str(bad.log) in caught.value.next_step
    pid = supervisor.pids["good"]
    await supervisor.stop()
    assert ProcessId.of(pid) is None


async def test_child_that_never_serves_is_told_with_the_reason(tmp_path: Path) -> None:
    (spec,) = _specs(tmp_path, "mute")

    async def probe() -> str:
        return "answers NOT_SERVING"

    slow = ProcessSpec(
        **{**{name: getattr(spec, name) for name in spec.__slots__}, "probe": probe, "start_s": 0.5}
    )
    supervisor = ProcessSupervisor(Recorder(), tmp_path / "fleet.json")
    with pytest.raises(CliError, match=r"not ready within 0\.5 s: answers NOT_SERVING"):
        await supervisor.start([slow])
    await supervisor.stop()


async def test_stubborn_child_and_its_family_are_killed_in_time(tmp_path: Path) -> None:
    recorder = Recorder()
    supervisor = ProcessSupervisor(recorder, tmp_path / "fleet.json")
    await supervisor.start(_specs(tmp_path, "bad", flags=("stubborn", "family"), stop_s=0.5))
    group = supervisor.pids["bad"]
    began = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - began < 60
    await _until(lambda: not _members(group))
    assert any("killed" in detail for _, phase, detail in recorder.events if phase == "stopped")


async def test_second_signal_skips_the_drain(tmp_path: Path) -> None:
    supervisor = ProcessSupervisor(Recorder(), tmp_path / "fleet.json")
    await supervisor.start(_specs(tmp_path, "bad", flags=("stubborn",), stop_s=60.0))
    pid = supervisor.pids["bad"]
    hurry = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, hurry.set)
    async with asyncio.timeout(30):
        await supervisor.stop(now=hurry)
    assert ProcessId.of(pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel watches the parent on Linux only")
def test_killed_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from fairway.cli.fleet.probes import tcp_open
from fairway.cli.fleet.supervisor import ProcessSpec
from fairway.cli.fleet.ports import choose_ports
from fairway.cli.fleet.progress import LineProgress
from fairway.cli.fleet.supervisor import ProcessSupervisor
from fairway.cli.terminal.output import out
import os
folder = Path({str(tmp_path)!r})
ports = choose_ports(("a", "b"), fixed={{}}, remembered={{}}, preferred={{}})
specs = [ProcessSpec(name=n, argv=(sys.executable, "-c", {LISTENER!r}, str(p), "stubborn"),
         env=dict(os.environ), log=folder / n, probe=tcp_open(f"127.0.0.1:{{p}}"), address="")
         for n, p in ports.items()]
async def main():
    supervisor = ProcessSupervisor(LineProgress(out()), folder / "fleet.json")
    await supervisor.start(specs)
    print("READY", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("READY"):
                break
        record = FleetRecord.load(tmp_path / "fleet.json")
        assert record is not None
        assert len(record.children) == 2
        process.kill()
        assert wait_for_end(list(record.children.values()), timeout_s=30)


def test_logs_are_rotated_and_bounded(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    for number in range(6):
        rotate_log(log)
        log.write_text(f"run {number}\n")
    assert log.read_text() == "run 5\n"
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["role.log", "role.log.1", "role.log.2", "role.log.3"]
    assert (tmp_path / "role.log.1").read_text() == "run 4\n"


async def test_logs_are_bounded_while_their_process_writes(tmp_path: Path) -> None:
    flood = "import time\nfor n in range(200_000): print('line', n, '.' * 80, flush=True)\ntime.sleep(300)"
    (spec,) = _specs(tmp_path, "loud")
    loud = ProcessSpec(
        **{**{name: getattr(spec, name) for name in spec.__slots__}, "probe": _content}
        | {"argv": (sys.executable, "-c", flood)}
    )
    bound = 1024 * 1024
    supervisor = ProcessSupervisor(Recorder(), tmp_path / "fleet.json", max_log_bytes=bound)
    await supervisor.start([loud])
    older = tmp_path / "loud.log.1"
    await _until(lambda: older.exists() and loud.log.stat().st_size < bound, timeout_s=60)
    assert older.read_bytes().startswith(b"line ")
    assert b"\x00" not in loud.log.read_bytes()  # the process goes on at the file's new end
    await supervisor.stop()
    assert sum(path.stat().st_size for path in tmp_path.glob("loud.log*")) < 200_000 * 100


async def _content() -> str:
    return ""


def test_log_that_cannot_be_kept_is_cut_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "role.log"
    log.write_bytes(b"x" * 5000)
    (tmp_path / "role.log.1").mkdir()  # stands for a disk that takes no copy
    (tmp_path / "role.log.2").mkdir()
    (tmp_path / "role.log.2" / "kept").touch()
    (tmp_path / "role.log.3").mkdir()
    (tmp_path / "role.log.3" / "kept").touch()
    assert not bound_log(log, max_bytes=5000)
    assert bound_log(log, max_bytes=4999)
    assert log.stat().st_size == 0


def test_tail_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail(log, lines=2) == "line 99998\nline 99999"
    assert tail(tmp_path / "none") == ""


def _members(group: int) -> list[int]:
    """Ids of the live processes of a process group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(entry.parent.name))
    return found
