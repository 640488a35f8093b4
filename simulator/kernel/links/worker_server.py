"""A worker's server for gateways on the simulated network: the counterpart of ``worker.servicer``."""

from __future__ import annotations

from typing import Final

from services.core.errors import InvalidInput
from services.ports.worker_stream import WorkerStreams
from simulator.kernel.connection import Broken, Connection
from simulator.kernel.links.messages import Beat, Execute
from simulator.kernel.network import Network
from simulator.kernel.process import Process

HEARTBEAT_S: Final = 1.0
_BEAT: Final = Beat()


def serve_worker(process: Process, network: Network, address: str, host: WorkerStreams) -> None:
    """Run gateways' sequences as the gRPC servicer does, until the process crashes."""
    beats = _Beats(process)
    network.listen(process, address, lambda connection: beats.add(_Stream(process, connection, host)))


class _Beats:
    """Sends a heartbeat on every stream idle for a second. One timer serves all of them."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._streams: list[_Stream] = []

    def add(self, stream: _Stream) -> None:
        stream.open()
        self._streams.append(stream)
        if len(self._streams) == 1:
            self._set()

    def _set(self) -> None:
        self._process.call_later(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        self._streams = [stream for stream in self._streams if stream.beat()]
        if self._streams:
            self._set()


class _Stream:
    """One gateway's. Frames are sent at the end of the loop iteration in which they were made."""

    def __init__(self, process: Process, connection: Connection, host: WorkerStreams) -> None:
        self._process = process
        self._connection = connection
        self._writing = False
        self._blocked = False
        self._silent = True
        self._stream = host.open(self._wake)

    def open(self) -> None:
        self._connection.on_message = self._apply
        self._connection.on_broken = self._end

    def _apply(self, message: Execute) -> None:
        stream = self._stream
        if message.cancels:
            stream.cancel(message.cancels)
        try:
            for handle, spec in message.starts:
                stream.start(handle, spec)
        except InvalidInput as error:
            self._connection.close(error)
            stream.close()
            return
        if message.credit_handles:
            stream.credit(message.credit_handles, message.credit_tokens)

    def _end(self, _: Broken) -> None:
        self._stream.close()

    def _wake(self) -> None:
        if not self._writing:
            self._writing = True
            self._process.loop.call_soon(self._write)

    def _write(self) -> None:
        """Send what is pending, unless the gateway lags: then a task sends it when it caught up."""
        self._writing = False
        connection, stream = self._connection, self._stream
        if self._blocked:
            return
        while connection.over is None:
            if not connection.has_room:
                self._blocked = True
                self._process.spawn("worker.writer", self._catch_up())
                return
            frame = stream.take()
            if frame is None:
                return
            self._silent = False
            connection.post(frame)

    async def _catch_up(self) -> None:
        await self._connection.wait_room()
        self._blocked = False
        self._write()

    def beat(self) -> bool:
        """Send a heartbeat if nothing else was sent since the last call; False once the stream is over."""
        if self._connection.over is not None:
            return False
        if self._silent and not self._blocked:
            self._connection.post(_BEAT)
        self._silent = True
        return True
