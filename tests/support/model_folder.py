"""Small model folders that a registry accepts."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from fairway.formats.safetensors import ALIGNED_BYTES, BITS


def safetensors(size_bytes: int, seed: int = 7) -> bytes:
    """Return a safetensors file of exactly that size: random tensors too small for chunks of their own."""
    for padding in range(128):  # a header grows by as much where one more tensor is needed
        data_bytes = size_bytes - 8 - len(_header(0)) - padding
        while data_bytes > 0:
            header = _header(data_bytes).ljust(len(_header(data_bytes)) + padding)
            surplus = 8 + len(header) + data_bytes - size_bytes
            if not surplus:
                return len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(data_bytes)
            if surplus < 0:
                break
            data_bytes -= surplus
    raise AssertionError(f"no file of {size_bytes} bytes")


def header_of(shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> bytes:
    """Return the header of a tensor file that holds tensors of these shapes, one after the other."""
    places, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        places[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [begin, end]}
    return json.dumps(places).encode()


def tensor_file(shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> bytes:
    """Return a tensor file of zeros."""
    header = header_of(shapes, dtype)
    zeros = bytes(sum(math.prod(shape) for shape in shapes.values()) * BITS[dtype] // 8)
    return len(header).to_bytes(8, "little") + header + zeros


def write_sparse(path: Path, shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> None:
    """Write a tensor file of zeros that takes no room on the disk."""
    header = header_of(shapes, dtype)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + sum(map(math.prod, shapes.values())) * BITS[dtype] // 8)


def _header(data_bytes: int) -> bytes:
    edges = [*range(0, data_bytes, ALIGNED_BYTES // 2), data_bytes]
    return json.dumps(
        {
            f"weight{begin}": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for begin, end in pairwise(edges)
        }
    ).encode()


def write_model(root: Path, *, weight_bytes: int = 4096, seed: int = 7) -> Path:
    """Return a folder with one file of each kind that decides a behaviour."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "tokenizer.json").write_text('{"version": "1.0"}')
    (root / "chat_template.jinja").write_text("{{ messages }}")
    (root / "generation_config.json").write_text('{"temperature": 0.5}')
    (root / "safety_policy.json").write_text('{"window_tokens": 16}')
    (root / "engine_limits.json").write_text('{"max_context_tokens": 4096, "max_sequences": 8}')
    (root / "model.safetensors").write_bytes(safetensors(weight_bytes, seed))
    return root
