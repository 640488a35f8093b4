"""Environment variables that grpc reads at its first import."""

from __future__ import annotations

import os


def prepare() -> None:
    """Make grpc safe for a process that forks, and silence its log. Call before grpc is imported.

    Its fork handlers run in every child between fork and exec, and may crash the child of a busy process. Its
    C core writes a raw line for each call that it rejects itself, so callers could fill the log.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
