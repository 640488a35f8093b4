"""Calls of tools by the OpenAI SDK. Runs in an environment that has nothing of Fairway.

Arguments: base URL, API key, model. The last line is JSON of what happened.
"""

import json
import sys
from typing import Any

import openai

BASE, KEY, MODEL = sys.argv[1:4]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Bern", "Oslo", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "strict": True}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0)


# A small model that must call goes on calling.
REQUIRED: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


def whole(**options: Any) -> dict[str, Any]:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=200, seed=3, **options
    )
    message = answer.choices[0].message
    calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or []]
    return {"content": message.content, "calls": calls, "finish": answer.choices[0].finish_reason}


def streamed(**options: Any) -> dict[str, Any]:
    content, finish, pieces = "", "", 0
    calls: list[list[Any]] = []
    for chunk in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, max_tokens=200, seed=3, stream=True, **options
    ):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            pieces += 1
            if delta.index == len(calls):
                calls.append([delta.id, delta.function.name, ""])
            calls[delta.index][2] += delta.function.arguments or ""
        finish = choice.finish_reason or finish
    return {"content": content or None, "calls": calls, "finish": finish, "pieces": pieces}


def in_pieces(**options: Any) -> dict[str, Any]:
    """Return a stream whose calls come in pieces: a busy machine may join those of one."""
    found = streamed(**options)
    for _ in range(9):
        if found["pieces"] > len(found["calls"]):
            break
        found = streamed(**options)
    return found


def helper() -> dict[str, Any]:
    """What the SDK's own accumulator makes of a stream."""
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS[1:], max_tokens=200, seed=3, **REQUIRED
    ) as stream:
        final = stream.get_final_completion()
    return {
        "finish": final.choices[0].finish_reason,
        "name": final.choices[0].message.tool_calls[0].function.name,
    }


def offered(parameters: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def refused() -> list[str | None]:
    found = []
    for tools, choice in (
        ([*TOOLS, TOOLS[0]], "auto"),
        (TOOLS, {"type": "function", "function": {"name": "missing"}}),
        (offered({"type": "string"}), "auto"),
        (offered({"type": "object", "not": {}}), "required"),
    ):
        try:
            client.chat.completions.create(
                model=MODEL, messages=MESSAGES, tools=tools, tool_choice=choice, max_tokens=4
            )
        except openai.BadRequestError as error:
            found.append(error.param)
    return found


named: Any = {"type": "function", "function": {"name": "get_weather"}}
key = {"idempotency-key": "tools-1"}
result = {
    "required": whole(**REQUIRED),
    "streamed": in_pieces(tool_choice=named),
    "named": whole(tool_choice=named),
    "auto": whole(tool_choice="auto"),
    "none": whole(tool_choice="none"),
    "kept": [
        whole(**REQUIRED, extra_headers=key),
        whole(**REQUIRED, extra_headers=key),
    ],
    "helper": helper(),
    "refused": refused(),
}
print(json.dumps(result))
