"""The expected output of a request: the engine's function of seed and position, a slice at a time.

A request's seed is unique and also encodes the length of its output. So the simulated engine can derive
where to end it, and no part of the fleet in between has to carry that.
"""

from __future__ import annotations

from typing import Final

from services.worker.engine.execute.null_executor import STRIDE
from services.worker.engine.sample.keyed_random import sequence_key
from services.worker.engine_protocol import Submit
from simulator.fleet.spec import VOCABULARY

EOS_ID: Final = 2
_LENGTH_BITS: Final = 20
_LONGEST: Final = 1 << 17
# The way of every output through the vocabulary, by a stride that is coprime to its size.
_WAY: Final = [position * STRIDE % VOCABULARY for position in range(VOCABULARY)]
_INDEX: Final = {token: index for index, token in enumerate(_WAY)}
_TOKENS: Final = [token + (token == EOS_ID) for token in _WAY] * (_LONGEST // VOCABULARY + 2)


def request_seed(number: int, output_tokens: int) -> int:
    """Return the sampling seed of a client's request."""
    return number << _LENGTH_BITS | output_tokens


def output_length(command: Submit) -> int:
    """Return the model's output length without a limit, for the simulated engine."""
    return said_tokens(command.sampling.seed)


def said_tokens(seed: int) -> int:
    """Return the model's output length without a limit under a client's sampling seed."""
    return seed & ((1 << _LENGTH_BITS) - 1)


class Due:
    """The output of one seed. ``length`` is how many tokens come in all."""

    __slots__ = ("_cut_off", "_first", "length")

    def __init__(self, seed: int, *, output_tokens: int, allowed_tokens: int) -> None:
        self._first = _INDEX[sequence_key(seed, 0) % VOCABULARY]
        self._cut_off = output_tokens > allowed_tokens
        self.length = min(output_tokens, allowed_tokens)

    def tokens(self, offset: int, count: int) -> list[int]:
        """Return those from an offset on; the last of all is EOS, unless the output is cut off."""
        start = self._first + offset
        found = _TOKENS[start : start + count]
        if offset + count == self.length and not self._cut_off:
            found[-1] = EOS_ID
        return found
