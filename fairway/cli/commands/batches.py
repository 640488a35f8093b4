"""`fairway batches`: many requests of one file, run when there is room."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fairway.cli import targets
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption
from fairway.cli.http_api import HttpApi
from fairway.cli.targets import DEFAULT_STATE_DIR, ApiKeyOption, HttpOption, StateDirOption
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.output import err, out, plain
from fairway.cli.terminal.table import Column, show_rows

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
