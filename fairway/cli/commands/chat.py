"""`fairway chat`: a conversation, on a terminal or through pipes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import typer

from fairway.cli import targets
from fairway.cli.calls import client_error
from fairway.cli.commands.complete import (
    ANSWER_S,
    Answer,
    ModelOption,
    PriorityOption,
    SchemaOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TimeoutOption,
    ToolChoiceOption,
    ToolsOption,
    TopKOption,
    TopPOption,
    answer_with_tools,
    open_client,
    options_of,
    show_end,
    show_text,
    stream,
)
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.targets import DEFAULT_STATE_DIR, ApiKeyOption, GrpcOption, StateDirOption
from fairway.cli.terminal.output import err, out, plain, show_error
from fairway.client import Client, FairwayError, Message, Options, ToolCall


@dataclass(slots=True)
class Conversation:
    """``turns`` alternate between the user and the model; the system message precedes them.

    Results of tools follow the answer that called them; ``unanswered`` are the calls without one.
    """

    model: str
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    unanswered: list[ToolCall] = field(default_factory=list)

    def messages(self) -> list[Message]:
        return [*([Message("system", self.system)] if self.system else []), *self.turns]

    def add_input(self, text: str) -> bool:
        """Append a question, or the result of the first open call. Return whether the model is to answer."""
        if not self.unanswered:
            self.turns.append(Message("user", text))
            return True
        self.turns.append(Message("tool", text, tool_call_id=self.unanswered.pop(0).id))
        return not self.unanswered

    def add_answer(self, text: str, calls: Sequence[ToolCall] = ()) -> None:
        """Append the model's answer, complete or not; without an answer remove the question."""
        if text or calls:
            self.turns.append(Message("assistant", text, tool_calls=tuple(calls)))
            self.unanswered = list(calls)
        else:
            self.remove_question()

    def clear(self) -> None:
        self.turns.clear()
        self.unanswered.clear()

    def remove_question(self) -> None:
        """Remove the last question."""
        if self.turns and self.turns[-1].role == "user":
            self.turns.pop()

    def drop_oldest(self) -> int:
        """Remove the first question and what follows from it. Return how many messages; the last stays."""
        questions = [number for number, turn in enumerate(self.turns) if turn.role == "user"]
        if len(questions) < 2:
            return 0
        del self.turns[: questions[1]]
        return questions[1]


async def context_size(client: Client, model: str) -> int:
    """Return the size of the model's context in tokens, 0 if the gateway omits it. Raises CliError."""
    try:
        models = await client.list_models()
    except FairwayError as exc:
        raise client_error(exc, what="cannot list the models") from exc
    return next((found.max_context_tokens for found in models if found.name == model), 0)


async def trim_to_context(
    client: Client, conversation: Conversation, *, context: int, room_tokens: int
) -> int:
    """Remove the oldest turns until ``room_tokens`` are left for an answer; return how many were removed.

    The last question always stays: the server rejects it if it alone is too long. Raises CliError.
    """
    dropped = 0
    try:
        while context:
            count = await client.count_tokens(conversation.model, conversation.messages())
            if count.prompt_tokens + room_tokens <= context or not (number := conversation.drop_oldest()):
                break
            dropped += number
    except FairwayError as exc:
        raise client_error(exc, what="cannot count the tokens of the chat") from exc
    return dropped


HELP: Final = """\
/help          this list
/reset         delete the conversation; the system message stays
/model [NAME]  use another model; without a name: list the models
/system [TEXT] set the system message; without a text: none
/quit          end, as Ctrl-D does
//TEXT         send a text that begins with a slash
Ctrl-C stops an answer."""


