"""The features of the OpenAI Agents SDK over Responses and chat completions."""

from __future__ import annotations

from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded
from harness import QUESTION, TARGET, Features, check, raised
from pydantic import BaseModel

FEATURES = Features()
set_tracing_disabled(True)
CALLED: list[str] = []


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo", "Rome"]
    days: Literal[1, 2, 3]


@function_tool  # type: ignore[untyped-decorator]
def get_weather(city: Literal["Bern", "Oslo", "Rome"]) -> str:
    """The weather of a city."""
    CALLED.append(city)
    return "7 degrees"


def model(kind: Any, key: str = TARGET.key, name: str = TARGET.agent) -> Any:
    client = openai.AsyncOpenAI(base_url=TARGET.v1, api_key=key, max_retries=0, timeout=60)
    return kind(name, openai_client=client)


def settings(**options: Any) -> ModelSettings:
    # A small model goes on writing, and the SDK takes complete responses only. No call has these in it.
    ends = {"stop": ["(", ")", ".", "="]}
    return ModelSettings(temperature=0, max_tokens=160, extra_body=ends, **options)


def caller(kind: Any, **options: Any) -> Any:
    # A small model that must call goes on calling.
    asked = settings(tool_choice="required", parallel_tool_calls=False)
    return Agent("caller", model=model(kind), model_settings=asked, tools=[get_weather], **options)


async def brief(kind: Any) -> None:
    agent: Any = Agent("brief", instructions="Be brief.", model=model(kind), model_settings=settings())
    found = await Runner.run(agent, QUESTION)
    check(found.final_output, found)
    streamed = Runner.run_streamed(agent, QUESTION)
    types = [event.type async for event in streamed.stream_events()]
    check("raw_response_event" in types and streamed.final_output == found.final_output, types)


@FEATURES.shows("responses_stream")
async def responses_stream() -> None:
    await brief(OpenAIResponsesModel)


@FEATURES.shows("chat_stream")
async def chat_stream() -> None:
    await brief(OpenAIChatCompletionsModel)


async def tools(kind: Any, *, stream: bool = False) -> None:
    """Call the tool once, send its result, and return the answer: the SDK resets the choice itself."""
    CALLED.clear()
    if stream:
        streamed = Runner.run_streamed(caller(kind), "Weather?", max_turns=4)
        names = [
            event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"
        ]
        check({"tool_called", "tool_output"} <= set(names), names)
        output = streamed.final_output
    else:
        output = (await Runner.run(caller(kind), "Weather?", max_turns=4)).final_output
    check(CALLED and output is not None, [CALLED, output])


@FEATURES.shows("responses_tools")
async def responses_tools() -> None:
    await tools(OpenAIResponsesModel)


@FEATURES.shows("agent_loop")
async def agent_loop() -> None:
    await tools(OpenAIChatCompletionsModel)


@FEATURES.shows("agent_stream")
async def agent_stream() -> None:
    await tools(OpenAIChatCompletionsModel, stream=True)
    await tools(OpenAIResponsesModel, stream=True)


async def typed(kind: Any) -> None:
    agent: Any = Agent("typed", model=model(kind), model_settings=settings(), output_type=Weather)
    found = await Runner.run(agent, QUESTION)
    check(isinstance(found.final_output, Weather), found)


@FEATURES.shows("responses_schema")
async def responses_schema() -> None:
    await typed(OpenAIResponsesModel)


@FEATURES.shows("typed_output")
async def typed_output() -> None:
    await typed(OpenAIChatCompletionsModel)


@FEATURES.shows("responses_chain")
async def responses_chain() -> None:
    agent: Any = Agent("chain", model=model(OpenAIResponsesModel), model_settings=settings(store=True))
    first = await Runner.run(agent, QUESTION)
    second = await Runner.run(agent, "and", previous_response_id=first.last_response_id)
    check(second.final_output is not None, second)
    replayed = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "and"}])
    check(replayed.final_output is not None, replayed)


@FEATURES.shows("tool_result")
async def tool_result() -> None:
    """A handoff is a tool whose result is the history that the next agent receives."""
    asked = settings(tool_choice="required", parallel_tool_calls=False)
    last: Any = Agent("last", model=model(OpenAIChatCompletionsModel), model_settings=settings())
    first: Any = Agent(
        "first",
        model=model(OpenAIChatCompletionsModel),
        model_settings=asked,
        handoffs=[handoff(last)],
    )
    found = await Runner.run(first, QUESTION, max_turns=4)
    check(found.last_agent.name == "last" and found.final_output is not None, found)


@FEATURES.shows("error_401")
async def error_401() -> None:
    await fails(openai.AuthenticationError, key="wrong")


@FEATURES.shows("error_404")
async def error_404() -> None:
    await fails(openai.NotFoundError, name="nope")


@FEATURES.shows("error_429")
async def error_429() -> None:
    await fails(openai.RateLimitError, key=TARGET.limited_key)


async def fails(kind: type[Exception], **options: Any) -> None:
    agent: Any = Agent("fails", model=model(OpenAIResponsesModel, **options), model_settings=settings())
    for _ in range(5):
        try:
            await Runner.run(agent, "x")
        except kind:
            return
    check(False, f"no {kind.__name__}")


@FEATURES.shows("error_400")
def error_400() -> None:
    agent: Any = Agent(
        "warm", model=model(OpenAIResponsesModel), model_settings=ModelSettings(temperature=9, max_tokens=4)
    )
    error = raised(openai.BadRequestError, lambda: Runner.run_sync(agent, "x"))
    check(error.param == "temperature", str(error))


@FEATURES.shows("cancel")
async def cancel() -> None:
    """A run whose tool is required each time is stopped by the SDK's own bound of turns."""
    agent = caller(OpenAIResponsesModel, reset_tool_choice=False)
    try:
        await Runner.run(agent, "Weather?", max_turns=2)
    except MaxTurnsExceeded:
        return
    check(False, "it ended")


FEATURES.run()
