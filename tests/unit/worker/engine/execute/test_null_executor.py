"""The executor without a model: the same tokens everywhere, at the pace that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from services.worker.engine.execute.executor import Batch
from services.worker.engine.execute.null_executor import NullExecutor
from services.worker.engine.sequence import sequence_of


@dataclass
class Time:
    """A clock that only sleeping and work move; sleeping lasts ``late_s`` longer than asked."""

    now_s: float = 100.0
    late_s: float = 0.0
    sleeps: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds + self.late_s


def make(
    time: Time, *, step_s: float = 0.0, vocab: int = 50, eos: frozenset[int] = frozenset()
) -> NullExecutor:
    return NullExecutor(vocab_size=vocab, eos_ids=eos, step_s=step_s, clock=time, sleep=time.sleep)


def batch_of(submits: list[Any]) -> Batch:
    return Batch([sequence_of(s, arrival=i, eos_ids=frozenset()) for i, s in enumerate(submits)], [])


def test_a_token_depends_on_seed_choice_and_position_only(submit: Any) -> None:
    executor = make(Time(), vocab=10**6)
    alone = executor.run(batch_of([submit(1, [3, 4], seed=9)])).tokens
    longer_prompt = executor.run(batch_of([submit(5, range(9), seed=1), submit(2, [7] * 5, seed=9)])).tokens
    assert longer_prompt[1:] == alone
    others = [submit(1, [3], seed=9, choice=1), submit(1, [3], seed=8), submit(1, [3], seed=9, produced=[1])]
    tokens = executor.run(batch_of(others)).tokens
    assert len({*tokens, *alone}) == 4


def test_tokens_are_of_the_vocabulary_and_never_the_end(submit: Any) -> None:
    executor = make(Time(), vocab=4, eos=frozenset({1, 2}))
    submits = [submit(i, [1], 99, seed=i, produced=[0] * (i % 7)) for i in range(64)]
    assert set(executor.run(batch_of(submits)).tokens) == {0, 3}


def test_nothing_but_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        make(Time(), vocab=2, eos=frozenset({0, 1}))


def test_oversleeping_does_not_add_up(submit: Any) -> None:
    time = Time(late_s=0.003)
    executor = make(time, step_s=0.010)
    for _ in range(100):
        executor.run(batch_of([submit(0, [1])]))
    assert time.now_s == pytest.approx(101.0, abs=0.004)


@pytest.mark.parametrize("pause_s", [0.006, 0.015, 5.0])
def test_a_step_after_a_pause_takes_its_whole_time(submit: Any, pause_s: float) -> None:
    time = Time()
    executor = make(time, step_s=0.010)
    executor.run(batch_of([submit(0, [1])]))
    time.now_s += pause_s
    executor.run(batch_of([submit(0, [1])]))
    assert time.sleeps[-1] == pytest.approx(0.010)


def test_flat_out_never_sleeps(submit: Any) -> None:
    time = Time()
    make(time).run(batch_of([submit(0, [1])]))
    assert time.sleeps == []
