"""Small versions of fixed-cost models with a tokenizer, and a runner that computes their rows here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from services.core.fixed_cost.rows import RawTensor, RowEnd, RowsRequest
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.model import FixedCostModel
from services.worker.batcher.models.rows import DTYPES, Padded, Row
from tests.support import fixed_cost

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog")


def tokenizer() -> Tokenizer:
    """Return a tokenizer of whole words, with the special tokens of BERT."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def embedding_version(folder: Path, **overrides: Any) -> Path:
    """Write an embedding model whose vectors of 24 have length 1."""
    fixed_cost.save("Bert", "Model", folder, **overrides)
    fixed_cost.save_pooling(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def reranker_version(folder: Path, **overrides: Any) -> Path:
    """Write a cross-encoder with one label."""
    fixed_cost.save("Bert", "ForSequenceClassification", folder, num_labels=1, **overrides)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def classifier_version(folder: Path, **overrides: Any) -> Path:
    """Write a classifier of texts with three labels."""
    named = {"id2label": {0: "anger", 1: "joy", 2: "fear \u00e9"}}
    fixed_cost.save("Bert", "ForSequenceClassification", folder, **(named | overrides))
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def picture_version(folder: Path) -> Path:
    """Write a classifier of images of 12 x 8 pixels with two labels."""
    fixed_cost.save("ViT", "ForImageClassification", folder, id2label={0: "cat", 1: "dog"})
    fields = {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 8}}
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return folder


def mlp_version(folder: Path) -> Path:
    """Write a model of 4 inputs and 3 outputs, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["Mlp"], "input_size": 4, "layers": [{"size": 3, "activation": "none"}]}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    tensors = {"layers.0.weight": torch.randn(3, 4), "layers.0.bias": torch.randn(3)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def arrays(row: tuple[RawTensor, ...]) -> Row:
    return {
        tensor.name: np.frombuffer(tensor.data, DTYPES[tensor.datatype]).reshape(tensor.shape)
        for tensor in row
    }


@dataclass
class LocalRows:
    """Implements ``RowRunner``: computes each row alone, by models that a test loaded.

    ``ends``: of rows that end otherwise, by their place; ``raises``: what the next calls raise.
    """

    models: dict[str, FixedCostModel] = field(default_factory=dict)
    requests: list[RowsRequest] = field(default_factory=list)
    ends: dict[int, RowEnd] = field(default_factory=dict)
    raises: list[Exception] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    on_run: Callable[[RowsRequest], None] = lambda request: None

    def load(self, version_digest: str, folder: Path) -> None:
        self.models[version_digest] = load_model(folder)

    async def run(self, request: RowsRequest) -> tuple[RowEnd, ...]:
        """See ``RowRunner``."""
        self.requests.append(request)
        self.on_run(request)
        self.running += 1
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        if self.raises:
            raise self.raises.pop(0)
        return tuple(self.ends.get(index) or self._end(request, index) for index in range(len(request.rows)))

    def _end(self, request: RowsRequest, index: int) -> RowEnd:
        model, row = self.models[request.version_digest], arrays(request.rows[index])
        assert not (problem := model.problem(row)), problem
        width = len(row["input_ids"]) if "input_ids" in row else 0
        (found,) = model.run(Padded([row], width))
        outputs = tuple(
            RawTensor(spec.name, spec.datatype, found[spec.name].shape, found[spec.name].tobytes())
            for spec in model.facts.outputs
        )
        return RowEnd(outputs, device_s=0.25, wait_s=0.001, batch_rows=1, batch_cause="full")
