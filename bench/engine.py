"""Our engine and its peers on the same weights, the same traffic and the same two cores.

``make bench-engine``; ``make bench-engine-peers`` installs the peers, and one that is not installed is named
as missing. Two checkpoints with random weights, float32, greedy, end-of-sequence ignored: 32 requests at once
with prompts of 64 to 512 and outputs of 16 to 128 tokens. Ours is the production engine process, driven
over its socket. Turns of ours and of a peer alternate; a ratio is the median over pairs of turns.

The last line is ``RESULT {json}``, each figure that of the model where it is worse, null where it was not
measured: ``vs_*`` and ``batch1_vs_llama_cpp`` are our output tokens/s over theirs. ``prefix_ttft_ratio`` is
the TTFT of a request with a cached prefix of 2,000 tokens over a cold one's. ``spec_gain`` is tokens/s with
speculation over those without where text repeats, ``spec_loss`` the part of them that it costs where text
does not (0.03: 3 %).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, TypeAlias

import structlog

from bench.engines import arrival, mechanisms, own_measures
from bench.engines.checkpoints import MODELS, checkpoint
from bench.engines.load import Request, output_tokens, prompt_tokens, random_ids, workload
from bench.engines.own import THREADS, THROUGHPUT, OwnEngine
from bench.engines.own_measures import profile
from bench.engines.peers.catalog import ALONE, PEERS, Peer, is_installed
from bench.engines.rounds import Compared, compare
from bench.engines.runner import PeerRunner, Runner, RunnerFailed
from bench.results import print_result

Values: TypeAlias = list[float]  # the values of one figure, by round
Figures: TypeAlias = dict[str, Values | None]

RESULT: Final[Mapping[str, Callable[..., Values]]] = {
    "vs_vllm_compiled": min,
    "vs_vllm_eager": min,
    "vs_llama_cpp": min,
    "vs_transformers_static": min,
    "vs_transformers_continuous": min,
    "batch1_vs_llama_cpp": min,
    "prefix_ttft_ratio": max,
    "spec_gain": min,
    "spec_loss": max,
}  # and which of two models' figures is the worse one
BATCH_1: Final = (Request(random_ids(Random(3), 128), 128),)
TWICE: Final = "target twice the ITL"
PLOT: Final = Path("docs", "architecture", "prefill-chunking.json")  # of scripts/plot_simulation.py


def main() -> None:
    options = _options()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    options.folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name in options.models:
        there = checkpoint(name, options.folder)
        print(f"{name}: {prompt_tokens(workload())} prompt and {output_tokens(workload())} output tokens")
        found.append(_peers(there, options) | _own(there, options))
    by_model = dict(zip(options.models, found, strict=True))
    print_result({name: worse(name, found) for name in RESULT} | by_model)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="*", choices=[peer.name for peer in PEERS])
    parser.add_argument("--folder", type=Path, default=Path(".fairway", "bench"), help="of the checkpoints")
    parser.add_argument("--installed", type=Path, help="the folder of the peers; default: FOLDER/peers")
    parser.add_argument("--no-own", action="store_true", help="do not measure our own mechanisms")
    parser.add_argument("--profile", action="store_true", help="print where our engine's time goes")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.installed = (options.installed or options.folder / "peers").resolve()
    return options


def _peers(there: Path, options: argparse.Namespace) -> Figures:
    """Compare with each peer that is requested and installed; name the others."""
    requested = [peer for peer in PEERS if options.peers is None or peer.name in options.peers]
    for peer in requested:
        if not is_installed(options.installed, peer.environment):
            print(f"  {peer.name}: missing: not installed below {options.installed.name}")
    with contextlib.ExitStack() as undo:
        own = undo.enter_context(OwnEngine.started(there))
        with own.resumed():
            print(f"  ours: {own_measures.latencies(own.generate(workload())).line()}")
        peers = _started(requested, there, options, undo)
        figures = {
            f"vs_{entry.peer}": entry.rounds
            for entry in _print_all(compare(own, peers, workload(), rounds=options.rounds))
        }
        if "llama_cpp" in peers and (alone := _started([ALONE], there, options, undo)):
            print("  one request at a time:")
            (entry,) = _print_all(compare(own, alone, BATCH_1, rounds=options.rounds))
            figures["batch1_vs_llama_cpp"] = entry.rounds
    return figures


def _started(
    requested: Sequence[Peer], there: Path, options: argparse.Namespace, undo: contextlib.ExitStack
) -> dict[str, Runner]:
    logs = Path(undo.enter_context(tempfile.TemporaryDirectory()))
    peers: dict[str, Runner] = {}
    for peer in requested:
        if is_installed(options.installed, peer.environment):
            try:
                started = PeerRunner.started(peer, there, options.installed, logs)
                peers[peer.name] = undo.enter_context(started)
            except RunnerFailed as error:
                print(f"  {peer.name}: missing: {error}")
    return peers


def _print_all(entries: list[Compared]) -> list[Compared]:
    for entry in entries:
        print(entry.line(), flush=True)
    return entries


def _own(there: Path, options: argparse.Namespace) -> Figures:
    """Measure what the engine's own mechanisms are worth."""
    if options.profile:
        print("  where the time goes:")
        print("\n".join(profile(there, THROUGHPUT, workload()).lines()))
    if options.no_own:
        return {}
    batching = own_measures.continuous_over_static(there, workload(), rounds=options.rounds)
    print(f"  continuous over static batching, {own_measures.SMALL_BATCH} at once: {batching:.2f}")
    price = own_measures.exact_over_free(there, rounds=options.rounds)
    print(f"  mode exact over free, bfloat16 (float32: the same code): {price:.2f}")
    saved = own_measures.cache_saves(there, rounds=options.rounds)
    print(f"  64 tokens in and 64 out, all computed again for each: {saved:.1f} times as long as with KV")
    return {
        "continuous_over_static": [batching],
        "exact_over_free": [price],
        "cache_saves": [saved],
        "prefill_p99_itl_ratio": _arrivals(there, options),
        **_mechanisms(there, options),
    }


