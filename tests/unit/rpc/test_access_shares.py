"""One caller's calls leave room for those of others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairway.v1 import options_pb2
from services.core.errors import ShareExceeded, Unavailable
from services.core.generation import Principal
from services.core.records import KeyRole
from services.rpc.connections import Connections, UnauthenticatedCalls
from services.rpc.interceptors import access
from services.rpc.interceptors.access import AccessControl

METHOD = "/fairway.v1.InferenceService/Complete"


class Context:
    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> Any:
        return (("authorization", f"Bearer {self._tenant}"),)


def identify(token: str | None) -> Principal:
    assert token is not None
    return Principal(key_id=f"key-{token}", role=KeyRole.TENANT, tenant_id=token)


async def test_a_tenant_with_its_share_of_calls_is_refused_and_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "MAX_CALLS_OF_CALLER", 4)
    monkeypatch.setattr(access, "MAX_CALLS", 6)
    table = {METHOD: frozenset({options_pb2.ACCESS_TENANT})}
    connections = Connections()
    control = AccessControl(
        table, identify, "i" * 32, connections, UnauthenticatedCalls(connections.close_soon)
    )
    leave = asyncio.Event()

    def call(tenant: str) -> asyncio.Future[Any]:
        return asyncio.ensure_future(control.around(METHOD, leave.wait, Context(tenant)))  # type: ignore[arg-type]

    running = [call("acme") for _ in range(4)]
    with pytest.raises(
        ShareExceeded, match=r"4 calls of this caller .* wait until some have ended"
    ) as refused:
        await call("acme")
    assert refused.value.retry_after_s
    running += [call("beta") for _ in range(2)]
    with pytest.raises(Unavailable, match="6 calls are running here"):
        await call("gamma")
    leave.set()
    assert await asyncio.gather(*running) == [True] * 6
