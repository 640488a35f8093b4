"""Usage of tenants and sequences since the last report to the scheduler."""

from __future__ import annotations

from typing import Final

from services.core.fleet import SequenceUsage, TenantTokens
from services.core.records import Priority

MAX_ENDED: Final = 65536

Key = tuple[str, str, Priority]


class Tally:
    """Accumulates usage until it is taken. Tokens and rows are counted by (tenant, version, class). The
    newest ``MAX_ENDED`` ended sequences are retained; ``ended_dropped`` counts the others."""

    def __init__(self, *, max_ended: int = MAX_ENDED) -> None:
        self.ended_dropped = 0
        self._max_ended = max_ended
        self._prefill: dict[Key, tuple[int, int]] = {}
        self._output: dict[Key, int] = {}
        self._rows: dict[Key, tuple[int, float]] = {}
        self._ended: dict[tuple[str, int], SequenceUsage] = {}

    def add_prefill(self, key: Key, tokens: int, cached_tokens: int) -> None:
        """Count a prompt, ``cached_tokens`` of which came from the prefix cache."""
        had_tokens, had_cached = self._prefill.get(key, (0, 0))
        self._prefill[key] = had_tokens + tokens, had_cached + cached_tokens

    def add_output(self, key: Key, tokens: int) -> None:
        if tokens:
            self._output[key] = self._output.get(key, 0) + tokens

    def add_rows(self, key: Key, rows: int, device_s: float) -> None:
        """Count rows of a fixed-cost model, and the device time of batches that they are charged."""
        had_rows, had_s = self._rows.get(key, (0, 0.0))
        self._rows[key] = had_rows + rows, had_s + device_s

    def add_ended(self, usage: SequenceUsage) -> None:
        """Store the final usage of a sequence; it replaces an earlier one of the same sequence."""
        key = usage.request_id, usage.choice
        self._ended.pop(key, None)
        self._ended[key] = usage
        if len(self._ended) > self._max_ended:
            del self._ended[next(iter(self._ended))]
            self.ended_dropped += 1

    def take(self, limit: int) -> tuple[TenantTokens, ...]:
        """Return and remove at most ``limit`` entries, in order of tenant, version and class."""
        keys = sorted({*self._prefill, *self._output, *self._rows})[:limit]
        found: list[TenantTokens] = []
        for tenant, digest, priority in keys:
            key = tenant, digest, priority
            prefill, cached = self._prefill.pop(key, (0, 0))
            output = self._output.pop(key, 0)
            rows, device_s = self._rows.pop(key, (0, 0.0))
            device_us = round(device_s * 1e6)
            found.append(TenantTokens(tenant, digest, prefill, output, priority, cached, rows, device_us))
        return tuple(found)

    def take_ended(self, limit: int) -> tuple[SequenceUsage, ...]:
        """Return and remove the final usage of at most ``limit`` sequences, the oldest first."""
        keys = list(self._ended)[:limit]
        return tuple(self._ended.pop(key) for key in keys)