def chat(
    model: ModelOption = "",
    system: Annotated[str, typer.Option("--system", help="A system message.")] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=1048576, help="Maximum of one answer.")
    ] = 256,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    schema: SchemaOption = None,
    tools: ToolsOption = None,
    tool_choice: ToolChoiceOption = "auto",
    priority: PriorityOption = None,
    timeout: TimeoutOption = ANSWER_S,
    grpc_address: GrpcOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Chat with a model. The oldest messages are left out when the context is full.

    /help lists the commands. Without a terminal each line of the standard input is a question, and the first
    error ends the chat. With --tools an answer comes whole, with a line for each call; the next lines are
    what the tools return, and --tool-choice does not apply to the answer after them.

    \b
    Examples:
      fairway chat
      fairway chat --tools tools.json
      fairway chat --model my-model --system "Answer in one sentence."
      printf 'Write a loop.\\nNow in reverse.\\n' | fairway chat --seed 7
    """
    client = open_client(grpc_address, api_key, state_dir, answer_s=timeout)
    options = options_of(
        max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        priority=priority,
        schema=schema,
        tools=tools,
        tool_choice=tool_choice,
    )
    conversation = Conversation(targets.default_model(model, state_dir), system)
    # One event loop for all answers, and none while a line is read, so that Ctrl-C ends the reading at once.
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())
        try:
            _Chat(client, options, conversation, runner).run()
        finally:
            runner.run(client.aclose())


@dataclass(slots=True)
class _Chat:
    client: Client
    options: Options
    conversation: Conversation
    runner: asyncio.Runner
    context: int | None = None

    def run(self) -> None:
        """Return when the user ends it. Without a terminal the first CliError ends it."""
        interactive = sys.stdin.isatty()
        if interactive:
            _enable_editing()
            plain(err(), f"{self.conversation.model}. /help lists commands, Ctrl-D ends.")
        interrupted = False
        while True:
            try:
                line = _read_line()
            except KeyboardInterrupt:
                if not interactive or interrupted:
                    raise
                plain(err(), "\nCtrl-D or /quit ends the chat; so does a second Ctrl-C.")
                interrupted = True
                continue
            interrupted = False
            if line is None:
                return
            try:
                if not self._handle(line):
                    return
            except CliError as error:
                if not interactive or error.exit_code is ExitCode.UNAUTHENTICATED:
                    raise
                show_error(error)

    def _handle(self, line: str) -> bool:
        """Execute a line. Return False when it ends the chat."""
        text = line.strip()
        if not text:
            return True
        if text.startswith("/") and not text.startswith("//"):
            return self._command(*_split(text))
        self._send(text.removeprefix("/") if text.startswith("//") else text)
        return True

    def _command(self, name: str, value: str) -> bool:
        match name:
            case "/quit" | "/exit" | "/bye":
                return False
            case "/help" | "/?":
                plain(err(), HELP)
            case "/reset":
                self.conversation.clear()
                plain(err(), "The conversation is empty.")
            case "/model":
                self._select_model(value)
            case "/system":
                self.conversation.system = value
                plain(err(), "The system message is set." if value else "There is no system message.")
            case _:
                plain(
                    err(),
                    f"There is no command {name}. /help lists the commands; //TEXT sends text with a slash.",
                )
        return True

    def _select_model(self, name: str) -> None:
        names = self.runner.run(_served(self.client))
        if name and name in names:
            self.conversation.model, self.context = name, None
            plain(err(), f"The model is now {name}. The conversation continues.")
            return
        if name:
            plain(err(), f"There is no model {name} for this key.")
        for each in names:
            plain(err(), f"{'*' if each == self.conversation.model else ' '} {each}")

    def _send(self, text: str) -> None:
        """Send a message and print the answer. Ctrl-C stops it; the received part is retained."""
        answer = Answer()
        if not self.conversation.add_input(text):
            self._ask_for_result()
            return
        try:
            self.runner.run(self._answer(answer))
            plain(out())
            show_end(answer)
        except KeyboardInterrupt:
            plain(out())
            plain(err(), "(stopped)")
        except CliError:
            if answer.pieces:
                plain(out())
            raise
        finally:
            self.conversation.add_answer(answer.text, answer.calls)
        self._ask_for_result()

    def _ask_for_result(self) -> None:
        if self.conversation.unanswered:
            plain(err(), f"Enter what {self.conversation.unanswered[0].name} returns.")

    async def _answer(self, answer: Answer) -> None:
        if self.context is None:
            self.context = await context_size(self.client, self.conversation.model)
        room = self.options.max_output_tokens or 0
        dropped = await trim_to_context(
            self.client, self.conversation, context=self.context, room_tokens=room
        )
        if dropped:
            plain(err(), f"(the context is full: the oldest {dropped} messages are left out)")
        answer.began_s = time.monotonic()
        messages = self.conversation.messages()
        if self.options.tools:
            # A call that is required would be required again after its result, for ever.
            choice = "auto" if messages[-1].role == "tool" else self.options.tool_choice
            options = replace(self.options, tool_choice=choice)
            await answer_with_tools(self.client, self.conversation.model, messages, options, answer)
        else:
            await stream(self.client, self.conversation.model, messages, self.options, answer, show_text)


async def _served(client: Client) -> list[str]:
    try:
        return sorted(model.name for model in await client.list_models())
    except FairwayError as exc:
        raise client_error(exc, what="cannot list the models") from exc


def _split(text: str) -> tuple[str, str]:
    name, _, value = text.partition(" ")
    return name, value.strip()


def _read_line() -> str | None:
    """Return the next line, None at the end. The prompt goes to stderr unless all is a terminal."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input("> ")  # readline redraws the prompt while a line is edited
        plain(err(), "> ", end="")
        return input()
    except EOFError:
        plain(err())
        return None


def _enable_editing() -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # the import enables editing and history in input()
