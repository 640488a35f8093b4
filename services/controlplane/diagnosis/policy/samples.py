"""Sampled requests as columns, and the parts of their latency.

Each part answers one question: did the request wait for the quota store, for room, for the network, for its
own prompt, for the prompts of others, for a step that took longer than its work? The parts of a request sum
to its latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from services.core.estimates.finished import FinishedRequest
from services.core.estimates.least_squares import NormalEquations, non_negative
from services.core.generation import StepTotals

Floats = npt.NDArray[np.float64]
Names = npt.NDArray[np.object_]
Mask = npt.NDArray[np.bool_]

STAGES: Final = ("validate", "admit", "queue", "dispatch", "engine_wait", "prefill", "decode", "send")
VALIDATE, ADMIT, QUEUE, DISPATCH, ENGINE_WAIT, PREFILL, DECODE, SEND = range(8)
_STEPS, _STEP_S, _PREFILL, _DECODE, _ATTENDED = range(5)
_FITTED: Final = 400  # requests whose steps are enough for a fit
_TRIMMED_RATIO: Final = 1.5  # workers whose steps take so much longer are left out of the fit


class Metric(StrEnum):
    TTFT = "ttft"
    ITL = "itl"
    TOTAL = "total"


class SpentOn(StrEnum):
    """What a request spent time on."""

    VALIDATE = "validate"
    ADMIT = "admit"
    QUEUE = "queue"
    NETWORK = "network"  # time to the worker and back; for rows, the wait for a slot too
    ENGINE_WAIT = "engine wait"  # time on the worker without a step
    BATCH_WAIT = "batch wait"  # time of rows until their batch started
    OWN_PREFILL = "own prefill"
    NEIGHBOURS = "prefill of neighbours"
    BATCH = "batch"  # steps without any prefill, as the baseline predicts them
    SLOWNESS = "slowness"  # time of steps beyond what their work takes in the baseline
    ROWS = "rows"  # time of the batch that answered rows
    READER = "reader"
    RETURNING = "returning"  # time without a slot that others had
    SEND = "send"


@dataclass(frozen=True, slots=True)
class FleetMoment:
    """What the control plane observed of the workers when reports arrived."""

    unix_s: float
    loading: tuple[str, ...] = ()  # workers that fetched or loaded a version
    ready: Mapping[str, int] = field(default_factory=dict)  # ready replicas by deployment


@dataclass(frozen=True, slots=True)
class RequestTable:
    """Requests that finished, in columns of one length. Times are seconds, steps those of ``StepTotals``."""

    ended_s: Floats
    weight: Floats
    stages: Floats  # (requests, 8)
    before: Floats  # (requests, 5): steps until the first token
    after: Floats  # (requests, 5): steps from then on
    prompt: Floats
    cached: Floats
    output: Floats
    prefill_s: Floats  # first prefill step to the first token, as the worker observed it
    blocked_s: Floats
    returning_s: Floats
    log_s: Floats
    preemptions: Floats
    batch_rows: Floats
    batch_width: Floats
    tenant: Names
    model: Names
    version: Names
    priority: Names
    worker: Names
    zone: Names
    worker_zone: Names
    gateway: Names

    def __len__(self) -> int:
        return len(self.ended_s)

    def where(self, mask: Mask) -> RequestTable:
        return replace(self, **{each.name: getattr(self, each.name)[mask] for each in fields(self)})

    def asked(self, name: str, value: str) -> Mask:
        """Return which requests have this value in a column; all without one."""
        return np.asarray(getattr(self, name) == value) if value else np.ones(len(self), bool)

    def metric(self, metric: Metric) -> Floats:
        """Return the latency of each request; of one without a second token, an ITL of 0."""
        return np.asarray(self.stage_parts(metric).sum(axis=1))

    def stage_parts(self, metric: Metric) -> Floats:
        """Return the stages of each request, which sum to its metric."""
        if metric is Metric.TTFT:
            return np.where(np.arange(len(STAGES)) < DECODE, self.stages, 0.0)
        if metric is Metric.ITL:
            itl = np.where(np.arange(len(STAGES)) == DECODE, self.stages, 0.0)
            return np.asarray(itl / np.maximum(1.0, self.output - 1)[:, None])
        return self.stages


def samples_of(requests: Sequence[FinishedRequest], zones: Mapping[str, str]) -> RequestTable:
    """Return the columns of the requests that did not fail. ``zones``: that of each worker."""
    found = [one for one in requests if not one.failed]

    def numbers(values: list[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    def names(values: list[str]) -> Names:
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return column

    def steps(sums: list[StepTotals]) -> Floats:
        table = np.array([astuple(one) for one in sums], dtype=np.float64).reshape(len(sums), 5)
        table[:, _STEP_S] /= 1e6
        return table

    stages = (
        np.array([astuple(one.clock)[1:] for one in found], dtype=np.float64).reshape(len(found), 8) / 1e6
    )
    return RequestTable(
        ended_s=numbers([one.ended_unix_us / 1e6 for one in found]),
        weight=numbers([one.weight or 1.0 for one in found]),
        stages=stages,
        before=steps([one.run.before for one in found]),
        after=steps([one.run.after for one in found]),
        prompt=numbers([one.usage.prompt_tokens for one in found]),
        cached=numbers([one.usage.cached_tokens for one in found]),
        output=numbers([one.usage.output_tokens for one in found]),
        prefill_s=numbers([one.run.prefill_us / 1e6 for one in found]),
        blocked_s=numbers([one.run.blocked_us / 1e6 for one in found]),
        returning_s=numbers([one.run.returning_us / 1e6 for one in found]),
        log_s=numbers([one.run.log_us / 1e6 for one in found]),
        preemptions=numbers([one.run.preemptions for one in found]),
        batch_rows=numbers([one.run.batch_rows for one in found]),
        batch_width=numbers([one.run.batch_width for one in found]),
        tenant=names([one.tenant for one in found]),
        model=names([one.model for one in found]),
        version=names([one.version_digest for one in found]),
        priority=names([one.priority.value for one in found]),
        worker=names([one.run.worker_id for one in found]),
        zone=names([one.zone for one in found]),
        worker_zone=names([zones.get(one.run.worker_id, "") for one in found]),
        gateway=names([one.gateway for one in found]),
    )


@dataclass(frozen=True, slots=True)
class FittedPrices:
    """Seconds of a step, a prompt token, a decoded token and a token that decodes read, in the baseline."""

    step_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    attended_s: float = 0.0

    def without_prefill(self, steps: Floats) -> Floats:
        found = self.step_s * steps[:, _STEPS] + self.decode_s * steps[:, _DECODE]
        return np.asarray(found + self.attended_s * steps[:, _ATTENDED])

    def predicted(self, steps: Floats) -> Floats:
        return self.without_prefill(steps) + self.prefill_s * steps[:, _PREFILL]


def fit_prices(baseline: RequestTable) -> FittedPrices:
    """Return the prices by non-negative least squares over the steps of requests in the baseline.

    Workers whose steps take ``_TRIMMED_RATIO`` times what the first fit predicts are left out of the second.
    """
    found = _fit(baseline)
    ratios = {worker: slowness(baseline, found, baseline.worker == worker) for worker in set(baseline.worker)}
    usual = float(np.median(list(ratios.values()))) if ratios else 1.0
    slow = [worker for worker, ratio in ratios.items() if ratio > _TRIMMED_RATIO * usual]
    return _fit(baseline.where(~np.isin(baseline.worker, slow))) if slow else found


def _fit(samples: RequestTable) -> FittedPrices:
    equations = NormalEquations.zero(4, 1.0)
    rows = np.concatenate([samples.before, samples.after])
    rows = rows[(rows[:, _STEPS] > 0) & (rows[:, _STEP_S] > 0)]
    for row in rows[:: max(1, len(rows) // _FITTED)]:
        equations.add((row[_STEPS], row[_PREFILL], row[_DECODE], row[_ATTENDED]), row[_STEP_S])
    if not len(rows):
        return FittedPrices()
    step_s, prefill_s, decode_s, attended_s = (value or 0.0 for value in non_negative([equations]).values)
    return FittedPrices(step_s, prefill_s, decode_s, attended_s)


def slowness(samples: RequestTable, prices: FittedPrices, mask: Mask) -> float:
    """Return the time of steps over the predicted time; 1 without any."""
    steps = samples.before[mask] + samples.after[mask]
    weight, predicted = samples.weight[mask], prices.predicted(steps)
    whole = float((weight * predicted).sum())
    return float((weight * steps[:, _STEP_S]).sum()) / whole if whole > 0 else 1.0


@dataclass(frozen=True, slots=True)
class SpentTimes:
    """The parts of each request's latency, in columns."""

    columns: Mapping[SpentOn, Floats]

    def __getitem__(self, part: SpentOn) -> Floats:
        return self.columns[part]

    @property
    def total(self) -> Floats:
        return np.asarray(sum(self.columns.values()))


