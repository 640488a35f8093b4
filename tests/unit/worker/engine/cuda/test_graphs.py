"""Graphs of decode steps, all but the capture itself: a fake one replays by running again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from services.worker.engine.cuda.graphs import MAX_GRAPHS, Graph, GraphedDecoder, batch_sizes
from services.worker.engine.cuda.plan import Padding, StepShape
from services.worker.engine.execute.model import Hidden

CPU = torch.device("cpu")
VOCABULARY = 5
HIDDEN = 3
SIZES = (1, 2, 4)


@dataclass
class Adding:
    """A decoder: the logits of a row are made of what came in for it."""

    runs: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # the greatest of each run

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        prompt_tokens: torch.Tensor,
        logit_rows: torch.Tensor,
        hidden: Hidden | None = None,
    ) -> torch.Tensor:
        self.runs.append(len(tokens))
        self.positions.append(int(positions.max()))
        rows = (tokens * 10000 + positions * 100 + prompt_tokens).float()
        if hidden is not None:
            hidden.values = rows[logit_rows][:, None].repeat(1, HIDDEN)
        return rows[logit_rows][:, None] + torch.arange(VOCABULARY)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@dataclass
class Stepping:
    """An attention backend as far as graphs ask it."""

    padding: Padding = field(default_factory=lambda: Padding(SIZES, 0, 0))
    shape: StepShape | None = None

    def begin(self, rows: int) -> None:
        size = self.padding.rows(rows)
        self.shape = None if size is None else StepShape(size, (size,))

    def begin_padding(self, rows: int) -> None:
        self.begin(rows)


@dataclass
class Again:
    """Replays as a graph does: with the buffers that were captured, and no arguments."""

    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


@dataclass
class Recorder:
    """Implements ``Capture``. ``refuses`` are the rows of the captures that fail."""

    decoder: Adding
    refuses: tuple[int, ...] = ()
    captured: int = 0

    def __call__(self, run: Callable[[], None]) -> Graph:
        run()
        if self.decoder.runs[-1] in self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        return Again(run)


@dataclass
class Rig:
    refuses: tuple[int, ...] = ()
    hidden_size: int = 0

    def __post_init__(self) -> None:
        self.plain, self.attention = Adding(), Stepping()
        self.capture = Recorder(self.plain, self.refuses)
        self.graphed = GraphedDecoder(
            self.plain,
            self.attention,
            sizes=SIZES,
            vocab_size=VOCABULARY,
            device=CPU,
            capture=self.capture,
            hidden_size=self.hidden_size,
        )

    def step(self, rows: int, seed: int, logit_rows: list[int] | None = None) -> None:
        """Run a step and compare it with the decoder's own answer."""
        generator = torch.Generator().manual_seed(seed)
        tokens, positions, prompts = (torch.randint(1, 99, (rows,), generator=generator) for _ in range(3))
        wanted = torch.tensor(range(rows) if logit_rows is None else logit_rows, dtype=torch.int64)
        self.attention.begin(rows)
        got = self.graphed.forward(tokens, positions, prompts, wanted).clone()
        assert torch.equal(got, Adding().forward(tokens, positions, prompts, wanted))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (6, (1, 2, 4, 6)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (33, (1, 2, 4, 8, 16, 24, 32, 33)),
    ],
)
def test_batch_sizes(most: int, expected: tuple[int, ...]) -> None:
    assert batch_sizes(most) == expected


@pytest.mark.parametrize("most", [256, 300, 1024])
def test_batch_sizes_ascend_to_the_most_and_have_graphs(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    assert sorted(set(sizes)) == list(sizes)
    assert len(sizes) <= MAX_GRAPHS


def test_a_step_is_padded_to_the_next_size() -> None:
    padding = Padding((1, 2, 4), 0, 0)
    assert [padding.rows(rows) for rows in range(6)] == [1, 1, 2, 4, 4, None]


def test_steps_of_any_size_answer_as_without_graphs() -> None:
    rig = Rig()
    for seed, rows in enumerate((3, 1, 4, 2, 3, 1, 4)):
        rig.step(rows, seed)  # what a larger one left in the buffers is not seen by the next
    assert rig.capture.captured == 3
    rig.step(5, 99)  # too many for a graph
    assert rig.capture.captured == 3


def test_hidden_states_come_from_graphs_that_keep_them() -> None:
    for kept, captured in ((HIDDEN, 2), (0, 0)):
        rig = Rig(hidden_size=kept)
        for rows, chosen in ((4, [0, 1, 2, 3]), (3, [2, 0]), (2, [1])):
            first, wanted = torch.arange(rows), torch.tensor(chosen)
            here, there = Hidden(), Hidden()
            rig.attention.begin(rows)
            rig.graphed.forward(first + 1, first + 2, first + 3, wanted, here)
            Adding().forward(first + 1, first + 2, first + 3, wanted, there)
            assert here.values is not None
            assert there.values is not None
            assert torch.equal(here.values, there.values)
        assert rig.capture.captured == captured
        others, one = Hidden(torch.tensor([0])), torch.ones(1, dtype=torch.int64)
        rig.attention.begin(1)
        rig.graphed.forward(one, one, one, torch.tensor([0]), others)
        assert rig.capture.captured == captured, "states of other rows are in no graph"


def test_a_capture_amid_serving_sees_nothing_of_earlier_steps() -> None:
    """What is a token in a step of one size lies where the positions of another are, and is none."""
    rig = Rig()
    rig.step(4, 0)
    rig.plain.positions.clear()
    rig.step(1, 1)
    captured, replayed = rig.plain.positions
    assert captured == 0 < replayed


def test_only_some_rows_are_sampled() -> None:
    rig = Rig()
    rig.step(3, 0, logit_rows=[2])
    rig.step(4, 1, logit_rows=[3, 0])
    rig.step(2, 2, logit_rows=[])


def test_all_sizes_are_captured_ahead_the_largest_first() -> None:
    rig = Rig()
    rig.graphed.warm_up()
    assert rig.plain.runs == [4, 2, 1]
    rig.step(3, 0)
    assert rig.capture.captured == 3


def test_where_a_capture_fails_the_step_runs_without() -> None:
    rig = Rig(refuses=(4,))
    for seed in range(3):
        rig.step(3, seed)
        rig.step(2, seed)
    assert rig.capture.captured == 1
    assert rig.plain.runs.count(4) == 1  # it is not tried again
    assert rig.plain.runs.count(3) == 3


def test_the_number_of_graphs_is_bounded() -> None:
    rig = Rig()
    column = torch.tensor([1, 2])
    for pieces in range(MAX_GRAPHS + 5):
        rig.attention.shape = StepShape(2, (pieces,))
        rig.graphed.forward(column, column, column, torch.tensor([0, 1]))
    assert rig.capture.captured == MAX_GRAPHS + 5
    rig.attention.shape = StepShape(2, (MAX_GRAPHS + 4,))
    rig.graphed.forward(column, column, column, torch.tensor([0, 1]))
    assert rig.capture.captured == MAX_GRAPHS + 5
    assert len(rig.graphed.shapes) == MAX_GRAPHS
