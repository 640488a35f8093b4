"""How the duration of an engine step is shared over the sequences in it. Pure: the caller supplies the times.

The duration is modelled as in the scheduler's step times and the simulator's cost model:

    step_s = base + decode rows * a + KV tokens they read * b + prompt tokens * c + tokens before them * d
             + scored prompt tokens * e

A sequence weighs what it adds to the step: a decode its rows and its context, a prefill chunk its tokens, the
tokens before each of them, and those that it scores: the head of the model computes their log-probabilities.
The base, which all of them need, weighs equally on each sequence. The weights are scaled to the
measured duration, so that the shares of a step sum to it. The coefficients are fitted to the engine's own
steps; only their ratios matter.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from services.core.estimates.least_squares import NormalEquations, non_negative

MIN_SAMPLES: Final = 8.0  # fewest samples before the fit is used
MAX_ERROR_RATIO: Final = 0.5  # largest error of a fit that is used
FIT_S: Final = 2.0  # step time between two fits
_LEAST_S: Final = 1e-12  # least cost of a step that its work can be weighed by
_SAMPLE_S: Final = 0.01  # least step time of a sample
_KEEP_RATIO: Final = 0.998  # per sample: the fit covers about five hundred


class StepCosts(NamedTuple):
    """Seconds per step, decode row, KV token that a decode reads, prompt token, token before it, and scored
    prompt token."""

    step_s: float
    row_s: float
    attended_s: float
    prefill_s: float
    prefill_attended_s: float
    scored_s: float


# Costs before there are enough samples, which are the scheduler's prior: a prompt token costs a decode row.
PRIOR: Final = StepCosts(10e-3, 50e-6, 0.0, 50e-6, 0.0, 50e-6)


class StepWork(NamedTuple):
    """What the sequences of a step compute together, or of several steps with the same decodes on average.

    ``sequences`` counts decodes and prefill chunks; ``rows`` counts one for each decode and proposal.
    """

    sequences: int
    rows: int = 0
    attended: float = 0.0  # tokens of KV that the decodes read
    prefill: int = 0  # prompt tokens
    prefill_attended: int = 0  # sum over the prompt tokens of the tokens before each
    scored: int = 0  # prompt tokens whose log-probabilities are computed


class StepPrices(NamedTuple):
    """Charges in one step, in seconds, of each sequence and of each unit of its work."""

    sequence_s: float
    row_s: float
    attended_s: float
    prefill_s: float
    prefill_attended_s: float
    scored_s: float

    def decode(self, rows: int, length: int) -> float:
        """Return the share of a sequence of ``length`` tokens that computes ``rows`` rows."""
        return self.sequence_s + rows * self.row_s + length * self.attended_s

    def chunk(self, start: int, end: int, scored: int = 0) -> float:
        """Return the share of a prefill of the positions ``start`` to ``end`` that scores ``scored`` of
        them."""
        attended = attended_before(start, end)
        computed_s = (end - start) * self.prefill_s + attended * self.prefill_attended_s
        return self.sequence_s + computed_s + scored * self.scored_s


def attended_before(start: int, end: int) -> int:
    """Return the sum over positions ``start`` to ``end`` of the tokens before each."""
    return (start + end - 1) * (end - start) // 2


def prices(costs: StepCosts, work: StepWork, step_s: float) -> StepPrices:
    """Return the prices at which the shares of a step with any sequence sum to ``step_s``."""
    base, row, attended, prefill, prefill_attended, scored = costs
    weight = base + work.rows * row + work.attended * attended
    if work.prefill:
        weight += work.prefill * prefill + work.prefill_attended * prefill_attended + work.scored * scored
    if weight < _LEAST_S:  # The fit found no cost for this kind of work.
        return prices(PRIOR, work, step_s)
    unit = step_s / weight
    return StepPrices(
        unit * base / work.sequences,
        unit * row,
        unit * attended,
        unit * prefill,
        unit * prefill_attended,
        unit * scored,
    )


class MeasuredCosts:
    """The costs of an engine's steps, fitted while it runs. Steps without prefill, with it, and with scored
    tokens are sampled separately, since only the differences between them show what such tokens cost."""

    def __init__(self, costs: StepCosts = PRIOR) -> None:
        """``costs`` holds until there are enough samples."""
        self.costs = costs
        self._equations = NormalEquations.zero(len(PRIOR), _KEEP_RATIO)
        self._decoded = _Sample()
        self._mixed = _Sample()
        self._scored = _Sample()
        self._unfitted_s = 0.0

    def add(self, work: StepWork, step_s: float, steps: int = 1) -> None:
        """Add ``steps`` steps that took ``step_s`` together, with ``work`` in each on average."""
        sample = self._decoded
        if work.prefill:
            sample = self._scored if work.scored else self._mixed
        sample.step_s += step_s
        sums = sample.work
        sums[0] += steps
        sums[1] += steps * work.rows
        sums[2] += steps * work.attended
        if work.prefill:
            sums[3] += steps * work.prefill
            sums[4] += steps * work.prefill_attended
            sums[5] += steps * work.scored
        if sample.step_s < _SAMPLE_S:
            return
        self._equations.add(sample.work, sample.step_s)
        self._unfitted_s += sample.step_s
        sample.clear()
        if self._unfitted_s >= FIT_S:
            self._unfitted_s = 0.0
            self._fit()

    def _fit(self) -> None:
        solution = non_negative([self._equations])
        if solution.samples < MIN_SAMPLES or solution.error_ratio > MAX_ERROR_RATIO:
            return
        step_s, row_s, attended_s, prefill_s, prefill_attended_s, scored_s = solution.values
        if row_s is None or prefill_s is None:  # The linear layers compute both in the same way.
            row_s = prefill_s = row_s if row_s is not None else prefill_s
        if scored_s is None:
            scored_s = row_s  # It counts as any other row whose head is computed.
        values = (step_s, row_s, attended_s, prefill_s, prefill_attended_s, scored_s)
        self.costs = StepCosts(*(value or 0.0 for value in values))


class _Sample:
    """Work and time of steps of one kind. ``work`` is in the order of ``StepCosts``."""

    __slots__ = ("step_s", "work")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.step_s = 0.0
        self.work = [0.0] * len(PRIOR)
