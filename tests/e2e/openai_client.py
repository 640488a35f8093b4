"""What an application does with the OpenAI SDK. Runs in an environment that has nothing of Fairway.

Arguments: base URL, API key, model, API key of a tenant with 3 requests a minute.
The last line is JSON of what happened.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable
from typing import Any

import openai

BASE, KEY, MODEL, LIMITED_KEY = sys.argv[1:5]


async def stream_one(client: openai.AsyncOpenAI, number: int) -> dict[str, Any]:
    """Stream a completion of a length of its own; count what came."""
    started, first, text = time.perf_counter(), None, ""
    usage: Any = None
    reasons: list[str] = []
    stream = await client.completions.create(
        model=MODEL,
        prompt=f"def function_{number}(value):\n" * (1 + number % 5),
        max_tokens=8 + 3 * number,
        temperature=0 if number % 2 else 0.8,
        seed=number,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            if choice.text and first is None:
                first = time.perf_counter() - started
            text += choice.text
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    return {
        "asked": 8 + 3 * number,
        "got": usage.completion_tokens,
        "text": len(text),
        "reasons": reasons,
        "ttft_s": first,
    }


async def chat(client: openai.AsyncOpenAI) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "Write a function `add` that adds two numbers."},
    ]
    whole = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0, logprobs=True, top_logprobs=3
    )
    parts, done = "", None
    roles: list[str] = []
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0, stream=True
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta
        roles += [delta.role] if delta.role else []
        parts += delta.content or ""
        done = chunk.choices[0].finish_reason or done
    two = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, n=2, temperature=1.0, seed=3
    )
    content = whole.choices[0].logprobs.content
    return {
        "whole": whole.choices[0].message.content,
        "streamed": parts,
        "roles": roles,
        "finish": [whole.choices[0].finish_reason, done],
        "usage": whole.usage.model_dump(),
        "logprobs": len(content),
        "top": len(content[0].top_logprobs),
        "best_is_sampled": content[0].token == content[0].top_logprobs[0].token,
        "choices": [choice.index for choice in two.choices],
        "id": whole.id,
        "request_id": whole._request_id,
    }


async def details(client: openai.AsyncOpenAI) -> dict[str, Any]:
    seeded = [
        (
            await client.completions.create(
                model=MODEL, prompt="import ", max_tokens=16, temperature=1.0, seed=11
            )
        )
        .choices[0]
        .text
        for _ in range(2)
    ]
    plain = await client.completions.create(
        model=MODEL, prompt="class Stack:\n    def ", max_tokens=40, temperature=0
    )
    text = plain.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = await client.completions.create(
        model=MODEL, prompt="class Stack:\n    def ", max_tokens=40, temperature=0, stop=[stop], logprobs=2
    )
    models = [model.id for model in (await client.models.list()).data]
    return {
        "seeded_equal": seeded[0] == seeded[1],
        "text": text,
        "stop": stop,
        "stopped": stopped.choices[0].text,
        "stop_reason": stopped.choices[0].finish_reason,
        "logprob_tokens": len(stopped.choices[0].logprobs.tokens),
        "models": models,
        "retrieved": (await client.models.retrieve(MODEL)).id,
    }


async def keyed(client: openai.AsyncOpenAI) -> dict[str, Any]:
    """Stream with an idempotency key: whole, repeated, and cut and continued behind the last event."""

    async def create(**headers: str) -> Any:
        return await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Write a loop."}],
            max_tokens=24,
            temperature=1.0,
            stream=True,
            extra_headers={"Idempotency-Key": "sdk", **headers},
            extra_body={"ignore_eos": True},
        )

    texts = []
    for _ in range(2):
        parts = [chunk.choices[0].delta.content or "" async for chunk in await create()]
        texts.append("".join(parts))
    first, last_id, ids = "", "", 0
    stream = await create()
    async for event in stream._iter_events():
        last_id, ids = event.id, ids + bool(event.id)
        first += json.loads(event.data)["choices"][0]["delta"].get("content", "")
        if len(first) > 8:
            break
    await stream.close()
    rest = [chunk.choices[0].delta async for chunk in await create(**{"Last-Event-ID": last_id})]
    return {
        "texts": texts,
        "first": first,
        "ids": ids,
        "rest": "".join(delta.content or "" for delta in rest),
        "roles": sum(delta.role is not None for delta in rest),
    }


async def errors(client: openai.AsyncOpenAI) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def expect(name: str, call: Awaitable[object]) -> None:
        try:
            await call
            found[name] = "no error"
        except openai.APIStatusError as error:
            body = error.body or {}
            found[name] = [type(error).__name__, error.status_code, body.get("code"), body.get("param")]

    bad = openai.AsyncOpenAI(base_url=client.base_url, api_key="fw_nobody_0000", max_retries=0)
    await expect("key", bad.models.list())
    await expect("model", client.completions.create(model="nope", prompt="x"))
    await expect("temperature", client.completions.create(model=MODEL, prompt="x", temperature=99))
    await expect("long", client.completions.create(model=MODEL, prompt="word " * 20000, max_tokens=4))
    await expect(
        "tools",
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        ),
    )
    await bad.close()
    return found


async def rates(client: openai.AsyncOpenAI) -> dict[str, Any]:
    """Return the rate headers of requests until one is rejected, and what the SDK makes of that one."""
    limited = openai.AsyncOpenAI(base_url=client.base_url, api_key=LIMITED_KEY, max_retries=0)
    found: list[dict[str, str]] = []
    for _ in range(30):
        ask = limited.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=4)
        try:
            answer = await ask
            found.append(dict(answer.headers))
        except openai.RateLimitError as error:
            await limited.close()
            return {"served": found, "rejected": dict(error.response.headers), "code": error.code}
        except openai.AuthenticationError:  # the gateway has not received the key yet
            await asyncio.sleep(0.5)
    return {"served": found}


async def extras(client: openai.AsyncOpenAI) -> dict[str, Any]:
    """Send what frameworks send beside the question; it is accepted, and the answer is the same."""
    messages: list[Any] = [{"role": "user", "content": "Write a loop."}]
    plain: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    hints: dict[str, Any] = {
        "metadata": {"trace": "1"},
        "store": False,
        "prompt_cache_key": "k",
        "safety_identifier": "someone",
        "service_tier": "default",
        "reasoning_effort": "low",
        "verbosity": "low",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "none",
        "extra_body": {
            "skip_special_tokens": True,
            "add_special_tokens": True,
            "use_beam_search": False,
            "prompt_logprobs": None,
            "best_of": None,
            "echo": False,
            "chat_template_kwargs": {},
            "priority": 0,
        },
        "extra_headers": {"x-api-key": KEY},
    }
    without = await client.chat.completions.create(**plain)
    hinted = await client.chat.completions.create(**plain, **hints)
    many = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=6, temperature=1.5, seed=7, n=20
    )
    usages = []
    stream = await client.chat.completions.create(
        **plain, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    async for chunk in stream:
        usages.append(chunk.usage.completion_tokens)
    short = await client.completions.create(
        model=MODEL, prompt="for ", temperature=0, extra_body={"ignore_eos": True}
    )
    return {
        "texts": [found.choices[0].message.content for found in (without, hinted)],
        "tier": hinted.service_tier,
        "choices": [choice.index for choice in many.choices],
        "distinct": len({choice.message.content for choice in many.choices}),
        "prompt_tokens": [many.usage.prompt_tokens, without.usage.prompt_tokens],
        "usages": usages,
        "short": short.usage.completion_tokens,
    }


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=BASE.rstrip("/") + "/v1", api_key=KEY, max_retries=0, timeout=120)
    streams = await asyncio.gather(*(stream_one(client, number) for number in range(32)))
    result = {
        "streams": streams,
        "chat": await chat(client),
        "details": await details(client),
        "keyed": await keyed(client),
        "extras": await extras(client),
        "errors": await errors(client),
        "rates": await rates(client),
    }
    await client.close()
    print(json.dumps(result))


asyncio.run(main())
