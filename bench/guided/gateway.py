"""A process that checks schemas as a gateway does, beside the engine that runs those that pass."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final, Protocol

from services.core.errors import FairwayError
from services.core.generation import Constraint, ConstraintKind
from services.gateway.text.pool import TextProcesses
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics

TENANTS: Final = 40  # that send the schemas: a tenant that ends processes is soon suspended


def of_schema(text: str) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, text)


class Arriving(Protocol):
    """Schemas that arrive while an engine steps."""

    @property
    def any_left(self) -> bool: ...

    def passed(self) -> Constraint | None:
        """Return one that has arrived, None without one. Called before each step."""


class CheckedBefore:
    """Schemas that a gateway of another machine let pass: one arrives every so many steps."""

    def __init__(self, constraints: Sequence[Constraint], *, every: int) -> None:
        self._left = list(constraints)
        self._every = every
        self._steps = 0

    @property
    def any_left(self) -> bool:
        return bool(self._left)

    def passed(self) -> Constraint | None:
        self._steps += 1
        return self._left.pop() if self._left and not self._steps % self._every else None


class Gateway:
    """A process that checks the schemas one after the other as a gateway does. Those that pass go on.

    It and its text processes have one core: more of them than cores would delay any step.
    """

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe

    @classmethod
    @contextmanager
    def started(cls, folder: Path, schemas: Sequence[str]) -> Iterator[Gateway]:
        """Yield it once its text processes run; it begins to check then."""
        context = get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=_check_all, args=(other, folder, schemas))
        process.start()
        try:
            pipe.recv()
            pipe.send(None)
            yield cls(process, pipe)
        finally:
            process.join()

    @property
    def any_left(self) -> bool:
        return self._process.is_alive()

    def passed(self) -> Constraint | None:
        """Return a schema that passed since, None without one."""
        with suppress(EOFError):
            if self._pipe.poll():
                return of_schema(self._pipe.recv())
        return None


def checked(folder: Path, schemas: Sequence[str]) -> list[Constraint]:
    """Return the schemas that a gateway lets pass."""
    with Gateway.started(folder, schemas) as gateway:
        found = []
        while True:
            any_left = gateway.any_left
            if (constraint := gateway.passed()) is not None:
                found.append(constraint)
            elif any_left:
                time.sleep(0.001)
            else:
                return found


def _check_all(pipe: Connection, folder: Path, schemas: Sequence[str]) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    asyncio.run(_checks(pipe, folder, schemas))


async def _checks(pipe: Connection, folder: Path, schemas: Sequence[str]) -> None:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    texts = TextProcesses(clock, supervisor, Metrics())
    supervisor.spawn("text processes", texts.run())
    refused: dict[str, int] = {}
    try:
        model = await texts.load("sha256:large", lambda: nullcontext(folder))
        await texts.check(model, "tenant", of_schema("{}"))
        pipe.send(None)
        pipe.recv()
        for number, schema in enumerate(schemas):
            try:
                await texts.check(model, f"tenant{number % TENANTS}", of_schema(schema))
            except FairwayError as error:
                refused[error.reason] = refused.get(error.reason, 0) + 1
            else:
                pipe.send(schema)
    finally:
        await supervisor.close()
    print(f"{len(schemas)} schemas: refused {refused}", flush=True)
