"""``python -P -m services ROLE`` runs one role, configured by FAIRWAY_ variables."""

from fairway.log_stream import hold_standard_descriptors
from services.runtime.process import grpc_environment


def run() -> None:
    """Prepare the environment, then import and run what uses it."""
    hold_standard_descriptors()
    grpc_environment.prepare()
    from services.app.process import main

    main()


if __name__ == "__main__":
    run()
