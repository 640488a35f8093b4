"""A role's process: read the configuration, build, start, serve, drain on a signal or on bad health, stop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
import uvloop

from fairway.log_stream import LogStream
from services.app.environment import Environment
from services.core.errors import FairwayError
from services.rpc.server import RpcServer
from services.runtime import config
from services.runtime.process.free_memory import limit_fragmentation
from services.runtime.process.health import Check
from services.runtime.process.machine import raise_descriptor_limit
from services.runtime.process.tenant_turns import TenantLoop
from services.runtime.telemetry import logging

log = structlog.get_logger()
EXIT_UNHEALTHY: Final = 1
_HEALTH_PERIOD_S: Final = 1.0  # the interval at which load balancers probe
_STOP_GRACE_S: Final = 2.0
EXIT_USAGE: Final = 2
EXIT_CANNOT_START: Final = 3
ROLES: Final = ("registry", "controlplane", "scheduler", "worker", "gateway", "follower")
PRIVATE_UMASK: Final = 0o077  # only this user reads models, blobs and sockets


async def _nothing(timeout_s: float) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Role:
    """One role, built and not started.

    ``start`` runs before the server accepts connections, ``open`` after. ``checks`` report what prevents the
    role from serving; ``named`` reports which of its parts serve, each under its own name. ``drain`` finishes
    running requests within a time in seconds.
    """

    server: RpcServer
    start: Callable[[], Awaitable[None]]
    open: Callable[[], Awaitable[None]] | None = None
    drain: Callable[[float], Awaitable[object]] = _nothing
    checks: tuple[Check, ...] = ()
    named: Callable[[], Mapping[str, bool]] = dict


async def run(environment: Environment, role: Role) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code: 0, or 1 when a task crashed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    settings = environment.settings
    try:
        await environment.watch()
        environment.health.add(role.checks)
        await role.start()
        await environment.sync()
        await role.server.start()
        if role.open is not None:
            await role.open()
        rest_collector()
        await _serve(environment, role, stop)
        log.info(
            "role.draining", healthy=environment.supervisor.healthy, tasks=environment.supervisor.failures
        )
        environment.health.close("shutting down")
        await role.server.set_serving(False)
        await role.drain(settings.drain_s)
        await role.server.stop(_STOP_GRACE_S)
    finally:
        await environment.close()
    return 0 if environment.supervisor.healthy else EXIT_UNHEALTHY


async def _serve(environment: Environment, role: Role, stop: asyncio.Event) -> None:
    """Keep the health answer current until a signal arrives or a task crashes."""
    environment.health.open()
    previous: tuple[str, ...] | None = None
    while not stop.is_set() and environment.supervisor.healthy:
        problems = environment.health.problems()
        if previous is None or bool(problems) != bool(previous):
            await role.server.set_serving(not problems)
            if problems or previous:
                log.warning("role.serving_changed", serving=not problems, problems=problems)
        previous = problems
        await role.server.set_parts({**role.named(), **environment.parts()})
        try:
            async with asyncio.timeout(_HEALTH_PERIOD_S):
                await stop.wait()
        except TimeoutError:
            continue


_YOUNG_OBJECTS: Final = 20_000


def rest_collector() -> None:
    """Exclude existing objects from collection, and collect new ones less often.

    Objects built at the start live as long as the process. Nearly all later ones are freed by reference
    counting. The collector would only scan queues, fleet state and the decision ring, all in use, at a cost
    that grows with them: with 256 workers a tenth of the scheduler's time, and its longest pauses. Cycles are
    rare, so they hold little memory between collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


Builder = Callable[[Environment], Role]


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
