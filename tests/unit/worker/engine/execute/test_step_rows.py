"""The rows of a step against the sequences they come from, through joins, ends, growth and proposals."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.execute.executor import Batch, PrefillChunk
from services.worker.engine.execute.step_rows import Seats, StepRows, rows_of
from services.worker.engine.sequence import SequenceState, sequence_of
from tests.support.submits import make_submit

BLOCK = 4


def plain_rows(batch: Batch) -> dict[str, list[Any]]:
    """The same rows, one sequence after the other."""
    found: dict[str, list[Any]] = {
        name: [] for name in ("token", "position", "prompt", "slot", "sampled", "span")
    }
    spans = [
        (s, len(s.tokens) - 1, [*s.tokens, *batch.proposals.get(index, ())], True)
        for index, s in enumerate(batch.decodes)
    ]
    spans += [(c.sequence, c.start, list(c.sequence.tokens[: c.end]), False) for c in batch.prefills]
    samples = [True] * len(batch.decodes) + [chunk.samples for chunk in batch.prefills]
    for (sequence, start, text, decodes), last in zip(spans, samples, strict=True):
        first = len(found["token"])
        found["span"].append((first, len(text) - start, len(text), list(sequence.blocks)))
        for position in range(start, len(text)):
            block = sequence.blocks[position // BLOCK]
            if decodes or (last and position == len(text) - 1):
                found["sampled"].append(
                    (len(found["token"]), sequence.handle, position + 1 - sequence.prompt_tokens)
                )
            found["token"].append(text[position])
            found["position"].append(position)
            found["prompt"].append(sequence.prompt_tokens)
            found["slot"].append(block * BLOCK + position % BLOCK)
    return found


def assert_same(rows: StepRows, batch: Batch) -> None:
    expected = plain_rows(batch)
    assert rows.tokens.tolist() == expected["token"]
    assert rows.positions.tolist() == expected["position"]
    assert rows.prompt_tokens.tolist() == expected["prompt"]
    assert rows.slots.tolist() == expected["slot"]
    sampling = rows.sampling
    handles = [sequence.handle for sequence in sampling.sequences]
    sampled = zip(rows.logit_rows.tolist(), handles, sampling.positions.tolist(), strict=True)
    assert list(sampled) == expected["sampled"]
    assert [each.handle for each in batch.sampled] == handles
    assert [(s.first_row, s.rows, s.length, s.blocks) for s in rows.spans] == expected["span"]
    for index, (_, _, length, blocks) in enumerate(expected["span"]):
        used = -(-length // BLOCK)
        assert rows.spans.tables[index, :used].tolist() == blocks[:used]
    alone = rows_of(sampling.sequences).columns
    for name in ("flags", "keys", "temperatures", "top_k", "top_p", "min_p", "prompt_tokens"):
        assert np.array_equal(getattr(sampling.columns, name), getattr(alone, name)), name


class World:
    """Sequences that come, decode, are preempted and end, with blocks as a planner would give them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.free = list(range(1000))
        self.decoding: list[SequenceState] = []
        self.handles = 0

    def start(self) -> SequenceState:
        rng = self.rng
        self.handles += 1
        sampling: dict[str, Any] = {
            "seed": rng.randrange(1 << 64),
            "temperature": rng.choice([0.0, 0.5]),
            "top_k": rng.choice([0, 3]),
        }
        tokens = [rng.randrange(50) for _ in range(rng.randint(1, 9))]
        command = make_submit(self.handles, tokens, 99, [1] * rng.randint(0, 3), max_tokens=99, **sampling)
        return sequence_of(command, arrival=0, eos_ids=frozenset())

    def grow(self, sequence: SequenceState, tokens: int) -> None:
        missing = -(-tokens // BLOCK) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(missing)]
            sequence.table_version += 1

    def drop(self, sequence: SequenceState) -> None:
        self.free += sequence.blocks
        sequence.blocks.clear()
        sequence.table_version += 1
        self.decoding.remove(sequence)

    def batch(self) -> Batch:
        """Return a step, after what may have happened since the one before."""
        rng = self.rng
        for sequence in list(self.decoding):
            if rng.random() < 0.1:
                self.drop(sequence)
        started = [self.start() for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        chunks: list[PrefillChunk] = []
        for sequence in started:
            self.grow(sequence, len(sequence.tokens))
            start = rng.randrange(len(sequence.tokens))
            chunks.append(PrefillChunk(sequence, start, rng.randint(start + 1, len(sequence.tokens))))
        proposals = {}
        for index, sequence in enumerate(self.decoding):
            if rng.random() < 0.3:
                proposals[index] = [rng.randrange(50) for _ in range(rng.randint(1, 6))]
            self.grow(sequence, len(sequence.tokens) + len(proposals.get(index, ())))
        return Batch(list(self.decoding), chunks, proposals)

    def commit(self, batch: Batch) -> None:
        for sequence in batch.decodes:
            for _ in range(self.rng.choice([1, 1, 1, 4])):
                sequence.tokens.append(self.rng.randrange(50))
        for chunk in batch.prefills:
            if chunk.samples:
                chunk.sequence.tokens.append(3)
                self.decoding.append(chunk.sequence)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 15))
def test_every_step_has_the_rows_of_its_sequences(seed: int, steps: int) -> None:
    world, seats = World(seed), Seats(BLOCK)
    for _ in range(steps):
        batch = world.batch()
        assert_same(seats.rows(batch), batch)
        world.commit(batch)


def test_a_context_longer_than_the_tables_widens_them() -> None:
    world, seats = World(0), Seats(BLOCK)
    sequence = world.start()
    sequence.tokens += [1] * 700
    world.grow(sequence, 800)
    assert_same(seats.rows(batch := Batch([sequence], [])), batch)
    other = world.start()
    other.tokens += [1] * 1500
    world.grow(other, 2000)
    assert_same(seats.rows(batch := Batch([sequence], [PrefillChunk(other, 9, 40)])), batch)
    assert_same(seats.rows(batch := Batch([other, sequence], [])), batch)


def test_a_row_that_verifies_takes_what_was_proposed_before_for_output() -> None:
    world = World(1)
    one, two = world.start(), world.start()
    for sequence in (one, two):
        world.grow(sequence, 40)
    rows = Seats(BLOCK).rows(Batch([one, two], [], {1: [7, 8]})).sampling
    assert [rows.tokens(row) for row in range(4)] == [
        one.tokens,
        two.tokens,
        [*two.tokens, 7],
        [*two.tokens, 7, 8],
    ]
    output = two.tokens[two.prompt_tokens :]
    assert [rows.output(row) for row in range(1, 4)] == [output, [*output, 7], [*output, 7, 8]]
    assert rows.positions.tolist() == [one.output_tokens, *(two.output_tokens + ahead for ahead in range(3))]


@pytest.mark.parametrize("count", [1, 300])
def test_nothing_is_written_while_nothing_changes(count: int) -> None:
    """A steady decode leaves the seats as they are; only a table that grew is written."""
    world, seats = World(2), Seats(BLOCK)
    sequences = [world.start() for _ in range(count)]
    world.free = list(range(100_000))
    for sequence in sequences:
        world.grow(sequence, 40)
    batch = Batch(sequences, [])
    columns, tables = seats.rows(batch).sampling.columns, seats.rows(batch).spans.tables
    sequences[0].tokens.append(5)
    again = seats.rows(Batch(list(sequences), []))
    assert again.sampling.columns is columns
    assert again.spans.tables is tables
    world.grow(sequences[0], 60)
    assert_same(seats.rows(batch), batch)
