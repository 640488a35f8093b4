"""Requests of two arms as recorded traces have them: sessions, lengths, load, errors, latencies.

Sizes of sessions, lengths with their variance between and within sessions, and the load by minute are fitted
to recorded traces (``bench.gating.fit``). Latencies follow from lengths and load, which both arms share;
sessions differ beyond that. Errors come in sessions too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.core.arms import (
    CLUSTERS,
    PROMPT_SIZES,
    SKETCH_ERROR_RATIO,
    ArmWindow,
    SliSums,
    prompt_size,
)

MODEL_FILE: Final = Path(__file__).with_name("noise.json")
_GAPS: Final = 4  # sampled between tokens of a request
_LOG_RATIO: Final = np.log((1 + SKETCH_ERROR_RATIO) / (1 - SKETCH_ERROR_RATIO))

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Regression:
    """How a candidate is worse: factors, and the ratio of requests that end with an error."""

    ttft: float = 1.0
    itl: float = 1.0
    cost: float = 1.0
    output: float = 1.0
    error_ratio: float = 0.002


NONE: Final = Regression()


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one arm in the order of their sessions. ``session``: 64-bit hashes."""

    session: npt.NDArray[np.uint64]
    order: Numbers  # number of the session
    failed: Flags
    broken: Flags
    ttft_s: Floats
    gap_s: Floats  # by request and sample
    prompt: Numbers
    output: Numbers
    device_s: Floats


@cache
def _model() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MODEL_FILE.read_text())
    return found


def draw(
    rng: np.random.Generator, sessions: int, regression: Regression = NONE, *, times: int = 1
) -> Requests:
    """Return the requests of as many sessions, each ``times`` as long as in the traces."""
    model = _model()
    sizes = np.array([int(size) for size in model["session_sizes"]])
    weights = np.array(list(model["session_sizes"].values()), dtype=float)
    turns = times * rng.choice(sizes, size=sessions, p=weights / weights.sum())
    order = np.repeat(np.arange(sessions), turns)
    count = len(order)
    prompt = _lengths(rng, model["log_prompt_tokens"], sessions, order)
    output = np.maximum(1, _lengths(rng, model["log_output_tokens"], sessions, order) * regression.output)
    load = _loads(rng, np.array(model["load_by_minute"]), sessions, turns)
    own = np.exp(rng.normal(0, 0.2, sessions))[order]  # of the session: its network, its cached prefix
    wait_s = rng.exponential(0.15, count) * load**3
    ttft_s = (0.03 + prompt / 20_000 * load * own) * np.exp(rng.normal(0, 0.1, count)) + wait_s
    pace_s = 0.02 * np.sqrt(load) * own**0.5 * np.exp(rng.normal(0, 0.1, count))
    gap_s = pace_s[:, None] * np.exp(rng.normal(0, 0.15, (count, _GAPS)))
    device_s = (prompt * 2e-5 + output * 1e-3) * np.exp(rng.normal(0, 0.1, count))
    return Requests(
        session=rng.integers(0, 2**64, sessions, dtype=np.uint64)[order],
        order=order,
        failed=_failures(rng, sessions, order, regression.error_ratio),
        broken=_failures(rng, sessions, order, 0.001),
        ttft_s=ttft_s * regression.ttft,
        gap_s=gap_s * regression.itl,
        prompt=prompt.astype(np.int64),
        output=output.astype(np.int64),
        device_s=device_s * regression.cost,
    )


def independent(rng: np.random.Generator, requests: Requests) -> Requests:
    """Return the requests as if each had a session of its own: the mistake that the proof must find."""
    return replace(requests, session=rng.integers(0, 2**64, len(requests.session), dtype=np.uint64))


def looks(requests: Requests, counts: tuple[int, ...]) -> Iterator[ArmWindow]:
    """Yield the sums of the first sessions, as many as each of the counts."""
    clusters: dict[int, SliSums] = {}
    done = 0
    for count in counts:
        end = int(np.searchsorted(requests.order, count))
        for cluster, sums in _sums(requests, slice(done, end)).items():
            clusters.setdefault(cluster, SliSums()).merge(sums)
        done = end
        yield ArmWindow(clusters)


