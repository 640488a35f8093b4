"""What an RPC ends with when its behaviour raises."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from grpc._cython import cygrpc
from structlog.testing import capture_logs

from services.core.errors import InvalidInput
from services.rpc.interceptors.base import Context
from services.rpc.interceptors.outcome import ErrorStatus
from services.runtime.telemetry.logging import LineBudget

METHOD = "/fairway.v1.InferenceService/Complete"


class Gone:
    """The context of a call whose caller has gone: nothing can be sent."""

    async def abort_with_status(self, status: grpc.Status) -> None:
        raise cygrpc.ExecuteBatchError('Failed "execute_batch"')


@pytest.mark.parametrize(
    "error", [InvalidInput("no"), NotImplementedError(), cygrpc.ExecuteBatchError('Failed "execute_batch"')]
)
async def test_a_caller_that_has_gone_cancels_its_rpc_and_few_lines_are_written(error: Exception) -> None:
    layer = ErrorStatus(lambda: "inc_1", LineBudget(lambda: 0.0, 5))

    async def call() -> Any:
        raise error

    with capture_logs() as lines:
        for _ in range(100):
            with pytest.raises(asyncio.CancelledError):
                await layer.around(METHOD, call, cast(Context, Gone()))
    assert 1 <= len(lines) <= 5
    assert {line["log_level"] for line in lines} == {"info"}
