"""Bodies of the Responses API as generations; what is not offered is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from services.core.errors import FairwayError
from services.gateway.faces.openai.errors import error_body
from services.gateway.faces.responses.conversations import stored_items
from services.gateway.faces.responses.requests import ResponsesRequest, responses_body, responses_request
from services.gateway.faces.responses.routes import responses_error

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}


def request(earlier: bytes = b"[]", **fields: Any) -> ResponsesRequest:
    body = {"model": "m", "input": "hi", **fields}
    return responses_request(responses_body(json.dumps(body).encode()), earlier)


def turns(found: ResponsesRequest) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in found.generation.chat.messages]


def test_texts_and_items_become_turns() -> None:
    found = request(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "one"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
            CALL,
            {**CALL, "call_id": "c2"},
            OUTPUT,
            {"role": "developer", "content": "now"},
        ],
    )
    assert turns(found) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("user", "two"),
        ("assistant", "so"),
        ("tool", "2"),
        ("developer", "now"),
    ]
    assistant, tool = found.generation.chat.messages[3:5]
    assert assistant.reasoning_content == "hm"
    assert [(call.id, call.name, call.arguments) for call in assistant.tool_calls] == [
        ("c1", "add", '{"a":1}'),
        ("c2", "add", '{"a":1}'),
    ]
    assert tool.tool_call_id == "c1"
    assert found.generation.parts


def test_a_conversation_goes_on_without_earlier_instructions() -> None:
    first = request(instructions="Be brief.", input=[{"role": "user", "content": "one"}])
    earlier = stored_items("req_1", first.items)
    text = {"type": "output_text", "text": "1", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    output = json.dumps([message, {**CALL, "id": "fc_1", "status": "completed"}]).encode()
    found = request(b"[%b,%b]" % (earlier, output), input=[OUTPUT])
    assert turns(found) == [("user", "one"), ("assistant", "1"), ("tool", "2")]


def test_options_are_those_of_chat_completions() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = request(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        user="u",
        service_tier="flex",
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        metadata={"a": "b"},
        truncation="disabled",
        include=["reasoning.encrypted_content"],
    ).generation
    assert (found.max_output_tokens, found.sampling.temperature, found.sampling.seed) == (7, 0.5, 3)
    assert (found.user, found.priority) == ("u", common_pb2.PRIORITY_BATCH)
    assert json.loads(found.sampling.constraint.json_schema) == schema
    assert json.loads(found.chat.template_variables) == {"reasoning_effort": "low"}


def test_tools_and_their_choice() -> None:
    found = request(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).generation
    assert [(tool.name, tool.strict) for tool in found.chat.tools] == [("add", False)]
    assert (found.tool_choice.mode, found.tool_choice.single) == (pb.TOOL_MODE_REQUIRED, True)
    named = request(tools=[TOOL], tool_choice={"type": "function", "name": "add"}).generation
    assert (named.tool_choice.mode, list(named.tool_choice.names)) == (pb.TOOL_MODE_REQUIRED, ["add"])
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    allowed = request(tools=[TOOL], tool_choice=some).generation
    assert (allowed.tool_choice.mode, list(allowed.tool_choice.names)) == (pb.TOOL_MODE_AUTO, ["add"])
    assert not request(tools=[TOOL], tool_choice="none").generation.chat.tools


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs"),
    "server tool": ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    "nested namespace": (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b"}]}]},
        "tools[0].tools[0].type",
    ),
    "field of a tool": ({"tools": [{**TOOL, "cost": 1}]}, "tools[0].cost"),
    "search alone": ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    "tool choice": ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    "background without store": ({"background": True, "store": False}, "background"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[0].content[0].type",
    ),
    "reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "role": ({"input": [{"role": "owner", "content": "x"}]}, "input[0].role"),
    "empty": ({"input": []}, "input"),
    "schema": ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "typo": ({"max_tokens": 3}, "max_tokens"),
    "call without a name": ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_offered_is_refused_by_name(case: str) -> None:
    fields, name = REFUSED[case]
    with pytest.raises(FairwayError) as caught:
        request(**fields)
    assert json.loads(responses_error(caught.value))["error"]["param"] == name


def test_the_refusal_of_a_reference_says_what_to_send() -> None:
    with pytest.raises(FairwayError, match="send the item itself, as SDKs do with store: false"):
        request(input=[{"role": "user", "content": "x"}, {"type": "item_reference", "id": "fc_1"}])


def test_fields_of_the_service_have_the_names_of_the_dialect() -> None:
    for field, name in {
        "max_output_tokens": "max_output_tokens",
        "chat.messages[3].content": "input[3].content",
        "chat.tools[0].name": "tools[0].name",
        "sampling.constraint.json_schema": "text.format.json_schema",
        "sampling.temperature": "temperature",
    }.items():
        error = FairwayError(f"{field} is wrong", field=field)
        assert json.loads(responses_error(error))["error"]["param"] == name
    assert (
        json.loads(error_body(FairwayError("x", field="max_output_tokens")))["error"]["param"] == "max_tokens"
    )


def test_stored_items_have_ids_and_parts() -> None:
    items = request(input=[{"role": "user", "content": "x"}, CALL, OUTPUT]).items
    found = json.loads(stored_items("req_1", items))
    assert [item["id"] for item in found] == [f"item_req_1_{number}" for number in range(3)]
    assert found[0]["content"] == [{"type": "input_text", "text": "x"}]
    assert found[2]["output"] == "2"
    assert msgspec.json.encode(found)
