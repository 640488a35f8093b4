"""Judges at the door: a gateway in front of a real worker, whose guard models have random weights.

A guard that is held to its expression answers something; which text it finds unsafe, a test finds out first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import pytest
import pytest_asyncio

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from services.core.records import DEPLOYMENTS, Deployment, Meta, Tenant
from services.rpc.status import from_rpc_error
from tests.support.judged_gateway import TINY, JudgedGateway, judged_gateway, write_guard
from tests.support.rows_gateway import AUTH, digest_of
from tests.support.waiting import until

TEXTS: Final = ("hello there", "you are a fool", "the cat sat", "tell me more about it", "x", "kill it now")
GUIDELINES: Final = {"rude": "No insults."}
SHIELD: Final = {"model": "shield", "template": "shieldgemma", "labels": {"rude": "bad"}}
SHIELD_RULE: Final = SHIELD | {"guidelines": GUIDELINES, "every_tokens": 8}
LLAMA: Final = {
    "model": "llama",
    "template": "llama-guard",
    "labels": {f"S{number}": "bad" for number in range(1, 15)},
    "every_tokens": 8,
}
QWEN: Final = {"model": "qwen", "template": "qwen3guard", "labels": {"PII": "bad"}, "every_tokens": 8}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JudgedGateway]:
    folder = tmp_path_factory.mktemp("judged")
    models = {
        "chat": TINY,
        "shield": write_guard(folder / "shield", "Llama", seed=5),
        "llama": write_guard(folder / "llama", "Llama", seed=5),
        "qwen": write_guard(folder / "qwen", "Qwen3", seed=5),
    }
    async with judged_gateway(folder, models) as found:
        yield found


def obey(judged: JudgedGateway, *rules: Any, action: str = "block", **fields: Any) -> None:
    """Let the tenant obey a pack of these judges."""
    name = f"pack{len(judged.gateway.by_digest)}"
    categories = {"bad": {"action": action}}
    judged.deploy_pack(name, **{"categories": categories, "judges": rules, "window_tokens": 8} | fields)
    judged.gateway.put_tenant(Tenant(Meta("acme"), safety_pack=name))


async def scores(judged: JudgedGateway, *texts: str, outputs: bool = False) -> list[float]:
    request = pb.ModerateRequest(inputs=texts, outputs=outputs)
    answer = await judged.sockets.stub.Moderate(request, metadata=AUTH, timeout=60)
    assert not answer.skipped
    return [one.categories[0].score for one in answer.results]


async def complete(judged: JudgedGateway, text: str, tokens: int = 16) -> pb.CompleteResponse:
    generation = pb.Generation(model="chat", max_output_tokens=tokens, ignore_eos=True)
    generation.chat.messages.add(role="user", content=text)
    generation.sampling.temperature = 0.0
    request = pb.CompleteRequest(generation=generation)
    return await judged.sockets.stub.Complete(request, metadata=AUTH, timeout=60)


async def refused(judged: JudgedGateway, text: str) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await complete(judged, text)
    return from_rpc_error(error.value)


def reason_of(answer: pb.CompleteResponse) -> Any:
    return answer.finished.choices[0].finish_reason


@pytest.mark.parametrize("rule", [SHIELD_RULE, LLAMA], ids=["shieldgemma", "llama-guard"])
async def test_inputs_are_blocked_or_pass_by_their_verdicts(judged: JudgedGateway, rule: Any) -> None:
    obey(judged, rule | {"scopes": ["input"]})
    found = await scores(judged, *TEXTS)
    worst, best = max(found), min(found)
    assert best < worst, "the guard finds no text worse than another"
    obey(judged, rule | {"scopes": ["input"], "threshold": worst})
    error = await refused(judged, TEXTS[found.index(worst)])
    assert (error.reason, error.metadata["category"]) == ("CONTENT_FILTERED", "bad")
    answer = await complete(judged, TEXTS[found.index(best)])
    assert (reason_of(answer), answer.finished.usage.output_tokens) == (common_pb2.FINISH_REASON_LENGTH, 16)


async def test_outputs_are_judged_as_answers_before_they_leave(judged: JudgedGateway) -> None:
    outputs = {"scopes": ["output"]}
    obey(judged, SHIELD_RULE | outputs | {"threshold": 1.0})
    whole = await complete(judged, "hello there", 40)
    assert len(whole.choices[0].text) > 8
    asked = [one for one in judged.placement.asked if one.model == "shield"][-1]
    assert asked.tenant_id == "acme"
    assert asked.max_output_tokens == 1
    obey(judged, SHIELD_RULE | outputs | {"threshold": 0.0})
    ended = await complete(judged, "hello there", 40)
    assert (reason_of(ended), ended.choices[0].text) == (common_pb2.FINISH_REASON_FILTERED, "")
    obey(judged, SHIELD_RULE | outputs | {"threshold": 0.0}, action="flag")
    flagged = await complete(judged, "hello there", 40)
    assert flagged.choices[0].text == whole.choices[0].text


async def test_a_question_changes_the_verdict_on_its_answer(judged: JudgedGateway) -> None:
    """The guard reads the user's turn before the answer: the prompts of two questions differ by it alone."""
    obey(judged, SHIELD_RULE | {"scopes": ["output"], "threshold": 1.0})
    lengths = []
    for question in ("x", "x " * 40):
        await complete(judged, question, 8)
        lengths.append([one for one in judged.placement.asked if one.model == "shield"][-1].prompt_tokens)
    assert lengths[1] > lengths[0] + 30


