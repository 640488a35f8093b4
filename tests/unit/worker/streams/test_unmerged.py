"""Tokens that are sent one by one: each in an entry with its own text, whatever is merged of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.generation import StartSpec
from services.ports.streams import StepFrame
from services.worker.streams.outbox import MAX_FRAME_LOGPROBS
from tests.unit.worker.bench import Bench
from tests.unit.worker.reader import Reader
from tests.unit.worker.streams.test_probe_scores import ENTRY, A, B, asks, scores_of, step

HALF = (0xC3, 0xA9)  # the bytes of é


@pytest.fixture
def reader(bench: Bench) -> Reader:
    return Reader(bench)


def unmerged(spec: StartSpec) -> StartSpec:
    return replace(spec, unmerged=True)


def entries(frames: list[StepFrame], handle: int) -> list[tuple[int, list[int], str]]:
    """Return the offset, ids and text of each entry of a handle."""
    found = []
    for frame in frames:
        at = 0
        for other, offset, count, text in zip(
            frame.handles, frame.offsets, frame.counts, frame.texts, strict=True
        ):
            if other == handle:
                found.append((offset, list(frame.ids[at : at + count]), text))
            at += count
    return found


def test_each_token_has_its_text_and_those_of_others_are_merged(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, bench.spec())
    reader.stream.start(2, unmerged(bench.spec()))
    for token in (A, *HALF, B):
        step(bench, [(1, token, 0.0), (2, token, 0.0)])
    frames = reader.read()
    assert entries(frames, 1) == [(0, [A, *HALF, B], "aéb")]
    assert entries(frames, 2) == [(0, [A], "a"), (1, [0xC3], ""), (2, [0xA9], "é"), (3, [B], "b")]


def test_scores_logprobs_and_ends_stay_with_their_tokens(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, asks(unmerged(bench.spec(stop=("ab",)))))
    reader.stream.start(2, unmerged(bench.spec(logprobs=0)))
    step(bench, [(1, B, 0.1), (2, A, 0.0)], logprobs={2: [ENTRY]})
    step(bench, [(1, A, 0.3), (2, B, 0.0)], logprobs={2: [ENTRY]})
    step(bench, [(1, B, 0.5), (2, 300, 0.0)], finished={2: "stop"}, logprobs={2: [ENTRY]})
    frames = reader.read()
    assert entries(frames, 1) == [(0, [B], "b"), (1, [A], ""), (2, [B], "")]
    assert entries(frames, 2) == [(0, [A], "a"), (1, [B], "b"), (2, [300], "")]
    assert scores_of(frames)[1] == [0.1, 0.3, 0.5]
    assert [len(found) for frame in frames for found in frame.logprobs.values()] == [1, 1, 1]


def test_a_long_output_with_logprobs_keeps_its_order(bench: Bench, reader: Reader) -> None:
    many = MAX_FRAME_LOGPROBS + 3
    reader.stream.start(1, unmerged(bench.spec(logprobs=0, max_tokens=many, credit=many)))
    step(bench, [(1, A, 0.0)] * many, logprobs={1: [ENTRY] * many})
    found = entries(reader.read(), 1)
    assert sum(len(ids) for _, ids, _ in found) == many
    assert "".join(text for _, _, text in found) == "a" * many
    assert [offset for offset, _, _ in found] == sorted(offset for offset, _, _ in found)
