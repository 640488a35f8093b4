"""The memory ledger of one device: what each engine process may use for weights, working memory and KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from services.core.errors import DoesNotFit

SLAB_BYTES: Final = 16 * 1024 * 1024  # a KV budget smaller than requested is a multiple of it
MIN_KV_BYTES: Final = SLAB_BYTES


@dataclass(frozen=True, slots=True)
class MemoryGrant:
    """What one engine may use, in bytes. ``label`` names the owner in messages.

    ``working_bytes`` covers a step and what loading allocates in addition to the weights; 0 while unknown.
    """

    owner: str
    label: str
    weight_bytes: int
    working_bytes: int
    kv_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Weights and working memory: all but the KV."""
        return self.weight_bytes + self.working_bytes

    @property
    def bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes


class MemoryLedger:
    """Grants of device memory by owner. Their sum never exceeds ``total_bytes``."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._grants: dict[str, MemoryGrant] = {}

    @property
    def total_bytes(self) -> int:
        return self._total

    @property
    def free_bytes(self) -> int:
        return self._total - sum(grant.bytes for grant in self._grants.values())

    def held_by(self, owner: str) -> MemoryGrant | None:
        """Return the owner's grant, or None."""
        return self._grants.get(owner)

    def grant(
        self,
        owner: str,
        *,
        weight_bytes: int,
        kv_bytes: int,
        working_bytes: int = 0,
        min_kv_bytes: int = MIN_KV_BYTES,
        label: str = "",
    ) -> MemoryGrant:
        """Grant weights and working memory in full, and the KV in full or what is left in whole slabs.

        Raises DoesNotFit, with what each owner holds, when less than ``min_kv_bytes`` would be left.
        """
        assert owner not in self._grants, "an owner has one grant"
        free = self.free_bytes
        room = free - weight_bytes - working_bytes
        least = min(min_kv_bytes, kv_bytes)
        budget = kv_bytes if kv_bytes <= room else max(least, room // SLAB_BYTES * SLAB_BYTES)
        if budget > room:
            wanted = MemoryGrant(owner, label or owner, weight_bytes, working_bytes, least)
            raise self._refusal(wanted, free)
        grant = MemoryGrant(owner, label or owner, weight_bytes, working_bytes, budget)
        self._grants[owner] = grant
        return grant

    def settle(self, owner: str, *, weight_bytes: int, kv_bytes: int, working_bytes: int = 0) -> MemoryGrant:
        """Replace an owner's grant by its engine's measured use. Raises DoesNotFit; the grant stays then."""
        before = self._grants[owner]
        grant = MemoryGrant(owner, before.label, weight_bytes, working_bytes, kv_bytes)
        if grant.bytes > before.bytes + self.free_bytes:
            raise self._refusal(grant, before.bytes + self.free_bytes)
        self._grants[owner] = grant
        return grant

    def settle_kv(self, owner: str, kv_bytes: int) -> MemoryGrant:
        """Replace the KV part of an owner's grant. Raises DoesNotFit; the grant stays then."""
        grant = self._grants[owner]
        fixed = {"weight_bytes": grant.weight_bytes, "working_bytes": grant.working_bytes}
        return self.settle(owner, kv_bytes=kv_bytes, **fixed)

    def rename(self, owner: str, heir: str, label: str) -> None:
        """Let another owner have the grant, if there is one."""
        if (grant := self._grants.pop(owner, None)) is not None:
            assert heir not in self._grants, "an owner has one grant"
            self._grants[heir] = replace(grant, owner=heir, label=label)

    def release(self, owner: str) -> None:
        """Release an owner's memory; without a grant it does nothing."""
        self._grants.pop(owner, None)

    def check_integrity(self) -> None:
        assert self.free_bytes >= 0, "more memory was granted than there is"

    def _refusal(self, wanted: MemoryGrant, free_bytes: int) -> DoesNotFit:
        others = ", ".join(
            f"{grant.label} holds {_mib(grant.bytes)}"
            for name, grant in self._grants.items()
            if name != wanted.owner
        )
        return DoesNotFit(
            f"{wanted.label} needs {_mib(wanted.weight_bytes)} for weights, {_mib(wanted.working_bytes)} for "
            f"working memory and at least {_mib(wanted.kv_bytes)} for KV; "
            f"{_mib(free_bytes)} of {_mib(self._total)} are free" + (f" ({others})" if others else ""),
            needed_bytes=wanted.bytes,
            free_bytes=free_bytes,
            total_bytes=self._total,
        )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
