"""A batcher process in which some rows end their batch, for tests and drills.

``engine_faults`` on PYTHONPATH puts it in the place of each batcher process that a worker starts. Nothing of
it is in the product. A row of an MLP whose first value is ``POISON`` plus a ``RowFault`` ends each batch that
contains it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from enum import IntEnum
from functools import partial
from typing import Final

import numpy as np

from services.worker.batcher.models.model import Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch
from services.worker.batcher.process import load
from services.worker.engine import process
from tests.support.wrapped_model import WrappedModel

POISON: Final = 7000.0
_STEP: Final = 8 * 1024 * 1024  # values of one allocation


class RowFault(IntEnum):
    """How the batch ends."""

    RAISES = 1
    SEGFAULTS = 2
    KILLED = 3  # by SIGKILL, as the memory killer does it
    ALLOCATES = 4  # without end
    HANGS = 5


class PoisonedModel(WrappedModel):
    """A row ends its batch if it is a poison."""

    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``. Ends the batch if a row of it is a poison."""
        for row in batch.rows:
            first = float(next(iter(row.values())).flat[0])
            if first > POISON:
                end_by(RowFault(round(first - POISON)))
        return super().run(batch, pause)


def end_by(fault: RowFault) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    match fault:
        case RowFault.RAISES:
            raise RuntimeError("device-side assert triggered")
        case RowFault.SEGFAULTS:
            ctypes.string_at(0)
        case RowFault.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        case RowFault.ALLOCATES:
            kept = []
            while True:
                kept.append(np.ones(_STEP))
        case RowFault.HANGS:
            time.sleep(3600.0)


def main(arguments: list[str]) -> int:
    """Run the batcher process with these arguments; return its exit code."""
    return process.main(arguments, load=partial(load, around=PoisonedModel))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
