"""`fairway batches`: many requests of one file, run when there is room."""

from __future__ import annotations

import codecs
import http.client
import json
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from fairway.cli import targets
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption
from fairway.cli.targets import DEFAULT_STATE_DIR, ApiKeyOption, HttpOption, StateDirOption, Target
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.output import err, out, plain
from fairway.cli.terminal.table import Column, show_rows

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
        if url.scheme == "https" and self._target.tls_dir is not None:
            context = ssl.create_default_context(cafile=self._target.tls_dir / "ca.crt")
            return http.client.HTTPSConnection(url.hostname, url.port, timeout=_TIMEOUT_S, context=context)
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


app = typer.Typer(help="Batches: many requests of one file, run when there is room.", no_args_is_help=True)

Batch = Mapping[str, Any]
_UNFINISHED: Final = ("validating", "in_progress", "cancelling")
_POLL_S: Final = 1.0
# That the gateway may be unreachable in a row while `--wait` polls.
_ABSENT_S: Final = 60.0
_LIST: Final = 100
BatchArgument = Annotated[str, typer.Argument(help="The id of a batch.", show_default=False)]


def _progress(batch: Batch) -> str:
    counts = batch["request_counts"]
    return f"{counts['completed'] + counts['failed']}/{counts['total']}"


_COLUMNS: Final[tuple[Column[Batch], ...]] = (
    Column("id", lambda batch: batch["id"]),
    Column("status", lambda batch: batch["status"]),
    Column("done", _progress),
    Column("failed", lambda batch: str(batch["request_counts"]["failed"])),
    Column("endpoint", lambda batch: batch["endpoint"], drop=2),
    Column(
        "created", lambda batch: f"{datetime.fromtimestamp(batch['created_at'], UTC):%Y-%m-%d %H:%M}", drop=1
    ),
    Column("input", lambda batch: batch["input_file_id"], wide=True),
    Column("output", lambda batch: batch["output_file_id"] or "", wide=True),
    Column("errors", lambda batch: batch["error_file_id"] or "", wide=True),
)


@app.command("create")
def create(
    file: Annotated[Path, typer.Argument(help="A file of JSON lines, each a request.")],
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="What its lines call.")
    ] = "/v1/chat/completions",
    window: Annotated[str, typer.Option("--window", help="Hours until it expires.")] = "24h",
    wait: Annotated[bool, typer.Option("--wait", help="Return when the batch has ended.")] = False,
    output: OutputOption = Format.TABLE,
    http: HttpOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Run a file of requests in the lowest class.

    \b
    Examples:
      fairway batches create requests.jsonl
      fairway batches create texts.jsonl --endpoint /v1/embeddings --wait
    """
    api = _api(http, api_key, state_dir)
    stored = api.upload(file)
    body = {"input_file_id": stored["id"], "endpoint": endpoint, "completion_window": window}
    batch: Batch = api.post("/v1/batches", body)
    if wait:
        plain(err(), f"{batch['id']} is created")
        batch = ended(batch, lambda: api.get(f"/v1/batches/{batch['id']}"), time.monotonic, time.sleep)
    _show(batch, output)
    if wait and batch["status"] != "completed":
        raise _ended_badly(batch)


@app.command("list")
def list_batches(
    output: OutputOption = Format.TABLE,
    http: HttpOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List the newest 100 batches.

    \b
    Examples:
      fairway batches list
      fairway batches list -o wide
    """
    found = _api(http, api_key, state_dir).get(f"/v1/batches?limit={_LIST}")
    if output in DOCUMENTS:
        write_document({"batches": found["data"]}, output)
    else:
        show_rows(_COLUMNS, found["data"], wide=output is Format.WIDE)


@app.command("show")
def show(
    batch: BatchArgument,
    output: OutputOption = Format.TABLE,
    http: HttpOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Show a batch.

    \b
    Examples:
      fairway batches show batch_0123456789abcdef01234567
    """
    _show(_api(http, api_key, state_dir).get(f"/v1/batches/{_checked(batch)}"), output)


@app.command("cancel")
def cancel(
    batch: BatchArgument,
    output: OutputOption = Format.TABLE,
    http: HttpOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Start no more lines of a batch. What is done stays.

    \b
    Examples:
      fairway batches cancel batch_0123456789abcdef01234567
    """
    _show(_api(http, api_key, state_dir).post(f"/v1/batches/{_checked(batch)}/cancel"), output)


@app.command("results")
def results(
    batch: BatchArgument,
    errors: Annotated[bool, typer.Option("--errors", help="The lines that failed instead.")] = False,
    http: HttpOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Write the answers of an ended batch as JSON lines.

    \b
    Examples:
      fairway batches results batch_0123456789abcdef01234567 > answers.jsonl
      fairway batches results batch_0123456789abcdef01234567 --errors
    """
    api = _api(http, api_key, state_dir)
    found = api.get(f"/v1/batches/{_checked(batch)}")
    if found["status"] in _UNFINISHED:
        raise CliError(
            "NOT_ENDED",
            f"the batch is {found['status']}: {_progress(found)} lines are done",
            next_step=f"`fairway batches show {batch}` shows when it has ended",
            exit_code=ExitCode.REFUSED,
        )
    file_id = found["error_file_id" if errors else "output_file_id"]
    if file_id is None:
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in api.download(f"/v1/files/{file_id}/content"):
        plain(out(), decoder.decode(piece), end="")


def ended(
    batch: Batch, read: Callable[[], Batch], monotonic_s: Callable[[], float], sleep: Callable[[float], None]
) -> Batch:
    """Return the batch at its end. Raises CliError once the gateway has been unavailable for a minute."""
    answered_s = monotonic_s()
    while batch["status"] in _UNFINISHED:
        sleep(_POLL_S)
        try:
            batch = read()
            answered_s = monotonic_s()
        except CliError as error:
            if error.exit_code is not ExitCode.UNAVAILABLE or monotonic_s() - answered_s >= _ABSENT_S:
                raise
    return batch


def _api(url: str, api_key: str, state_dir: Path) -> HttpApi:
    return HttpApi(targets.http_api(url, api_key, state_dir))


def _checked(batch: str) -> str:
    """Return the id for a path. Raises BadParameter."""
    if not batch.startswith("batch_") or not batch.isascii() or not batch.replace("_", "").isalnum():
        raise typer.BadParameter("the id of a batch begins with batch_", param_hint="BATCH")
    return batch


def _show(batch: Batch, output: Format) -> None:
    if output in DOCUMENTS:
        write_document(dict(batch), output)
        return
    show_rows(_COLUMNS, [batch], wide=output is Format.WIDE)
    for problem in (batch["errors"] or {"data": []})["data"]:
        place = f"line {problem['line']}: " if problem["line"] else ""
        plain(out(), f"{place}{problem['code']}: {problem['message']}")


def _ended_badly(batch: Batch) -> CliError:
    return CliError(
        "BATCH_" + str(batch["status"]).upper(),
        f"the batch ended {batch['status']}",
        next_step=f"`fairway batches show {batch['id']}` shows the reasons",
    )
