"""Watches: the present resources, then every change, across lost connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
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
    Unauthenticated,
    Unavailable,
    WaitFailed,
)
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import worker_pb2

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
        except (*_PASSING, Unauthenticated) as exc:
            # A server ends a call with the certificate that it began with, which was replaced in time.
            if isinstance(exc, Unauthenticated) and not (stream is not None and stream.is_outdated):
                raise
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


WAIT_S: Final = 600.0
POLL_S: Final = 0.25
_MAX_FAILED_ATTEMPTS: Final = 3
_STATE: Final = "VERSION_STATE_"
DOES_NOT_FIT: Final = "DOES_NOT_FIT"
SHORT_S: Final = 2.0


async def until_ready(
    read: Callable[[], Awaitable[cp.Deployment]],
    report: Callable[[cp.Deployment], None] | None = None,
    *,
    timeout_s: float = WAIT_S,
) -> cp.Deployment:
    """Return the deployment once it has exactly its replicas, all READY and of the wanted version.

    Raises WaitFailed as soon as a replica fails permanently, with its reason, and DeadlineExceeded.
    """
    short_since_s: float | None = None

    def why(found: cp.Deployment) -> WaitFailed | None:
        """Tolerate DOES_NOT_FIT for a moment: memory of a removed replica is freed a little later."""
        nonlocal short_since_s
        error = permanent_failure(found)
        if error is None or error.reason != DOES_NOT_FIT:
            short_since_s = None
            return error
        short_since_s = short_since_s or time.monotonic()
        return error if time.monotonic() - short_since_s >= SHORT_S else None

    return await _until(read, report, is_deployed, why, deployment_timeout, timeout_s)


async def until_any_ready(
    read: Callable[[], Awaitable[cp.Deployment]],
    report: Callable[[cp.Deployment], None] | None = None,
    *,
    timeout_s: float = WAIT_S,
) -> cp.Deployment:
    """Return the deployment once a replica of any version is READY. Raises as ``until_ready``."""

    def why(found: cp.Deployment) -> WaitFailed | None:
        return None if ready_replicas(found) else permanent_failure(found)

    return await _until(
        read, report, lambda found: bool(ready_replicas(found)), why, deployment_timeout, timeout_s
    )


def wanted_replicas(deployment: cp.Deployment) -> int:
    """Return how many replicas it is to have now: its own number, or what was decided within its bounds."""
    is_scaled = deployment.HasField("scaling")
    return deployment.status.wanted_replicas if is_scaled else deployment.replicas


def ready_replicas(deployment: cp.Deployment) -> int:
    """Return how many replicas serve, including those that an update replaces."""
    return sum(one.state == worker_pb2.VERSION_STATE_READY for one in deployment.status.replicas)


async def until_drained(
    read: Callable[[], Awaitable[cp.Node]],
    report: Callable[[cp.Node], None] | None = None,
    *,
    timeout_s: float = WAIT_S,
) -> cp.Node:
    """Return the node once it has no assignment and no running sequence.

    Raises WaitFailed when an operator uncordons it, and DeadlineExceeded.
    """
    return await _until(read, report, lambda node: node.drain.done, drain_failure, drain_timeout, timeout_s)


async def _until(
    read: Callable[[], Awaitable[T]],
    report: Callable[[T], None] | None,
    is_done: Callable[[T], bool],
    why_never: Callable[[T], FairwayError | None],
    late: Callable[[T, float], FairwayError],
    timeout_s: float,
) -> T:
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = await read()
        if report is not None:
            report(found)
        if (error := why_never(found)) is not None:
            raise error
        if is_done(found):
            return found
        if time.monotonic() >= deadline_s:
            raise late(found, timeout_s)
        await asyncio.sleep(POLL_S)


def is_deployed(deployment: cp.Deployment) -> bool:
    """Whether the wanted version has exactly its replicas, all READY; older ones get no new requests then."""
    wanted = [replica for replica in deployment.status.replicas if _is_wanted(deployment, replica)]
    if len(wanted) != wanted_replicas(deployment) or (not wanted and deployment.status.replicas):
        return False
    return all(replica.state == worker_pb2.VERSION_STATE_READY for replica in wanted)


def permanent_failure(deployment: cp.Deployment) -> WaitFailed | None:
    """Return the permanent failure of a replica of the wanted version, or None.

    A replica without memory beside the older version gets it later if another worker serves meanwhile.
    """
    for replica in deployment.status.replicas:
        is_tried_again = replica.HasField("retry_time") and replica.failed_attempts < _MAX_FAILED_ATTEMPTS
        is_failed = replica.state == worker_pb2.VERSION_STATE_FAILED
        if not is_failed or is_tried_again or not _is_wanted(deployment, replica):
            continue
        if replica.reason == DOES_NOT_FIT and _is_updated_later(deployment, replica.worker_id):
            continue
        name, status = deployment.metadata.name, deployment.status
        why = replica.message or "no reason given"
        if not all(_is_wanted(deployment, one) for one in status.replicas):
            why = status.message or why  # the reason why an update waits
        return WaitFailed(
            f"{replica.worker_id} cannot serve {name}: {why}",
            reason=replica.reason or "MODEL_FAILED",
            metadata={"deployment": name, "worker_id": replica.worker_id},
        )
    return None


def _is_updated_later(deployment: cp.Deployment, worker_id: str) -> bool:
    """Whether workers without memory for both versions are updated in turn, and this one later."""
    replicas = deployment.status.replicas
    before = {one.worker_id for one in replicas if not _is_wanted(deployment, one)}
    loads = any(
        one.worker_id != worker_id
        and _is_wanted(deployment, one)
        and one.state != worker_pb2.VERSION_STATE_FAILED
        for one in replicas
    )
    return len(before) > 1 or (bool(before) and loads)


def deployment_timeout(deployment: cp.Deployment, timeout_s: float) -> DeadlineExceeded:
    name, status = deployment.metadata.name, deployment.status
    why, wanted = status.message or describe(deployment), wanted_replicas(deployment)
    return DeadlineExceeded(
        f"{name} has {status.ready_replicas} of {wanted} replicas after {timeout_s:g} s: {why}",
        reason="NOT_READY_IN_TIME",
        metadata={"deployment": name, "ready_replicas": str(status.ready_replicas)},
    )


def drain_failure(node: cp.Node) -> WaitFailed | None:
    if node.draining:
        return None
    name = node.metadata.name
    return WaitFailed(
        f"{name} is no longer draining: it was uncordoned",
        reason="DRAIN_ENDED",
        metadata={"node": name},
    )


def drain_timeout(node: cp.Node, timeout_s: float) -> DeadlineExceeded:
    name, why = node.metadata.name, "; ".join(node.drain.waiting_for) or remaining_versions(node)
    return DeadlineExceeded(
        f"{name} is not drained after {timeout_s:g} s: {why}",
        reason="NOT_DRAINED_IN_TIME",
        metadata={"node": name},
    )


def remaining_versions(node: cp.Node) -> str:
    """Return the progress of a drain, in words."""
    return f"versions left: {node.drain.assigned_versions + node.drain.ending_versions}"


def describe(deployment: cp.Deployment) -> str:
    """Return the state of a deployment's replicas, in words."""
    status = deployment.status
    parts = [
        f"{replica.worker_id}{'' if _is_wanted(deployment, replica) else ' (old version)'}: "
        + (state_name(replica.state) or "assigned")
        + (f" {100 * replica.progress_ratio:.0f} %" if 0 < replica.progress_ratio < 1 else "")
        + (f", {replica.message}" if replica.message else "")
        for replica in status.replicas
    ]
    return "; ".join(parts) or status.message or "waiting for a worker"


def state_name(number: worker_pb2.VersionState.ValueType) -> str:
    """Return a state as a word; "" for none, the number for a state of a newer server."""
    try:
        name = worker_pb2.VersionState.Name(number)
    except ValueError:
        return str(number)
    word = name.removeprefix(_STATE).lower()
    return "" if word == "unspecified" else word


def _is_wanted(deployment: cp.Deployment, replica: cp.ReplicaStatus) -> bool:
    """Whether the replica has the wanted version; also true if the control plane sends no version."""
    return replica.version_digest in ("", deployment.version_digest)
