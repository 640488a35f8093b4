"""The features of instructor: typed outputs in its modes."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from harness import QUESTION, TARGET, Features, check, limited, raised, same
from pydantic import BaseModel, ConfigDict, Field

FEATURES = Features()
SDK = openai.OpenAI(base_url=TARGET.v1, api_key=TARGET.key, max_retries=0, timeout=60)
ASKED: dict[str, Any] = {
    "model": TARGET.agent,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 160,
    "temperature": 0,
    "max_retries": 0,
}


class Weather(BaseModel):
    """The weather of a city. A small model that may add properties goes on adding them."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Bern", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


class Digit(BaseModel):
    model_config = ConfigDict(extra="forbid")

    digit: Literal[1, 2, 3]


def client(mode: instructor.Mode, sdk: Any = SDK) -> Any:
    return instructor.from_openai(sdk, mode=mode)


def typed(mode: instructor.Mode, **options: Any) -> None:
    found = client(mode).chat.completions.create(**ASKED, response_model=Weather, **options)
    check(isinstance(found, Weather), found)


@FEATURES.shows("tool_call")
def tool_call() -> None:
    typed(instructor.Mode.TOOLS)


@FEATURES.shows("json_schema")
def json_schema() -> None:
    typed(instructor.Mode.JSON_SCHEMA)


@FEATURES.shows("typed_output")
def typed_output() -> None:
    for kind in (Weather, Digit):
        found = client(instructor.Mode.TOOLS).chat.completions.create(**ASKED, response_model=kind)
        check(isinstance(found, kind), found)


@FEATURES.shows("chat")
def chat() -> None:
    found, raw = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_with_completion(
        **ASKED, response_model=Weather
    )
    check(isinstance(found, Weather) and raw.usage.completion_tokens > 0, raw)
    plain = client(instructor.Mode.TOOLS).chat.completions.create(
        **{**ASKED, "max_tokens": 16}, response_model=None
    )
    check(plain.choices[0].message.content, plain)


@FEATURES.shows("typed_stream")
def typed_stream() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        parts = list(client(mode).chat.completions.create_partial(**ASKED, response_model=Weather))
        check(parts and Weather.model_validate(parts[-1].model_dump()), parts)


@FEATURES.shows("responses_tools")
def responses_tools() -> None:
    asked: dict[str, Any] = {"model": TARGET.agent, "input": QUESTION, "max_output_tokens": 160}
    found = client(instructor.Mode.RESPONSES_TOOLS).responses.create(**asked, response_model=Weather)
    check(isinstance(found, Weather), found)


@FEATURES.shows("async_client")
async def async_client() -> None:
    async with openai.AsyncOpenAI(base_url=TARGET.v1, api_key=TARGET.key, max_retries=0) as sdk:
        found = await client(instructor.Mode.TOOLS, sdk).chat.completions.create(
            **ASKED, response_model=Weather
        )
    check(isinstance(found, Weather), found)


@FEATURES.shows("error_401")
def error_401() -> None:
    error = failure(SDK.with_options(api_key="wrong"))
    check("401" in error or "Authentication" in error, error)


@FEATURES.shows("error_404")
def error_404() -> None:
    error = failure(SDK, model="nope")
    check("nope" in error, error)


@FEATURES.shows("error_429")
def error_429() -> None:
    sdk = SDK.with_options(api_key=TARGET.limited_key)
    plain: dict[str, Any] = {"model": TARGET.model, "messages": ASKED["messages"], "max_tokens": 4}
    limited(lambda: sdk.chat.completions.create(**plain), openai.RateLimitError)
    error = failure(sdk)
    check("429" in error or "RateLimit" in error or "per minute" in error, error)


def failure(sdk: openai.OpenAI, **options: Any) -> str:
    def call() -> Any:
        return client(instructor.Mode.TOOLS, sdk).create(**{**ASKED, **options}, response_model=Weather)

    error = raised(Exception, call)
    return f"{type(error).__name__}: {error}"


@FEATURES.shows("images", "content[1].type")
def images() -> None:
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    found = client(instructor.Mode.TOOLS).chat.completions.create(
        **{**ASKED, "messages": turns}, response_model=Digit
    )
    same(type(found), Digit)


FEATURES.run()
