"""The rows of a step, from arrays that stay: a seat per decoding sequence, written when something changes.

In a steady decode nothing is done by sequence: a step reads the lengths and the last tokens and adds vectors.
A seat is filled when its sequence starts to decode, its block table when that grows.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Final

import numpy as np

from services.worker.engine.execute.executor import Batch, PrefillChunk
from services.worker.engine.execute.spans import Ints, Spans, Table
from services.worker.engine.sample.sampling_rows import SamplingColumns, SamplingRows, columns_of
from services.worker.engine.sequence import SequenceState

_LAST: Final = itemgetter(-1)
_TOKENS: Final = attrgetter("tokens")
_VERSION: Final = attrgetter("table_version")
TABLE_STEP: Final = 64  # blocks by which the tables widen


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
