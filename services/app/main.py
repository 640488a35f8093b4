"""The process entry point: parse the configuration, build the role, run it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Final

import structlog
import uvloop

from fairway.log_stream import LogStream
from services.app.environment import Environment
from services.app.process import Role, run
from services.core.errors import FairwayError
from services.runtime import config
from services.runtime.process.free_memory import limit_fragmentation
from services.runtime.process.machine import raise_descriptor_limit
from services.runtime.process.tenant_loop import TenantLoop
from services.runtime.telemetry import logging

Builder = Callable[[Environment], Role]

EXIT_USAGE: Final = 2
EXIT_CANNOT_START: Final = 3
ROLES: Final = ("registry", "controlplane", "scheduler", "worker", "gateway")
PRIVATE_UMASK: Final = 0o077  # only this user reads models, blobs and sockets


async def _run(role: str, settings: config.Settings, stream: LogStream, build: Builder) -> int:
    environment = Environment(settings, role, stream)
    return await run(environment, build(environment))


def _builder(role: str) -> Builder:
    """Return the function that builds the role. To import all five takes a third longer."""
    build: Builder = getattr(importlib.import_module(f"services.app.roles.{role}"), role)
    return build


def main() -> None:
    """Exit 0 after a drain, 1 when a task crashed, 2 for bad usage or settings, 3 when it cannot start."""
    if len(sys.argv) != 2 or sys.argv[1] not in ROLES:
        sys.exit(f"usage: python -P -m services {{{'|'.join(ROLES)}}}")
    role = sys.argv[1]
    raise_descriptor_limit()
    limit_fragmentation()
    os.umask(PRIVATE_UMASK)
    try:
        settings = config.load()
        stream = logging.open_log(role=role)
        logging.configure(settings.log_level, role=role)
        sys.exit(uvloop.run(_run(role, settings, stream, _builder(role)), loop_factory=TenantLoop))
    except config.ConfigError as error:
        sys.stderr.write(f"{role}: {error}\n")
        sys.exit(EXIT_USAGE)
    except FairwayError as error:
        structlog.get_logger().error("role.cannot_start", reason=error.reason, message=error.message)
        sys.stderr.write(f"{role}: {error.message}\n")
        sys.exit(EXIT_CANNOT_START)
