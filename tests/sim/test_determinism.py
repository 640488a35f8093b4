"""Same seed, same trace, in processes that hash strings differently and lie elsewhere in memory."""

from __future__ import annotations

import os
import subprocess
import sys

from simulator.invariants.seeds import run_seed

PROGRAM = """
import sys
shift = [bytearray(1000 + 7 * number) for number in range(int(sys.argv[1]))]
from simulator.invariants.seeds import run_seed
for seed in (1, 2):
    report = run_seed(seed, workers=6, requests=60).report
    print(seed, report.trace_digest, report.events, report.simulated_s, report.outcomes)
"""


def traces(hash_seed: str, shift: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(shift)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_same_seed_same_trace() -> None:
    assert traces("1", 0) == traces("4242", 5000)


def test_another_seed_has_another_trace() -> None:
    one, other = (run_seed(seed, workers=3, requests=10).report.trace_digest for seed in (1, 2))
    assert one != other
