"""The load that is planned for: rates as given, or a trace cut into windows, each with its mix.

A trace is read once, a window at a time. A prompt's leading blocks are cached if they came within the last
``CACHE_S``. What of them the sequences of a replica share follows from how the distinct cached blocks of
consecutive requests grow with the number of requests: the part that does not grow is shared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.core.estimates.capacity import mix_of
from services.core.estimates.node_need import LoadClass
from services.core.estimates.sketch import Sketch
from services.core.records import Priority
from simulator.lab.load.traces import TraceRow

WINDOW_S: Final = 60.0
CACHE_S: Final = 300.0
BIN_S: Final = 1.0  # burstiness is the variance of the arrivals in bins of this length
LENGTHS: Final = (1024, 8192)  # prompt tokens at which a mix is cut into ranges of length
GAP_RATIO: Final = 30.0  # longest usual gap over the mean one: 14 for a million independent arrivals
_SHARING: Final = 32  # requests that hold their caches together; twice as many give the growth


class BadLoad(Exception):
    """A load that cannot be planned for; the message names the field and the mend."""


@dataclass(frozen=True, slots=True)
class WantedLatency:
    """Latencies that the requests of a class are served for."""

    ttft_s: float = math.inf
    itl_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """The load of one window, by class or range of lengths."""

    from_s: float
    loads: tuple[LoadClass, ...]


def rate_class(text: str, targets: dict[Priority | None, WantedLatency]) -> LoadClass:
    """Return the load in CLASS:RATE:PROMPT:OUTPUT[:CACHED]. Raises BadLoad."""
    form = f"--rates: {text}: give CLASS:RATE:PROMPT:OUTPUT[:CACHED], such as interactive:20:512:256:0.3"
    try:
        name, *cells = text.split(":")
        priority = Priority(name)
        rate, prompt, output, cached = map(float, cells if len(cells) == 4 else [*cells, "0"])
    except ValueError:
        raise BadLoad(form) from None
    bounds = {"RATE": (rate, 1e-6, 1e7), "PROMPT": (prompt, 1, 1e7), "OUTPUT": (output, 1, 1e7)}
    for what, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise BadLoad(f"--rates: {text}: {what} is {value:g}, and must be {least:g} to {most:g}")
    if not 0.0 <= cached < 1.0:
        raise BadLoad(f"--rates: {text}: CACHED is {cached:g}, and must be 0 to below 1")
    lengths = round(prompt), round(prompt * cached), round(output)
    target = targets.get(priority, targets.get(None, WantedLatency()))
    return replace(_load(name, rate, [lengths]), priority=priority, ttft_s=target.ttft_s, itl_s=target.itl_s)


def windows_of(
    rows: Iterable[TraceRow], target: WantedLatency, *, by_length: bool = False
) -> list[LoadWindow]:
    """Return the windows of a trace. Raises BadLoad for one with a gap, TraceError."""
    windows, bursts, lengths = (
        [],
        _Bursts(),
        defaultdict[str, tuple[Sketch, Sketch]](lambda: (Sketch(), Sketch())),
    )
    for from_s, lasts_s, part in _parts(_without_gap(rows)):
        bursts.count([row.row.arrival_s - from_s for row in part], lasts_s)
        private_ratio, shared_tokens = _sharing(part)
        groups: dict[str, list[tuple[int, int, int]]] = {}
        for row in part:
            name = _range(row.row) if by_length else "trace"
            groups.setdefault(name, []).append(row.lengths)
            prompt, cached, output = row.lengths
            for sketch, tokens in zip(lengths[name], (prompt - cached, prompt + output), strict=True):
                sketch.add(tokens)
        loads = (
            _load(name, len(of) / lasts_s, of, private_ratio=private_ratio, shared_tokens=shared_tokens)
            for name, of in sorted(groups.items())
        )
        windows.append(LoadWindow(from_s, tuple(loads)))

    def whole(load: LoadClass) -> LoadClass:
        """Return the load of a window with what is counted over the whole trace."""
        prefill, total = (round(sketch.quantile(0.99) or 0.0) for sketch in lengths[load.name])
        return replace(
            load,
            prefill_p99_tokens=prefill,
            total_p99_tokens=total,
            burst_ratio=bursts.ratio,
            ttft_s=target.ttft_s,
            itl_s=target.itl_s,
        )

    return [replace(one, loads=tuple(map(whole, one.loads))) for one in windows]


def _load(
    name: str,
    rate_per_s: float,
    lengths: Sequence[tuple[int, int, int]],
    *,
    private_ratio: float = 1.0,
    shared_tokens: float = 0.0,
) -> LoadClass:
    mix = mix_of(lengths, private_ratio=private_ratio, shared_tokens=shared_tokens)
    mean_prompt = sum(prompt for prompt, _, _ in lengths) / len(lengths)
    prompt, cached, output = lengths[0]
    return LoadClass(name, rate_per_s, mix, mean_prompt, prompt - cached, prompt + output)


def _range(row: TraceRow) -> str:
    most = next((each for each in LENGTHS if row.prompt_tokens <= each), None)
    return f"to {most}" if most is not None else f"above {LENGTHS[-1]}"


@dataclass(frozen=True, slots=True)
class _CachedRow:
    row: TraceRow
    blocks: tuple[int, ...]  # leading blocks that are cached

    @property
    def lengths(self) -> tuple[int, int, int]:
        cached = min(len(self.blocks) * self.row.block_tokens, self.row.prompt_tokens - 1)
        return self.row.prompt_tokens, cached, self.row.output_tokens


def _parts(rows: Iterable[TraceRow]) -> Iterator[tuple[float, float, list[_CachedRow]]]:
    """Yield start, seconds and rows of each window; less than half a window joins the one before."""
    seen: dict[int, float] = {}  # blocks in the order of their last use
    part: list[_CachedRow] = []
    held: tuple[float, float, list[_CachedRow]] | None = None
    from_s = 0.0
    for row in rows:
        while row.arrival_s >= from_s + WINDOW_S:
            if held is not None:
                yield held
            held = (from_s, WINDOW_S, part) if part else None
            from_s, part = from_s + WINDOW_S, []
        part.append(_CachedRow(row, _known(row, seen)))
    lasts_s = max(1.0, part[-1].row.arrival_s - from_s) if part else 0.0
    if held is not None and lasts_s < WINDOW_S / 2:
        start_s, length_s, before = held
        yield start_s, length_s + lasts_s, before + part
    else:
        if held is not None:
            yield held
        yield from_s, lasts_s, part


def _known(row: TraceRow, seen: dict[int, float]) -> tuple[int, ...]:
    """Return the row's leading blocks that are cached, and count all of its blocks as used now."""
    while seen and row.arrival_s - next(iter(seen.values())) > CACHE_S:
        del seen[next(iter(seen))]
    known = next((n for n, block in enumerate(row.blocks) if block not in seen), len(row.blocks))
    for block in row.blocks:
        seen.pop(block, None)
        seen[block] = row.arrival_s
    return row.blocks[:known]


