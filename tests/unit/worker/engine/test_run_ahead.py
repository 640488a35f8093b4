"""A batch that is planned before the tokens of the one before it are known: what comes out is the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.execute.executor import (
    NOT_FINITE,
    Batch,
    Executor,
    Inline,
    Runner,
    Samples,
    unknown_token,
)
from services.worker.engine.execute.model import Hidden
from services.worker.engine.execute.torch_executor import TorchExecutor
from services.worker.engine.sample.sampler import NO_TOKEN
from services.worker.engine.sequence import sequence_of
from services.worker.engine_protocol import Cancel, Credit, Park, Submit
from tests.support.engine_oracle import Arrival, Outcome, Run, Schedule, Shape, load_engine, save, schedules
from tests.support.run_ahead import RunsAhead
from tests.unit.worker.engine.prefix.cache_rig import CacheRig, ask

EXAMPLES = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Asked:
    """A request, the step that it comes before, and what its reader does."""

    step: int
    prompt: int
    max_tokens: int
    stop: int | None
    credit: int
    cancelled_at: int | None
    parked_at: int | None
    penalty: float


asked = st.builds(
    Asked,
    step=st.integers(0, 8),
    prompt=st.integers(1, 20),
    max_tokens=st.integers(1, 12),
    stop=st.none() | st.integers(0, 96),
    credit=st.sampled_from((0, 0, 1, 3)),
    cancelled_at=st.none() | st.integers(0, 20),
    parked_at=st.none() | st.integers(0, 20),
    penalty=st.sampled_from((0.0, 0.0, 0.0, 0.5)),
)


def drive(bench: Any, submit: Callable[..., Submit], requests: list[Asked], failing: set[int]) -> Any:
    """Run them to their ends; those that are handed back come again with what they had."""
    bench.executor.errors = dict.fromkeys(failing, "the logits are not finite")
    handles = {}
    for step in range(2000):
        for number, request in enumerate(requests):
            if request.step == step:
                handles[number] = number
                bench.engine.apply(_submit(submit, number, request, []))
            if request.cancelled_at == step:
                bench.engine.apply(Cancel([number]))
                handles.pop(number, None)
            if request.parked_at == step and number in handles:
                bench.engine.apply(Park([number]))
            if request.parked_at is not None and number in handles and request.parked_at == step - 2:
                bench.engine.apply(Credit([number], [1 << 30]))
        if not bench.engine.has_work:
            if step > 24:
                return bench
            continue
        event = bench.step()
        for handle, reason in event.finished.items():
            if reason == "preempted":
                produced = bench.tokens.get(handle, [])
                del bench.finished[handle]
                bench.engine.apply(_submit(submit, handle, requests[handle], produced))
            else:
                handles.pop(handle, None)
        for handle in handles:
            if requests[handle].credit:
                limit = len(bench.tokens.get(handle, [])) + requests[handle].credit
                bench.engine.apply(Credit([handle], [limit]))
    raise AssertionError("the engine does not come to an end")


def _submit(submit: Callable[..., Submit], number: int, request: Asked, produced: list[int]) -> Submit:
    return submit(
        number,
        [(number + place) % 90 for place in range(request.prompt)],
        request.max_tokens,
        credit=len(produced) + request.credit if request.credit else 1 << 30,
        produced=produced,
        stop_token_ids=() if request.stop is None else (request.stop,),
        presence_penalty=request.penalty,
    )


@EXAMPLES
@given(
    requests=st.lists(asked, min_size=1, max_size=6),
    blocks=st.sampled_from((8, 10, 16, 64)),
    places=st.integers(1, 4),
    failing=st.sets(st.integers(0, 5), max_size=1),
)
def test_every_request_gets_the_same(
    make_bench: Callable[..., Any],
    submit: Callable[..., Submit],
    requests: list[Asked],
    blocks: int,
    places: int,
    failing: set[int],
) -> None:
    shape = {"blocks": blocks, "max_sequences": places, "max_model_len": 32}
    plain = drive(make_bench(**shape), submit, requests, failing)
    ahead = drive(make_bench(**shape, launch=RunsAhead), submit, requests, failing)
    for number, request in enumerate(requests):
        mine, other = ahead.tokens.get(number, []), plain.tokens.get(number, [])
        if request.cancelled_at is None:
            assert mine == other
            assert ahead.finished[number] == plain.finished[number]
        else:  # it may have come further in one of them
            shorter = min(len(mine), len(other))
            assert mine[:shorter] == other[:shorter]
    assert ahead.engine.heartbeat().kv_blocks_used == 0


def test_the_next_batch_is_on_its_way_when_tokens_are_told(
    make_bench: Callable[..., Any], submit: Callable[..., Submit]
) -> None:
    bench = make_bench(launch=RunsAhead)
    for number in range(3):
        bench.engine.apply(submit(number, [1, 2, 3], 6))
    bench.run()
    steps = bench.engine.heartbeat().step
    assert bench.launch.ahead == steps - 1  # all but the first
    assert steps == 6


def test_a_row_behind_a_stop_token_is_nobodys(
    make_bench: Callable[..., Any], submit: Callable[..., Submit]
) -> None:
    bench = make_bench(launch=RunsAhead)
    bench.executor.token_of = lambda handle, position: 50 + position
    bench.engine.apply(submit(0, [1, 2, 3], 10, stop_token_ids=(52,)))
    bench.engine.apply(submit(1, [1, 2, 3], 10))
    bench.run()
    assert bench.tokens == {0: [50, 51, 52], 1: [50 + place for place in range(10)]}
    assert bench.finished == {0: "stop", 1: "length"}


def test_a_sequence_whose_token_failed_gets_no_other(
    make_bench: Callable[..., Any], submit: Callable[..., Submit]
) -> None:
    bench = make_bench(launch=RunsAhead)
    bench.executor.errors = {0: "the logits are not finite"}
    bench.engine.apply(submit(0, [1, 2, 3], 5))
    bench.engine.apply(submit(1, [1, 2, 3], 5))
    bench.run()
    assert bench.finished == {0: "not_finite", 1: "length"}
    assert 0 not in bench.tokens


def test_who_is_penalised_by_the_output_waits_for_it(
    make_bench: Callable[..., Any], submit: Callable[..., Submit]
) -> None:
    bench = make_bench(launch=RunsAhead)
    bench.engine.apply(submit(0, [1, 2, 3], 5, frequency_penalty=0.5))
    bench.run()
    assert bench.launch.ahead == 0
    assert len(bench.tokens[0]) == 5


def test_nobody_is_preempted_for_a_batch_that_is_ahead(
    make_bench: Callable[..., Any], submit: Callable[..., Submit]
) -> None:
    """The second one needs the block that the first one's end frees, which is known only with its token."""
    bench = make_bench(blocks=4, block_size=4, max_sequences=2, launch=RunsAhead)
    bench.engine.apply(submit(0, [1] * 3, 12, stop_token_ids=(50,)))
    bench.engine.apply(submit(1, [2] * 3, 9))
    bench.executor.token_of = lambda handle, position: 50 if (handle, position) == (0, 5) else 60 + position
    most_used = 0
    while bench.engine.has_work:
        most_used = max(most_used, bench.step().kv_blocks_used)
    assert bench.finished == {0: "stop", 1: "length"}
    assert most_used == 4, "there was a block for each all the time"
    assert bench.preemptions == 0
    assert 0 < bench.launch.ahead < bench.engine.heartbeat().step - 1, "it waited while blocks were short"


