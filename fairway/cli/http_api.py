"""Calls of the gateway's HTTP API, for what has no gRPC method."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.targets import Target

_TIMEOUT_S: Final = 60.0
_PIECE_BYTES: Final = 256 * 1024
_EXIT_CODES: Final = {
    400: ExitCode.REFUSED,
    401: ExitCode.UNAUTHENTICATED,
    403: ExitCode.UNAUTHENTICATED,
    404: ExitCode.REFUSED,
    409: ExitCode.REFUSED,
    413: ExitCode.REFUSED,
    429: ExitCode.REFUSED,
    503: ExitCode.UNAVAILABLE,
    507: ExitCode.UNAVAILABLE,
}


class HttpApi:
    """One tenant's calls. Raises CliError."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else b""
        return self._call("POST", path, data, {"content-type": "application/json"})

    def upload(self, path: Path) -> dict[str, Any]:
        """Return the stored file of a local file, which is sent piece by piece."""
        boundary = f"fairway-{secrets.token_hex(16)}"
        name = "".join(
            char if (char.isascii() and char.isalnum()) or char in "._-" else "_" for char in path.name
        )
        head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n'
            "content-type: application/jsonl\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        try:
            size = path.stat().st_size
            with path.open("rb") as file:

                def pieces() -> Iterator[bytes]:
                    yield head
                    while piece := file.read(_PIECE_BYTES):
                        yield piece
                    yield tail

                headers = {
                    "content-type": f"multipart/form-data; boundary={boundary}",
                    "content-length": str(len(head) + size + len(tail)),
                }
                return self._call("POST", "/v1/files", pieces(), headers)
        except OSError as exc:
            raise CliError(
                "NO_FILE",
                f"cannot read {path}: {exc.strerror}",
                next_step="name a file of JSON lines",
                exit_code=ExitCode.USAGE,
            ) from exc

    def download(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of an answer. Raises CliError, too, when it ends before its announced length."""
        connection, answer = self._send("GET", path, b"", {})
        try:
            left = int(answer.headers.get("content-length") or 0)
            while piece := answer.read(_PIECE_BYTES):
                left -= len(piece)
                yield piece
        except (OSError, http.client.HTTPException) as exc:
            raise _unreachable(exc) from exc
        finally:
            connection.close()
        if left > 0:
            raise _unreachable(ConnectionError("the answer is incomplete"))

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] = b"",
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        connection, answer = self._send(method, path, body, headers or {})
        try:
            found = json.loads(answer.read())
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise _unreachable(exc) from exc
        finally:
            connection.close()
        return dict(found)

    def _send(
        self, method: str, path: str, body: bytes | Iterator[bytes], headers: dict[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connection()
        try:
            try:
                connection.request(
                    method, path, body, {"authorization": f"Bearer {self._target.key}", **headers}
                )
            except ConnectionError:
                if connection.sock is None:
                    raise
                # The server may have refused the request before it read the whole body.
            answer = connection.getresponse()
            if answer.status == 200:
                return connection, answer
            data = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            raise _unreachable(exc) from exc
        connection.close()
        raise _refused(answer.status, data)

    def _connection(self) -> http.client.HTTPConnection:
        url = urlsplit(self._target.address)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if url.scheme not in kinds or not url.hostname:
            raise CliError(
                "NO_ADDRESS",
                f"{self._target.address} is no URL",
                next_step="name it as http://HOST:PORT",
                exit_code=ExitCode.USAGE,
            )
        kind: type[http.client.HTTPConnection] = kinds[url.scheme]
        return kind(url.hostname, url.port, timeout=_TIMEOUT_S)


def _refused(status: int, data: bytes) -> CliError:
    try:
        error = json.loads(data)["error"]
        reason, message = str(error["code"] or error["type"]).upper(), str(error["message"])
    except (ValueError, KeyError, TypeError):
        reason, message = f"HTTP_{status}", "the server gave no reason"
    code = _EXIT_CODES.get(status, ExitCode.FAILED)
    step = "try again later" if status in (429, 503, 507) else "correct the request and repeat it"
    return CliError(reason, message, next_step=step, exit_code=code)


def _unreachable(error: Exception) -> CliError:
    return CliError(
        "UNAVAILABLE",
        f"the HTTP API does not answer: {error}",
        next_step="`fairway status` shows what runs",
        exit_code=ExitCode.UNAVAILABLE,
    )
