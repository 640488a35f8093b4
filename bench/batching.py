"""Fixed-cost models against Triton, LitServe and Ray Serve, in parts: ``ARGS="--only closed"`` runs one.

``make bench-batching``, after ``make bench-batching-peers``. The same weights and the same model code on the
same cores, in turns, each peer at its best fixed window. One load generator for all
(``bench/batched/connections.py``), whose share of a core is printed.

- ``closed``: requests/s of 64 clients in a closed loop: the worker by its Execute stream, the whole path;
- ``open``: mixed lengths, Poisson and bursty arrivals: the highest rate at which p99 is at most 50 ms;
- ``linger``: the derived window over the best fixed one on the worker, by sweep;
- ``single``: one request at a time, over the same without the wait for a batch;
- ``neighbours``: others' p95 while a tenant sends bursts of the longest rows, over the same without.

The last line is ``RESULT {json}``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import uvloop

from bench.batch_costs import MLP
from bench.batched.cases import CASES, MODELS, PEERS, Bench, Effort
from bench.batched.model import ENCODER, write_model
from bench.batched.peers.install import FOLDER
from bench.batched.systems import installation
from bench.results import Figure, print_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers-folder", type=Path, default=FOLDER)
    parser.add_argument("--peers", default=",".join(PEERS), help="separated by commas; empty: none")
    parser.add_argument("--only", default=",".join(CASES), help="parts, separated by commas")
    parser.add_argument("--rounds", type=int, help="default: 3")
    parser.add_argument("--windows", type=int, help="how many windows of each peer are tried; default: 4")
    parser.add_argument("--quick", action="store_true", help="a smoke test: its figures say nothing")
    options = parser.parse_args()
    cases = options.only.split(",")
    if unknown := [each for each in cases if each not in CASES]:
        parser.error(f"there is no part {unknown[0]!r}: use {', '.join(CASES)}")
    names = tuple(filter(None, options.peers.split(",")))
    if unknown := [each for each in names if each not in PEERS]:
        parser.error(f"there is no peer {unknown[0]!r}: use {', '.join(PEERS)}")
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory(prefix="fairway-bench-") as scratch:
        folder = Path(scratch)
        models = {
            name: write_model(fields, folder / "models" / name)
            for name, fields in (("mlp", MLP), ("encoder", ENCODER))
        }
        effort = Effort.quick() if options.quick else Effort()
        effort = replace(
            effort,
            rounds=options.rounds or effort.rounds,
            windows=effort.windows[: options.windows or len(effort.windows)],
        )
        bench = Bench(folder, options.peers_folder.resolve(), names, effort, models)
        with installation(folder / "fairway") as here:
            for name in dict.fromkeys(MODELS[case] for case in cases):
                here.deploy(name, models[name])
            for case in cases:
                print(f"{case}: {(CASES[case].__doc__ or '').partition(chr(10))[0]}", flush=True)
                figures |= uvloop.run(CASES[case](bench, here))
                print(f"{case}: {figures}", flush=True)
    print_result(figures)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
