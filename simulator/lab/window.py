"""``python -m simulator window FILE``: the requests of a diagnosed window, replayed on simulated fleets.

``fairway diagnose --samples FILE`` writes the file. The result is one line of JSON: the quantile as it was,
and without each cause that ``WITHOUT`` has.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from google.protobuf.json_format import Parse, ParseError

from fairway.v1 import controlplane_pb2 as cp
from services.controlplane.diagnosis.policy.samples import FittedPrices, Metric, samples_of, slowness
from services.controlplane.diagnosis.policy.suspects import CauseKind
from services.core.estimates.cost_model import TINY_CPU, CostModel, encode, slowed
from services.core.estimates.finished import FinishedRequest
from services.rpc.convert.slis import finished_from_proto
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.fleet import simulate
from simulator.fleet.spec import FleetSpec, TenantSpec, WorkerSpec

MAX_FILE_BYTES: Final = 16 * 1024 * 1024
MAX_REQUESTS: Final = 10_000
MAX_WORKERS: Final = 1024
MAX_RUNS: Final = 9  # an answer has at most 8 causes
_KV_TOKENS: Final = 2**20  # a window has no record of KV: there is always room


@dataclass(frozen=True, slots=True)
class Run:
    """``workers``: the ratio of each one's step times to the prices of the answer."""

    load: Sequence[SimRequest]
    workers: Mapping[str, float]
    slots: int  # sequences of a worker at once


def runs_of(answer: cp.DiagnoseLatencyResponse) -> dict[str, Run]:
    """Return the window as it was, and as it would be without each cause. Raises ValueError."""
    window, usual = (
        [finished_from_proto(one) for one in samples.requests if one.model == answer.model]
        for samples in (answer.window_samples, answer.baseline_samples)
    )
    table, prices = samples_of(window, {}), _prices(answer)
    ratios = {name: slowness(table, prices, table.worker == name) for name in sorted(set(table.worker))}
    workers = {name: min(100.0, max(0.01, ratio)) for name, ratio in ratios.items()}
    was = Run(_load(window), workers, _slots(window))
    causes = [cause for cause in answer.causes if cause.kind in WITHOUT]
    for name, count, most in (
        ("workers", len(workers), MAX_WORKERS),
        ("requests", len(was.load), MAX_REQUESTS),
        ("runs", 1 + len(causes), MAX_RUNS),
    ):
        if not 1 <= count <= most:
            raise ValueError(f"the window has {count} {name}; 1 to {most} are replayed")
    found = {"as it was": was}
    for cause in causes:
        mine, its = ([one for one in side if one.tenant == cause.subject] for side in (usual, window))
        ratio = _rate(mine, answer.baseline) / max(1e-9, _rate(its, answer.window))
        without = WITHOUT[cause.kind](was, cause.subject, mine or usual, ratio)
        found[f"without {cause.kind} {cause.subject}"] = without
    return found


def _prices(answer: cp.DiagnoseLatencyResponse) -> FittedPrices:
    if len(answer.step_prices) != 4:
        raise ValueError(f"the answer has {len(answer.step_prices)} prices of a step in place of 4")
    return FittedPrices(*answer.step_prices)


def _load(window: Iterable[FinishedRequest]) -> list[SimRequest]:
    """Return the arrivals: a sample that stands for several requests arrives as often, a little apart.

    Of too many, the last are kept: a part of each moment's would be less load for the same workers. The
    first arrives at 0, for a window has requests that began before it.
    """
    rng = Random(0)
    prefixes = {name: place for place, name in enumerate(sorted({one.tenant for one in window}), 1)}
    found = [
        (one.clock.received_unix_us / 1e6 + rng.random() * (copy > 0), one)
        for one in window
        if not one.failed and one.usage.output_tokens
        for copy in range(max(1, round(one.weight)))
    ]
    kept = sorted(found, key=lambda arrival: arrival[0])[-MAX_REQUESTS:]
    return [
        SimRequest(
            tenant=one.tenant,
            prompt_tokens=max(1, one.usage.prompt_tokens),
            output_tokens=one.usage.output_tokens,
            arrival_s=at_s - kept[0][0],
            priority=one.priority,
            prefix_id=prefixes[one.tenant],
            prefix_tokens=one.usage.cached_tokens,
        )
        for at_s, one in kept
    ]


def _slots(window: Iterable[FinishedRequest]) -> int:
    """Return how many sequences a worker runs at once: where requests queue, as many as were seen."""
    seen = queued = total = 0.0
    for one in window:
        seen = max(seen, one.run.after.decode_tokens / max(1, one.run.after.steps))
        queued += one.clock.queue_us
        total += one.total_us
    return max(1, round(seen)) if queued > 0.05 * total else 256


def _rate(requests: Iterable[FinishedRequest], span: cp.DiagnosedSpan) -> float:
    lasted_s: float = span.covered_s or span.to.seconds - getattr(span, "from").seconds
    return sum(one.weight or 1.0 for one in requests) / max(1, lasted_s)


# --- without a cause ---------------------------------------------------------------------------------

