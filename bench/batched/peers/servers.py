"""The peers' servers: ``python -m bench.batched.peers.servers NAME --model FOLDER --port N ...``.

Each runs in its own environment and computes with this project's model code, so that the serving alone
differs. Rows of tokens are padded to the longest of a batch, as in the examples of these frameworks; with
``--packed`` they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.model import FixedCostModel
from services.worker.batcher.models.rows import Packed, Padded, Row

MODEL: Final = "m"
PAD_TO: Final = 32  # tokens


def cut(row: Any) -> Any:
    """Return the tokens of a row without the padding at its end; other rows as they are."""
    return np.trim_zeros(row, "b") if row.dtype == np.int64 else row


class Runner:
    """A model on one thread."""

    def __init__(self, folder: Path, *, packed: bool) -> None:
        torch.set_num_threads(1)
        self._model: FixedCostModel = load_model(folder)
        self._packed = packed
        self.input = self._model.facts.inputs[0]
        self.output = self._model.facts.outputs[0]

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Return the output of each row."""
        rows: list[Row] = [{self.input.name: value} for value in values]
        width = max(len(value) for value in values) if self.input.has_length else 0
        batch = Packed(rows) if self._packed and width else Padded(rows, width)
        return [outputs[self.output.name] for outputs in self._model.run(batch)]

    @property
    def dtype(self) -> Any:
        return np.int64 if self.input.has_length else np.float32


def triton(options: argparse.Namespace) -> None:
    """pytriton: Triton's batcher in front of a Python function.

    Its batches have rows of one shape, so clients pad rows of tokens to ``PAD_TO``; what they padded is cut.
    """
    config: Any = importlib.import_module("pytriton.model_config")
    server: Any = importlib.import_module("pytriton.triton")
    runner = Runner(options.model, packed=options.packed)
    name, output = runner.input.name, runner.output.name

    def infer(requests: Sequence[Any]) -> list[dict[str, Any]]:
        rows = [cut(row) for request in requests for row in request.data[name]]
        found = iter(runner.run(rows))
        return [{output: np.stack([next(found) for _ in request.data[name]])} for request in requests]

    shape = (-1,) if runner.input.has_length else runner.input.shape
    inputs = [config.Tensor(name=name, dtype=runner.dtype, shape=shape)]
    outputs = [config.Tensor(name=output, dtype=np.float32, shape=runner.output.shape)]
    batcher = config.DynamicBatcher(max_queue_delay_microseconds=round(options.window * 1e6))
    addresses = server.TritonConfig(
        http_address="127.0.0.1", http_port=options.port, grpc_address="127.0.0.1",
        grpc_port=options.grpc_port, metrics_address="127.0.0.1", metrics_port=options.metrics_port,
    )  # fmt: skip
    with server.Triton(config=addresses) as running:
        running.bind(
            model_name=MODEL,
            infer_func=infer,
            inputs=inputs,
            outputs=outputs,
            config=config.ModelConfig(max_batch_size=options.batch, batcher=batcher),
        )
        running.serve()


def litserve(options: argparse.Namespace) -> None:
    module: Any = importlib.import_module("litserve")
    api: Any = importlib.import_module("bench.batched.peers.litserve_api")
    served = api.Api(max_batch_size=options.batch, batch_timeout=options.window)
    served.load = functools.partial(Runner, options.model, packed=options.packed)
    server = module.LitServer(served, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=options.port,
        log_level="error",
        generate_client_file=False,
        num_api_servers=1,
    )


def ray_serve(options: argparse.Namespace) -> None:
    ray: Any = importlib.import_module("ray")
    serve: Any = importlib.import_module("ray.serve")

    class Served:
        def __init__(self) -> None:
            self.runner = Runner(options.model, packed=options.packed)

        @serve.batch(max_batch_size=options.batch, batch_wait_timeout_s=options.window)  # type: ignore[untyped-decorator]
        async def infer(self, rows: list[Any]) -> list[Any]:
            values = [np.array(row, self.runner.dtype) for row in rows]
            return [output.tolist() for output in self.runner.run(values)]

        async def __call__(self, request: Any) -> dict[str, Any]:
            return {"y": await self.infer((await request.json())["x"])}

    deployed = serve.deployment(
        num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.5}
    )(Served)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    serve.run(deployed.bind())
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(1)


SERVERS: Final = {"triton": triton, "litserve": litserve, "ray_serve": ray_serve}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(SERVERS))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, default=0)
    parser.add_argument("--metrics-port", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--window", type=float, default=0.005, help="seconds")
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    SERVERS[options.name](options)


if __name__ == "__main__":
    main()