def _sharing(part: Sequence[_CachedRow]) -> tuple[float, float]:
    """Return the share of cached tokens that each sequence holds for itself, and the tokens held by all."""
    cached = sum(row.lengths[1] for row in part) / len(part)
    if not cached or len(part) < 2 * _SHARING:
        return 1.0, 0.0
    tokens = part[0].row.block_tokens
    some, twice = (
        tokens * sum(len(set[int]().union(*(row.blocks for row in group))) for group in groups) / len(groups)
        for size in (_SHARING, 2 * _SHARING)
        if (groups := [part[at : at + size] for at in range(0, len(part) - size + 1, size)])
    )
    growth = min(cached, (twice - some) / _SHARING)
    return growth / cached, max(0.0, some - growth * _SHARING)


def _without_gap(rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
    """Yield the rows. Raises BadLoad at their end for a gap that is much longer than the others."""
    longest_s, at_s, count, last_s = 0.0, 0.0, 0, 0.0
    for row in rows:
        if count and row.arrival_s - last_s > longest_s:
            longest_s, at_s = row.arrival_s - last_s, last_s
        count, last_s = count + 1, row.arrival_s
        yield row
    mean_s = (last_s - longest_s) / max(1, count - 2)
    if longest_s > max(WINDOW_S, GAP_RATIO * mean_s):
        raise BadLoad(
            f"--trace: no request arrives from {at_s:g} to {at_s + longest_s:g} s, other gaps are "
            f"{mean_s:.3g} s on average: split the trace there and plan each part"
        )


@dataclass(slots=True)
class _Bursts:
    """Variance of the arrivals within windows over that of independent arrivals, over all windows."""

    squares: float = 0.0
    expected: float = 0.0

    def count(self, arrivals_s: Sequence[float], lasts_s: float) -> None:
        bins = int(lasts_s / BIN_S)
        if bins < 2:
            return
        counts = [0] * bins
        for at_s in arrivals_s:
            if at_s < bins * BIN_S:
                counts[int(at_s / BIN_S)] += 1
        mean = sum(counts) / bins
        self.squares += sum((each - mean) ** 2 for each in counts)
        self.expected += mean * (bins - 1)

    @property
    def ratio(self) -> float:
        """At least 1: arrivals that were even so far need not stay so."""
        return max(1.0, self.squares / self.expected) if self.expected else 1.0
