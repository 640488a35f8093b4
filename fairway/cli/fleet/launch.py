"""Run as a script: become the given program, and end with the parent process.

    python launch.py PARENT_PID SIGNAL PROGRAM [ARGUMENT ...]

On Linux the kernel sends SIGNAL to the program when its parent ends, however the parent ends.
On other systems `fairway down` ends the processes that a killed supervisor left.
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
    if os.getppid() != parent:  # the parent ended before prctl took effect
        sys.exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as exc:
        sys.exit(f"cannot run {program[0]}: {exc.strerror}")


if __name__ == "__main__":
    main(sys.argv)
