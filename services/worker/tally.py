"""Tokens per tenant and version since the last report to the scheduler."""

from __future__ import annotations

from typing import NamedTuple


class TenantUse(NamedTuple):
    tenant_id: str
    version_digest: str
    prefill_tokens: int
    output_tokens: int


class Tally:
    """Adds up until taken. Its keys are those of sequences that ran, at most so many between two reports."""

    def __init__(self) -> None:
        self._prefill: dict[tuple[str, str], int] = {}
        self._output: dict[tuple[str, str], int] = {}

    def add_prefill(self, tenant_id: str, version_digest: str, tokens: int) -> None:
        key = (tenant_id, version_digest)
        self._prefill[key] = self._prefill.get(key, 0) + tokens

    def add_output(self, tenant_id: str, version_digest: str, tokens: int) -> None:
        if tokens:
            key = (tenant_id, version_digest)
            self._output[key] = self._output.get(key, 0) + tokens

    def take(self, limit: int) -> tuple[TenantUse, ...]:
        """Return and forget at most ``limit`` entries, in order of tenant and version."""
        keys = sorted({*self._prefill, *self._output})[:limit]
        return tuple(TenantUse(*key, self._prefill.pop(key, 0), self._output.pop(key, 0)) for key in keys)
