"""The features of LiteLLM's proxy before the installation, called by the OpenAI SDK and by HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
from harness import PROMPT, QUESTION, TARGET, TOOL, WEATHER, Features, check, is_weather, raised, same

FEATURES = Features()
READY_S = 240.0
KEY = "sk-proxy-0123456789"
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
URL = f"http://127.0.0.1:{PORT}"
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
HTTP = httpx.Client(base_url=URL, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
CHAT: dict[str, Any] = {
    "model": "bundled",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 16,
    "temperature": 0,
}
CALLING: dict[str, Any] = {
    **CHAT,
    "model": "agent",
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,  # a small model that must call goes on calling
    "max_tokens": 160,
}


def entry(name: str, model: str, base: str = TARGET.v1, key: str = TARGET.key) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": model, "api_base": base, "api_key": key}}


def start() -> subprocess.Popen[bytes]:
    """Start the proxy and return it once it answers."""
    models = [
        entry("bundled", f"openai/{TARGET.model}"),
        entry("agent", f"hosted_vllm/{TARGET.agent}"),
        entry("text", f"text-completion-openai/{TARGET.model}"),
        entry("claude", f"anthropic/{TARGET.agent}", TARGET.url),
        entry("embedder", f"openai/{TARGET.embedder}"),
        entry("reranker", f"hosted_vllm/{TARGET.reranker}", TARGET.url),
        entry("wrong-key", f"openai/{TARGET.model}", key="wrong"),
        entry("gone", "openai/nope"),
        entry("limited", f"openai/{TARGET.model}", key=TARGET.limited_key),
    ]
    config = {
        "model_list": models,
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"num_retries": 0},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
    }
    Path("config.yaml").write_text(json.dumps(config))  # YAML is a superset of JSON
    command = [str(Path(sys.executable).with_name("litellm")), "--config", "config.yaml"]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    with Path("proxy.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(PORT)], env=environment, stdout=log, stderr=log
        )
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if HTTP.get("/health/liveliness", timeout=5).status_code == 200:
                return process
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    process.kill()
    raise SystemExit("the proxy does not start: " + Path("proxy.log").read_text()[-1500:])


@FEATURES.shows("models")
def models() -> None:
    names = [model.id for model in CLIENT.models.list()]
    check({"bundled", "agent"} <= set(names), names)


@FEATURES.shows("completion")
def completion() -> None:
    answer = CLIENT.completions.create(model="text", prompt=PROMPT, max_tokens=16)
    check(answer.choices[0].text, answer)


@FEATURES.shows("chat")
def chat() -> None:
    answer = CLIENT.chat.completions.create(**CHAT)
    check(answer.choices[0].message.content and answer.usage.completion_tokens, answer)


@FEATURES.shows("chat_stream")
def chat_stream() -> None:
    whole = CLIENT.chat.completions.create(**CHAT).choices[0].message.content
    chunks = list(CLIENT.chat.completions.create(**CHAT, stream=True))
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), whole)


@FEATURES.shows("stream_usage")
def stream_usage() -> None:
    chunks = list(CLIENT.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    check(chunks[-1].usage.completion_tokens > 0, chunks[-1])


@FEATURES.shows("json_schema")
def json_schema() -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = CLIENT.chat.completions.create(**{**CHAT, "max_tokens": 64}, response_format=form)
    is_weather(answer.choices[0].message.content)


@FEATURES.shows("tool_call")
def tool_call() -> None:
    choice = CLIENT.chat.completions.create(**CALLING).choices[0]
    same(choice.finish_reason, "tool_calls")
    is_weather(choice.message.tool_calls[0].function.arguments)


@FEATURES.shows("tool_stream")
def tool_stream() -> None:
    arguments = ""
    for chunk in CLIENT.chat.completions.create(**CALLING, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            arguments += delta.function.arguments or ""
    is_weather(arguments)


@FEATURES.shows("reasoning")
def reasoning() -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = CLIENT.chat.completions.create(**{**CHAT, "model": "agent"}, extra_body=thinking)
    check(answer.choices[0].message.reasoning_content, answer)


@FEATURES.shows("responses")
def responses() -> None:
    made = CLIENT.responses.create(model="bundled", input=PROMPT, max_output_tokens=16)
    check(made.output_text, made)


@FEATURES.shows("responses_stream")
def responses_stream() -> None:
    events = CLIENT.responses.create(model="bundled", input=PROMPT, max_output_tokens=16, stream=True)
    types = [event.type for event in events]
    check("response.output_text.delta" in types, types)


def message(**options: Any) -> Any:
    body = {"model": "claude", "max_tokens": 16, "messages": CHAT["messages"], **options}
    answer = HTTP.post("/v1/messages", json=body)
    check(answer.status_code == 200, answer.text)
    return answer.text if options.get("stream") else answer.json()


@FEATURES.shows("messages")
def messages() -> None:
    check(message()["content"][0]["text"], "no text")


@FEATURES.shows("messages_stream")
def messages_stream() -> None:
    check("event: message_stop" in message(stream=True), "no end")


@FEATURES.shows("messages_tools")
def messages_tools() -> None:
    tool = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    (call,) = message(tools=[tool], tool_choice=choice, max_tokens=160)["content"]
    is_weather(call["input"])


@FEATURES.shows("embeddings")
def embeddings() -> None:
    found = CLIENT.embeddings.create(model="embedder", input=["the fox", "a dog"])
    same([len(one.embedding) for one in found.data], [24, 24])


@FEATURES.shows("rerank")
def rerank() -> None:
    body = {"model": "reranker", "query": "fox", "documents": ["the fox", "a dog"], "top_n": 1}
    answer = HTTP.post("/v1/rerank", json=body)
    check(answer.status_code == 200 and len(answer.json()["results"]) == 1, answer.text)


@FEATURES.shows("error_401")
def error_401() -> None:
    asked = {**CHAT, "model": "wrong-key"}
    raised(openai.AuthenticationError, lambda: CLIENT.chat.completions.create(**asked))


@FEATURES.shows("error_404")
def error_404() -> None:
    raised(openai.NotFoundError, lambda: CLIENT.chat.completions.create(**{**CHAT, "model": "gone"}))


@FEATURES.shows("error_400")
def error_400() -> None:
    asked = {**CHAT, "temperature": 9}
    error = raised(openai.BadRequestError, lambda: CLIENT.chat.completions.create(**asked))
    check("temperature" in error.message, error.message)


@FEATURES.shows("error_429")
def error_429() -> None:
    def call() -> None:
        for _ in range(5):
            CLIENT.chat.completions.create(**{**CHAT, "model": "limited"})

    raised(openai.RateLimitError, call)


proxy = start()
try:
    FEATURES.run()
finally:
    proxy.terminate()
    proxy.wait(20)