def _mechanisms(there: Path, options: argparse.Namespace) -> Figures:
    """Measure what the prefix cache and speculation save, and cost."""
    hits = mechanisms.prefix_hits(there, rounds=options.rounds)
    cold_s, cached_s = median(hit.cold_s for hit in hits), median(hit.cached_s for hit in hits)
    tokens = min(hit.cached_tokens for hit in hits)
    print(f"  TTFT cold {1e3 * cold_s:.0f} ms, {1e3 * cached_s:.0f} ms with {tokens} tokens cached")
    found = mechanisms.speculation(there.name, options.folder, rounds=options.rounds)
    ratios = {}
    for kind, entry in found.items():
        print(f"  text is {kind}, {mechanisms.AT_ONCE} at once, with speculation:")
        _print_all([entry])
        ratios[kind] = entry.rounds or [0.0]
    return {
        "prefix_ttft_ratio": mechanisms.prefix_ratios(hits),
        "spec_gain": ratios["repeats"],
        "spec_loss": [1.0 - each for each in min(ratios["fresh"], ratios["misleading"], key=median)],
    }


def _arrivals(there: Path, options: argparse.Namespace) -> Values:
    """Print what a long prompt does to streams, by how its prefill is cut; the last round is for a plot.

    Return the p99 of ITL over that before, by round, with a target of twice the ITL.
    """
    found: dict[str, list[arrival.Arrival]] = {}
    for _ in range(options.rounds):
        whole = arrival.measure(there, arrival.WHOLE)
        targets = {
            TWICE: arrival.TWICE * whole.quiet_p50_s,
            f"target {1e3 * arrival.DEFAULT_TARGET_S:.0f} ms": arrival.DEFAULT_TARGET_S,
        }
        for name, target_s in targets.items():
            found.setdefault(name, []).append(arrival.measure(there, arrival.chunked(target_s)))
        found.setdefault("in one step", []).append(whole)
    print(f"  {arrival.LONG_PROMPT} tokens arrive among {arrival.STREAMS} streams, prefilled:")
    for name, rounds in found.items():
        print(
            f"    {name}: p99 ITL times {median(each.ratio for each in rounds):.2f}, "
            f"at most {1e3 * median(max(gap for _, gap in each.gaps) for each in rounds):.0f} ms, "
            f"their own TTFT {median(each.ttft_s for each in rounds):.2f} s"
        )
    if there.name == options.models[0]:
        panel = arrival.panel({name: rounds[-1] for name, rounds in found.items()})
        PLOT.write_text(json.dumps({"panels": [panel]}))
    return [each.ratio for each in found[TWICE]]


def worse(name: str, found: Sequence[Mapping[str, Values | None]]) -> Values | None:
    """Return the values of the model whose median is worse; None unless every model has some."""
    values = [figures.get(name) for figures in found]
    known = [value for value in values if value is not None]
    return RESULT[name](known, key=median) if len(known) == len(values) else None


if __name__ == "__main__":
    main()
