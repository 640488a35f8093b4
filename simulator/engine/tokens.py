"""A sequence's tokens without storing them: output is a function of (seed, choice, position)."""

from __future__ import annotations

import sys
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import NoReturn, overload

from services.worker.engine.execute.null_executor import STRIDE
from services.worker.engine.sequence import sequence_key
from simulator.engine.poison import poison_of

NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class SimVocabulary:
    """``eos_id`` ends an output that ends by itself and is emitted nowhere else; None: no output does."""

    size: int
    eos_id: int | None = None

    def output(self, key: int, first: int, count: int) -> list[int]:
        """Return the tokens of a key at ``count`` output positions: what a null executor emits."""
        size, start = self.size, key % self.size + first * STRIDE
        tokens = [place % size for place in range(start, start + count * STRIDE, STRIDE)]
        if self.eos_id in tokens:
            tokens = [(token + 1) % size if token == self.eos_id else token for token in tokens]
        return tokens


def output_tokens(seed: int, choice: int, count: int, *, vocab_size: int, eos_id: int | None) -> list[int]:
    """Return the first ``count`` output tokens of a request, which a client can hold its stream against."""
    return SimVocabulary(vocab_size, eos_id).output(sequence_key(seed, choice), 0, count)


class SimTokens(MutableSequence[int]):
    """Prompt and output by their count. ``end`` is the length at which the output ends by itself.

    Appended tokens are those of the function, so only the count changes.
    """

    __slots__ = ("_prompt", "_vocabulary", "end", "key", "length", "poison", "prompt_tokens")

    def __init__(
        self, prompt: Sequence[int], produced: int, key: int, vocabulary: SimVocabulary, end: int = NEVER
    ) -> None:
        self._prompt = prompt
        self._vocabulary = vocabulary
        self.prompt_tokens = len(prompt)
        self.length = self.prompt_tokens + produced
        self.key = key
        self.end = end
        self.poison = poison_of(prompt)

    def __len__(self) -> int:
        return self.length

    def append(self, value: int) -> None:
        self.length += 1

    def take(self, count: int) -> list[int]:
        """Append the next ``count`` output tokens and return them."""
        first = self.length - self.prompt_tokens
        self.length += count
        return self._vocabulary.output(self.key, first, count)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if not isinstance(index, slice):
            position = index + self.length if index < 0 else index
            if not 0 <= position < self.length:
                raise IndexError(index)
            return self[position : position + 1][0]
        start, stop, step = index.indices(self.length)
        if step != 1:
            return [self[position] for position in range(start, stop, step)]
        prompt = self.prompt_tokens
        tokens = list(self._prompt[start : min(stop, prompt)]) if start < prompt else []
        if stop > prompt:
            first = max(start, prompt)
            tokens += self._vocabulary.output(self.key, first - prompt, max(0, stop - first))
        return tokens

    def insert(self, index: int, value: int) -> NoReturn:
        raise TypeError("tokens are only appended")

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError("tokens are only appended")

    def __delitem__(self, index: object) -> NoReturn:
        raise TypeError("tokens are only appended")
