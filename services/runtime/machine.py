"""What this machine offers a process."""

from __future__ import annotations

import os


def available_cpus() -> int:
    """Return how many processors this process may run on."""
    return len(os.sched_getaffinity(0))


def default_engine_threads() -> int:
    """Return the threads of an engine that was told none: half of the processors, at least one.

    The rest serves the roles beside it. A thread pool as wide as the machine waits, at each of the
    hundreds of barriers of a step, for whichever of its threads was scheduled away.
    """
    return max(1, available_cpus() // 2)
