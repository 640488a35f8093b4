"""Recorded traces as scenarios: a trace's rows, dealt out to tenants, at the recorded or another rate.

A file is read twice, line by line: once whole, so that errors in it are reported before the run, and
once for the run. Endless synthetic traces of the same shape stand in where the recorded ones are not at hand;
their constants are the figures of the published traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from simulator.fleet.spec import FleetSpec, TenantSpec
from simulator.lab.load.arrivals import Gamma
from simulator.lab.load.lengths import LogNormal
from simulator.lab.load.load import Share, of_trace
from simulator.lab.load.traces import MOONCAKE_BLOCK_TOKENS, TraceCut, TraceRow, cut, read_trace
from simulator.lab.scenario import Options, Scenario, ScenarioError, fleet_of, rate_of

SUFFIXES: Final = (".csv", ".jsonl")
CONTEXT_TOKENS: Final = 131_072
SHARES: Final = tuple(Share(f"tenant-{index}", 1.0 / (index + 1)) for index in range(6))
LEAST_S: Final = 1.0  # a load that lasts shorter counts as one of that length


@dataclass(frozen=True, slots=True)
class Survey:
    """What rows amount to: how many, the instant of the last one, and their tokens; how many are left out."""

    rows: int
    last_s: float
    prompt_tokens: int
    output_tokens: int
    left_out: int = 0


def is_trace(name: str) -> bool:
    """Return whether a scenario's name is that of a trace's file."""
    return Path(name).suffix in SUFFIXES


def scenario(name: str, options: Options) -> Scenario:
    """Return the replay of a trace by its path. Raises TraceError and ScenarioError.

    Rows come at the recorded instants, or as much faster or slower as makes ``rate_per_s`` or ``load_ratio``
    of the whole trace's mean rate. Prompts that leave a worker no room for their output are left out.
    """
    path = find(name, options.traces)
    fleet = trace_fleet(options)
    most_tokens = most_prompt_tokens(fleet)
    taken = survey(read_trace(path), most_prompt_tokens=most_tokens)
    if not taken.rows:
        raise ScenarioError(
            f"every prompt of {path} is above the {most_tokens} tokens that fit a worker of "
            f"{options.preset}: choose a --preset with more memory"
        )
    is_scaled = options.rate_per_s is not None or options.load_ratio is not None
    speed = speed_of(taken, options, fleet, load_ratio=1.0) if is_scaled else 1.0
    lasts_s = max(LEAST_S, taken.last_s / speed)
    requested_s = options.duration_s
    part = TraceCut(
        for_s=None if requested_s is None else requested_s * speed,
        speed=speed,
        most_prompt_tokens=most_tokens,
    )
    pace = "as recorded" if speed == 1.0 else f"{speed:.3g} times as fast"
    left_out = f"{taken.left_out} rows are left out: their prompts are above {most_tokens} tokens"
    return Scenario(
        name=path.name,
        summary=f"{taken.rows} rows over {taken.last_s:g} s, replayed {pace}",
        fleet=fleet,
        load=lambda: of_trace(
            cut(read_trace(path), part), SHARES, seed=options.seed, context_tokens=sequence_tokens(fleet)
        ),
        duration_s=lasts_s if requested_s is None else min(requested_s, lasts_s),
        notes=(left_out,) if taken.left_out else (),
    )


def find(name: str, folder: Path | None) -> Path:
    """Return the path of a trace: as it is given, else in the folder of traces. Raises ScenarioError."""
    path = Path(name)
    tried = [path] if folder is None or path.is_absolute() else [path, folder / path]
    for each in tried:
        if each.is_file():
            return each
    where = " or ".join(str(each) for each in tried)
    raise ScenarioError(f"there is no trace {where}; give its path, or its folder with --traces")


def trace_fleet(options: Options) -> FleetSpec:
    """Return a fleet of the chosen size for the tenants that a trace's rows are dealt out to."""
    tenants = [TenantSpec(share.tenant) for share in SHARES]
    return fleet_of(options, tenants, max_context_tokens=CONTEXT_TOKENS)


def sequence_tokens(fleet: FleetSpec) -> int:
    """Return the most that prompt and output together may have: the context, or what a worker's KV holds."""
    kind = fleet.worker_kinds[0]
    return min(kind.kv_blocks * kind.block_size, CONTEXT_TOKENS)


