"""The KV pool of one engine as its agent counts it: limits, reservations, and the prefixes it has cached.

A block that several sequences share counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from services.core.generation import StartSpec, StepSums
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.worker import engine_protocol as wire
from services.worker.streams.live_sequence import WorkerSequence

MAX_SHARED: Final = 1024  # blocks reported as shared, per version; the leader counts others as unshared
MAX_USED: Final = 65536  # idle blocks that are recorded as referred to before
MAX_PREFIXES: Final = 65536  # per version; blocks beyond it are not reported


class PrefixSet:
    """A bounded set with deltas. Blocks beyond ``MAX_PREFIXES`` are ignored, and so is their removal.

    The first report of a stream contains the whole set, later ones the changes.
    """

    def __init__(self, *, most: int = MAX_PREFIXES) -> None:
        self._most = most
        self._cached: dict[int, None] = {}
        self._unreported: dict[int, bool] = {}  # not reported yet; True: added, False: removed

    def __len__(self) -> int:
        return len(self._cached)

    def __iter__(self) -> Iterator[int]:
        return iter(self._cached)

    def __contains__(self, name: int) -> bool:
        return name in self._cached

    def change(self, added: Iterable[int], removed: Iterable[int]) -> None:
        """Apply what one step added and removed; a block in both was removed and then added again."""
        for name in removed:
            if name in self._cached:
                del self._cached[name]
                self._note(name, came=False)
        for name in added:
            if name not in self._cached and len(self._cached) < self._most:
                self._cached[name] = None
                self._note(name, came=True)

    def follow(self, earlier: PrefixSet) -> None:
        """Replace the set of an ended engine: record the removal of all its reported blocks."""
        reported = [name for name in earlier._cached if not earlier._unreported.get(name, False)]
        reported += [name for name, came in earlier._unreported.items() if not came]
        for name in reported:
            if name not in self._cached:
                self._unreported[name] = False
            else:
                self._unreported.pop(name, None)

    def take(self, *, whole: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the blocks added and removed since the last call; the full set as added when ``whole``."""
        unreported, self._unreported = self._unreported, {}
        if whole:
            return tuple(self._cached), ()
        came = tuple(name for name, here in unreported.items() if here)
        return came, tuple(name for name, here in unreported.items() if not here)

    def _note(self, name: int, *, came: bool) -> None:
        if self._unreported.pop(name, came) is came:  # an unreported opposite change cancels this one
            self._unreported[name] = came


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The sizes that the engine reported when it was ready, and the agent's bound on sequences."""

    kv_blocks_total: int
    block_size: int
    max_model_len: int
    max_sequences: int
    full_step_s: float = 0.0
    capabilities: frozenset[str] = frozenset()  # what the engine promises


@dataclass(slots=True)
class PoolStats:
    """The engine's own numbers, as of its last message."""

    kv_blocks_used: int = 0  # allocated in the engine
    # Sequences that run.
    running: int = 0
    # Sequences that wait.
    waiting: int = 0
    # Number of the last step.
    steps: int = 0
    # Sum of step durations.
    step_seconds: float = 0.0
    # Work inside the steps: tokens prefilled, tokens decoded, tokens of KV that the decodes read.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    attended_tokens: int = 0

    def note_step(self, event: wire.Stepped) -> None:
        """Count a step, with all its tokens as decoded; the table subtracts those that prefills produced."""
        self.steps = event.step
        self.step_seconds += event.step_s
        self.prefill_tokens += event.prefill_tokens
        self.decode_tokens += len(event.handles)
        self.attended_tokens += event.attended_tokens
        self.note_levels(event)

    def sums(self) -> StepSums:
        """Return the steps so far and their work."""
        return StepSums(
            self.steps,
            round(self.step_seconds * 1e6),
            self.prefill_tokens,
            self.decode_tokens,
            self.attended_tokens,
        )

    def note_levels(self, event: wire.Stepped | wire.EngineHeartbeat) -> None:
        self.kv_blocks_used = event.kv_blocks_used
        self.running = event.running
        self.waiting = event.waiting


