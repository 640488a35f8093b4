"""Log-probabilities of prompts: what is refused before it runs, and streams that begin with their prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput
from services.core.generation import (
    FinishReason,
    OutputLimits,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.gateway.events import Finished
from services.gateway.requests.scoring import MAX_PROMPT_SCORES, check_scores, check_scoring
from services.gateway.requests.terms import Produced, Resume
from services.ports.worker import SequenceSink
from tests.unit.gateway.requests.test_request import Harness, Script, ended
from tests.unit.gateway.requests.test_validate import CONTEXT, Resolve, ids
from tests.unit.gateway.requests.test_validate import resolve as resolve
from tests.unit.gateway.requests.test_validate import validator as validator

PROMPT = [11, 12, 13, 14, 15]
ENTRY = TokenLogprobs(-1.0, (), (), (), "x", "x", 1)


def scores(upto: int, outputs: int, end: SequenceEnd | str, *, at_once: int = 2) -> Script:
    """Accept, send the rest of the prompt up to a token, then so much output, then end or be lost (a str)."""

    def script(spec: StartSpec, sink: SequenceSink) -> None:
        sink.on_accepted()
        done = spec.scored_tokens + len(spec.produced_ids)
        stream: Sequence[int] = [*PROMPT[:upto], *range(100, 100 + outputs)]
        for first in range(done, len(stream), at_once):
            found = stream[first : first + at_once]
            text = "".join(f"t{token}" for token in found if token >= 100)
            sink.on_tokens(first, found, text, [ENTRY] * len(found))
        if isinstance(end, str):
            sink.on_lost(end)
        else:
            sink.on_finished(end)

    return script


def harness_of(*scripts: Script, max_tokens: int = 4) -> Harness:
    harness = Harness(*scripts)
    sampling = Sampling(7, logprobs=0, prompt_logprobs=2)
    harness.spec = replace(
        harness.spec, prompt=Prompt(PROMPT), sampling=sampling, limits=OutputLimits(max_tokens)
    )
    return harness


async def test_a_stream_begins_with_its_prompt_which_is_no_output() -> None:
    harness = harness_of(scores(5, 3, ended(3)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.sink.tokens[0] == [*PROMPT, 100, 101, 102]
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (5, 3)
    assert harness.sink.text[0] == "t100t101t102"


async def test_no_output_is_billed_for_its_input() -> None:
    harness = harness_of(scores(5, 0, ended(0, FinishReason.LENGTH)), max_tokens=0)
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.sink.tokens[0] == PROMPT
    assert [(usage.prompt_tokens, usage.output_tokens) for usage in harness.limiter.usage] == [(5, 0)]
    assert [result.finish_reason for result in end.choices] == [FinishReason.LENGTH]
    assert harness.placement.asked[0].max_output_tokens == 0


@pytest.mark.parametrize("upto", [0, 1, 2, 4, 5], ids=lambda upto: f"after {upto}")
@pytest.mark.parametrize("at_once", [1, 2, 9])
async def test_a_loss_neither_drops_nor_doubles_an_entry(upto: int, at_once: int) -> None:
    end = ended(2, FinishReason.LENGTH)
    harness = harness_of(
        scores(upto, 0, "gone", at_once=at_once), scores(5, 1, "gone"), scores(5, 2, end, at_once=at_once)
    )
    assert isinstance(await harness.run(), Finished)
    assert harness.sink.tokens[0] == [*PROMPT, 100, 101]
    assert [start.scored_tokens for start in harness.workers.started] == [0, upto, 5]
    assert [list(start.produced_ids) for start in harness.workers.started] == [[], [], [100]]
    assert harness.sink.text[0] == "t100t101"


async def test_entries_that_were_skipped_are_a_loss() -> None:
    def skips(spec: StartSpec, sink: SequenceSink) -> None:
        sink.on_accepted()
        sink.on_tokens(0, PROMPT[:2], "", [ENTRY] * 2)
        sink.on_tokens(3, PROMPT[3:], "", [ENTRY] * 2)

    harness = harness_of(skips, scores(5, 1, ended(1)))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert end.resumes == 1
    assert harness.sink.tokens[0] == [*PROMPT, 100]


async def test_a_worker_that_scores_nothing_is_not_believed() -> None:
    """Its output would be taken for the prompt's."""

    def generates(spec: StartSpec, sink: SequenceSink) -> None:
        sink.on_accepted()
        sink.on_tokens(0, [100, 101], "t100t101", [ENTRY] * 2)

    harness = harness_of(generates, scores(5, 1, ended(1)))
    assert isinstance(await harness.run(), Finished)
    assert harness.sink.tokens[0] == [*PROMPT, 100]


@pytest.mark.parametrize("had", [(), (11, 12), (*PROMPT, 100)], ids=["nothing", "prompt", "output"])
async def test_another_gateway_continues_from_the_record(had: tuple[int, ...]) -> None:
    harness = harness_of(scores(5, 2, ended(2)))
    pinned: Any = None
    resume = Resume(pinned, (Produced(had, 4 if len(had) > 5 else 0),), ())
    harness.terms = replace(harness.terms, resume=resume)
    harness.use(harness.ports)
    harness.sink.tokens[0] = list(had)
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.sink.tokens[0] == [*PROMPT, 100, 101]
    (start,) = harness.workers.started
    assert (start.scored_tokens, start.delivered_chars) == (min(5, len(had)), 4 if len(had) > 5 else 0)
    assert list(start.produced_ids) == list(had[5:])
    assert end.usage.output_tokens == 2


