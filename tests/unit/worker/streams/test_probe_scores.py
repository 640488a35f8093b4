"""Scores of a probe on their way from the engine's step to a gateway's frame: one per token, none lost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from services.core.generation import StartSpec
from services.ports.streams import StepFrame
from services.worker import engine_protocol as wire
from services.worker.streams.outbox import MAX_FRAME_LOGPROBS
from tests.unit.worker.bench import Bench
from tests.unit.worker.reader import Reader

A, B = 0x61, 0x62
ENTRY = wire.SampledLogprobs(-0.5, [], [])


@pytest.fixture
def reader(bench: Bench) -> Reader:
    return Reader(bench)


def asks(spec: StartSpec) -> StartSpec:
    return replace(spec, probe=True)


def step(bench: Bench, rows: list[tuple[int, int, float]], **fields: object) -> None:
    """One engine step: handle, token and score of each row."""
    handles, tokens, scores = (list(column) for column in zip(*rows, strict=True))
    event = wire.Stepped(
        step=1, step_s=0.01, handles=handles, tokens=tokens, finished={}, prefill_tokens=0, kv_blocks_used=0,
        running=1, waiting=0, probe_scores=scores,
    )  # fmt: skip
    bench.table.on_stepped(structs.replace(event, **fields))


def scores_of(frames: list[StepFrame]) -> dict[int, list[float]]:
    """Return the scores by handle, as a gateway finds them."""
    found: dict[int, list[float]] = {}
    for frame in frames:
        assert len(frame.probe_scores) in (0, len(frame.ids))
        at = 0
        for handle, count in zip(frame.handles, frame.counts, strict=True):
            found.setdefault(handle, []).extend(frame.probe_scores[at : at + count])
            at += count
    return found


def test_the_engine_hears_who_asks(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    reader.stream.start(2, asks(bench.spec()))
    assert [command.probe for command in bench.commands(wire.Submit)] == [False, True]


def test_each_token_of_who_asks_has_its_score_and_others_have_none(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    reader.stream.start(2, asks(bench.spec()))
    reader.stream.start(3, bench.spec())
    for number in range(3):  # the frame merges three steps
        step(bench, [(1, A, 0.9), (2, B, number / 4), (3, A, 0.9)])
    found = scores_of(reader.read())
    assert found[2] == [0.0, 0.25, 0.5]
    assert all(map(math.isnan, found[1] + found[3]))


def test_a_frame_without_scores_has_no_column(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    step(bench, [(1, A, 0.5)])
    assert [frame.probe_scores for frame in reader.read()] == [[]]


def test_a_stop_string_and_an_end_keep_scores_at_their_tokens(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, asks(bench.spec(stop=("ab",))))
    reader.stream.start(2, asks(bench.spec()))
    step(bench, [(1, A, 0.1), (2, A, 0.2)])
    step(bench, [(1, B, 0.3), (2, 300, 0.4)], finished={2: "stop"})
    found = scores_of(reader.read())
    assert found == {1: [0.1, 0.3], 2: [0.2, 0.4]}
    assert reader.ids == {1: [A, B], 2: [A, 300]}


def test_long_outputs_with_logprobs_are_cut_with_their_scores(bench: Bench, reader: Reader) -> None:
    many = MAX_FRAME_LOGPROBS + 3
    reader.stream.start(1, asks(bench.spec(logprobs=0, max_tokens=many, credit=many)))
    rows = [(1, A, number / many) for number in range(many)]
    step(bench, rows, logprobs={1: [ENTRY] * many})
    frames = reader.read()
    assert len(frames) > 1
    assert scores_of(frames) == {1: [score for _, _, score in rows]}


def test_tokens_of_the_prompt_have_no_score(bench: Bench, reader: Reader) -> None:
    spec = asks(bench.spec(prompt=2))
    generation = spec.generation
    scored = replace(generation, sampling=replace(generation.sampling, prompt_logprobs=0))
    reader.stream.start(1, replace(spec, generation=scored))
    step(bench, [(1, A, 0.75)], prompt_logprobs={1: [ENTRY, ENTRY]})
    (found,) = scores_of(frames := [reader.take()]).values()
    assert frames[0].counts == [3]
    assert [math.isnan(score) for score in found] == [True, True, False]
