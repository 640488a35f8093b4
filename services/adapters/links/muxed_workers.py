"""The gateway's client of its workers: one stream per worker address, opened on demand, closed when idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from services.adapters.links.frame_dispatch import NotStarted
from services.adapters.links.worker_link import WorkerLink
from services.core.fixed_cost.rows import RowSpec
from services.core.generation import AnyGrant, StartSpec
from services.ports.clock import Clock
from services.ports.streams.message_stream import StreamClient
from services.ports.worker import RowSink, RunningRow, RunningSequence, SequenceSink
from services.runtime.supervisor import Supervisor

MAX_LINKS: Final = 4096
_TOO_MANY: Final = f"{MAX_LINKS} worker streams are open"


class MuxedWorkers:
    """Implements ``ports.worker.WorkerClient`` and ``RowClient``. Sinks are called from the event loop, never
    from within ``start`` and ``start_row``.

    ``after_frame`` is called once after all sinks of a message were called, so that their output can be
    written once per engine step. ``unsent`` receives the grant of each start that was dropped before it was
    sent: no worker will receive it.
    """

    def __init__(
        self,
        streams: StreamClient,
        gateway_id: str,
        clock: Clock,
        supervisor: Supervisor,
        *,
        after_frame: Callable[[], None] | None = None,
        unsent: Callable[[AnyGrant], None] | None = None,
        silence_s: float = 5.0,
        idle_s: float = 60.0,
    ) -> None:
        """A worker silent for ``silence_s`` is lost; a stream without sequences ends after ``idle_s``."""
        self._streams = streams
        self._gateway_id = gateway_id
        self._clock = clock
        self._supervisor = supervisor
        self._after_frame = after_frame
        self._unsent = unsent
        self._silence_s = silence_s
        self._idle_s = idle_s
        self._links: dict[str, WorkerLink] = {}
        # A stream outlives the request that opens it. Its log lines must not carry that request's context.

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        if (link := self._link_to(spec.grant.address)) is not None:
            return link.start(spec, sink)
        asyncio.get_running_loop().call_soon(sink.on_lost, _TOO_MANY)
        return NotStarted()

    def start_row(self, address: str, spec: RowSpec, sink: RowSink) -> RunningRow:
        if (link := self._link_to(address)) is not None:
            return link.start_row(spec, sink)
        asyncio.get_running_loop().call_soon(sink.on_lost, _TOO_MANY)
        return NotStarted()

    def _link_to(self, address: str) -> WorkerLink | None:
        """Return the stream to this worker, opened on demand; None when too many are open."""
        link = self._links.get(address)
        if link is not None and not link.closed:
            return link
        return self._open(address) if len(self._links) < MAX_LINKS else None

    @property
    def links(self) -> int:
        """Number of open streams."""
        return len(self._links)

    async def close(self) -> None:
        """Close every stream. Every sink is notified that its worker was lost."""
        await asyncio.gather(*(link.close() for link in list(self._links.values())))

    def _open(self, address: str) -> WorkerLink:
        link = WorkerLink(
            address,
            self._streams,
            self._clock,
            gateway_id=self._gateway_id,
            after_frame=self._after_frame,
            unsent=self._unsent,
            silence_s=self._silence_s,
            idle_s=self._idle_s,
        )
        self._links[address] = link
        link.task = self._supervisor.spawn(f"worker-stream-{address}", self._own(link), shared=True)
        return link

    async def _own(self, link: WorkerLink) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(link.address) is link:
                del self._links[link.address]
