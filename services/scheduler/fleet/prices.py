"""Cost of work on one worker relative to the cheapest worker of its version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from services.scheduler.fleet.worker import WorkerState
from services.scheduler.policy.step_time import StepTimes, WorkerKind

_PRICED_STEP: Final = (1, 512, 32, 0)  # the work by which prices are compared


def price_pool(digest: str, workers: Iterable[WorkerState], step_times: StepTimes) -> None:
    """Set each worker's ratio for the version: the cheapest price over its own, 1 while its own is
    unknown."""
    prices = [(worker, _price_of(worker, digest, step_times)) for worker in workers]
    cheapest = min((price for _, price in prices if price), default=0.0)
    for worker, price in prices:
        worker.cost_ratios[digest] = cheapest / price if price else 1.0


def _price_of(worker: WorkerState, digest: str, step_times: StepTimes) -> float:
    """Return the price of a step of mixed work on the worker; 0 when unknown."""
    model = step_times.model(WorkerKind(worker.device_type, digest))
    return worker.cost_per_hour * model.seconds(*_PRICED_STEP)
