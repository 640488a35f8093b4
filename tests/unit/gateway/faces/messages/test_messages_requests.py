"""Bodies of the Messages API as generations; what is not offered is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fairway.v1 import inference_pb2 as pb
from services.core.errors import (
    BudgetExceeded,
    FairwayError,
    InternalError,
    InvalidInput,
    OverQuota,
    ThreadNotFound,
    Unavailable,
)
from services.gateway.faces.messages.routes import count_request, messages_error, messages_request

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def generation(**fields: Any) -> pb.Generation:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    return messages_request(json.dumps(body).encode()).generations[0]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": "no disk", "is_error": True}, "Error: no disk"),
        ({"content": [{"type": "text", "text": "no disk"}], "is_error": True}, "Error: no disk"),
        ({"is_error": True}, "Error: "),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_the_model_receives_that_a_tool_failed(fields: dict[str, Any], text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", **fields}
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    turns = generation(messages=[{"role": "user", "content": "hi"}, *messages], tools=[TOOL]).chat.messages
    assert (turns[-1].role, turns[-1].content) == ("tool", text)


def test_no_thread_is_held_so_that_clients_send_all_messages() -> None:
    assert generation(thread={"type": "create"}) == generation()
    with pytest.raises(ThreadNotFound) as caught:
        generation(thread={"type": "continue", "previous_message_id": "msg_1"}, messages=[])
    details = json.loads(messages_error(caught.value))["error"]["details"]
    assert details == {"error_code": "thread_not_found", "param": "thread.previous_message_id"}


def test_a_conversation_with_tools_and_thinking() -> None:
    found = generation(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A sum.", "signature": "s"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    turns = [(turn.role, turn.content) for turn in found.chat.messages]
    assert turns == [
        ("system", "Be brief."),
        ("user", "1+1?"),
        ("assistant", "I add."),
        ("tool", "2"),
        ("user", "And?"),
    ]
    assistant, result = found.chat.messages[2:4]
    assert assistant.reasoning_content == "A sum."
    assert [(call.id, call.name, call.arguments) for call in assistant.tool_calls] == [
        ("t1", "add", '{"a": 1}')
    ]
    assert result.tool_call_id == "t1"
    assert [tool.name for tool in found.chat.tools] == ["add"]
    assert (found.tool_choice.mode, found.tool_choice.single) == (pb.TOOL_MODE_REQUIRED, True)
    assert found.parts


def test_options() -> None:
    found = generation(
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        metadata={"user_id": "u"},
        service_tier="standard_only",
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "max"},
    )
    assert (list(found.stop), found.max_output_tokens, found.sampling.top_k) == (["END"], 5, 4)
    assert (found.user, found.session_key) == ("u", "u")
    assert json.loads(found.chat.template_variables) == {
        "enable_thinking": False,
        "reasoning_effort": "xhigh",
    }
    assert json.loads(found.sampling.constraint.json_schema) == {"type": "object"}


def test_counting_takes_what_decides_the_prompt() -> None:
    body = {"model": "m", "system": "S", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    found = count_request(json.dumps(body).encode())
    assert [turn.content for turn in found.chat.messages] == ["S", "hi"]
    assert len(found.chat.tools) == 1


def of(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}, {"role": "user", "content": "x"}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prefill": ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role"),
    "image": (of({"type": "image", "source": {"type": "url"}}), "messages[0].content[0].source"),
    "document": (of({"type": "document"}), "messages[0].content[0].type"),
    "tool use of the user": (of({"type": "tool_use", "id": "1", "name": "n"}), "messages[0].content[0].type"),
    "text before a result": (
        of({"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "1"}),
        "messages[0].content[1].type",
    ),
    "nothing": (of(), "messages[0].content"),
    "no messages": ({"messages": []}, "messages"),
    "server tool": ({"tools": [{"type": "code_execution_20250825", "name": "c"}]}, "tools[0].type"),
    "field of a tool": ({"tools": [{"name": "c", "input_schema": {}, "cost": 1}]}, "tools[0].cost"),
    "edit of the conversation": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": "all"}]}},
        "context_management.edits[0]",
    ),
    "container": ({"container": "c"}, "container"),
    "mcp": ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
    "temperature": ({"temperature": 1.5}, "temperature"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "typo": ({"stop": "x"}, "stop"),
    "tool choice without a name": ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_offered_is_refused_by_name(case: str) -> None:
    fields, name = REFUSED[case]
    with pytest.raises(FairwayError) as caught:
        generation(**fields)
    assert caught.value.metadata["field"] == name


def test_errors_are_in_anthropics_shape() -> None:
    kinds = {
        "rate_limit_error": OverQuota("slow down"),
        "billing_error": BudgetExceeded("spent"),
        "overloaded_error": Unavailable("full"),
        "api_error": InternalError("a secret", incident="inc_1"),
    }
    for kind, error in kinds.items():
        body = json.loads(messages_error(error))
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert "secret" not in body["error"]["message"]
    body = json.loads(messages_error(InvalidInput("max_output_tokens is 0", field="max_output_tokens")))
    assert body["error"]["message"] == "max_tokens is 0"
    assert body["error"]["details"]["param"] == "max_tokens"