async def test_verdicts_are_charged_once_each(judged: JudgedGateway) -> None:
    obey(judged, LLAMA, action="flag")
    before = len(judged.gateway.reported)
    await complete(judged, "hello there", 24)
    await until(lambda: any(one.model == "chat" for one in judged.gateway.reported[before:]))
    events = [one for one in judged.gateway.reported[before:] if one.model == "llama"]
    asked = [
        one for one in judged.placement.asked if one.request_id in {event.request_id for event in events}
    ]
    assert len(events) == len({one.request_id for one in events}) == len(asked) >= 3, (
        "no report of a worker alone"
    )
    assert all(one.usage.output_tokens and one.list_micros and one.tenant == "acme" for one in events)
    assert [one.prompt_tokens for one in asked] == [one.usage.prompt_tokens for one in events]


@pytest.mark.parametrize(
    ("fields", "blocked"),
    [({"fail": "closed"}, True), ({"fail": "open"}, False), ({"fail": "hold", "hold_s": 1.0}, True)],
)
async def test_what_cannot_be_read_is_no_verdict(
    judged: JudgedGateway, fields: dict[str, Any], blocked: bool
) -> None:
    """A guard whose template takes no guideline, and one whose answer is cut."""
    llama_as_shield = SHIELD_RULE | {"model": "chat"}
    for rule, text in ((llama_as_shield, "hello"), (QWEN, await unread(judged))):
        obey(judged, rule | {"scopes": ["input"]}, **fields)
        if blocked:
            error = await refused(judged, text)
            assert error.metadata["category"] == "unavailable"
        else:
            assert reason_of(await complete(judged, text)) == common_pb2.FINISH_REASON_LENGTH


async def problem(judged: JudgedGateway, text: str) -> str:
    try:
        await scores(judged, text)
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    return ""


async def unread(judged: JudgedGateway) -> str:
    """Return a text to which the guard does not come to an end."""
    obey(judged, QWEN | {"scopes": ["input"]})
    texts: tuple[str, ...] = (*TEXTS, *"abcdefgh")
    for text in texts:
        if "qwen: an answer was cut after 128 tokens" in await problem(judged, text):
            return text
    raise AssertionError("every answer has an end")


def serve(judged: JudgedGateway, name: str, replicas: int) -> None:
    deployment = Deployment(Meta(name), name, "v1", digest_of(name), replicas)
    judged.gateway.deployments.put(DEPLOYMENTS + name, deployment, 42)


@pytest.mark.parametrize("fail", ["closed", "open", "hold"])
async def test_without_its_guard_the_pack_decides(judged: JudgedGateway, fail: str) -> None:
    obey(judged, SHIELD_RULE | {"threshold": 1.0}, fail=fail, hold_s=20.0)
    serve(judged, "shield", 0)
    try:
        asking = asyncio.ensure_future(complete(judged, "hello there"))
        if fail == "hold":
            await asyncio.sleep(0.5)
            assert not asking.done()
            serve(judged, "shield", 1)
        if fail == "closed":
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asking
            assert from_rpc_error(error.value).metadata["category"] == "unavailable"
        else:
            assert reason_of(await asking) == common_pb2.FINISH_REASON_LENGTH
    finally:
        serve(judged, "shield", 1)


async def test_an_input_that_ended_the_guards_engine_is_not_asked_again(judged: JudgedGateway) -> None:
    obey(judged, SHIELD_RULE | {"scopes": ["input"]})
    await scores(judged, "an engine's end")
    asked, poisons = judged.workers.started[-1].generation, judged.gateway.ports.poisons
    assert asked.safety is None, "a pack would judge its own judge"
    assert asked.sampling.temperature == 0.0
    assert asked.sampling.constraint is not None
    assert poisons is not None
    await poisons.condemn(asked, 2)
    before = len(judged.placement.asked)
    assert "it is refused on this version" in await problem(judged, "an engine's end")
    assert len(judged.placement.asked) == before


async def test_a_text_that_is_too_long_is_judged_in_parts(judged: JudgedGateway) -> None:
    obey(judged, SHIELD_RULE | {"scopes": ["input"]})
    before = len(judged.placement.asked)
    (found,) = await scores(judged, "cat " * 600)
    asked = judged.placement.asked[before:]
    assert len(asked) >= 2
    assert sum(one.prompt_tokens for one in asked) >= 600
    assert 0.0 < found < 1.0
