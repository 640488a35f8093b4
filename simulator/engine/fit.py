"""A linear step-time model from measured work: non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from simulator.engine.cost_model import CostModel

MIN_OBSERVATIONS: Final = 6


@dataclass(frozen=True, slots=True)
class Observation:
    """Work done together, one step or many: ``seconds`` is the sum of its steps' durations."""

    steps: int
    prefill_tokens: int
    decode_tokens: int
    attended_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """``median_error`` and ``p90_error`` are |predicted - measured| / measured over the observations.

    ``held_out_error`` is the median of it when each observation is predicted by a fit to all the others.
    """

    model: CostModel
    observations: int
    median_error: float
    p90_error: float
    held_out_error: float


class NotEnough(Exception):
    """The observations do not determine a model; the message names what is missing."""


def fit(observations: Sequence[Observation], like: CostModel, *, name: str) -> Fit:
    """Return the linear model nearest to what was measured, with the sizes of ``like``. Raises NotEnough.

    seconds = base * steps + prefill * prompt tokens + decode * decoded tokens + attended * KV tokens read.
    Each row is divided by its seconds, so that short and long ones count equally. A unit of work takes no
    negative time (Lawson and Hanson's problem NNLS); four unknowns have sixteen active sets, all of which
    are tried.
    """
    seen = [row for row in observations if row.steps > 0 and row.seconds > 0.0]
    if len(seen) < MIN_OBSERVATIONS:
        raise NotEnough(f"{len(seen)} measurements with steps in them; {MIN_OBSERVATIONS} are needed")
    work = np.array(
        [[row.steps, row.prefill_tokens, row.decode_tokens, row.attended_tokens] for row in seen], dtype=float
    )
    seconds = np.array([row.seconds for row in seen])
    rows = work / seconds[:, None]
    for column, what in ((1, "prompt tokens"), (2, "decoded tokens")):
        if not work[:, column].any():
            raise NotEnough(f"no measurement has {what}")
    times = _non_negative(rows)
    if times[0] <= 0.0:
        raise NotEnough("steps seem to take no time of their own: measure small batches too")
    errors = np.abs(rows @ times - 1.0)
    held_out = [
        abs(float(rows[index] @ _non_negative(np.delete(rows, index, axis=0))) - 1.0)
        for index in range(len(rows))
    ]
    model = replace(
        like,
        name=name,
        base_s=float(times[0]),
        prefill_token_s=float(times[1]),
        decode_sequence_s=float(times[2]),
        attended_token_s=float(times[3]),
        weight_read_s=0.0,
        prefill_attended_token_s=0.0,
    )
    return Fit(
        model,
        len(seen),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        held_out_error=float(np.median(held_out)),
    )


_Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]
_Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


def _non_negative(rows: _Matrix) -> _Vector:
    """Return x >= 0 that is nearest to ``rows @ x == 1``."""
    ones = np.ones(len(rows))
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)  # columns differ by orders of magnitude
    scaled = rows / scale
    columns = rows.shape[1]
    best: _Vector = np.zeros(columns)
    best_residual = float(np.sum(ones))
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)
            if (part < 0.0).any():
                continue
            residual = float(np.sum((scaled[:, chosen] @ part - 1.0) ** 2))
            if residual < best_residual - 1e-15:
                best_residual = residual
                best = np.zeros(columns)
                best[list(chosen)] = part
    solution: _Vector = best / scale
    return solution
