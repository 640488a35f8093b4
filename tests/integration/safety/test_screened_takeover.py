"""Another gateway goes on with a screened stream: its text is the same, and each span is judged once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.safety import REDACTED_ID
from tests.integration.test_idempotency_takeover import stop_flushing
from tests.support.keyed_gateways import Answer, Fleet, gateways
from tests.support.safety import classifier, pack_of, phrases
from tests.support.waiting import until

WORDS = [f"w{at} " for at in range(40)]
TOKENS = 30


def fleet_of(words: list[str], pack: dict[str, Any]) -> Fleet:
    fleet = Fleet()
    fleet.text_of = lambda position, _: words[position]
    fleet.packs.pack = pack_of(**pack)
    fleet.hold_at = 16
    return fleet


async def moved(redis_url: str, fleet: Fleet) -> tuple[Answer, Answer, list[str]]:
    """Return both clients' answers of a stream whose gateway is frozen, and what was judged after that."""
    async with gateways(redis_url, fleet, 2) as (left, right):
        first = asyncio.create_task(left.ask("k", max_output_tokens=TOKENS, logprobs=0))
        await until(lambda: fleet.engine_tokens == 16)
        await asyncio.sleep(0.1)
        await stop_flushing(left)
        before = len(fleet.classifiers.judged)
        second = asyncio.create_task(right.ask("k", max_output_tokens=TOKENS, logprobs=0))
        await until(lambda: right.workers.started)
        started = right.workers.started[0].spec
        fleet.hold.set()
        answers = await asyncio.gather(first, second)
        assert len(started.produced_ids) < 16, "what was held is made again"
        return *answers, fleet.classifiers.judged[before:]


async def test_the_text_is_identical_and_no_verdict_is_repeated(redis_url: str) -> None:
    fleet = fleet_of(WORDS, classifier(every_tokens=4, window_tokens=4))
    left, right, judged = await moved(redis_url, fleet)
    assert right.finished is not None, right.error
    assert (left.ids, left.text, left.logprobs) == (right.ids, right.text, right.logprobs)
    assert right.text[0] == "".join(WORDS[:TOKENS])
    released = "".join(WORDS[:4])
    assert judged
    assert all(len(text) > len(released) for text in judged), "what was released is judged again"


async def test_a_phrase_over_the_takeover_is_found(redis_url: str) -> None:
    """Its first half was held when the gateway froze: it is made and read again."""
    words = [*WORDS[:15], "bo", "mb ", *WORDS[17:]]
    left, right, _ = await moved(redis_url, fleet_of(words, phrases("block", "bomb")))
    assert right.finished is not None, right.error
    assert right.text[0] == left.text[0] == "".join(words[:15])
    assert right.finished.choices[0].finish_reason.value == "filtered"


@pytest.mark.parametrize("judges", [False, True])
async def test_redacted_output_is_the_same_after_a_takeover(redis_url: str, judges: bool) -> None:
    words = [*WORDS[:3], "sec", "ret ", *WORDS[5:]]
    pack = classifier(window_tokens=2) if judges else phrases("redact", "secret")
    pack["categories"]["found"] = {"action": "redact"}
    pack["lists"] = [{"category": "found", "phrases": ["secret"]}]
    fleet = fleet_of(words, pack)
    with capture_logs() as logs:
        left, right, judged = await moved(redis_url, fleet)
    assert right.finished is not None, right.error
    assert [one["position"] for one in logs if one["event"] == "safety.intervened"] == [9], "it is found once"
    expected = "".join([*WORDS[:3], "[redacted] ", *WORDS[5:TOKENS]])
    assert right.text[0] == left.text[0] == expected
    assert right.ids == left.ids
    assert right.ids[0][3:5] == [REDACTED_ID, REDACTED_ID]
    assert all(len(text) > len("".join(words[:5])) for text in judged)
