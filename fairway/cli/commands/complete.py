"""`fairway complete`: continue one text."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fairway.cli import completion, targets
from fairway.cli.calls import client_error, credentials_of
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import PriorityName, timeout_s
from fairway.cli.targets import DEFAULT_STATE_DIR, ApiKeyOption, GrpcOption, StateDirOption
from fairway.cli.terminal.output import err, out, plain
from fairway.client import (
    Accepted,
    Client,
    ClientOptions,
    FairwayError,
    Finished,
    Message,
    Options,
    Priority,
    Tokens,
    Tool,
    ToolCall,
)
from fairway.client.values import Input, JsonSchema

ANSWER_S: Final = 300.0

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Deployment to use; default: the installation's model.",
        autocompletion=completion.deployments,
    ),
]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", min=0, max=2, help="0: greedy.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", min=0, max=1)]
TopKOption = Annotated[int | None, typer.Option("--top-k", min=0, help="0: off.")]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="The same seed gives the same tokens.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer; it is not printed. Repeatable.")
]
SchemaOption = Annotated[
    Path | None,
    typer.Option("--schema", help="Answer with JSON by the JSON schema in this file; -: any object."),
]
ToolsOption = Annotated[
    Path | None,
    typer.Option("--tools", help="Offer the functions in this file: a JSON list, as OpenAI's `tools`."),
]
ToolChoiceOption = Annotated[
    str,
    typer.Option("--tool-choice", metavar="CHOICE", help="auto, required, or the name of a tool to call."),
]
PriorityOption = Annotated[PriorityName | None, typer.Option("--priority", help="Scheduling class.")]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        parser=timeout_s,
        metavar="SPAN",
        help="Time limit of one answer, such as 2m.",
        show_default="5m",
    ),
]


def open_client(address: str, api_key: str, state_dir: Path, *, answer_s: float) -> Client:
    """Return a client of the gateways in the options, not entered yet. Raises CliError."""
    target = targets.gateway(address, api_key, state_dir)
    options = ClientOptions(generation_timeout_s=answer_s)
    credentials_of(target.tls_dir)  # The client would raise OSError, without a next step.
    return Client(target.address.split(","), api_key=target.key, options=options, credentials=target.tls_dir)


def options_of(
    max_tokens: int,
    *,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
    priority: PriorityName | None,
    schema: Path | None = None,
    tools: Path | None = None,
    tool_choice: str = "auto",
) -> Options:
    """Raises CliError for a file that is no JSON schema, or no list of tools."""
    return Options(
        max_output_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        priority=Priority(priority.value) if priority else None,
        constraint=None if schema is None else _schema(schema),
        tools=() if tools is None else tools_of(tools),
        tool_choice=tool_choice,
    )


def read_file(path: Path, most: int = -1) -> bytes:
    """Return the file's first ``most`` bytes, all for -1. Raises CliError."""
    try:
        with path.open("rb") as source:
            return source.read(most)
    except OSError as exc:
        raise CliError(
            "FILE_UNREADABLE",
            f"cannot read {path}: {exc.strerror}",
            exit_code=ExitCode.USAGE,
            next_step="name a file that you may read",
        ) from exc


def _schema(path: Path) -> JsonSchema:
    if str(path) == "-":
        return JsonSchema({"type": "object"})
    try:
        found = json.loads(read_file(path))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict | bool):
        raise CliError(
            "NOT_A_SCHEMA",
            f"{path} has no JSON schema",
            exit_code=ExitCode.USAGE,
            next_step="write a JSON object into it",
        )
    return JsonSchema(found)


def tools_of(path: Path) -> tuple[Tool, ...]:
    """Return the tools in a file. Raises CliError."""
    try:
        found = json.loads(read_file(path))
        if not isinstance(found, list) or not found:
            raise TypeError("no list")
        return tuple(_tool(entry) for entry in found)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise CliError(
            "NOT_TOOLS",
            f"{path} has no list of tools",
            exit_code=ExitCode.USAGE,
            next_step='write [{"type": "function", "function": {"name": ..., "parameters": {...}}}] into it',
        ) from None


def _tool(entry: dict[str, Any]) -> Tool:
    found = entry["function"]
    parameters = found.get("parameters")
    if not isinstance(found["name"], str) or not isinstance(parameters, dict | None):
        raise TypeError("the name is a text, the parameters are an object")
    description, strict = str(found.get("description") or ""), bool(found.get("strict"))
    return Tool(found["name"], description, parameters, strict)


@dataclass(slots=True)
class Answer:
    """The received part of an answer. ``pieces`` is complete once ``finished`` is set."""

    began_s: float = field(default_factory=time.monotonic)
    pieces: list[str] = field(default_factory=list)
    accepted: Accepted | None = None
    finished: Finished | None = None
    first_token_s: float | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def end_line(self) -> str:
        """Return in words how it ended, what it used and how fast it was."""
        assert self.finished is not None
        usage = self.finished.usage
        reasons = ", ".join(sorted({choice.finish_reason.value for choice in self.finished.choices}))
        parts = [reasons, f"{usage.prompt_tokens} prompt and {usage.output_tokens} output tokens"]
        decode_s = self.finished.clock.decode_s
        if self.first_token_s is not None:
            parts.append(f"first after {self.first_token_s:.2f} s")
        if usage.output_tokens > 1 and decode_s > 0:
            parts.append(f"{(usage.output_tokens - 1) / decode_s:.0f} tokens/s")
        if self.finished.resumes:
            parts.append(f"moved {self.finished.resumes} times")
        return f"({'; '.join(parts)})"


async def stream(
    client: Client, model: str, source: Input, options: Options, answer: Answer, show: Callable[[str], None]
) -> None:
    """Fill ``answer`` as its parts arrive, and ``show`` each text. Raises CliError."""
    try:
        async for event in _events(client, model, source, options):
            if isinstance(event, Accepted):
                answer.accepted = event
            elif isinstance(event, Tokens):
                if answer.first_token_s is None:
                    answer.first_token_s = time.monotonic() - answer.began_s
                answer.pieces.append(event.text)
                show(event.text)
            else:
                answer.finished = event
    except FairwayError as exc:
        raise client_error(exc, what="the generation failed") from exc


async def answer_with_tools(
    client: Client, model: str, messages: list[Message], options: Options, answer: Answer
) -> None:
    """Fill ``answer`` and print its text and its calls, each as a line. Raises CliError."""
    try:
        found = await client.chat(model, messages, options)
    except FairwayError as exc:
        raise client_error(exc, what="the generation failed") from exc
    choice = found.choices[0]
    answer.accepted, answer.finished, answer.calls = found.accepted, found.finished, choice.calls
    if choice.content:
        answer.pieces.append(choice.content)
        show_text(choice.content + ("\n" if choice.calls else ""))
    show_text("\n".join(f"{call.name}({_one_line(call.arguments)})" for call in choice.calls))


def _one_line(arguments: str) -> str:
    """Return a JSON object without line breaks, and an incomplete one as it is."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


async def _events(
    client: Client, model: str, source: Input, options: Options
) -> AsyncIterator[Accepted | Tokens | Finished]:
    async with client.generate(model, source, options) as events:
        async for event in events:
            yield event


def show_text(text: str) -> None:
    """Print a piece of an answer to stdout unchanged."""
    plain(out(), text, end="")


def show_end(answer: Answer) -> None:
    """Print how an answer ended to stderr, dimmed on a terminal."""
    console = err()
    if console.is_terminal:
        console.print(f"[dim]{answer.end_line()}[/]", highlight=False)
    else:
        plain(console, answer.end_line())


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
