"""A long prompt arrives among streams that decode: what that does to ITL, prefilled in chunks or whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import msgspec

from bench.engines.load import Request, random_ids
from bench.engines.own import THROUGHPUT, OwnEngine
from bench.engines.own_measures import quantile
from services.worker.engine_protocol import EngineConfig

STREAMS: Final = 16
STREAM_PROMPT: Final = 64
STREAM_TOKENS: Final = 220
QUIET_TOKENS: Final = 60  # of each stream before the long prompt arrives
LONG_PROMPT: Final = 3000
SHOWN_S: Final = (-0.5, 6.0)
TWICE: Final = 2.0  # the streams' ITL before the prompt came, as a target while it is prefilled
DEFAULT_TARGET_S: Final = EngineConfig("", "").itl_target_s
WHOLE: Final = msgspec.structs.replace(THROUGHPUT, token_budget=4096)  # one step takes in the whole prompt


@dataclass(frozen=True, slots=True)
class Arrival:
    """Seconds. ``gaps`` are (instant, ITL), the instant counted from the long prompt's submission."""

    gaps: list[tuple[float, float]]
    quiet_p50_s: float
    quiet_p99_s: float
    during_p99_s: float
    ttft_s: float

    @property
    def ratio(self) -> float:
        """The streams' p99 ITL while the prompt is prefilled over that before it came."""
        return self.during_p99_s / self.quiet_p99_s


def chunked(itl_target_s: float) -> EngineConfig:
    """Return how a worker's engine runs with this target."""
    return msgspec.structs.replace(THROUGHPUT, token_budget=512, itl_target_s=itl_target_s)


def measure(checkpoint: Path, config: EngineConfig) -> Arrival:
    """Return what the arrival did; it comes once each stream has its first ``QUIET_TOKENS``."""
    rng = Random(2)
    with OwnEngine.started(checkpoint, config) as engine, engine.resumed():
        requests = [Request(random_ids(rng, STREAM_PROMPT), STREAM_TOKENS) for _ in range(STREAMS)]
        streams = [engine.submit(request) for request in requests]
        while min(len(stream.tokens) for stream in streams) < QUIET_TOKENS:
            engine.step()
        long = engine.submit(Request(random_ids(rng, LONG_PROMPT), 1))
        while long.is_live or any(stream.is_live for stream in streams):
            engine.step()
    first_quiet = QUIET_TOKENS // 3  # those before it share steps with each other's prefill
    arrived_s, ended_s = long.submitted_s, long.received_s[0]
    gaps = [
        (received_s, gap_s)
        for stream in streams
        for received_s, gap_s in zip(
            stream.received_s[first_quiet:], stream.gaps_s[first_quiet - 1 :], strict=True
        )
    ]
    quiet = [gap_s for received_s, gap_s in gaps if received_s <= arrived_s]
    during = [gap_s for received_s, gap_s in gaps if arrived_s < received_s and received_s - gap_s < ended_s]
    one = sorted({(received_s - arrived_s, gap_s) for received_s, gap_s in gaps})
    return Arrival(one, median(quiet), quantile(quiet, 0.99), quantile(during, 0.99), long.ttft_s)


def panel(found: Mapping[str, Arrival]) -> dict[str, Any]:
    """Return a panel for ``scripts/plot_simulation.py``: ITL over the time since the arrival."""
    return {
        "title": f"ITL of {STREAMS} streams while a prompt of {LONG_PROMPT} tokens is prefilled",
        "x": "seconds since the long prompt arrived",
        "y": f"ITL of {STREAMS} streams, ms",
        "log_y": True,
        "lines": {
            name: [(at, gap * 1e3) for at, gap in one.gaps if SHOWN_S[0] <= at <= SHOWN_S[1]]
            for name, one in found.items()
        },
    }
