"""The features of pydantic-ai over its models of chat completions, Responses and Messages."""

from __future__ import annotations

from typing import Any, Literal

from anthropic import AsyncAnthropic
from harness import QUESTION, TARGET, Features, check, raised, same, status_of
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

FEATURES = Features()
# A small model that must call goes on calling.
SETTINGS: Any = {"temperature": 0, "max_tokens": 96, "parallel_tool_calls": False}
BRIEF: Any = {**SETTINGS, "max_tokens": 16}
Kind = Literal["chat", "responses", "messages"]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


def model(kind: Kind = "chat", name: str = TARGET.agent, key: str = TARGET.key) -> Any:
    if kind == "messages":
        anthropic = AsyncAnthropic(base_url=TARGET.url, api_key=key, max_retries=0)
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=anthropic))
    openai = AsyncOpenAI(base_url=TARGET.v1, api_key=key, max_retries=0)
    provider = OpenAIProvider(openai_client=openai)
    return (OpenAIResponsesModel if kind == "responses" else OpenAIChatModel)(name, provider=provider)


def agent(kind: Kind = "chat", **options: Any) -> Any:
    return Agent(model(kind), model_settings=SETTINGS, **options)


def brief(kind: Kind) -> None:
    answer = agent(kind, instructions="Be brief.").run_sync(QUESTION, model_settings=BRIEF)
    check(answer.output and answer.usage.output_tokens > 0, answer)


@FEATURES.shows("chat")
def chat() -> None:
    brief("chat")


@FEATURES.shows("responses")
def responses() -> None:
    brief("responses")


@FEATURES.shows("messages")
def messages() -> None:
    brief("messages")


async def streamed(kind: Kind) -> None:
    async with agent(kind).run_stream(QUESTION, model_settings=BRIEF) as run:
        texts = [text async for text in run.stream_text(delta=True)]
        check("".join(texts) and run.usage.output_tokens > 0, texts)


@FEATURES.shows("chat_stream")
async def chat_stream() -> None:
    await streamed("chat")


@FEATURES.shows("responses_stream")
async def responses_stream() -> None:
    await streamed("responses")


@FEATURES.shows("messages_stream")
async def messages_stream() -> None:
    await streamed("messages")


def typed(kind: Kind, output: Any) -> None:
    found = agent(kind, output_type=output).run_sync(QUESTION).output
    check(isinstance(found, Weather), found)


@FEATURES.shows("typed_output")
def typed_output() -> None:
    typed("chat", ToolOutput(Weather))


@FEATURES.shows("json_schema")
def json_schema() -> None:
    typed("chat", NativeOutput(Weather))


@FEATURES.shows("responses_schema")
def responses_schema() -> None:
    typed("responses", NativeOutput(Weather))
    typed("responses", ToolOutput(Weather))


@FEATURES.shows("messages_tools")
def messages_tools() -> None:
    typed("messages", ToolOutput(Weather))


@FEATURES.shows("typed_stream")
async def typed_stream() -> None:
    async with agent(output_type=ToolOutput(Weather)).run_stream(QUESTION) as run:
        found = [part async for part in run.stream_output()]
    check(isinstance(found[-1], Weather), found)


def loop(kind: Kind) -> None:
    """Call a tool, and answer by the output tool: the model must call, and its call is replayed."""
    runner = agent(kind, output_type=ToolOutput(Weather), retries=3)
    first = runner.run_sync("Weather?")
    second = runner.run_sync("And?", message_history=first.all_messages())
    check(isinstance(second.output, Weather), second.output)
    returned = [
        part for turn in second.all_messages() for part in turn.parts if isinstance(part, ToolReturnPart)
    ]
    check(len(returned) == 2, returned)


@FEATURES.shows("agent_loop")
def agent_loop() -> None:
    loop("chat")


@FEATURES.shows("responses_chain")
def responses_chain() -> None:
    loop("responses")


@FEATURES.shows("images", "content[1].type")
def images() -> None:
    agent().run_sync(["What is it?", BinaryContent(b"hi", media_type="image/png")])


@FEATURES.shows("embeddings")
def embeddings() -> None:
    openai = AsyncOpenAI(base_url=TARGET.v1, api_key=TARGET.key, max_retries=0)
    provider = OpenAIProvider(openai_client=openai)
    found = Embedder(OpenAIEmbeddingModel(TARGET.embedder, provider=provider)).embed_documents_sync(
        ["the fox"]
    )
    same(len(found.embeddings[0]), 24)


def failure(**options: Any) -> Any:
    return raised(ModelHTTPError, lambda: Agent(model(**options)).run_sync(QUESTION, model_settings=BRIEF))


@FEATURES.shows("error_401")
def error_401() -> None:
    same(status_of(failure(key="wrong")), 401)


@FEATURES.shows("error_404")
def error_404() -> None:
    error = failure(name="nope")
    same(status_of(error), 404)
    check("nope" in str(error), str(error))


@FEATURES.shows("error_429")
def error_429() -> None:
    def call() -> None:
        for _ in range(5):
            Agent(model(key=TARGET.limited_key)).run_sync(QUESTION, model_settings=BRIEF)

    same(status_of(raised(ModelHTTPError, call)), 429)


FEATURES.run()
