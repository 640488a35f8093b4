"""The leader's state of one worker, and its pools as placement candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from services.core.fleet import LONG_PROMPT_TOKENS, PoolSnapshot, ReportSnapshot
from services.scheduler.policy.placement import candidate as filters
from services.scheduler.policy.placement.candidate import Candidate
from services.scheduler.policy.placement.pool_seats import SERVING, SeatLevel
from services.scheduler.policy.step_time import StepModel


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Times in seconds and bounds of the fleet view.

    ``silence_s``: longest gap between two reports of a worker that receives grants. ``prefix_blocks``: number
    of stored names of cached blocks; 0: placement ignores cached blocks.
    """

    grant_ttl_s: float = 2.0
    transit_margin_s: float = 3.0
    silence_s: float = 2.5
    forget_s: float = 30.0
    max_workers: int = 4096
    prefix_blocks: int = 262_144

    def __post_init__(self) -> None:
        if self.silence_s > self.transit_margin_s:
            raise ValueError("a worker may not be silent for longer than the transit margin")
        if self.forget_s <= self.silence_s + self.grant_ttl_s + self.transit_margin_s:
            raise ValueError("a worker is forgotten before its last grant lapsed")


# Outstanding grants of a pool without a slot; the next report shows whether its worker made room for them.
MAX_YIELDING_GRANTS: Final = 4


class Outstanding(Struct, frozen=True, gc=False):
    """A grant that no report includes yet."""

    digest: str
    # Blocks of the reported room that it will take.
    kv_blocks: int
    # Tokens of its prompt that are not expected in the cache.
    prefill_tokens: int
    prompt_tokens: int
    # Blocks for its prompt and predicted output.
    whole_blocks: int
    # Blocks saved for every leading block of the chain that the last report lists as shared.
    each_blocks: int = 0
    # Empty unless the grant relies on shared blocks (``shared_prefix``).
    chain: tuple[int, ...] = ()

    @property
    def is_long(self) -> bool:
        return self.prefill_tokens >= LONG_PROMPT_TOKENS


@dataclass(slots=True)
class Sums:
    """Totals of the outstanding grants of one pool."""

    grants: int = 0
    kv_blocks: int = 0
    prefill_tokens: int = 0
    long_prefills: int = 0

    def add(self, grant: Outstanding, sign: int) -> None:
        self.grants += sign
        self.kv_blocks += sign * grant.kv_blocks
        self.prefill_tokens += sign * grant.prefill_tokens
        self.long_prefills += sign * grant.is_long


NO_SUMS = Sums()


