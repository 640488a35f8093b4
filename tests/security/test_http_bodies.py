"""Bodies that cost more than a request needs: refused before they are decoded, and not on the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import time
from collections.abc import Iterator

import pytest

from services.core.errors import FairwayError, InvalidInput
from services.gateway.faces.openai.errors import HttpProblem
from services.gateway.faces.openai.exchange import FREE_BYTES, BodyReader
from services.gateway.faces.openai.requests import chat_request, completion_request
from services.gateway.faces.openai.types import check_json_cost, is_cheap
from tests.integration.openai.face import CHAT, KEY
from tests.support.http_target import AUTHORISED, MAX_BODY, POST, Canary, Target, exchange

MIB = 1 << 20
MAX_GAP_S = 0.3
START = '{"model":"m","messages":[{"role":"user","content":"hi"}]'


def repeated(start: str, piece: str, end: str, size: int = 7_800_000) -> bytes:
    return (start + ",".join([piece] * (size // (len(piece) + 1))) + end).encode()


LOGIT_BIAS = (START + ',"logit_bias":{' + ",".join(f'"{n}":1' for n in range(710_000)) + "}}").encode()
COSTLY = {
    "logit_bias": LOGIT_BIAS,
    "messages": repeated('{"model":"m","messages":[', '{"role":"user","content":""}', "]}"),
    "parts": repeated(
        '{"model":"m","messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"
    ),
    "stop": repeated(START + ',"stop":[', '"a"', "]}"),
    "stop_token_ids": repeated(START + ',"stop_token_ids":[', "1", "]}"),
    "tools": repeated(START + ',"tools":[', "{}", "]}"),
    "lists": repeated(START + ',"stop":[', "[]", "]}"),
    "unknown": (START + "," + ",".join(f'"k{n}":1' for n in range(600_000)) + "}").encode(),
    "nesting": (START + ',"x":' + "[" * 7_000_000).encode(),
    "escaped quotes": repeated(START + ',"logit_bias":{', '"\\\\\\"":1', "}}"),
}
ODD = {
    "nesting": (START + ',"x":' + "[" * 200_000 + "]" * 200_000 + "}").encode(),
    "NaN": (START + ',"temperature":NaN}').encode(),
    "1e999": (START + ',"temperature":1e999}').encode(),
    "twice": (START + ',"model":"n"}').encode(),
    "twice, far apart": (START + ',"user":"' + "a" * 100_000 + '","model":"n"}').encode(),
    "long number": (START + ',"n":' + "1" * 1_000_000 + "}").encode(),
}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target() as found:
        yield found


@pytest.mark.parametrize("name", COSTLY)
def test_costly_bodies_are_refused_before_they_are_decoded(name: str) -> None:
    with pytest.raises(InvalidInput, match="too many"):
        chat_request(COSTLY[name])


@pytest.mark.parametrize("name", ODD)
def test_odd_bodies_are_refused(target: Target, name: str) -> None:
    status, answer = target.ask(ODD[name])
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_large_requests_are_taken(target: Target) -> None:
    text = 'He said: "{[a, b]}", then {"x": 1} and \\ again.\n'
    turn = {"role": "user", "content": [{"type": "text", "text": text}] * 4}
    bodies = [
        {**CHAT, "messages": [{"role": "user", "content": text * 40_000}]},
        {**CHAT, "messages": [turn] * 2048},
        {**CHAT, "messages": [{"role": "user", "content": "\u00e9\u4e2d\U0001f600" * 200_000}]},
        {**CHAT, "logit_bias": {str(n): 1 for n in range(1024)}},
    ]
    for body in bodies:
        assert target.ask(json.dumps(body).encode())[0] == 200
    for ids in (list(range(100_000)), [7] * 1_048_576):
        (generation,) = completion_request(json.dumps({"model": "m", "prompt": ids}).encode()).generations
        assert len(generation.token_ids.ids) == len(ids)


@pytest.mark.parametrize(
    ("text", "opened", "commas"),
    [
        ("{[,", 0, 0),
        ('{"[,', 0, 0),
        ('\\"{[,\\\\', 0, 0),
        ("\\\\\\", 0, 0),
        ('"\\"\\\\"', 0, 0),
    ],
)
def test_only_what_is_outside_of_strings_is_counted(text: str, opened: int, commas: int) -> None:
    """A string of many marks next to as many openings as are taken."""
    check_json_cost(json.dumps({"user": text * 40_000, "x": [[]] * 32_000, text: ["y"]}).encode())
    with pytest.raises(InvalidInput, match="objects and lists"):
        check_json_cost(json.dumps({"user": text * 10_000, "x": [[]] * 32_768, text: ["y"]}).encode())


def test_a_small_body_is_parsed_at_once_only_if_it_costs_little() -> None:
    assert is_cheap(json.dumps(CHAT).encode())
    assert is_cheap(json.dumps({**CHAT, "user": "a" * 60_000}).encode())
    assert is_cheap(json.dumps({**CHAT, "user": 'a, "b", [{c' * 4000}).encode())
    assert not is_cheap(LOGIT_BIAS[:60_000])
    assert not is_cheap(b" " * 70_000)


def test_many_biases_are_refused_before_they_are_converted() -> None:
    with pytest.raises(InvalidInput, match="logit_bias has 1025 entries"):
        chat_request(json.dumps({**CHAT, "logit_bias": dict.fromkeys(map(str, range(1025)), 1)}).encode())


def _post(target: Target, body: bytes, source: str) -> int:
    """Return the status of a post, or 0 where the connection ended without an answer."""
    with target.connect(source) as connection:
        head = AUTHORISED + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        answer = exchange(connection, head, body)
    return int(answer.split()[1]) if answer else 0


def _at_once(target: Target, body: bytes, number: int) -> list[int]:
    with concurrent.futures.ThreadPoolExecutor(number) as posts:
        return list(posts.map(lambda n: _post(target, body, f"127.0.0.{10 + n}"), range(number)))


@pytest.mark.parametrize("name", ["logit_bias", "nesting", "stop_token_ids"])
def test_many_costly_bodies_at_once_do_not_stop_the_loop(target: Target, name: str) -> None:
    before_mib = target.resident_mib()
    target.report()
    with Canary(target) as canary:
        statuses = _at_once(target, COSTLY[name], 25)
    report = target.report()
    # One that is refused while it still sends may find the connection reset.
    assert set(statuses) <= {400, 429, 0}
    assert 400 in statuses
    assert not canary.failures
    assert canary.answers > 0
    assert report.worst_gap_cpu_s < MAX_GAP_S, report
    assert target.resident_mib(peak=True) - before_mib < 200


def test_large_token_prompts_at_once_do_not_stop_the_loop(target: Target) -> None:
    """The costliest request that is valid by itself; the model's context refuses it afterwards."""
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stop_token_ids":['
        + b"1," * 1_048_575
        + b"1]}"
    )
    target.report()
    with Canary(target) as canary:
        statuses = _at_once(target, body, 12)
    report = target.report()
    assert set(statuses) <= {200, 400, 429, 0}
    assert not canary.failures
    assert report.worst_gap_cpu_s < MAX_GAP_S, report


