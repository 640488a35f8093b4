"""What frames a request and what follows its head: refused, counted or timed, also after an early answer."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import pytest

from tests.support.http_target import AUTHORISED, MAX_BODY, POST, Canary, Target, exchange, send_until_cut

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
CHUNKED = AUTHORISED + b"transfer-encoding: chunked\r\n\r\n"
FLOOD = 60_000_000
MIB = 1 << 20
MAX_GROWTH_MIB = 48
MAX_TAKEN = 12 * MIB  # what the sockets between hold, beside what the server reads


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target() as found:
        yield found


def test_a_chunked_body_is_taken(target: Target) -> None:
    pieces = [b"%x;a=b\r\n%s\r\n" % (1, BODY[at : at + 1]) for at in range(len(BODY))]
    answer = target.exchange(
        CHUNKED.replace(b"host", b"connection: close\r\nhost") + b"".join(pieces) + b"0\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "trailer",
    [b"x: y\r\n", b"x:\r\n", b"authorization: Bearer x\r\n", b"content-length: 5\r\n", b"x: y\r\n" * 1000],
)
def test_a_trailer_ends_the_exchange(target: Target, trailer: bytes) -> None:
    before = target.report().calls
    answer = target.exchange(CHUNKED + CHUNK + b"0\r\n" + trailer + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer
    assert target.report().calls == before


def test_a_credential_in_a_trailer_is_none(target: Target) -> None:
    key = AUTHORISED.removeprefix(POST)
    answer = target.exchange(POST + b"transfer-encoding: chunked\r\n\r\n", CHUNK + b"0\r\n" + key + b"\r\n")
    assert answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 "))
    assert b" 200 " not in answer


@pytest.mark.parametrize(
    "lines",
    [
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: chunked, gzip\r\n",
        b"transfer-encoding: identity\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 5\r\n",
        b"content-length: +5\r\n",
        b"x-a: b\r\n c\r\n",
        b"x-a: b\0c\r\n",
        b"x-a: b\rc\r\n",
        b"x-a : b\r\n",
    ],
)
def test_ambiguous_heads_are_refused(target: Target, lines: bytes) -> None:
    before = target.report().calls
    answer = target.exchange(AUTHORISED + lines + b"\r\n" + CHUNK + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert target.report().calls == before


PLAIN = AUTHORISED + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


def test_the_host_header_is_there_once(target: Target) -> None:
    draw = random.Random(14)
    names = [b"host", b"Host", b"HOST", b"hOsT"]
    right = [b"x", b"x:80", b"", b"127.0.0.1:8080", b"[::1]:80", b"[::1]", b"a.example.com."]
    for _ in range(20):
        name, value = draw.choice(names), draw.choice(right)
        line = b"%s: %s\r\n" % (name, value)
        assert target.exchange(PLAIN.replace(b"host: x\r\n", line)).startswith(b"HTTP/1.1 200 "), line
    before = target.report().calls
    wrong = [
        b"",
        *(b"host: %s\r\n" % value for value in (b"a b", b"a/b", b"u@a", b"a:b", b"a, b@", b"[::1", b"a?b")),
    ]
    for _ in range(20):
        lines = [b"%s: %s\r\n" % (draw.choice(names), draw.choice(right)) for _ in range(draw.randint(2, 4))]
        draw.shuffle(lines)
        wrong.append(b"".join(lines))
    for head in wrong:
        answer = target.exchange(PLAIN.replace(b"host: x\r\n", head))
        assert answer.startswith(b"HTTP/1.1 400 "), head
        assert b"Host header" in answer, head
        assert answer.count(b"HTTP/1.1 ") == 1, head
    assert target.report().calls == before


def test_http_1_0_needs_no_host(target: Target) -> None:
    old = PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0")
    assert target.exchange(old.replace(b"host: x\r\n", b"")).startswith(b"HTTP/1.1 200 ")
    assert target.exchange(old.replace(b"host: x\r\n", b"host: x\r\nhost: x\r\n")).startswith(
        b"HTTP/1.1 400 "
    )


def test_a_false_version_is_refused(target: Target) -> None:
    draw = random.Random(15)
    labels = [
        "HTTP/2.0",
        "HTTP/0.9",
        "HTTP/2",
        "HTTP/3",
        "http/1.1",
        "HTTP/1.10",
        "HTTP/01.1",
        "HTTP/1,1",
        "HTP/1.1",
    ]
    labels += [f"HTTP/{draw.randint(0, 99)}.{draw.randint(2, 99)}" for _ in range(40)]
    before = target.report().calls
    for label in labels:
        answer = target.exchange(PLAIN.replace(b"HTTP/1.1", label.encode()))
        assert answer.startswith(b"HTTP/1.1 400 "), label
        assert answer.count(b"HTTP/1.1 ") == 1, label
    assert target.report().calls == before


def test_http_1_0_has_no_chunked_body(target: Target) -> None:
    answer = target.exchange(CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + CHUNK + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"])
def test_an_answer_of_http_1_0_ends_with_its_connection(target: Target, keep: bytes) -> None:
    for extra, ends in ((b',"stream":true}', b"data: [DONE]\n\n"), (b"}", b"}")):
        body = BODY[:-1] + extra
        head = AUTHORISED.replace(b"HTTP/1.1", b"HTTP/1.0") + keep + b"content-length: %d\r\n\r\n" % len(body)
        answer = target.exchange(head + body)
        assert answer.startswith(b"HTTP/1.1 200 ")
        headers, _, content = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in headers.lower()
        assert b"connection: close" in headers.lower()
        assert content.startswith((b"data: {", b"{"))
        assert b"\r\n" not in content
        assert content.endswith(ends)


NEVER_ENDING = {
    "body after 401": (POST + b"transfer-encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65_536 + b"\r\n"),
    "trailers after 401": (
        POST + b"transfer-encoding: chunked\r\n\r\n0\r\n",
        b"x-%s: y\r\n" % (b"a" * 60_000),
    ),
    "one trailer after 401": (POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 65_536),
    "trailer name after 401": (POST + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a" * 65_536),
    "body after 404": (
        b"POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
        b"10000\r\n" + b"x" * 65_536 + b"\r\n",
    ),
    "body of a probe": (
        b"GET /healthz HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
        b"10000\r\n" + b"x" * 65_536 + b"\r\n",
    ),
    "body after 413": (AUTHORISED + b"content-length: 60000000\r\n\r\n", b"x" * 65_536),
    "trailers of a tenant": (CHUNKED + CHUNK + b"0\r\n", b"x-%s: y\r\n" % (b"a" * 60_000)),
    "chunk extension": (CHUNKED + b"1;a=", b"a" * 65_536),
    "chunk extension after 401": (POST + b"transfer-encoding: chunked\r\n\r\n1;a=", b"a" * 65_536),
    "chunk extensions": (CHUNKED, b"1;%s\r\nx\r\n" % (b"a" * 1000) * 64),
    "chunks of a byte": (CHUNKED, b"1\r\n \r\n" * 10_000),
    "chunks of a byte after 401": (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 10_000),
    "chunk size": (CHUNKED, b"0" * 65_536),
    "head": (POST, b"x-a: b\r\n" * 8000),
    "name in a head": (POST, b"a" * 65_536),
    "empty lines": (b"", b"\r\n" * 32_768),
    "empty lines after a request": (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n" * 32_768),
    "after an upgrade": (
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"x" * 65_536,
    ),
}


@pytest.mark.parametrize("name", NEVER_ENDING)
def test_what_does_not_end_is_cut(target: Target, name: str) -> None:
    head, piece = NEVER_ENDING[name]
    before_mib = target.resident_mib()
    target.report()
    with Canary(target) as canary, target.connect() as stranger:
        stranger.sendall(head)
        sent = send_until_cut(stranger, piece, FLOOD)
    report = target.report()
    limit = MAX_BODY + MAX_TAKEN if "body" in name else MAX_TAKEN
    assert sent < limit + len(piece), f"{sent / MIB:.0f} MiB were taken"
    assert target.resident_mib() - before_mib < MAX_GROWTH_MIB
    assert not canary.failures
    assert report.worst_gap_cpu_s < 0.3, report


@pytest.mark.parametrize("size", [1 * MIB, 7 * MIB])
def test_an_early_answer_reaches_a_client_that_sends_its_body_first(target: Target, size: int) -> None:
    head = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size
    with target.connect() as client:
        client.sendall(head)
        time.sleep(0.1)
        for _ in range(size // 65_536):
            with contextlib.suppress(OSError):
                client.send(b"x" * 65_536)
        assert b" 401 " in exchange(client)


def test_a_body_that_stays_away_is_not_waited_for() -> None:
    with Target(protocol={"body_timeout_s": 0.3}) as target:
        for head in (POST, AUTHORISED):
            with target.connect() as client:
                client.sendall(head + b"content-length: 50\r\n\r\n{")
                started_s = time.monotonic()
                exchange(client)
                assert time.monotonic() - started_s < 20


def test_lines_between_requests_keep_no_connection_open() -> None:
    with Target(protocol={"head_timeout_s": 0.5, "keep_alive_s": 0.5}) as target, target.connect() as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        started_s = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started_s < 30:
                client.sendall(b"\r\n")
                time.sleep(0.05)
        assert time.monotonic() - started_s < 20


def test_pipelined_requests_are_bounded(target: Target) -> None:
    before_mib = target.resident_mib()
    answer = target.exchange(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000)
    assert answer.count(b"HTTP/1.1 ") < 1000
    assert target.resident_mib() - before_mib < 16
    assert target.ask()[0] == 200


def test_a_broken_request_puts_nothing_into_the_answer_before_it(target: Target) -> None:
    body = BODY[:-1] + b',"stream":true,"user":"held"}'
    request = AUTHORISED + b"content-length: %d\r\n\r\n" % len(body) + body
    with target.connect() as client:
        client.sendall(request)
        assert b" 200 " in client.recv(100)
        answer = exchange(client, b"\0\0\0\0")
    assert b"HTTP/1.1 400" not in answer
