"""Queue of one model version, with sums that show whether a pass is useful, and the limits of the queues.

Written by the queue that owns it, as placements enter and leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.core.generation import PlaceSpec
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.core.shares import share_of
from services.scheduler.policy.overload.rates import DrainRate
from services.scheduler.policy.placement.kv_admission import RoomSummary
from services.scheduler.policy.placement.shared_prefix import shareable_blocks
from services.scheduler.policy.queue.fair_order import FairOrder
from services.scheduler.policy.queue.fairness import ServiceWeights
from services.scheduler.policy.queue.length import LengthPolicy
from services.scheduler.queue.waiting import Earmarks, QueuedPlacement

_ENTRY_BYTES: Final = 1024  # memory of a waiting placement besides its strings
_NAME_BYTES: Final = 40  # memory of a prefix block's name: an integer and its reference
_SIZES: Final = 40


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queues."""

    # Reserved per sequence, unless its own limit is less, until ``output_samples`` of the version were seen.
    predicted_output_tokens: int = 256
    output_quantile: float = 0.8  # the level of the prediction from then on
    output_samples: int = 32
    max_per_pool: int = 8192
    max_bytes_per_tenant: int = 16 * 1024 * 1024
    max_total: int = 65536
    length: LengthPolicy = field(default_factory=LengthPolicy)
    weights: ServiceWeights = field(default_factory=ServiceWeights)

    @property
    def max_per_tenant(self) -> int:
        """Placements of one tenant over all versions: half of what one queue and all of them hold."""
        return share_of(min(self.max_per_pool, self.max_total))


@dataclass(slots=True)
class _Sizes:
    """Sizes in binary digits. ``counts``: how many have n digits; ``present``: bit n is set if there is
    any."""

    counts: list[int] = field(default_factory=lambda: [0] * _SIZES)
    present: int = 0

    def count(self, tokens: int, change: int) -> None:
        size = tokens.bit_length()
        self.counts[size] += change
        self.present = self.present | 1 << size if self.counts[size] else self.present & ~(1 << size)

    @property
    def least_tokens(self) -> int:
        """Lower bound of all sizes; 0 without any."""
        return (self.present & -self.present) >> 1

    def check_integrity(self, count: int) -> None:
        assert sum(self.counts) == count
        assert self.present == sum(1 << size for size, found in enumerate(self.counts) if found)


@dataclass(slots=True, eq=False)
class Pool:
    """Queue of one version. ``fresh``: placements that no pass has tried. ``sizes``: reserved tokens of each
    placement. ``least``: the same, when workers share all of the prompt that can be shared."""

    order: FairOrder[QueuedPlacement]
    rate: DrainRate = field(default_factory=DrainRate)
    earmarks: Earmarks = field(default_factory=Earmarks)
    fresh: int = 0
    sizes: _Sizes = field(default_factory=_Sizes)
    least: _Sizes = field(default_factory=_Sizes)

    def count(self, item: QueuedPlacement, change: int) -> None:
        self.sizes.count(item.demand.reserved_tokens, change)
        self.least.count(_least_tokens(item), change)
        if not item.tried:
            self.fresh += change

    def is_hopeless(self, room: RoomSummary, *, sharing: bool) -> bool:
        """Whether every placement was tried before and none fits into this room. ``sharing``: some sequences
        of the version hold blocks that others may share."""
        sizes = self.least if sharing else self.sizes
        return not self.fresh and room.room_tokens < sizes.least_tokens

    def check_integrity(self) -> None:
        """Raise AssertionError when the pool counts other placements than it holds."""
        mine = list(self.order.items())
        assert self.fresh == sum(not item.tried for item in mine)
        self.sizes.check_integrity(len(mine))
        self.least.check_integrity(len(mine))
        assert {item.number for item in self.earmarks} == {item.number for item in mine if item.earmark}


def _least_tokens(item: QueuedPlacement) -> int:
    """Return the tokens that the placement needs where all shareable blocks of its prompt are shared."""
    demand = item.demand
    shared = shareable_blocks(item.query.prefix_hashes, demand.prompt_tokens)
    return demand.reserved_tokens - shared * PREFIX_BLOCK_TOKENS


def size_bytes_of(spec: PlaceSpec) -> int:
    """Return the approximate memory of a waiting placement in the leader."""
    return (
        _ENTRY_BYTES
        + len(spec.ticket)
        + sum(map(len, spec.excluded_workers))
        + _NAME_BYTES * len(spec.prefix_hashes)
    )