@dataclass(slots=True, eq=False)
class WorkerState:
    """The state of one worker that has reported."""

    worker_id: str
    incarnation: int
    stream: int
    number: int = -1  # its bit in masks of workers
    address: str = ""
    zone: str = ""
    device_type: str = ""
    cost_per_hour: float = 0.0
    node_group: str = ""
    preemptible: bool = False
    draining: bool = False
    connected: bool = True
    honours: bool = False  # its last report confirmed the leader's epoch
    silent: bool = False
    report_s: float = 0.0  # time of the last report
    pools: dict[str, PoolSnapshot] = field(default_factory=dict)
    # Tokens of KV that a step reads, by version, as the last measured steps did.
    attended: dict[str, int] = field(default_factory=dict)
    # The cheapest worker's price of a token over this one's, by version.
    cost_ratios: dict[str, float] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)  # versions for which it gets no requests, whatever its room
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)

    def record_report(self, stream: int, report: ReportSnapshot, epoch: int, now_s: float) -> None:
        """Apply the fields of a report to the leader of ``epoch`` that concern the worker itself."""
        self.incarnation, self.stream = report.incarnation, stream
        self.address, self.zone, self.draining = report.address, report.zone, report.draining
        self.device_type, self.cost_per_hour = report.device_type, report.cost_per_hour
        self.node_group, self.preemptible = report.node_group, report.preemptible
        self.connected, self.silent, self.report_s = True, False, now_s
        self.honours = report.epoch == epoch

    @property
    def reporting(self) -> bool:
        return self.connected and self.honours and not self.silent

    @property
    def state(self) -> str:
        """The worker's state for operators."""
        if not (self.connected and self.honours):
            return "away"
        if self.silent:
            return "silent"
        return "draining" if self.draining else "placed_on"

    def together(self, digest: str) -> tuple[str, ...]:
        """Return the versions that share the engine of this one, itself included."""
        pool = self.pools.get(digest)
        if pool is None or not pool.engine:
            return (digest,)
        return tuple(other for other, one in self.pools.items() if one.engine == pool.engine)

    def sums_of(self, digest: str) -> Sums:
        """Return the totals of the outstanding grants that take room of the version's engine."""
        together = self.together(digest)
        if len(together) == 1:
            return self.sums.get(digest, NO_SUMS)
        found = Sums()
        for sums in (self.sums.get(other, NO_SUMS) for other in together):
            found.grants += sums.grants
            found.kv_blocks += sums.kv_blocks
            found.prefill_tokens += sums.prefill_tokens
            found.long_prefills += sums.long_prefills
        return found

    def check_integrity(self, counted: Callable[[Outstanding], Outstanding]) -> None:
        """Raise AssertionError when sums and outstanding grants disagree. ``counted`` returns a grant with
        the blocks that it needs in addition to the last report."""
        for digest in {*self.sums, *self.pools, *(found.digest for found in self.outstanding.values())}:
            held = [found for found in self.outstanding.values() if found.digest == digest]
            sums = self.sums.get(digest, NO_SUMS)
            assert sums.grants == len(held), "outstanding grants miscounted"
            assert sums.kv_blocks == sum(found.kv_blocks for found in held), "outstanding blocks leaked"
            assert sums.prefill_tokens == sum(found.prefill_tokens for found in held)
            assert all(found == counted(found) for found in held), "recount"
            assert len({found.chain[0] for found in held if found.chain}) == sum(
                bool(found.chain) for found in held
            ), "two grants lean on one prefix"
            assert sums.long_prefills == sum(found.is_long for found in held)


def level_of(worker: WorkerState, pool: PoolSnapshot) -> SeatLevel:
    """Return the entry of the seat index: reported room less outstanding grants."""
    sums = worker.sums_of(pool.digest)
    if not pool.ready:
        standing = filters.ready.__name__
    elif not worker.reporting:
        standing = filters.heard.__name__
    elif worker.draining:
        standing = filters.not_draining.__name__
    elif pool.digest in worker.barred:
        standing = filters.not_ejected.__name__
    else:
        standing = SERVING
    return SeatLevel(
        standing,
        (pool.kv_blocks_total - pool.kv_blocks_reserved - sums.kv_blocks) * pool.block_size,
        pool.max_sequences - pool.running - pool.waiting - sums.grants,
        pool.kv_blocks_total * pool.block_size,
        pool.max_model_len,
        worker.number,
        pool.yields_to_rank if sums.grants < MAX_YIELDING_GRANTS else 0,
    )


def candidate_of(
    worker: WorkerState, pool: PoolSnapshot, level: SeatLevel, *, model: StepModel, slowness_ratio: float
) -> Candidate:
    """Return the pool as a candidate for filters and scorers. ``level`` is its present ``level_of``."""
    sums = worker.sums_of(pool.digest)
    return Candidate(
        worker_id=worker.worker_id,
        kv_tokens_total=level.kv_tokens_total,
        kv_tokens_room=level.room_tokens,
        block_size=pool.block_size,
        slots=level.slots,
        max_model_len=pool.max_model_len,
        queued_prefill_tokens=pool.queued_prefill_tokens + sums.prefill_tokens,
        ready=pool.ready,
        draining=worker.draining,
        reporting=worker.reporting,
        ejected=pool.digest in worker.barred,
        zone=worker.zone,
        running=pool.running,
        attended_tokens=worker.attended.get(pool.digest, 0),
        long_prefills=pool.long_prefills + sums.long_prefills,
        step_model=model,
        slowness_ratio=slowness_ratio,
        cost_ratio=worker.cost_ratios.get(pool.digest, 1.0),
        node_group=worker.node_group,
        preemptible=worker.preemptible,
    )
