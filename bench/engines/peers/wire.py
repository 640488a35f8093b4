"""The protocol of a benchmark and a runner, a process in an environment of its own. Standard library only.

A line of JSON each way. The runner sends ``{}`` once loaded; then it receives ``{"prompts", "outputs"}``,
lists of token ids and how many tokens to produce for each, and answers ``{"wall_s", "tokens"}``. It ends with
its standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import IO, Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h

Prompts = list[list[int]]
Produce = Callable[[Prompts, list[int]], Prompts]
Run = Callable[[Prompts, list[int]], tuple[float, Prompts]]  # the seconds it took, too


def claim_output() -> IO[str]:
    """Return the standard output, and give its place to the error output: libraries write to it."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def die_with_parent() -> None:
    """Make the kernel end this process with the one that started it, also while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def timed(produce: Produce) -> Run:
    """Return a run of which all is timed."""

    def run(prompts: Prompts, outputs: list[int]) -> tuple[float, Prompts]:
        began_s = time.perf_counter()
        tokens = produce(prompts, outputs)
        return time.perf_counter() - began_s, tokens

    return run


def serve(out: IO[str], run: Run) -> None:
    """Answer loads until there are none."""
    print("{}", file=out)
    for line in sys.stdin:
        load = json.loads(line)
        wall_s, tokens = run(load["prompts"], load["outputs"])
        print(json.dumps({"wall_s": wall_s, "tokens": tokens}), file=out)
