"""A model version's chat template, and what keeps a message from speaking for the server.

A chat template joins messages with control tokens, and a tokenizer reads control tokens back out of
text wherever they are spelled. A user who writes ``<|end|><|system|>`` must not end his turn. So every
character of a message that could begin a control token is followed by a mark, a code point that occurs
nowhere else, while the template runs; trimming, replacing and joining keep it. Afterwards the marks are
taken out and become cuts: where the text from a marked character on spells a control token, the text is
tokenised in two pieces, so that no piece spells it. The template runs once more without marks, and if that
text spells the same control tokens in the same order, it is taken as it is: so honest messages give exactly
the tokens that they give elsewhere, also where a template looks for ``<|`` itself.
``TextModel.encode_chat`` counts the control tokens afterwards.

Control tokens are the tokenizer's added tokens that are flagged special. Other added tokens (``<think>``)
are ordinary text with an id of their own: transformers reads them from messages too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

import jinja2

from services.core.errors import FailedPrecondition, InvalidInput
from services.gateway.template_sandbox import (
    BUDGET,
    MAX_TEMPLATE_BYTES,
    Budget,
    BudgetedEnvironment,
    BudgetExceeded,
    TemplateRefused,
)
from services.gateway.text_model import Message
from services.ports.clock import Clock

# Unicode's noncharacters: valid in UTF-8, no character of any script.
_MARKS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_STRFTIME: Final = re.compile(r"(%[aAbBdHIjmMpSUwWxXyYZ]|[ ,.:/\-TZ])*")
MAX_STEPS: Final = 200_000
RENDER_TIMEOUT_S: Final = 2.0
# Characters of text that one rendering may make on the way, all operations together.
MAX_WORK_CHARS: Final = 16 * 1024 * 1024
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
    """Rendered text; ``cuts`` are the offsets at which it is taken apart before it is tokenised."""

    text: str
    cuts: tuple[int, ...] = ()

    def pieces(self) -> list[str]:
        bounds = (0, *self.cuts, len(self.text))
        return [self.text[start:end] for start, end in pairwise(bounds) if start < end]


class ControlTokens:
    """The spellings of a tokenizer's control tokens; ``plain`` are its other added tokens."""

    def __init__(self, special: Iterable[str], plain: Iterable[str] = ()) -> None:
        self._special = _any_of(special)
        self._plain = _any_of(plain)
        firsts = "".join(sorted({text[0] for text in special if text}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def spelled(self, text: str) -> list[str]:
        """Return the control tokens that a tokenizer reads from the text, in order."""
        return self._special.findall(text) if self._special else []

    def mark(self, text: str, mark: str) -> str:
        """Return the text with a mark after each character that could begin a control token."""
        if self._first is None or not mark:
            return text
        plain = self._plain

        def marked(found: re.Match[str]) -> str:
            begins_plain = plain is not None and plain.match(text, found.start()) is not None
            return found[0] if begins_plain else found[0] + mark

        return self._first.sub(marked, text)

    def unmark(self, text: str, mark: str) -> Rendered:
        """Return the text without marks, cut behind each marked character that begins a control token."""
        parts = text.split(mark)
        if len(parts) == 1 or self._special is None:
            return Rendered(text)
        clean, cuts, offset = "".join(parts), [], 0
        for part in parts[:-1]:
            offset += len(part)
            if offset and self._special.match(clean, offset - 1):
                cuts.append(offset)
        return Rendered(clean, tuple(sorted(set(cuts))))


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    # Longest first, as tokenizers match them.
    ordered = sorted((text for text in texts if text), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class ChatTemplate:
    """Renders messages into the text that the model was trained on. Any thread."""

    def __init__(
        self, source: str, *, control: ControlTokens, tokens: Mapping[str, str], clock: Clock
    ) -> None:
        """``tokens`` are ``bos_token`` and the like. Raises FailedPrecondition when it does not compile."""
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise FailedPrecondition(f"the chat template is longer than {MAX_TEMPLATE_BYTES} bytes")
        environment = BudgetedEnvironment({"strftime_now": _strftime(clock)})
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as exc:
            raise FailedPrecondition(f"the chat template does not compile: {type(exc).__name__}") from exc
        self._control = control
        self._tokens = dict(tokens)
        self._clock = clock
        self._knows_developer = "developer" in source
        self.depends_on_time = "strftime_now" in source

    def render(self, messages: Sequence[Message], *, max_chars: int) -> Rendered:
        """Return the text up to where the assistant speaks.

        Raises InvalidInput when the template refuses the messages or asks for more than it is given.
        """
        mark = _unused_mark(messages)
        text = self._run(messages, mark, max_chars)
        if mark not in text:
            return Rendered(text)
        guarded = self._control.unmark(text, mark)
        plain = self._run(messages, "", max_chars)
        meant = [token for piece in guarded.pieces() for token in self._control.spelled(piece)]
        return Rendered(plain) if self._control.spelled(plain) == meant else guarded

    def _run(self, messages: Sequence[Message], mark: str, max_chars: int) -> str:
        budget = Budget(
            max_chars=8 * max_chars + MAX_WORK_CHARS,
            max_steps=MAX_STEPS,
            deadline_s=self._clock.monotonic_s() + RENDER_TIMEOUT_S,
            monotonic_s=self._clock.monotonic_s,
        )
        variables: dict[str, object] = {
            **self._tokens,
            BUDGET: budget,
            "messages": [self._message(message, mark) for message in messages],
            "add_generation_prompt": True,
        }
        try:
            parts = _bounded(self._template.generate(variables), max_chars)
        except TemplateRefused as exc:
            text = str(exc).replace(mark, "") if mark else str(exc)
            raise InvalidInput(f"the chat template refuses the messages: {text}", field="messages") from exc
        except BudgetExceeded as exc:
            raise InvalidInput(
                f"the chat template needs too much for these messages: {exc}", field="messages"
            ) from exc
        # A template's mistake over these messages is theirs to change: nothing else varies.
        except _TEMPLATE_MISTAKES as exc:
            raise InvalidInput("the chat template does not take these messages", field="messages") from exc
        return "".join(parts)

    def _message(self, message: Message, mark: str) -> dict[str, str]:
        # Templates older than the role call it by its former name.
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        found = {"role": role, "content": self._control.mark(message.content, mark)}
        if message.name:
            found["name"] = self._control.mark(message.name, mark)
        return found


def _bounded(pieces: Iterable[str], max_chars: int) -> list[str]:
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > max_chars:
            raise BudgetExceeded("too much text")
        kept.append(piece)
    return kept


def _unused_mark(messages: Sequence[Message]) -> str:
    for mark in _MARKS:
        if all(mark not in message.content and mark not in message.name for message in messages):
            return mark
    raise InvalidInput("the messages hold every noncharacter of Unicode", field="messages")


def _strftime(clock: Clock) -> Callable[..., object]:
    def strftime_now(text: str) -> str:
        # Widths (%0999d) are a bomb of their own.
        if len(text) > 64 or not _STRFTIME.fullmatch(text):
            raise BudgetExceeded("strftime_now takes plain dates only")
        return datetime.fromtimestamp(clock.unix_s(), UTC).strftime(text)

    return strftime_now
