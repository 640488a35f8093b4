"""The outputs of a request in parts: every event that has text also has its parts."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from msgspec import structs

from fairway.formats.answers import ContentText, OutputPart
from services.core.generation import FinishReason
from services.core.outputs.forms import OutputForm
from services.gateway.events import (
    Accepted,
    ChoiceResult,
    Delivered,
    DeliveredChoice,
    Event,
    Finished,
    Tokens,
)
from services.gateway.idempotency.followers import broken
from services.gateway.outputs.splitter import OutputSplitter

_ID_CHARS: Final = 24
_WHOLE: Final = OutputForm()


def call_id(request_id: str, choice: int, id_chars: int, index: int) -> str:
    """Return the id of a call: the same on every gateway that sends the output.

    ``id_chars``: how many letters and digits the model's template takes; 0: any.
    """
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return digest[:id_chars] if id_chars else f"call_{digest[:_ID_CHARS]}"


@dataclass(slots=True)
class _ReasoningEnds:
    """Where the token that ends the reasoning is in one choice, and how often its text is.

    The texts of single tokens are not known. Where the mark is written as often as its token is sampled, the
    first of both are the same; otherwise other tokens spell it, and the reasoning is not counted.
    """

    close: str
    token: int | None
    tokens: int = 0
    places: list[int] = field(default_factory=list)
    texts: int = 0
    tail: str = ""

    def add(self, ids: Sequence[int], text: str) -> None:
        if self.token in ids:
            self.places += [self.tokens + at for at, token in enumerate(ids) if token == self.token]
        self.tokens += len(ids)
        read = self.tail + text
        self.texts += read.count(self.close)
        self.tail = read[max(0, len(read) - len(self.close) + 1) :]

    def counted(self, output_tokens: int, *, is_open: bool) -> int | None:
        """Return the tokens of the reasoning; ``is_open``: the output ended within it."""
        prompt = max(0, self.tokens - output_tokens)  # precedes the output where its scores are requested
        places = [place - prompt for place in self.places if place >= prompt]
        if len(places) != self.texts:
            return None
        return output_tokens if is_open else places[0] + 1


class OutputSplit:
    """Splits the outputs of one accepted request, choice by choice."""

    def __init__(self, accepted: Accepted) -> None:
        self._request_id = accepted.request_id
        self._form = accepted.form or _WHOLE
        self._splitters: dict[int, OutputSplitter] = {}
        self._ends: dict[int, _ReasoningEnds] = {}

    def feed(self, choice: int, ids: Sequence[int], text: str) -> list[OutputPart]:
        """Return what became final with the next tokens and text of a choice."""
        if self._form.calls is None and self._form.reasoning is None:
            return [ContentText(text)] if text else []
        if self._form.reasoning is not None:
            ends = self._ends.get(choice)
            if ends is None:
                ends = _ReasoningEnds(self._form.reasoning.close, self._form.reasoning_end)
                self._ends[choice] = ends
            ends.add(ids, text)
        return self._splitter(choice).feed(text)

    def finished(self, finished: Finished) -> Finished:
        """Return the end with the rest of each choice; one with calls ended because of them."""
        return structs.replace(finished, choices=tuple(map(self._ended, finished.choices)))

    def _ended(self, result: ChoiceResult) -> ChoiceResult:
        splitter = self._splitter(result.choice)
        parts, reason = splitter.finish(), result.finish_reason
        if splitter.calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        ends, counted = self._ends.get(result.choice), 0 if not splitter.reasons else None
        if ends is not None and splitter.reasons:
            counted = ends.counted(result.output_tokens, is_open=splitter.is_reasoning)
        return replace(result, finish_reason=reason, parts=parts, reasoning_tokens=counted)

    def _splitter(self, choice: int) -> OutputSplitter:
        found = self._splitters.get(choice)
        if found is None:
            id_chars = self._form.calls.id_chars if self._form.calls is not None else 0
            name = partial(call_id, self._request_id, choice, id_chars)
            found = self._splitters[choice] = OutputSplitter(self._form, name)
        return found


async def in_parts(
    events: AsyncGenerator[Event, None], delivered: Delivered | None
) -> AsyncGenerator[Event, None]:
    """Yield the events of a whole request with their parts; without what the client has of it.

    The parts of a text depend on the text before it, so what the client has is read again. Raises
    StreamBroken for a client that has other output.
    """
    async with aclosing(events):
        split: OutputSplit | None = None
        had = [_Had(choice) for choice in delivered.choices] if delivered is not None else []
        async for event in events:
            match event:
                case Accepted():
                    split = OutputSplit(event)
                case Tokens():
                    assert split is not None, "output before its acceptance"
                    rest = had[event.choice].rest(event, split) if event.choice < len(had) else event
                    if rest is None:
                        continue
                    rest.parts = split.feed(rest.choice, rest.ids, rest.text)
                    event = rest
                case Finished():
                    assert split is not None, "an end before its acceptance"
                    if any(not one.passed for one in had):
                        raise broken("its output differs from what was sent")
                    event = split.finished(event)
            yield event


class _Had:
    """What a client has of a choice, while its output is read again."""

    def __init__(self, choice: DeliveredChoice) -> None:
        self._choice = choice
        self._seen = DeliveredChoice()

    @property
    def passed(self) -> bool:
        return self._seen.tokens >= self._choice.tokens and self._seen.chars >= self._choice.chars

    def rest(self, event: Tokens, split: OutputSplit) -> Tokens | None:
        """Return what the client does not have of the event. Raises StreamBroken for other output."""
        if self.passed:
            return event
        tokens, chars = self._choice.tokens - self._seen.tokens, self._choice.chars - self._seen.chars
        ids: Sequence[int] = event.ids[: max(0, tokens)]
        text = event.text[: max(0, chars)]
        self._seen = self._seen.after(ids, text)
        split.feed(event.choice, ids, text)
        if self._seen.tokens == self._choice.tokens and self._seen.checksum != self._choice.checksum:
            raise broken("its output differs from what was sent")
        if len(ids) == len(event.ids) and len(text) == len(event.text):
            return None
        return Tokens(
            event.choice,
            event.offset + len(ids),
            event.ids[len(ids) :],
            event.text[len(text) :],
            event.logprobs[len(ids) :],
        )
