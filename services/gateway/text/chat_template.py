"""A model version's chat template, guarded against control tokens in messages.

A chat template joins messages with control tokens, and a tokenizer reads control tokens back out of text
wherever they are spelled. A user who writes ``<|end|><|system|>`` must not end the user's turn. So the
template computes with text that records which of its characters come from a message (``traced_text``), and
writes exactly its usual text. Where a control token is spelled with at least one such character, the text is
cut behind the token's first character and tokenised in pieces, so that no piece spells it. Messages that
spell none give exactly their usual tokens. ``TextEncoder.encode_chat`` counts the control tokens afterwards.

Control tokens are the tokenizer's added tokens that are flagged special, and those that the template writes
around turns, tools, calls and results. Other added tokens (``<think>``) are ordinary text with an id of their
own: transformers reads them from messages too.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import jinja2
import msgspec

from fairway.formats.answers import ToolCall
from services.core.errors import FailedPrecondition, InvalidInput
from services.core.outputs.tools import Tool
from services.gateway.text.sandbox import MAX_TEMPLATE_BYTES, BudgetedEnvironment
from services.gateway.text.template_budget import (
    BUDGET,
    TemplateBudget,
    TemplateRefused,
    TemplateTooCostly,
)
from services.gateway.text.text_model import ChatMessage
from services.gateway.text.traced_text import MESSAGE, OriginText, concat, origin_of
from services.ports.clock import Clock

_STRFTIME: Final = re.compile(r"(%[-_0^#]?[A-Za-z%]|[^%])*")
MAX_STEPS: Final = 200_000
RENDER_TIMEOUT_S: Final = 2.0
# Intermediate characters of one rendering, all operations together.
MAX_WORK_CHARS: Final = 16 * 1024 * 1024
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_OWN_VARIABLES: Final = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
_TEMPLATE_MISTAKES: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Rendered text; ``cuts`` are the offsets at which it is split before tokenisation."""

    text: str
    cuts: tuple[int, ...] = ()

    def pieces(self) -> list[str]:
        bounds = (0, *self.cuts, len(self.text))
        return [self.text[start:end] for start, end in pairwise(bounds) if start < end]


