"""Bodies as agents send them, drawn by seed: each is taken, or refused by the name of what is not offered.

The shapes are those of Claude Code, Codex, Cline, Continue, Open WebUI, and of the SDKs of OpenAI, Anthropic,
Vercel, LangChain and LiteLLM; their texts are ours.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest

from fairway.v1 import inference_pb2 as pb
from services.core.errors import FairwayError, InvalidInput, UnsupportedFeature
from services.gateway.faces.messages.routes import messages_error, messages_request
from services.gateway.faces.openai.errors import error_body
from services.gateway.faces.openai.requests import chat_request
from services.gateway.faces.responses.conversations import stored_items
from services.gateway.faces.responses.requests import responses_body, responses_request
from services.gateway.faces.responses.routes import responses_error
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

# Blocks of tools that another server ran, with the text that each adds to its turn.
SERVED_BLOCKS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}, ""),
    ({"type": "mcp_tool_use", "id": "s", "name": "n", "server_name": "s", "input": {}}, ""),
    (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [
                {"type": "web_search_result", "url": "u1", "title": "t1", "encrypted_content": "no"},
                {"type": "web_search_result", "url": "u2", "title": "t2", "page_age": None},
            ],
            "caller": {"type": "code_execution_20260120", "tool_id": "s"},
        },
        "t1\nu1\nt2\nu2\n",
    ),
    (
        {
            "type": "web_search_tool_result",
            "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
        },
        "unavailable\n",
    ),
    (
        {
            "type": "web_fetch_tool_result",
            "content": {
                "type": "web_fetch_result",
                "url": "u",
                "content": {"type": "document", "source": {"type": "text", "data": "page"}, "title": "t"},
            },
        },
        "u\nt\npage\n",
    ),
    (
        {
            "type": "bash_code_execution_tool_result",
            "content": {
                "type": "bash_code_execution_result",
                "stdout": "out",
                "stderr": "",
                "return_code": 0,
                "content": [{"type": "bash_code_execution_output", "file_id": "f"}],
            },
        },
        "out\n",
    ),
    ({"type": "code_execution_tool_result", "content": {"stdout": "out", "stderr": "err"}}, "out\nerr\n"),
    (
        {
            "type": "text_editor_code_execution_tool_result",
            "content": {"lines": ["-a", "+b"], "new_start": 1},
        },
        "-a\n+b\n",
    ),
    (
        {"type": "mcp_tool_result", "is_error": False, "content": [{"type": "text", "text": "found"}]},
        "found\n",
    ),
    ({"type": "text", "text": "so", "citations": [{"type": "web_search_result_location"}]}, "so"),
)
SERVED_ITEMS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "file_search_call", "queries": ["q"], "results": [{"filename": "f", "text": "a"}]}, "f\na\n"),
    ({"type": "file_search_call", "queries": ["q"], "results": None}, ""),
    ({"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "n", "input_schema": {}}]}, ""),
    ({"type": "mcp_call", "server_label": "s", "name": "n", "arguments": "{}", "output": "found"}, "found\n"),
    ({"type": "mcp_call", "output": None, "error": {"type": "http", "message": "gone"}}, "gone\n"),
    (
        {"type": "code_interpreter_call", "code": "1", "outputs": [{"type": "logs", "logs": "1"}]},
        "1\n",
    ),
    ({"type": "image_generation_call", "result": "AAAA"}, ""),
    ({"type": "tool_search_call", "execution": "client", "arguments": {"query": "q"}}, ""),
    ({"type": "tool_search_output", "execution": "client", "tools": [{"type": "function"}]}, ""),
)
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
    {"logprobs": None, "n": None, "audio": None, "function_call": None, "logit_bias": {}, "stop": None},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
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
    {"metadata": NESTED},
    {"metadata": {f"k{number}": LONG for number in range(40)}},
    {"truncation": "disabled", "prompt_cache_retention": "24h", "include": ["file_search_call.results"]},
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
    {"speed": "standard", "service_tier": "auto", "mcp_servers": []},
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
        ({**own, "type": "custom", "defer_loading": True, "input_examples": []}, ""),
        ({**own, "type": "custom", "defer_loading": True, "eager_input_streaming": True}, ""),
        ({**own, "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}, ""),
        ({"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, ""),
        ({"type": "tool_search_tool_regex_20251119", "name": "search"}, ""),
        ({"type": "computer_20250124", "name": "computer", "display_width_px": 1}, f"{path}.type"),
        ({**own, "price": 1}, f"{path}.price"),
    )
    return rng.choices(kinds, (9, 9, 9, 9, 9, 9, 1, 1))[0]


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
        ({"type": "function", "function": {**named, "strict": None}, "defer_loading": True}, ""),
        ({"type": "function", "function": {**named, "defer_loading": True}}, ""),
        ({"type": "custom", "custom": {"name": "c"}}, f"{path}.type"),
    )
    return rng.choices(kinds, (9, 9, 9, 9, 1))[0]


def chat_history(rng: Random) -> list[dict[str, Any]]:
    call_id = rng.choice(("call_1", LONG))
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": long_or_short(rng), "arguments": rng.choice(ARGUMENTS)},
        "extra_content": {"google": {"thought_signature": "x"}},
    }
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_details": [{"type": "t"}]}
    said: dict[str, Any] = rng.choice(
        (
            {"content": "x", "refusal": None, "annotations": [], "audio": None, "function_call": None},
            {"content": "x", "annotations": [{"type": "url_citation", "url_citation": {"url": "u"}}]},
            {"content": None, "refusal": "no", "tool_calls": None},
            {"content": [{"type": "refusal", "refusal": "no"}], "thinking_blocks": [{"type": "thinking"}]},
            {"content": "", "name": "Ada", "extra_content": {"google": {"thought_signature": "x"}}},
            {"content": []},
        )
    )
    answer = {"role": "tool", "tool_call_id": call_id, "content": "no JSON", "name": "f"}
    return [turn, answer, {"role": "assistant", **said}, {"role": "user", "content": "go on"}]


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
            (
                {"type": "custom_tool_call", "input": text, "namespace": "a", "created_by": "x"},
                "custom_tool_call_output",
            ),
            (
                {
                    "type": "function_call",
                    "arguments": text,
                    "parsed_arguments": {"a": 1},
                    "caller": {"type": "x"},
                },
                "function_call_output",
            ),
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
        rng.choice(SERVED_ITEMS)[0],
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [
                {
                    "type": "output_text",
                    "text": "x",
                    "annotations": [{"type": "url_citation", "url": "u"}],
                    "logprobs": [{"token": "x", "logprob": 0}],
                    "parsed": None,
                }
            ],
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
    programmed = {"type": "code_execution_20250825", "tool_id": "s"}
    call |= rng.choice(({}, {"caller": {"type": "direct"}}, {"caller": programmed}))
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
        {"role": "assistant", "content": rng.choice(([], [{"type": "redacted_thinking", "data": "x"}]))},
        {
            "role": "user",
            "content": [{"type": "text", "text": "x"}, {"type": "container_upload", "file_id": "f"}],
        },
        {
            "role": "assistant",
            "content": [thought, *(block for block, _ in rng.sample(SERVED_BLOCKS, 2)), call],
        },
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


def test_a_refusal_of_another_server_is_the_text_of_its_turn() -> None:
    user = {"role": "user", "content": "hi"}
    for said in (
        {"content": None, "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": "no", "refusal": None},
    ):
        found = read_chat({"model": "m", "messages": [user, {"role": "assistant", **said}, user]})
        assert found.chat.messages[1].content == "no"


@pytest.mark.parametrize(("block", "text"), SERVED_BLOCKS)
def test_the_text_that_another_servers_tool_found_stays_in_a_message(
    block: dict[str, Any], text: str
) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": "x"},
    ]
    found = read_messages({"model": "m", "max_tokens": 5, "messages": turns}).chat.messages
    assert [(turn.role, turn.content) for turn in found[1:]] == [("assistant", text), ("user", "x")]


@pytest.mark.parametrize(("item", "text"), SERVED_ITEMS)
def test_the_text_that_another_servers_tool_found_stays_in_a_response(
    item: dict[str, Any], text: str
) -> None:
    body = {
        "model": "m",
        "input": [{"role": "user", "content": "hi"}, {"id": "i", "status": "completed", **item}],
    }
    request = responses_request(responses_body(json.dumps(body).encode()), b"[]")
    found = [(turn.role, turn.content) for turn in request.generation.chat.messages]
    assert found == [("user", "hi"), *([("assistant", text)] if text else [])]
    # A response that continues this one has the same turns.
    kept = stored_items("req_1", request.items)
    body = {"model": "m", "input": "go on"}
    again = responses_request(responses_body(json.dumps(body).encode()), b"[" + kept + b"]")
    assert [(turn.role, turn.content) for turn in again.generation.chat.messages] == [
        *found,
        ("user", "go on"),
    ]


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
HISTORY_REFUSED: dict[str, tuple[str, Any, str]] = {
    "fetched pdf": (
        "messages",
        {
            "type": "web_fetch_tool_result",
            "content": {"type": "web_fetch_result", "url": "u", "content": PDF},
        },
        "messages[1].content[0]",
    ),
    "picture of a tool": (
        "messages",
        {"type": "mcp_tool_result", "content": ["x", {"type": "image", "source": {"type": "base64"}}]},
        "messages[1].content[0]",
    ),
    "compaction": ("messages", {"type": "compaction", "content": "x"}, "messages[1].content[0].type"),
    "shell": ("responses", {"type": "shell_call", "action": {"commands": ["ls"]}}, "input[1].type"),
    "patch": ("responses", {"type": "apply_patch_call", "operation": {}}, "input[1].type"),
    "compacted": ("responses", {"type": "compaction", "encrypted_content": "x"}, "input[1].type"),
    "file": (
        "responses",
        {"role": "user", "content": [{"type": "input_file", "filename": "a", "file_data": "x"}]},
        "input[1].content[0].type",
    ),
    "sound": (
        "responses",
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]},
        "input[1].content[0].type",
    ),
}


@pytest.mark.parametrize("case", HISTORY_REFUSED)
def test_what_would_change_the_answer_is_refused_by_its_own_name(case: str) -> None:
    face, piece, field = HISTORY_REFUSED[case]
    user = {"role": "user", "content": "hi"}
    with pytest.raises(UnsupportedFeature) as caught:
        if face == "messages":
            turns = [user, {"role": "assistant", "content": [piece]}, user]
            read_messages({"model": "m", "max_tokens": 5, "messages": turns})
        else:
            read_responses({"model": "m", "input": [user, piece]})
    assert caught.value.metadata["field"] == field


def test_what_a_tool_found_may_be_nested_as_deep_as_a_body() -> None:
    for opening, closing in (('{"content":', "}"), ("[", "]")):
        for depth in (10, 500, 900, 2000, 100_000):
            found = f'{{"type":"mcp_tool_result","content":{opening * depth}"x"{closing * depth}}}'
            turns = f'{{"role":"assistant","content":[{found}]}},{{"role":"user","content":"x"}}'
            body = f'{{"model":"m","max_tokens":5,"messages":[{turns}]}}'
            try:
                generation = messages_request(body.encode()).generations[0]
            except InvalidInput:
                assert depth > 500
            else:
                assert generation.chat.messages[0].content == "x\n"


def test_metadata_of_a_response_returns_as_it_came_within_a_depth() -> None:
    body = {"model": "m", "input": "hi", "metadata": {**NESTED, "long": LONG}}
    head = responses_request(responses_body(json.dumps(body).encode()), b"[]").head
    assert json.loads(msgspec.json.encode(head))["metadata"] == body["metadata"]
    deep: dict[str, Any] = {}
    for _ in range(65):
        deep = {"a": deep}
    for metadata in (deep, {str(number): "" for number in range(257)}):
        with pytest.raises(InvalidInput) as caught:
            responses_body(json.dumps({**body, "metadata": metadata}).encode())
        assert caught.value.metadata["field"] == "metadata"


FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
WEB = {"type": "web_search"}
SPACE = {"type": "namespace", "name": "n", "tools": [FUNCTION, {"type": "custom", "name": "c"}]}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


def test_a_choice_of_a_tool_names_its_namespace_and_leaves_searches_out() -> None:
    tools = [FUNCTION, WEB, SPACE]
    for choice, mode, names in (
        ({"type": "function", "name": "f", "namespace": "n"}, pb.TOOL_MODE_REQUIRED, ["n.f"]),
        ({"type": "custom", "name": "c", "namespace": "n"}, pb.TOOL_MODE_REQUIRED, ["n.c"]),
        ({"type": "function", "name": "f"}, pb.TOOL_MODE_REQUIRED, ["f"]),
        (allowed("required", WEB, {"type": "function", "name": "f"}), pb.TOOL_MODE_REQUIRED, ["f"]),
        (
            allowed(
                "auto", {"type": "custom", "name": "c", "namespace": "n"}, {"type": "web_search_preview"}
            ),
            pb.TOOL_MODE_AUTO,
            ["n.c"],
        ),
    ):
        found = read_responses({"model": "m", "input": "hi", "tools": tools, "tool_choice": choice})
        check_tools(found)
        assert (found.tool_choice.mode, list(found.tool_choice.names)) == (mode, names)
    none = read_responses({"model": "m", "input": "hi", "tools": tools, "tool_choice": allowed("auto", WEB)})
    assert not none.chat.tools, "a choice of searches alone allows no call"


def test_a_choice_of_a_tool_that_was_left_out_is_refused_with_what_to_do() -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    own = {"name": "f", "input_schema": SCHEMA}
    messages = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    responses = {"model": "m", "input": "hi", "tools": [FUNCTION, WEB]}
    for read, body, field, kind in (
        (
            read_messages,
            {**messages, "tools": [own, web], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name",
            "web_search_20250305",
        ),
        (
            read_messages,
            {**messages, "tools": [web], "tool_choice": {"type": "any"}},
            "tool_choice",
            "web_search",
        ),
        (read_responses, {**responses, "tool_choice": WEB}, "tool_choice.type", "web_search"),
        (
            read_responses,
            {**responses, "tool_choice": allowed("required", WEB)},
            "tool_choice.tools[0].type",
            "web_search",
        ),
        (
            read_responses,
            {**responses, "tools": [WEB], "tool_choice": "required"},
            "tool_choice",
            "web_search",
        ),
    ):
        with pytest.raises(FairwayError) as caught:
            read(body)
        message = caught.value.message
        assert caught.value.metadata["field"] == field
        assert kind in message, message
        assert "left out" in message
        assert "auto" in message


def test_a_choice_of_an_unknown_tool_is_refused_with_what_to_do() -> None:
    choice = {"type": "function", "name": "other"}
    found = read_responses({"model": "m", "input": "hi", "tools": [FUNCTION], "tool_choice": choice})
    with pytest.raises(
        InvalidInput, match="names other, which is none of the tools: name one of them, or send"
    ):
        check_tools(found)
