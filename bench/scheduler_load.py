"""What a scheduler's gateways and workers send it, in virtual time: placements of many tenants, and reports.

Mix: a fifth of the placements is interactive, a fifth batch; interactive ones name a target for the first
token, every fourth placement a deadline. A prompt continues one of 5,000 shared prefixes, four fifths of
them one of the 1,000 most used, by 1 to 16 blocks of its own; one in fifty is long. Tenants are equally
busy, which is the most work: a report names as many of them as it can.

A worker reports on change, at most once per ``GAP_S``, and at least once per ``BEAT_S``, as the production
reporter does. Reports have the tokens of what ended, and of what runs every ``CHARGE_S``, from the production
``Tally``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Final

from services.core.fleet import PoolSnapshot, ReportSnapshot, SequenceUsage
from services.core.generation import Grant, PlaceSpec
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.core.records import Priority
from services.worker.streams.charges import Tally
from services.worker.streams.sequences import CHARGE_S

DIGEST: Final = "sha256:" + "b" * 64
TENANTS: Final = 64
SHARED: Final = 5000
SHARED_BLOCKS: Final = 32
MAX_OWN_BLOCKS: Final = 16
LONG_BLOCKS: Final = 64
GAP_S: Final = 0.02
BEAT_S: Final = 1.0
STEP_S: Final = 0.02
RUN_S: Final = 2.0  # how long a sequence runs
OUTPUT_TOKENS: Final = round(RUN_S / STEP_S)
BLOCK_SIZE: Final = 16
SLOT_TOKENS: Final = (SHARED_BLOCKS + MAX_OWN_BLOCKS) * PREFIX_BLOCK_TOKENS  # a pool's, for each slot
START_UNIX_US: Final = 1_700_000_000_000_000


class Prompts:
    """Draws placements."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.shared = [self.names(SHARED_BLOCKS) for _ in range(SHARED)]

    def names(self, count: int) -> tuple[int, ...]:
        """Return unique names of blocks."""
        return tuple(self._rng.getrandbits(64) | 1 for _ in range(count))

    def draw(self, number: int, now_s: float) -> PlaceSpec:
        rng = self._rng
        most_used = rng.random() < 0.8
        chain = self.shared[rng.randrange(SHARED // 5 if most_used else SHARED)]
        chain += self.names(LONG_BLOCKS if rng.random() < 0.02 else rng.randint(1, MAX_OWN_BLOCKS))
        draw = rng.random()
        priority = Priority.STANDARD
        if draw < 0.4:
            priority = Priority.INTERACTIVE if draw < 0.2 else Priority.BATCH
        return PlaceSpec(
            request_id=f"req_{number}",
            choice=0,
            tenant_id=f"tenant-{rng.randrange(TENANTS)}",
            priority=priority,
            model="m",
            version_digest=DIGEST,
            route_revision=1,
            prompt_tokens=len(chain) * PREFIX_BLOCK_TOKENS + rng.randrange(PREFIX_BLOCK_TOKENS),
            max_output_tokens=rng.choice((128, 256, 1024)),
            arrival_unix_us=START_UNIX_US + round(now_s * 1e6),
            queue_ttl_s=30.0,
            ticket=b"t" * 100,
            traceparent=f"00-{number:032x}-{number:016x}-00",
            prefix_hashes=chain,
            deadline_left_s=60.0 if number % 4 == 0 else None,
            ttft_target_s=1.0 if priority is Priority.INTERACTIVE else None,
        )


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence that runs until ``end_s``."""

    end_s: float
    grant: Grant
    spec: PlaceSpec


@dataclass(eq=False)
class Worker:
    """The accounting of one worker, and the time of its last report."""

    worker_id: str
    slots: int
    zone: str
    cached: deque[int] = field(default_factory=deque)
    added: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    running: deque[Running] = field(default_factory=deque)
    tally: Tally = field(default_factory=Tally)
    seen: list[int] = field(default_factory=list)
    ended: int = 0
    reserved: int = 0
    steps: int = 0
    prefilled: int = 0
    decoded: int = 0
    attended: int = 0
    reported_s: float = 0.0
    charged_s: float = 0.0

    def start(self, grant: Grant, spec: PlaceSpec, now_s: float) -> None:
        """Run what was granted. Of its prompt, the shared blocks are cached already."""
        self.running.append(Running(now_s + RUN_S, grant, spec))
        self.seen.append(grant.sequence)
        self.reserved += grant.kv_blocks
        own = spec.prefix_hashes[SHARED_BLOCKS:]
        cached = SHARED_BLOCKS * PREFIX_BLOCK_TOKENS
        self.prefilled += spec.prompt_tokens - cached
        self.tally.add_prefill(_key(spec), spec.prompt_tokens, cached)
        self.added += own
        self.cached += own
        self.removed += [self.cached.popleft() for _ in own]

    def is_due(self, now_s: float) -> bool:
        """Let sequences end; whether a report is due."""
        while self.running and self.running[0].end_s <= now_s:
            self._finish(self.running.popleft())
        since_s = now_s - self.reported_s
        return since_s >= BEAT_S or (since_s >= GAP_S and bool(self.seen or self.ended))

    def report(self, now_s: float) -> ReportSnapshot:
        """Return the levels, and what happened since the report before."""
        steps = round((now_s - self.reported_s) / STEP_S)
        self.reported_s = now_s
        self.steps += steps
        self.decoded += steps * len(self.running)
        self.attended += steps * sum(one.spec.prompt_tokens for one in self.running)
        if now_s - self.charged_s >= CHARGE_S:
            self._charge(now_s)
        snapshot = ReportSnapshot(
            worker_id=self.worker_id,
            incarnation=1,
            address="h:1",
            zone=self.zone,
            pools=(self._pool(),),
            epoch=1,
            grants_seen=tuple(self.seen),
            tenants=self.tally.take(4096),
            usage=self.tally.take_ended(4096),
            device_type="h100",
            cost_per_hour=2.0,
        )
        self.seen, self.added, self.removed, self.ended = [], [], [], 0
        return snapshot

    def _charge(self, now_s: float) -> None:
        """Include in the next report what each sequence produced since the charge before."""
        for one in self.running:
            output = round((now_s - max(self.charged_s, one.end_s - RUN_S)) / STEP_S)
            self.tally.add_output(_key(one.spec), output)
        self.charged_s = now_s

    def _finish(self, one: Running) -> None:
        spec = one.spec
        output = round((one.end_s - max(self.charged_s, one.end_s - RUN_S)) / STEP_S)
        self.tally.add_output(_key(spec), output)
        self.ended += 1
        self.reserved -= one.grant.kv_blocks
        self.tally.add_ended(
            SequenceUsage(
                spec.request_id,
                spec.choice,
                spec.tenant_id,
                DIGEST,
                spec.prompt_tokens,
                OUTPUT_TOKENS,
                SHARED_BLOCKS * PREFIX_BLOCK_TOKENS,
                ended=True,
            )
        )

    def _pool(self) -> PoolSnapshot:
        return PoolSnapshot(
            digest=DIGEST,
            kv_blocks_total=self.slots * SLOT_TOKENS // BLOCK_SIZE,
            kv_blocks_reserved=self.reserved,
            block_size=BLOCK_SIZE,
            running=len(self.running),
            waiting=0,
            max_sequences=self.slots,
            max_model_len=131_072,
            steps=self.steps,
            step_seconds=5e-3 * self.steps + 40e-6 * self.prefilled + 50e-6 * self.decoded,
            prefill_tokens=self.prefilled,
            decode_tokens=self.decoded,
            attended_tokens=self.attended,
            prefix_added=tuple(self.added),
            prefix_removed=tuple(self.removed),
        )


def _key(spec: PlaceSpec) -> tuple[str, str, Priority]:
    return spec.tenant_id, DIGEST, spec.priority
