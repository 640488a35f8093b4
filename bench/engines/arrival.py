"""A long prompt arrives among streams that decode: what that does to ITL, prefilled in chunks or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import msgspec

from bench.engines.load import Request, random_ids
from bench.engines.own import THROUGHPUT, OwnEngine
from bench.engines.own_measures import quantile
from services.worker.engine_protocol import EngineConfig
from simulator.lab.report.scale import Axis
from simulator.lab.report.svg import Line, line_plot

STREAMS: Final = 16
STREAM_PROMPT: Final = 64
STREAM_TOKENS: Final = 220
QUIET_TOKENS: Final = 60  # of each stream before the long prompt arrives
LONG_PROMPT: Final = 3000
SHOWN_S: Final = (-0.5, 6.0)
TWICE: Final = 2.0  # the streams' ITL before the prompt came, as a target while it is prefilled
DEFAULT_TARGET_S: Final = EngineConfig("", "").itl_target_s
WHOLE: Final = msgspec.structs.replace(THROUGHPUT, token_budget=4096)  # one step takes in the whole prompt
STYLE: Final = (
    "svg{background:#fff;--s0:#0072b2;--s1:#009e73;--s2:#d55e00}text{font:11px sans-serif;fill:#5b6875}"
    ".grid{stroke:#e3e8ed;fill:none}.axis{stroke:#5b6875;fill:none}"
    ".line{fill:none;stroke-width:1.6}.c0{stroke:#0072b2}.c1{stroke:#009e73}.c2{stroke:#d55e00}"
)


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
        asked = [Request(random_ids(rng, STREAM_PROMPT), STREAM_TOKENS) for _ in range(STREAMS)]
        streams = [engine.submit(request) for request in asked]
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


def plot(found: Mapping[str, Arrival]) -> str:
    """Return an SVG file: ITL of the streams over the time since the long prompt arrived, a line per name."""
    lines = [
        Line(name, [(at, gap * 1e3) for at, gap in one.gaps if SHOWN_S[0] <= at <= SHOWN_S[1]], colour)
        for colour, (name, one) in enumerate(found.items())
    ]
    body = line_plot(
        lines,
        Axis("seconds since the long prompt arrived", least=SHOWN_S[0], most=SHOWN_S[1]),
        Axis("ITL of 16 streams, ms", log=True),
        label=f"ITL of {STREAMS} streams while a prompt of {LONG_PROMPT} tokens is prefilled",
    )
    opening, _, rest = body.partition(">")
    head = f'{opening} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>'
    return head + rest.removesuffix("</svg>") + _legend([line.name for line in lines]) + "</svg>\n"


def _legend(names: Sequence[str]) -> str:
    return "".join(
        f'<path class="line c{row}" d="M440 {28 + 16 * row}h18"/>'
        f'<text x="464" y="{32 + 16 * row}">{name}</text>'
        for row, name in enumerate(names)
    )
