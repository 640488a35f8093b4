"""The KV pool: keys and values of every layer, in blocks (PagedAttention, SOSP'23).

Layout per layer: [blocks * block_size, kv_heads, head_dim]. A slot is a row: block * block_size + offset.
A sequence whose blocks are consecutive is a slice of it; any other is gathered block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvShape:
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize


def kv_shape(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> KvShape:
    """Return the shape of the model's KV."""
    return KvShape(config.layers, config.kv_heads, config.head_dim, block_size, dtype)


class KvPool(Protocol):
    """What an executor needs of a pool, however its backend lays it out."""

    block_size: int

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), in all layers, one after the other."""


class KvCache:
    """The tensors. The attention backend is the only one that reads and writes them."""

    def __init__(self, shape: KvShape, blocks: int, device: torch.device) -> None:
        self.block_size = shape.block_size
        size = (shape.layers, blocks * shape.block_size, shape.kv_heads, shape.head_dim)
        self._keys = torch.zeros(size, dtype=shape.dtype, device=device)
        self._values = torch.zeros(size, dtype=shape.dtype, device=device)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [rows, kv_heads, head_dim] in the slots [rows]."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), in all layers, one after the other."""
        size = self.block_size
        for source, target in copies:
            here, there = slice(source * size, (source + 1) * size), slice(target * size, (target + 1) * size)
            self._keys[:, there] = self._keys[:, here]
            self._values[:, there] = self._values[:, here]

    def run(self, layer: int, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [length, kv_heads, head_dim] of consecutive slots, as views."""
        return self._keys[layer, start : start + length], self._values[layer, start : start + length]

    def pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [slots, kv_heads, head_dim] of all blocks, as views."""
        return self._keys[layer], self._values[layer]

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [blocks * block_size, kv_heads, head_dim], copied from blocks anywhere."""
        return self._gather(self._keys[layer], blocks), self._gather(self._values[layer], blocks)

    def _gather(self, pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        paged = pool.view(-1, self.block_size, *pool.shape[1:])
        return paged.index_select(0, blocks).flatten(0, 1)