def _lengths(rng: np.random.Generator, fit: dict[str, float], sessions: int, order: Numbers) -> Floats:
    own = rng.normal(0, fit["between"], sessions)[order]
    drawn = fit["mean"] + own + rng.normal(0, fit["within"], len(order))
    return np.clip(np.exp(drawn), 1, 131_072)


def _loads(rng: np.random.Generator, load: Floats, sessions: int, turns: Numbers) -> Floats:
    """Return the load of each request's minute: a session goes on from the minute of its start."""
    starts = np.sort(rng.integers(0, len(load), sessions))
    turn = np.arange(turns.sum()) - np.repeat(np.cumsum(turns) - turns, turns)
    found: Floats = load[(np.repeat(starts, turns) + turn) % len(load)]
    return found


def _failures(rng: np.random.Generator, sessions: int, order: Numbers, ratio: float) -> Flags:
    """Three quarters of the failures are in sessions that fail mostly, the others anywhere."""
    failing = rng.random(sessions) < ratio
    found: Flags = (failing[order] & (rng.random(len(order)) < 0.75)) | (rng.random(len(order)) < ratio / 4)
    return found


def _sums(requests: Requests, part: slice) -> dict[int, SliSums]:
    session = requests.session[part]
    cluster = (session % CLUSTERS).astype(np.int64)
    failed, broken = requests.failed[part], requests.broken[part]
    started, finished = ~failed, ~failed & ~broken

    def by_cluster(values: npt.NDArray[Any]) -> list[float]:
        counted: list[float] = np.bincount(cluster, weights=values, minlength=CLUSTERS).tolist()
        return counted

    output = requests.output[part] * started
    totals = zip(
        by_cluster(np.ones(len(cluster))),
        by_cluster(failed),
        by_cluster(started),
        by_cluster(broken & started),
        by_cluster(finished),
        by_cluster(output * finished),
        by_cluster(requests.prompt[part] * started + output),
        by_cluster(requests.device_s[part] * started),
        strict=True,
    )
    found = {}
    for number, (count, errors, sent, cut, ended, length, tokens, device_s) in enumerate(totals):
        if count:
            found[number] = SliSums(
                requests=int(count), errors=int(errors), started=int(sent), broken=int(cut),
                finished=int(ended), output_tokens=int(length), tokens=int(tokens), device_s=device_s,
            )  # fmt: skip
    lengths, place = np.unique(requests.prompt[part], return_inverse=True)
    size = np.array([prompt_size(length) for length in lengths.tolist()], dtype=np.int64)[place]
    ttft = _histograms(cluster * PROMPT_SIZES + size, requests.ttft_s[part][:, None], started)
    itl = _histograms(cluster, requests.gap_s[part], np.maximum(output, 0) / _GAPS)
    for number, sums in found.items():
        sums.itl.add_parts(0.0, itl.get(number, {}), 0.0, 1e3)
    for group, buckets in ttft.items():
        number, of_size = divmod(group, PROMPT_SIZES)
        found[number].ttft_of(of_size).add_parts(0.0, buckets, 0.0, 1e3)
    for one in np.unique(session).tolist():
        found[one % CLUSTERS].note_session(one)
    return found


def _histograms(group: Numbers, values_s: Floats, weight: npt.NDArray[Any]) -> dict[int, dict[int, float]]:
    """Return the weights by group and bucket of a sketch."""
    buckets = np.ceil(np.log(np.maximum(values_s, 1e-4)) / _LOG_RATIO).astype(np.int64)
    low = int(buckets.min(initial=0))
    width = int(buckets.max(initial=0)) - low + 1
    flat = (group[:, None] * width + buckets - low).ravel()
    weights = np.repeat(np.asarray(weight, dtype=float), values_s.shape[1])
    groups = int(group.max(initial=0)) + 1
    counts = np.bincount(flat, weights=weights, minlength=groups * width).reshape(groups, width)
    found: dict[int, dict[int, float]] = {}
    for number, bucket in np.argwhere(counts > 0).tolist():
        found.setdefault(number, {})[bucket + low] = float(counts[number, bucket])
    return found
