"""A diagnosed window replayed in the simulator: as it was, and without each suspect.

It runs in a process of its own beside this command, since the services do not contain the simulator and a
control plane that leads must not compute for seconds.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from fairway.v1 import common_pb2, slis_pb2
from fairway.v1 import controlplane_pb2 as cp

MAX_REPLAYED: Final = 2  # causes
MAX_REQUESTS: Final = 10_000
TIMEOUT_S: Final = 120.0
AS_IT_WAS: Final = "as it was"
LEAST_EFFECT: Final = 0.9  # the quantile without a cause is below this ratio of that with it
_PRIORITIES: Final = {
    common_pb2.PRIORITY_BATCH: "batch",
    common_pb2.PRIORITY_INTERACTIVE: "interactive",
}
_QUEUE: Final = 2  # place of the stage
Request = dict[str, Any]


def replay(found: cp.DiagnoseLatencyResponse) -> None:
    """Replay the window of an answer with its samples, and add to each cause what came of it.

    Where nothing was replayed the evidence has the reason, and the score of what might have been is lower.
    """
    tested = [cause for cause in found.causes[:MAX_REPLAYED] if cause.kind in _WITHOUT]
    for cause in found.causes:
        if cause.kind not in _WITHOUT:
            cause.evidence.append("not replayed: the simulator has no such part")
    if not tested:
        return
    problem, quantiles = _quantiles(found, tested)
    if problem:
        for cause in tested:
            cause.score *= 0.9
            cause.evidence.append(f"not replayed: {problem}")
        return
    with_s = quantiles[AS_IT_WAS]
    for cause in tested:
        without_s = quantiles[_name(cause)]
        cause.replayed_s, cause.replayed_without_s = with_s, without_s
        text = f"replayed in the simulator: {with_s * 1e3:.3g} ms with it, {without_s * 1e3:.3g} ms without"
        if without_s > LEAST_EFFECT * with_s:
            cause.score *= 0.5
            text += ": the replay does not need it"
        cause.evidence.append(text)
    ranked = sorted(found.causes, key=lambda cause: -cause.score)
    causes = [cp.DiagnosedCause.FromString(cause.SerializeToString()) for cause in ranked]
    found.ClearField("causes")
    found.causes.extend(causes)


def _name(cause: cp.DiagnosedCause) -> str:
    return f"without {cause.kind} {cause.subject}"


def _quantiles(
    found: cp.DiagnoseLatencyResponse, causes: Sequence[cp.DiagnosedCause]
) -> tuple[str, dict[str, float]]:
    """Return why nothing was replayed, or the quantile of each run."""
    if importlib.util.find_spec("simulator") is None:
        return "the simulator is not installed beside this command", {}
    window = window_of(found, causes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "window.json"
        path.write_text(json.dumps(window), encoding="utf-8")
        child = [sys.executable, "-P", "-m", "simulator", "window", str(path)]
        try:
            ran = subprocess.run(child, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"the simulation took more than {TIMEOUT_S:g} s", {}
    try:
        quantiles = json.loads(ran.stdout) if not ran.returncode else {}
    except ValueError:
        quantiles = {}
    names = {AS_IT_WAS, *map(_name, causes)}
    if not names <= quantiles.keys() or not quantiles[AS_IT_WAS]:
        return f"the simulation failed: {ran.stderr.strip()[-200:] or 'nothing finished'}", {}
    return "", quantiles


def window_of(found: cp.DiagnoseLatencyResponse, causes: Sequence[cp.DiagnosedCause]) -> dict[str, Any]:
    """Return what the simulator replays: the window as it was, and as it would be without each cause."""
    window = [one for one in found.window_samples.requests if one.model == found.model]
    usual = [one for one in found.baseline_samples.requests if one.model == found.model]
    requests = _requests(window, getattr(found.window, "from").ToSeconds())
    workers = _workers(window, found.step_prices)
    lasted = [
        float(max(1, span.to.ToSeconds() - getattr(span, "from").ToSeconds()))
        for span in (found.baseline, found.window)
    ]
    runs = [{"name": AS_IT_WAS, "workers": list(workers.values()), "requests": requests}]
    for cause in causes:
        usual_requests = [one for one in usual if one.tenant == cause.subject]
        ratio = sum(one.weight or 1.0 for one in usual_requests) / lasted[0]
        now = sum(one.weight or 1.0 for one in window if one.tenant == cause.subject) / lasted[1]
        changed, changed_workers = _WITHOUT[cause.kind](
            requests, workers, cause.subject, usual_requests or usual, min(1.0, ratio / max(1e-9, now))
        )
        runs.append({"name": _name(cause), "workers": changed_workers, "requests": changed})
    return {
        "metric": found.metric,
        "quantile": found.quantile,
        "prices": list(found.step_prices),
        "slots": _slots(window),
        "runs": runs,
    }


def _requests(window: Iterable[slis_pb2.FinishedRequest], begin_s: float) -> list[Request]:
    """Return the arrivals: a sample that stands for several requests arrives as often, a little apart."""
    rng = random.Random(0)
    found = [
        {
            "at_s": max(0.0, one.received_unix_us / 1e6 - begin_s) + rng.random() * (copy > 0),
            "tenant": one.tenant,
            "prompt": one.prompt_tokens,
            "output": one.output_tokens,
            "prefix": one.cached_tokens,
            "priority": _PRIORITIES.get(one.priority, "standard"),
            "worker": one.run.worker_id,
            "version": one.version_digest,
        }
        for one in window
        if one.reason == "FINISHED" and one.output_tokens
        for copy in range(max(1, round(one.weight)))
    ]
    return found[:: max(1, -(-len(found) // MAX_REQUESTS))]


def _workers(window: Iterable[slis_pb2.FinishedRequest], prices: Sequence[float]) -> dict[str, float]:
    """Return the time of each worker's steps over what the baseline's prices predict."""
    spent, predicted = defaultdict[str, float](float), defaultdict[str, float](float)
    for one in window:
        for steps in (one.run.before, one.run.after):
            work = steps.steps, steps.prefill_tokens, steps.decode_tokens, steps.attended_tokens
            spent[one.run.worker_id] += steps.step_us / 1e6
            predicted[one.run.worker_id] += sum(
                price * count for price, count in zip(prices, work, strict=True)
            )
    return {
        worker: min(100.0, max(0.01, spent[worker] / predicted[worker])) if predicted[worker] else 1.0
        for worker in sorted(spent)
    }


def _slots(window: Iterable[slis_pb2.FinishedRequest]) -> int:
    """Return how many sequences a worker runs at once: where requests queue, as many as were seen."""
    seen = queued = total = 0.0
    for one in window:
        seen = max(seen, one.run.after.decode_tokens / max(1, one.run.after.steps))
        queued += one.stages_us[_QUEUE] if len(one.stages_us) > _QUEUE else 0
        total += sum(one.stages_us)
    return max(1, round(seen)) if queued > 0.05 * total else 256


# --- without a cause ---------------------------------------------------------------------------------

Usual = Sequence[slis_pb2.FinishedRequest]
Changed = tuple[list[Request], list[float]]


def _fewer(
    requests: list[Request], workers: dict[str, float], tenant: str, usual: Usual, ratio: float
) -> Changed:
    """Return as many requests of the tenant as in the baseline."""
    rng = random.Random(1)
    kept = [one for one in requests if one["tenant"] != tenant or rng.random() < ratio]
    return kept, list(workers.values())


def _lengths(field: str, name: str) -> Callable[..., Changed]:
    def changed(
        requests: list[Request], workers: dict[str, float], tenant: str, usual: Usual, ratio: float
    ) -> Changed:
        """Return the tenant's requests with lengths drawn from the baseline's."""
        rng = random.Random(2)
        return [
            {**one, name: getattr(rng.choice(usual), field)} if one["tenant"] == tenant and usual else one
            for one in requests
        ], list(workers.values())

    return changed


def _cached(
    requests: list[Request], workers: dict[str, float], subject: str, usual: Usual, ratio: float
) -> Changed:
    """Return requests with the baseline's ratio of cached tokens, of a tenant or of all."""
    tenants = {one["tenant"] for one in requests}
    prompts = sum(one.prompt_tokens for one in usual)
    hits = sum(one.cached_tokens for one in usual) / prompts if prompts else 0.0
    return [
        {**one, "prefix": round(hits * one["prompt"])}
        if one["tenant"] == subject or subject not in tenants
        else one
        for one in requests
    ], list(workers.values())


def _like_peers(
    requests: list[Request], workers: dict[str, float], subject: str, usual: Usual, ratio: float
) -> Changed:
    """Return the worker at its peers' speed; for a version, every worker at the baseline's."""
    if subject in workers:
        peers = sorted(ratio for worker, ratio in workers.items() if worker != subject) or [1.0]
        return requests, [
            peers[len(peers) // 2] if worker == subject else ratio for worker, ratio in workers.items()
        ]
    return requests, [min(1.0, ratio) for ratio in workers.values()]


_WITHOUT: Final[dict[str, Callable[..., Changed]]] = {
    "arrivals_grew": _fewer,
    "noisy_neighbour": _fewer,
    "prompts_grew": _lengths("prompt_tokens", "prompt"),
    "outputs_grew": _lengths("output_tokens", "output"),
    "cache_hits_fell": _cached,
    "slow_worker": _like_peers,
    "slow_version": _like_peers,
    "version_load": _like_peers,
}