def test_small_bodies_at_once_do_not_stop_the_loop(target: Target) -> None:
    body = LOGIT_BIAS[:64_000].rpartition(b",")[0] + b"}}"
    target.report()
    with Canary(target) as canary:
        for _ in range(3):
            assert set(_at_once(target, body, 64)) == {400}
    assert not canary.failures
    assert target.report().worst_gap_cpu_s < MAX_GAP_S


def test_nothing_of_a_body_is_read_before_its_sender_is_known(target: Target) -> None:
    """The answer comes without a byte of the body, and no 100 Continue invites one."""
    before = target.report().calls
    for key, status in ((b"", b"401"), (KEY.encode() + b"x", b"401"), (KEY.encode(), b"100")):
        head = (
            POST
            + b"expect: 100-continue\r\nauthorization: Bearer "
            + key
            + b"\r\ncontent-length: 5000000\r\n\r\n"
        )
        with target.connect(timeout_s=5) as connection:
            connection.sendall(head)
            assert connection.recv(1000).split()[1] == status
    assert target.report().calls == before


def test_a_tenants_bodies_are_bounded_and_given_back() -> None:
    reader = BodyReader(MAX_BODY)
    with reader.account("a") as hold:
        hold(FREE_BYTES)
        assert reader.held_bytes == 0
        hold(3 * MAX_BODY)
        hold(4 * MAX_BODY)
        with reader.account("a") as more, pytest.raises(HttpProblem) as caught:
            more(FREE_BYTES + 1)
        assert (caught.value.status, caught.value.retry_after_s, caught.value.close) == (429, 1.0, True)
        with reader.account("a") as small, reader.account("b") as other:
            small(FREE_BYTES)
            other(MAX_BODY)
            assert reader.held_bytes == 5 * MAX_BODY
    assert reader.held_bytes == 0
    with reader.account("a") as hold:
        hold(4 * MAX_BODY)


def test_all_tenants_bodies_together_are_bounded() -> None:
    reader = BodyReader(MAX_BODY)
    with contextlib.ExitStack() as held:
        for tenant in "abcd":
            held.enter_context(reader.account(tenant))(4 * MAX_BODY)
        with reader.account("e") as fifth, pytest.raises(HttpProblem) as caught:
            fifth(FREE_BYTES + 1)
    assert caught.value.status == 503
    assert reader.held_bytes == 0


async def test_a_parser_that_raises_lets_the_next_one_in() -> None:
    reader = BodyReader(MAX_BODY)

    def fail(_body: bytes) -> None:
        raise InvalidInput("no")

    for _ in range(2):
        with pytest.raises(FairwayError):
            await reader.parse(fail, b" " * 100_000)
    assert await reader.parse(len, b" " * 100_000) == 100_000


async def test_one_large_body_is_parsed_at_a_time() -> None:
    """Threads that decode at once would stop the loop for the sum of their times."""
    reader, running = BodyReader(MAX_BODY), []

    def parse(body: bytes) -> int:
        running.append(body)
        time.sleep(0.01)
        most = len(running)
        running.pop()
        return most

    bodies = [b" " * 100_000] * 8
    assert await asyncio.gather(*[reader.parse(parse, body) for body in bodies]) == [1] * 8
