"""`fairway complete`: continue one text."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fairway.cli import targets
from fairway.cli.calls import client_error
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.generation import (
    ANSWER_S,
    Answer,
    ModelOption,
    PriorityOption,
    SchemaOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TimeoutOption,
    TopKOption,
    TopPOption,
    open_client,
    options_of,
    read_file,
    show_end,
    show_text,
    stream,
)
from fairway.cli.targets import DEFAULT_STATE_DIR, ApiKeyOption, GrpcOption, StateDirOption
from fairway.cli.terminal.output import out, plain
from fairway.client import Client, FairwayError, Options

MAX_PROMPT_BYTES: Final = 4 * 1024 * 1024  # the server's limit


def complete(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; else --file, else standard input.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the text from a file; -: from standard input.")
    ] = None,
    model: ModelOption = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=1048576)] = 128,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    schema: SchemaOption = None,
    priority: PriorityOption = None,
    streamed: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print the text as it arrives, or at its end. With --json: at its end.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The answer with its usage and its stage clock.")
    ] = False,
    timeout: TimeoutOption = ANSWER_S,
    grpc_address: GrpcOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Continue a text. On a terminal the text is printed before its continuation.

    With --json the output is one document; with --json --stream one JSON line per piece, then the document.

    \b
    Examples:
      fairway complete "def fibonacci(n):"
      git diff | fairway complete --max-tokens 256 --stop '```'
      fairway complete -f prompt.txt --seed 7 --json | jq .clock
    """
    text = _prompt(prompt, file)
    client = open_client(grpc_address, api_key, state_dir, answer_s=timeout)
    name = targets.default_model(model, state_dir)
    options = options_of(
        max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        priority=priority,
        schema=schema,
    )
    if prompt is not None and not as_json and out().is_terminal:
        plain(out(), text, end="")
    asyncio.run(_complete(client, name, text, options, streamed=streamed, as_json=as_json))


async def _complete(
    client: Client, model: str, text: str, options: Options, *, streamed: bool | None, as_json: bool
) -> None:
    answer = Answer()
    by_piece = (not as_json) if streamed is None else streamed

    def show_json(piece: str) -> None:
        plain(out(), json.dumps({"text": piece}, ensure_ascii=False))

    async with client:
        if by_piece:
            await stream(client, model, text, options, answer, show_json if as_json else show_text)
        else:
            await _whole(client, model, text, options, answer)
    if as_json:
        found = document(answer)
        plain(out(), json.dumps(found, ensure_ascii=False, indent=None if by_piece else 2))
        return
    plain(out(), "" if by_piece else answer.text)
    show_end(answer)


async def _whole(client: Client, model: str, text: str, options: Options, answer: Answer) -> None:
    try:
        done = await client.complete(model, text, options)
    except FairwayError as exc:
        raise client_error(exc, what="the generation failed") from exc
    answer.accepted, answer.finished = done.accepted, done.finished
    answer.pieces.append(done.text)


def document(answer: Answer) -> dict[str, Any]:
    """Return an answer as a document. The stages of ``clock`` follow each other and sum to the latency."""
    assert answer.accepted is not None
    assert answer.finished is not None
    accepted, finished = answer.accepted, answer.finished
    return {
        "text": answer.text,
        "finish_reason": finished.choices[0].finish_reason.value,
        "model": accepted.model,
        "version_digest": accepted.version_digest,
        "request_id": accepted.request_id,
        "seed": str(accepted.seed),
        "usage": asdict(finished.usage),
        "clock": asdict(finished.clock),
        "resumes": finished.resumes,
    }


def _prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of the one source that was given. Raises CliError, BadParameter."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("name the text or a file, not both", param_hint="--file")
    if prompt is not None and prompt != "-":
        return prompt
    if file is not None and str(file) != "-":
        return _decoded(read_file(file, MAX_PROMPT_BYTES + 1))
    if prompt is None and file is None and sys.stdin.isatty():
        raise typer.BadParameter("there is no text to continue: add it as an argument, or with --file")
    return _decoded(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1))


def _decoded(raw: bytes) -> str:
    if len(raw) > MAX_PROMPT_BYTES:
        raise CliError(
            "PROMPT_TOO_LONG",
            f"the text has more than {MAX_PROMPT_BYTES // 1024**2} MiB",
            next_step="shorten it",
            exit_code=ExitCode.USAGE,
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as exc:
        raise CliError(
            "NOT_TEXT", "the text is not UTF-8", next_step="convert it", exit_code=ExitCode.USAGE
        ) from exc
    if not text:
        raise CliError("NO_PROMPT", "the text is empty", next_step="add some text", exit_code=ExitCode.USAGE)
    return text