class SharedBlocks:
    """References by name of a cached prefix block, and their unreported changes. Single writer: the sequence
    table.

    A sequence refers to leading blocks of its prompt. A block with a reference is *held*: the engine retains
    it and it counts once. A cached block without a reference is evictable and counts as free. A name stands
    for a whole prefix, so a sequence that refers to a block also refers to all blocks before it.

    ``reported`` contains held blocks to which more than one sequence referred, at the same time or in turn:
    most prompts end in blocks that no other prompt has. If the KV block size does not divide a prefix block,
    nothing is shared.
    """

    def __init__(self, block_size: int, cached: PrefixSet, *, most: int = MAX_SHARED) -> None:
        self._each = 0 if PREFIX_BLOCK_TOKENS % block_size else PREFIX_BLOCK_TOKENS // block_size
        self._cached = cached
        self._references: dict[int, int] = {}
        self._used: dict[int, None] = {}  # cached, with past references only; the longest idle first
        self.reported = PrefixSet(most=most)

    @property
    def each_blocks(self) -> int:
        """KV blocks per prefix block; 0: nothing is shared."""
        return self._each

    @property
    def blocks(self) -> int:
        """Number of held KV blocks."""
        return len(self._references) * self._each

    def reach(self, chain: Sequence[int], tokens: int) -> int:
        """Return how many leading blocks of the chain are cached, limited to those that ``tokens`` fill."""
        most = min(len(chain), tokens // PREFIX_BLOCK_TOKENS) if self._each else 0
        for place in range(most):
            if chain[place] not in self._references and chain[place] not in self._cached:
                return place
        return most

    def held_blocks(self, names: Iterable[int]) -> int:
        """Return how many KV blocks of the named prefix blocks are held."""
        return sum(name in self._references for name in names) * self._each

    def any_of(self, names: Iterable[int]) -> frozenset[int]:
        """Return the held names."""
        return frozenset(name for name in names if name in self._references)

    def refer(self, names: Sequence[int]) -> None:
        """Add one reference to each block."""
        for name in names:
            count = self._references[name] = self._references.get(name, 0) + 1
            if count == 2 or (count == 1 and name in self._used):
                self.reported.change((name,), ())
            if count == 1:
                self._used.pop(name, None)

    def release(self, names: Sequence[int]) -> None:
        """Remove one reference from each block."""
        for name in reversed(names):
            count = self._references[name] = self._references[name] - 1
            if not count:
                del self._references[name]
                self.reported.change((), (name,))
                self._used[name] = None
        while len(self._used) > MAX_USED:
            del self._used[next(iter(self._used))]

    def forget(self, evicted: Iterable[int]) -> None:
        """Drop the record of evicted blocks, which have no reference."""
        for name in evicted:
            self._used.pop(name, None)

    def check_integrity(self, runs: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the references equal those of the live sequences' runs."""
        counted: dict[int, int] = {}
        for run in runs:
            for name in run:
                counted[name] = counted.get(name, 0) + 1
        assert counted == self._references, "references to shared blocks leaked"
        assert all(name in counted for name in self.reported), "told of what nobody refers to"
        assert not counted.keys() & self._used.keys(), "an idle block is referred to"


class Reservations:
    """KV reservations of one engine. Single writer: the sequence table, which reports changes of free blocks.

    ``blocks`` is the sum over sequences of the larger of grant and use; a shared prefix block counts once.
    ``fallback_blocks`` is the part that belongs to fallback placements. ``lost_blocks`` counts blocks that
    were expected to be shared but were evicted before, so that sequences computed them. ``cached`` is the
    set of prefix blocks in the engine's cache.
    """

    def __init__(self, limits: PoolLimits) -> None:
        self.blocks = 0
        self.fallback_blocks = 0
        self.lost_blocks = 0
        self.cached = PrefixSet()
        self.shared = SharedBlocks(limits.block_size, self.cached)
        self._total_blocks = limits.kv_blocks_total
        self._block_size = limits.block_size

    def resize(self, total_blocks: int) -> None:
        """Set the bound for new reservations; present ones stay."""
        self._total_blocks = total_blocks

    def needed_blocks(self, spec: StartSpec) -> int:
        """Return the larger of the grant and the blocks for the tokens to prefill."""
        return max(spec.grant.kv_blocks, -(-spec.prefill_tokens // self._block_size))

    def has_room(self, spec: StartSpec) -> bool:
        shared = self.shared.held_blocks(self._cached_run(spec))
        return self.blocks + self.needed_blocks(spec) - shared <= self._total_blocks

    def within_budget(self, spec: StartSpec) -> bool:
        """Whether the tokens to prefill alone are within the tenant's share of the pool."""
        blocks = -(-spec.prefill_tokens // self._block_size)
        return not spec.kv_share or blocks <= int(spec.kv_share * self._total_blocks)

    def add(self, sequence: WorkerSequence) -> None:
        """Reserve the sequence's granted blocks, less those that it shares."""
        self._reserve(sequence, sequence.reserved_blocks)
        self._share(sequence, len(self._cached_run(sequence.spec)))

    def remove(self, sequence: WorkerSequence) -> None:
        self._share(sequence, 0)
        self._reserve(sequence, -sequence.reserved_blocks)

    def has_room_again(self, sequence: WorkerSequence) -> bool:
        """Return whether a sequence whose reservation was released fits again. An empty pool always has room:
        the sequence fitted into a larger one before."""
        if not self.blocks:
            return True
        shared = self.shared.held_blocks(self._cached_run(sequence.spec))
        return self.blocks + sequence.reserved_blocks - shared <= self._total_blocks

    def grow(self, sequence: WorkerSequence, *, reserved: bool = True) -> None:
        """Record one more block for the sequence; ``reserved``: its reservation currently counts."""
        sequence.reserved_blocks += 1
        sequence.reserved_tokens += self._block_size
        if reserved:
            self._reserve(sequence, 1)

    def attach(self, sequence: WorkerSequence, tokens: int) -> bool:
        """Record that the engine used ``tokens`` of cached KV for the sequence and new blocks for the rest.

        Return True if this differs from the expected sharing, which changes the free blocks.
        """
        blocks = tokens // PREFIX_BLOCK_TOKENS if self.shared.each_blocks else 0
        count = min(blocks, len(sequence.spec.generation.prompt.prefix_hashes))
        if count == sequence.shared_prefixes:
            return False
        self._lose(sequence, count)
        return True

    def share_computed(self, sequence: WorkerSequence) -> None:
        """It is prefilled: what it computed and is cached by now is one with what is cached."""
        if chain := sequence.spec.generation.prompt.prefix_hashes:
            self._share(sequence, self.shared.reach(chain, sequence.spec.prefill_tokens))

    def change_cached(
        self, added: Sequence[int], evicted: Sequence[int], live: Collection[WorkerSequence]
    ) -> bool:
        """Apply the prefix blocks that a step cached and evicted.

        Return True if waiting sequences shared evicted blocks: they need their own now, so fewer are free.
        """
        self.cached.change(added, evicted)
        gone = self.shared.any_of(evicted)
        for sequence in live if gone else ():
            run = sequence.spec.generation.prompt.prefix_hashes[: sequence.shared_prefixes]
            kept = next((place for place, name in enumerate(run) if name in gone), len(run))
            self._lose(sequence, kept)
        self.shared.forget(evicted)
        return bool(gone)

    def check_integrity(self, live: Collection[WorkerSequence]) -> None:
        """Raise AssertionError if a reservation leaked."""
        each = self.shared.each_blocks
        self.shared.check_integrity(s.spec.generation.prompt.prefix_hashes[: s.shared_prefixes] for s in live)
        own = sum(s.reserved_blocks - s.shared_prefixes * each for s in live)
        assert self.blocks == own + self.shared.blocks, "KV reservation leaked"
        assert all(s.reserved_blocks >= s.shared_prefixes * each for s in live), "it shares more than it has"
        assert all(s.tokens <= s.reserved_tokens for s in live), "it holds more than it reserved"
        alone = sum(s.reserved_blocks for s in live if s.fallback)
        assert self.fallback_blocks == alone, "credit of fallback placements leaked"

    def _reserve(self, sequence: WorkerSequence, blocks: int) -> None:
        self.blocks += blocks
        if sequence.fallback:
            self.fallback_blocks += blocks

    def _cached_run(self, spec: StartSpec) -> Sequence[int]:
        """Return the leading blocks of the prompt that are cached, without the block of the last token."""
        chain = spec.generation.prompt.prefix_hashes
        return chain[: self.shared.reach(chain, spec.prefill_tokens - 1)] if chain else ()

    def _share(self, sequence: WorkerSequence, count: int) -> None:
        """Make the sequence refer to its first ``count`` prefix blocks. These are not its own blocks."""
        had = sequence.shared_prefixes
        if count == had:
            return
        chain, shared = sequence.spec.generation.prompt.prefix_hashes, self.shared
        held = shared.blocks
        if count > had:
            shared.refer(chain[had:count])
        else:
            shared.release(chain[count:had])
        sequence.shared_prefixes = count
        self.blocks += shared.blocks - held - (count - had) * shared.each_blocks

    def _lose(self, sequence: WorkerSequence, kept: int) -> None:
        lost = max(0, sequence.shared_prefixes - kept)
        self.lost_blocks += lost * self.shared.each_blocks
        self._share(sequence, kept)
