"""What an RPC's metadata tells of the attempts before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from services.rpc.interceptors.arrival import NoteArrival, RpcArrival, arrival
from services.runtime.clock import SystemClock


@dataclass
class Details:
    method: str
    invocation_metadata: Any


@pytest.mark.parametrize(
    ("metadata", "attempt"),
    [
        ((), 0),
        ((("x-fairway-attempt", "2"),), 2),
        ((("grpc-previous-rpc-attempts", "1"),), 1),
        ((("x-fairway-attempt", "2"), ("grpc-previous-rpc-attempts", "3")), 3),
        ((("x-fairway-attempt", "123456"),), 1000),
        ((("x-fairway-attempt", "9999999999"),), 0),
        ((("x-fairway-attempt", "-1"),), 0),
        ((("x-fairway-attempt", "two"),), 0),
        ((("x-fairway-attempt", b"2"),), 0),
    ],
)
async def test_attempts_are_read_and_bounded(
    metadata: tuple[tuple[str, str | bytes], ...], attempt: int
) -> None:
    seen: list[RpcArrival] = []

    async def go_on(_: Any) -> None:
        seen.append(arrival())

    await NoteArrival(SystemClock()).intercept_service(go_on, Details("/m", metadata))
    assert [found.attempt for found in seen] == [attempt]
