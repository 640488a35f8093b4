"""What a scenario is: a fleet, a load, and what is done to the fleet meanwhile; how it is sized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from services.core.estimates.capacity import capacity_of, mix_of
from simulator.engine.cost_model import cost_model
from simulator.fleet.clients.client import SimRequest
from simulator.fleet.fleet import Plan, SimFleet
from simulator.fleet.spec import FleetSpec, TenantSpec, WorkerSpec
from simulator.lab.report.measure import Slo
from simulator.lab.report.report import Mark

BLOCK_TOKENS: Final = 16
STEP_TOKENS: Final = 2048


class ScenarioError(Exception):
    """A scenario that is not there or cannot be used; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may choose; None leaves it to the scenario."""

    workers: int = 8
    seed: int = 0
    duration_s: float | None = None
    # Rate of the whole fleet.
    rate_per_s: float | None = None
    # The rate as a share of what the fleet can serve at most.
    load_ratio: float | None = None
    preset: str = "a10"
    # A folder in which recorded traces are looked for.
    traces: Path | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "duration_s", "rate_per_s", "load_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ScenarioError(f"{name} is {value}, and must be above 0")


@dataclass(frozen=True, slots=True)
class Step:
    """Something that is done to the fleet once, ``at_s`` after the start of the load."""

    at_s: float
    do: Callable[[SimFleet], None]


@dataclass(frozen=True, slots=True)
class Script:
    """A plan: its steps in order of time."""

    steps: tuple[Step, ...]

    async def run(self, fleet: SimFleet) -> None:
        now_s = 0.0
        for step in sorted(self.steps, key=lambda step: step.at_s):
            await fleet.wait(step.at_s - now_s)
            now_s = step.at_s
            step.do(fleet)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulation that can be started."""

    name: str
    summary: str
    fleet: FleetSpec
    # Gives the requests anew at each call.
    load: Callable[[], Iterator[SimRequest]]
    duration_s: float
    plans: tuple[Plan, ...] = ()
    slo: Slo = field(default_factory=Slo)
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()
    warm_up_s: float = 0.0
    # A worker whose share of traffic from an instant on is of interest, and that instant.
    watched: tuple[str, float] | None = None
    # Tenants whose requests are of interest as one population.
    together: tuple[str, ...] = ()
    # The instant around which the report has a row for each second.
    by_second_s: float | None = None


def fleet_of(
    options: Options,
    tenants: Sequence[TenantSpec],
    *,
    max_context_tokens: int = 16_384,
    max_sequences: int = 256,
) -> FleetSpec:
    """Return a fleet of equal workers of the chosen preset, with the KV that its device holds."""
    try:
        model = cost_model(options.preset)
    except ValueError as error:
        raise ScenarioError(str(error)) from None
    kind = WorkerSpec(
        preset=options.preset,
        kv_blocks=model.kv_blocks(BLOCK_TOKENS),
        block_size=BLOCK_TOKENS,
        max_sequences=max_sequences,
        step_tokens=STEP_TOKENS,
    )
    return FleetSpec(
        workers=options.workers,
        seed=options.seed,
        worker_kinds=(kind,),
        tenants=tuple(tenants),
        max_context_tokens=max_context_tokens,
        idempotency=False,
    )


def rate_of(
    options: Options,
    fleet: FleetSpec,
    *,
    prompt_tokens: float,
    output_tokens: float,
    load_ratio: float,
) -> float:
    """Return the rate to send at: the chosen one, or ``load_ratio`` of the most that the fleet can serve."""
    if options.rate_per_s is not None:
        return options.rate_per_s
    kind = fleet.worker_kinds[0]
    costs = cost_model(kind.preset)
    held = kind.kv_blocks * kind.block_size * costs.kv_bytes_per_token
    mix = mix_of([(round(prompt_tokens), 0, round(output_tokens))])
    one = capacity_of(replace(costs, kv_memory_bytes=held), mix, max_sequences=kind.max_sequences)
    if one is None:
        raise ScenarioError(
            f"{options.preset} is too small for this scenario: {mix.held_tokens:g} tokens do not fit into KV"
        )
    return (
        one.requests_per_s
        * fleet.workers
        * (options.load_ratio if options.load_ratio is not None else load_ratio)
    )
