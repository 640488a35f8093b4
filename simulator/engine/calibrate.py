"""``fairway calibrate``: a cost model fitted to a live worker, through its public API and its metrics.

A fixed plan of phases is sent, from one short request at a time to many long ones; around each, the worker's
own counters are read. They count what its steps computed and how long these took, so neither the network nor
the queue is in the measurement, and other requests that the worker serves meanwhile are work like any other.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from services.core.estimates.cost_model import CostModel, encode
from simulator.engine.cost_model import cost_model

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


MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
REQUEST_S: Final = 300.0
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
LOCAL: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # listening addresses to call


class CalibrationFailed(Exception):
    """What could not be measured, and what to do next."""


class NotCounted(CalibrationFailed):
    """The worker has no counters of the model."""


@dataclass(frozen=True, slots=True)
class Phase:
    """``count`` requests, ``at_once`` of them at a time, of ``prompt`` tokens in and ``output`` out."""

    count: int
    at_once: int
    prompt: int
    output: int


# Prefill alone; decodes of few and of many, with little and with much KV; both together.
PLAN: Final = (
    Phase(4, 1, 16, 2),
    Phase(4, 1, 128, 2),
    Phase(4, 1, 448, 2),
    Phase(8, 4, 448, 2),
    Phase(2, 1, 4, 96),
    Phase(4, 2, 4, 96),
    Phase(8, 4, 4, 96),
    Phase(16, 8, 4, 96),
    Phase(32, 16, 4, 64),
    Phase(4, 2, 384, 96),
    Phase(16, 8, 384, 96),
    Phase(32, 16, 384, 64),
    Phase(24, 8, 192, 32),
)
# The same in short, for a first idea: the same kinds of work, fewer and shorter requests.
SHORT_PLAN: Final = (
    Phase(4, 2, 16, 2),
    Phase(4, 2, 128, 2),
    Phase(4, 2, 448, 2),
    Phase(4, 2, 4, 32),
    Phase(8, 4, 4, 32),
    Phase(8, 8, 4, 24),
    Phase(4, 2, 384, 32),
    Phase(8, 8, 384, 24),
)
FIRST_REQUESTS: Final = 32


@dataclass(frozen=True, slots=True)
class Counters:
    """What a worker's engine did since it started, and how many sequences ended there."""

    steps: int
    prefill_tokens: int
    output_tokens: int
    attended_tokens: int
    ended: int
    seconds: float

    def since(self, earlier: Counters) -> Observation:
        """Return the work in between. The first token of each sequence's output comes from its prefill.

        Sequences are counted where they ran, because other workers serve some of the requests that are sent.
        """
        return Observation(
            self.steps - earlier.steps,
            self.prefill_tokens - earlier.prefill_tokens,
            max(0, self.output_tokens - earlier.output_tokens - (self.ended - earlier.ended)),
            self.attended_tokens - earlier.attended_tokens,
            self.seconds - earlier.seconds,
        )


def read_counters(text: str, model: str) -> Counters:
    """Return a worker's counters for a model from its /metrics. Raises NotCounted."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("model") == model:
                key = (sample.name, sample.labels.get("kind", ""))  # reasons of an end are summed up
                found[key] = found.get(key, 0.0) + sample.value
    try:
        return Counters(
            steps=int(found["fairway_worker_step_seconds_count", ""]),
            prefill_tokens=int(found["fairway_worker_tokens_total", "prefill"]),
            output_tokens=int(found["fairway_worker_tokens_total", "output"]),
            attended_tokens=int(found["fairway_worker_attended_tokens_total", ""]),
            ended=int(found["fairway_worker_sequences_ended_total", ""]),
            seconds=found["fairway_worker_step_seconds_sum", ""],
        )
    except KeyError as error:
        raise NotCounted(
            f"the metrics have no {error.args[0][0]} for {model}: name a worker that serves it"
        ) from error


def measure(
    plan: Sequence[Phase],
    *,
    send: Callable[[int, int, int], None],
    counters: Callable[[], Counters],
    most_context: int = 0,
    note: Callable[[str], None] = lambda _: None,
) -> list[Observation]:
    """Return one observation per phase. ``send(number, prompt, output)`` returns when its answer is there.

    Prompts and outputs are cut to ``most_context`` tokens together, 0 for no limit.
    """
    observations: list[Observation] = []
    number = 0
    for phase in plan:
        output = min(phase.output, most_context // 2) if most_context else phase.output
        prompt = min(phase.prompt, most_context - output) if most_context else phase.prompt
        before = counters()
        with ThreadPoolExecutor(phase.at_once) as pool:
            sent = [pool.submit(send, number + index, prompt, output) for index in range(phase.count)]
            for each in sent:
                each.result()
        number += phase.count
        seen = counters().since(before)
        observations.append(seen)
        note(
            f"{phase.count} requests, {phase.at_once} at once, {prompt} tokens in, {output} out: "
            f"{seen.steps} steps of {seen.seconds / max(1, seen.steps) * 1e3:.3f} ms"
        )
    return observations


class Installation:
    """A running installation, by its HTTP face and one worker's metrics."""

    def __init__(self, *, http: str, api_key: str, model: str, metrics: str) -> None:
        self._http, self._api_key, self._model, self._metrics = http, api_key, model, metrics

    def send(self, number: int, prompt: int, output: int) -> None:
        """Return when a request of these sizes was answered. Raises CalibrationFailed."""
        ids = [3 + (number * 31 + index * 7) % 90 for index in range(prompt)]
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self._http}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"authorization": f"Bearer {self._api_key}", "content-type": "application/json"},
        )
        _fetch(request)

    def start(self) -> None:
        """Return once the worker has counters: after its first sequence, and others may get some before it.

        Raises CalibrationFailed when FIRST_REQUESTS of them did not reach it.
        """
        for left in reversed(range(FIRST_REQUESTS)):
            self.send(left, 8, 8)
            try:
                self.counters()
            except NotCounted:
                if not left:
                    raise
            else:
                return

    def counters(self) -> Counters:
        return read_counters(_fetch(urllib.request.Request(f"{self._metrics}/metrics")), self._model)