Usual = Sequence[FinishedRequest]
# It is called with the run, the subject, the baseline's requests of it, and their rate over the window's.
Without = Callable[[Run, str, Usual, float], Run]


def _fewer(run: Run, tenant: str, usual: Usual, ratio: float) -> Run:
    """Return as many requests of the tenant as in the baseline."""
    rng = Random(1)
    return replace(run, load=[one for one in run.load if one.tenant != tenant or rng.random() < ratio])


def _lengths(name: str) -> Without:
    def changed(run: Run, tenant: str, usual: Usual, ratio: float) -> Run:
        """Return the tenant's requests with lengths drawn from the baseline's."""
        rng = Random(2)
        load = [
            replace(one, **{name: max(1, getattr(rng.choice(usual).usage, name))})
            if one.tenant == tenant and usual
            else one
            for one in run.load
        ]
        return replace(run, load=load)

    return changed


def _cached(run: Run, subject: str, usual: Usual, ratio: float) -> Run:
    """Return requests with the baseline's ratio of cached tokens, of a tenant or of all."""
    tenants = {one.tenant for one in run.load}
    prompts = sum(one.usage.prompt_tokens for one in usual)
    hits = sum(one.usage.cached_tokens for one in usual) / prompts if prompts else 0.0
    load = [
        replace(one, prefix_tokens=round(hits * one.prompt_tokens))
        if one.tenant == subject or subject not in tenants
        else one
        for one in run.load
    ]
    return replace(run, load=load)


def _like_peers(run: Run, subject: str, usual: Usual, ratio: float) -> Run:
    """Return the worker at its peers' speed; for a version, every worker at the baseline's."""
    if subject not in run.workers:
        return replace(run, workers={name: min(1.0, ratio) for name, ratio in run.workers.items()})
    peers = sorted(ratio for name, ratio in run.workers.items() if name != subject) or [1.0]
    return replace(run, workers={**run.workers, subject: peers[len(peers) // 2]})


WITHOUT: Final[Mapping[str, Without]] = {
    CauseKind.ARRIVALS_GREW: _fewer,
    CauseKind.NOISY_NEIGHBOUR: _fewer,
    CauseKind.PROMPTS_GREW: _lengths("prompt_tokens"),
    CauseKind.OUTPUTS_GREW: _lengths("output_tokens"),
    CauseKind.CACHE_HITS_FELL: _cached,
    CauseKind.SLOW_WORKER: _like_peers,
    CauseKind.SLOW_VERSION: _like_peers,
    CauseKind.VERSION_LOAD: _like_peers,
}


# --- a run -------------------------------------------------------------------------------------------


def quantile_of(answer: cp.DiagnoseLatencyResponse, run: Run, folder: Path) -> float:
    """Return the quantile of a run; 0 without a request that finished. ``folder`` receives cost models."""
    metric, costs = Metric(answer.metric), _costs(_prices(answer))
    kinds = []
    for place, ratio in enumerate(run.workers.values()):
        path = folder / f"worker-{place}.json"
        path.write_bytes(encode(slowed(costs, ratio)))
        kinds.append(WorkerSpec(str(path), _KV_TOKENS // 16, 16, run.slots))
    longest = max((one.prompt_tokens + one.output_tokens for one in run.load), default=0)
    spec = FleetSpec(
        workers=len(kinds),
        worker_kinds=tuple(kinds),
        tenants=tuple(TenantSpec(name) for name in sorted({one.tenant for one in run.load})),
        max_context_tokens=max(4096, 2 * longest),
        idempotency=False,
    )
    found: list[float] = []

    def ended(record: RequestRecord) -> None:
        if record.finished and record.ttft_s is not None:
            decode_s = record.last_token_s - record.first_token_s
            gaps = max(1, record.output_tokens - 1)
            values = {"ttft": record.ttft_s, "itl": decode_s / gaps, "total": record.ttft_s + decode_s}
            found.append(values[metric])

    simulate(spec, iter(sorted(run.load, key=lambda one: one.arrival_s)), on_record=ended)
    found.sort()
    return found[min(len(found) - 1, int(answer.quantile * len(found)))] if found else 0.0


def _costs(prices: FittedPrices) -> CostModel:
    return replace(
        TINY_CPU,
        name="window",
        base_s=max(1e-6, prices.step_s),
        prefill_token_s=prices.prefill_s,
        decode_sequence_s=prices.decode_s,
        attended_token_s=prices.attended_s,
    )


def read_answer(path: Path) -> cp.DiagnoseLatencyResponse:
    """Return what a file has. Raises ValueError for anything else, OSError."""
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return Parse(text, cp.DiagnoseLatencyResponse(), ignore_unknown_fields=True)
    except (ParseError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no diagnosis: {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Replay the window of a file; the result is the exit status: 2 for a wrong use."""
    if len(arguments) != 1:
        print("error: name one file, as `fairway diagnose --samples FILE` writes it", file=sys.stderr)
        return 2
    try:
        answer = read_answer(Path(arguments[0]))
        with tempfile.TemporaryDirectory() as folder:
            found = {name: quantile_of(answer, run, Path(folder)) for name, run in runs_of(answer).items()}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0
