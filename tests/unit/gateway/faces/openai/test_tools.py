"""Tools in the OpenAI dialect: read from requests, and calls written in answers and frames."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fairway.formats.answers import (
    AssistantAnswer,
    CallDelta,
    ContentText,
    OutputPart,
    ReasoningText,
    ToolCall,
)
from fairway.v1 import inference_pb2 as pb
from services.core.errors import FairwayError, InvalidInput, UnsupportedFeature
from services.core.generation import FinishReason, StageClock, Usage
from services.gateway.events import Accepted, ChoiceResult, Finished, Tokens
from services.gateway.faces.openai.answers import AnswerHead, Frames
from services.gateway.faces.openai.requests import ApiRequest, chat_request
from services.gateway.faces.openai.tokens import tokenize_request
from services.gateway.requests.streaming import Completion
from tests.unit.gateway.faces.openai.test_answers import answer_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
FIND = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}


def chat(**fields: Any) -> ApiRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_request(json.dumps(body).encode())


def choice_of(**fields: Any) -> tuple[int, list[str], bool]:
    choice = chat(tools=[FIND, NOW], **fields).generations[0].tool_choice
    return choice.mode, list(choice.names), choice.single


def test_tools_arrive_with_their_schema_in_order() -> None:
    generation = chat(tools=[FIND, NOW]).generations[0]
    found = [(tool.name, tool.description, tool.parameters, tool.strict) for tool in generation.chat.tools]
    assert found == [("find", "Finds.", json.dumps(SCHEMA), False), ("now", "", "", True)]
    assert not generation.HasField("tool_choice")
    assert generation.parts
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [FIND]}
    assert tokenize_request(json.dumps(body).encode()).chat.tools[0].name == "find"


def test_every_choice_of_tools() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    assert choice_of(tool_choice="auto") == (pb.TOOL_MODE_AUTO, [], False)
    assert choice_of(tool_choice="required", parallel_tool_calls=False) == (pb.TOOL_MODE_REQUIRED, [], True)
    assert choice_of(tool_choice={"type": "function", "function": {"name": "find"}}) == (
        pb.TOOL_MODE_REQUIRED,
        ["find"],
        True,
    )
    assert choice_of(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}) == (
        pb.TOOL_MODE_AUTO,
        ["now"],
        False,
    )
    none = chat(tools=[FIND], tool_choice="none").generations[0]
    assert not none.chat.tools
    assert none == chat().generations[0] == chat(tools=[], parallel_tool_calls=False).generations[0]


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"tool_choice": "required"}, InvalidInput, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function"}}, UnsupportedFeature, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, UnsupportedFeature, "tools[0].type"),
        ({"tools": [FIND, {"type": "function"}]}, InvalidInput, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {}}]}, InvalidInput, "tools[0].function.name"),
        ({"tools": [FIND], "tool_choice": "any"}, InvalidInput, "tool_choice"),
        ({"tools": [FIND], "tool_choice": {"type": "custom"}}, UnsupportedFeature, "tool_choice"),
        ({"tools": [NOW] * 129}, InvalidInput, "tools"),
        ({"tools": [FIND | {"x": 1}]}, InvalidInput, "tools[0].x"),
        ({"tools": {"a": 1}}, InvalidInput, "tools"),
    ],
)
def test_what_cannot_be_served_names_its_field(
    fields: dict[str, Any], kind: type[FairwayError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        chat(**fields)
    assert caught.value.metadata["field"] == field


HEAD = AnswerHead("r", 1, "m", "sha256:1")
REQUEST = ApiRequest("chat", (pb.Generation(),), 1, True, False, False)


def message_of(answer: AssistantAnswer) -> Any:
    accepted = Accepted("r", "m", "sha256:1", 1, 1, 1)
    result = ChoiceResult(0, FinishReason.TOOL_CALLS if answer.calls else FinishReason.STOP, "", 3)
    finished = Finished((result,), Usage(1, 3), StageClock(0))
    completion = Completion(accepted, ["raw"], [[1]], [[]], finished, [answer])
    return json.loads(answer_of(REQUEST, [completion], 1, "r"))["choices"][0]


def test_a_whole_answer_has_calls_and_reasoning() -> None:
    found = message_of(AssistantAnswer("", "hm", (ToolCall("c", "f", "{}"),)))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reasoning = {"reasoning_content": "hm", "reasoning": "hm"}
    assert found["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [call],
        **reasoning,
    }
    assert found["finish_reason"] == "tool_calls"
    assert message_of(AssistantAnswer("x"))["message"] == {
        "role": "assistant",
        "content": "x",
        "refusal": None,
    }


def deltas(*events: list[OutputPart]) -> list[dict[str, Any]]:
    frames = Frames(REQUEST, HEAD)
    frames.start(0, 1, split=True)
    found = [frames.tokens(0, Tokens(0, 0, [1], "raw", parts=parts)) for parts in events[:-1]]
    found.append(frames.finish(0, "tool_calls", events[-1]))
    return [json.loads(frame.removeprefix(b"data: "))["choices"][0]["delta"] for frame in found if frame]


def test_an_event_is_one_frame_with_all_of_its_parts() -> None:
    assert deltas(
        [],
        [ReasoningText("hm"), ContentText("a"), CallDelta(0, "c", "f", '{"x'), ContentText("b")],
        [CallDelta(0, arguments='":1}'), CallDelta(1, "d", "g"), CallDelta(1, arguments="{")],
        [CallDelta(1, arguments="}"), ContentText("!")],
    ) == [
        {
            "content": "ab",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "tool_calls": [
                {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x'}}
            ],
        },
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '":1}'}},
                {"index": 1, "id": "d", "type": "function", "function": {"name": "g", "arguments": "{"}},
            ]
        },
        {"content": "!", "tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
    ]


def test_text_that_was_not_split_is_content() -> None:
    frames = Frames(REQUEST, HEAD)
    frames.start(0, 1, split=False)
    frame = json.loads(frames.tokens(0, Tokens(0, 0, [1], "raw")).removeprefix(b"data: "))
    assert frame["choices"][0]["delta"] == {"content": "raw"}
