"""Same seed, same trace: whatever the hash seed and wherever things lie in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sim.kernel.program import trace_of

ROOT = Path(__file__).parents[3]


def elsewhere(seed: int, *, hash_seed: int, waste: int) -> str:
    """Return the length and digest of the trace in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.kernel.program", str(seed), str(waste)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def test_the_trace_is_a_function_of_the_seed() -> None:
    first, again, other = trace_of(7), trace_of(7), trace_of(8)
    assert first == again
    assert first != other
    assert len(first) > 500


def test_neither_hash_seeds_nor_addresses_matter() -> None:
    one = elsewhere(7, hash_seed=1, waste=0)
    two = elsewhere(7, hash_seed=4242, waste=20_000_000)
    assert one == two
