"""The constrained outputs of one engine: grammars are compiled and masks computed beside the steps.

A matcher follows its output: it consumes what was produced since its last mask, by any run. So a
resumed output is replayed, a preempted one goes on, and a step that is discarded leaves nothing behind. The
engine's thread owns the table; a matcher is used by one thread at a time, because masks are waited for before
their step is committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.core.generation import Constraint
from services.ports.grammars import GrammarRefused, Grammars, MaskRequest, Matcher, TokenizerUnusable
from services.worker.engine.constrain.masks import RuledRows, StepMasks
from services.worker.engine.execute.executor import Batch
from services.worker.engine.sequence import SequenceState

# By byte of a mask, the biases of its eight tokens.
_BIASES: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0.0),
    np.float32(-np.inf),
)
OpenGrammars = Callable[[], Grammars]


@dataclass(slots=True)
class _Output:
    """``consumed``: how many output tokens the matcher has."""

    matcher: Matcher
    consumed: int = 0

    def unconsumed(self, sequence: SequenceState) -> Sequence[int]:
        """Return the output tokens that the matcher does not have yet."""
        return sequence.tokens[sequence.prompt_tokens + self.consumed :]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar is ready, or is refused for a reason."""

    handle: int
    refusal: str = ""


class Constraints:
    """Single owner of the matchers, by handle."""

    def __init__(
        self, open_grammars: OpenGrammars, *, vocab_size: int, compiling: Executor, masking: Executor
    ) -> None:
        """``open_grammars`` is called in the thread of the first compilation."""
        self._open = _Once(open_grammars)
        self._vocab_size = vocab_size
        self._compiling = compiling
        self._masking = masking
        self._pending: dict[int, Future[Matcher]] = {}
        self._outputs: dict[int, _Output] = {}

    @property
    def any_pending(self) -> bool:
        """Whether a grammar is being compiled."""
        return bool(self._pending)

    def begin(self, handle: int, constraint: Constraint) -> None:
        """Start to compile the grammar of a new sequence."""
        self._pending[handle] = self._compiling.submit(self._compile, constraint)

    def take_compiled(self, *, timeout_s: float = 0.0) -> list[Compiled]:
        """Return the sequences whose grammars were compiled since the call before, in their order.

        With a timeout, wait for the first one so long.
        """
        if timeout_s > 0 and self._pending:
            wait(self._pending.values(), timeout=timeout_s, return_when="FIRST_COMPLETED")
        done = [handle for handle, future in self._pending.items() if future.done()]
        return [self._settle(handle) for handle in done]

    def forget(self, handle: int) -> None:
        """Drop what is kept of a sequence; there may be nothing."""
        self._outputs.pop(handle, None)
        if (future := self._pending.pop(handle, None)) is not None:
            future.cancel()

    def cut(
        self, decodes: Sequence[SequenceState], proposals: Mapping[int, list[int]]
    ) -> dict[int, list[int]]:
        """Return the proposals as far as grammars let them come next; those of other sequences as they are.

        A proposed end of sequence is left out: it would be the last anyway.
        """
        kept: dict[int, list[int]] = {}
        for index, tokens in proposals.items():
            sequence = decodes[index]
            output = self._outputs.get(sequence.handle)
            kept[index] = tokens if output is None else _fitting(output, sequence, tokens)
        return {index: tokens for index, tokens in kept.items() if tokens}

    def masks(self, batch: Batch) -> StepMasks | None:
        """Start to compute the masks of a planned batch; None where no row has one."""
        if not self._outputs:
            return None
        rows: list[int] = []
        requests: list[MaskRequest] = []
        for first, count, sequence, proposals in _rows(batch):
            output = self._outputs.get(sequence.handle)
            if output is None:
                continue
            produced = output.unconsumed(sequence)
            requests.append(MaskRequest(output.matcher, len(rows), produced, proposals))
            output.consumed += len(produced)
            rows += range(first, first + count)
        if not rows:
            return None
        return self._masking.submit(self._fill, requests, rows)

    # --- in other threads ----------------------------------------------------------------------------

    def _compile(self, constraint: Constraint) -> Matcher:
        return self._open.get().compile(constraint)

    def _fill(self, requests: list[MaskRequest], rows: list[int]) -> RuledRows:
        grammars = self._open.get()
        allowed = np.zeros((len(rows), grammars.row_bytes), np.uint8)
        problems = grammars.fill(requests, allowed)
        biases = _BIASES.take(allowed, axis=0).reshape(len(rows), -1)[:, : self._vocab_size]
        failed: dict[int, str] = {}
        for request in requests:
            if (problem := problems.get(request.row)) is not None:
                end = request.row + 1 + len(request.proposals)
                failed |= dict.fromkeys(rows[request.row : end], problem)
                biases[request.row : end] = 0.0
        return RuledRows(rows, biases, failed)

    # --- inside --------------------------------------------------------------------------------------

    def _settle(self, handle: int) -> Compiled:
        try:
            self._outputs[handle] = _Output(self._pending.pop(handle).result())
        except GrammarRefused as refused:
            return Compiled(handle, f"the constraint is refused: {refused}")
        except TokenizerUnusable as unusable:
            return Compiled(handle, f"this model's tokenizer cannot be constrained: {unusable}")
        return Compiled(handle)


class _Once:
    """Opens the grammars at the first use, in whatever thread; the others wait. A failure is kept too."""

    def __init__(self, open_grammars: OpenGrammars) -> None:
        self._open = open_grammars
        self._lock = threading.Lock()
        self._found: Grammars | TokenizerUnusable | None = None

    def get(self) -> Grammars:
        """Raises TokenizerUnusable."""
        with self._lock:
            if self._found is None:
                try:
                    self._found = self._open()
                except TokenizerUnusable as unusable:
                    self._found = unusable
            if isinstance(self._found, TokenizerUnusable):
                raise TokenizerUnusable(str(self._found))
            return self._found


def _rows(batch: Batch) -> Iterator[tuple[int, int, SequenceState, Sequence[int]]]:
    """Yield of each sampled sequence its first row, how many it has, and the proposals before the others."""
    row = 0
    for index, sequence in enumerate(batch.decodes):
        proposals = batch.proposals.get(index, ())
        yield row, 1 + len(proposals), sequence, proposals
        row += 1 + len(proposals)
    for chunk in batch.prefills:
        if chunk.samples:
            yield row, 1, chunk.sequence, ()
            row += 1


def _fitting(output: _Output, sequence: SequenceState, tokens: list[int]) -> list[int]:
    produced = output.unconsumed(sequence)
    try:
        output.matcher.consume(produced)
    except GrammarRefused:
        return []  # its mask fails for the same reason
    output.consumed += len(produced)
    ends = next((place for place, token in enumerate(tokens) if token in sequence.stop_ids), len(tokens))
    return tokens[: output.matcher.fitting(tokens[:ends])]
