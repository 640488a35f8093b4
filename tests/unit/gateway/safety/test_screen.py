"""What a screen lets pass: nothing without a verdict, everything that has one, however it arrives."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import Unavailable
from services.core.generation import (
    FinishReason,
    GenerationSpec,
    OutputLimits,
    Prompt,
    Sampling,
    TokenLogprobs,
)
from services.core.safety import REDACTED_ID
from services.gateway.events import ChoiceResult
from services.gateway.requests.terms import Produced
from services.gateway.safety.screen import OutputScreen
from services.runtime.telemetry.metrics import Metrics
from tests.support.safety import (
    ScriptedClassifiers,
    classifier,
    counted,
    desk_of,
    pack_of,
    phrases,
    safety_of,
)

NO_LOGPROBS: tuple[TokenLogprobs, ...] = ()


@dataclass
class Out:
    """The sink behind the screen."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    classifiers: ScriptedClassifiers | None = None

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        assert offset == len(self.ids), "a token was left out or sent twice"
        self.ids += ids
        self.text += text
        self.logprobs += logprobs
        if self.classifiers is not None:
            judged = max(map(len, self.classifiers.judged), default=0)
            assert len(self.text) <= judged, "text was sent without a verdict"


@dataclass
class Run:
    """A choice that makes these pieces, with turns of the loop between them."""

    pieces: Sequence[str]
    screen: OutputScreen | None = None
    rng: Random = field(default_factory=lambda: Random(0))
    tokens: int = 1  # tokens of a piece
    offset: int = 0
    made: int = 0
    choice: int = 0
    reason: FinishReason = FinishReason.STOP

    async def run(self) -> ChoiceResult:
        assert self.screen is not None
        for text in self.pieces:
            ids = range(self.offset, self.offset + self.tokens)
            self.screen.on_tokens(self.choice, self.offset, tuple(ids), text, NO_LOGPROBS)
            self.offset += self.tokens
            self.made += self.tokens
            for _ in range(self.rng.randrange(3)):
                await asyncio.sleep(0)
        return ChoiceResult(self.choice, self.reason, "", self.made)

    def filtered(self) -> ChoiceResult:
        return ChoiceResult(self.choice, FinishReason.FILTERED, "", self.made)


def spec_of(stop: tuple[str, ...] = (), **more: Any) -> GenerationSpec:
    limits = OutputLimits(64, stop=stop)
    return GenerationSpec("req_1", "m", "sha256:x", 3, Prompt([1, 2, 3]), Sampling(7), limits, **more)


async def screened(
    pack: dict[str, Any],
    run: Run,
    out: Out,
    *,
    classifiers: ScriptedClassifiers | None = None,
    metrics: Metrics | None = None,
    stop: tuple[str, ...] = (),
    earlier: Sequence[Produced] = (),
    shadow: dict[str, Any] | None = None,
) -> ChoiceResult:
    desk = desk_of(classifiers, metrics=metrics)
    safety = safety_of(pack_of(**pack), desk, None if shadow is None else pack_of(**shadow))
    run.screen = OutputScreen(safety, spec_of(stop), out, earlier, None)
    async with asyncio.timeout(30.0):
        return await run.screen.run(run)


