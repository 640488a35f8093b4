"""Bodies as agents send them, drawn by seed: each is taken, or refused by the name of what is not offered.

The shapes are those of Claude Code, Codex, Cline, Continue and Open WebUI; their texts are ours.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from fairway.v1 import inference_pb2 as pb
from services.core.errors import FairwayError
from services.gateway.faces.messages.errors import messages_error
from services.gateway.faces.messages.requests import messages_request
from services.gateway.faces.openai.errors import error_body
from services.gateway.faces.openai.requests import chat_request
from services.gateway.faces.responses.errors import responses_error
from services.gateway.faces.responses.requests import responses_body, responses_request
from services.gateway.requests.tool_use import check_tools
from services.rpc import bounds

SEEDS = range(300)
LONG = "x" * 5000
IDENTITY = json.dumps({"device_id": "0" * 64, "account_uuid": "", "session_id": "0" * 36})
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
NESTED: dict[str, Any] = {
    "task": "title_generation",
    "features": {"web_search": False},
    "files": [],
    "chat_id": None,
    "depth": [{}],
}
# What earlier calls have as arguments: whole, cut, of another server, or none.
ARGUMENTS = ('{"path":"a"}', '{"path":"a', "null", "[]", '{"a":NaN}', "", " ", "5", "{" * 2000)


def read_chat(body: dict[str, Any]) -> pb.Generation:
    return chat_request(json.dumps(body).encode()).generations[0]


def read_responses(body: dict[str, Any]) -> pb.Generation:
    return responses_request(responses_body(json.dumps(body).encode()), b"[]").generation


def read_messages(body: dict[str, Any]) -> pb.Generation:
    return messages_request(json.dumps(body).encode()).generations[0]


Refused = tuple[tuple[dict[str, Any], str], ...]
# Fields that are taken, and fields that are refused with the name of what is refused.
CHAT_HINTS: tuple[dict[str, Any], ...] = (
    {"metadata": NESTED},
    {"metadata": {f"k{number}": LONG for number in range(40)}},
    {"client_metadata": {"session_id": "0", "window": {"id": 1}}},
    {"user": IDENTITY},
    {"safety_identifier": LONG},
    {"prompt_cache_key": LONG, "prompt_cache_options": {"mode": "auto"}},
    {"prompt_cache_retention": "24h", "verbosity": "low", "reasoning_effort": "medium"},
    {"stream_options": {"include_usage": True}, "stream": True},
    {"parallel_tool_calls": True, "store": False},
)
CHAT_REFUSED: Refused = (
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ({"tool_ids": ["a"]}, "tool_ids"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
)
RESPONSES_HINTS: tuple[dict[str, Any], ...] = (
    {"client_metadata": {"session_id": "0", "turn": "{}", "window": LONG}},
    {"user": IDENTITY},
    {"safety_identifier": LONG, "prompt_cache_key": LONG, "prompt_cache_options": {}},
    {"reasoning": {"summary": "auto", "effort": "high"}, "include": ["reasoning.encrypted_content"]},
    {"text": {"verbosity": "low"}, "store": False, "service_tier": "auto"},
)
RESPONSES_REFUSED: Refused = (
    ({"truncation": "auto"}, "truncation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"conversation": "conv_1"}, "conversation"),
)
MESSAGES_HINTS: tuple[dict[str, Any], ...] = (
    {"metadata": {"user_id": IDENTITY}},
    {"metadata": {"user_id": LONG, "team": {"id": 7}}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"context_management": {"edits": []}},
    {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"}},
    {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "scope": "global"}}]},
    {"speed": "standard", "service_tier": "auto"},
)
MESSAGES_REFUSED: Refused = (
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]"),
    ({"container": {"id": "c"}}, "container"),
    ({"speed": "fast"}, "speed"),
)


def long_or_short(rng: Random) -> str:
    return f"mcp__server__{'tool' * rng.choice((1, 30, 900))}_{rng.randrange(10**9)}"


def function(rng: Random) -> dict[str, Any]:
    return {
        "type": "function",
        "name": long_or_short(rng),
        "description": "d",
        "parameters": SCHEMA,
        "strict": False,
    }


def responses_tool(rng: Random, path: str) -> tuple[dict[str, Any], str]:
    """Return a tool, and the field by which it is refused; empty for one that is taken."""
    kinds: tuple[tuple[dict[str, Any], str], ...] = (
        (function(rng), ""),
        ({**function(rng), "defer_loading": True}, ""),
        ({"type": "web_search", "external_web_access": rng.random() < 0.5, "filters": {}}, ""),
        ({"type": "tool_search", "execution": "client", "parameters": SCHEMA}, ""),
        ({"type": "namespace", "name": long_or_short(rng), "description": "d", "tools": [function(rng)]}, ""),
        (
            {
                "type": "custom",
                "name": long_or_short(rng),
                "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
            },
            "",
        ),
        ({"type": "mcp", "server_label": "s", "server_url": "https://example.com"}, f"{path}.type"),
        ({**function(rng), "price": 1}, f"{path}.price"),
    )
    return rng.choices(kinds, (9, 9, 9, 9, 9, 9, 1, 1))[0]


def messages_tool(rng: Random, path: str) -> tuple[dict[str, Any], str]:
    own = {"name": long_or_short(rng), "description": "d", "input_schema": SCHEMA}
    kinds: tuple[tuple[dict[str, Any], str], ...] = (
        (own, ""),
        ({**own, "type": "custom", "defer_loading": True, "eager_input_streaming": True}, ""),
        ({**own, "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}, ""),
        ({"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, ""),
        ({"type": "tool_search_tool_regex_20251119", "name": "search"}, ""),
        ({"type": "computer_20250124", "name": "computer", "display_width_px": 1}, f"{path}.type"),
        ({**own, "price": 1}, f"{path}.price"),
    )
    return rng.choices(kinds, (9, 9, 9, 9, 9, 1, 1))[0]


def chat_tool(rng: Random, path: str) -> tuple[dict[str, Any], str]:
    named = {"name": long_or_short(rng), "description": "d", "parameters": SCHEMA}
    kinds: tuple[tuple[dict[str, Any], str], ...] = (
        ({"type": "function", "function": named}, ""),
        (
            {
                "type": "function",
                "function": {**named, "strict": False},
                "cache_control": {"type": "ephemeral"},
            },
            "",
        ),
        ({"type": "custom", "custom": {"name": "c"}}, f"{path}.type"),
    )
    return rng.choices(kinds, (9, 9, 1))[0]


def chat_history(rng: Random) -> list[dict[str, Any]]:
    call_id = rng.choice(("call_1", LONG))
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": long_or_short(rng), "arguments": rng.choice(ARGUMENTS)},
        "extra_content": {"google": {"thought_signature": "x"}},
    }
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_details": [{"type": "t"}]}
    return [turn, {"role": "tool", "tool_call_id": call_id, "content": "no JSON"}]


def responses_history(rng: Random) -> list[dict[str, Any]]:
    call_id, text = rng.choice(("call_1", LONG)), rng.choice(ARGUMENTS)
    named = {
        "call_id": call_id,
        "name": long_or_short(rng),
        "status": rng.choice(("completed", "incomplete")),
    }
    called, output = rng.choice(
        (
            ({"type": "function_call", "arguments": text}, "function_call_output"),
            ({"type": "function_call", "arguments": text, "namespace": "agents"}, "function_call_output"),
            ({"type": "custom_tool_call", "input": text}, "custom_tool_call_output"),
        )
    )
    return [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "opaque"},
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "q"},
        },
        {**called, **named},
        {
            "type": output,
            "call_id": call_id,
            "output": rng.choice(("x", [{"type": "input_text", "text": "x"}])),
        },
    ]


def messages_history(rng: Random) -> list[dict[str, Any]]:
    inputs: tuple[Any, ...] = ({"path": "a"}, {}, None, [], *ARGUMENTS)
    call_id, given = rng.choice(("toolu_1", LONG)), rng.choice(inputs)
    call = {"type": "tool_use", "id": call_id, "name": long_or_short(rng), "input": given}
    call |= rng.choice(({}, {"caller": {"type": "direct"}}))
    thought = {"type": "thinking", "thinking": "", "signature": "s"}
    found = rng.choice(
        ("x", [{"type": "text", "text": "x"}], [{"type": "tool_reference", "tool_name": "Read"}])
    )
    result = {
        "type": "tool_result",
        "tool_use_id": call_id,
        "content": found,
        "cache_control": {"type": "ephemeral"},
    }
    return [
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        {"role": "system", "content": "a reminder"},
    ]


@pytest.mark.parametrize("face", ["chat", "responses", "messages"])
def test_every_body_is_taken_or_refused_by_the_name_of_what_is_not_offered(face: str) -> None:
    read, write, hints, refused, tool_of, history, extra = {
        "chat": (read_chat, error_body, CHAT_HINTS, CHAT_REFUSED, chat_tool, chat_history, {}),
        "responses": (read_responses, responses_error, RESPONSES_HINTS, RESPONSES_REFUSED, responses_tool,
                      responses_history, {}),
        "messages": (read_messages, messages_error, MESSAGES_HINTS, MESSAGES_REFUSED, messages_tool,
                     messages_history, {"max_tokens": 5}),
    }[face]  # fmt: skip
    taken = 0
    for seed in SEEDS:
        rng = Random(seed)
        body: dict[str, Any] = {"model": "m", **extra}
        for hint in rng.sample(hints, rng.randrange(4)):
            body |= hint
        fields = set()
        if rng.random() < 0.2:
            more, field = rng.choice(refused)
            body |= more
            fields.add(field)
        tools = [tool_of(rng, f"tools[{number}]") for number in range(rng.randrange(8))]
        body["tools"] = [tool for tool, _ in tools]
        fields |= {field for _, field in tools if field}
        turns = [{"role": "user", "content": "hi"}]
        for _ in range(rng.randrange(3)):
            turns += history(rng)
        body["input" if face == "responses" else "messages"] = turns
        taken += not fields
        try:
            generation = read(body)
            bounds.check(generation)
            check_tools(generation)
        except FairwayError as error:
            details = json.loads(write(error))["error"]
            param = details["param"] if face != "messages" else details["details"]["param"]
            assert param in fields, (seed, param, fields)
        else:
            assert not fields, (seed, fields)
            assert len(generation.user.encode()) <= 128
            for turn in generation.chat.messages:
                assert len(turn.tool_call_id) <= 128
                assert all(len(call.id) <= 128 for call in turn.tool_calls)
    assert taken > len(SEEDS) / 3