def test_a_prefill_that_others_may_find_is_committed_before_the_next_batch() -> None:
    """Prompts that begin alike compute the beginning once, as without running ahead."""
    counts = []
    launches: tuple[Callable[[Runner], Executor], ...] = (Inline, RunsAhead)
    for launch in launches:
        rig = CacheRig(64, token_budget=32, max_sequences=6, launch=launch)
        rig.run(*(ask(handle, [*range(64), 70 + handle]) for handle in range(6)))
        counts.append(rig.executor.computed)
        assert len(rig.tokens) == 6
    assert counts[0] == counts[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    save(Shape("Llama", 6, 2, 8), folder)
    return folder


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules())
def test_a_model_samples_the_same_tokens(checkpoint: Path, schedule: Schedule) -> None:
    """Real rows, with tokens that only the device knows: equal with chunks, hits, preemption, sampling."""
    options = {**schedule.options, "speculation": "off", "operators": "native"}
    arrivals = tuple(replace(each, cancelled_after=None) for each in schedule.arrivals)
    plain = _run(checkpoint, options, arrivals)
    ahead = _run(checkpoint, options, arrivals, runs_ahead=True)
    assert ahead.tokens == plain.tokens
    assert ahead.logprobs == plain.logprobs


def _run(
    folder: Path, options: dict[str, Any], arrivals: tuple[Arrival, ...], *, runs_ahead: bool = False
) -> Outcome:
    return Run(load_engine(folder, options, runs_ahead=runs_ahead), arrivals).to_end()


class Recording:
    """A model whose first row has no numbers for logits, and what it was asked."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        prompt_tokens: torch.Tensor,
        logit_rows: torch.Tensor,
        hidden: Hidden | None = None,
    ) -> torch.Tensor:
        self.tokens.append(tokens.tolist())
        logits = torch.zeros(len(logit_rows), 10)
        logits[0] = math.nan
        logits[1:, 7] = 1.0
        return logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no prompt is scored")


def test_the_device_puts_tokens_in_their_places_and_none_for_a_row_that_failed(
    submit: Callable[..., Submit],
) -> None:
    model = Recording()
    attention, pool = (
        SimpleNamespace(begin=lambda *_: None),
        SimpleNamespace(block_size=4, copy=lambda _: None),
    )
    executor: Any = TorchExecutor(model, attention, pool, runs_ahead=True)
    sequences = [sequence_of(submit(number, [1, 2]), arrival=0, eos_ids=frozenset()) for number in range(3)]
    for sequence in sequences:
        sequence.blocks, sequence.table_version = [sequence.handle], 1
    executor.submit(Batch(sequences, []))
    for row, sequence in enumerate(sequences):
        sequence.tokens.append(unknown_token(row))
    executor.submit(Batch(sequences[::-1], []))
    assert executor.collect() == Samples([NO_TOKEN, 7, 7], errors={0: NOT_FINITE})
    assert model.tokens == [[2, 2, 2], [7, 7, 0]]
