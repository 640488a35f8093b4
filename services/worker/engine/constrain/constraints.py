"""The constrained outputs of one engine: grammars are compiled and masks computed in parallel to the steps.

A matcher follows its output: it consumes what was produced since its last mask, by any run. So a
resumed output is replayed, a preempted one goes on, and a step that is discarded leaves nothing behind. The
engine's thread owns the table; a matcher is used by one thread at a time, because masks are waited for before
their step is committed, and a sequence whose mask is computed separately is in no step.

A step waits for its masks, so what they take is bounded: those beyond the step's budget are late, and their
rows are computed again in the next step. An output whose masks take too much on average is slow: it is
computed in a separate thread of low priority, and its sequence waits for that without delaying others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from services.core.generation import Constraint
from services.ports.grammars import Bits, GrammarRefused, Grammars, MaskRequest, Matcher, TokenizerUnusable
from services.worker.engine.execute.executor import Batch, RuledRows, StepMasks
from services.worker.engine.sequence import SequenceState

# Processor time in seconds. A usual mask takes a tenth of SHARE_S; one may take a hundred times as much.
SHARE_S: Final = 0.0001  # average time that a mask may take
BURST_S: Final = 0.008  # time that an output may take beyond its shares
FIRST_S: Final = 0.004  # what a new output counts as having taken: those that are known to be quick go first
STEP_S: Final = 0.003  # time that a step may take beyond its shares


@dataclass(slots=True)
class _Output:
    """One constrained output. ``excess_s`` is a leaky bucket, which a slow output has filled."""

    matcher: Matcher
    # How many output tokens the matcher has.
    consumed: int = 0
    # What its masks took beyond SHARE_S each; at most twice BURST_S, so that a slow output can recover.
    excess_s: float = FIRST_S
    # Its next mask if that is computed separately, and why there is none.
    mask: tuple[Bits, str] | None = None

    @property
    def is_slow(self) -> bool:
        return self.excess_s > BURST_S

    def unconsumed(self, sequence: SequenceState) -> Sequence[int]:
        """Return the output tokens that the matcher does not have yet."""
        return sequence.tokens[sequence.prompt_tokens + self.consumed :]

    def took(self, spent_s: float, masks: int) -> None:
        """Count what masks took."""
        excess_s = self.excess_s + spent_s - masks * SHARE_S
        self.excess_s = min(max(0.0, excess_s), 2 * BURST_S)


@dataclass(frozen=True, slots=True)
class _OutputMasks:
    """Masks of an output in a step. ``waits``: the first of them is to be computed separately."""

    output: _Output
    request: MaskRequest
    waits: bool

    @property
    def places(self) -> range:
        """Return the places of its masks."""
        return range(self.request.row, self.request.row + 1 + len(self.request.proposals))


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar is ready, or is refused for a reason."""

    handle: int
    refusal: str = ""


