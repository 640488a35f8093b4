"""Makes a child process end with its role. Each child imports this module, so keep it small."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_", "LD_LIBRARY_PATH", "PYTHON", "TMPDIR", "VIRTUAL_ENV")


def die_with_parent() -> None:
    """End this process with the thread that started it, and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def bare_environment() -> dict[str, str]:
    """Return the variables that Python needs from this process's environment, without Fairway's settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
