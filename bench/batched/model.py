"""The models under load, on random weights, and requests for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench.batch_costs import MLP, write_random
from fairway.inference import v2_pb2
from fairway.v1 import common_pb2

# A small encoder: about as many rows per second as a gateway can bring.
ENCODER: Final[dict[str, Any]] = {
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
REQUESTS: Final = 128
MEAN_LOG: Final = 3.2  # lengths of rows: log-normal, the middle 25 tokens
SPREAD: Final = 0.7
LONGEST: Final = 256


def write_model(fields: dict[str, Any], folder: Path) -> Path:
    """Write a version of random weights, as one that is published."""
    folder.mkdir(parents=True)
    write_random(fields, folder)
    if "vocab_size" in fields:  # gateways need one; requests bring token ids
        Tokenizer(WordLevel({"[UNK]": 0}, "[UNK]")).save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one model: the tensor's name, its data type in the protocol, and the values.

    ``per_request``: each request has so many rows, all equal.
    """

    name: str
    datatype: str
    values: tuple[NDArray[Any], ...]
    per_request: int = 1

    def as_v2(self, model: str) -> list[bytes]:
        """Return a request of the public inference protocol on a stream for each value."""
        return [
            v2_pb2.ModelInferRequest(
                model_name=model,
                inputs=[
                    v2_pb2.ModelInferRequest.InferInputTensor(
                        name=self.name, datatype=self.datatype, shape=[self.per_request, *row.shape]
                    )
                ],
                raw_input_contents=[row.tobytes() * self.per_request],
            ).SerializeToString()
            for row in self.values
        ]

    def padded(self, to: int) -> Rows:
        """Return the rows with zeros at the end, each to a multiple of ``to`` tokens."""
        if self.datatype != "INT64":
            return self
        return Rows(self.name, self.datatype, tuple(np.pad(row, (0, -len(row) % to)) for row in self.values))

    def as_json(self) -> list[bytes]:
        """Return the JSON of a request of LitServe and Ray Serve for each row."""
        return [
            json.dumps({"x": [round(value, 4) for value in row.tolist()]}).encode() for row in self.values
        ]

    def tensor(self, index: int) -> common_pb2.Tensor:
        row = self.values[index % len(self.values)]
        return common_pb2.Tensor(name=self.name, datatype=self.datatype, shape=row.shape, data=row.tobytes())


def mlp_rows() -> Rows:
    rng = np.random.default_rng(0)
    values = rng.uniform(-1, 1, (REQUESTS, MLP["input_size"])).astype(np.float32)
    return Rows("input", "FP32", tuple(values))


def token_rows(lengths: Sequence[int] | None = None) -> Rows:
    """Return rows of these lengths, by default mixed ones."""
    rng = np.random.default_rng(1)
    if lengths is None:
        drawn = rng.lognormal(MEAN_LOG, SPREAD, REQUESTS)
        lengths = np.clip(drawn.astype(int), 3, LONGEST).tolist()
    high = ENCODER["vocab_size"]
    values = tuple(rng.integers(1, high, length).astype(np.int64) for length in lengths)
    return Rows("input_ids", "INT64", values)
