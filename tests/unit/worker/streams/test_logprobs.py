"""Log-probabilities of prompts on their way from the engine's steps to frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.core.generation import FinishReason, OutputLimits, Prompt, StartSpec
from services.worker import engine_protocol as wire
from services.worker.agent.report import WorkerIdentity, take_snapshot
from services.worker.streams.outbox import MAX_FRAME_LOGPROBS
from tests.unit.worker.bench import EOS, Bench
from tests.unit.worker.reader import Reader

# A special token, "é" of two tokens, "a", and the beginning of another character.
PROMPT = (EOS, 0xC3, 0xA9, 0x61, 0xC3)
FIRST = wire.SampledLogprobs(0.0, [], [])
ENTRIES = [FIRST, *(wire.SampledLogprobs(-float(place), [0x61], [-0.5], place) for place in range(1, 5))]
WHO = WorkerIdentity("w1", "a:1", "z")


@pytest.fixture
def reader(bench: Bench) -> Reader:
    return Reader(bench)


def scoring(bench: Bench, *, max_tokens: int = 0, scored: int = 0, **more: Any) -> StartSpec:
    spec = bench.spec(logprobs=0, **more)
    generation = replace(
        spec.generation,
        prompt=Prompt(list(PROMPT)),
        sampling=replace(spec.generation.sampling, prompt_logprobs=1),
        limits=OutputLimits(max_tokens),
    )
    return replace(spec, generation=generation, scored_tokens=scored)


def step(bench: Bench, entries: list[wire.SampledLogprobs], token: int | None = None, **more: Any) -> None:
    """One engine step of the first sequence: what it scored, and perhaps a token."""
    bench.table.on_stepped(
        wire.Stepped(
            step=1,
            step_s=0.01,
            handles=[] if token is None else [1],
            tokens=[] if token is None else [token],
            prefill_tokens=len(entries),
            kv_blocks_used=0,
            running=1,
            waiting=0,
            prompt_logprobs={1: entries} if entries else {},
            **{"finished": {}, **more},
        )
    )
    bench.host.check_integrity()


def test_the_output_begins_with_the_prompt_and_the_text_of_each_token(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, scoring(bench, max_tokens=3))
    step(bench, ENTRIES[:2])
    step(bench, ENTRIES[2:], 0x62, logprobs={1: [wire.SampledLogprobs(-0.25, [], [])]})
    (frame,) = reader.read()
    assert reader.ids[1] == [*PROMPT, 0x62]
    assert reader.text[1] == "b", "the prompt's text is with its entries"
    entries = frame.logprobs[0]
    assert [each.text for each in entries] == ["", "", "é", "a", "", "b"]
    assert [each.token for each in entries] == ["<eos>", "\ufffd", "\ufffd", "a", "\ufffd", "b"]
    assert [each.rank for each in entries] == [0, 1, 2, 3, 4, 0]
    assert [each.token_bytes for each in entries] == [b"", b"\xc3", b"\xa9", b"", b"\xc3", b""]
    assert {each.top_bytes for each in entries} == {()}
    assert (entries[0].sampled, entries[0].top_ids, entries[2].top_tokens) == (0.0, (), ("a",))
    step(bench, [], 0x61, finished={1: "length"}, logprobs={1: [wire.SampledLogprobs(-0.25, [], [])]})
    reader.read()
    assert reader.ends[1].output_tokens == 2


def test_alternatives_that_are_parts_of_a_character_have_their_bytes(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, scoring(bench, max_tokens=3))
    found = wire.SampledLogprobs(-0.5, [0x61, 0xE2], [-0.25, -0.5])
    step(bench, ENTRIES, 0xE2, logprobs={1: [found]})
    (frame,) = reader.read()
    entry = frame.logprobs[0][-1]
    assert (entry.token_bytes, entry.top_bytes) == (b"\xe2", (b"", b"\xe2"))
    assert (entry.token, entry.top_tokens) == ("\ufffd", ("a", "\ufffd"))


def test_the_output_goes_on_from_the_text_of_a_prompt_that_it_continues(bench: Bench, reader: Reader) -> None:
    spec = scoring(bench, max_tokens=3)
    reader.stream.start(1, replace(spec, generation=replace(spec.generation, continues_prompt=True)))
    step(bench, ENTRIES, 0xA9, logprobs={1: [wire.SampledLogprobs(-0.25, [], [])]})
    (frame,) = reader.read()
    entries = frame.logprobs[0]
    assert [each.text for each in entries] == ["", "", "é", "a", "", "é"], "the character of two tokens"
    assert reader.text[1] == "é"


def test_a_request_without_output_ends_with_its_prefill_and_is_charged_for_it(
    bench: Bench, reader: Reader
) -> None:
    reader.stream.start(1, scoring(bench))
    step(bench, ENTRIES, finished={1: "length"})
    reader.read()
    end = reader.ends[1]
    assert (end.reason, end.output_tokens) == (FinishReason.LENGTH, 0)
    (use,) = take_snapshot(bench.host, WHO, whole=True).tenants
    assert (use.prefill, use.output) == (len(PROMPT), 0)


@pytest.mark.parametrize("scored", range(6))
def test_a_resume_sends_what_was_not_sent(scored: int, bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, scoring(bench, scored=scored))
    (submit,) = bench.commands(wire.Submit)
    assert submit.scored_tokens == scored
    reader.ids[1] = list(PROMPT[:scored])  # of the earlier run: offsets count them
    step(bench, ENTRIES[scored:], finished={1: "length"})
    frames = reader.read()
    assert reader.ids[1] == list(PROMPT)
    texts = [each.text for frame in frames for each in frame.logprobs.get(0, [])]
    assert texts == ["", "", "é", "a", ""][scored:], "a character is cut by the loss"
    charged = take_snapshot(bench.host, WHO, whole=True).tenants
    assert [use.prefill for use in charged] == ([len(PROMPT)] if scored < len(PROMPT) else [])


def test_a_long_prompt_is_split_into_frames_and_delays_nobody(bench: Bench, reader: Reader) -> None:
    count = 3 * MAX_FRAME_LOGPROBS + 7
    spec = scoring(bench, max_tokens=2)
    generation = replace(spec.generation, prompt=Prompt([0x61] * count))
    bench.table.limits = replace(bench.table.limits, kv_blocks_total=count)
    bench.table.kv.resize(count)
    reader.stream.start(1, replace(spec, generation=generation))
    reader.stream.start(2, bench.spec())
    step(bench, [FIRST] * count, 0x62, logprobs={1: [FIRST]})
    bench.stepped({2: 0x63})
    frames = reader.read()
    assert max(len(each) for frame in frames for each in frame.logprobs.values()) == MAX_FRAME_LOGPROBS
    assert reader.ids[1] == [0x61] * count + [0x62]
    assert reader.text == {1: "b", 2: "c"}
    assert 2 in frames[1].handles, "the neighbour waited for all of the prompt"


def test_an_embedding_is_charged_for_its_prefill(bench: Bench, reader: Reader) -> None:
    reader.stream.start(1, replace(bench.spec(prompt=20), embed=True))
    bench.stepped({}, finished={1: "length"}, prefill_tokens=20)
    reader.read()
    (use,) = take_snapshot(bench.host, WHO, whole=True).tenants
    assert (use.prefill, use.output) == (20, 0)
