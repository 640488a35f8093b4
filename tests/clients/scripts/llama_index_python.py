"""The features of LlamaIndex: its LLM and embeddings for servers that are like OpenAI's.

Without postponed annotations: LlamaIndex reads the types of a tool from its function.
"""

import asyncio
from typing import Any, Literal

import openai
from harness import PROMPT, QUESTION, TARGET, Features, check, limited, raised, same
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

FEATURES = Features()
ASKED = [ChatMessage(role="user", content=QUESTION)]
CALLED: list[str] = []


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Oslo", "Rome"]
    days: Literal[1, 2, 3]


def get_weather(city: Literal["Bern", "Oslo", "Rome"]) -> str:
    """The weather of a city."""
    CALLED.append(city)
    return "7 degrees"


def llm(**options: Any) -> Any:
    asked = {"model": TARGET.model, "temperature": 0, "max_tokens": 16, "max_retries": 0, "timeout": 60}
    at = {"api_base": TARGET.v1, "api_key": TARGET.key, "is_chat_model": True, "context_window": 1024}
    return OpenAILike(**{**at, **asked, **options})


def caller(**options: Any) -> Any:
    # A small model that must call goes on calling.
    further = {"parallel_tool_calls": False}
    asked = {"model": TARGET.agent, "max_tokens": 160, "is_function_calling_model": True}
    return llm(**asked, additional_kwargs=further, **options)


@FEATURES.shows("completion")
def completion() -> None:
    check(llm(is_chat_model=False).complete(PROMPT).text, "no text")
    check("".join(part.delta or "" for part in llm(is_chat_model=False).stream_complete(PROMPT)), "no stream")


@FEATURES.shows("chat")
def chat() -> None:
    answer = llm().chat(ASKED)
    check(answer.message.content and answer.raw.usage.completion_tokens > 0, answer)


@FEATURES.shows("chat_stream")
def chat_stream() -> None:
    whole = llm().chat(ASKED).message.content
    same("".join(part.delta or "" for part in llm().stream_chat(ASKED)), whole)


@FEATURES.shows("stop")
def stop() -> None:
    whole = llm().chat(ASKED).message.content
    same(llm().chat(ASKED, stop=[whole[3:6]]).message.content, whole.split(whole[3:6])[0])


@FEATURES.shows("tool_call")
def tool_call() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    model = caller()
    answer = model.chat_with_tools([tool], user_msg="Weather?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    check(call.tool_kwargs["city"] in ("Bern", "Oslo", "Rome"), call)


@FEATURES.shows("tool_stream")
def tool_stream() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    model = caller()
    last = None
    for part in model.stream_chat_with_tools([tool], user_msg="Weather?", tool_required=True):
        last = part
    (call,) = model.get_tool_calls_from_response(last)
    check(call.tool_kwargs["city"] in ("Bern", "Oslo", "Rome"), call)


@FEATURES.shows("tool_result")
def tool_result() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    model = caller()
    made = model.chat_with_tools([tool], user_msg="Weather?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(made)
    result = ChatMessage(role="tool", content="7 degrees", additional_kwargs={"tool_call_id": call.tool_id})
    turns = [ChatMessage(role="user", content="Weather?"), made.message, result]
    after = model.chat_with_tools([tool], chat_history=turns)
    check(after.message.content is not None, after)


@FEATURES.shows("agent_stream")
async def agent_stream() -> None:
    """The model may answer without a call; what the workflow sends and reads is that of agents."""
    agent = FunctionAgent(tools=[get_weather], llm=caller(), system_prompt="Be brief.")
    check(str(await agent.run("Weather?")) is not None, "no answer")


@FEATURES.shows("typed_output")
def typed_output() -> None:
    found = caller().as_structured_llm(Weather).chat(ASKED).raw
    check(isinstance(found, Weather), found)


@FEATURES.shows("json_schema")
def json_schema() -> None:
    model = llm(model=TARGET.agent, max_tokens=160, should_use_structured_outputs=True)
    found = model.as_structured_llm(Weather).chat(ASKED).raw
    check(isinstance(found, Weather), found)


def embedding() -> Any:
    return OpenAILikeEmbedding(model_name=TARGET.embedder, api_base=TARGET.v1, api_key=TARGET.key)


@FEATURES.shows("embeddings")
def embeddings() -> None:
    same(len(embedding().get_text_embedding("the fox")), 24)
    same([len(vector) for vector in embedding().get_text_embedding_batch(["the fox", "a dog"])], [24, 24])


@FEATURES.shows("agent_loop")
def agent_loop() -> None:
    """Its loop of retrieval: texts are embedded, found by a question, and sent with it."""
    documents = [Document(text="the quick brown fox"), Document(text="the lazy dog")]
    index = VectorStoreIndex.from_documents(documents, embed_model=embedding())
    answer = index.as_query_engine(llm=llm()).query("fox")
    check(str(answer) and answer.source_nodes, answer)


@FEATURES.shows("async_client")
async def async_client() -> None:
    model = llm()
    answers = await asyncio.gather(*(model.achat(ASKED) for _ in range(8)))
    same(len({answer.message.content for answer in answers}), 1)


@FEATURES.shows("error_401")
def error_401() -> None:
    raised(openai.AuthenticationError, lambda: llm(api_key="wrong").chat(ASKED))


@FEATURES.shows("error_404")
def error_404() -> None:
    raised(openai.NotFoundError, lambda: llm(model="nope").chat(ASKED))


@FEATURES.shows("error_400")
def error_400() -> None:
    same(
        raised(openai.BadRequestError, lambda: llm(temperature=1.9, top_p=2).chat(ASKED, top_p=2)).param,
        "top_p",
    )


@FEATURES.shows("error_429")
def error_429() -> None:
    limited(lambda: llm(api_key=TARGET.limited_key).chat(ASKED), openai.RateLimitError)


FEATURES.run()
