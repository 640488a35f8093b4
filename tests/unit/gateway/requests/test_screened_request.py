"""A request with a safety pack: its sequence is freed at a find, and what is held stalls no window."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from services.core import errors
from services.core.generation import FinishReason, StartSpec
from services.gateway.catalog import PinnedVersion
from services.gateway.events import Finished
from services.gateway.requests.terms import Produced, Resume
from services.ports.worker import SequenceSink
from tests.support.safety import ScriptedClassifiers, classifier, desk_of, pack_of, phrases, safety_of
from tests.support.waiting import until
from tests.unit.gateway.requests.test_request import Harness, Script, Workers, ended


class SteppedWorkers(Workers):
    """One worker that sends a text per token of credit, as a real one does; then the end."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.texts = texts
        self.room = self.sent = 0
        self.most_unread = 0
        self.sink: SequenceSink | None = None

    def start(self, spec: StartSpec, sink: SequenceSink) -> "SteppedWorkers":
        self.started.append(spec)
        self.sink, self.room, self.sent = sink, spec.initial_credit_tokens, len(spec.produced_ids)
        sink.on_accepted()
        asyncio.get_running_loop().call_soon(self.step)
        return self

    def credit(self, tokens: int) -> None:
        super().credit(tokens)
        if not self.room:
            asyncio.get_running_loop().call_soon(self.step)
        self.room += tokens

    def step(self) -> None:
        if self.sink is None:
            return
        if self.sent == len(self.texts):
            self.sink.on_finished(ended(self.sent))
            self.sink = None
        elif self.room:
            self.room -= 1
            self.sent += 1
            self.sink.on_tokens(self.sent - 1, [self.sent], self.texts[self.sent - 1], ())
            asyncio.get_running_loop().call_soon(self.step)

    def cancel(self) -> None:
        super().cancel()
        self.sink = None


def harness_of(
    texts: Sequence[str], pack: dict[str, Any], classifiers: ScriptedClassifiers | None = None
) -> tuple[Harness, SteppedWorkers]:
    harness, workers = Harness(), SteppedWorkers(texts)
    harness.use(replace(harness.ports, workers=workers))
    found = pack_of(**pack)
    harness.safety = safety_of(found, desk_of(classifiers, supervisor=harness.supervisor))
    return harness, workers


def _has(tokens: dict[int, list[int]], count: int) -> bool:
    return len(tokens.get(0, [])) >= count


async def test_a_find_frees_the_sequence_at_once_and_charges_what_was_made() -> None:
    harness, workers = harness_of(["a ", "bo", "mb ", *["x"] * 200], phrases("block", "bomb"))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert harness.sink.text[0] == "a "
    (result,) = end.choices
    assert (result.finish_reason, result.stop) == (FinishReason.FILTERED, "")
    assert (workers.cancelled, len(workers.started)) == (1, 1)
    assert end.usage.output_tokens == result.output_tokens == workers.sent < 20


@pytest.mark.parametrize("window", [0, 1, 5, 32])
async def test_what_is_held_stalls_no_window_of_the_client(window: int) -> None:
    """The client allows one token at a time; a phrase of 40 tokens begins and never ends."""
    texts = ["b", *["o"] * 40, "x"] * 3
    harness, _ = harness_of(texts, phrases("block", "b" + "o" * 40 + "y", window_tokens=window))
    harness.client_window = 1
    task = harness.start()
    tokens = harness.sink.tokens
    for allowed in range(1, len(texts) + 1):
        await until(partial(_has, tokens, allowed))
        assert len(tokens[0]) == allowed, "more than the client allows, or a stall"
        harness.request.credit(0, 1)
        harness.request.allow(1)
    await task
    assert harness.sink.text[0] == "".join(texts)


async def test_a_reader_that_stays_away_stops_the_worker_all_the_same() -> None:
    harness, workers = harness_of(["x"] * 500, phrases("block", "bomb", window_tokens=16))
    task = harness.start()
    await asyncio.sleep(0.1)
    assert workers.sent <= 8 + 16, "the window of this process and the pack's"
    harness.request.cancel()
    await task