def main(arguments: Sequence[str]) -> int:
    """Measure, fit, print and write; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        like = cost_model(options.like)
        installation = _installation(options)
        installation.start()
        observations = measure(
            SHORT_PLAN if options.short else PLAN,
            send=installation.send,
            counters=installation.counters,
            most_context=options.max_context,
            note=print,
        )
        found = fit(observations, like, name=options.name)
        options.output.write_bytes(encode(found.model))
    except (CalibrationFailed, NotEnough, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {options.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(describe(found))
    print(f"written to {options.output}: `fairway simulate SCENARIO --preset {options.output}`")
    return 0


def describe(found: Fit) -> str:
    """Return a fit in words."""
    model = found.model
    return "\n".join(
        (
            f"{model.name}, from {found.observations} measurements",
            f"  a step          {model.base_s * 1e3:10.4f} ms",
            f"  a prompt token  {model.prefill_token_s * 1e6:10.3f} us",
            f"  a decode        {model.decode_sequence_s * 1e6:10.3f} us",
            f"  a token of KV   {model.attended_token_s * 1e9:10.3f} ns",
            f"  error: median {found.median_error:.1%}, 90th percentile {found.p90_error:.1%}, "
            f"median of what was held out {found.held_out_error:.1%}",
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fairway calibrate", description=__doc__)
    parser.add_argument(
        "--endpoints", type=Path, default=Path(".fairway/endpoints.json"), help="of the installation"
    )
    parser.add_argument("--worker", default="", help="its process, such as worker-0; the only one if empty")
    parser.add_argument("--model", default="", help="what to ask for; the installation's own if empty")
    parser.add_argument("--name", default="calibrated", help="of the cost model")
    parser.add_argument("--like", default="tiny-cpu", help="preset whose sizes of memory it has")
    parser.add_argument("--max-context", type=int, default=0, help="tokens of prompt and output together")
    parser.add_argument("--output", type=Path, default=Path("cost-model.json"))
    parser.add_argument("--short", action="store_true", help="a fourth of the requests, for a worse fit")
    return parser


def _installation(options: argparse.Namespace) -> Installation:
    try:
        content: Any = json.loads(options.endpoints.read_bytes())
        metrics: dict[str, str] = content["metrics"]
        workers = [name for name in metrics if name.startswith("worker")]
        worker = options.worker or (workers[0] if len(workers) == 1 else "")
        if worker not in metrics:
            raise CalibrationFailed(f"name the process to measure with --worker: {', '.join(workers)}")
        return Installation(
            http=_url(content["http"]),
            api_key=content["api_key"],
            model=options.model or content["model"],
            metrics=_url(metrics[worker]),
        )
    except OSError as error:
        raise CalibrationFailed(
            f"{options.endpoints}: {error.strerror}; `fairway up` writes it, --endpoints names it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationFailed(f"{options.endpoints} is no endpoints.json of `fairway up`") from error


def _url(address: str) -> str:
    if address.startswith(("http://", "https://")):
        return address.rstrip("/")
    host, _, port = address.rpartition(":")
    return f"http://{LOCAL.get(host, host)}:{port}"


def _fetch(request: urllib.request.Request) -> str:
    try:
        with _DIRECT.open(request, timeout=REQUEST_S) as answer:
            content: bytes = answer.read(MAX_ANSWER_BYTES)
            return content.decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        detail = error.read(2048).decode("utf-8", "replace")
        raise CalibrationFailed(f"{request.full_url} answered {error.code}: {detail}") from error
    except OSError as error:
        raise CalibrationFailed(f"{request.full_url} does not answer: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
