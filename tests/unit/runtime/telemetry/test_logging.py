"""A log that cannot be written, and one that nobody reads, as its writer sees them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from logging import WARNING, LogRecord
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fairway.log_stream import LogStream, hold_standard_descriptors
from services.runtime.telemetry import logging
from tests.support.tiny_disk import fill, tiny_disk

SPACE = 256 * 1024


def test_lines_lost_to_a_full_disk_are_counted_and_reported_once_there_is_space(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", SPACE):
        with (tmp_path / "disk" / "log").open("ab") as log:
            stream = LogStream(log.fileno(), lambda lines: f"lost {lines}\n")
            stream.write("first\n")
            filler = fill(tmp_path / "disk")
            for _ in range(5000):  # the last page of the log still takes some
                stream.write("x" * 99 + "\n")
            assert stream.lost > 4900
            lost = stream.lost
            filler.unlink()
            stream.write("back\n")
            stream.write("again\n")
        lines = (tmp_path / "disk" / "log").read_text().splitlines()
        assert lines[0] == "first"
        assert lines[-3:] == [f"lost {lost}", "back", "again"]
        assert len([line for line in lines if line == "x" * 99]) == 5000 - lost
        assert len(lines) <= 5000 - lost + 5, "at most one line is torn"


def test_a_file_at_its_limit_of_size_raises_nothing(tmp_path: Path) -> None:
    program = """
import resource, sys
from fairway.log_stream import LogStream
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
stream = LogStream.on(sys.stderr)
for _ in range(10):
    stream.write("x" * 29 + "\\n")
print(stream.lost)
"""
    with (tmp_path / "log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-c", program], stderr=log, stdout=subprocess.PIPE, text=True, check=True
        )
    assert done.stdout == "7\n"
    assert (tmp_path / "log").stat().st_size == 100


def test_a_pipe_that_nobody_reads_holds_up_no_writer_and_is_shared_unchanged() -> None:
    receive, send = os.pipe()
    other = os.dup(send)
    stream = LogStream(send)
    began_s = time.monotonic()
    for _ in range(20_000):
        stream.write("x" * 99 + "\n")
    assert time.monotonic() - began_s < 60
    assert stream.lost > 5000
    assert os.get_blocking(other), "who shares the pipe waits as before"
    lost = stream.lost
    while len(os.read(receive, 1 << 20)) == 1 << 20:
        pass
    stream.write("back\n")
    assert f"{lost} lines were lost" in os.read(receive, 1 << 20).decode()
    for each in (receive, send, other):
        os.close(each)


def test_a_slow_reader_is_waited_for_once(tmp_path: Path) -> None:
    receive, send = os.pipe()
    stream = LogStream(send, patience_s=0.2)
    began_s = time.monotonic()
    for _ in range(20_000):
        stream.write("x" * 99 + "\n")
    assert 0.2 <= time.monotonic() - began_s < 60
    os.close(receive)
    os.close(send)


def test_a_reader_that_is_gone_and_a_closed_descriptor_raise_nothing() -> None:
    receive, send = os.pipe()
    stream = LogStream(send)
    os.close(receive)
    stream.write("nobody reads\n")
    os.close(send)
    stream.write("nowhere to write\n")
    assert stream.lost == 2
    nothing = LogStream.on(None)
    nothing.write("nothing to write to\n")
    assert nothing.lost == 1
    with pytest.raises(io.UnsupportedOperation):
        nothing.fileno()


def test_standard_descriptors_that_were_closed_are_held() -> None:
    program = """
import os
from fairway.log_stream import hold_standard_descriptors
hold_standard_descriptors()
first = os.open(os.devnull, os.O_RDWR)
os._exit(first)
"""
    shell = [f"exec {sys.executable} -c '{program}' <&- 2>&-"]
    done = subprocess.run(["sh", "-c", *shell], stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 3
    before = os.dup(0)
    hold_standard_descriptors()
    after = os.dup(0)
    assert after == before + 1, "nothing is left open"
    os.close(before)
    os.close(after)


def test_the_loggers_of_a_role_raise_nothing_on_a_full_disk() -> None:
    """In a process of its own: the streams of this one are pytest's."""
    program = """
import logging, sys, structlog
from services.runtime.telemetry import logging as ours
stream = ours.open_log(role="scheduler")
ours.configure("info", role="scheduler")
structlog.get_logger().info("thing.done", text="\\ud800")
logging.getLogger("library").error("refused")
print("printed")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("thing.crashed")
sys.exit(stream.lost)
"""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stderr=full, stdout=full, check=False)
    lines_at_least = 4
    assert done.returncode >= lines_at_least


def test_what_libraries_log_is_bounded_and_in_our_form() -> None:
    program = """
import logging, sys
from services.runtime.telemetry import logging as ours
ours.configure("info", role="gateway")
library = logging.getLogger("grpc._cython.cygrpc")
for number in range(1000):
    try:
        raise ConnectionError("two\\nlines")
    except ConnectionError:
        library.exception("call %d:\\nfailed", number)
library.info("left out")
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert 1 <= len(lines) <= 3 * logging.LIBRARY_LINES_PER_S
    assert {(line["event"], line["level"], line["role"]) for line in lines} == {
        ("library.logged", "error", "gateway")
    }
    assert (lines[0]["logger"], lines[0]["message"]) == ("grpc._cython.cygrpc", "call 0:\nfailed")
    assert lines[0]["exception"][0]["exc_value"] == "two\nlines"


def test_lines_of_libraries_that_were_left_out_are_counted() -> None:
    now_s = 0.0
    handler = logging.LibraryLines(logging.LineBudget(lambda: now_s, 1.0))
    record = LogRecord("library", WARNING, "", 0, "refused", (), None)
    with capture_logs() as lines:
        for _ in range(4):
            handler.handle(record)
        now_s = 2.0
        handler.handle(record)
    assert [line.get("suppressed_lines") for line in lines] == [None, 3]


def test_the_notice_is_a_log_line_like_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receive, send = os.pipe()
    with os.fdopen(send, "w") as stderr:
        monkeypatch.setattr(sys, "stdout", sys.stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        stream = logging.open_log(role="gateway")
        while not stream.lost:
            stream.write("x" * 4095 + "\n")
        while len(os.read(receive, 1 << 21)) == 1 << 21:
            pass
        stream.write("{}\n")
    first = json.loads(os.read(receive, 1 << 21).decode().splitlines()[0])
    os.close(receive)
    assert first["event"] == "log.lines_lost"
    assert (first["lines"], first["role"], first["level"]) == (1, "gateway", "warning")
    assert first["timestamp"]