async def test_choices_are_screened_apart() -> None:
    def script(texts: Sequence[str]) -> Script:
        def run(spec: StartSpec, sink: SequenceSink) -> None:
            sink.on_accepted()
            for at, text in enumerate(texts):
                sink.on_tokens(at, [at], text, ())
            sink.on_finished(ended(len(texts)))

        return run

    harness = Harness(script(["a ", "bo", "mb"]), script(["a ", "boat"]), choices=2)
    found = pack_of(**phrases("block", "bomb"))
    harness.safety = safety_of(found, desk_of(supervisor=harness.supervisor))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert [one.finish_reason for one in end.choices] == [FinishReason.FILTERED, FinishReason.STOP]
    assert harness.sink.text == {0: "a ", 1: "a boat"}


async def test_a_find_ends_a_sequence_that_waits_for_another_worker() -> None:
    """Its worker was lost; the verdict on what it had made arrives meanwhile."""
    gate = asyncio.Event()
    classifiers = ScriptedClassifiers(delay=gate.wait)

    def lost(spec: StartSpec, sink: SequenceSink) -> None:
        sink.on_accepted()
        sink.on_tokens(0, [1], "bad", ())
        harness.placement.hold.clear()
        sink.on_lost("gone")

    harness = Harness(lost)
    found = pack_of(**classifier(hold_s=5))
    harness.safety = safety_of(found, desk_of(classifiers, supervisor=harness.supervisor))
    task = harness.start()
    await until(lambda: len(harness.placement.asked) == 2)
    gate.set()
    await task
    assert isinstance(harness.sink.end, Finished)
    assert harness.sink.end.choices[0].finish_reason is FinishReason.FILTERED
    assert harness.sink.tokens == {}


async def test_a_stream_that_moves_repeats_no_verdict() -> None:
    classifiers = ScriptedClassifiers()

    def part(first: int, texts: Sequence[str], end: bool) -> Script:
        def run(spec: StartSpec, sink: SequenceSink) -> None:
            assert (len(spec.produced_ids), spec.delivered_chars) == (first, 2 * first)
            sink.on_accepted()
            for at, text in enumerate(texts, first):
                sink.on_tokens(at, [at], text, ())
            if end:
                sink.on_finished(ended(first + len(texts)))
            else:
                sink.on_lost("gone")

        return run

    harness = Harness(part(0, ["a ", "b "], False), part(2, ["c ", "d "], True))
    found = pack_of(**classifier(window_tokens=2))
    harness.safety = safety_of(found, desk_of(classifiers, supervisor=harness.supervisor))
    end = await harness.run()
    assert isinstance(end, Finished)
    assert end.resumes == 1
    assert harness.sink.text[0] == "a b c d "
    assert len(classifiers.judged) == len(set(classifiers.judged)), "a verdict was repeated"


async def test_redacted_output_is_not_continued_but_made_again() -> None:
    harness, workers = harness_of(["my ", "secret", " is ", "out"], phrases("redact", "secret"))
    had = "my [redacted]"
    resume = Resume(PinnedVersion("sha256:x", 3), (Produced((1, 0xFFFF_FFFF), len(had), had),), ())
    harness.terms = replace(harness.terms, resume=resume)
    harness.use(harness.ports)
    harness.sink.tokens[0] = [1, 0xFFFF_FFFF]
    end = await harness.run()
    assert isinstance(end, Finished)
    assert workers.started[0].produced_ids == ()
    assert harness.sink.text[0] == " is out"
    assert harness.sink.tokens[0] == [1, 0xFFFF_FFFF, 3, 4]


async def test_an_error_sends_nothing_that_was_held() -> None:
    def failing(spec: StartSpec, sink: SequenceSink) -> None:
        sink.on_accepted()
        sink.on_tokens(0, [1], "held", ())
        sink.on_finished(ended(1, FinishReason.DEADLINE))

    harness = Harness(failing)
    found = pack_of(window_tokens=8)
    harness.safety = safety_of(found, desk_of(supervisor=harness.supervisor))
    assert isinstance(await harness.run(), errors.DeadlineExceeded)
    assert harness.sink.tokens == {}


async def test_a_cancellation_ends_the_verdicts_too() -> None:
    classifiers = ScriptedClassifiers(delay=asyncio.Event().wait)
    harness, _ = harness_of(["x"] * 4, classifier(hold_s=600.0), classifiers)
    task = harness.start()
    await until(lambda: bool(classifiers.asked))
    harness.request.cancel()
    await task
    await asyncio.sleep(0)
    assert classifiers.settled == 1
    assert not [one for one in asyncio.all_tasks() if one.get_name().startswith("judge")]
