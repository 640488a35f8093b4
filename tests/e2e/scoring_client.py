"""What evaluation harnesses do with a completions API. Runs in an environment that has nothing of Fairway.

Arguments: base URL, API key, model, a JSON file of requests. The last line is JSON of what came back.
``loglikelihoods`` sends and parses as the local-completions model of lm-evaluation-harness does.
"""

import asyncio
import json
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import openai

BASE, KEY, MODEL, FILE = sys.argv[1:5]
ASKED = json.loads(Path(FILE).read_text())


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    answer = await client.completions.create(model=MODEL, temperature=0, **fields)
    return answer.model_dump()


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """Return what the chunks of each choice are together, and the sizes of the first ones."""
    stream = await client.completions.create(
        model=MODEL, temperature=0, stream=True, stream_options={"include_usage": True}, **fields
    )
    choices: dict[str, dict[str, Any]] = {}
    usage: Any = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            found = choices.setdefault(str(choice.index), {"text": "", "first": choice.text, "chunks": 0})
            found["text"] += choice.text
            found["chunks"] += 1
            found["finish_reason"] = choice.finish_reason
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                found.setdefault(name, []).extend(values)
    return {"choices": choices, "usage": usage.model_dump()}


async def refused(call: Any) -> list[Any]:
    try:
        await call
    except openai.APIStatusError as error:
        return [error.status_code, error.body["param"], error.body["message"]]
    return []


async def loglikelihoods(client: openai.AsyncOpenAI, pairs: list[tuple[list[int], list[int]]]) -> list[Any]:
    """Return (sum of log-probabilities, is greedy) of each continuation; batches of 8, 4 at a time."""
    slots, found = asyncio.Semaphore(4), []

    async def batch(chosen: list[tuple[list[int], list[int]]]) -> list[Any]:
        inputs = [context + continuation for context, continuation in chosen]
        payload: dict[str, Any] = {
            "model": MODEL,
            "prompt": inputs,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        async with slots:
            answer = await client.post("/completions", cast_to=object, body=payload)
        return parse_logprobs(answer, [len(context) for context, _ in chosen])

    batches = [pairs[first : first + 8] for first in range(0, len(pairs), 8)]
    for part in await asyncio.gather(*map(batch, batches)):
        found += part
    return found


def parse_logprobs(answer: Any, context_lengths: list[int]) -> list[tuple[float, bool]]:
    """As lm_eval.models.openai_completions.LocalCompletionsAPI.parse_logprobs."""
    found = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, context_lengths, strict=True):
        assert length > 0, "Context length must be greater than 0"
        logprobs = sum(choice["logprobs"]["token_logprobs"][length:-1])
        tokens = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True))
        found.append((logprobs, is_greedy))
    return found


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=BASE.rstrip("/") + "/v1", api_key=KEY, max_retries=0, timeout=120)
    text, ids = ASKED["text"], ASKED["ids"]
    scored: dict[str, Any] = {"echo": True, "logprobs": 5}
    messages: list[Any] = [{"role": "user", "content": text}]
    keyed = {"extra_headers": {"Idempotency-Key": ASKED["key"]}}
    chat = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=3, temperature=0, extra_body={"prompt_logprobs": 2}
    )
    result = {
        "whole": await whole(client, prompt=text, max_tokens=6, **scored),
        "streamed": await streamed(client, prompt=text, max_tokens=6, **scored),
        "zero": await whole(client, prompt=ids, max_tokens=0, **scored),
        "zero_streamed": await streamed(client, prompt=ids, max_tokens=0, **scored),
        "zero_plain": await whole(client, prompt=text, max_tokens=0, echo=True),
        "texts": await whole(client, prompt=[text, "def ", "x = 1"], n=2, max_tokens=4, seed=3, **scored),
        "lists": await whole(client, prompt=[ids, ids[:5]], max_tokens=2, **scored),
        "plain": await whole(client, prompt=text, max_tokens=4, echo=True),
        "plain_ids": await whole(client, prompt=ids, max_tokens=4, echo=True),
        "silent": await whole(client, prompt=text, max_tokens=4),
        "vllm": await whole(client, prompt=ids, max_tokens=2, extra_body={"prompt_logprobs": 3}),
        "chat": chat.model_dump(),
        "keyed": [await whole(client, prompt=ids, max_tokens=0, **scored, **keyed) for _ in range(2)],
        "refused": {
            "nothing": await refused(whole(client, prompt=text, max_tokens=0)),
            "many": await refused(whole(client, prompt=text, n=128, echo=True, logprobs=21)),
            "stream": await refused(streamed(client, prompt=text, extra_body={"prompt_logprobs": 1})),
        },
        "loglikelihoods": await loglikelihoods(client, ASKED["pairs"]),
    }
    await client.close()
    print(json.dumps(result))


asyncio.run(main())
