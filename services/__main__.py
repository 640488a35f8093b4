"""``python -P -m services ROLE`` runs one role, configured by FAIRWAY_ variables."""

import os

from fairway.log_stream import hold_standard_descriptors


def prepare_grpc() -> None:
    """Make grpc safe for a process that forks, and silence its log. Call before grpc is imported.

    Its fork handlers run in every child between fork and exec, and may crash the child of a busy process. Its
    C core writes a raw line for each call that it rejects itself, so callers could fill the log.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def run() -> None:
    """Prepare the environment, then import and run what uses it."""
    hold_standard_descriptors()
    prepare_grpc()
    from services.app.process import main

    main()


if __name__ == "__main__":
    run()
