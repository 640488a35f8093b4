"""Log-probabilities in the dialect of completions, and those of a prompt as vLLM has them.

Output in which a prompt is scored begins with the prompt's tokens: ``PromptPart`` is what an answer shows of
these.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw, Struct, structs

from services.core.generation import TokenLogprobs

_LOWEST_LOGPROB: Final = -9999.0
# Alternatives included: a few milliseconds of the event loop.
SLICE_LOGPROBS: Final = 1024
Item = TypeVar("Item")
Result = TypeVar("Result")
# What makes a result in steps of a few milliseconds.
Steps = Generator[None, None, Result]
_encode: Final = msgspec.json.Encoder().encode


class CompletionLogprobs(Struct, frozen=True):
    """The first token of an echoed prompt has null, in both lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """A token at a place of a prompt."""

    logprob: float
    # Its place by probability, from 1.
    rank: int
    decoded_token: str


# Log-probabilities by token id, in decimal; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The first ``tokens`` of a choice's output are the prompt's. ``echoed``: the answer shows them."""

    tokens: int = 0
    echoed: bool = False

    def text(self, entries: Sequence[TokenLogprobs], first: int = 0) -> str:
        """Return the text to show of the prompt, of entries from place ``first`` on."""
        return "".join(entry.text for entry in entries[: self.within(first)]) if self.echoed else ""

    def shown(self, entries: Sequence[Item], first: int = 0) -> Sequence[Item]:
        """Return the entries, or ids, to show with the text, of those from place ``first`` on."""
        return entries if self.echoed else entries[self.within(first) :]

    def within(self, first: int) -> int:
        """Return how many places from ``first`` on are the prompt's."""
        return max(0, self.tokens - first)


def slices_of(entries: Sequence[TokenLogprobs]) -> list[slice]:
    """Return the slices in which a list of entries is written, of a few milliseconds each; at least one."""
    size = max(1, SLICE_LOGPROBS // (1 + len(entries[-1].top_ids))) if entries else 1
    return [slice(first, first + size) for first in range(0, len(entries), size)] or [slice(0)]


def encoded(slices: Iterable[list[Item]]) -> Steps[list[Item]]:
    """Return a list as its JSON, made slice by slice."""
    pieces = []
    for part in slices:
        pieces.append(_encode(part)[1:-1])
        yield
    whole: list[Item] = _joined(pieces)
    return whole


def _joined(pieces: Iterable[bytes]) -> Any:
    """Return the JSON of a list in place of the list."""
    return Raw(b"[" + b",".join(pieces) + b"]")


def sliced_completion_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], *, begins: bool
) -> Steps[CompletionLogprobs]:
    slices, offset_chars = slices_of(entries), 0
    if len(slices) == 1:
        return completion_logprobs(ids, entries, 0, begins=begins)
    columns: list[list[bytes]] = [[], [], [], []]
    for part in slices:
        found = completion_logprobs(ids[part], entries[part], offset_chars, begins=begins and not part.start)
        for column, values in zip(columns, structs.astuple(found), strict=True):
            column.append(_encode(values)[1:-1])
        offset_chars += sum(len(entry.text) for entry in entries[part])
        yield
    return CompletionLogprobs(*map(_joined, columns))


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], offset_chars: int, *, begins: bool
) -> CompletionLogprobs:
    """``offset_chars`` is where the first token's text begins in the choice's. ``begins``: that token begins
    a prompt."""
    offsets = []
    for entry in entries:
        offsets.append(offset_chars)
        offset_chars += len(entry.text)
    own: list[float | None] = [finite(entry.sampled) for entry in entries]
    named = [_named(token, entry) for token, entry in zip(ids, entries, strict=True)]
    tops: list[dict[str, float] | None] = [top for _, top in named]
    if begins and entries:
        own[0] = tops[0] = None
    return CompletionLogprobs([name for name, _ in named], own, tops, offsets)


def sliced_prompt_logprobs(ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Steps[PromptLogprobs]:
    """Return the log-probabilities of a prompt's tokens, as JSON."""
    return (yield from encoded(_places(ids[part], entries[part], part.start) for part in slices_of(entries)))


def _places(ids: Sequence[int], entries: Sequence[TokenLogprobs], first: int | None) -> PromptLogprobs:
    found: PromptLogprobs = [_ranked(token, entry) for token, entry in zip(ids, entries, strict=True)]
    return found if first else [None, *found[1:]]


def _ranked(token: int, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    found = {
        str(other): PromptLogprob(finite(value), place, token_name(text, data))
        for place, (other, text, value, data) in enumerate(alternatives(entry), 1)
    }
    name = token_name(entry.token, entry.token_bytes)
    found.setdefault(str(token), PromptLogprob(finite(entry.sampled), entry.rank, name))
    return found


def _named(own: int, entry: TokenLogprobs) -> tuple[str, dict[str, float]]:
    """Return the name of a token, and the alternatives by theirs, the token included.

    A name is the text, or ``bytes:`` and what is no character, as OpenAI writes it. If names are equal, the
    less likely token has vLLM's, ``token_id:`` and its id.
    """
    found: dict[str, float] = {}
    names: dict[int, str] = {}
    for token, text, value, data in alternatives(entry):
        names[token] = name = f"token_id:{token}" if (name := token_name(text, data)) in found else name
        found[name] = finite(value)
    if own not in names:
        name = token_name(entry.token, entry.token_bytes)
        names[own] = name = f"token_id:{own}" if name in found else name
        found[name] = finite(entry.sampled)
    return names[own], found


def alternatives(entry: TokenLogprobs) -> Iterator[tuple[int, str, float, bytes]]:
    """Return id, text, log-probability and, of a part of a character, bytes of each alternative."""
    data = entry.top_bytes or (b"",) * len(entry.top_ids)
    return zip(entry.top_ids, entry.top_tokens, entry.top_logprobs, data, strict=True)


def token_name(text: str, data: bytes) -> str:
    return f"bytes:{data.decode('ascii', 'backslashreplace')}" if data else text


def finite(logprob: float) -> float:
    """JSON has no minus infinity."""
    return max(logprob, _LOWEST_LOGPROB) if math.isfinite(logprob) else _LOWEST_LOGPROB
