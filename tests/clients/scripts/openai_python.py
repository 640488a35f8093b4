"""The features of OpenAI's SDK for Python."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import openai
from harness import (
    PROMPT,
    QUESTION,
    TARGET,
    TOOL,
    WEATHER,
    Features,
    check,
    is_text_or_calls,
    is_weather,
    limited,
    raised,
    same,
)

FEATURES = Features()
CLIENT = openai.OpenAI(base_url=TARGET.v1, api_key=TARGET.key, max_retries=0, timeout=60)
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
CHAT: dict[str, Any] = {"model": TARGET.model, "messages": ASKED, "max_tokens": 16, "temperature": 0}
TEXT: dict[str, Any] = {"model": TARGET.model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
# A small model that must call goes on calling.
CALLING: dict[str, Any] = {
    "model": TARGET.agent,
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 160,
    "temperature": 0,
}
FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": WEATHER, "strict": True},
}


@FEATURES.shows("models")
def models() -> None:
    names = [model.id for model in CLIENT.models.list()]
    check({TARGET.model, TARGET.agent, TARGET.embedder} <= set(names), names)
    same(CLIENT.models.retrieve(TARGET.model).id, TARGET.model)


@FEATURES.shows("completion")
def completion() -> None:
    answer = CLIENT.completions.create(**TEXT)
    check(answer.choices[0].text, answer)
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
    two = CLIENT.completions.create(**{**TEXT, "prompt": [PROMPT, "import "]})
    same([choice.index for choice in two.choices], [0, 1])
    same(two.choices[0].text, answer.choices[0].text)


@FEATURES.shows("completion_stream")
def completion_stream() -> None:
    whole = CLIENT.completions.create(**TEXT).choices[0].text
    chunks = list(CLIENT.completions.create(**TEXT, stream=True))
    same("".join(chunk.choices[0].text for chunk in chunks), whole)
    check(len(chunks) > 2 and chunks[-1].choices[0].finish_reason, chunks[-1])


@FEATURES.shows("echo", "echo")
def echo() -> None:
    answer = CLIENT.completions.create(**TEXT, echo=True)
    check(answer.choices[0].text.startswith(PROMPT), answer.choices[0].text)


@FEATURES.shows("suffix", "suffix")
def suffix() -> None:
    CLIENT.completions.create(**TEXT, suffix="return c")


@FEATURES.shows("best_of", "best_of")
def best_of() -> None:
    same(len(CLIENT.completions.create(**{**TEXT, "temperature": 1}, best_of=3).choices), 1)


@FEATURES.shows("chat")
def chat() -> None:
    answer = CLIENT.chat.completions.create(**CHAT)
    check(answer.choices[0].message.content, answer)
    same(answer.choices[0].message.role, "assistant")
    check(answer._request_id, "no request id")
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    again = CLIENT.chat.completions.create(**{**CHAT, "messages": parts})
    same(again.choices[0].message.content, answer.choices[0].message.content)


@FEATURES.shows("chat_stream")
def chat_stream() -> None:
    whole = CLIENT.chat.completions.create(**CHAT).choices[0].message.content
    chunks = list(CLIENT.chat.completions.create(**CHAT, stream=True))
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), whole)
    same([chunk.choices[0].delta.role for chunk in chunks if chunk.choices[0].delta.role], ["assistant"])
    with CLIENT.chat.completions.stream(**CHAT) as stream:
        same("".join(event.delta for event in stream if event.type == "content.delta"), whole)


@FEATURES.shows("stream_usage")
def stream_usage() -> None:
    usage = CLIENT.chat.completions.create(**CHAT).usage
    chunks = list(CLIENT.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    same(chunks[-1].choices, [])
    same(chunks[-1].usage.completion_tokens, usage.completion_tokens)
    same(chunks[-1].usage.prompt_tokens, usage.prompt_tokens)


@FEATURES.shows("developer_role")
def developer_role() -> None:
    turns = [{"role": "developer", "content": "Be brief."}, *ASKED]
    check(CLIENT.chat.completions.create(**{**CHAT, "messages": turns}).choices[0].message.content, turns)


@FEATURES.shows("choices")
def choices() -> None:
    asked = {**CHAT, "temperature": 1.2, "seed": 5}
    answer = CLIENT.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in answer.choices]
    same([choice.index for choice in answer.choices], [0, 1, 2])
    check(len(set(texts)) > 1, texts)
    again = CLIENT.chat.completions.create(**asked, n=3)
    same([choice.message.content for choice in again.choices], texts)


@FEATURES.shows("stop")
def stop() -> None:
    whole = CLIENT.completions.create(**{**TEXT, "max_tokens": 40}).choices[0].text
    word = whole[len(whole) // 2 : len(whole) // 2 + 3]
    answer = CLIENT.completions.create(**{**TEXT, "max_tokens": 40}, stop=[word]).choices[0]
    same([answer.text, answer.finish_reason], [whole.split(word)[0], "stop"])


@FEATURES.shows("logprobs")
def logprobs() -> None:
    answer = CLIENT.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    check(len(content) >= answer.usage.completion_tokens - 1 and len(content[0].top_logprobs) == 3, content)
    same(content[0].token, content[0].top_logprobs[0].token)
    legacy = CLIENT.completions.create(**TEXT, logprobs=2).choices[0].logprobs
    check(len(legacy.tokens) == len(legacy.token_logprobs) > 0, legacy)
    chunks = CLIENT.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, stream=True)
    streamed = [one for chunk in chunks for one in (chunk.choices[0].logprobs or empty()).content or []]
    same([one.token for one in streamed], [one.token for one in content])


def empty() -> Any:
    return type("NoLogprobs", (), {"content": None})


@FEATURES.shows("sampling")
def sampling() -> None:
    options = {"top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"40": -100}}
    own = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 4, "ignore_eos": True}
    asked = {**CHAT, "temperature": 1, "seed": 3, **options, "extra_body": own}
    texts = [CLIENT.chat.completions.create(**asked).choices[0].message.content for _ in range(2)]
    same(texts[0], texts[1])


@FEATURES.shows("hints")
def hints() -> None:
    plain = CLIENT.chat.completions.create(**CHAT).choices[0].message.content
    hinted = CLIENT.chat.completions.create(
        **CHAT,
        metadata={"trace": "1"},
        store=False,
        user="someone",
        prompt_cache_key="key",
        safety_identifier="someone",
        service_tier="default",
        reasoning_effort="low",
        verbosity="low",
    )
    same(hinted.choices[0].message.content, plain)


@FEATURES.shows("json_object")
def json_object() -> None:
    asked = {**CHAT, "max_tokens": 200, "response_format": {"type": "json_object"}}
    choice = CLIENT.chat.completions.create(**asked).choices[0]
    check(choice.message.content.startswith("{"), choice)
    if choice.finish_reason == "stop":
        json.loads(choice.message.content)


@FEATURES.shows("json_schema")
def json_schema() -> None:
    asked = {**CHAT, "max_tokens": 64, "response_format": FORM}
    is_weather(CLIENT.chat.completions.create(**asked).choices[0].message.content)
    chunks = CLIENT.chat.completions.create(**asked, stream=True)
    is_weather("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@FEATURES.shows("guided")
def guided() -> None:
    for own, expected in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "ab|cd"}, ("ab", "cd")),
        ({"structured_outputs": {"choice": ["red"]}}, ("red",)),
    ):
        text = CLIENT.chat.completions.create(**CHAT, extra_body=own).choices[0].message.content
        check(text in expected, text)


@FEATURES.shows("tool_call")
def tool_call() -> None:
    choice = CLIENT.chat.completions.create(**CALLING).choices[0]
    same(choice.finish_reason, "tool_calls")
    (call,) = choice.message.tool_calls
    same(call.function.name, "get_weather")
    is_weather(call.function.arguments)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice = CLIENT.chat.completions.create(**{**CALLING, "tool_choice": named}).choices[0]
    is_weather(choice.message.tool_calls[0].function.arguments)


@FEATURES.shows("tool_auto")
def tool_auto() -> None:
    for mode in ("auto", "none"):
        asked: Any = {**CALLING, "tool_choice": mode, "max_tokens": 24}
        choice = CLIENT.chat.completions.create(**asked).choices[0]
        made = choice.message.tool_calls or []
        calls = [(call.function.name, call.function.arguments) for call in made]
        is_text_or_calls(choice.message.content, calls, choice.finish_reason)
        check(mode == "auto" or not calls, calls)


@FEATURES.shows("tool_stream")
def tool_stream() -> None:
    whole = CLIENT.chat.completions.create(**CALLING).choices[0].message.tool_calls[0].function.arguments
    arguments, finish, pieces = "", None, 0
    for chunk in CLIENT.chat.completions.create(**CALLING, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            arguments += delta.function.arguments or ""
            pieces += 1
        finish = chunk.choices[0].finish_reason or finish
    same([arguments, finish], [whole, "tool_calls"])
    check(pieces > 1, pieces)
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    with CLIENT.chat.completions.stream(**{**CALLING, "tools": [strict]}) as stream:
        final = stream.get_final_completion()
    is_weather(final.choices[0].message.tool_calls[0].function.parsed_arguments)


@FEATURES.shows("tool_result")
def tool_result() -> None:
    message = CLIENT.chat.completions.create(**CALLING).choices[0].message
    turns = [
        *CALLING["messages"],
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"degrees": 7}'},
    ]
    answer = CLIENT.chat.completions.create(
        model=TARGET.agent, messages=turns, tools=[TOOL], max_tokens=16, temperature=0
    )
    check(answer.choices[0].message.content, answer)


@FEATURES.shows("reasoning")
def reasoning() -> None:
    asked: dict[str, Any] = {**CHAT, "model": TARGET.agent}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = CLIENT.chat.completions.create(**asked, extra_body=thinking).choices[0].message
    check(message.reasoning_content and not message.content, message)
    chunks = CLIENT.chat.completions.create(**asked, extra_body=thinking, stream=True)
    deltas = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    same("".join(deltas), message.reasoning_content)
    turns = [*ASKED, {"role": "assistant", "content": "c", "reasoning_content": "r"}, *ASKED]
    check(CLIENT.chat.completions.create(**{**asked, "messages": turns}).choices[0].message.content, turns)


@FEATURES.shows("images", "image_url", "content[1].type")
def images() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    CLIENT.chat.completions.create(**{**CHAT, "messages": turns})


RESPONSE: dict[str, Any] = {
    "model": TARGET.model,
    "input": PROMPT,
    "temperature": 0,
    "max_output_tokens": 16,
}


@FEATURES.shows("responses")
def responses() -> None:
    whole = CLIENT.responses.create(**RESPONSE)
    check(whole.output_text, whole)
    same(CLIENT.responses.retrieve(whole.id).output_text, whole.output_text)
    same(len(list(CLIENT.responses.input_items.list(whole.id))), 1)
    same(CLIENT.responses.input_tokens.count(model=TARGET.model, input=PROMPT).input_tokens > 0, True)
    CLIENT.responses.delete(whole.id)
    raised(openai.NotFoundError, lambda: CLIENT.responses.retrieve(whole.id))


@FEATURES.shows("responses_stream")
def responses_stream() -> None:
    whole = CLIENT.responses.create(**RESPONSE).output_text
    events = list(CLIENT.responses.create(**RESPONSE, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    same("".join(deltas), whole)
    same(events[0].type, "response.created")
    check(events[-1].type in ("response.completed", "response.incomplete"), events[-1].type)


@FEATURES.shows("responses_chain")
def responses_chain() -> None:
    first = CLIENT.responses.create(**RESPONSE)
    second = CLIENT.responses.create(**{**RESPONSE, "input": "and"}, previous_response_id=first.id)
    check(second.usage.input_tokens > first.usage.input_tokens, second.usage)


@FEATURES.shows("responses_background")
def responses_background() -> None:
    found = made = CLIENT.responses.create(**RESPONSE, background=True)
    for _ in range(200):
        found = CLIENT.responses.retrieve(made.id)
        if found.status not in ("queued", "in_progress"):
            break
        time.sleep(0.1)
    check(found.output_text, found)
    events = list(CLIENT.responses.retrieve(made.id, stream=True))
    same([event.sequence_number for event in events], sorted(event.sequence_number for event in events))
    long = CLIENT.responses.create(
        **{**RESPONSE, "max_output_tokens": 600}, background=True, extra_body={"ignore_eos": True}
    )
    same(CLIENT.responses.cancel(long.id).status, "cancelled")


RESPONSE_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": WEATHER,
    "strict": True,
}


@FEATURES.shows("responses_tools")
def responses_tools() -> None:
    asked: dict[str, Any] = {
        "model": TARGET.agent,
        "tools": [RESPONSE_TOOL],
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 160,
    }
    made = CLIENT.responses.create(**asked, input="Weather?", tool_choice="required")
    (call,) = [item for item in made.output if item.type == "function_call"]
    is_weather(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}
    after = CLIENT.responses.create(
        **{**asked, "max_output_tokens": 16}, input=[result], previous_response_id=made.id
    )
    check(after.output_text, after)
    types = [
        e.type for e in CLIENT.responses.create(**asked, input="W?", tool_choice="required", stream=True)
    ]
    check("response.function_call_arguments.done" in types, types)


@FEATURES.shows("responses_schema")
def responses_schema() -> None:
    form: Any = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}}
    is_weather(CLIENT.responses.create(**{**RESPONSE, "max_output_tokens": 64}, text=form).output_text)


@FEATURES.shows("responses_hints")
def responses_hints() -> None:
    plain = CLIENT.responses.create(**RESPONSE).output_text
    hinted = CLIENT.responses.create(
        **RESPONSE,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        service_tier="auto",
        prompt_cache_key="key",
        safety_identifier="someone",
        metadata={"trace": "1"},
        truncation="disabled",
        store=False,
    )
    same(hinted.output_text, plain)


@FEATURES.shows("responses_replay")
def responses_replay() -> None:
    asked: dict[str, Any] = {
        "model": TARGET.agent,
        "tools": [RESPONSE_TOOL],
        "parallel_tool_calls": False,
        "store": False,
        "temperature": 0,
    }
    turns: list[Any] = [{"role": "user", "content": "Weather?"}]
    made = CLIENT.responses.create(**asked, input=turns, tool_choice="required", max_output_tokens=160)
    (call,) = [item for item in made.output if item.type == "function_call"]
    turns += made.output
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"})
    after = CLIENT.responses.create(**asked, input=turns, max_output_tokens=16)
    turns += after.output
    turns.append({"role": "user", "content": "and"})
    check(CLIENT.responses.create(**asked, input=turns, max_output_tokens=16).output, turns)


@FEATURES.shows("other_apis", "/v1/moderations")
def other_apis() -> None:
    CLIENT.moderations.create(input="x")


@FEATURES.shows("server_tools", "tools[0].type", "file_search")
def server_tools() -> None:
    CLIENT.responses.create(**RESPONSE, tools=[{"type": "file_search", "vector_store_ids": ["vs_1"]}])


@FEATURES.shows("left_out")
def left_out() -> None:
    found = CLIENT.responses.create(**RESPONSE, tools=[{"type": "web_search"}])
    check(found.output_text, found)


@FEATURES.shows("embeddings")
def embeddings() -> None:
    plain = CLIENT.embeddings.create(model=TARGET.embedder, input=["the fox", "a dog"])  # as base64
    floats = CLIENT.embeddings.create(
        model=TARGET.embedder, input=["the fox", "a dog"], encoding_format="float"
    )
    same([one.embedding for one in plain.data], [one.embedding for one in floats.data])
    check(len(plain.data[0].embedding) == 24 and plain.usage.prompt_tokens > 0, plain)


@FEATURES.shows("batches")
def batches() -> None:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "seed": n}}
        for n in range(4)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = CLIENT.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    batch = CLIENT.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    for _ in range(200):
        batch = CLIENT.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            break
        time.sleep(0.2)
    same(batch.status, "completed")
    answers = CLIENT.files.content(batch.output_file_id).text.splitlines()
    same(sorted(json.loads(answer)["custom_id"] for answer in answers), ["0", "1", "2", "3"])
    check(batch.id in [one.id for one in CLIENT.batches.list()], batch.id)
    CLIENT.files.delete(file.id)


@FEATURES.shows("tokenize")
def tokenize() -> None:
    asked = {"model": TARGET.model, "prompt": PROMPT}
    root = CLIENT.with_options(base_url=TARGET.url)
    tokens = root.post("/tokenize", body=asked, cast_to=dict[str, Any])["tokens"]
    text = root.post("/detokenize", body={"model": TARGET.model, "tokens": tokens}, cast_to=dict[str, Any])
    check(PROMPT in text["prompt"], text)


@FEATURES.shows("async_client")
async def async_client() -> None:
    async with openai.AsyncOpenAI(base_url=TARGET.v1, api_key=TARGET.key, max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(8)))
    same(len({answer.choices[0].message.content for answer in answers}), 1)


@FEATURES.shows("error_401")
def error_401() -> None:
    client = CLIENT.with_options(api_key="wrong")
    same(raised(openai.AuthenticationError, client.models.list).code, "invalid_api_key")


@FEATURES.shows("error_404")
def error_404() -> None:
    error = raised(openai.NotFoundError, lambda: CLIENT.completions.create(**{**TEXT, "model": "nope"}))
    same(error.code, "model_not_found")


@FEATURES.shows("error_400")
def error_400() -> None:
    error = raised(
        openai.BadRequestError, lambda: CLIENT.chat.completions.create(**{**CHAT, "temperature": 9})
    )
    same(error.param, "temperature")
    typo = raised(
        openai.BadRequestError, lambda: CLIENT.chat.completions.create(**CHAT, extra_body={"tolls": 1})
    )
    check("tolls" in typo.message, typo.message)
    long = {**TEXT, "prompt": "word " * 5000}
    same(
        raised(openai.BadRequestError, lambda: CLIENT.completions.create(**long)).code,
        "context_length_exceeded",
    )


@FEATURES.shows("error_429")
def error_429() -> None:
    client = CLIENT.with_options(api_key=TARGET.limited_key)
    error = limited(lambda: client.completions.create(**TEXT), openai.RateLimitError)
    check(int(error.response.headers["retry-after"]) > 0, dict(error.response.headers))
    same(error.code, "rate_limit_exceeded")


@FEATURES.shows("retry")
def retry() -> None:
    client = CLIENT.with_options(api_key=TARGET.paced_key, max_retries=4)
    for _ in range(3):
        check(client.completions.create(**TEXT).choices, "no answer")


@FEATURES.shows("timeout")
def timeout() -> None:
    long = {**TEXT, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    raised(openai.APITimeoutError, lambda: CLIENT.with_options(timeout=0.2).completions.create(**long))


@FEATURES.shows("cancel")
def cancel() -> None:
    long = {**TEXT, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    stream = CLIENT.completions.create(**long, stream=True)
    check(next(iter(stream)).choices, "no chunk")
    stream.close()


@FEATURES.shows("idempotency")
def idempotency() -> None:
    headers = {"Idempotency-Key": f"python-{time.time_ns()}"}
    asked = {**CHAT, "temperature": 1.5}
    first = CLIENT.chat.completions.create(**asked, extra_headers=headers)
    again = CLIENT.chat.completions.create(**asked, extra_headers=headers)
    same([again.id, again.choices[0].message.content], [first.id, first.choices[0].message.content])
    other = {**asked, "max_tokens": 3, "extra_headers": headers}
    raised(openai.ConflictError, lambda: CLIENT.chat.completions.create(**other))


@FEATURES.shows("resume")
def resume() -> None:
    headers = {"Idempotency-Key": f"resume-{time.time_ns()}"}
    asked: dict[str, Any] = {**CHAT, "max_tokens": 48, "stream": True, "extra_body": {"ignore_eos": True}}
    first, last_id = "", ""
    stream = CLIENT.chat.completions.create(**asked, extra_headers=headers)
    for event in stream._iter_events():
        first += json.loads(event.data)["choices"][0]["delta"].get("content") or ""
        last_id = event.id
        if len(first) > 8:
            break
    stream.close()
    rest = CLIENT.chat.completions.create(**asked, extra_headers={**headers, "Last-Event-ID": last_id})
    text = first + "".join(chunk.choices[0].delta.content or "" for chunk in rest)
    same(text, CLIENT.chat.completions.create(**{**asked, "stream": False}).choices[0].message.content)


FEATURES.run()
