"""The rows of a step, from arrays that stay: a seat per decoding sequence, written when something changes.

In a steady decode nothing is done by sequence: a step reads the lengths and the last tokens and adds vectors.
A seat is filled when its sequence starts to decode, its block table when that grows.

``Spans`` holds by columns whose rows are where, for attention backends that work on all sequences at once,
and makes a ``Span`` only for those that go sequence by sequence. ``SamplingColumns`` has an entry per
sequence and changes with the sequences; ``SamplingRows`` has one per row. A row that verifies a proposal is
sampled as if the proposals before it were output already.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter, itemgetter
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from services.core.generation import OutputLimits, Sampling
from services.worker.engine.execute.executor import Batch, PrefillChunk
from services.worker.engine.sequence import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, UNIFORM_BITS, SequenceState

_LAST: Final = itemgetter(-1)
_TOKENS: Final = attrgetter("tokens")
_VERSION: Final = attrgetter("table_version")
TABLE_STEP: Final = 64  # blocks by which the tables widen
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
Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Span:
    """``rows`` rows of a step from ``first_row`` on are one sequence's tokens, the last at ``length`` - 1.

    ``blocks`` is its block table; ``contiguous``: the blocks are consecutive.
    """

    first_row: int
    rows: int
    length: int
    blocks: list[int]
    contiguous: bool


class Spans(Sequence[Span]):
    """The spans of a step, in row order; decodes first. ``sequences`` are theirs.

    ``first_rows``, ``rows`` and ``lengths`` [spans] are int64. ``tables`` [spans, blocks] int32 are the block
    tables, wide enough for every ``lengths``; entries beyond a span's own blocks are any block. All of it is
    to be read in the step that it was made for: the arrays are used again by the next.
    """

    def __init__(
        self, sequences: list[SequenceState], *, first_rows: Ints, rows: Ints, lengths: Ints, tables: Table
    ) -> None:
        self.first_rows = first_rows
        self.rows = rows
        self.lengths = lengths
        self.tables = tables
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        sequence = self.sequences[index]
        return Span(
            int(self.first_rows[index]),
            int(self.rows[index]),
            int(self.lengths[index]),
            sequence.blocks,
            sequence.contiguous,
        )


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


@dataclass(frozen=True, slots=True)
class StepRows:
    """Columns [rows] int64: the token of each row, its position, its sequence's prompt length, its KV slot.

    ``logit_rows`` are those that are sampled, in the order of ``sampling``.
    """

    tokens: Ints
    positions: Ints
    prompt_tokens: Ints
    slots: Ints
    logit_rows: Ints
    spans: Spans
    sampling: SamplingRows


class Seats:
    """Arrays in the order of a batch's decodes. They are valid until the next ``rows``.

    What a seat keeps is fixed for a sequence, except for its block table, which is written again when
    ``table_version`` has moved.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sequences: list[SequenceState] = []
        self._tokens: list[MutableSequence[int]] = []
        self._versions: list[int] = []
        self._tables: Table = np.zeros((0, TABLE_STEP), np.int32)
        self._columns: SamplingColumns = columns_of(())

    def rows(self, batch: Batch) -> StepRows:
        """Return the rows of a step: each decode's last token and its proposals, then the chunks."""
        self._seat(batch.decodes)
        decodes = self._decode_rows(batch)
        return self._with_chunks(decodes, batch.prefills) if batch.prefills else decodes

    # --- seats ---------------------------------------------------------------------------------------

    def _seat(self, decodes: list[SequenceState]) -> None:
        if decodes != self._sequences:
            self._reseat(decodes)
        versions = list(map(_VERSION, decodes))
        if versions != self._versions:
            for seat, (new, old) in enumerate(zip(versions, self._versions, strict=True)):
                if new != old:
                    self._write_table(seat, decodes[seat].blocks)
            self._versions = versions

    def _reseat(self, decodes: list[SequenceState]) -> None:
        """Carry over the seats of those that go on, and fill those of the others."""
        known = dict(zip(self._sequences, range(len(self._sequences)), strict=True))
        places = [known.get(sequence, -1) for sequence in decodes]
        new = [sequence for sequence, place in zip(decodes, places, strict=True) if place < 0]
        number = len(known)
        source: list[int] = []  # place of each seat's entries once the new ones follow the old
        for place in places:
            source.append(number if place < 0 else place)
            number += place < 0
        order = np.array(source, np.int64)
        self._columns = self._columns.join(columns_of(new)).take(order)
        blank = np.zeros((len(new), self._tables.shape[1]), np.int32)
        self._tables = np.concatenate((self._tables, blank))[order]
        self._versions = [-1 if place < 0 else self._versions[place] for place in places]
        self._sequences = list(decodes)
        self._tokens = list(map(_TOKENS, decodes))

    def _write_table(self, seat: int, blocks: list[int]) -> None:
        if len(blocks) > self._tables.shape[1]:
            self._tables = _widened(self._tables, len(blocks))
        self._tables[seat, : len(blocks)] = blocks

    # --- rows ----------------------------------------------------------------------------------------

    def _decode_rows(self, batch: Batch) -> StepRows:
        count = len(self._sequences)
        lengths = np.fromiter(map(len, self._tokens), np.int64, count)
        tokens = np.fromiter(map(_LAST, self._tokens), np.int64, count)
        seats = np.arange(count)
        if batch.proposals:
            return self._verifying_rows(batch, lengths, tokens)
        positions = lengths - 1
        spans = Spans(
            self._sequences,
            first_rows=seats,
            rows=np.ones(count, np.int64),
            lengths=lengths,
            tables=self._tables,
        )
        columns = self._columns
        sampling = SamplingRows(self._sequences, columns, lengths - columns.prompt_tokens, {})
        slots = self._slots(self._tables, seats, positions)
        return StepRows(tokens, positions, columns.prompt_tokens, slots, seats, spans, sampling)

    def _verifying_rows(self, batch: Batch, lengths: Ints, last: Ints) -> StepRows:
        """Return the rows of a step whose decodes have a row more than they have proposals."""
        proposals = batch.proposals
        counts = np.ones(len(lengths), np.int64)
        for index, proposed in proposals.items():
            counts[index] += len(proposed)
        first_rows = np.cumsum(counts) - counts
        total = int(counts.sum())
        seats = np.repeat(np.arange(len(lengths)), counts)
        rows = np.arange(total)
        offsets = rows - first_rows[seats]
        positions = lengths[seats] - 1 + offsets
        tokens = last[seats]
        ahead: dict[int, list[int]] = {}
        for index, proposed in proposals.items():
            first = int(first_rows[index]) + 1
            tokens[first : first + len(proposed)] = proposed
            ahead |= {first + place: proposed[: place + 1] for place in range(len(proposed))}
        columns = self._columns.take(seats)
        spans = Spans(
            self._sequences,
            first_rows=first_rows,
            rows=counts,
            lengths=lengths + counts - 1,
            tables=self._tables,
        )
        sampling = SamplingRows(batch.decoded_rows, columns, positions + 1 - columns.prompt_tokens, ahead)
        slots = self._slots(self._tables, seats, positions)
        return StepRows(tokens, positions, columns.prompt_tokens, slots, rows, spans, sampling)

    def _with_chunks(self, decodes: StepRows, chunks: Sequence[PrefillChunk]) -> StepRows:
        """Append the rows of prefill chunks; there are few, and each has many rows."""
        counts = np.array([chunk.end - chunk.start for chunk in chunks], np.int64)
        ends = np.array([chunk.end for chunk in chunks], np.int64)
        base = len(decodes.tokens)
        first_rows = base + np.cumsum(counts) - counts
        spans_of = np.repeat(np.arange(len(chunks)), counts)
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        prompts = np.array([chunk.sequence.prompt_tokens for chunk in chunks], np.int64)[spans_of]
        tables = _table_of(chunks, self._tables.shape[1])
        sampled = [place for place, chunk in enumerate(chunks) if chunk.samples]
        starting = [chunks[place].sequence for place in sampled]
        columns = columns_of(starting)
        spans = decodes.spans
        sampling = decodes.sampling
        return StepRows(
            np.concatenate((decodes.tokens, *(_tokens_of(chunk) for chunk in chunks))),
            np.concatenate((decodes.positions, positions)),
            np.concatenate((decodes.prompt_tokens, prompts)),
            np.concatenate((decodes.slots, self._slots(tables, spans_of, positions))),
            np.concatenate((decodes.logit_rows, (first_rows + counts - 1)[sampled])),
            Spans(
                [*self._sequences, *(chunk.sequence for chunk in chunks)],
                first_rows=np.concatenate((spans.first_rows, first_rows)),
                rows=np.concatenate((spans.rows, counts)),
                lengths=np.concatenate((spans.lengths, ends)),
                tables=np.concatenate((_widened(self._tables, tables.shape[1]), tables)),
            ),
            SamplingRows(
                [*sampling.sequences, *starting],
                sampling.columns.join(columns),
                np.concatenate((sampling.positions, ends[sampled] - columns.prompt_tokens)),
                sampling.ahead,
            ),
        )

    def _slots(self, tables: Table, seats: Ints, positions: Ints) -> Ints:
        blocks, offsets = np.divmod(positions, self._block_size)
        slots: Ints = tables[seats, blocks].astype(np.int64) * self._block_size + offsets
        return slots


def _tokens_of(chunk: PrefillChunk) -> Ints:
    return np.array(chunk.sequence.tokens[chunk.start : chunk.end], np.int64)


def _table_of(chunks: Sequence[PrefillChunk], least: int) -> Table:
    """Return the block tables of the chunks' sequences [chunks, blocks], at least so wide."""
    widest = max(least, *(len(chunk.sequence.blocks) for chunk in chunks))
    tables = _widened(np.zeros((len(chunks), least), np.int32), widest)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.sequence.blocks)] = chunk.sequence.blocks
    return tables


def _widened(tables: Table, blocks: int) -> Table:
    """Return the tables with room for so many blocks, in steps."""
    missing = -(-blocks // TABLE_STEP) * TABLE_STEP - tables.shape[1]
    return np.pad(tables, ((0, 0), (0, missing))) if missing > 0 else tables
