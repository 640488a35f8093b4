"""`fairway batches`: refusals while a file is sent, and the wait for a batch."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fairway.cli.commands.batches import HttpApi, ended
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.targets import Target

_BODY = json.dumps({"error": {"code": None, "type": "share_exceeded", "message": "send it later"}}).encode()


@contextmanager
def refusing(status: int) -> Iterator[str]:
    """Yield the URL of a server that answers after the request's head and closes, without its body."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                head = f"HTTP/1.1 {status} Refused\r\ncontent-length: {len(_BODY)}\r\n\r\n"
                connection.sendall(head.encode() + _BODY)

        server = Thread(target=serve)
        server.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.join(10.0)


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, ExitCode.UNAUTHENTICATED), (413, ExitCode.REFUSED), (429, ExitCode.REFUSED)],
)
def test_a_refusal_before_the_file_is_sent_is_reported(tmp_path: Path, status: int, code: ExitCode) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"x" * 50_000_000)
    with refusing(status) as url, pytest.raises(CliError) as caught:
        HttpApi(Target(url, "key")).upload(file)
    assert (caught.value.reason, caught.value.message) == ("SHARE_EXCEEDED", "send it later")
    assert caught.value.exit_code is code


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CliError) as caught:
        HttpApi(Target(f"http://127.0.0.1:{port}", "key")).get("/v1/batches")
    assert caught.value.exit_code is ExitCode.UNAVAILABLE


class Gateway:
    """A batch that is in progress until it completes; ``absent``: seconds without an answer."""

    def __init__(self, absent: tuple[float, float], completed_s: float) -> None:
        self.now_s = 0.0
        self._absent = absent
        self._completed_s = completed_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def read(self) -> Mapping[str, Any]:
        if self._absent[0] <= self.now_s < self._absent[1]:
            raise CliError("UNAVAILABLE", "the HTTP API does not answer", exit_code=ExitCode.UNAVAILABLE)
        return {"status": "completed" if self.now_s >= self._completed_s else "in_progress"}

    def wait(self) -> Mapping[str, Any]:
        return ended({"status": "validating"}, self.read, lambda: self.now_s, self.sleep)


def test_a_wait_outlasts_a_gateway_that_is_absent_for_less_than_a_minute() -> None:
    assert Gateway((100.0, 155.0), 200.0).wait() == {"status": "completed"}
    gateway = Gateway((100.0, 1000.0), 200.0)
    with pytest.raises(CliError):
        gateway.wait()
    assert gateway.now_s == pytest.approx(160.0, abs=2.0)


def test_a_wait_ends_at_a_refusal() -> None:
    def refused() -> Mapping[str, Any]:
        raise CliError("NOT_FOUND", "there is no such batch", exit_code=ExitCode.REFUSED)

    with pytest.raises(CliError, match="no such batch"):
        ended({"status": "validating"}, refused, lambda: 0.0, lambda _: None)
