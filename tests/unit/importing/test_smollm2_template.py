"""The template of SmolLM2: the model's own text without tools, and calls in a known form with them."""

from __future__ import annotations

import json
import random
from typing import Any, Final

from fairway.cli.fleet.options import smollm2_template
from fairway.formats.answers import ToolCall
from services.core.outputs.forms import CALL_FORMS, Tool
from services.gateway.outputs.forms import form_of
from services.gateway.text.encoder import ChatTemplate, ControlTokens
from services.gateway.text.text_model import ChatMessage
from services.runtime.clock import SystemClock
from tests.support.chat_cases import expected

OWN: Final = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def rendered(messages: list[ChatMessage], tools: tuple[Tool, ...] = ()) -> str:
    control = ControlTokens(["<|im_start|>", "<|im_end|>"])
    source = smollm2_template().read_text("utf-8")
    template = ChatTemplate(source, control=control, tokens={}, clock=SystemClock())
    return template.render(messages, max_chars=100_000, tools=tools).text


def test_without_tools_it_writes_the_text_of_the_models_own() -> None:
    rng = random.Random(5)
    for _ in range(100):
        messages = [ChatMessage("system", "Be brief.\n")] * rng.randint(0, 1)
        for place in range(rng.randint(1, 6)):
            role = ("user", "assistant")[place % 2]
            messages.append(ChatMessage(role, rng.choice(("Hi", " a\n\n", "x<|im_end|>", "é{{ 1 }}"))))
        assert rendered(messages) == expected(OWN, messages)


def test_tools_and_calls_are_written_in_the_form_that_is_read() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = Tool("get_weather", "The weather.", json.dumps(schema))
    messages = [
        ChatMessage("user", "Oslo and Bern?"),
        ChatMessage(
            "assistant",
            "",
            tool_calls=(
                ToolCall("c1", "get_weather", '{"city": "Oslo"}'),
                ToolCall("c2", "get_weather", '{"city": "Bern"}'),
            ),
        ),
        ChatMessage("tool", "Rain", tool_call_id="c1"),
        ChatMessage("tool", "Sun", tool_call_id="c2"),
    ]
    text = rendered(messages, (tool,))
    form = form_of({}, smollm2_template().read_text("utf-8")).calls
    assert form == CALL_FORMS["hermes"]
    calls = [
        f'{form.begin}get_weather{form.middle}{{"city": "{city}"}}{form.close}' for city in ("Oslo", "Bern")
    ]
    assert (
        text.count("\n".join(calls) + "<|im_end|>\n<|im_start|>user\nThe answer of the tool is: Rain\n") == 1
    )
    last = "The answer of the tool is: Sun\nNow answer my question in a full sentence: Oslo and Bern?"
    assert text.endswith(f"{last}<|im_end|>\n<|im_start|>assistant\n")
    system = text.partition("<|im_end|>")[0]
    listed = json.loads(system.partition("<tools>\n")[2].partition("\n</tools>")[0])
    assert listed["function"]["name"] == "get_weather"
    assert listed["function"]["parameters"] == schema