async def test_credit_counts_output_once_the_prompt_is_taken() -> None:
    harness = harness_of(_all_but_the_end, max_tokens=60)
    task = harness.start()
    for _ in range(8):
        await asyncio.sleep(0)
    harness.request.credit(0, 5)  # the prompt: the window of output is as wide as before
    assert harness.workers.credits == []
    harness.request.credit(0, 3)
    assert harness.workers.credits == [3]
    assert harness.request.buffered_tokens == 0
    task.cancel()


def _all_but_the_end(spec: StartSpec, sink: SequenceSink) -> None:
    sink.on_accepted()
    sink.on_tokens(0, [*PROMPT, 100, 101, 102], "abc", [ENTRY] * 8)


# --- several choices ------------------------------------------------------------------------------------


def with_choices(harness: Harness, had: Sequence[tuple[int, ...]] = ()) -> Harness:
    """Let the request have three choices, which continue what an earlier run produced."""
    harness.spec = replace(harness.spec, choices=3)
    pinned: Any = None
    if had:
        resume = Resume(pinned, tuple(Produced(each) for each in had), ())
        harness.terms = replace(harness.terms, resume=resume)
        harness.use(harness.ports)
        harness.sink.tokens = {choice: list(each) for choice, each in enumerate(had)}
    return harness


async def test_one_choice_has_the_prompt_scored_for_all() -> None:
    harness = with_choices(harness_of(*[scores(5, 2, ended(2))] * 3))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.sink.tokens == {choice: [*PROMPT, 100, 101] for choice in range(3)}
    assert harness.sink.text == dict.fromkeys(range(3), "t100t101")
    assert [start.scored_tokens for start in harness.workers.started] == [0, 5, 5]
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (5, 6)


async def test_choices_without_output_need_one_prefill_together() -> None:
    harness = with_choices(harness_of(scores(5, 0, ended(0, FinishReason.LENGTH)), max_tokens=0))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert [result.finish_reason for result in end.choices] == [FinishReason.LENGTH] * 3
    assert harness.sink.tokens == dict.fromkeys(range(3), PROMPT)
    assert len(harness.placement.asked) == len(harness.workers.started) == 1


async def test_a_loss_of_the_choice_that_is_scored_costs_the_others_nothing() -> None:
    harness = with_choices(harness_of(scores(3, 0, "gone"), *[scores(5, 1, ended(1))] * 3))
    assert isinstance(await harness.run(), Finished)
    assert [start.scored_tokens for start in harness.workers.started] == [0, 3, 5, 5]
    assert harness.sink.tokens == {choice: [*PROMPT, 100] for choice in range(3)}


@pytest.mark.parametrize(
    ("had", "scored"),
    [
        (((11,), (11, 12, 13), ()), [1, 0, 5]),  # the third has less than the first
        (((*PROMPT, 100), (11,), PROMPT), [5, 1, 5]),
        (((), PROMPT, PROMPT), [0, 5, 5]),
    ],
    ids=["some", "output", "none"],
)
async def test_choices_continue_from_what_a_record_has_of_each(
    had: Sequence[tuple[int, ...]], scored: list[int]
) -> None:
    harness = with_choices(harness_of(*[scores(5, 2, ended(2))] * 3), had)
    assert isinstance(await harness.run(), Finished)
    assert harness.sink.tokens == {choice: [*PROMPT, 100, 101] for choice in range(3)}
    assert sorted(start.scored_tokens for start in harness.workers.started) == sorted(scored)


# --- what is refused ------------------------------------------------------------------------------------


async def test_a_scored_prompt_is_taken_from_no_cache_and_its_output_has_its_own_logprobs(
    resolve: Resolve,
) -> None:
    spec = await resolve(prompt="the quick", prompt_logprobs=3, max_output_tokens=0)
    assert (spec.prompt.prefix_root, spec.prompt.prefix_hashes) == (0, ())
    assert (spec.sampling.prompt_logprobs, spec.sampling.logprobs) == (3, 0)
    assert spec.limits.max_tokens == 0
    assert spec.scored_tokens == len(spec.prompt.ids)
    assert (await resolve(prompt="the quick")).scored_tokens == 0


async def test_a_prompt_without_output_may_fill_the_context(resolve: Resolve) -> None:
    spec = await resolve(token_ids=ids(*[5] * CONTEXT), prompt_logprobs=0, max_output_tokens=0)
    assert len(spec.prompt.ids) == CONTEXT


def test_no_output_needs_another_result() -> None:
    with pytest.raises(InvalidInput, match="log-probabilities of the prompt alone") as caught:
        check_scoring(inference_pb2.Generation(max_output_tokens=0))
    assert caught.value.metadata["field"] == "max_output_tokens"
    check_scoring(inference_pb2.Generation(max_output_tokens=0, prompt_logprobs=0))
    check_scoring(inference_pb2.Generation())


@pytest.mark.parametrize(
    ("tokens", "alternatives", "choices"), [(MAX_PROMPT_SCORES, 0, 1), (3120, 20, 1), (2048, 3, 8)]
)
def test_a_prompt_with_too_many_is_refused_with_the_limit(
    tokens: int, alternatives: int, choices: int
) -> None:
    generation = inference_pb2.Generation(prompt_logprobs=alternatives, choices=choices)
    check_scores(generation, tokens)
    with pytest.raises(InvalidInput, match=f"at most {MAX_PROMPT_SCORES}") as caught:
        check_scores(generation, tokens + 1)
    assert caught.value.metadata["field"] == "prompt_logprobs"
    check_scores(inference_pb2.Generation(choices=128), 10 * MAX_PROMPT_SCORES)
