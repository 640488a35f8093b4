"""What applications do with the Responses API of OpenAI's SDK and with Anthropic's SDK.

Runs in an environment that has nothing of Fairway. Arguments: base URL, API key, model, command. The last
line is JSON of what happened.
"""

import json
import sys
import time
from typing import Any

import anthropic
import openai

BASE, KEY, MODEL = sys.argv[1:4]
PROMPT = "def add(a, b):"
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


def error_of(call: Any) -> list[Any]:
    """Return status, type and field of the error that a call ends with."""
    try:
        call()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        found = getattr(error, "param", None)
        if isinstance(error, anthropic.APIStatusError):
            found = error.body["error"]["details"].get("param")
            return [error.status_code, error.body["error"]["type"], found, type(error).__name__]
        return [error.status_code, error.type, found, type(error).__name__]
    return []


def responses(client: openai.OpenAI) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": MODEL, "input": PROMPT, "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**asked, metadata={"run": "1"})
    types, deltas, last = [], [], None
    for event in client.responses.create(**asked, stream=True):
        types.append(event.type)
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
        last = event
    assert last is not None
    form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    # The SDK's helper takes complete responses only.
    with client.responses.stream(model=MODEL, input="x", max_output_tokens=64, text=form) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        helped = stream.get_final_response()
    again = client.responses.retrieve(whole.id)
    following = client.responses.create(
        model=MODEL, input="and", previous_response_id=whole.id, max_output_tokens=4
    )
    items = list(client.responses.input_items.list(whole.id))
    counted = client.responses.input_tokens.count(model=MODEL, input=PROMPT)
    formatted = client.responses.create(model=MODEL, input="x", max_output_tokens=64, text=form)
    # A small model that must call goes on calling.
    called = client.responses.create(
        model=MODEL,
        input="Weather?",
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=160,
    )
    client.responses.delete(whole.id)
    return {
        "whole": whole.output_text,
        "status": whole.status,
        "usage": whole.usage.model_dump(),
        "streamed": "".join(deltas),
        "types": types,
        "last": last.response.output_text,
        "helped": ["".join(parts), helped.output_text],
        "again": again.model_dump() == whole.model_dump(),
        "prompt_grew": following.usage.input_tokens > whole.usage.input_tokens,
        "items": [item.content[0].text for item in items],
        "counted": counted.input_tokens,
        "formatted": [formatted.status, formatted.output_text],
        "called": [called.status, [[item.type, getattr(item, "arguments", "")] for item in called.output]],
        "deleted": error_of(lambda: client.responses.retrieve(whole.id)),
        "refused": error_of(
            lambda: client.responses.create(
                model=MODEL, input="x", tools=[{"type": "code_interpreter", "container": {"type": "auto"}}]
            )
        ),
        "unknown": error_of(lambda: client.responses.create(model="nobody", input="x")),
    }


def background(client: openai.OpenAI) -> dict[str, Any]:
    made = client.responses.create(model=MODEL, input=PROMPT, background=True, max_output_tokens=16)
    ended = wait(client, made.id)
    seen, numbers = [], []
    for event in client.responses.retrieve(made.id, stream=True):
        seen.append(event.type)
        numbers.append(event.sequence_number)
    middle = numbers[len(numbers) // 2]
    rest = list(client.responses.retrieve(made.id, stream=True, starting_after=middle))
    long = client.responses.create(
        model=MODEL,
        input=PROMPT,
        background=True,
        max_output_tokens=512,
        extra_body={"ignore_eos": True},
    )
    cancelled = client.responses.cancel(long.id)
    return {
        "made": made.status,
        "ended": ended.status,
        "text": bool(ended.output_text),
        "last": seen[-1],
        "rest": all(event.sequence_number > middle for event in rest) and bool(rest),
        "cancelled": [cancelled.status, client.responses.retrieve(long.id).status],
    }


def wait(client: openai.OpenAI, response_id: str) -> Any:
    for _ in range(1200):
        try:
            found = client.responses.retrieve(response_id)
        except openai.APIConnectionError:  # its gateway restarts
            time.sleep(0.2)
            continue
        if found.status not in ("queued", "in_progress"):
            return found
        time.sleep(0.1)
    raise AssertionError("no end within two minutes")


def messages(client: anthropic.Anthropic) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": PROMPT}],
        "extra_body": {"temperature": 0},  # no parameter of this SDK
    }
    whole = client.messages.create(**asked)
    types = [event.type for event in client.messages.create(**asked, stream=True)]
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    counted = client.messages.count_tokens(model=MODEL, messages=asked["messages"], system="Be brief.")
    bare = client.messages.count_tokens(model=MODEL, messages=asked["messages"])
    tool = {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "input_schema": TOOLS[0]["parameters"],
        "strict": True,
    }
    called = client.messages.create(
        model=MODEL,
        max_tokens=160,
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    stopped = client.messages.create(
        **{**asked, "max_tokens": 64}, stop_sequences=[whole.content[0].text[3:6]]
    )
    return {
        "whole": whole.content[0].text,
        "reason": whole.stop_reason,
        "usage": [whole.usage.input_tokens + whole.usage.cache_read_input_tokens, whole.usage.output_tokens],
        "types": types,
        "streamed": text,
        "final": final.content[0].text,
        "counted": [bare.input_tokens, counted.input_tokens],
        "request_id": whole._request_id,
        "called": [called.stop_reason, [block.model_dump() for block in called.content]],
        "stopped": [stopped.stop_reason, stopped.stop_sequence],
        "unknown": error_of(lambda: client.messages.create(**{**asked, "model": "nobody"})),
        "refused": error_of(lambda: client.messages.create(**{**asked, "extra_body": {"container": "c"}})),
        "wrong_key": error_of(
            lambda: anthropic.Anthropic(base_url=BASE, api_key="wrong", max_retries=0).messages.create(
                **asked
            )
        ),
    }


def main() -> None:
    client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=120)
    if sys.argv[4] == "begin":
        made = client.responses.create(
            model=MODEL,
            input=PROMPT,
            background=True,
            max_output_tokens=400,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        print(json.dumps(made.id))
    elif sys.argv[4] == "wait":
        found = wait(client, sys.argv[5])
        print(json.dumps([found.status, found.output_text, found.usage.output_tokens if found.usage else 0]))
    else:
        anthropics = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0, timeout=120)
        found = {
            "responses": responses(client),
            "background": background(client),
            "messages": messages(anthropics),
        }
        print(json.dumps(found))


main()
