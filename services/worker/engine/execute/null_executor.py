"""An executor without a model: tokens are a function of (seed, choice, position), at a set pace.

It stands in for a device of known speed wherever the platform around the engine is what is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.ports.grammars import Bits
from services.worker.engine.execute.executor import Batch, Samples, blank_scores
from services.worker.engine_protocol import SampledLogprobs

STRIDE = 7919  # a prime, so that the tokens of a stream differ from one position to the next


class NullAdapters:
    """Implements ``Adapters``: without a model an adapter changes nothing."""

    def load(self, adapter: int, folder: Path) -> int:
        """See ``Adapters``."""
        return 0

    def drop(self, adapter: int) -> None:
        """See ``Adapters``."""


class NullExecutor:
    """``step_s`` seconds a step on an absolute schedule: oversleeping does not add up; 0: flat out."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        step_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        if len(eos_ids) >= vocab_size:
            raise ValueError("the vocabulary has nothing but end-of-sequence tokens")
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._due_s = clock()

    def run(self, batch: Batch) -> Samples:
        """Return one token per sampling row, never an end-of-sequence id unless a constraint demands it."""
        vocab_size = self._vocab_size
        sampled = batch.sampled
        tokens = [(s.key + (len(s.tokens) - s.prompt_tokens) * STRIDE) % vocab_size for s in sampled]
        if not self._eos_ids.isdisjoint(tokens):
            tokens = [self._not_eos(token) for token in tokens]
        if batch.masks is not None:
            ruled = batch.masks.result()
            for row, bits in zip(ruled.rows, ruled.allowed, strict=True):
                tokens[row] = _allowed(tokens[row], bits, vocab_size)
        logprobs = {
            row: SampledLogprobs(0.0, [], [])
            for row, s in enumerate(sampled)
            if s.sampling.logprobs is not None
        }
        if self._step_s > 0:
            self._pace()
        # Vectors have one dimension, since there is no model.
        vectors = {row: bytes(4) for row in batch.embedded}
        # A text that no model wrote is safe.
        probed = [0.0] * len(tokens) if any(s.probe for s in sampled) else []
        scores = blank_scores(batch)
        return Samples(tokens, logprobs, embeddings=vectors, scores=scores, probe_scores=probed)

    def resize(self, blocks: int) -> None:
        """See ``Runner``: there is no memory behind its blocks."""

    def _not_eos(self, token: int) -> int:
        while token in self._eos_ids:
            token = (token + 1) % self._vocab_size
        return token

    def _pace(self) -> None:
        now_s = self._clock()
        # What the host took between two steps does not add up. A longer gap was idle time of the device.
        begins_s = self._due_s if now_s - self._due_s <= self._step_s / 2 else now_s
        self._due_s = begins_s + self._step_s
        if self._due_s > now_s:
            self._sleep(self._due_s - now_s)


def _allowed(token: int, bits: Bits, vocab_size: int) -> int:
    """Return the first token from this one on, in a circle, that may come next."""
    allowed = np.flatnonzero(np.unpackbits(bits, count=vocab_size, bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])
