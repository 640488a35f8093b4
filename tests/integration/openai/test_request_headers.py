"""What the headers of an OpenAI request say: its identifier, deadline, attempt and session."""

from __future__ import annotations

import pytest

from services.core.generation import Principal
from services.core.records import KeyRole
from services.runtime.clock import SystemClock
from tests.integration.openai.face import CHAT, Face


async def test_the_service_gets_who_when_and_how_long(face: Face) -> None:
    await face.chat({**CHAT, "seed": 5}, headers=(("x-request-timeout-s", "2.5"),))
    (call,) = face.service.calls
    assert call.principal == Principal("alpha", KeyRole.TENANT, "acme")
    assert call.timeout_s == 2.5
    assert call.generation.sampling.seed == 5
    assert abs(call.received.unix_us / 1e6 - SystemClock().unix_s()) < 30


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e3", "999999999", "", "1 2", "86401"])
async def test_a_senseless_timeout_is_refused(face: Face, value: str) -> None:
    answer = await face.chat(CHAT, headers=(("x-request-timeout-s", value),))
    assert (answer.status, answer.error["param"]) == (400, "x-request-timeout-s")
    assert face.service.calls == []


@pytest.mark.parametrize(
    ("headers", "attempt"),
    [
        ((), 0),
        ((("x-stainless-retry-count", "2"),), 2),
        ((("x-fairway-attempt", "3"), ("x-stainless-retry-count", "1")), 3),
        ((("x-fairway-attempt", "999999"),), 1000),
        ((("x-fairway-attempt", "-1"),), 0),
        ((("x-fairway-attempt", "many"),), 0),
    ],
)
async def test_a_retry_is_recognised(face: Face, headers: tuple[tuple[str, str], ...], attempt: int) -> None:
    await face.chat(CHAT, headers=headers)
    assert face.service.calls[0].received.attempt == attempt


async def test_the_session_key_is_the_header_then_the_user(face: Face) -> None:
    body = {**CHAT, "user": "u"}
    await face.chat(body, headers=(("x-session-key", "s-1"),))
    await face.chat(body)
    assert [call.generation.session_key for call in face.service.calls] == ["s-1", "u"]
    long = await face.chat(body, headers=(("x-session-key", "s" * 500),))
    assert (long.status, face.service.calls[-1].generation.session_key) == (200, "s" * 500)
    strange = await face.chat(body, headers=(("x-session-key", "a b"),))
    assert (strange.status, strange.error["param"]) == (400, "x-session-key")


async def test_the_request_id_is_ours(face: Face) -> None:
    headers = (("x-request-id", "mine-1"),)
    one, two = [await face.chat(CHAT, headers=headers) for _ in range(2)]
    assert one.headers["x-client-request-id"] == "mine-1"
    assert one.headers["x-request-id"] != two.headers["x-request-id"]
    assert [call.received.request_id for call in face.service.calls] == [
        one.headers["x-request-id"],
        two.headers["x-request-id"],
    ]


@pytest.mark.parametrize("value", ["a b", "x" * 129, "<script>", "a\tb", "\xe9"])
async def test_a_strange_client_id_is_not_echoed(face: Face, value: str) -> None:
    answer = await face.chat(CHAT, headers=(("x-request-id", value),))
    assert answer.status == 200
    assert "x-client-request-id" not in answer.headers
