"""Lines of batches as requests of the HTTP API: what they return to the pace of their batch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from services.core.generation import Principal, StageClock, Usage
from services.core.records import KeyRole
from services.gateway.batches.lines import LineAnswer
from services.gateway.events import Received
from services.gateway.faces.batches.lines import HttpLines
from services.gateway.faces.openai.exchange import BodyReader
from services.gateway.rows.service import Embeddings
from services.gateway.rows.work import RowsAnswer
from tests.support.clocks import QuickClock

CALLER = Principal("k", KeyRole.TENANT, "acme")


class WaitingRows:
    """Rows that waited in the queue and for the engine."""

    async def embed(self, principal: Principal, request: Any, *, received: Received) -> Embeddings:
        self.received = received
        clock = StageClock(0, queue_us=200_000, engine_wait_us=50_000, prefill_us=900_000)
        answer = RowsAnswer("req_1", "m", "d", (), (1,), Usage(1, 0), clock)
        return Embeddings(answer, [np.array([0.5], "float32")])


class Ids:
    def request_id(self) -> str:
        return "req_1"

    def incident_id(self) -> str:
        return "inc_1"


async def run(rows: Any) -> LineAnswer:
    service: Any = None
    lines = HttpLines(service, rows, BodyReader(10_000), QuickClock(1.0), Ids())
    body = json.dumps({"model": "m", "input": "a"}).encode()
    return await lines.run(CALLER, "/v1/embeddings", body, "key")


async def test_a_line_of_embeddings_returns_how_long_its_rows_waited() -> None:
    answer = await run(WaitingRows())
    assert answer.status == 200
    assert answer.waited_s == pytest.approx(0.25)


async def test_the_key_of_a_line_is_internal() -> None:
    rows = WaitingRows()
    await run(rows)
    assert rows.received.internal