def parts_of(samples: RequestTable, metric: Metric, prices: FittedPrices) -> SpentTimes:
    """Return the parts; they sum to the metric."""
    stage, empty = samples.stages, np.zeros(len(samples))
    found: dict[SpentOn, Floats] = dict.fromkeys(SpentOn, empty)
    is_rows = samples.batch_rows > 0
    if metric is not Metric.ITL:
        found[SpentOn.VALIDATE], found[SpentOn.ADMIT] = stage[:, VALIDATE], stage[:, ADMIT]
        found[SpentOn.QUEUE] = stage[:, QUEUE]
        network = np.maximum(0.0, stage[:, PREFILL] - samples.prefill_s)
        found[SpentOn.NETWORK] = stage[:, DISPATCH] + network
        computed = stage[:, PREFILL] - network
        found[SpentOn.ROWS] = np.where(is_rows, computed, 0.0)
        found[SpentOn.BATCH_WAIT] = np.where(is_rows, stage[:, ENGINE_WAIT], 0.0)
        own = np.minimum(samples.prompt - samples.cached, samples.before[:, _PREFILL])
        spent_s = np.where(is_rows, 0.0, stage[:, ENGINE_WAIT] + computed)
        _add_steps(found, samples.before, spent_s, np.maximum(0.0, own), prices)
    if metric is not Metric.TTFT:
        reader = np.minimum(samples.blocked_s, stage[:, DECODE])
        returning = np.minimum(samples.returning_s, stage[:, DECODE] - reader)
        found[SpentOn.READER], found[SpentOn.RETURNING] = reader, returning
        _add_steps(found, samples.after, stage[:, DECODE] - reader - returning, empty, prices)
    if metric is Metric.TOTAL:
        found[SpentOn.SEND] = stage[:, SEND]
    if metric is Metric.ITL:
        gaps = np.maximum(1.0, samples.output - 1)
        found = {part: column / gaps for part, column in found.items()}
    return SpentTimes(found)


def _add_steps(
    found: dict[SpentOn, Floats], steps: Floats, spent_s: Floats, own: Floats, prices: FittedPrices
) -> None:
    """Divide the time spent on a worker by the work of the steps in it.

    Steps that reach beyond the interval count in proportion; what no step covers is a wait.
    """
    step_s = steps[:, _STEP_S]
    within = np.where(step_s > spent_s, spent_s / np.where(step_s > 0, step_s, 1.0), 1.0)
    found[SpentOn.OWN_PREFILL] = found[SpentOn.OWN_PREFILL] + within * prices.prefill_s * own
    others = np.maximum(0.0, steps[:, _PREFILL] - own)
    found[SpentOn.NEIGHBOURS] = found[SpentOn.NEIGHBOURS] + within * prices.prefill_s * others
    found[SpentOn.BATCH] = found[SpentOn.BATCH] + within * prices.without_prefill(steps)
    beyond = step_s - prices.without_prefill(steps) - prices.prefill_s * (own + others)
    found[SpentOn.SLOWNESS] = found[SpentOn.SLOWNESS] + within * beyond
    found[SpentOn.ENGINE_WAIT] = found[SpentOn.ENGINE_WAIT] + spent_s - within * step_s
