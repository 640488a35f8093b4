"""How each row of a step is sampled, by columns, so that a step needs no look at a sequence that is plain.

``SamplingColumns`` has an entry per sequence and changes with the sequences; ``SamplingRows`` has one per row
of a step. A row that verifies a proposal is sampled as if the proposals before it were output already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from services.core.generation import OutputLimits, Sampling
from services.worker.engine.sample.keyed_random import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, UNIFORM_BITS
from services.worker.engine.sequence import SequenceState

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]

# What a row needs besides the greatest logit.
DRAWN: Final = 1
FILTERED: Final = 2
BIASED: Final = 4
REPETITION: Final = 8
OUTPUT_PENALTY: Final = 16
LOGGED: Final = 32
MIN_TOKENS: Final = 64
NO_FILTER: Final = 1 << 62  # a top_k above any vocabulary


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Columns [sequences]. ``flags`` are the bits above; ``top_k`` is ``NO_FILTER`` where it is off."""

    flags: Flags
    keys: Words
    temperatures: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    prompt_tokens: Ints

    def take(self, places: Ints) -> SamplingColumns:
        """Return the columns with the entries at these places."""
        return SamplingColumns(*(getattr(self, each.name)[places] for each in fields(self)))

    def join(self, other: SamplingColumns) -> SamplingColumns:
        """Return the entries of both, these first."""
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return SamplingColumns(*(np.concatenate(pair) for pair in pairs))


def columns_of(sequences: Iterable[SequenceState]) -> SamplingColumns:
    """Return the columns of sequences: the only place that reads their ``Sampling``."""
    rows = [(s, s.sampling) for s in sequences]
    return SamplingColumns(
        np.array([flags_of(each, s.limits) for s, each in rows], np.uint8),
        np.array([s.key for s, _ in rows], np.uint64),
        np.array([each.temperature for _, each in rows], np.float64),
        np.array([min(each.top_k, NO_FILTER) or NO_FILTER for _, each in rows], np.int64),
        np.array([each.top_p for _, each in rows], np.float64),
        np.array([each.min_p for _, each in rows], np.float64),
        np.array([s.prompt_tokens for s, _ in rows], np.int64),
    )


def flags_of(sampling: Sampling, limits: OutputLimits) -> int:
    """Return the bits of the features that a sequence needs."""
    drawn = sampling.temperature > 0
    return (
        DRAWN * drawn
        | FILTERED * (drawn and bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p))
        | BIASED * bool(sampling.logit_bias)
        | REPETITION * (sampling.repetition_penalty != 1.0)
        | OUTPUT_PENALTY * bool(sampling.presence_penalty or sampling.frequency_penalty)
        | LOGGED * (sampling.logprobs is not None)
        | MIN_TOKENS * bool(limits.min_tokens)
    )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of a step that are sampled. ``positions`` [rows] are output positions.

    ``ahead[row]`` are the proposals that the row takes for output; rows without any are not in it.
    """

    sequences: Sequence[SequenceState]
    columns: SamplingColumns
    positions: Ints
    ahead: dict[int, list[int]]

    def __len__(self) -> int:
        return len(self.sequences)

    def asking(self, flag: int) -> list[int]:
        """Return the rows that have the flag."""
        found: list[int] = np.flatnonzero(self.columns.flags & flag).tolist()
        return found

    def uniforms(self) -> Floats:
        """Return the draw of each row."""
        return uniforms(self.columns.keys, self.positions)

    def tokens(self, row: int) -> list[int]:
        """Return prompt and output as the row sees them."""
        return [*self.sequences[row].tokens, *self.ahead.get(row, ())]

    def output(self, row: int) -> list[int]:
        """Return the output as the row sees it."""
        sequence = self.sequences[row]
        return [*sequence.tokens[sequence.prompt_tokens :], *self.ahead.get(row, ())]


def rows_of(sequences: Sequence[SequenceState]) -> SamplingRows:
    """Return one row per sequence, without proposals."""
    positions = np.array([sequence.output_tokens for sequence in sequences], np.int64)
    return SamplingRows(sequences, columns_of(sequences), positions, {})


def uniforms(keys: Words, positions: Ints) -> Floats:
    """Return ``keyed.uniform`` of each pair: unsigned words wrap as that function's do."""
    words = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    words ^= words >> np.uint64(31)
    result: Floats = (words >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64) * 2.0**-UNIFORM_BITS
    return result
