"""An engine with a prefix cache over an executor whose KV says what it is the KV of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.core.prefix import prefix_chain
from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Batch, Executor, Inline, Runner, Samples
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.prefix.cache import PrefixCache
from services.worker.engine.prefix.eviction import EvictionLimits
from services.worker.engine.sequence import ModelLimits, SequenceState
from services.worker.engine_protocol import Stepped, Submit
from tests.support.submits import make_submit

VOCABULARY = 97


@dataclass
class ContentExecutor:
    """Writes into each slot a hash of the domain and of all tokens up to that position, and samples by it.

    Before a position is computed, every earlier one of its sequence must be found in that sequence's blocks.
    """

    block_size: int
    slots: dict[int, int] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)  # handles
    computed: int = 0
    tables: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by handle and version

    def run(self, batch: Batch) -> Samples:
        for source, target in batch.copies:
            for offset in range(self.block_size):
                self.slots[target * self.block_size + offset] = self.slots.get(
                    source * self.block_size + offset, -1
                )
        spans = [(s, len(s.tokens) - 1, len(s.tokens)) for s in batch.decodes]
        spans += [(c.sequence, c.start, c.end) for c in batch.prefills]
        self.computed += sum(end - start for _, start, end in spans)
        for sequence, start, end in spans:
            self._compute(sequence, start, end)
        sampled = batch.sampled
        errors = {row: "not finite" for row, s in enumerate(sampled) if s.handle in self.broken}
        return Samples([sample(domain_of(s), s.tokens) for s in sampled], {}, errors)

    def resize(self, blocks: int) -> None:
        self.slots = {slot: entry for slot, entry in self.slots.items() if slot < blocks * self.block_size}

    def _compute(self, sequence: SequenceState, start: int, end: int) -> None:
        blocks, size = sequence.blocks, self.block_size
        assert sequence.computed == start < end <= sequence.capacity == len(blocks) * size
        assert sequence.contiguous == (blocks == list(range(blocks[0], blocks[0] + len(blocks))))
        table = self.tables.setdefault((sequence.handle, sequence.table_version), list(blocks))
        assert table == blocks, "a table changed, and its version did not"
        breaks = sequence.handle in self.broken
        wrong = breaks and end == len(sequence.tokens)  # in the step that says so
        for position, content in enumerate(contents(domain_of(sequence), sequence.tokens[:end])):
            slot = blocks[position // size] * size + position % size
            if position >= start:
                self.slots[slot] = content + wrong
            else:
                assert breaks or self.slots[slot] == content, (
                    f"position {position} has the KV of another prefix"
                )


def domain_of(sequence: SequenceState) -> int:
    return sequence.prefix_names[0] if sequence.prefix_names else 0


def contents(domain: int, tokens: Sequence[int]) -> list[int]:
    found, content = [], domain
    for token in tokens:
        content = hash((content, token))
        found.append(content)
    return found


def sample(domain: int, tokens: Sequence[int]) -> int:
    return contents(domain, tokens)[-1] % VOCABULARY


def ask(
    handle: int,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    domain: int = 1,
    produced: Sequence[int] = (),
    credit: int = 1 << 30,
    priority: int = 0,
) -> Submit:
    """Return a request as an agent makes it; ``domain`` 0 has no names."""
    return make_submit(
        handle,
        list(prompt),
        credit,
        list(produced),
        priority=priority,
        seed=handle,
        temperature=0.0,
        max_tokens=max_tokens,
        prefix_hashes=prefix_chain(domain, prompt) if domain else (),
        prefix_root=domain,
    )


class CacheRig:
    """Steps the engine, and holds what it says of its cache against the cache."""

    def __init__(
        self,
        blocks: int,
        *,
        block_size: int = 16,
        token_budget: int = 64,
        max_sequences: int = 4,
        max_model_len: int | None = None,
        ratio: float = 0.5,
        attention_half_tokens: int = 1 << 30,
        launch: Callable[[Runner], Executor] = Inline,
        cache: type[PrefixCache] = PrefixCache,
    ) -> None:
        longest = max_model_len or blocks * block_size
        least = -(-longest // block_size)
        self.cache = cache(
            BlockManager(blocks, block_size, least_blocks=least),
            EvictionLimits(domain_ratio=ratio, attention_half_tokens=attention_half_tokens),
        )
        self.executor = ContentExecutor(block_size)
        self.engine = Engine(
            launch(self.executor),
            blocks=self.cache,
            limits=PlannerLimits(token_budget, max_sequences),
            model=ModelLimits(VOCABULARY, longest),
            eos_ids=frozenset(),
            clock=lambda: 0.0,
            reuse=self.cache,
        )
        self.names: set[int] = set()  # by what was reported
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.prefilled: dict[int, int] = {}
        self.sizes: list[int] = []  # that the pool was said to have

    def settle(self) -> None:
        """What a process does between two steps."""
        if (resized := self.engine.resized()) is not None:
            assert resized.kv_blocks_total == self.cache.blocks_total
            self.sizes.append(resized.kv_blocks_total)

    def step(self) -> Stepped:
        event = self.engine.step()
        self.engine.check_integrity()
        self.settle()
        added, removed = set(event.prefix_added), set(event.prefix_removed)
        assert removed <= self.names
        assert not added & (self.names - removed)
        self.names = (self.names - removed) | added
        assert self.names == set(self.cache.names()), "what is reported is not what is there"
        self.cached |= event.cached
        for handle, token in zip(event.handles, event.tokens, strict=True):
            assert handle in self.cached, "a token before it was told what came from the cache"
            self.tokens.setdefault(handle, []).append(token)
        self.finished |= event.finished
        return event

    def run(self, *submits: Submit) -> None:
        for submit in submits:
            self.engine.apply(submit)
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")
