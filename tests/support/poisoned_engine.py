"""An engine process in which some prompts end the process, for tests and drills.

``engine_faults`` on PYTHONPATH puts it in the place of each engine that a worker starts. Nothing of it is in
the product. A prompt that begins with ``poison_ids`` ends the engine in each step that samples it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Final

from services.worker.engine import process
from services.worker.engine.execute.executor import Batch, Executor, Samples
from services.worker.engine.load.loading import load

MARK: Final = (509, 508, 509, 507)


class Fault(IntEnum):
    """How the engine ends."""

    RAISES = 10  # an exception, as a failed device gives it
    SEGFAULTS = 11
    ABORTS = 12
    KILLED = 13  # by SIGKILL, as the memory killer does it
    HANGS = 14


def poison_ids(fault: Fault, number: int) -> list[int]:
    """Return the first ids of a prompt, different for each number; of any vocabulary with 512 tokens."""
    return [*MARK, fault, number]


def fault_of(tokens: Sequence[int]) -> Fault | None:
    """Return what a sequence that begins with these ids does to its engine."""
    return Fault(tokens[len(MARK)]) if tuple(tokens[: len(MARK)]) == MARK else None


class PoisonedExecutor:
    """Implements ``Executor`` around another one."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._submitted: deque[Batch] = deque()

    @property
    def runs_ahead(self) -> bool:
        return self._inner.runs_ahead

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        self._submitted.append(batch)
        self._inner.submit(batch)

    def collect(self) -> Samples:
        """See ``Executor``. Ends the process if a member of the batch is a poison."""
        for sequence in self._submitted.popleft().sampled:
            if (fault := fault_of(sequence.tokens[: len(MARK) + 1])) is not None:
                end_by(fault)
        return self._inner.collect()

    def resize(self, blocks: int) -> None:
        """See ``Executor``."""
        self._inner.resize(blocks)


def end_by(fault: Fault) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    match fault:
        case Fault.RAISES:
            raise RuntimeError("device-side assert triggered")
        case Fault.SEGFAULTS:
            ctypes.string_at(0)
        case Fault.ABORTS:
            os.abort()
        case Fault.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        case Fault.HANGS:
            time.sleep(3600.0)


def main(arguments: list[str]) -> int:
    """Run the engine process with these arguments; return its exit code."""
    return process.main(arguments, load=partial(load, around=PoisonedExecutor))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
