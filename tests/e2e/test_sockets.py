"""WebSockets of gateway processes: one is killed in the middle of a stream, the other is stopped."""

from __future__ import annotations

import signal
import uuid
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from fairway.cli.fleet.record import FleetRecord
from fairway.cli.state import StateDir
from tests.support.socket_client import closed, opened, received, request, until_over
from tests.support.stack import Stack


@pytest.fixture
def stack(two_gateways: Stack) -> Stack:
    two_gateways.wait_ready()
    return two_gateways


def gateways_of(stack: Stack) -> list[tuple[psutil.Process, str]]:
    """Return each gateway's process and HTTP address, those of the first first."""
    addresses = [*stack.endpoints["gateways"], *stack.endpoints["metrics"].values()]
    others = {int(address.rpartition(":")[2]) for address in addresses}
    record = FleetRecord.load(StateDir.at(stack.state).fleet)
    assert record is not None
    found = []
    for name in ("gateway", "gateway-1"):
        process = psutil.Process(record.children[name].pid)
        ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
        (port,) = ports - others
        found.append((process, f"http://127.0.0.1:{port}"))
    return found


def text_of(messages: list[Any]) -> str:
    frames = [each["data"] for each in messages if each["type"] == "event" and each["data"] != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for each in frames for choice in each["choices"])


async def test_a_stream_survives_its_gateway_and_a_stopping_one_sends_clients_away(stack: Stack) -> None:
    (doomed, first), (stopping, second) = gateways_of(stack)
    body: dict[str, Any] = {"model": stack.model, "messages": [{"role": "user", "content": "Write."}]}
    body |= {"stream": True, "max_tokens": 200, "temperature": 1, "seed": 3, "ignore_eos": True}
    async with opened(first, stack.api_key) as socket:
        await socket.send(request("a", body))
        whole = text_of(await until_over(socket, "a"))
    key = uuid.uuid4().hex
    had: list[Any] = []
    async with opened(first, stack.api_key) as socket:
        await socket.send(request("a", body, idempotency_key=key))
        try:
            while True:
                had.append(await received(socket))
                if len(had) == 20:
                    doomed.kill()
        except ConnectionClosed:
            pass
    async with opened(second, stack.api_key) as socket, opened(second, stack.api_key) as idle:
        last = had[-1]["event_id"]
        await socket.send(request("a", body, idempotency_key=key, last_event_id=last))
        rest = await until_over(socket, "a")
        assert rest[-1] == {"type": "end", "id": "a", "complete": True}
        assert 0 < len(text_of(had)) < len(whole)
        assert text_of([*had, *rest]) == whole
        await socket.send(request("b", body))
        await received(socket)
        stopping.send_signal(signal.SIGTERM)
        assert (await closed(idle))[0] == 1012
        assert (await until_over(socket, "b"))[-1]["complete"]
        assert (await closed(socket))[0] == 1012
