"""The cache under a planner that is driven at random: whatever is found has the KV of the right tokens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.engine_protocol import Cancel, Credit, Resize
from tests.unit.worker.engine.prefix.cache_rig import VOCABULARY, CacheRig, ask, sample

LONGEST = 256  # tokens of a sequence
UNLIMITED = 1 << 30


class CacheMachine(RuleBasedStateMachine):
    """Prompts of a few families begin alike within two domains, and conversations go on from their output."""

    @initialize(
        blocks=st.integers(0, 20),
        size=st.sampled_from([8, 16, 32, 64]),
        sequences=st.integers(1, 5),
        spare=st.integers(0, 90),
        ratio=st.sampled_from([0.25, 0.5, 1.0]),
    )
    def build(self, blocks: int, size: int, sequences: int, spare: int, ratio: float) -> None:
        self.rig = CacheRig(
            LONGEST // size + blocks,
            block_size=size,
            token_budget=sequences + spare,
            max_sequences=sequences,
            max_model_len=LONGEST,
            ratio=ratio,
        )
        self.size, self.sequences = size, sequences
        self.asks = 0  # for a size
        self.steps = 0  # since the last of them that is not answered
        self.asked: dict[int, tuple[int, list[int], int]] = {}  # domain, prompt and produced, output wanted
        self.gone: set[int] = set()
        self.texts: list[tuple[int, list[int]]] = []  # what ended, by domain

    @rule(
        family=st.integers(0, 2),
        common=st.sampled_from([0, 5, 16, 63, 64, 65, 96, 128, 140]),
        own=st.sampled_from([0, 1, 15, 16, 17, 40]),
        output=st.sampled_from([1, 2, 9, 24, 100]),
        domain=st.sampled_from([1, 1, 2, 0]),
        copies=st.integers(1, 3),
        credit=st.sampled_from([UNLIMITED, UNLIMITED, 0, 3]),
        priority=st.integers(0, 1),
    )
    def submit(
        self,
        family: int,
        common: int,
        own: int,
        output: int,
        domain: int,
        copies: int,
        credit: int,
        priority: int,
    ) -> None:
        begin = [(family * 31 + place) % VOCABULARY for place in range(common)]
        prompt = [*begin, *((len(self.asked) * 7 + place) % VOCABULARY for place in range(own))] or [1]
        for _ in range(copies):
            self._submit(domain, prompt, 0, output, credit, priority)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.integers(1, 20), cut=st.integers(0, 20), produced=st.booleans())
    def go_on(self, data: st.DataObject, more: int, cut: int, produced: bool) -> None:
        """The next turn of a conversation, a part of one, or a resume from what was produced."""
        domain, text = data.draw(st.sampled_from(self.texts))
        text = text[: max(1, len(text) - cut)]
        if produced and len(text) > 1:
            self._submit(domain, text, min(len(text) - 1, more), more, UNLIMITED, 0)
        else:
            self._submit(domain, [*text, *range(more)], 0, 5, UNLIMITED, 0)

    def _submit(
        self, domain: int, text: list[int], produced: int, output: int, credit: int, priority: int
    ) -> None:
        handle = len(self.asked)
        text = text[: LONGEST - output]
        prompt, before = text[: len(text) - produced], text[len(text) - produced :]
        wanted = output + produced
        self.asked[handle] = (domain, text, output)
        self.rig.engine.apply(
            ask(handle, prompt, wanted, domain=domain, produced=before, credit=credit, priority=priority)
        )

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.rig.engine.has_work:
                self.rig.step()
                self.steps += 1
                self._check()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), limit=st.integers(1, 20))
    def credit(self, data: st.DataObject, limit: int) -> None:
        handle = data.draw(st.sampled_from(sorted(self.asked)))
        self.rig.engine.apply(Credit([handle], [limit]))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.asked)))
        if handle not in self.rig.finished:
            self.gone.add(handle)
        self.rig.engine.apply(Cancel([handle]))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def break_(self, data: st.DataObject) -> None:
        """What a sequence computes from now on is wrong, and its next sample says so."""
        live = [h for h in self.asked if h not in self.rig.finished and h not in self.rig.cached]
        if live:
            self.rig.executor.broken.add(data.draw(st.sampled_from(live)))

    @rule(blocks=st.integers(-12, 12))
    def resize(self, blocks: int) -> None:
        wanted = max(1, self.rig.cache.blocks_total + blocks)
        self.rig.engine.apply(Resize(wanted))
        self.asks = len(self.rig.sizes) + 1
        self.steps = 0
        self.rig.settle()

    @invariant()
    def a_resize_ends(self) -> None:
        """One holder of a closed block yields at each step; a process settles after each command, too."""
        if not hasattr(self, "rig"):
            return
        self.rig.settle()
        if len(self.rig.sizes) < self.asks:
            assert self.rig.engine.has_work
            assert self.steps <= self.sequences

    @invariant()
    def books_are_true(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check_integrity()
            beat = self.rig.engine.heartbeat()
            assert beat.kv_blocks_used == self.rig.cache.blocks_used

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        handles = list(self.asked)
        self.rig.engine.apply(Credit(handles, [UNLIMITED] * len(handles)))
        self.rig.run()
        self._check()
        assert set(handles) == self.gone | self.rig.finished.keys(), "a sequence is lost"
        assert self.rig.cache.blocks_used == 0
        self.rig.engine.apply(Resize(1))
        self.rig.settle()
        assert self.rig.sizes[-1] == self.rig.cache.blocks_total
        assert self.rig.cache.blocks_total == LONGEST // self.size, "a shrink did not come to its end"
        self.rig.engine.check_integrity()

    def _check(self) -> None:
        """Hold every token against the function that an engine without a cache computes."""
        for handle, reason in self.rig.finished.items():
            domain, text, _ = self.asked[handle]
            if handle in self.rig.executor.broken or reason == "error":
                continue
            made = self.rig.tokens.get(handle, [])
            tokens = list(text)
            for token in made:
                assert token == sample(domain, tokens), "another token than without a cache"
                tokens.append(token)
            if (domain, tokens) not in self.texts[-8:]:
                self.texts.append((domain, tokens))


TestPrefixCacheModel = CacheMachine.TestCase
TestPrefixCacheModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
