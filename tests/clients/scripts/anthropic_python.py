"""The features of Anthropic's SDK for Python."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, Literal

import anthropic
from harness import QUESTION, TARGET, WEATHER, Features, check, is_weather, limited, raised, same
from pydantic import BaseModel, ConfigDict, Field

FEATURES = Features()
CLIENT = anthropic.Anthropic(base_url=TARGET.url, api_key=TARGET.key, max_retries=0, timeout=60)
GREEDY: dict[str, Any] = {"temperature": 0}  # no parameter of this SDK
ASKED: dict[str, Any] = {
    "model": TARGET.model,
    "max_tokens": 16,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": GREEDY,
}
CALLING: dict[str, Any] = {
    **ASKED,
    "model": TARGET.agent,
    "max_tokens": 160,
    "tools": [{"name": "get_weather", "description": "The weather of a city.", "input_schema": WEATHER}],
    # A small model that must call goes on calling.
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Bern", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


@FEATURES.shows("models")
def models() -> None:
    names = [model.id for model in CLIENT.models.list()]
    check(TARGET.model in names, names)
    same(CLIENT.models.retrieve(TARGET.model).id, TARGET.model)


@FEATURES.shows("messages")
def messages() -> None:
    answer = CLIENT.messages.create(**ASKED, system="Be brief.")
    check(answer.content[0].text and answer.usage.output_tokens > 0, answer)
    same([answer.role, answer.stop_reason in ("max_tokens", "end_turn")], ["assistant", True])
    check(answer._request_id, "no request id")


@FEATURES.shows("messages_stream")
def messages_stream() -> None:
    whole = CLIENT.messages.create(**ASKED)
    events = [event.type for event in CLIENT.messages.create(**ASKED, stream=True)]
    same([events[0], events[-1]], ["message_start", "message_stop"])
    with CLIENT.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    same([text, final.usage.output_tokens], [whole.content[0].text, whole.usage.output_tokens])


@FEATURES.shows("messages_tools")
def messages_tools() -> None:
    answer = CLIENT.messages.create(**CALLING)
    same(answer.stop_reason, "tool_use")
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    is_weather(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees"}
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    after = CLIENT.messages.create(
        **{**CALLING, "messages": turns, "tool_choice": {"type": "auto"}, "max_tokens": 24}
    )
    check(after.content, after)


@FEATURES.shows("tool_stream")
def tool_stream() -> None:
    with CLIENT.messages.stream(**CALLING) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    is_weather(call.input)
    is_weather("".join(pieces))


@FEATURES.shows("messages_thinking")
def messages_thinking() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = {**ASKED, "model": TARGET.agent, "thinking": thinking, "max_tokens": 32}
    with CLIENT.messages.stream(**asked) as stream:
        deltas = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    same([final.content[0].type, final.content[0].thinking], ["thinking", "".join(deltas)])
    check(deltas, final)
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": [*final.content, {"type": "text", "text": "c"}]},
    ]
    turns += ASKED["messages"]
    adaptive = {**asked, "messages": turns, "thinking": {"type": "adaptive"}}
    check(CLIENT.messages.create(**adaptive).content, adaptive)


@FEATURES.shows("messages_schema")
def messages_schema() -> None:
    form = {"format": {"type": "json_schema", "schema": WEATHER}}
    answer = CLIENT.messages.create(**{**ASKED, "max_tokens": 64}, output_config=form)
    is_weather(answer.content[0].text)


@FEATURES.shows("typed_output")
def typed_output() -> None:
    found = CLIENT.messages.parse(**{**ASKED, "max_tokens": 64}, output_format=Weather)
    check(isinstance(found.parsed_output, Weather), found)


@FEATURES.shows("agent_loop")
def agent_loop() -> None:
    called: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(city: Literal["Bern", "Oslo", "Rome"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "7 degrees"

    asked = {**CALLING, "tools": [get_weather]}
    runner = CLIENT.beta.messages.tool_runner(**asked, max_iterations=2)
    turns = list(runner)
    check(called and len(turns) == 2, [called, turns])


@FEATURES.shows("other_apis", "/v1/messages/batches")
def other_apis() -> None:
    CLIENT.messages.batches.list()


@FEATURES.shows("count_tokens")
def count_tokens() -> None:
    bare = CLIENT.messages.count_tokens(model=TARGET.model, messages=ASKED["messages"])
    more = CLIENT.messages.count_tokens(model=TARGET.model, messages=ASKED["messages"], system="Be brief.")
    check(0 < bare.input_tokens < more.input_tokens, [bare, more])


@FEATURES.shows("stop")
def stop() -> None:
    whole = CLIENT.messages.create(**ASKED).content[0].text
    answer = CLIENT.messages.create(**ASKED, stop_sequences=[whole[3:6]])
    same([answer.stop_reason, answer.stop_sequence], ["stop_sequence", whole[3:6]])


@FEATURES.shows("hints")
def hints() -> None:
    cached: Any = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    turns: list[Any] = [{"role": "user", "content": [cached]}]
    hinted = CLIENT.messages.create(
        **{**ASKED, "messages": turns}, metadata={"user_id": "someone"}, service_tier="auto"
    )
    same(hinted.content[0].text, CLIENT.messages.create(**ASKED).content[0].text)


@FEATURES.shows("prefill", "messages[1]", "assistant")
def prefill() -> None:
    turns = [*ASKED["messages"], {"role": "assistant", "content": "def"}]
    check(CLIENT.messages.create(**{**ASKED, "messages": turns}).content, turns)


@FEATURES.shows("images", "messages[0].content[0]")
def images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    turns: list[Any] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    CLIENT.messages.create(**{**ASKED, "messages": turns})


@FEATURES.shows("server_tools", "tools[0].type")
def server_tools() -> None:
    CLIENT.messages.create(**ASKED, tools=[{"type": "code_execution_20250825", "name": "code_execution"}])


@FEATURES.shows("left_out")
def left_out() -> None:
    found = CLIENT.messages.create(**ASKED, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    check(found.content[0].text, found)


@FEATURES.shows("async_client")
async def async_client() -> None:
    async with anthropic.AsyncAnthropic(base_url=TARGET.url, api_key=TARGET.key, max_retries=0) as client:
        answers = await asyncio.gather(*(client.messages.create(**ASKED) for _ in range(8)))
    same(len({answer.content[0].text for answer in answers}), 1)


@FEATURES.shows("error_401")
def error_401() -> None:
    client = CLIENT.with_options(api_key="wrong")
    error = raised(anthropic.AuthenticationError, lambda: client.messages.create(**ASKED))
    same(error.body["error"]["type"], "authentication_error")


@FEATURES.shows("error_404")
def error_404() -> None:
    error = raised(anthropic.NotFoundError, lambda: CLIENT.messages.create(**{**ASKED, "model": "nope"}))
    check("nope" in str(error), str(error))


@FEATURES.shows("error_400")
def error_400() -> None:
    for field, value in (("temperature", 9), ("max_tokenz", 1)):
        call = partial(CLIENT.messages.create, **{**ASKED, "extra_body": {field: value}})
        error = raised(anthropic.BadRequestError, call)
        check(field in str(error), str(error))


@FEATURES.shows("error_429")
def error_429() -> None:
    client = CLIENT.with_options(api_key=TARGET.limited_key)
    error = limited(lambda: client.messages.create(**ASKED), anthropic.RateLimitError)
    check(int(error.response.headers["retry-after"]) > 0, dict(error.response.headers))


@FEATURES.shows("retry")
def retry() -> None:
    client = CLIENT.with_options(api_key=TARGET.paced_key, max_retries=4)
    for _ in range(3):
        check(client.messages.create(**ASKED).content, "no answer")


@FEATURES.shows("timeout")
def timeout() -> None:
    long = {**ASKED, "max_tokens": 900}
    raised(anthropic.APITimeoutError, lambda: CLIENT.with_options(timeout=0.03).messages.create(**long))


@FEATURES.shows("cancel")
def cancel() -> None:
    long = {**ASKED, "max_tokens": 900}
    with CLIENT.messages.stream(**long) as stream:
        check(next(iter(stream.text_stream)), "no text")


@FEATURES.shows("idempotency")
def idempotency() -> None:
    asked = {
        **ASKED,
        "extra_body": {"temperature": 1},
        "extra_headers": {"idempotency-key": str(time.time_ns())},
    }
    first, again = (CLIENT.messages.create(**asked) for _ in range(2))
    same([again.id, again.content[0].text], [first.id, first.content[0].text])


FEATURES.run()
