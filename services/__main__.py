"""``python -m services ROLE`` runs one role, configured by FAIRWAY_ variables."""

from services.runtime import grpc_environment


def run() -> None:
    """Prepare the environment, then import and run what uses it."""
    grpc_environment.prepare()
    from services.app.main import main

    main()


if __name__ == "__main__":
    run()