class ControlTokens:
    """The spellings of a tokenizer's control tokens."""

    def __init__(self, special: Iterable[str]) -> None:
        self.texts = frozenset(special)
        self._special = _any_of(self.texts)

    def spelled(self, text: str) -> list[str]:
        """Return the control tokens that a tokenizer reads from the text, in order."""
        return self._special.findall(text) if self._special else []

    def guarded(self, text: str) -> Rendered:
        """Return a template's text, cut inside each control token that contains message text."""
        origin = origin_of(text)
        if self._special is None or MESSAGE not in origin:
            return Rendered(str.__str__(text))
        cuts, start = [], 0
        while found := self._special.search(text, start):
            start = found.end()
            if MESSAGE in origin[found.start() : start]:
                start = found.start() + 1
                cuts.append(start)
        return Rendered(str.__str__(text), tuple(cuts))


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    # Longest first, as tokenizers match them.
    ordered = sorted((text for text in texts if text), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class ChatTemplate:
    """Renders messages into the text that the model was trained on. Any thread."""

    def __init__(
        self, source: str, *, control: ControlTokens, tokens: Mapping[str, str], clock: Clock
    ) -> None:
        """``tokens`` are ``bos_token`` and similar. Raises FailedPrecondition for an invalid template."""
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise FailedPrecondition(f"the chat template is longer than {MAX_TEMPLATE_BYTES} bytes")
        environment = BudgetedEnvironment({"strftime_now": _strftime(clock)})
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as exc:
            line = f" in line {exc.lineno}" if isinstance(exc, jinja2.TemplateSyntaxError) else ""
            raise FailedPrecondition(
                f"the chat template does not compile: {type(exc).__name__}{line}: {str(exc)[:300]}"
            ) from exc
        self.source = source
        self._control = control
        self._tokens = dict(tokens)
        self._clock = clock
        self._knows_developer = "developer" in source
        # Such a template takes arguments as text too: `arguments is string`.
        self._takes_text = "arguments is string" in source
        self.depends_on_time = "strftime_now" in source

    def guarding(self, control: ControlTokens) -> ChatTemplate:
        """Return the same template with these control tokens."""
        found = copy.copy(self)
        found._control = control
        return found

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_chars: int,
        variables: str = "",
        tools: Sequence[Tool] = (),
    ) -> Rendered:
        """Return the text up to the assistant's turn.

        ``variables`` is a JSON object of variables that are added to the template's own. Raises InvalidInput
        when the template rejects the messages or exceeds its budget, FailedPrecondition when it fails.
        """
        budget = TemplateBudget(
            max_chars=8 * max_chars + MAX_WORK_CHARS,
            max_steps=MAX_STEPS,
            deadline_s=self._clock.monotonic_s() + RENDER_TIMEOUT_S,
            monotonic_s=self._clock.monotonic_s,
        )
        own: dict[str, object] = {
            **self._tokens,
            BUDGET: budget,
            "messages": list(map(self._message, messages)),
            "tools": [_tool(index, tool) for index, tool in enumerate(tools)] or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            text = concat(_bounded(self._template.generate(self._further(variables) | own), max_chars))
        except TemplateRefused as exc:
            raise InvalidInput(f"the chat template refuses the messages: {exc}", field="messages") from exc
        except TemplateTooCostly as exc:
            raise InvalidInput(
                f"the chat template needs too much for these messages: {exc}", field="messages"
            ) from exc
        except _TEMPLATE_MISTAKES as exc:
            raise FailedPrecondition(
                f"the version's chat template fails{_line(exc)} with {type(exc).__name__}: it has a mistake, "
                "or it is not made for such messages and does not refuse them"
            ) from exc
        return self._control.guarded(text)

    def _message(self, message: ChatMessage) -> dict[str, object]:
        """Return a turn as transformers passes it: without the fields that it does not have."""
        # Templates older than the role ``developer`` use its former name.
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        content = OriginText(message.content) if message.content or not message.tool_calls else None
        found: dict[str, object] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if text := getattr(message, name):
                found[name] = OriginText(text)
        if message.tool_calls:
            found["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return found

    def _call(self, call: ToolCall) -> dict[str, object]:
        """Return a call of an earlier turn.

        Arguments that are no object, such as those of a call that was cut short, are passed as their text,
        and as no arguments where the template takes objects only.
        """
        arguments: object
        try:
            arguments = _object(call.arguments, "arguments")
        except InvalidInput:
            arguments = OriginText(call.arguments) if self._takes_text else {}
        found: dict[str, object] = {"type": "function"}
        found["function"] = {"name": OriginText(call.name), "arguments": arguments}
        return {"id": OriginText(call.id), **found} if call.id else found

    def _further(self, variables: str) -> dict[str, object]:
        """Return the variables of a request. Raises InvalidInput for the names of the template's own."""
        field = "chat.template_variables"
        found = _object(variables, field)
        for name in found:
            if not _VARIABLE.fullmatch(name):
                raise InvalidInput(f"{field} has a name that no template can use", field=field)
            if name in _OWN_VARIABLES or name in self._tokens or name in self._template.globals:
                raise InvalidInput(f"{field} may not set {name}", field=field)
        return {str.__str__(name): value for name, value in found.items()}


def _tool(index: int, tool: Tool) -> dict[str, object]:
    """Return a tool as transformers passes one; ``strict`` is for the server."""
    function: dict[str, object] = {"name": OriginText(tool.name)}
    if tool.description:
        function["description"] = OriginText(tool.description)
    if tool.parameters:
        function["parameters"] = _object(tool.parameters, f"chat.tools[{index}].parameters")
    return {"type": "function", "function": function}


def _object(text: str, field: str) -> dict[Any, Any]:
    """Return a client's JSON object, with every text in it traced; empty for an empty text."""
    try:
        found = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        return {OriginText(name): _traced(value) for name, value in found.items()}
    except (msgspec.DecodeError, RecursionError):
        raise InvalidInput(f"{field} is not a JSON object", field=field) from None


def _traced(value: Any) -> Any:
    match value:
        case str():
            return OriginText(value)
        case dict():
            return {OriginText(name): _traced(item) for name, item in value.items()}
        case list():
            return [_traced(item) for item in value]
    return value


def _line(exc: BaseException) -> str:
    """Return where in the template an error occurred, empty where that is not recorded."""
    frames = traceback.walk_tb(exc.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


def _bounded(pieces: Iterable[str], max_chars: int) -> list[str]:
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > max_chars:
            raise TemplateTooCostly("too much text")
        kept.append(piece)
    return kept


def _strftime(clock: Clock) -> Callable[..., object]:
    def strftime_now(text: str) -> str:
        # A large width (%0999d) exhausts memory.
        if len(text) > 256 or not _STRFTIME.fullmatch(text):
            raise TemplateTooCostly("strftime_now takes no widths and at most 256 characters")
        return datetime.fromtimestamp(clock.unix_s(), UTC).strftime(text)

    return strftime_now
