"""The part of the KV pool that one tenant may hold, with its cached prefixes.

A prefix is found in its tenant's domain only, so a block belongs to one tenant: a tenant holds what would be
free without its sequences, and what is cached in its domains without a holder. Over its budget it gives up
its own cached blocks first, then its own youngest sequence; no other tenant loses a block to it. One writer:
the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from services.worker.engine.plan.block_manager import BlockPool
from services.worker.engine.plan.sequence_sets import SequenceSets
from services.worker.engine.sequence import SequenceState

MAX_TENANTS: Final = 4096  # tenants whose budgets stay known while they hold nothing


@dataclass(slots=True)
class _Budget:
    share: float
    roots: dict[int, None] = field(default_factory=dict)  # the domains of its prefixes
    enforced_blocks: int = 0  # the budget by which the last plan was made


class KvBudgets:
    """Counts on demand: only tenants that have a budget cost anything."""

    def __init__(self, places: SequenceSets, blocks: BlockPool) -> None:
        self._places = places
        self._blocks = blocks
        self._budgets: dict[str, _Budget] = {}

    def note(self, sequence: SequenceState) -> None:
        """Apply the budget that a new sequence states to all of its tenant."""
        if not sequence.kv_share:
            self._budgets.pop(sequence.tenant, None)
            return
        found = self._budgets.setdefault(sequence.tenant, _Budget(sequence.kv_share))
        found.share = sequence.kv_share
        if sequence.prefix_names:
            found.roots[sequence.prefix_names[0]] = None
        if len(self._budgets) > MAX_TENANTS:
            self._forget(but=sequence.tenant)

    def limit(self, tenant: str) -> int:
        """Return the blocks that the tenant may hold now."""
        found = self._budgets.get(tenant)
        return self._blocks.blocks_total if found is None else int(found.share * self._blocks.blocks_total)

    def held(self, tenant: str) -> int:
        """Return the blocks that the tenant's sequences hold, a shared one once."""
        return self._blocks.freed_by(one.blocks for one in self._places.holders() if one.tenant == tenant)

    def used(self, tenant: str) -> int:
        """Return the blocks that count for the tenant."""
        return self.held(tenant) + self._idle(tenant)

    def makes_room(self, sequence: SequenceState, blocks: int) -> bool:
        """Return whether its tenant may hold so many blocks more; its idle cached ones are evicted for them.

        Nothing is evicted where all of them would not suffice.
        """
        if (found := self._budgets.get(sequence.tenant)) is None:
            return True
        idle = self._idle(sequence.tenant)
        excess = self.held(sequence.tenant) + idle + blocks - self.limit(sequence.tenant)
        if excess > idle:
            return False
        return excess <= 0 or self._blocks.evict_of(found.roots, excess) >= excess

    def admits(self, head: SequenceState, found_blocks: int) -> bool:
        """Whether ``head`` may start, with a block for each sequence of its tenant that grows.

        ``found_blocks`` are those of its blocks that are cached.
        """
        if head.tenant not in self._budgets:
            return True
        places = self._places
        growing = sum(one.tenant == head.tenant for one in (*places.decoding, *places.prefilling))
        return self.makes_room(head, self._blocks.blocks_for(len(head.tokens)) - found_blocks + growing)

    def fits_alone(self, sequence: SequenceState) -> bool:
        """Whether it could start if its tenant held nothing else."""
        return self._blocks.blocks_for(len(sequence.tokens)) <= self.limit(sequence.tenant)

    def fits(self, more: Mapping[str, int]) -> bool:
        """Whether every tenant is within its budget with so many blocks more; idle cached ones may go."""
        return all(self.held(name) + more.get(name, 0) <= self.limit(name) for name in self._budgets)

    def over(self) -> list[str]:
        """Return the tenants whose sequences hold more than their budgets, after what is idle was evicted.

        The budgets of now hold from here on.
        """
        over: list[str] = []
        for name, found in self._budgets.items():
            found.enforced_blocks = self.limit(name)
            excess = self.used(name) - found.enforced_blocks
            if excess > 0 and self._blocks.evict_of(found.roots, excess) < excess:
                over.append(name)
        return over

    def check_integrity(self) -> None:
        """Raise AssertionError if a tenant holds more than the last plan allowed it."""
        for name, found in self._budgets.items():
            most = max(found.enforced_blocks, self.limit(name))
            assert self._blocks.is_closing or self.used(name) <= most, f"{name} exceeds its KV budget"

    def _idle(self, tenant: str) -> int:
        found = self._budgets.get(tenant)
        return 0 if found is None else self._blocks.idle_of(found.roots)

    def _forget(self, *, but: str) -> None:
        kept = self._places.tenants() | {but}
        for name in [name for name in self._budgets if name not in kept and not self._idle(name)]:
            del self._budgets[name]
