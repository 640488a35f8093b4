"""Runs a suite: starts its command as often as asked, and returns a record of what it printed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

from bench.results import RESULT, SAMPLES, flat
from bench.store.machine import fingerprint, versions
from bench.store.records import SCHEMA, BenchRecord, Run, StoreError
from bench.store.suites import BenchSuite, parameters_of

ROOT: Final = Path(__file__).parents[2]
NOT_HERE: Final = 3  # exit status of a command that finds no device or peer to measure
MISSED: Final = 1  # exit status of a command that measured, and missed an aim
MAX_LINE: Final = 1 << 20
END_S: Final = 10.0  # time for a stopped start to stop what it started, and for its last output to be read


class SuiteSkipped(Exception):
    """The command found nothing to measure with."""


@dataclass(slots=True)
class Side:
    """One source tree that is measured, and what its starts printed."""

    tree: Path
    versions: dict[str, str]
    runs: list[Run] = field(default_factory=list)
    missed: bool = False


def run_variant(
    name: str,
    suite: BenchSuite,
    arguments: Sequence[str],
    *,
    starts: int,
    beside: Path | None,
    state: str | None,
    load: float,
) -> Iterator[BenchRecord]:
    """Yield the record of this tree, and that of the tree ``beside``, whose starts alternate with ours.

    ``load``: runnable processes over the minute before the first variant. What the command prints goes to
    stdout. Raises StoreError where a start fails, SuiteSkipped where there is nothing to measure with.
    """
    # The versions are read before the first start: a commit during the starts is not what they ran.
    sides = [Side(tree, versions(tree)) for tree in (ROOT, beside) if tree is not None]
    began = datetime.now(UTC)
    for number in range(starts):
        for side in sides if number % 2 == 0 else reversed(sides):
            figures, missed = start(suite, arguments, side.tree)
            side.runs.append(figures)
            side.missed |= missed
    stamp = f"{began:%Y%m%dT%H%M%S}"
    session = f"{name}-{stamp}-{secrets.token_hex(2)}"
    machine, ended = fingerprint(state), datetime.now(UTC)
    parameters = parameters_of(arguments)
    for side in sides:
        figure_names = {figure for run in side.runs for figure in run}
        yield BenchRecord(
            schema=SCHEMA,
            # In order of their ids, the other tree is the earlier one of a comparison.
            id=session if beside is None else f"{session}-{'beside' if side.tree == beside else 'this'}",
            suite=name,
            command=shlex.join(["python", "-m", suite.module, *suite.arguments, *arguments]),
            began=began,
            ended=ended,
            machine=machine,
            parameters=parameters,
            device=device_of(parameters.get("device", suite.device)),
            versions=side.versions,
            load_before=round(load, 2),
            better=suite.better(sorted(figure_names)),
            session=session if beside is not None else "",
            runs=side.runs,
            note="an aim of the benchmark was missed" if side.missed else "",
        )


def start(suite: BenchSuite, arguments: Sequence[str], tree: Path) -> tuple[Run, bool]:
    """Return the values of one start, and whether it missed an aim. Its output is passed on.

    Its process group has ended. Raises StoreError also for a start that exceeds the suite's time limit.
    """
    command = [sys.executable, "-m", suite.module, *suite.arguments, *arguments]
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    lines: dict[str, str] = {}
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    # A child of another session may keep the pipe open, so that only a thread can wait for its end.
    reader = threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        process.wait(suite.timeout_s)
    except subprocess.TimeoutExpired:
        raise StoreError(
            f"{shlex.join(command[1:])} took more than {suite.timeout_s:g} s: nothing is recorded",
            "its output is above",
        ) from None
    finally:
        _end_group(process)
        reader.join(END_S)
    if process.returncode == NOT_HERE:
        raise SuiteSkipped(f"{shlex.join(command[1:])} found nothing to measure with")
    if process.returncode not in (0, MISSED) or RESULT not in lines:
        raise StoreError(
            f"{shlex.join(command[1:])} ended with status {process.returncode}"
            f"{'' if RESULT in lines else ' and without a RESULT line'}: nothing is recorded",
            "its output is above",
        )
    return values_of_lines(lines), process.returncode == MISSED


def _pass_on(output: IO[str], lines: dict[str, str]) -> None:
    """Copy the output to stdout, and its last RESULT and SAMPLES lines to ``lines``."""
    with output:
        while line := output.readline(MAX_LINE):
            sys.stdout.write(line)
            sys.stdout.flush()
            lines |= {mark: line for mark in (RESULT, SAMPLES) if line.startswith(mark)}


def _end_group(process: subprocess.Popen[str]) -> None:
    """Stop the process and its group, and return when the process has ended."""
    # SIGTERM ends Python without its `finally`, which stops the servers that have sessions of their own.
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


def values_of_lines(lines: dict[str, str]) -> Run:
    """Return the values of each figure: the samples where there are, else the figure. Raises StoreError."""
    try:
        result, samples = (
            json.loads(lines.get(mark, mark + "{}")[len(mark) :]) for mark in (RESULT, SAMPLES)
        )
        found = flat(result) | flat(samples)
    except (ValueError, AttributeError, TypeError) as error:
        raise StoreError(f"the RESULT or SAMPLES line is no JSON object of numbers: {error}") from error
    if not found:
        raise StoreError("the RESULT line has no figure")
    return found


def device_of(name: str) -> str:
    """Return the device, for a GPU with its product name and driver."""
    if not name.startswith("cuda"):
        return name
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return f"{name}: {done.stdout.splitlines()[0].strip()}"
    except (OSError, subprocess.SubprocessError, IndexError):
        return name
