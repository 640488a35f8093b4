"""What every executor of the engine does: the one without a model, the one on torch, the one of the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from services.worker.engine.execute.executor import Batch, PrefillChunk, Runner, Samples
from services.worker.engine.execute.null_executor import NullExecutor
from services.worker.engine.load.loading import _load_torch
from services.worker.engine.sequence import SequenceState, sequence_of
from services.worker.engine_protocol import EngineConfig
from tests.support.submits import make_submit
from tests.tidy.sources import ROOT
from tests.unit.worker.engine.conftest import CheckingExecutor

BLOCK = 16
PROMPT = list(range(5, 25))  # in two blocks


def _null() -> Runner:
    return NullExecutor(
        vocab_size=1000, eos_ids=frozenset({0}), step_s=0.0, clock=lambda: 0.0, sleep=lambda _: None
    )


def _checking() -> Runner:
    return CheckingExecutor(token_budget=512, block_size=BLOCK)


def _torch() -> Runner:
    folder = ROOT / "models" / "tiny" / "checkpoint"
    config = EngineConfig("", str(folder), block_size=BLOCK, kv_blocks=64, threads=1)
    return _load_torch(config, lambda phase, ratio: None)[0]


@pytest.fixture(scope="module", params=[_null, _checking, _torch])
def executor(request: pytest.FixtureRequest) -> Runner:
    make: Callable[[], Runner] = request.param
    return make()


def sequence(handle: int, prompt: list[int], *, block: int, **sampling: Any) -> SequenceState:
    command = make_submit(handle, prompt, 50, seed=9, max_tokens=50, **sampling)
    found = sequence_of(command, arrival=handle, eos_ids=frozenset())
    found.blocks = list(range(block, block + 4))
    found.capacity = 4 * BLOCK
    return found


def prefill(executor: Runner, *chunks: tuple[SequenceState, int]) -> Samples:
    """Compute each sequence up to a position, as the planner would, and keep the books as the engine does."""
    samples = executor.run(Batch([], [PrefillChunk(each, each.computed, end) for each, end in chunks]))
    for each, end in chunks:
        each.computed = end
    return samples


def decode(executor: Runner, found: SequenceState, token: int) -> int:
    found.tokens.append(token)
    samples = executor.run(Batch([found], []))
    found.computed += 1
    (next_token,) = samples.tokens
    return next_token


def generate(executor: Runner, found: SequenceState, count: int) -> list[int]:
    tokens = [prefill(executor, (found, len(found.tokens))).tokens[0]]
    while len(tokens) < count:
        tokens.append(decode(executor, found, tokens[-1]))
    return tokens


def test_a_prompt_gives_the_same_tokens_whole_or_in_chunks(executor: Runner) -> None:
    whole = generate(executor, sequence(1, PROMPT, block=0), 6)
    chunked = sequence(1, PROMPT, block=4)
    assert prefill(executor, (chunked, 7)).tokens == [], "a chunk that ends before the prompt samples nothing"
    assert prefill(executor, (chunked, 16)).tokens == []
    assert generate(executor, chunked, 6) == whole


def test_rows_are_the_decodes_then_the_prefills_that_sample(executor: Runner) -> None:
    alone = [generate(executor, sequence(h, PROMPT[:h], block=0, temperature=0.0), 2) for h in (2, 3, 4)]
    one, two, three, part = (sequence(h, PROMPT[:h], block=4 * h, temperature=0.0) for h in (2, 3, 4, 5))
    first = prefill(executor, (one, 2), (two, 3))
    assert first.tokens == [alone[0][0], alone[1][0]]
    for found, token in ((one, first.tokens[0]), (two, first.tokens[1])):
        found.tokens.append(token)
    batch = Batch([two, one], [PrefillChunk(part, 0, 3), PrefillChunk(three, 0, 4)])
    assert batch.sampled == [two, one, three]
    assert executor.run(batch).tokens == [alone[1][1], alone[0][1], alone[2][0]]


def test_neighbours_and_blocks_change_no_token(executor: Runner) -> None:
    alone = generate(executor, sequence(1, PROMPT, block=0), 4)
    mine, other = sequence(1, PROMPT, block=20), sequence(2, PROMPT[::-1], block=8)
    tokens = [prefill(executor, (other, 20), (mine, 20)).tokens[1]]
    other.tokens.append(7)
    while len(tokens) < 4:
        mine.tokens.append(tokens[-1])
        tokens.append(executor.run(Batch([other, mine], [])).tokens[1])
        mine.computed += 1
        other.computed += 1
        other.tokens.append(7)
    assert tokens == alone


def test_a_pool_that_changes_its_size_keeps_what_its_first_blocks_hold(executor: Runner) -> None:
    expected = generate(executor, sequence(1, PROMPT, block=0), 6)
    found = sequence(1, PROMPT, block=0)
    tokens = generate(executor, found, 2)
    for blocks in (4, 64, 5, 64):
        executor.resize(blocks)
        tokens.append(decode(executor, found, tokens[-1]))
    assert tokens == expected


def test_logprobs_are_of_the_rows_that_asked(executor: Runner) -> None:
    silent, asking = sequence(1, PROMPT[:3], block=0), sequence(2, PROMPT[:3], block=4, logprobs=0)
    samples = prefill(executor, (silent, 3), (asking, 3))
    assert len(samples.tokens) == 2
    assert list(samples.logprobs) == [1]
    assert samples.logprobs[1].sampled <= 0
    assert samples.errors == {}


def test_sequences_are_read_and_never_changed(executor: Runner) -> None:
    found, running = sequence(1, PROMPT, block=0), sequence(2, PROMPT, block=4)
    prefill(executor, (running, 20))
    running.tokens.append(3)
    before = copy.deepcopy((found, running))
    executor.run(Batch([running], [PrefillChunk(found, 0, 20)]))
    for was, now in zip(before, (found, running), strict=True):
        assert all(getattr(was, each.name) == getattr(now, each.name) for each in fields(SequenceState))
