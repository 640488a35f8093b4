"""The features of LangChain's classes for OpenAI: chat, completion, embeddings."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from harness import PROMPT, QUESTION, TARGET, WEATHER, Features, check, is_weather, limited, raised, same
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

FEATURES = Features()


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


@tool(args_schema=Weather)  # type: ignore[untyped-decorator]
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{city}: {days} degrees"


def chat_model(**options: Any) -> Any:
    asked = {"model": TARGET.model, "temperature": 0, "max_tokens": 16, "max_retries": 0, "timeout": 60}
    return ChatOpenAI(**{"base_url": TARGET.v1, "api_key": TARGET.key, **asked, **options})


def calling() -> Any:
    """Return a model that must call the tool; a small one would go on calling."""
    model = chat_model(model=TARGET.agent, max_tokens=160)
    return model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)


@FEATURES.shows("completion")
def completion() -> None:
    model: Any = OpenAI(
        model=TARGET.model, base_url=TARGET.v1, api_key=TARGET.key, max_tokens=16, max_retries=0
    )
    check(model.invoke(PROMPT), "no text")
    check("".join(model.stream(PROMPT)), "no stream")


@FEATURES.shows("chat")
def chat() -> None:
    answer = chat_model().invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    check(answer.content and answer.usage_metadata["output_tokens"] > 0, answer)


@FEATURES.shows("chat_stream")
def chat_stream() -> None:
    whole = chat_model().invoke(QUESTION).content
    same("".join(chunk.content for chunk in chat_model().stream(QUESTION)), whole)


@FEATURES.shows("stream_usage")
def stream_usage() -> None:
    chunks = list(chat_model(stream_usage=True).stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    same(total.usage_metadata, chat_model().invoke(QUESTION).usage_metadata)


@FEATURES.shows("choices")
def choices() -> None:
    found = chat_model(n=2, temperature=1).generate([[HumanMessage(QUESTION)]])
    same(len(found.generations[0]), 2)


@FEATURES.shows("stop")
def stop() -> None:
    whole = chat_model().invoke(QUESTION).content
    same(chat_model().invoke(QUESTION, stop=[whole[3:6]]).content, whole.split(whole[3:6])[0])


@FEATURES.shows("logprobs")
def logprobs() -> None:
    answer = chat_model(logprobs=True, top_logprobs=2).invoke(QUESTION)
    check(answer.response_metadata["logprobs"]["content"], answer)


@FEATURES.shows("json_object")
def json_object() -> None:
    model = chat_model(max_tokens=200).bind(response_format={"type": "json_object"})
    check(model.invoke(QUESTION).content.startswith("{"), "no object")


@FEATURES.shows("typed_output")
def typed_output() -> None:
    for method in ("json_schema", "function_calling"):
        model = chat_model(model=TARGET.agent, max_tokens=160)
        found = model.with_structured_output(Weather, method=method).invoke(QUESTION)
        check(isinstance(found, Weather), found)


@FEATURES.shows("json_schema")
def json_schema() -> None:
    found = chat_model(max_tokens=64).with_structured_output(
        {"title": "weather", **WEATHER}, method="json_schema", strict=True
    )
    is_weather(found.invoke(QUESTION))


@FEATURES.shows("tool_call")
def tool_call() -> None:
    (call,) = calling().invoke("Weather?").tool_calls
    same(call["name"], "get_weather")
    is_weather(call["args"])


@FEATURES.shows("tool_stream")
def tool_stream() -> None:
    total: AIMessageChunk | None = None
    for chunk in calling().stream("Weather?"):
        total = chunk if total is None else total + chunk
    check(total is not None and total.tool_calls, total)
    is_weather(total.tool_calls[0]["args"] if total else None)


@FEATURES.shows("tool_result")
def tool_result() -> None:
    made = calling().invoke("Weather?")
    result: ToolMessage = get_weather.invoke(made.tool_calls[0])
    model = chat_model(model=TARGET.agent).bind_tools([get_weather])
    answer = model.invoke([HumanMessage("Weather?"), made, result])
    check(answer.content, answer)


@FEATURES.shows("responses")
def responses() -> None:
    answer = chat_model(use_responses_api=True).invoke(QUESTION)
    check(answer.text, answer)
    streamed = "".join(chunk.text for chunk in chat_model(use_responses_api=True).stream(QUESTION))
    same(streamed, answer.text)


@FEATURES.shows("responses_chain")
def responses_chain() -> None:
    model = chat_model(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke(QUESTION)
    second = model.invoke([HumanMessage(QUESTION), first, HumanMessage("and")])
    check(second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"], second)


@FEATURES.shows("responses_tools")
def responses_tools() -> None:
    model = chat_model(model=TARGET.agent, max_tokens=160, use_responses_api=True)
    bound = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False, strict=True)
    made = bound.invoke("Weather?")
    is_weather(made.tool_calls[0]["args"])
    result = get_weather.invoke(made.tool_calls[0])
    after = chat_model(model=TARGET.agent, use_responses_api=True).bind_tools([get_weather])
    check(after.invoke([HumanMessage("Weather?"), made, result]).content, "no answer")


@FEATURES.shows("reasoning")
def reasoning() -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = chat_model(model=TARGET.agent, extra_body=extra).invoke(QUESTION)
    # The class leaves reasoning out of chat completions; it may not stand in the content.
    same(answer.content, "")
    check(answer.usage_metadata["output_tokens"] > 0, answer)


@FEATURES.shows("responses_hints")
def responses_hints() -> None:
    hints = {"reasoning": {"effort": "low", "summary": "auto"}, "verbosity": "low", "store": False}
    further = {"include": ["reasoning.encrypted_content"], "output_version": "responses/v1"}
    model = chat_model(use_responses_api=True, **hints, **further)
    first = model.invoke(QUESTION)
    check(first.text and model.invoke([HumanMessage(QUESTION), first, HumanMessage("and")]).text, first)


@FEATURES.shows("images", "content[1].type")
def images() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    chat_model().invoke([HumanMessage([{"type": "text", "text": "What is it?"}, image])])


@FEATURES.shows("embeddings")
def embeddings() -> None:
    plain = OpenAIEmbeddings(
        model=TARGET.embedder,
        base_url=TARGET.v1,
        api_key=TARGET.key,
        check_embedding_ctx_length=False,  # else it sends ids of OpenAI's own tokenizer
    )
    same([len(vector) for vector in plain.embed_documents(["the fox", "a dog"])], [24, 24])
    same(len(plain.embed_query("fox")), 24)


@FEATURES.shows("async_client")
async def async_client() -> None:
    answers = await asyncio.gather(*(chat_model().ainvoke(QUESTION) for _ in range(8)))
    same(len({answer.content for answer in answers}), 1)
    check([chunk async for chunk in chat_model().astream(QUESTION)], "no stream")


@FEATURES.shows("error_401")
def error_401() -> None:
    raised(openai.AuthenticationError, lambda: chat_model(api_key="wrong").invoke(QUESTION))


@FEATURES.shows("error_404")
def error_404() -> None:
    raised(openai.NotFoundError, lambda: chat_model(model="nope").invoke(QUESTION))


@FEATURES.shows("error_400")
def error_400() -> None:
    error = raised(openai.BadRequestError, lambda: chat_model(temperature=9).invoke(QUESTION))
    check("temperature" in str(error), str(error))
    raised(ContextOverflowError, lambda: chat_model().invoke("word " * 5000))


@FEATURES.shows("error_429")
def error_429() -> None:
    limited(lambda: chat_model(api_key=TARGET.limited_key).invoke(QUESTION), openai.RateLimitError)


@FEATURES.shows("retry")
def retry() -> None:
    for _ in range(3):
        check(chat_model(api_key=TARGET.paced_key, max_retries=4).invoke(QUESTION), "no answer")


@FEATURES.shows("timeout")
def timeout() -> None:
    model = chat_model(timeout=0.2, max_tokens=900, extra_body={"ignore_eos": True})
    raised(openai.APITimeoutError, lambda: model.invoke(QUESTION))


FEATURES.run()
