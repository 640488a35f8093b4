"""The process entry point: parse the configuration, build the role, run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Final

import structlog
import uvloop

from fairway.log_stream import LogStream
from services.app.environment import Environment
from services.app.process import Role, run
from services.app.roles.controlplane import controlplane
from services.app.roles.gateway import gateway
from services.app.roles.registry import registry
from services.app.roles.scheduler import scheduler
from services.app.roles.worker import worker
from services.core.errors import FairwayError
from services.runtime import config
from services.runtime.process.free_memory import limit_fragmentation
from services.runtime.process.machine import raise_descriptor_limit
from services.runtime.telemetry import logging

EXIT_USAGE: Final = 2
EXIT_CANNOT_START: Final = 3
PRIVATE_UMASK: Final = 0o077  # only this user reads models, blobs and sockets


async def _run(role: str, settings: config.Settings, stream: LogStream) -> int:
    environment = Environment(settings, role, stream)
    return await run(environment, ROLES[role](environment))


def main() -> None:
    """Exit 0 after a drain, 1 when a task crashed, 2 for bad usage or settings, 3 when it cannot start."""
    if len(sys.argv) != 2 or sys.argv[1] not in ROLES:
        sys.exit(f"usage: python -m services {{{'|'.join(ROLES)}}}")
    role = sys.argv[1]
    raise_descriptor_limit()
    limit_fragmentation()
    os.umask(PRIVATE_UMASK)
    try:
        settings = config.load()
        stream = logging.open_log(settings.log_format, role=role)
        logging.configure(settings.log_level, settings.log_format, role=role)
        sys.exit(uvloop.run(_run(role, settings, stream)))
    except config.ConfigError as error:
        sys.stderr.write(f"{role}: {error}\n")
        sys.exit(EXIT_USAGE)
    except FairwayError as error:
        structlog.get_logger().error("role.cannot_start", reason=error.reason, message=error.message)
        sys.stderr.write(f"{role}: {error.message}\n")
        sys.exit(EXIT_CANNOT_START)


ROLES: Final[Mapping[str, Callable[[Environment], Role]]] = {
    "registry": registry,
    "controlplane": controlplane,
    "scheduler": scheduler,
    "worker": worker,
    "gateway": gateway,
}
