"""CUDA graphs of decode steps: a step whose rows were padded to a known shape is replayed, not launched.

A decode step of a small batch is hundreds of short kernels, and launching them takes longer than they run.
One graph per shape (``cuda/plan.StepShape``) is captured at its first use, or ahead by ``warm_up``;
all read the same input buffers, write the same logits, and share one memory pool, so that their memory is
that of the largest. Where a capture fails, steps of that shape run without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import structlog
import torch

from services.worker.engine.cuda.plan import StepShape
from services.worker.engine.execute.model import Hidden
from services.worker.engine.execute.torch_executor import Forward

MAX_GRAPHS: Final = 128  # the one captured longest ago goes first
EVERY_SIZE: Final = (1, 2, 4, 8)
SIZE_STEP: Final = 8
EVERY_STEP_UP_TO: Final = 256
WIDE_STEP: Final = 64

log = structlog.get_logger()


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return what batches are padded to: 1, 2, 4, 8, then by 8, from 256 on by 64, up to ``most``."""
    steps = (*range(16, EVERY_STEP_UP_TO + 1, SIZE_STEP), *range(320, most + 1, WIDE_STEP))
    return (*(size for size in (*EVERY_SIZE, *steps) if size < most), most)


class PaddedAttention(Protocol):
    """An attention backend that pads the steps it can; ``shape`` is that of the present one, or None."""

    @property
    def shape(self) -> StepShape | None: ...

    def begin_padding(self, rows: int) -> None:
        """Begin a step of padding alone, of a known size."""


class Graph(Protocol):
    def replay(self) -> None:
        """Run again what was captured, on what the buffers hold now."""


Capture = Callable[[Callable[[], None]], Graph]  # runs its argument as often as it needs to


class GraphedDecoder:
    """A decoder whose padded steps are graphs. Its logits are valid until the next step."""

    def __init__(
        self,
        decoder: Forward,
        attention: PaddedAttention,
        *,
        sizes: tuple[int, ...],
        vocab_size: int,
        device: torch.device,
        capture: Capture,
        hidden_size: int = 0,
    ) -> None:
        """``hidden_size``: that of the states which every step keeps, for a probe; 0: none are kept."""
        most = sizes[-1]
        self._decoder = decoder
        self._attention = attention
        self._sizes = sizes
        self._device = device
        self._capture = capture
        self._inputs = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self._every_row = torch.arange(most, device=device)
        self._logits = torch.zeros(most, vocab_size, dtype=torch.float32, device=device)
        self._hidden = torch.zeros(most, hidden_size, device=device) if hidden_size else None
        self._graphs: dict[StepShape, Graph | None] = {}  # None: its capture failed

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """Return the shapes that were captured, or tried in vain."""
        return tuple(self._graphs)

    def warm_up(self) -> None:
        """The graphs of all sizes are captured; the largest first, so that the others find its memory."""
        for size in reversed(self._sizes):
            self._attention.begin_padding(size)
            if (shape := self._attention.shape) is not None:
                self._graph(shape)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        prompt_tokens: torch.Tensor,
        logit_rows: torch.Tensor,
        hidden: Hidden | None = None,
    ) -> torch.Tensor:
        """See ``Decoder.forward``. A step in which hidden states of other rows are requested runs without a
        graph, and so does one with those of logit rows unless they are kept."""
        shape = self._attention.shape
        lacks = hidden is not None and (hidden.others is not None or self._hidden is None)
        if shape is None or lacks or (graph := self._graph(shape)) is None:
            return self._decoder.forward(tokens, positions, prompt_tokens, logit_rows, hidden)
        count = len(tokens)
        here = tokens.device == positions.device  # else some are known on the device alone
        rows = torch.zeros(3, shape.rows, dtype=torch.int64)
        torch.stack((tokens if here else positions, positions, prompt_tokens), out=rows[:, :count])
        self._inputs[: 3 * shape.rows].copy_(rows.view(-1), non_blocking=True)
        if not here:
            self._inputs[:count].copy_(tokens)
        graph.replay()
        chosen = None if len(logit_rows) == count else logit_rows.to(self._device, non_blocking=True)
        if hidden is not None and self._hidden is not None:
            hidden.values = _chosen(self._hidden, count, chosen)
        return _chosen(self._logits, count, chosen)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Decoder.logits``."""
        return self._decoder.logits(hidden)

    def _graph(self, shape: StepShape) -> Graph | None:
        if shape not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[shape] = self._captured(shape)
        return self._graphs[shape]

    def _captured(self, shape: StepShape) -> Graph | None:
        self._inputs.zero_()  # steps of other sizes left positions and tokens at other places
        tokens, positions, prompt_tokens = self._inputs[: 3 * shape.rows].view(3, shape.rows)

        def run() -> None:
            rows = self._every_row[: shape.rows]
            kept = None if self._hidden is None else Hidden()
            self._logits[: shape.rows].copy_(
                self._decoder.forward(tokens, positions, prompt_tokens, rows, kept)
            )
            if self._hidden is not None and kept is not None and kept.values is not None:
                self._hidden[: shape.rows].copy_(kept.values)

        try:
            return self._capture(run)
        except RuntimeError as error:  # torch's for whatever a capture may not contain, memory included
            log.warning("graph.capture_failed", rows=shape.rows, error=type(error).__name__)
            return None


def _chosen(values: torch.Tensor, count: int, rows: torch.Tensor | None) -> torch.Tensor:
    """Return these of the values, or the first ``count``."""
    return values[:count] if rows is None else values.index_select(0, rows)


class CudaCapture:
    """Implements ``Capture`` on the present CUDA device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Graph:
        """Run once outside the stream, so that compiling and handles stay out of the graph; then capture."""
        aside: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph
