"""Device time of a worker with a real engine process: all of it is charged, whatever ends the sequences."""

from __future__ import annotations

import asyncio
import os
import signal

from services.core.generation import FinishReason
from services.worker.engine.step_meter import REPORT_S
from tests.integration.worker.harness import Harness, Sink, Starter, eventually
from tests.integration.worker.test_worker import LONG, SLOW

FULL = 0.99  # of step time that sequences are charged


def charged_s(worker: Harness) -> float:
    return sum(use.device_s for use in worker.usage.sequences)


async def test_steps_are_charged_to_the_sequences_in_them(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    kept, cancelled, stopped = [Sink() for _ in range(6)], Sink(), Sink()
    for index, sink in enumerate(kept):
        spec = worker.spec(prompt=range(32 + index), max_tokens=20 + 60 * index, seed=index)
        worker.client.start(spec, sink)
    worker.client.start(worker.spec(max_tokens=LONG, time_left_s=1.5), stopped)
    running = worker.client.start(worker.spec(max_tokens=LONG), cancelled)
    await eventually(lambda: cancelled.ids)
    running.cancel()
    for sink in (*kept, stopped):
        await sink.wait()
    await eventually(lambda: len(worker.usage.sequences) == 8)
    by_request = {use.request_id: use for use in worker.usage.sequences}
    assert len(by_request) == 8
    device = worker.host.device
    assert device is not None
    assert FULL * device.attributed_s <= charged_s(worker) <= device.attributed_s + 1e-5
    assert device.attributed_s >= FULL * device.busy_s
    told = [sink.finished.device_us for sink in kept]
    # The first to arrive may have a step alone; 120 tokens more outweigh it.
    assert all(less < more for less, more in zip(told, told[2:], strict=False)), (
        "who ran for longer was charged less"
    )
    for index, us in enumerate(told):
        assert by_request[f"r{index + 1}"].device_s == us / 1e6
        assert by_request[f"r{index + 1}"].usage.output_tokens == 20 + 60 * index
    assert stopped.finished.reason is FinishReason.DEADLINE
    assert 0 < stopped.finished.device_us / 1e6 <= by_request["r7"].device_s
    assert 0.0 < by_request["r8"].device_s < by_request["r6"].device_s


async def test_an_engine_that_is_killed_has_charged_its_steps(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    sinks = [Sink() for _ in range(8)]
    for sink in sinks:
        worker.client.start(worker.spec(max_tokens=LONG), sink)
    await eventually(lambda: all(len(sink.ids) > 50 for sink in sinks))
    os.kill(worker.engine_pid, signal.SIGKILL)
    for sink in sinks:
        await sink.wait()
        assert sink.finished.reason is FinishReason.ENGINE_LOST
    device = worker.host.device
    assert device is not None
    assert FULL * device.busy_s <= charged_s(worker) <= device.busy_s + 1e-5
    shares = [use.device_s for use in worker.usage.sequences]
    assert max(shares) - min(shares) < REPORT_S


async def test_the_last_interval_is_reported_when_the_worker_ends(start_worker: Starter) -> None:
    worker = await start_worker(SLOW)
    sink = Sink()
    worker.client.start(worker.spec(max_tokens=20), sink)
    await sink.wait()
    await asyncio.sleep(0.2)
    worker.run.cancel()
    await worker.agent.close()
    (interval,) = worker.usage.intervals
    assert (interval.worker_id, interval.device_type, interval.cost_per_hour) == ("w1", "cpu", 0.36)
    assert FULL * interval.busy_s <= interval.attributed_s <= interval.busy_s
    assert interval.busy_s < interval.ended_unix_s - interval.began_unix_s
