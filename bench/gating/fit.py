"""Derive the noise model of ``bench.gates`` from recorded traces, and write it to ``noise.json``.

Sessions are the chains of a Mooncake trace whose prompts continue each other (shared blocks after the first
two); the load by minute is that of an Azure trace. Usage: ``python -m bench.gating.fit MOONCAKE AZURE``.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.gating.noise import MODEL_FILE
from simulator.lab.load.traces import TraceRow, read_trace

_SHARED_BLOCKS = 2  # of every prompt: the system prompt


def sessions_of(rows: Sequence[TraceRow]) -> list[list[TraceRow]]:
    """Return the rows by session: a row continues the session that last had its latest known block."""
    found: list[list[TraceRow]] = []
    owner: dict[int, int] = {}
    for row in rows:
        blocks = row.blocks[_SHARED_BLOCKS:]
        session = next((owner[block] for block in reversed(blocks) if block in owner), len(found))
        if session == len(found):
            found.append([])
        found[session].append(row)
        owner.update(dict.fromkeys(blocks, session))
    return found


def components(sessions: Sequence[Sequence[TraceRow]], of: Callable[[TraceRow], int]) -> dict[str, float]:
    """Return the logarithm's mean and its deviations between and within sessions (analysis of variance)."""
    groups = [np.log([of(row) for row in rows]) for rows in sessions]
    values = np.concatenate(groups)
    total, count = len(values), len(groups)
    within = sum(((group - group.mean()) ** 2).sum() for group in groups) / (total - count)
    between = sum(len(group) * (group.mean() - values.mean()) ** 2 for group in groups) / (count - 1)
    size = (total - sum(len(group) ** 2 for group in groups) / total) / (count - 1)
    return {
        "mean": round(float(values.mean()), 4),
        "between": round(math.sqrt(max(0.0, (between - within) / size)), 4),
        "within": round(math.sqrt(within), 4),
    }


def main() -> None:
    mooncake, azure = (list(read_trace(Path(path))) for path in sys.argv[1:3])
    sessions = sessions_of(mooncake)
    sizes = Counter(map(len, sessions))
    minutes = np.bincount([int(row.arrival_s // 60) for row in azure])[:-1]
    model = {
        "session_sizes": {str(size): sizes[size] for size in sorted(sizes)},
        "log_prompt_tokens": components(sessions, lambda row: row.prompt_tokens),
        "log_output_tokens": components(sessions, lambda row: row.output_tokens),
        "load_by_minute": [round(float(one), 3) for one in minutes / minutes.mean()],
    }
    MODEL_FILE.write_text(json.dumps(model, indent=1) + "\n")


if __name__ == "__main__":
    main()
