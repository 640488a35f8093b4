"""Run as a script: become the given program, and end with the process that started it.

    python launch.py PARENT_PID SIGNAL PROGRAM [ARGUMENT ...]

On Linux the kernel sends SIGNAL to the program when its parent ends, however the parent ends.
Elsewhere nothing watches, and `fairway down` ends what a killed supervisor left behind.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Replace this process by the program. Does not return."""
    parent, number, program = int(argv[1]), int(argv[2]), argv[3:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the kernel was told to watch it
        sys.exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as exc:
        sys.exit(f"cannot run {program[0]}: {exc.strerror}")


if __name__ == "__main__":
    main(sys.argv)
