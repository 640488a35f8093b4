"""The scheduler's server on the simulated network: the counterpart of ``scheduler.servicer``.

A task per stream writes, as there; what comes is handed over as it arrives. The time limits and the order of
what is written are the servicer's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from services.core.errors import FairwayError, InvalidInput
from services.core.fleet import PlacementFrame
from services.ports.placement_stream import PlacementStream
from services.ports.report_stream import ReportAnswer, ReportStream
from services.scheduler.service import SchedulerService
from simulator.kernel.connection import Broken, Connection, Silent
from simulator.kernel.links.messages import ConnectHello, Leads, NumberedReport, Places, ReportHello
from simulator.kernel.network import Network
from simulator.kernel.process import Process

HEARTBEAT_S: Final = 1.0
_HELLO_S: Final = 10.0
_ANSWER_S: Final = 0.05


def serve_scheduler(process: Process, network: Network, address: str, service: SchedulerService) -> None:
    """Answer gateways and workers at the address as the gRPC servicer does, until the process crashes."""

    def accept(connection: Connection) -> None:
        process.spawn("scheduler.stream", _serve(process, connection, service))

    network.listen(process, address, accept)


async def _serve(process: Process, connection: Connection, service: SchedulerService) -> None:
    """Carry one stream until either side ends it."""
    error: FairwayError | None = None
    try:
        hello = await connection.receive(_HELLO_S)
        if isinstance(hello, ConnectHello):
            await _Gateway(process, connection, service, hello).run()
        elif isinstance(hello, ReportHello):
            await _Worker(process, connection, service).run()
        else:
            error = InvalidInput("a gateway must send hello first", field="hello")
    except FairwayError as failure:
        error = failure
    except (Broken, Silent):
        pass
    finally:
        connection.close(error)


class _Stream:
    """What both kinds of streams share: the first error ends it, and so does the peer."""

    def __init__(self, process: Process, connection: Connection) -> None:
        self.clock = process.clock
        self.connection = connection
        self.woken = asyncio.Event()
        self._failed: FairwayError | None = None

    def hear(self, take_over: Callable[[Any], None]) -> None:
        """Hand over each message as it arrives, in order."""

        def arrived(message: Any) -> None:
            if self._failed is None:
                try:
                    take_over(message)
                except FairwayError as error:
                    self._failed = error
                    self.woken.set()

        self.connection.on_message = arrived
        self.connection.on_broken = lambda _: self.woken.set()

    def goes_on(self) -> bool:
        """Whether the peer is connected. Raises the error in which its stream ended."""
        if self._failed is not None:
            raise self._failed
        return self.connection.over is None

    async def wait(self, timeout_s: float) -> None:
        alarm = asyncio.get_running_loop().call_later(timeout_s, self.woken.set)
        try:
            await self.woken.wait()
        finally:
            alarm.cancel()
        self.woken.clear()


class _Gateway(_Stream):
    def __init__(
        self, process: Process, connection: Connection, service: SchedulerService, hello: ConnectHello
    ) -> None:
        super().__init__(process, connection)
        self._stream: PlacementStream = service.open(hello.gateway_id, self.woken.set, zone=hello.zone)

    async def run(self) -> None:
        stream = self._stream
        try:
            self.connection.post(Leads(stream.epoch))
            self.hear(self._take_over)
            await self._write_outcomes()
        finally:
            stream.close()

    def _take_over(self, message: Places) -> None:
        if message.places:
            self._stream.submit(message.places)
        if message.cancelled:
            self._stream.cancel(message.cancelled)

    async def _write_outcomes(self) -> None:
        stream, clock = self._stream, self.clock
        beat = PlacementFrame(stream.epoch, pressures=())
        beat_s = clock.monotonic_s()
        while self.goes_on():
            due_s = beat_s + HEARTBEAT_S - clock.monotonic_s()
            if due_s <= 0:
                await self.connection.send(beat)
                beat_s = clock.monotonic_s()
                continue
            await self.wait(due_s)
            while (frame := stream.take()) is not None:
                if frame.pressures is not None:
                    beat = PlacementFrame(stream.epoch, pressures=frame.pressures)
                    beat_s = clock.monotonic_s()
                await self.connection.send(frame)


class _Worker(_Stream):
    def __init__(self, process: Process, connection: Connection, service: SchedulerService) -> None:
        super().__init__(process, connection)
        self._stream: ReportStream = service.open_report(self.woken.set)
        self._expected = 1

    async def run(self) -> None:
        try:
            self.connection.post(ReportAnswer(self._stream.epoch))
            self.hear(self._take_over)
            await self._write_answers()
        finally:
            self._stream.close()

    def _take_over(self, message: NumberedReport) -> None:
        if message.number != self._expected:
            raise InvalidInput(f"report {message.number} received, {self._expected} expected", field="report")
        self._expected += 1
        self._stream.report(message.number, message.snapshot)

    async def _write_answers(self) -> None:
        stream = self._stream
        answered = 0
        while self.goes_on():
            await self.wait(HEARTBEAT_S)
            answer = stream.take() or ReportAnswer(stream.epoch, answered)
            answered = answer.report
            await self.connection.send(answer)
            await self.clock.sleep(_ANSWER_S)
