"""One etcd watch stream as batches of complete revisions.

The revision from which a watch can safely resume depends on the message:

- Events: the revision of the last event. The header may be ahead of a partial batch.
- A progress notice that names the watch: the revision of its header. It is sent in order with the events.
- The response to a progress request: it names no watch. Before etcd 3.4.25 and 3.5.8 it overtakes events that
  are still queued (etcd issue 15220). From such a server it only proves that the stream is alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from aetcd import rpc

from services.adapters.etcd.channel import NEEDS_LEADER, EtcdChannel, Stubs
from services.core.errors import StoreUnavailable
from services.ports.store import Compacted, Entry, KeyChanged, KeyRemoved, WatchBatch

_NO_WATCH: Final = -1
_DELETE: Final = 1


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """``created_s``: time limit for the watch to be created. ``progress_s``: silence after which a message is
    requested. ``silence_s``: a stream without a message for this long counts as broken."""

    created_s: float
    progress_s: float
    silence_s: float


def key_bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Return ``(key, range_end)`` for all keys under a prefix; the empty prefix is the whole store."""
    start = key_bytes(prefix).rstrip(b"\xff")
    if not start:
        return b"\0", b"\0"
    return key_bytes(prefix), start[:-1] + bytes([start[-1] + 1])


def entry_of(kv: Any) -> Entry:
    return Entry(
        kv.key.decode("utf-8", "surrogateescape"), kv.value, kv.create_revision, kv.mod_revision, kv.lease
    )


async def watch(
    channel: EtcdChannel, prefix: str, after_revision: int, times: WatchTimes
) -> AsyncGenerator[WatchBatch, None]:
    """Yield the changes under a prefix after a revision; see ``Store.watch``."""
    closed, received = asyncio.Event(), asyncio.Event()
    with channel.stubs() as stubs:
        call = stubs.watch.Watch(
            _requests(prefix, after_revision + 1, received, closed, times.progress_s), metadata=NEEDS_LEADER
        )
        try:
            created = await _read(call, times.created_s)
            watch_id = created.watch_id
            if not created.created and not created.canceled:
                raise StoreUnavailable("etcd did not confirm the watch")
            _raise_if_canceled(created)
            batches = Batches(watch_id, after_revision, _progress_check(channel, stubs, times.created_s))
            while True:
                message = await _read(call, times.silence_s)
                received.set()
                batch = await batches.add(message)
                if batch is not None:
                    yield batch
        finally:
            closed.set()
            received.set()
            call.cancel()


class Batches:
    """Joins fragments and decides from which revision a reader can resume after each message."""

    def __init__(
        self, watch_id: int, after_revision: int, progress_in_order: Callable[[int], Awaitable[bool]]
    ) -> None:
        self._watch_id = watch_id
        self._revision = after_revision
        self._progress_in_order = progress_in_order
        self._ordered: bool | None = None
        # Events of one response: etcd puts at most 1000 revisions in it.
        self._events: list[KeyChanged | KeyRemoved] = []

    async def add(self, message: Any) -> WatchBatch | None:
        _raise_if_canceled(message)
        if message.watch_id not in (self._watch_id, _NO_WATCH):
            return None
        self._events += [_event(event) for event in message.events]
        if message.fragment:
            return None
        if self._events:
            events, self._events = tuple(self._events), []
            self._revision = _revision(events[-1])
            return WatchBatch(self._revision, events)
        if message.watch_id == self._watch_id or await self._is_ordered(message.header.member_id):
            # The member is behind the revision that was already received.
            if message.header.revision < self._revision:
                return None
            self._revision = message.header.revision
        return WatchBatch(self._revision, ())

    async def _is_ordered(self, member_id: int) -> bool:
        if self._ordered is None:
            self._ordered = await self._progress_in_order(member_id)
        return self._ordered


async def _requests(
    prefix: str, start_revision: int, received: asyncio.Event, closed: asyncio.Event, progress_s: float
) -> AsyncGenerator[Any, None]:
    """Yield the create request, then a progress request whenever nothing was ``received`` for ``progress_s``:
    etcd sends notices by itself. gRPC's writer consumes them."""
    key, range_end = prefix_range(prefix)
    yield rpc.WatchRequest(
        create_request=rpc.WatchCreateRequest(
            key=key, range_end=range_end, start_revision=start_revision, progress_notify=True, fragment=True
        )
    )
    while not closed.is_set():
        received.clear()
        try:
            async with asyncio.timeout(progress_s):
                await received.wait()
        except TimeoutError:
            yield rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())


async def _read(call: Any, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            message = await call.read()
    except TimeoutError as error:
        raise StoreUnavailable(f"the etcd watch was silent for {timeout_s:g} s") from error
    if message is grpc.aio.EOF:
        raise StoreUnavailable("etcd ended the watch")
    return message


def _raise_if_canceled(message: Any) -> None:
    if not message.canceled:
        return
    if message.compact_revision:
        raise Compacted(f"the history before revision {message.compact_revision} is deleted")
    raise StoreUnavailable(f"etcd cancelled the watch: {message.cancel_reason}")


def _event(event: Any) -> KeyChanged | KeyRemoved:
    if event.type == _DELETE:
        return KeyRemoved(event.kv.key.decode("utf-8", "surrogateescape"), event.kv.mod_revision)
    return KeyChanged(entry_of(event.kv))


def _revision(event: KeyChanged | KeyRemoved) -> int:
    return event.entry.mod_revision if isinstance(event, KeyChanged) else event.mod_revision


def progress_is_ordered(version: str) -> bool:
    """Return whether an etcd of that version sends progress responses in order with the events."""
    try:
        numbers = tuple(int(part) for part in version.split("-")[0].split("+")[0].split("."))
    except ValueError:
        return False
    return numbers >= (3, 5, 8) or (3, 4, 25) <= numbers < (3, 5)


def _progress_check(channel: EtcdChannel, stubs: Stubs, timeout_s: float) -> Callable[[int], Awaitable[bool]]:
    async def check(member_id: int) -> bool:
        for _ in range(channel.members):  # round robin reaches each member
            try:
                status = await stubs.maintenance.Status(rpc.StatusRequest(), timeout=timeout_s)
            except grpc.aio.AioRpcError:
                return False
            if status.header.member_id == member_id:
                return progress_is_ordered(status.version)
        return False

    return check
