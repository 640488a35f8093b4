"""A record of one benchmark, and the store: a folder with a file of JSON lines per suite."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

SCHEMA: Final = 1
MAX_RECORD_BYTES: Final = 256 * 1024
MAX_FILE_BYTES: Final = 64 * 1024 * 1024
SUFFIX: Final = ".jsonl"
NAME: Final = r"^[a-z0-9][a-z0-9_-]{0,63}$"
# A machine need not have these.
OPTIONAL: Final = ("governor", "cpu_limit", "memory_limit_gib", "state")
_SCHEMA: Final = re.compile(rb'"schema":\s*(\d+)')

Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=NAME)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=2000)]
Values: TypeAlias = Annotated[list[float], msgspec.Meta(min_length=1, max_length=4096)]
FigureName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[\w.:@=+-]{1,120}$")]
Run: TypeAlias = dict[FigureName, Values]
Direction: TypeAlias = Literal["higher", "lower"]


class BenchMachine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fingerprint of a machine. None: the field was not readable, or not recorded."""

    cpu: str | None = None  # model name of the processor
    cores: int | None = None  # cores that the process may use
    memory_gib: float | None = None
    governor: str | None = None  # frequency governor of the first core
    cpu_limit: float | None = None  # cores that the container may use
    memory_limit_gib: float | None = None
    os: str | None = None
    python: str | None = None
    state: str | None = None  # what else the machine did, by its operator


class BenchRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One benchmark: its conditions and raw values.

    ``runs`` has the values by round of each start of the command. A record without runs was written by hand
    from a published figure: it has ``figures`` alone, and takes no part in comparisons.
    """

    schema: Literal[1]
    id: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.:-]{4,120}$")]
    suite: Name
    command: Text
    began: datetime
    ended: datetime
    machine: BenchMachine
    parameters: dict[str, Text] = {}  # arguments of the command by name
    device: Text = "cpu"
    versions: dict[str, Text] = {}  # commit of the project, and its libraries by name
    load_before: float | None = None  # runnable processes over the minute before the first variant
    better: dict[FigureName, Direction] = {}
    session: Text = ""  # records of one session ran in turns and are compared in pairs
    runs: Annotated[list[Run], msgspec.Meta(max_length=200)] = []
    figures: dict[FigureName, float] = {}
    note: Text = ""

    @property
    def names(self) -> list[str]:
        """The names of the figures, sorted."""
        return sorted({*self.figures, *(name for run in self.runs for name in run)})

    def figure(self, name: str) -> float | None:
        """Return the median over the starts of the medians over the rounds; None for an absent figure."""
        values = [median(run[name]) for run in self.runs if name in run]
        return median(values) if values else self.figures.get(name)

    def conditions(self) -> dict[str, str]:
        """Return by name what must be equal before figures may be compared; ``unknown`` equals nothing."""
        found = {}
        for name, value in msgspec.structs.asdict(self.machine).items():
            unset = "none" if self.runs and name in OPTIONAL else "unknown"
            found[f"machine.{name}"] = unset if value is None else str(value)
        parameters = {f"parameters.{name}": value for name, value in self.parameters.items()}
        # The command has the suite's module and fixed arguments, which are no parameters.
        found |= {"suite": self.suite, "command": self.command, **parameters}
        # Without its product name, a GPU may be any.
        nameless = self.device.startswith("cuda") and ": " not in self.device
        return found | {"device": "unknown" if nameless else self.device}


class StoreError(Exception):
    """A store or record cannot be used. ``next_step`` is what the user can do about it."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step


class BenchStore:
    """The records of a folder. A line that is no record is skipped and described in ``problems``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self.records: list[BenchRecord] = []
        self._ids: set[str] = set()
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder} is no folder", "name a folder for the records")
        for path in sorted(folder.glob("*" + SUFFIX)):
            self._read(path)
        self.records.sort(key=lambda record: (record.began, record.id))

    def _read(self, path: Path) -> None:
        if path.stat().st_size > MAX_FILE_BYTES:
            self.problems.append(f"{path.name}: larger than {MAX_FILE_BYTES >> 20} MiB, not read")
            return
        content = path.read_bytes()
        for number, line in enumerate(content.splitlines(), start=1):
            if not line.strip():
                continue
            found = _decoded(line)
            if isinstance(found, BenchRecord) and found.id in self._ids:
                found = f"a second record with id {found.id}"
            if isinstance(found, BenchRecord):
                self.records.append(found)
                self._ids.add(found.id)
            else:
                self.problems.append(f"{path.name}, line {number}: {found}; the line is skipped")

    def append(self, record: BenchRecord) -> Path:
        """The record is on the disk, in the file of its suite. Return the file.

        Raises StoreError for a record that is too large, or that a reader would refuse, and for a folder that
        cannot be written.
        """
        line = msgspec.json.encode(record)
        if isinstance(found := _decoded(line), str):
            raise StoreError(f"the record of {record.suite} cannot be kept: {found}")
        path = self.folder / (record.suite + SUFFIX)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # another appender's record is before or after this one
                cut = file.tell() and _last_byte(file.fileno()) != b"\n"
                # A line that a crash cut is ended, so that only that record is lost.
                file.write((b"\n" if cut else b"") + line + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}", "name a folder that can be written") from error
        self.records.append(record)
        return path

    def named(self, text: str) -> BenchRecord:
        """Return the record whose id begins so. Raises StoreError unless it is the only one."""
        found = [record for record in self.records if record.id.startswith(text)]
        exact = [record for record in found if record.id == text]
        if len(exact or found) == 1:
            return (exact or found)[0]
        listed = ", ".join(record.id for record in found[:5])
        problem = (
            f"{len(found)} records begin with {text!r}: {listed}"
            if found
            else f"no record begins with {text!r}"
        )
        raise StoreError(problem, "`fairway bench list` shows the records")

    def series(self, suite: str, figure: str, like: BenchRecord) -> list[BenchRecord]:
        """Return ``like`` and the records of its conditions with raw values of a figure, oldest first."""
        return [
            record
            for record in self.records
            if record.suite == suite and figure in {name for run in record.runs for name in run}
            if record is like or not differences(record, like)
        ]


def _last_byte(descriptor: int) -> bytes:
    return os.pread(descriptor, 1, os.fstat(descriptor).st_size - 1)


def _decoded(line: bytes) -> BenchRecord | str:
    """Return the record, or why the line is none."""
    if len(line) > MAX_RECORD_BYTES:
        return f"{len(line)} bytes, more than {MAX_RECORD_BYTES}"
    try:
        record = msgspec.json.decode(line, type=BenchRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        schema = _SCHEMA.search(line)
        if schema and int(schema[1]) != SCHEMA:
            return f"its schema is {schema[1].decode()}, this version reads {SCHEMA}"
        if not line.rstrip().endswith(b"}"):
            return f"it is cut after {len(line)} bytes"
        return str(error)
    if not record.runs and not record.figures:
        return "it has neither runs nor figures"
    if record.ended < record.began:
        return "it ended before it began"
    return record


def differences(a: BenchRecord, b: BenchRecord) -> dict[str, tuple[str, str]]:
    """Return the conditions in which two records differ. A field that is unknown equals nothing."""
    ours, theirs = a.conditions(), b.conditions()
    return {
        name: (ours.get(name, "absent"), theirs.get(name, "absent"))
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name) or ours.get(name) == "unknown"
    }


def values_of(record: BenchRecord, figure: str) -> Sequence[Sequence[float]]:
    """Return the values of each start that has the figure, by round."""
    return [run[figure] for run in record.runs if figure in run]
