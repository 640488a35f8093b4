"""Causal attention over paged KV. ``Attention`` is the seam: other backends take the same ``Span``s.

``TorchAttention`` goes sequence by sequence, so what a sequence reads and in which order it is summed does
not depend on its neighbours. Keys are read in place where the blocks are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from services.worker.engine.execute.kv_cache import KvCache
from services.worker.engine.execute.step_rows import Span


class Attention(Protocol):
    """Owns the KV pool of one model.

    ``contexts_at_once`` is the number of sequences for which it holds memory that grows with their contexts.
    """

    @property
    def contexts_at_once(self) -> int: ...

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        """Prepare a step: ``slots`` [rows] int64 is where each row's key and value go."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k, v [rows, kv_heads, dim]; return [rows, heads * dim] for q [rows, heads, dim]."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One span under one window: keys from ``start`` on; ``mask`` [rows, keys], None: plain causal."""

    span: Span
    start: int
    mask: torch.Tensor | None
    gather: torch.Tensor | None


class TorchAttention:
    """``windows[layer]`` limits how many positions the layer looks back over, itself included."""

    contexts_at_once = 1  # one after the other is gathered

    def __init__(self, cache: KvCache, *, windows: Sequence[int | None], device: torch.device) -> None:
        self._cache = cache
        self._windows = tuple(windows)
        self._device = device
        self._slots = torch.empty(0, dtype=torch.int64)
        self._plans: dict[int | None, list[_Plan]] = {}

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        """Masks and indices of the step are ready, once for all layers of a kind."""
        self._slots = slots.to(self._device, non_blocking=True)
        self._plans = {
            window: [self._plan(span, window) for span in spans] for window in dict.fromkeys(self._windows)
        }

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Attention``."""
        self._cache.write(layer, self._slots, k, v)
        rows, heads, dim = q.shape
        out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
        for plan in self._plans[self._windows[layer]]:
            first = plan.span.first_row
            here = slice(first, first + plan.span.rows)
            keys, values = self._read(layer, plan)
            out[here] = _attend(q[here], keys, values, plan.mask)
        return out.view(rows, heads * dim)

    def _plan(self, span: Span, window: int | None) -> _Plan:
        first = span.length - span.rows  # position of the first row
        start = 0 if window is None else max(0, first - window + 1)
        mask = None
        if span.rows > 1 and (first > 0 or (window is not None and window < span.length)):
            queries = torch.arange(first, span.length, device=self._device)[:, None]
            keys = torch.arange(start, span.length, device=self._device)
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
        gather = None if span.contiguous else torch.tensor(self._blocks(span, start), device=self._device)
        return _Plan(span, start, mask, gather)

    def _blocks(self, span: Span, start: int) -> list[int]:
        """Return the blocks that hold positions ``start`` to ``length``."""
        size = self._cache.block_size
        return span.blocks[start // size : -(-span.length // size)]

    def _read(self, layer: int, plan: _Plan) -> tuple[torch.Tensor, torch.Tensor]:
        size, length = self._cache.block_size, plan.span.length - plan.start
        if plan.gather is None:
            return self._cache.run(layer, plan.span.blocks[0] * size + plan.start, length)
        keys, values = self._cache.gather(layer, plan.gather)
        offset = plan.start % size
        return keys[offset : offset + length], values[offset : offset + length]


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return [rows, heads, dim] for q of that shape and keys, values [length, kv_heads, dim].

    Query heads of a group share their KV head (GQA): head h reads KV head h // group.
    """
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    k, v = keys.transpose(0, 1), values.transpose(0, 1)  # [kv_heads, length, dim]
    if rows == 1:
        # The group's heads become rows of one product, so that each key is read once.
        folded = q.view(1, kv_heads, group, dim)
        return F.scaled_dot_product_attention(folded, k[None], v[None]).view(1, heads, dim)
    grouped = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    shared = (kv_heads, group, keys.shape[0], dim)
    result = F.scaled_dot_product_attention(
        grouped, k[:, None].expand(shared), v[:, None].expand(shared), mask, is_causal=mask is None
    )
    return result.permute(2, 0, 1, 3).reshape(rows, heads, dim)
