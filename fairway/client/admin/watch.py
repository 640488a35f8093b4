"""Watches: the present resources, then every change, across lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from fairway.client.admin.calls import Service, attempt_of
from fairway.client.attempts import Attempts
from fairway.client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FairwayError,
    OverQuota,
    Unavailable,
)
from fairway.v1 import controlplane_pb2 as cp

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 10.0
# Transient errors: the watch continues by itself. Anything else is raised.
_PASSING: Final = (Unavailable, OverQuota, DeadlineExceeded)

# Receives the error that interrupted a watch, and the pause in seconds until it continues.
OnLost = Callable[[FairwayError, float], None]
# The resource of a change and its name; None: another kind.
Named = Callable[[cp.ResourceChange], tuple[str, T] | None]


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[T]):
    """All present resources, by name: those not in ``items`` do not exist.

    The first value of a watch. It is repeated, with ``started_over``, if the server no longer has the
    changes since the connection broke: they are included, not yielded one by one.
    """

    items: Mapping[str, T]
    started_over: bool = False


@dataclass(frozen=True, slots=True)
class Changed(Generic[T]):
    """``item`` is new or was changed to this value."""

    name: str
    item: T


@dataclass(frozen=True, slots=True)
class Deleted(Generic[T]):
    """It was deleted. In ``item`` only the naming fields are set."""

    name: str
    item: T


@dataclass(frozen=True, slots=True)
class Missed:
    """Events may be missing here: the server no longer has them. It continues with the newest ones."""


WatchUpdate = Snapshot[T] | Changed[T] | Deleted[T]


@dataclass(slots=True)
class _Position:
    """The revision up to which a watch has yielded everything. 0: at the start."""

    revision: int = 0


async def watch_resources(
    service: Service, kind: cp.ResourceKind.ValueType, named: Named[T], on_lost: OnLost | None
) -> AsyncGenerator[WatchUpdate[T], None]:
    """Yield the present resources, then every change at least once, until it is closed.

    Raises FairwayError when the first connection fails, or when the server rejects the watch.
    """
    position, collected, has_begun = _Position(), dict[str, T](), False
    request = cp.WatchResourcesRequest(kinds=[kind])
    async with aclosing(_follow(service, "WatchResources", request, position, on_lost)) as answers:
        async for answer in answers:
            if answer is None:
                collected = {}
                continue
            changes = [(change, found) for change in answer.changes if (found := named(change)) is not None]
            if position.revision:
                for change, (name, item) in changes:
                    yield Deleted(name, item) if change.deleted else Changed(name, item)
                position.revision = answer.revision or position.revision  # 0: more of the revision follows
                continue
            collected |= dict(found for _, found in changes)
            if answer.snapshot_end:
                position.revision = answer.revision
                yield Snapshot(collected, started_over=has_begun)
                collected, has_begun = {}, True


async def watch_events(
    service: Service,
    kinds: tuple[cp.ResourceKind.ValueType, ...],
    resource: str,
    newest: int,
    on_lost: OnLost | None,
) -> AsyncGenerator[cp.Event | Missed, None]:
    """Yield the ``newest`` events, oldest first, then every further one, until it is closed."""
    position, has_begun = _Position(), False
    request = cp.WatchEventsRequest(kinds=kinds, resource=resource, newest=newest)
    async with aclosing(_follow(service, "WatchEvents", request, position, on_lost)) as answers:
        async for answer in answers:
            if answer is None:
                if has_begun:
                    yield Missed()
                continue
            for event in answer.events:
                yield event
            position.revision = answer.revision or position.revision
            has_begun = True


async def _follow(
    service: Service, method: str, request: Any, position: _Position, on_lost: OnLost | None
) -> AsyncGenerator[Any, None]:
    """Yield responses, after a lost connection those after ``position``; None: a start from the beginning.

    Until the first response it is a call with a deadline and retries. After that it continues until it is
    closed or rejected.
    """
    core, attempts = service.core, Attempts(service.core, service.timeout_s(None))
    began, pause_s = False, _FIRST_PAUSE_S
    while True:
        if not position.revision:
            yield None
        request.after_revision = position.revision
        error: FairwayError
        stream = None
        try:
            stream = await service.open(method, request, attempts)
            within_s = attempts.time_left_s
            if core.pool.has_other(stream.endpoint):
                within_s = min(within_s, attempt_of(service.timeout_s(None)))
            while True:
                answer = await stream.read(within_s)
                began, pause_s, within_s = True, _FIRST_PAUSE_S, core.options.silence_timeout_s
                yield answer
        except FailedPrecondition:
            if not position.revision:
                raise
            position.revision = 0
            attempts = Attempts(core, service.timeout_s(None))
            continue
        except _PASSING as exc:
            error = exc
        finally:
            if stream is not None:
                stream.close()
        if not began:
            if stream is None:
                raise error
            await service.guard.run(attempts.failed(error, stream.endpoint))
            continue
        if stream is not None:
            core.pool.failed(stream.endpoint, error)
        if on_lost is not None:
            on_lost(error, pause_s)
        await service.guard.run(asyncio.sleep(pause_s * (0.5 + 0.5 * core.rng.random())))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        attempts = Attempts(core, service.timeout_s(None))
