"""vLLM behind Fairway beside bare ``vllm serve``, in turns on the same cores: ``make bench-vllm``.

32 streams of OpenAI completions at once, through gateway, scheduler and worker with ``executor: vllm`` and
from ``vllm serve`` of the same environment: float32, eager, blocks of 32, prefix caches on, sequences and
threads alike. ``tokens_per_s_vs_bare`` is the median of the pairs' ratios, ``added_ttft_p50_ms`` the median
by which one request alone gets its first token later; both are of the model where they are worse. The other
figures are of the engine process: streams cut at a drawn token and resumed in company, families against
transformers, two ranks against one, and how long an engine runs on without one of its ranks.

The last line is ``RESULT {json}``, with the figures of the ``--parts`` that ran.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import structlog

from bench.engines.runner import RunnerFailed
from bench.results import Figure, print_result
from bench.vllm import promises
from bench.vllm.served import TINY, Server, bare, larger, through_fairway
from bench.vllm.streams import AT_ONCE, Asked, drawn, stream, together

CORES: Final = 2
ALONE: Final = 40  # requests one after the other
VOCABULARY: Final = 4096
Figures = dict[str, Figure]


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers end as well
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    options.folder.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    if "path" in options.parts:
        checkpoints = {"tiny": TINY, "llama56m": larger(options.folder)}
        found = [_paths(name, checkpoints[name], options) for name in options.models]
        figures["tokens_per_s_vs_bare"] = min((each["ratio"] for each in found), key=median)
        figures["added_ttft_p50_ms"] = max((each["added_ms"] for each in found), key=median)
    if "promises" in options.parts:
        figures |= _promises(options)
    if "families" in options.parts:
        figures["families_equal"] = _families(options)
    print_result(figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-vllm", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=("tiny", "llama56m"), default=["tiny", "llama56m"])
    parts = ("path", "promises", "families")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--families", nargs="+", help="default: all")
    parser.add_argument("--threads", type=int, default=1, help="of an engine; the other core is the servers'")
    parser.add_argument("--vllm-dir", type=Path, default=Path(".venv-vllm"), help="vLLM's environment")
    parser.add_argument("--folder", type=Path, default=Path(".fairway", "bench"), help="of the checkpoints")
    return parser.parse_args()


def _python(options: argparse.Namespace) -> str:
    return str(options.vllm_dir.absolute() / "bin" / "python")


# --- the whole path ----------------------------------------------------------------------------------


def _paths(name: str, checkpoint: Path, options: argparse.Namespace) -> Mapping[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="fairway-bench-vllm-") as folder:
        log = Path(folder, "vllm.log")
        with (
            bare(checkpoint, options.vllm_dir, log, threads=options.threads) as theirs,
            through_fairway(
                checkpoint, options.vllm_dir, Path(folder, "state"), threads=options.threads
            ) as ours,
        ):
            return asyncio.run(_compare(name, ours, theirs, options.rounds))


async def _compare(name: str, ours: Server, theirs: Server, rounds: int) -> dict[str, list[float]]:
    rng = Random(0)
    for server in (ours, theirs):
        await together(server, drawn(rng, 4))
    pairs = []
    same = total = 0
    for number in range(rounds):
        requests = drawn(rng, AT_ONCE)
        turns = [(0, ours), (1, theirs)][:: 1 - 2 * (number % 2)]
        found = {place: await together(server, requests) for place, server in turns}
        pairs.append((found[0][0], found[1][0]))
        texts = zip(found[0][1], found[1][1], strict=True)
        same += sum(mine.text == other.text for mine, other in texts)
        total += AT_ONCE
    ratios = [mine / other for mine, other in pairs]
    print(
        f"{name}: {median(ratios):.3f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)}); "
        f"ours {median(mine for mine, _ in pairs):.0f}, "
        f"theirs {median(other for _, other in pairs):.0f} tokens/s; "
        f"{same} of {total} texts the same",
        flush=True,
    )
    added = await _added_ms(ours, theirs, rng)
    print(f"{name}: TTFT of one request alone, added: {median(added):.1f} ms of {ALONE}", flush=True)
    return {"ratio": ratios, "added_ms": added}


async def _added_ms(ours: Server, theirs: Server, rng: Random) -> list[float]:
    added = []
    for number in range(ALONE):
        asked = Asked(drawn(rng, 1)[0].prompt, 4)
        turns = [(0, ours), (1, theirs)]
        found = {
            place: (await stream(server, asked)).ttft_s for place, server in turns[:: 1 - 2 * (number % 2)]
        }
        added.append(1e3 * (found[0] - found[1]))
    return added


# --- the engine process ------------------------------------------------------------------------------


def _promises(options: argparse.Namespace) -> Figures:
    python = _python(options)
    ratio, whole = promises.resumed(TINY, python, VOCABULARY)
    same, lost_s = promises.two_ranks(TINY, python, VOCABULARY, whole)
    print(
        f"resumed {ratio:.3f}, two ranks the same: {same}, without one of them for {lost_s:.2f} s", flush=True
    )
    return {"identical_resume_ratio": ratio, "tp2_equal": same, "rank_loss_s": round(lost_s, 2)}


def _families(options: argparse.Namespace) -> int:
    """Return how many families are equal; transformers is imported for them alone."""
    from bench.vllm.families import FAMILIES, made

    equal = 0
    for name in options.families or FAMILIES:
        try:
            found = promises.family_equal(made(name, options.folder), _python(options))
        except RunnerFailed as error:
            print(f"  {name}: {error}", flush=True)
            continue
        print(f"  {name}: {'the same as transformers' if found else 'other tokens'}", flush=True)
        equal += found
    return equal


if __name__ == "__main__":
    main()