@st.composite
def cut_texts(draw: st.DrawFn, words: tuple[str, ...]) -> list[str]:
    """Draw a text of words and other letters, cut anywhere."""
    text = "".join(draw(st.lists(st.sampled_from(["a", "b", "o", " ", "x", "\u0301", *words]), max_size=24)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    return [text[start:end] for start, end in pairwise(cuts)]


@settings(deadline=None, max_examples=100)
@given(cut_texts(("bomb", "bom")), st.sampled_from([0, 1, 5]), st.integers(0, 99))
def test_what_precedes_the_first_match_is_sent_and_nothing_else(
    pieces: list[str], window: int, seed: int
) -> None:
    out, run = Out(), Run(pieces, rng=Random(seed))
    result = asyncio.run(screened(phrases("block", "bomb", window_tokens=window), run, out))
    # An accent is folded away.
    text = "".join(pieces)
    found = re.search("b\u0301*o\u0301*m\u0301*b", text)
    assert out.text == (text if found is None else text[: found.start()])
    assert result.finish_reason is (FinishReason.STOP if found is None else FinishReason.FILTERED)
    if found is None:
        assert len(out.ids) == len(pieces)


@settings(deadline=None, max_examples=100)
@given(
    cut_texts(("bad", "bomb")),
    st.integers(0, 8),
    st.integers(1, 8),
    st.integers(0, 999),
    st.integers(1, 3),
)
def test_whatever_the_delay_of_verdicts_nothing_leaves_without_one(
    pieces: list[str], window: int, every: int, seed: int, tokens: int
) -> None:
    rng = Random(seed)

    async def delay() -> None:
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)

    window = max(window, every)
    classifiers = ScriptedClassifiers(delay=delay)
    pack = classifier(every_tokens=every, window_tokens=window)
    pack["categories"]["found"] = {"action": "block"}
    pack["lists"] = [{"category": "found", "phrases": ["bomb"]}]
    out, run = Out(classifiers=classifiers), Run(pieces, rng=rng, tokens=tokens)
    result = asyncio.run(screened(pack, run, out, classifiers=classifiers))
    text = "".join(pieces)
    assert text.startswith(out.text)
    assert "bad" not in out.text
    assert "bomb" not in out.text
    if "bad" not in text and "bomb" not in text:
        assert (out.text, result.finish_reason) == (text, FinishReason.STOP)
        assert len(out.ids) == len(pieces) * tokens
    if "bad" in text or result.finish_reason is FinishReason.FILTERED:
        assert result.finish_reason is FinishReason.FILTERED
        assert result.output_tokens == run.made


@settings(deadline=None, max_examples=60)
@given(cut_texts(("a@b.co ", "joe@corp.example ")), st.integers(0, 4))
def test_redacted_text_is_replaced_however_it_is_cut(pieces: list[str], window: int) -> None:
    pack = {
        "categories": {"personal": {"action": "redact"}},
        "personal_data": [{"category": "personal", "kinds": ["email"]}],
        "window_tokens": window,
    }
    whole, cut = Out(), Out()
    asyncio.run(screened(pack, Run(["".join(pieces)]), whole))
    result = asyncio.run(screened(pack, Run(pieces), cut))
    assert cut.text == whole.text
    assert "@" not in whole.text or "@" in whole.text.replace("[redacted]", "")
    assert result.finish_reason is FinishReason.STOP
    assert len(cut.ids) == len(pieces)
    assert (REDACTED_ID in cut.ids) == ("[redacted]" in cut.text)


async def test_ids_and_logprobs_of_redacted_text_are_not_sent() -> None:
    pack, out = phrases("redact", "secret"), Out()
    logprobs = TokenLogprobs(-1.0, (5,), (-1.0,), ("secret",), "secret")
    screen = OutputScreen(safety_of(pack_of(**pack), desk_of()), spec_of(), out, (), None)

    class Logged(Run):
        async def run(self) -> ChoiceResult:
            for at, text in enumerate(("my ", "sec", "ret", " is")):
                screen.on_tokens(0, at, (at,), text, (logprobs,))
            return ChoiceResult(0, FinishReason.STOP, "", 4)

    await screen.run(Logged(()))
    assert out.text == "my [redacted] is"
    assert out.ids == [0, REDACTED_ID, REDACTED_ID, 3]
    assert [one.token for one in out.logprobs] == ["secret", "", "", "secret"]


async def test_a_window_holds_its_tokens_until_the_end() -> None:
    out, sent = Out(), []

    class Watched(Run):
        async def run(self) -> ChoiceResult:
            assert self.screen is not None
            for at in range(6):
                self.screen.on_tokens(0, at, (at,), "x", NO_LOGPROBS)
                sent.append(len(out.ids))
            return ChoiceResult(0, FinishReason.LENGTH, "", 6)

    result = await screened({"window_tokens": 4}, Watched(()), out)
    assert sent == [0, 0, 0, 0, 1, 2]
    assert (len(out.ids), result.finish_reason) == (6, FinishReason.LENGTH)


async def test_a_token_whose_text_is_a_part_of_a_stop_string_waits_for_it() -> None:
    """The first token's text arrives with the third: it may be the beginning of the phrase."""
    out = Out()
    result = await screened(phrases("block", "bomb"), Run(["", "", "bomb!"]), out, stop=("bombastic",))
    assert (out.ids, out.text) == ([], "")
    assert result.finish_reason is FinishReason.FILTERED


async def test_text_of_a_slow_verdict_is_judged_whole() -> None:
    """While a verdict is awaited, more text arrives than the model's context has."""
    gate, out = asyncio.Event(), Out()
    classifiers = ScriptedClassifiers(delay=gate.wait)
    pieces = ["x"] * 4 + ["bad"] + ["y"] * 20

    async def open_later() -> None:
        await asyncio.sleep(0.02)
        gate.set()

    opening = asyncio.ensure_future(open_later())
    pack = classifier(every_tokens=2, context_tokens=3, window_tokens=2)
    result = await screened(pack, Run(pieces), out, classifiers=classifiers)
    await opening
    assert result.finish_reason is FinishReason.FILTERED
    assert "bad" not in out.text
    assert any("bad" in text for text in classifiers.judged)


@pytest.mark.parametrize(
    ("fail", "reason", "text"),
    [
        ("closed", FinishReason.FILTERED, ""),
        ("open", FinishReason.STOP, "abcdef"),
        ("hold", FinishReason.FILTERED, ""),
    ],
)
async def test_without_verdicts_the_policy_decides(fail: str, reason: FinishReason, text: str) -> None:
    metrics, out = Metrics(), Out()
    classifiers = ScriptedClassifiers(error=Unavailable("gone"))
    result = await screened(
        classifier(fail=fail, hold_s=3.0),
        Run(list("abcdef")),
        out,
        classifiers=classifiers,
        metrics=metrics,
    )
    assert (result.finish_reason, out.text) == (reason, text)
    missed = counted(metrics, "fairway_gateway_safety_verdicts_missed_total", model="guard")
    assert missed >= 1
    assert (len(classifiers.asked) > 2) == (fail == "hold") or fail == "open"


async def test_a_rule_that_holds_waits_for_a_classifier_that_returns() -> None:
    out = Out()
    classifiers = ScriptedClassifiers(error=Unavailable("gone"))
    loop = asyncio.get_running_loop()
    loop.call_later(0.2, setattr, classifiers, "error", None)
    pack = classifier(fail="hold", hold_s=5.0)
    result = await screened(pack, Run(list("abcdef")), out, classifiers=classifiers)
    assert (result.finish_reason, out.text) == (FinishReason.STOP, "abcdef")


async def test_a_verdict_that_is_late_counts_as_missed() -> None:
    out = Out()
    classifiers = ScriptedClassifiers(delay=asyncio.Event().wait)
    result = await screened(classifier(hold_s=0.0), Run(list("abc")), out, classifiers=classifiers)
    assert (result.finish_reason, out.text) == (FinishReason.FILTERED, "")


async def test_a_crash_of_a_verdict_lets_nothing_pass() -> None:
    out = Out()
    classifiers = ScriptedClassifiers(error=ValueError("a bug"))
    result = await screened(classifier(fail="open"), Run(list("abc")), out, classifiers=classifiers)
    assert (result.finish_reason, out.text) == (FinishReason.FILTERED, "")


async def test_finds_that_are_flagged_pass_and_count_once() -> None:
    metrics, out = Metrics(), Out()
    pieces = ["a bo", "mb ", "and a ", "bomb", " ", "."]
    result = await screened(phrases("flag", "bomb"), Run(pieces), out, metrics=metrics)
    assert (result.finish_reason, out.text) == (FinishReason.STOP, "".join(pieces))
    name = "fairway_gateway_safety_interventions_total"
    assert counted(metrics, name, category="found", action="flag", scope="output") == 2


async def test_a_shadow_pack_flags_alone() -> None:
    metrics, out = Metrics(), Out()
    classifiers = ScriptedClassifiers()
    result = await screened(
        {"window_tokens": 0},
        Run(["a ", "bad ", "bomb", "x"]),
        out,
        metrics=metrics,
        classifiers=classifiers,
        shadow=phrases("block", "bomb")
        | classifier(categories={"found": {"action": "block"}, "judged": {"action": "block"}}),
    )
    assert (result.finish_reason, out.text) == (FinishReason.STOP, "a bad bombx")
    await asyncio.sleep(0.02)
    name = "fairway_gateway_safety_interventions_total"
    assert counted(metrics, name, category="found", action="flag") == 1
    assert counted(metrics, name, category="judged", action="flag") >= 1
    assert counted(metrics, name, action="block") == 0


async def test_the_end_of_an_output_completes_a_word() -> None:
    out = Out()
    pack = phrases("block", "cat")
    pack["lists"][0]["whole_words"] = True
    result = await screened(pack, Run(["a ", "cat"]), out)
    assert (result.finish_reason, out.text) == (FinishReason.FILTERED, "a ")


async def test_a_resume_reads_on_after_what_was_released() -> None:
    """No verdict is repeated, and a word that began before is one word."""
    classifiers, out = ScriptedClassifiers(), Out(ids=[0, 1], text="")
    pack = classifier(window_tokens=1) | {
        "lists": [{"category": "judged", "phrases": ["cat"], "whole_words": True}],
    }
    earlier = (Produced((0, 1), 5, "a tom"),)
    result = await screened(
        pack, Run(["cat ", "sat"], offset=2), out, classifiers=classifiers, earlier=earlier
    )
    assert (result.finish_reason, out.text) == (FinishReason.STOP, "cat sat")
    assert all(text.startswith("a tomcat") for text in classifiers.asked)


async def test_redacted_output_is_made_again_and_its_verdicts_are_not() -> None:
    classifiers = ScriptedClassifiers()
    out = Out(ids=[0, REDACTED_ID], text="")
    pack = classifier(window_tokens=1)
    pack["categories"]["found"] = {"action": "redact"}
    pack["lists"] = [{"category": "found", "phrases": ["secret"]}]
    had = "a [redacted]"
    earlier = (Produced((0, REDACTED_ID), len(had), had),)
    run = Run(["a ", "secret", " is ", "out"])
    result = await screened(pack, run, out, classifiers=classifiers, earlier=earlier)
    assert (result.finish_reason, out.text) == (FinishReason.STOP, " is out")
    assert out.ids == [0, REDACTED_ID, 2, 3]
    assert all(len(text) > len("a secret") for text in classifiers.asked), "a verdict was repeated"


async def test_probe_scores_judge_tokens() -> None:
    pack = {
        "categories": {"probed": {"action": "block"}},
        "probe": {"category": "probed", "threshold": 0.5},
        "window_tokens": 0,
    }

    class Probed(Run):
        async def run(self) -> ChoiceResult:
            assert self.screen is not None
            for at, score in enumerate((0.1, 0.2, 0.9, 0.1)):
                self.screen.on_scores(0, at, (score,))
                self.screen.on_tokens(0, at, (at,), "x", NO_LOGPROBS)
            await asyncio.sleep(1.0)
            raise AssertionError("the run was not ended")

    out = Out()
    result = await screened(pack, Probed(()), out)
    assert (out.ids, result.finish_reason) == ([0, 1], FinishReason.FILTERED)
    without, open_out = Out(), Out()
    assert (await screened(pack, Run(["x"]), without)).finish_reason is FinishReason.FILTERED
    assert (without.ids, without.text) == ([], "")
    result = await screened(pack | {"fail": "open"}, Run(["x", "y"]), open_out)
    assert (open_out.text, result.finish_reason) == ("xy", FinishReason.STOP)