def most_prompt_tokens(fleet: FleetSpec) -> int:
    """Return the longest prompt that is replayed: a row needs a place for its whole KV on one worker."""
    return sequence_tokens(fleet) * 3 // 4


def survey(rows: Iterable[TraceRow], *, most_prompt_tokens: int | None = None) -> Survey:
    """Return what rows amount to, reading them once; those with longer prompts are left out."""
    taken = prompt_tokens = output_tokens = left_out = 0
    last_s = 0.0
    for row in rows:
        if most_prompt_tokens is not None and row.prompt_tokens > most_prompt_tokens:
            left_out += 1
            continue
        taken += 1
        last_s = row.arrival_s
        prompt_tokens += row.prompt_tokens
        output_tokens += row.output_tokens
    return Survey(taken, last_s, prompt_tokens, output_tokens, left_out)


def speed_of(taken: Survey, options: Options, fleet: FleetSpec, *, load_ratio: float) -> float:
    """Return how many times as fast the rows make the requested load. Raises ScenarioError."""
    if not taken.last_s:
        raise ScenarioError("all rows of the trace come at one instant, so that it has no rate to scale")
    wanted = rate_of(
        options,
        fleet,
        prompt_tokens=taken.prompt_tokens / taken.rows,
        output_tokens=taken.output_tokens / taken.rows,
        load_ratio=load_ratio,
    )
    return wanted * taken.last_s / taken.rows


# Azure LLM inference trace 2023, conversation.
AZURE_ARRIVALS: Final = Gamma(5.5, cv=1.3)
AZURE_PROMPT: Final = LogNormal(900.0, 0.95, least_tokens=2, most_tokens=4200)
AZURE_OUTPUT: Final = LogNormal(150.0, 0.75, least_tokens=7, most_tokens=1000)
# Mooncake FAST'25 trace, conversation.
MOONCAKE_ARRIVALS: Final = Gamma(3.4, cv=1.0)
MOONCAKE_FIRST_TURN: Final = LogNormal(6000.0, 1.05, least_tokens=890, most_tokens=110_000)
MOONCAKE_NEXT_TURN: Final = LogNormal(1200.0, 1.0, least_tokens=20, most_tokens=20_000)
MOONCAKE_OUTPUT: Final = LogNormal(300.0, 0.7, least_tokens=1, most_tokens=2000)
_CONTINUED_RATIO: Final = 0.4
_OPEN_CONVERSATIONS: Final = 400
_MOST_TOKENS: Final = 126_000


def azure_like(seed: int) -> Iterator[TraceRow]:
    """Yield chats of independent lengths that share nothing."""
    rng = Random(f"{seed}/azure")
    for at_s in AZURE_ARRIVALS.times(Random(f"{seed}/azure/arrivals")):
        yield TraceRow(at_s, AZURE_PROMPT.draw(rng), AZURE_OUTPUT.draw(rng))


def mooncake_like(seed: int) -> Iterator[TraceRow]:
    """Yield turns of conversations: a turn begins with all of the turns before it, the first with block 0."""
    rng = Random(f"{seed}/mooncake")
    said: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_OPEN_CONVERSATIONS)  # tokens, blocks
    fresh = 1
    for at_s in MOONCAKE_ARRIVALS.times(Random(f"{seed}/mooncake/arrivals")):
        output_tokens = MOONCAKE_OUTPUT.draw(rng)
        before = 0
        blocks: tuple[int, ...] = (0,)
        if said and rng.random() < _CONTINUED_RATIO:
            before, blocks = said[rng.randrange(len(said))]
        new_tokens = (MOONCAKE_NEXT_TURN if before else MOONCAKE_FIRST_TURN).draw(rng)
        prompt_tokens = min(before + new_tokens, _MOST_TOKENS)
        kept = blocks[: max(1, before // MOONCAKE_BLOCK_TOKENS)]
        wanted = -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
        blocks = (*kept, *range(fresh, fresh + wanted - len(kept)))[:wanted]
        fresh += max(0, wanted - len(kept))
        said.append((prompt_tokens, blocks))
        yield TraceRow(at_s, prompt_tokens, output_tokens, blocks)
