"""Reads of a worker's recorder: one time limit for all pages, and what is read in it is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from fairway.v1 import worker_pb2
from services.adapters.grpc.worker_steps import MAX_PAGES, GrpcSteps
from services.core.errors import Unavailable

PAGE_S = 0.2


class SlowPages:
    """A worker whose recorder has a further page each ``PAGE_S``; from page ``ends_at`` on it fails."""

    def __init__(self, *, first_s: float = PAGE_S, ends_at: int = 1000) -> None:
        self._first_s, self._ends_at = first_s, ends_at
        handler = grpc.unary_unary_rpc_method_handler(
            self._read, worker_pb2.ReadStepsRequest.FromString, worker_pb2.ReadStepsResponse.SerializeToString
        )
        self.server = grpc.aio.server()
        self.server.add_registered_method_handlers("fairway.v1.WorkerService", {"ReadSteps": handler})
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def _read(self, request: worker_pb2.ReadStepsRequest, context: Any) -> worker_pb2.ReadStepsResponse:
        if request.first_step >= self._ends_at:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it ends")
        await asyncio.sleep(PAGE_S if request.first_step else self._first_s)
        return worker_pb2.ReadStepsResponse(next_step=request.first_step + 1)


async def read(worker: SlowPages, *, limit_s: float) -> list[worker_pb2.ReadStepsResponse]:
    await worker.server.start()
    try:
        return [*await GrpcSteps("token", limit_s=limit_s).read(worker.address, "r1")]
    finally:
        await worker.server.stop(None)


async def test_all_pages_of_a_worker_have_one_limit_and_those_read_in_it_are_kept() -> None:
    async with asyncio.timeout(MAX_PAGES * PAGE_S / 2):
        pages = await read(SlowPages(), limit_s=6 * PAGE_S)
    assert 1 <= len(pages) <= 6
    assert pages[-1].next_step == len(pages), "there are more"


async def test_the_pages_before_a_failure_are_kept() -> None:
    assert len(await read(SlowPages(ends_at=2), limit_s=30.0)) == 2


async def test_a_worker_without_a_page_in_time_does_not_answer() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await read(SlowPages(first_s=30.0), limit_s=PAGE_S)
