"""The features of LiteLLM's SDK, by its providers for OpenAI, Anthropic and vLLM."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import litellm
from harness import (
    PROMPT,
    QUESTION,
    TARGET,
    TOOL,
    WEATHER,
    Features,
    check,
    is_weather,
    limited,
    raised,
    same,
)

FEATURES = Features()
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
AT: dict[str, Any] = {"api_base": TARGET.v1, "api_key": TARGET.key, "timeout": 60}
CHAT: dict[str, Any] = {
    **AT,
    "model": f"openai/{TARGET.model}",
    "messages": ASKED,
    "max_tokens": 16,
    "temperature": 0,
}
CALLING: dict[str, Any] = {
    **CHAT,
    "model": f"hosted_vllm/{TARGET.agent}",
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,  # a small model that must call goes on calling
    "max_tokens": 160,
}
RESPONSE: dict[str, Any] = {**AT, "model": f"openai/{TARGET.model}", "input": PROMPT, "max_output_tokens": 16}
VLLM: dict[str, Any] = {**CHAT, "model": f"hosted_vllm/{TARGET.model}"}


@FEATURES.shows("completion")
def completion() -> None:
    asked = {**AT, "model": f"text-completion-openai/{TARGET.model}", "prompt": PROMPT, "max_tokens": 16}
    answer = litellm.text_completion(**asked)
    check(answer.choices[0].text and answer.usage.completion_tokens, answer)


@FEATURES.shows("completion_stream")
def completion_stream() -> None:
    asked = {**AT, "model": f"text-completion-openai/{TARGET.model}", "prompt": PROMPT, "max_tokens": 16}
    chunks = list(litellm.text_completion(**asked, stream=True))
    check("".join(chunk.choices[0].text or "" for chunk in chunks), chunks)


@FEATURES.shows("chat")
def chat() -> None:
    answer = litellm.completion(**CHAT)
    check(answer.choices[0].message.content and answer.usage.completion_tokens, answer)
    same(litellm.completion(**VLLM).choices[0].message.content, answer.choices[0].message.content)


@FEATURES.shows("chat_stream")
def chat_stream() -> None:
    whole = litellm.completion(**CHAT).choices[0].message.content
    for asked in (CHAT, VLLM):
        chunks = list(litellm.completion(**asked, stream=True))
        same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), whole)


@FEATURES.shows("stream_usage")
def stream_usage() -> None:
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    same(chunks[-1].usage.completion_tokens, litellm.completion(**CHAT).usage.completion_tokens)


@FEATURES.shows("developer_role")
def developer_role() -> None:
    turns = [{"role": "developer", "content": "Be brief."}, *ASKED]
    check(litellm.completion(**{**CHAT, "messages": turns}).choices[0].message.content, turns)


@FEATURES.shows("choices")
def choices() -> None:
    same(len(litellm.completion(**{**CHAT, "temperature": 1}, n=3, seed=1).choices), 3)


@FEATURES.shows("stop")
def stop() -> None:
    whole = litellm.completion(**CHAT).choices[0].message.content
    answer = litellm.completion(**CHAT, stop=[whole[3:6]]).choices[0]
    same([answer.message.content, answer.finish_reason], [whole.split(whole[3:6])[0], "stop"])


@FEATURES.shows("logprobs")
def logprobs() -> None:
    content = litellm.completion(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    check(len(content) > 0 and len(content[0].top_logprobs) == 2, content)


@FEATURES.shows("hints")
def hints() -> None:
    plain = litellm.completion(**CHAT).choices[0].message.content
    cached = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    efforts = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}
    for asked in (CHAT, VLLM, CHAT | efforts, VLLM | efforts):
        turns = [{"role": "user", "content": [cached]}]
        hinted = litellm.completion(**{**asked, "messages": turns}, user="someone", metadata={"trace": "1"})
        same(hinted.choices[0].message.content, plain)


@FEATURES.shows("json_object")
def json_object() -> None:
    asked = {**CHAT, "max_tokens": 200, "response_format": {"type": "json_object"}}
    check(litellm.completion(**asked).choices[0].message.content.startswith("{"), asked)


@FEATURES.shows("json_schema")
def json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    for asked in (CHAT, VLLM):
        answer = litellm.completion(**{**asked, "max_tokens": 64}, response_format=form)
        is_weather(answer.choices[0].message.content)


@FEATURES.shows("guided")
def guided() -> None:
    answer = litellm.completion(**VLLM, guided_choice=["yes", "no"])
    check(answer.choices[0].message.content in ("yes", "no"), answer)


@FEATURES.shows("tool_call")
def tool_call() -> None:
    for provider in ("openai", "hosted_vllm"):
        choice = litellm.completion(**{**CALLING, "model": f"{provider}/{TARGET.agent}"}).choices[0]
        same(choice.finish_reason, "tool_calls")
        is_weather(choice.message.tool_calls[0].function.arguments)


@FEATURES.shows("tool_stream")
def tool_stream() -> None:
    chunks = list(litellm.completion(**CALLING, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    is_weather(built.choices[0].message.tool_calls[0].function.arguments)


@FEATURES.shows("tool_result")
def tool_result() -> None:
    message = litellm.completion(**CALLING).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7 degrees"}
    asked = {**CALLING, "messages": [*ASKED, message, result], "tool_choice": "auto", "max_tokens": 16}
    check(litellm.completion(**asked).choices[0].message, asked)


@FEATURES.shows("reasoning")
def reasoning() -> None:
    asked = {**VLLM, "model": f"hosted_vllm/{TARGET.agent}"}
    answer = litellm.completion(**asked, chat_template_kwargs={"enable_thinking": True})
    check(answer.choices[0].message.reasoning_content, answer)


@FEATURES.shows("images", "image_url", "content[1].type")
def images() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    turns = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    litellm.completion(**{**CHAT, "messages": turns})


@FEATURES.shows("responses")
def responses() -> None:
    made = litellm.responses(**RESPONSE)
    check(made.output[0].content[0].text, made)
    found = litellm.get_responses(response_id=made.id, custom_llm_provider="openai", **AT)
    same(found.output[0].content[0].text, made.output[0].content[0].text)


@FEATURES.shows("responses_stream")
def responses_stream() -> None:
    types = [str(event.type.value) for event in litellm.responses(**RESPONSE, stream=True)]
    check("response.output_text.delta" in types, types)
    check(types[-1] in ("response.completed", "response.incomplete"), types)


@FEATURES.shows("responses_chain")
def responses_chain() -> None:
    first = litellm.responses(**RESPONSE)
    second = litellm.responses(**{**RESPONSE, "input": "and"}, previous_response_id=first.id)
    check(second.usage.input_tokens > first.usage.input_tokens, second.usage)


@FEATURES.shows("responses_tools")
def responses_tools() -> None:
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    asked = {**RESPONSE, "temperature": 0, "model": f"openai/{TARGET.agent}", "max_output_tokens": 160}
    made = litellm.responses(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = [item for item in made.output if item.type == "function_call"]
    is_weather(call.arguments)


@FEATURES.shows("messages_thinking")
def messages_thinking() -> None:
    answer = litellm.completion(
        model=f"anthropic/{TARGET.agent}",
        messages=ASKED,
        max_tokens=32,
        api_base=TARGET.url,
        api_key=TARGET.key,
        thinking={"type": "enabled", "budget_tokens": 1024},
        allowed_openai_params=["thinking"],
    )
    check(answer.choices[0].message.reasoning_content, answer)


@FEATURES.shows("messages_tools")
def messages_tools() -> None:
    asked = {**CALLING, "model": f"anthropic/{TARGET.agent}", "api_base": TARGET.url}
    message = litellm.completion(**asked).choices[0].message
    is_weather(message.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7 degrees"}
    turns = [*ASKED, message, result]
    check(litellm.completion(**{**asked, "messages": turns, "tool_choice": "auto"}).choices, turns)


@FEATURES.shows("messages")
async def messages() -> None:
    answer = await litellm.anthropic.messages.acreate(
        model=f"anthropic/{TARGET.model}",
        messages=ASKED,
        max_tokens=16,
        api_base=TARGET.url,
        api_key=TARGET.key,
    )
    check(answer["content"][0]["text"], answer)
    chat = litellm.completion(
        model=f"anthropic/{TARGET.model}",
        messages=ASKED,
        max_tokens=16,
        api_base=TARGET.url,
        api_key=TARGET.key,
    )
    check(chat.choices[0].message.content, chat)


@FEATURES.shows("embeddings")
def embeddings() -> None:
    for provider in ("openai", "hosted_vllm"):
        found = litellm.embedding(model=f"{provider}/{TARGET.embedder}", input=["the fox", "a dog"], **AT)
        same([len(one["embedding"]) for one in found.data], [24, 24])


@FEATURES.shows("rerank")
def rerank() -> None:
    asked: dict[str, Any] = {"query": "fox", "documents": ["the fox", "a dog", "the lazy dog"], "top_n": 2}
    for provider, base in (("hosted_vllm", TARGET.url), ("cohere", TARGET.url), ("jina_ai", TARGET.v1)):
        found = litellm.rerank(
            model=f"{provider}/{TARGET.reranker}", api_base=base, api_key=TARGET.key, **asked
        )
        check(len(found.results) == 2 and found.results[0]["relevance_score"] is not None, found)


@FEATURES.shows("batches")
def batches() -> None:
    at = {**AT, "custom_llm_provider": "openai"}
    body = {"model": TARGET.model, "messages": ASKED, "max_tokens": 4}
    lines = Path(TARGET.scratch, "in.jsonl")
    url = "/v1/chat/completions"
    lines.write_text(json.dumps({"custom_id": "0", "method": "POST", "url": url, "body": body}) + "\n")
    with lines.open("rb") as data:
        file = litellm.create_file(file=data, purpose="batch", **at)
    batch = litellm.create_batch(completion_window="24h", endpoint=url, input_file_id=file.id, **at)
    for _ in range(200):
        batch = litellm.retrieve_batch(batch_id=batch.id, **at)
        if batch.status not in ("validating", "in_progress", "finalizing"):
            break
        time.sleep(0.2)
    same(batch.status, "completed")
    output = litellm.file_content(file_id=batch.output_file_id, **at)
    same(json.loads(output.content)["custom_id"], "0")


@FEATURES.shows("async_client")
async def async_client() -> None:
    answers = await asyncio.gather(*(litellm.acompletion(**CHAT) for _ in range(8)))
    same(len({answer.choices[0].message.content for answer in answers}), 1)


@FEATURES.shows("error_401")
def error_401() -> None:
    raised(litellm.AuthenticationError, lambda: litellm.completion(**{**CHAT, "api_key": "wrong"}))


@FEATURES.shows("error_404")
def error_404() -> None:
    error = raised(litellm.NotFoundError, lambda: litellm.completion(**{**CHAT, "model": "openai/nope"}))
    check("nope" in str(error), str(error))


@FEATURES.shows("error_400")
def error_400() -> None:
    error = raised(litellm.BadRequestError, lambda: litellm.completion(**{**CHAT, "temperature": 9}))
    check("temperature" in str(error), str(error))
    long = [{"role": "user", "content": "word " * 5000}]
    raised(litellm.ContextWindowExceededError, lambda: litellm.completion(**{**CHAT, "messages": long}))


@FEATURES.shows("error_429")
def error_429() -> None:
    asked = {**CHAT, "api_key": TARGET.limited_key, "max_retries": 0}
    limited(lambda: litellm.completion(**asked), litellm.RateLimitError)


@FEATURES.shows("retry")
def retry() -> None:
    asked = {**CHAT, "api_key": TARGET.paced_key, "max_retries": 4}
    for _ in range(3):
        check(litellm.completion(**asked).choices, "no answer")


@FEATURES.shows("timeout")
def timeout() -> None:
    long = {**CHAT, "max_tokens": 900, "timeout": 0.2, "max_retries": 0, "extra_body": {"ignore_eos": True}}
    raised(litellm.Timeout, lambda: litellm.completion(**long))


FEATURES.run()