class Constraints:
    """Single owner of the matchers, by handle."""

    def __init__(
        self,
        grammars: Grammars | TokenizerUnusable,
        *,
        compiling: Executor,
        masking: Executor,
        slow_masking: Executor,
        processor_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """Without grammars constraints are refused. ``processor_s`` is called in threads that fill masks."""
        self._found = grammars
        self._compiling = compiling
        self._masking = masking
        self._slow_masking = slow_masking
        self._processor_s = processor_s
        self._pending: dict[int, Future[Matcher]] = {}
        self._masks: dict[int, Future[tuple[Bits, str]]] = {}  # masks that are computed in the other process
        self._outputs: dict[int, _Output] = {}

    @property
    def any_pending(self) -> bool:
        """Whether a grammar is being compiled, or a mask computed separately."""
        return bool(self._pending or self._masks)

    def begin(self, handle: int, constraint: Constraint) -> None:
        """Start to compile the grammar of a new sequence."""
        self._pending[handle] = self._compiling.submit(self._compile, constraint)

    def take_compiled(self, *, timeout_s: float = 0.0) -> list[Compiled]:
        """Return the sequences whose grammars were compiled since the call before, in their order.

        With a timeout, wait so long for the first one, or for a mask that is computed separately.
        """
        if timeout_s > 0 and self.any_pending:
            pending: list[Future[Any]] = [*self._pending.values(), *self._masks.values()]
            wait(pending, timeout=timeout_s, return_when="FIRST_COMPLETED")
        done = [handle for handle, future in self._pending.items() if future.done()]
        return [self._settle(handle) for handle in done]

    def take_masked(self) -> list[int]:
        """Return the sequences whose masks were computed separately since the call before."""
        done = [handle for handle, future in self._masks.items() if future.done()]
        for handle in done:
            self._outputs[handle].mask = self._masks.pop(handle).result()
        return done

    def is_slow(self, handle: int) -> bool:
        """Whether the next mask of a sequence is to be computed separately."""
        output = self._outputs.get(handle)
        return handle in self._masks or (output is not None and output.is_slow)

    def mask_separately(self, sequence: SequenceState) -> None:
        """Start to compute the next mask of a sequence, if none is. ``take_masked`` returns it then."""
        if sequence.handle in self._masks:
            return
        output = self._outputs[sequence.handle]
        request = MaskRequest(output.matcher, 0, output.unconsumed(sequence))
        self._masks[sequence.handle] = self._slow_masking.submit(self._fill_one, output, request)

    def forget(self, handle: int) -> None:
        """Drop what is kept of a sequence; there may be nothing."""
        self._outputs.pop(handle, None)
        for pending in (self._pending, self._masks):
            if (future := pending.pop(handle, None)) is not None:
                future.cancel()

    def cut(
        self, decodes: Sequence[SequenceState], proposals: Mapping[int, list[int]]
    ) -> dict[int, list[int]]:
        """Return the proposals as far as grammars let them come next; those of other sequences as they are.

        A proposed end of sequence is left out: it would be the last anyway. Slow outputs have no proposals.
        """
        kept: dict[int, list[int]] = {}
        for index, tokens in proposals.items():
            sequence = decodes[index]
            output = self._outputs.get(sequence.handle)
            if output is None:
                kept[index] = tokens
            elif sequence.handle not in self._masks:
                kept[index] = _fitting(output, sequence, tokens)
        return {index: tokens for index, tokens in kept.items() if tokens}

    def masks(self, batch: Batch) -> StepMasks | None:
        """Start to compute the masks of a planned batch; None where no row has one."""
        if not self._outputs:
            return None
        rows: list[int] = []
        output_masks: list[_OutputMasks] = []
        for first, count, sequence, proposals in _rows(batch):
            output = self._outputs.get(sequence.handle)
            if output is None:
                continue
            # A sequence that was preempted meanwhile may be back before its mask is computed.
            waits = sequence.handle in self._masks or (output.is_slow and not sequence.is_suspect)
            request = MaskRequest(output.matcher, len(rows), output.unconsumed(sequence), proposals)
            output_masks.append(_OutputMasks(output, request, waits))
            rows += range(first, first + count)
        if not rows:
            return None
        return self._masking.submit(self._fill, output_masks, rows)

    # --- in other threads ----------------------------------------------------------------------------

    def _compile(self, constraint: Constraint) -> Matcher:
        return self._grammars.compile(constraint)

    def _fill(self, output_masks: list[_OutputMasks], rows: list[int]) -> RuledRows:
        allowed = np.zeros((len(rows), self._grammars.row_bytes), np.uint8)
        problems: dict[int, str] = {}
        late: list[int] = []
        left_s = STEP_S + SHARE_S * len(rows)
        for each in sorted(output_masks, key=lambda each: each.output.excess_s):
            first, output = each.request.row, each.output
            if output.mask is not None:
                allowed[first : first + 1], problem = output.mask
                output.mask = None
            elif each.waits or left_s <= 0.0:
                late += each.places
                continue
            else:
                problem, spent_s = self._fill_rows(output, each.request, allowed)
                left_s -= spent_s
            if problem:
                problems |= dict.fromkeys(each.places, problem)
        allowed[[*problems, *late]] = 0xFF
        failed = {rows[place]: problem for place, problem in problems.items()}
        return RuledRows(rows, allowed, failed, frozenset(rows[place] for place in late))

    def _fill_one(self, output: _Output, request: MaskRequest) -> tuple[Bits, str]:
        allowed = np.zeros((1, self._grammars.row_bytes), np.uint8)
        problem, _ = self._fill_rows(output, request, allowed)
        return allowed, problem

    def _fill_rows(self, output: _Output, request: MaskRequest, into: Bits) -> tuple[str, float]:
        """Set the masks of an output; return why it cannot go on, or "", and what they took in seconds."""
        began_s = self._processor_s()
        problems = self._grammars.fill([request], into)
        spent_s = self._processor_s() - began_s
        output.consumed += len(request.produced)
        output.took(spent_s, 1 + len(request.proposals))
        return problems.get(request.row, ""), spent_s

    # --- inside --------------------------------------------------------------------------------------

    @property
    def _grammars(self) -> Grammars:
        """Raises TokenizerUnusable."""
        if isinstance(self._found, TokenizerUnusable):
            raise TokenizerUnusable(str(self._found))
        return self._found

    def _settle(self, handle: int) -> Compiled:
        try:
            self._outputs[handle] = _Output(self._pending.pop(handle).result())
        except GrammarRefused as refused:
            return Compiled(handle, f"the constraint is refused: {refused}")
        except TokenizerUnusable as unusable:
            return Compiled(handle, f"this model's tokenizer cannot be constrained: {unusable}")
        return Compiled(handle)


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
    if output.is_slow or output.mask is not None:
        return []  # what follows proposals takes masks of its own
    produced = output.unconsumed(sequence)
    try:
        output.matcher.consume(produced)
    except GrammarRefused:
        return []  # its mask fails for the same reason
    output.consumed += len(produced)
    ends = next((place for place, token in enumerate(tokens) if token in sequence.stop_ids), len(tokens))
    return tokens[: output.matcher.fitting(tokens[:ends])]
