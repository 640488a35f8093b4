"""The cases of the batching benchmark. Each prints what it measures, and returns its part of RESULT."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Final, TypeVar

from bench.bare_chain import BareChain
from bench.batched.connections import Failed
from bench.batched.load import Taken, Target, closed_loop, open_loop
from bench.batched.model import LONGEST, Rows, mlp_rows, token_rows
from bench.batched.systems import GATEWAYS, Installation, Peer, Window, installation, until_ready, v2_target
from bench.results import Figure
from bench.stack import metric_sum
from simulator.lab.load.arrivals import Arrivals, Gamma, Poisson

T = TypeVar("T")

CONNECTIONS: Final = 64
OPEN_CONNECTIONS: Final = 192
OBJECTIVE_MS: Final = 50.0
# A peer's best window is sought among these. 64 rows: of every client; 32: of half of them.
WINDOWS: Final = (Window(0.005, 64), Window(0.001, 64), Window(0.005, 32), Window(0.02, 64))
FIXED_S: Final = (0.0, 0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3)
CLIENTS: Final = (64, 8)  # of the closed loops of the sweep
PEERS: Final = ("triton", "litserve", "ray_serve")
ARRIVALS: Final[Mapping[str, Callable[[float], Arrivals]]] = {
    "poisson": Poisson,
    "bursty": lambda rate_per_s: Gamma(rate_per_s, cv=3.0),
}
BURST_ROWS: Final = 64  # of a request
OTHERS_RATIO: Final = 0.4  # of what the path can take, that the neighbours send


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. ``seconds``: of one run; ``halvings``: of the search for a rate."""

    rounds: int = 3
    seconds: float = 4.0
    halvings: int = 5
    windows: tuple[Window, ...] = WINDOWS
    fixed_s: tuple[float, ...] = FIXED_S

    @classmethod
    def quick(cls) -> Effort:
        """Return what a smoke test takes."""
        return cls(rounds=1, seconds=0.5, halvings=1, windows=WINDOWS[:1], fixed_s=FIXED_S[2:3])


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases use. ``models``: the folders of the versions, by deployment."""

    folder: Path
    peers: Path
    names: tuple[str, ...]  # of the peers
    effort: Effort
    models: Mapping[str, Path]

    async def with_peer(
        self, name: str, model: str, rows: Rows, window: Window, measure: Callable[[Target], Awaitable[T]]
    ) -> T:
        """Return what ``measure`` returns of a peer that answers. A peer that fails is started once more."""
        peer = Peer(name, self.peers)
        for last in (False, True):
            with peer.serving(self.models[model], window, self.folder / "logs") as target_of:
                target = target_of(rows)
                await until_ready(target)
                try:
                    return await measure(target)
                except Failed as error:
                    if last:
                        raise
                    print(f"{name} is started once more: {error}", flush=True)
        raise AssertionError("the last try returns or raises")


async def closed(bench: Bench, here: Installation) -> Mapping[str, Figure]:
    """64 clients, each with its next request once one is answered: the worker, the whole path, the peers.

    The bare path is what two hops of grpc.aio take with no work in them; ``path_of_two`` has two gateways.
    """
    rows, effort = mlp_rows(), bench.effort
    best: dict[str, tuple[float, Window]] = {}

    async def short(target: Target) -> Taken:
        return await closed_loop(target, connections=CONNECTIONS, seconds=effort.seconds / 2)

    async def long(target: Target) -> Taken:
        return await closed_loop(target, connections=CONNECTIONS, seconds=effort.seconds)

    for name in bench.names:
        for window in effort.windows:
            taken = await bench.with_peer(name, "mlp", rows, window, short)
            print(f"{window}: {taken}", flush=True)
            best[name] = max(best.get(name, (0.0, window)), (taken.per_s, window), key=lambda each: each[0])
    ours = [
        here.worker_target(rows),
        here.worker_target(rows, muxed=True),
        here.path_target("mlp", rows),
        here.path_target("mlp", rows, name="path_of_two", gateways=GATEWAYS),
    ]
    rounds: list[dict[str, Taken]] = []
    for number in range(effort.rounds):
        found: dict[str, Taken] = {}
        with BareChain.started() as chain:
            bare = v2_target("bare_path", [chain.port], "mlp", rows, pids=chain.pids)
            await until_ready(bare)
            found[bare.name] = await long(bare)
        for target in ours:
            found[target.name] = await long(target)
        for name, (_, window) in best.items():
            taken = await bench.with_peer(name, "mlp", rows, window, long)
            found[name] = taken
        rounds.append(found)
        print(f"round {number + 1} of {effort.rounds}: " + "; ".join(map(str, found.values())), flush=True)

    def each(of: Callable[[dict[str, Taken]], float]) -> list[float]:
        return [of(found) for found in rounds]

    own = ("bare_path", *(target.name for target in ours))
    figures: dict[str, Figure] = {
        f"{one}_vs_{other}": each(lambda found, one=one, other=other: found[one].per_s / found[other].per_s)  # type: ignore[misc]
        for one in own
        for other in bench.names
    }
    for one in (*own, *bench.names):
        figures[f"{one}_server_us"] = each(lambda found, one=one: found[one].server_us)  # type: ignore[misc]
        figures[f"{one}_per_s"] = each(lambda found, one=one: found[one].per_s)  # type: ignore[misc]
        figures[f"{one}_p99_ms"] = each(lambda found, one=one: found[one].ms(0.99))  # type: ignore[misc]
    return figures


async def open_arrivals(bench: Bench, here: Installation) -> Mapping[str, Figure]:
    """Mixed lengths, Poisson and bursty arrivals: the highest rates at which p99 meets the objective."""
    rows, effort = token_rows(), bench.effort

    async def both(target: Target) -> dict[str, float]:
        most = (await closed_loop(target, connections=CONNECTIONS, seconds=effort.seconds / 2)).per_s
        found = {name: await goodput(target, of, most, effort) for name, of in ARRIVALS.items()}
        print(f"{target.name}: closed loop {most:.0f}/s, goodput {found}", flush=True)
        return found

    own = await both(here.path_target("encoder", rows))
    best: dict[str, float] = {}
    for name in bench.names:
        for window in effort.windows:
            print(window, flush=True)
            found = await bench.with_peer(name, "encoder", rows, window, both)
            best = {kind: max(best.get(kind, 0.0), found[kind]) for kind in ARRIVALS}
    ratios = {
        f"goodput_{kind}_vs_best_peer": round(own[kind] / max(best.get(kind, 0.0), 1e-9), 3) for kind in own
    }
    return ratios | {"goodput_vs_best_peer": min(ratios.values())}


async def goodput(
    target: Target, arrivals: Callable[[float], Arrivals], most_per_s: float, effort: Effort
) -> float:
    """Return the highest rate at which the 99th percentile is within the objective; 0: it never is."""
    low, high, found = most_per_s / 8, most_per_s * 1.1, 0.0
    for _ in range(effort.halvings):
        rate_per_s = math.sqrt(low * high)
        times_s = times_of(arrivals(rate_per_s), effort.seconds)
        rng = random.Random(1)
        picks = [rng.randrange(len(target.messages)) for _ in times_s]
        try:
            taken = await open_loop(target, times_s, connections=OPEN_CONNECTIONS, picks=picks)
            met = taken.ms(0.99) <= OBJECTIVE_MS
        except Failed as error:  # refused: the rate is too high
            print(f"at {rate_per_s:.0f}/s {error}"[:200], flush=True)
            met = False
        if met:
            low = found = rate_per_s
        else:
            high = rate_per_s
    return found


def times_of(arrivals: Arrivals, seconds: float, *, seed: int = 0) -> list[float]:
    """Return the instants of a run, always the same ones."""
    return list(takewhile(lambda at_s: at_s < seconds, arrivals.times(random.Random(seed))))


async def linger(bench: Bench, here: Installation) -> Mapping[str, Figure]:
    """The derived window against the best fixed one on the real worker: rows/s, and goodput."""
    effort, rows = bench.effort, mlp_rows()

    async def figures(target: Target) -> dict[str, float]:
        found = {}
        for clients in CLIENTS:
            found[f"closed_{clients}"] = (
                await closed_loop(target, connections=clients, seconds=effort.seconds)
            ).per_s
        for name, of in ARRIVALS.items():
            found[name] = await goodput(target, of, found[f"closed_{CLIENTS[0]}"], effort)
        return found

    own = [await figures(here.worker_target(rows))]
    best: dict[str, tuple[float, float]] = {}
    for number, window_s in enumerate(effort.fixed_s):
        setting = f"worker:FAIRWAY_BATCH_WINDOW_S={window_s}"
        with installation(bench.folder / f"fixed-{number}", [setting]) as fixed:
            fixed.deploy("mlp", bench.models["mlp"])
            found = await figures(fixed.worker_target(rows))
        print(f"window {window_s * 1e3:g} ms: {rounded(found)}", flush=True)
        for name, value in found.items():
            best[name] = max(best.get(name, (0.0, 0.0)), (value, window_s))
        if number % 2:
            own.append(await figures(here.worker_target(rows)))
            print(f"derived: {rounded(own[-1])}", flush=True)
    ratios = {
        f"linger_{name}": round(statistics.median(each[name] for each in own) / max(value, 1e-9), 3)
        for name, (value, _) in best.items()
    }
    print(f"best fixed windows: { {name: window_s for name, (_, window_s) in best.items()} }", flush=True)
    return ratios | {"linger_vs_best_fixed": min(ratios.values())}


async def single(bench: Bench, here: Installation) -> Mapping[str, Figure]:
    """One request at a time on an idle system: its latency over the latency without the wait for a batch."""
    target = here.path_target("mlp", mlp_rows())

    def seconds(part: str) -> float:
        return metric_sum(here.state, "worker-0", "fairway_worker_row_seconds_total", f'part="{part}"')

    await until_ready(target)
    waited_s, computed_s = seconds("waiting"), seconds("computing")
    taken = await closed_loop(target, connections=1, seconds=bench.effort.seconds, warm_s=0.0)
    rows = len(taken.seconds) or 1
    wait_ms = (seconds("waiting") - waited_s) / rows * 1e3
    mean_ms = sum(taken.seconds) / rows * 1e3
    print(
        f"{taken}; mean {mean_ms:.2f} ms, of which the batch "
        f"{(seconds('computing') - computed_s) / rows * 1e3:.2f}, waiting for it {wait_ms:.3f}",
        flush=True,
    )
    return {"single_vs_no_wait": round(mean_ms / (mean_ms - wait_ms), 3), "single_ms": round(mean_ms, 2)}


async def neighbours(bench: Bench, here: Installation) -> Mapping[str, Figure]:
    """Others' p95 while one tenant sends requests of 64 of the longest rows, over their p95 without."""
    effort = bench.effort
    own = here.path_target("encoder", token_rows(), name="neighbours")
    longest, api_key = token_rows([LONGEST] * 8), here.second_tenant()
    bursts = replace(longest, per_request=BURST_ROWS)
    heavy = here.path_target("encoder", bursts, name="burst", api_key=api_key)
    await until_ready(own)
    await until_ready(here.path_target("encoder", longest, api_key=api_key))
    most = (await closed_loop(own, connections=CONNECTIONS, seconds=effort.seconds / 2)).per_s
    times_s = times_of(Poisson(OTHERS_RATIO * most), effort.seconds, seed=2)
    ratios = []
    for number in range(effort.rounds):
        before = await open_loop(own, times_s, connections=CONNECTIONS)
        bursts_s = [0.25 + at_s for at_s in range(int(effort.seconds))]
        start = asyncio.Barrier(2)
        during, sent = await asyncio.gather(
            open_loop(own, times_s, connections=CONNECTIONS, start=start),
            open_loop(heavy, bursts_s, connections=2, start=start),
        )
        ratios.append(during.ms(0.95) / before.ms(0.95))
        print(
            f"round {number + 1}: p95 {before.ms(0.95):.1f} ms, with bursts {during.ms(0.95):.1f}; "
            f"of the bursts {sent.ms(0.95):.0f}",
            flush=True,
        )
    return {"neighbours_p95_ratio": ratios}


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


CASES: Final[Mapping[str, Callable[[Bench, Installation], Coroutine[None, None, Mapping[str, Figure]]]]] = {
    "closed": closed,
    "open": open_arrivals,
    "linger": linger,
    "single": single,
    "neighbours": neighbours,
}
# The deployment that each uses.
MODELS: Final = {
    "closed": "mlp",
    "open": "encoder",
    "linger": "mlp",
    "single": "mlp",
    "neighbours": "encoder",
}
