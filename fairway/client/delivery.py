"""Delivery positions of a stream: a continued stream resumes after them, so each token is delivered once."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Final
from zlib import crc32

from fairway.client.errors import StreamDiverged
from fairway.client.values import Accepted, Finished, Tokens
from fairway.formats.answers import CallDelta, OutputPart

_IDS: Final = "L" if array("I").itemsize < 4 else "I"


@dataclass(slots=True)
class _Choice:
    """Delivered tokens, characters, checksum of ids and size of parts; ``seen_``: the same for the current
    attempt."""

    tokens: int = 0
    chars: int = 0
    check: int = 0
    parts: int = 0
    seen_tokens: int = 0
    seen_chars: int = 0
    seen_check: int = 0
    seen_parts: int = 0


@dataclass(slots=True)
class DeliveryPositions:
    """Positions and a checksum per choice, but no tokens: its size does not grow with the output.

    Text is skipped by characters, not by chunks: a repeated text may be split differently. So are parts, of
    which the head of a call counts one more.
    """

    accepted: Accepted | None = None
    _choices: dict[int, _Choice] = field(default_factory=dict)

    @property
    def delivered_tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices.values())

    @property
    def has_output(self) -> bool:
        """Whether some output was delivered."""
        return any(choice.tokens or choice.chars for choice in self._choices.values())

    @property
    def max_delivered(self) -> int:
        """Delivered tokens of the choice with the most."""
        return max((choice.tokens for choice in self._choices.values()), default=0)

    def delivered(self, choice: int) -> int:
        found = self._choices.get(choice)
        return found.tokens if found else 0

    def attempt_began(self) -> None:
        for choice in self._choices.values():
            choice.seen_tokens = choice.seen_chars = choice.seen_check = choice.seen_parts = 0

    def accept(self, accepted: Accepted) -> bool:
        """Return whether to deliver it. Raises StreamDiverged when output of another run was delivered."""
        before = self.accepted
        if before is None:
            pass
        elif _run(before) == _run(accepted):
            accepted = replace(accepted, replayed=before.replayed)  # a replay to the same stream is not one
        elif self.has_output:
            raise _diverged("it was accepted with another version or seed", accepted.request_id)
        self.accepted = accepted
        return not self.has_output and before != accepted

    def undelivered(self, event: Tokens) -> Tokens | None:
        """Return the undelivered part of the event and count it as delivered; None: there is none.

        Raises StreamDiverged when tokens before it are missing, or when repeated tokens differ.
        """
        at = self._choices.setdefault(event.choice, _Choice())
        if event.offset != at.seen_tokens:
            raise _diverged(
                f"choice {event.choice} continues at token {event.offset} instead of {at.seen_tokens}",
                self._request_id,
            )
        old = min(max(0, at.tokens - at.seen_tokens), len(event.ids))
        at.seen_check = crc32(array(_IDS, event.ids[:old]), at.seen_check)
        if old and at.seen_tokens + old == at.tokens and at.seen_check != at.check:
            raise _diverged(f"choice {event.choice} was sent again with other tokens", self._request_id)
        at.seen_tokens += len(event.ids)
        at.seen_check = crc32(array(_IDS, event.ids[old:]), at.seen_check)
        old_chars = min(max(0, at.chars - at.seen_chars), len(event.text))
        at.seen_chars += len(event.text)
        return self._deliver(at, event, old, old_chars)

    def last(self, event: Finished) -> Finished:
        """Return the end without parts that were delivered."""
        choices = []
        for result in event.choices:
            at = self._choices.setdefault(result.choice, _Choice())
            choices.append(replace(result, parts=_new_parts(at, result.parts)))
        return replace(event, choices=tuple(choices))

    @property
    def _request_id(self) -> str:
        return self.accepted.request_id if self.accepted is not None else ""

    def _deliver(self, at: _Choice, event: Tokens, old: int, old_chars: int) -> Tokens | None:
        before = at.tokens
        if at.seen_tokens >= at.tokens:
            at.tokens, at.check = at.seen_tokens, at.seen_check
        at.chars = max(at.chars, at.seen_chars)
        parts = _new_parts(at, event.parts)
        if not old and not old_chars and parts is event.parts:
            return event
        ids, text = event.ids[old:], event.text[old_chars:]
        if not ids and not text and not parts:
            return None
        return Tokens(event.choice, before, ids, text, event.logprobs[old:], parts)


def _new_parts(at: _Choice, parts: tuple[OutputPart, ...]) -> tuple[OutputPart, ...]:
    """Return the undelivered ones, and count all of them as seen."""
    old = at.parts - at.seen_parts
    at.seen_parts += sum(map(_size, parts))
    at.parts = max(at.parts, at.seen_parts)
    if old <= 0:
        return parts
    found = []
    for part in parts:
        size = _size(part)
        if size > old:
            found.append(_rest(part, old))
        old = max(0, old - size)
    return tuple(found)


def _size(part: OutputPart) -> int:
    return bool(part.name) + len(part.arguments) if isinstance(part, CallDelta) else len(part.text)


def _rest(part: OutputPart, old: int) -> OutputPart:
    """Return a part without its first ``old``, less than its size."""
    if isinstance(part, CallDelta):
        return CallDelta(part.index, arguments=part.arguments[old - bool(part.name) :]) if old else part
    return replace(part, text=part.text[old:])


def _run(accepted: Accepted) -> tuple[str, int]:
    return accepted.version_digest, accepted.seed


def _diverged(what: str, request_id: str) -> StreamDiverged:
    return StreamDiverged(
        f"the stream cannot be continued: {what}; send the request again under a new key",
        reason="STREAM_DIVERGED",
        metadata={"request_id": request_id},
    )
