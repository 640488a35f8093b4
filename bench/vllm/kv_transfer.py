"""What it costs to move KV between two processes of this machine, beside computing it again.

    python -m bench.vllm.kv_transfer --nixl-python FOLDER/bin/python [--prompt 960]

The interpreter has torch and NIXL (``nixl-cu12``, ``nixl --no-deps``). Each way moves the same blocks,
scattered in both pools; the first round, in which NIXL connects, is apart. At the end the source is killed,
and the target asks once more. The time of a prefill is of our engine. The last line is ``RESULT {json}``,
in ms per 1,000 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

from bench.engines.load import Request
from bench.engines.own import THROUGHPUT, OwnEngine
from bench.results import print_result
from bench.vllm.kv_peers import KvShape
from bench.vllm.served import TINY, larger
from fairway.formats.decoder_config import parse_config

ROUNDS: Final = 7
WAYS: Final = ("nixl", "socket")
Moved = tuple[float, str, bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nixl-python", required=True)
    parser.add_argument("--prompt", type=int, default=960, help="tokens")
    parser.add_argument("--folder", type=Path, default=Path(".fairway", "bench"), help="of the checkpoints")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("UCX_TLS", "tcp,sm,self")
    figures: dict[str, dict[str, float | str]] = {}
    for name, checkpoint in {"tiny": TINY, "llama56m": larger(options.folder)}.items():
        shape = _shape(checkpoint)
        found = figures[name] = {"kv_bytes_per_token": shape.layers * shape.token_bytes}
        scale = 1e6 / options.prompt
        for way in WAYS:
            rounds, after = move(shape, options.prompt, way, options.nixl_python)
            found[f"{way}_first"] = round(rounds[0][0] * scale, 2)
            found[way] = round(median(seconds for seconds, _, _ in rounds[1:]) * scale, 2)
            found[f"{way}_after_kill"] = f"{after[1]} after {after[0] * 1e3:.1f} ms"
            if not all(equal for _, _, equal in rounds):
                raise SystemExit(f"{way}: bytes differ")
        found["recomputed"] = round(recomputed_s(checkpoint, options.prompt) * scale, 2)
        print(name, found, flush=True)
    print_result(figures)


def move(shape: KvShape, tokens: int, way: str, python: str) -> tuple[list[Moved], Moved]:
    """Return the rounds of a way, and the one after the source was killed."""
    with contextlib.ExitStack() as undo:
        path = str(Path(undo.enter_context(tempfile.TemporaryDirectory())) / "link")
        listener = undo.enter_context(Listener(path, "AF_UNIX"))

        def started(role: str) -> tuple[subprocess.Popen[bytes], Connection]:
            numbers = (str(number) for number in (shape.layers, shape.token_bytes, tokens))
            command = [python, "-m", "bench.vllm.kv_peers", role, *numbers, way, path]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            undo.callback(process.wait)
            undo.callback(process.kill)
            return process, undo.enter_context(listener.accept())

        first, offered = started("source")
        _, asked = started("target")
        asked.send(offered.recv())
        asked.recv()
        rounds = [_round(asked) for _ in range(ROUNDS)]
        first.kill()
        first.wait()
        return rounds, _round(asked)


def _round(asked: Connection) -> Moved:
    asked.send(True)
    found: Moved = asked.recv()
    return found


def recomputed_s(checkpoint: Path, tokens: int) -> float:
    """Return the median time of our engine from a prompt to its first token, nothing cached."""
    rng, found = Random(3), []
    with OwnEngine.started(checkpoint, THROUGHPUT) as engine, engine.resumed():
        for _ in range(ROUNDS):
            prompt = [rng.randrange(5, 4096) for _ in range(tokens)]
            began_s = time.perf_counter()
            engine.generate([Request(prompt, 1)])
            found.append(time.perf_counter() - began_s)
    return median(found)


def _shape(checkpoint: Path) -> KvShape:
    config = parse_config(json.loads((checkpoint / "config.json").read_text()))
    return KvShape(config.layers, 2 * 4 * config.kv_heads * config.head_dim)


if __name__ == "__main__":
    main()
