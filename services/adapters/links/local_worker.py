"""The worker client for workers in this process: same port and frames, no network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.adapters.links.frame_dispatch import NotStarted, SinkTable
from services.core.generation import StartSpec
from services.ports.worker import RunningSequence, SequenceSink
from services.ports.worker_stream import WorkerStream, WorkerStreams


class LocalWorkers:
    """Implements ``ports.worker.WorkerClient`` over workers in this process, by address.

    Sinks are called from the event loop, never from within ``start``.
    """

    def __init__(
        self, workers: dict[str, WorkerStreams], *, after_frame: Callable[[], None] | None = None
    ) -> None:
        self._workers = workers
        self._after_frame = after_frame
        self._links: dict[str, _LocalLink] = {}

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        address = spec.grant.address
        link = self._links.get(address)
        if link is None:
            worker = self._workers.get(address)
            if worker is None:
                asyncio.get_running_loop().call_soon(sink.on_lost, f"no worker at {address}")
                return NotStarted()
            link = self._links[address] = _LocalLink(worker, self._after_frame)
        return link.start(spec, sink)

    async def close(self) -> None:
        """Cancel every sequence. Every sink is notified that its worker was lost."""
        links, self._links = self._links, {}
        for link in links.values():
            link.close()


class _LocalLink:
    def __init__(self, worker: WorkerStreams, after_frame: Callable[[], None] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._after_frame = after_frame
        self._flushing = False
        self.sinks = SinkTable()
        self.stream: WorkerStream = worker.open(self._wake)

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        handle = self.sinks.add(sink)
        self.stream.start(handle, spec)
        return _LocalSequence(self, handle)

    def close(self) -> None:
        self.stream.close()
        self.sinks.lose_all("the worker client was closed")

    def _wake(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        while (frame := self.stream.take()) is not None:
            self.sinks.dispatch(frame)
        if self._after_frame is not None:
            self._after_frame()


class _LocalSequence:
    def __init__(self, link: _LocalLink, handle: int) -> None:
        self._link = link
        self._handle = handle

    def credit(self, tokens: int) -> None:
        if self._handle in self._link.sinks:
            self._link.stream.credit((self._handle,), (tokens,))

    def cancel(self) -> None:
        if self._link.sinks.drop(self._handle):
            self._link.stream.cancel((self._handle,))
