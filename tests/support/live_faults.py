"""Faults that a file switches on and off while processes run. Nothing of it is in the product.

The file is JSON: by kind of fault, a number by the name of a process. ``step_ratio``: its steps take so many
times as long. ``log_s``: each line of its log takes so many seconds to write.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

from tests.chaos.proxy import NAME_VARIABLE

FILE_VARIABLE: Final = "DRILL_FAULTS"
STEP_RATIO, LOG_S = "step_ratio", "log_s"
_LOG_DESCRIPTOR: Final = 2


class LiveFaults:
    """The faults of this process; the file is read again after each change."""

    def __init__(self) -> None:
        self._path = Path(os.environ[FILE_VARIABLE])
        self._name = os.environ[NAME_VARIABLE]
        self._changed_ns = 0
        self._found: dict[str, dict[str, float]] = {}

    def of(self, kind: str, default: float) -> float:
        try:
            changed_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return default
        if changed_ns != self._changed_ns:
            self._changed_ns, self._found = changed_ns, json.loads(self._path.read_text())
        return self._found.get(kind, {}).get(self._name, default)


def write_fault(path: Path, kind: str, name: str, value: float | None) -> None:
    """Switch a fault on, or off with None. The file is replaced whole: readers see the old or the new one."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found.setdefault(kind, {})
    if value is None:
        found[kind].pop(name, None)
    else:
        found[kind][name] = value
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.replace(path)


def slow_log_disk() -> None:
    """Make writes of this process to its log as slow as the faults say."""
    faults, write = LiveFaults(), os.write

    def slowly(descriptor: int, data: Any, /) -> int:
        if descriptor == _LOG_DESCRIPTOR and (delay_s := faults.of(LOG_S, 0.0)):
            time.sleep(delay_s)
        return write(descriptor, data)

    os.write = slowly
