"""A step of a vLLM worker that raises half-way: ``python -m tests.support.faulty_vllm_rows FOLDER``.

It runs in vLLM's environment, and writes what became of the batches.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from services.worker.batcher.models.rows import Packed, Row
from services.worker.engine_protocol import EngineConfig
from services.worker.engines.vllm.rows import VllmRows, load_rows

ROWS: list[Row] = [{"input_ids": np.arange(2, size)} for size in (5, 9, 30)]


def main(folder: str) -> None:
    model = load_rows(EngineConfig("", folder, executor="vllm_rows"), lambda phase, ratio: None)
    ranks: Any = model._ranks
    right, execute = model.run(Packed(ROWS)), ranks.execute_model
    left = [1]

    def raises(scheduled: Any) -> Any:
        found = execute(scheduled)
        if left and left.pop():
            raise MemoryError("after the forward pass")
        return found

    ranks.execute_model = raises
    print(outcome(model), same(model, right), flush=True)
    worker = ranks.driver_worker.worker.model_runner
    print("requests left:", len(worker.requests) - len(ROWS), flush=True)
    left.append(1)
    weights = next(worker.model.parameters()).data
    weights += 1.0  # what a step left behind
    print(outcome(model), flush=True)


def outcome(model: VllmRows) -> str:
    try:
        model.run(Packed(ROWS))
    except MemoryError:
        return "raised"
    except SystemExit as end:
        return f"ended by {int(end.code or 0)}"
    return "answered"


def same(model: VllmRows, right: Any) -> bool:
    return all(
        np.array_equal(one["embedding"], other["embedding"])
        for one, other in zip(model.run(Packed(ROWS)), right, strict=True)
    )


if __name__ == "__main__":
    main(sys.argv[1])
