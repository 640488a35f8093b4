"""Idle connections on the HTTP face: they make room for new ones, and one source has a share of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from services.runtime.connections import source_of
from tests.support.http_target import AUTHORISED, CANARY_SOURCE, POST, Canary, Target, exchange

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"user":"held"}'
HELD = AUTHORISED + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
FOUR = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
PROBE = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.contextmanager
def idle(target: Target, number: int, *sources: str, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        found = []
        for at in range(number):
            connection = stack.enter_context(target.connect(sources[at % len(sources)]))
            with contextlib.suppress(OSError):
                connection.sendall(sent)
            found.append(connection)
        yield found


def open_until(target: Target, wanted: int) -> int:
    deadline_s = time.monotonic() + 10
    while (found := target.report().connections) != wanted and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("sources", "sent"),
    [
        (("127.0.0.2",), b""),
        (FOUR, POST),
        (FOUR, POST + b"content-length: 50\r\n\r\n{"),
        (FOUR, PROBE),
    ],
)
def test_4200_connections_of_strangers_keep_nobody_out(sources: tuple[str, ...], sent: bytes) -> None:
    with Target() as target, Canary(target) as canary:
        before_mib = target.resident_mib()
        with idle(target, 4200, *sources, sent=sent):
            report = target.report()
            assert report.connections <= (2048 if len(sources) == 1 else 4096) + 2
            assert target.ask(source="127.0.0.6")[0] == 200
            answers = canary.answers
            time.sleep(0.5)
            assert canary.answers > answers
        assert target.resident_mib() - before_mib < 128
        assert target.report().refused == 0
    assert not canary.failures


def test_connections_from_the_canarys_own_source_close_the_face_to_nobody() -> None:
    """Behind a proxy, everybody comes from one address."""
    with Target() as target, Canary(target) as canary, idle(target, 4200, CANARY_SOURCE):
        assert target.ask(source=CANARY_SOURCE)[0] == 200
        time.sleep(0.3)
    assert not canary.failures


def test_a_connection_in_use_is_never_closed_for_a_new_one() -> None:
    with Target(max_connections=8) as target, idle(target, 2, "127.0.0.2", sent=HELD) as held:
        for connection in held:
            assert b" 200 " in connection.recv(100)
        with idle(target, 20, "127.0.0.2", "127.0.0.3", "127.0.0.4"):
            assert open_until(target, 8) == 8
            for connection in held:
                connection.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    while connection.recv(1000):
                        pass
                    pytest.fail("a stream was cut")


def test_strangers_are_closed_before_those_who_showed_a_key() -> None:
    plain = BODY.replace(b"true", b"false").replace(b"held", b"plain")
    answered = AUTHORISED + b"content-length: %d\r\n\r\n" % len(plain) + plain

    def is_answered(connection: socket.socket) -> bool:
        connection.sendall(answered)
        answer = b""
        while not answer.endswith(b"}"):
            piece = connection.recv(10_000)
            assert piece, "the connection was closed"
            answer += piece
        return answer.startswith(b"HTTP/1.1 200 ")

    with Target(max_connections=8) as target, idle(target, 2, "127.0.0.2") as known:
        assert all(map(is_answered, known))
        with idle(target, 20, "127.0.0.2", "127.0.0.3", sent=PROBE):
            assert all(map(is_answered, known))


def test_a_source_whose_connections_are_all_in_use_gets_no_more() -> None:
    with Target(max_connections=8) as target, idle(target, 4, "127.0.0.2", sent=HELD) as held:
        for connection in held:
            assert b" 200 " in connection.recv(100)
        with contextlib.suppress(ConnectionResetError), target.connect("127.0.0.2") as fifth:
            assert exchange(fifth, PROBE) == b""
        assert target.ask(source="127.0.0.3")[0] == 200
        assert target.report().refused == 1


def test_a_connection_that_takes_no_answers_is_still_a_strangers() -> None:
    """Requests that need no key, without end and with no answer read, hold no place."""
    request, batch, answered = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n", 30, 0
    with Target(max_connections=2) as target, target.connect() as deaf:
        deaf.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        report = target.report()
        while answered < 100_000:
            deaf.sendall(request * batch)
            deadline_s = time.monotonic() + 1
            while (report := target.report()).exchanges < answered + batch and time.monotonic() < deadline_s:
                pass
            if report.exchanges < answered + batch:
                break
            answered += batch
        assert (report.connections, report.exchanges < 100_000) == (1, True)
        assert target.ask(source="127.0.0.2")[0] == 200
        assert target.report().refused == 0


@pytest.mark.parametrize(
    ("peername", "source"),
    [
        (("192.0.2.7", 5), "192.0.2.7"),
        (("::ffff:192.0.2.7", 5, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (None, ""),
        ("", ""),
    ],
)
def test_what_counts_as_one_source(peername: object, source: str) -> None:
    assert source_of(peername) == source
