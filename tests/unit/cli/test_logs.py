"""`fairway logs`: which lines, in which order, of which processes, and what is written afterwards."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from random import Random

import pytest

from fairway.cli.commands.status import MAX_LINE_BYTES, LogFile, last_lines
from fairway.cli.errors import ExitCode
from fairway.cli.main import app, run
from tests.support.waiting import until


def line(second: int, level: str = "info", event: str = "a.b_done") -> str:
    return json.dumps({"event": event, "level": level, "timestamp": f"2026-11-28T12:00:{second:02}.5Z"})


@pytest.fixture
def state(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gateway.log").write_text(
        "\n".join((line(1), line(3, "error"), "Traceback: of it", line(5, "warning"))) + "\n"
    )
    (logs / "worker-0.log").write_text(f"{line(2)}\n{line(4, 'error')}\n")
    (logs / "redis.log").write_text("12:M 28 Nov 2026 * Ready\n")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(app, ["logs", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_of_a_role_and_of_all_by_time(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--state-dir", str(state))
    assert shown(capsys, "worker", *place) == [line(2), line(4, "error")]
    assert shown(capsys, "gateway", "-n", "2", *place) == ["Traceback: of it", line(5, "warning")]
    assert [each.split("\t")[0] for each in shown(capsys, "-n", "4", *place)] == [
        *("gateway", "gateway", "worker-0", "gateway")
    ]
    assert shown(capsys, "gateway", "--level", "error", *place) == [line(3, "error"), "Traceback: of it"]
    assert shown(capsys, "--level", "warning", "--since", "2026-11-28T12:00:04Z", *place) == [
        f"worker-0\t{line(4, 'error')}",
        f"gateway\t{line(5, 'warning')}",
    ]


def test_what_cannot_be_shown_is_named(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["logs", "gatway", "--state-dir", str(state)]) == ExitCode.USAGE
    assert "name one of gateway, redis, worker-0" in capsys.readouterr().err
    assert run(app, ["logs", "--state-dir", str(state / "nowhere")]) == ExitCode.NOT_RUNNING
    assert run(app, ["logs", "--level", "loud", "--state-dir", str(state)]) == ExitCode.USAGE


@pytest.mark.parametrize("seed", range(5))
def test_every_line_is_read_once_however_it_is_written(tmp_path: Path, seed: int) -> None:
    rng, path, wanted, found = Random(seed), tmp_path / "a.log", [], []
    file = LogFile("a", path, "", 0)
    for number in range(200):
        text = line(number % 60, event=f"a.b_{number}")
        wanted.append(text)
        data = f"{text}\n".encode()
        cut = rng.randrange(len(data) + 1)
        for part in (data[:cut], data[cut:]):
            with path.open("ab") as log:
                log.write(part)
            if rng.random() < 0.5:
                found += [each for _, each in file.lines()]
        if rng.random() < 0.05:
            found += [each for _, each in file.lines()]
            path.write_bytes(b"")  # as a log above its bound is
            found += [each for _, each in file.lines()]
    assert [*found, *(each for _, each in file.lines())] == wanted


def test_a_log_of_one_line_without_end_takes_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * (10 * MAX_LINE_BYTES))
    found = last_lines([LogFile("a", path, "", 0)], 3)
    assert [len(each) for each in found] == [MAX_LINE_BYTES] * 3


async def test_further_lines_follow(state: Path) -> None:
    command = (sys.executable, "-m", "fairway.cli.main", "logs", "gateway", "-f", "--state-dir", str(state))
    out = state / "out"
    with out.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file)
        try:
            await until(lambda: out.read_text().count("\n") == 4)
            with (state / "logs" / "gateway.log").open("a") as log:
                log.write(f"{line(9)}\n")
            await until(lambda: out.read_text().endswith(f"{line(9)}\n"))
        finally:
            process.terminate()
            await process.wait()
