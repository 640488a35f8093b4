"""The credit that a request gives its worker: what the reader took, within both windows."""

import asyncio

from tests.unit.gateway.requests.test_request import Harness, emit


async def test_credit_is_given_in_quarters_of_the_window() -> None:
    harness = Harness(emit(4, None))
    task = harness.start()
    await asyncio.sleep(0.02)
    for _ in range(4):
        harness.request.credit(0, 1)
    assert harness.workers.credits == [2, 2]
    harness.request.credit(5, 1)  # a choice that is not there
    harness.request.cancel()
    await task


async def test_a_window_of_the_client_is_counted_over_losses() -> None:
    harness = Harness(emit(4, "gone"), emit(4, None))
    harness.client_window = 4
    task = harness.start()
    await asyncio.sleep(0.02)  # lost, and waiting to be placed again
    harness.request.allow(3)
    await asyncio.sleep(0.1)
    first, resumed = harness.workers.started
    assert first.initial_credit_tokens == 4
    assert (len(resumed.produced_ids), resumed.initial_credit_tokens) == (4, 3)
    harness.request.cancel()
    await task


async def test_credit_that_comes_before_the_start_counts() -> None:
    harness = Harness(emit(0, None))
    harness.client_window = 2
    harness.request.allow(4)
    task = harness.start()
    await asyncio.sleep(0.02)
    assert harness.workers.started[0].initial_credit_tokens == 6
    harness.request.cancel()
    await task


async def test_a_window_of_the_client_never_widens_the_gateways_own() -> None:
    harness = Harness(emit(8, None))
    harness.client_window = 1_000_000
    task = harness.start()
    await asyncio.sleep(0.02)
    for _ in range(100):
        harness.request.allow(1_000_000)
    assert harness.workers.started[0].initial_credit_tokens == 8
    assert harness.workers.credits == []
    harness.request.credit(0, 8)
    assert harness.workers.credits == [8]
    harness.request.cancel()
    await task
