"""Random checkpoints of fixed-cost models, as transformers writes them, and rows for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from services.worker.batcher.models.rows import Row

VOCABULARY: Final = 53
POSITIONS: Final = 40  # of a row
BERT_LIKE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 36,
    "max_position_embeddings": POSITIONS,
}
DISTILBERT: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "dim": 24,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 36,
    "max_position_embeddings": POSITIONS,
}
RESNET: Final[dict[str, Any]] = {"embedding_size": 6, "hidden_sizes": [8, 12, 16], "depths": [1, 2, 1]}
VIT: Final[dict[str, Any]] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 36,
    "image_size": [12, 8],
    "patch_size": 4,
}
# By family: the fields of its configuration.
FIELDS: Final[dict[str, dict[str, Any]]] = {
    "Bert": BERT_LIKE,
    "Roberta": BERT_LIKE | {"max_position_embeddings": POSITIONS + 2},
    "XLMRoberta": BERT_LIKE | {"max_position_embeddings": POSITIONS + 2},
    "DistilBert": DISTILBERT,
    "Gemma2": BERT_LIKE,
    "ResNet": RESNET,
    "ViT": VIT,
}


def save(family: str, kind: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Any:
    """Write a random checkpoint of ``family`` + ``kind``; return the model of transformers."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(FIELDS[family] | overrides))
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0)
            elif tensor.is_floating_point():
                # Norms of one and biases of zero would hide that they are forgotten.
                is_gain = tensor.dim() == 1 and name.endswith("weight")
                tensor.normal_(1.0, 0.3) if is_gain else tensor.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return model


def save_pooling(folder: Path, *, mode: str = "mean_tokens", normalize: bool = True, width: int = 24) -> None:
    """Write the files with which sentence-transformers declares a pooling."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    if not normalize:
        del kinds["Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    pooling = {f"pooling_mode_{name}": name == mode for name in modes}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(pooling | {"word_embedding_dimension": width})
    )


def save_last_token(folder: Path, width: int = 256) -> None:
    """Declare that a decoder embeds by its last token."""
    save_pooling(folder, mode="lasttoken", width=width)


def token_row(rng: np.random.Generator, length: int, *, types: bool = True) -> Row:
    """Return a row without padding ids."""
    row: dict[str, Any] = {"input_ids": rng.integers(2, VOCABULARY, length, dtype=np.int64)}
    if types:
        row["token_type_ids"] = rng.integers(0, 2, length, dtype=np.int64)
    return row


def images(rng: np.random.Generator, count: int, height: int, width: int) -> list[Row]:
    return [{"pixel_values": rng.standard_normal((3, height, width), dtype=np.float32)} for _ in range(count)]


def own_outputs(model: Any, rows: Sequence[Row]) -> list[Any]:
    """Return what transformers computes of each row alone."""
    found = []
    with torch.inference_mode():
        for row in rows:
            found.append(model(**{name: torch.from_numpy(tensor)[None] for name, tensor in row.items()}))
    return found
