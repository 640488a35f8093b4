"""The OpenAI dialects, read strictly, as generations of fairway.v1."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import FairwayError, InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.requests import MAX_PROMPTS, ApiRequest, chat_request, completion_request

TURNS = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ApiRequest:
    return chat_request(json.dumps({"model": "m", "messages": TURNS, **fields}).encode())


def completion(**fields: Any) -> ApiRequest:
    return completion_request(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def raw(text: str | bytes) -> ApiRequest:
    return chat_request(text.encode() if isinstance(text, str) else text)


def test_what_is_absent_stays_absent() -> None:
    wanted = chat()
    (generation,) = wanted.generations
    expected = inference_pb2.Generation(model="m", sampling=common_pb2.Sampling(), parts=True)
    expected.chat.messages.add(role="user", content="hi")
    assert generation == expected
    assert (wanted.stream, wanted.include_usage, wanted.logprobs, wanted.choices) == (False, False, False, 1)


def test_nulls_are_absences() -> None:
    names = (
        "stream n max_tokens temperature top_p stop seed user logit_bias tools response_format logprobs top_k"
    )
    assert chat(**dict.fromkeys(names.split())).generations == chat().generations


def test_every_option_arrives() -> None:
    wanted = chat(
        stream=True,
        stream_options={"include_usage": True},
        n=3,
        max_completion_tokens=40,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100, "7": 2.5},
        stop=["a", "b"],
        seed=-1,
        user="someone",
        logprobs=True,
        top_logprobs=4,
        top_k=-1,
        min_p=0.125,
        repetition_penalty=1.5,
        min_tokens=2,
        stop_token_ids=[9],
        ignore_eos=True,
        priority="batch",
    )
    (found,) = wanted.generations
    assert (wanted.stream, wanted.include_usage, wanted.logprobs, wanted.choices) == (True, True, True, 3)
    assert (found.user, found.session_key) == ("someone", "someone")
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.25, 0.5, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        1,
        -1,
        1.5,
    )
    assert dict(sampling.logit_bias) == {5: -100.0, 7: 2.5}
    assert (sampling.seed, sampling.top_k) == (2**64 - 1, 0)
    assert (found.choices, found.max_output_tokens, found.min_output_tokens, found.logprobs) == (3, 40, 2, 4)
    assert (list(found.stop), list(found.stop_token_ids)) == (["a", "b"], [9])
    assert (found.session_key, found.ignore_eos, found.priority) == (
        "someone",
        True,
        common_pb2.PRIORITY_BATCH,
    )


def test_zero_is_not_absent() -> None:
    (found,) = chat(temperature=0, top_k=0, seed=0).generations
    assert all(found.sampling.HasField(name) for name in ("temperature", "top_k", "seed"))
    assert not chat().generations[0].sampling.HasField("temperature")


def test_logprobs_of_both_dialects() -> None:
    assert chat(logprobs=True).generations[0].logprobs == 0
    assert chat(logprobs=True).generations[0].HasField("logprobs")
    assert not chat(logprobs=False).generations[0].HasField("logprobs")
    assert completion(logprobs=3).generations[0].logprobs == 3
    assert completion(logprobs=0).logprobs
    assert not completion().logprobs
    for neutral in (0, None):
        for logprobs in (False, None):
            wanted = chat(logprobs=logprobs, top_logprobs=neutral)
            assert not wanted.generations[0].HasField("logprobs")
            assert not wanted.logprobs
    with pytest.raises(InvalidInput):
        chat(top_logprobs=2)
    with pytest.raises(InvalidInput):
        chat(logprobs=False, top_logprobs=2)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_in_all_four_shapes(prompt: Any, expected: list[Any]) -> None:
    found = [
        generation.prompt if generation.HasField("prompt") else list(generation.token_ids.ids)
        for generation in completion(prompt=prompt).generations
    ]
    assert found == expected


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        ["a", 1],
        [1, "a"],
        [[1], 2],
        [[1], "a"],
        [-1],
        [2**32],
        [1.5],
        None,
        {},
        True,
        ["a"] * (MAX_PROMPTS + 1),
    ],
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        completion(prompt=prompt)
    assert caught.value.metadata["field"].startswith("prompt")


def test_a_request_has_up_to_128_prompts() -> None:
    assert MAX_PROMPTS == 128
    assert len(completion(prompt=["a"] * MAX_PROMPTS).generations) == MAX_PROMPTS
    with pytest.raises(InvalidInput, match="a list of 129; one request takes 128: send"):
        completion(prompt=["a"] * (MAX_PROMPTS + 1))
    with pytest.raises(InvalidInput, match="outputs"):
        completion(prompt=["a"] * MAX_PROMPTS, n=2)


def test_store_and_no_alternatives_are_taken_as_they_are() -> None:
    for store in (True, False, None):
        assert completion(prompt="a", store=store) == completion(prompt="a")
        assert chat(store=store) == chat()
    assert chat(top_logprobs=0) == chat()
    found = chat(logprobs=True, top_logprobs=0)
    assert (found.logprobs, found.generations[0].logprobs) == (True, 0)


def test_a_large_batch_is_refused_before_it_is_built() -> None:
    with pytest.raises(InvalidInput):
        completion(prompt=["a"] * 1_000_000)
    with pytest.raises(InvalidInput, match="outputs"):
        completion(prompt=["a"] * 16, n=16)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text", "text"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([], ""),
    ],
)
def test_content_as_text_or_parts(content: Any, expected: str) -> None:
    wanted = chat(messages=[{"role": "user", "content": content, "name": "Bob B."}])
    message = wanted.generations[0].chat.messages[0]
    assert (message.content, message.name) == (expected, "Bob B.")


def test_an_answer_of_ours_can_be_sent_back() -> None:
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert chat(messages=[*TURNS, turn]).generations[0].chat.messages[1].content == "x"


UNSUPPORTED = {
    "functions": [{}],
    "function_call": {"name": "f"},
    "audio": {"voice": "a"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content"},
    "web_search_options": {},
    "chat_template": "{{ 1 }}",
    "use_beam_search": True,
    "skip_special_tokens": False,
    "echo": True,
    "best_of": 2,
    "priority": 3,
    "cache_salt": "salt",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_options_that_are_not_offered_are_named(name: str) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        chat(**{name: UNSUPPORTED[name]})
    assert caught.value.metadata["field"] == name


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("best_of", 2), ("add_special_tokens", False)])
def test_options_of_completions_that_are_not_offered(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        completion(**{name: value})
    assert caught.value.metadata["field"] == name


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({"prompt": "hi", "logprobs": 3}, 3),
        ({"prompt": [5, 6], "logprobs": 1}, 1),
        ({"prompt": "hi", "logprobs": 5, "prompt_logprobs": 2}, 2),  # as vLLM
        ({"prompt": "hi"}, None),  # the client's own text
        ({"prompt": [5, 6]}, 0),  # whose text comes with the log-probabilities
        ({"prompt": "hi", "max_tokens": 0}, 0),
    ],
    ids=["text", "ids", "both", "plain text", "plain ids", "no output"],
)
def test_an_echo_asks_for_what_it_shows(fields: dict[str, Any], scores: int | None) -> None:
    request = completion(echo=True, **fields)
    (generation,) = request.generations
    assert request.echo
    assert request.scores_prompt == (scores is not None)
    assert (generation.prompt_logprobs if generation.HasField("prompt_logprobs") else None) == scores
    assert request.prompt_logprobs == ("prompt_logprobs" in fields)


def test_prompts_of_one_request_share_the_bound_of_log_probabilities() -> None:
    completion(prompt=["x" * 1000] * 32, echo=True, logprobs=1)
    completion(prompt=["x" * 40_000] * 2)
    for fields in ({"logprobs": 2}, {"logprobs": 1, "n": 2}):
        with pytest.raises(InvalidInput, match="together") as caught:
            completion(prompt=["x" * 1000] * 32, echo=True, **fields)
        assert caught.value.metadata["field"] == "prompt"
    with pytest.raises(InvalidInput, match="together"):
        completion(prompt=[[1] * 33_000] * 2, echo=True)


def test_prompt_logprobs_are_not_streamed() -> None:
    assert chat(prompt_logprobs=4).generations[0].prompt_logprobs == 4
    assert not chat(prompt_logprobs=4).generations[0].HasField("logprobs")
    for request in (chat, completion):
        with pytest.raises(UnsupportedFeature, match="not offered with stream") as caught:
            request(prompt_logprobs=4, stream=True)
        assert caught.value.metadata["field"] == "prompt_logprobs"


def test_options_that_ask_for_nothing_pass() -> None:
    chat(tools=[], tool_choice="auto", functions=[], response_format={"type": "text"}, modalities=["text"])
    chat(parallel_tool_calls=True, store=False, metadata={}, service_tier="auto", reasoning_effort="none")
    completion(suffix="", echo=False, best_of=1)
    completion(n=3, best_of=3)


def test_defaults_of_vllm_pass() -> None:
    neutral = {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "add_special_tokens": True,
        "use_beam_search": False,
        "prompt_logprobs": None,
        "best_of": None,
        "echo": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "include_stop_str_in_output": False,
        "priority": 0,
    }
    assert (
        chat(**neutral, chat_template_kwargs={}, add_generation_prompt=True).generations == chat().generations
    )
    assert completion(**neutral, chat_template_kwargs={}).generations == completion().generations


HINTED = {
    "metadata": {"trace": "7"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "verbosity": "low",
    "store": False,
    "service_tier": "default",
}


def test_hints_have_no_effect() -> None:
    assert chat(**HINTED).generations == chat().generations
    hinted = {"type": "ephemeral"}
    content = [{"type": "text", "text": "hi", "cache_control": hinted}]
    turn = {"role": "user", "content": content, "cache_control": hinted}
    assert chat(messages=[turn]).generations == chat().generations


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", [1]),
        ("metadata", {f"k{number}": "" for number in range(257)}),
        ("client_metadata", "text"),
        ("verbosity", "loud"),
        ("service_tier", "scale"),
        ("reasoning_effort", "huge"),
        ("prompt_cache_key", 5),
    ],
)
def test_hints_are_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat(**{name: value})
    assert caught.value.metadata["field"].startswith(name)


def test_the_service_tier_is_a_class() -> None:
    found = {tier: chat(service_tier=tier).generations[0].priority for tier in ("auto", "flex", "priority")}
    assert found == {
        "auto": common_pb2.PRIORITY_UNSPECIFIED,
        "flex": common_pb2.PRIORITY_BATCH,
        "priority": common_pb2.PRIORITY_INTERACTIVE,
    }
    assert chat(service_tier="flex", priority="batch").generations[0].priority == common_pb2.PRIORITY_BATCH
    with pytest.raises(InvalidInput, match="disagree"):
        chat(service_tier="flex", priority="interactive")


def test_the_safety_identifier_is_the_end_user_where_no_user_is_named() -> None:
    assert chat(safety_identifier="s").generations[0].user == "s"
    assert chat(safety_identifier="s", user="u").generations[0].user == "u"


def test_reasoning_effort_and_template_options_reach_the_template() -> None:
    options = {"enable_thinking": False, "depth": [1, {"a": "b"}]}
    chat_input = chat(reasoning_effort="low", chat_template_kwargs=options).generations[0].chat
    assert json.loads(chat_input.template_variables) == {**options, "reasoning_effort": "low"}
    with pytest.raises(InvalidInput, match="disagree"):
        chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})


def test_an_error_names_the_field_that_the_client_sent() -> None:
    assert chat(max_completion_tokens=5).names["max_output_tokens"] == "max_completion_tokens"
    assert "max_output_tokens" not in chat(max_tokens=5).names
    assert chat(service_tier="priority").names["priority"] == "service_tier"
    assert chat(guided_regex="a+").names["sampling.constraint.regex"] == "guided_regex"
    assert chat(structured_outputs={"regex": "a+"}).names["sampling.constraint"] == "structured_outputs"
    assert "sampling.constraint" not in chat(response_format={"type": "json_object"}).names
    assert chat(safety_identifier="s").names["user"] == "safety_identifier"


def test_a_completion_without_max_tokens_has_those_of_openai() -> None:
    assert completion().generations[0].default_output_tokens == 16
    assert not completion().generations[0].HasField("max_output_tokens"), "a limit below 16 would refuse it"
    asked = completion(max_tokens=5).generations[0]
    assert (asked.max_output_tokens, asked.HasField("default_output_tokens")) == (5, False)
    assert not chat().generations[0].HasField("default_output_tokens")


CALLS: list[dict[str, Any]] = [
    TURNS[0],
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "look it up",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}},
            {"id": "c2", "type": "function", "index": 1, "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
]


def test_a_conversation_with_tools_is_replayed() -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    _, made, answer = chat(messages=CALLS, tools=tools, tool_choice="none").generations[0].chat.messages
    calls = [(call.id, call.name, call.arguments) for call in made.tool_calls]
    assert calls == [("c1", "find", '{"q": "x"}'), ("c2", "now", "")]
    assert (made.content, made.reasoning_content) == ("", "look it up")
    assert (answer.role, answer.tool_call_id, answer.content) == ("tool", "c1", "found")
    noted = {**CALLS[1], "provider_specific_fields": {"refusal": None}}  # as LiteLLM replays it
    assert chat(messages=[CALLS[0], noted, CALLS[2]]).generations == chat(messages=CALLS).generations
    again = [CALLS[0], {k.removesuffix("_content"): v for k, v in CALLS[1].items()} | {"content": "x"}]
    assert chat(messages=again).generations[0].chat.messages[1].reasoning_content == "look it up"


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
            "messages[0].tool_calls",
        ),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "user", "content": "x", "name": "<|end|>"}, "messages[0].name"),
    ],
)
def test_turns_that_cannot_be_rendered(turn: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat(messages=[turn])
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"foo": 1}, "foo"),
        ({"guided_xml": {}}, "guided_xml"),
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": -1}, "n"),
        ({"n": 2**40}, "n"),
        ({"n": 10**100}, "n"),
        ({"n": 129}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"priority": "urgent"}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
        ({"model": 5}, "model"),
    ],
)
def test_malformed_fields_are_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat(**fields)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "null",
        "[]",
        '"x"',
        "{} {}",
        '{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"n":' + "9" * 100_000 + "}",
        '{"model":"m","messages":[{"role":"user","content":"x"}],"n":1,"n":2}',
        '{"model":"m","messages":[{"role":"user","role":"system","content":"x"}]}',
        '{"model":"m","messages":[{"role":"user","content":"x"}],"logit_bias":{"1":1,"1":2}}',
        '{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        '{"model":"m","messages":[{"role":"user","content":"\\udc00\\ud800"}]}',
        '{"model":"m","messages":' + "[" * 200_000,
        '{"model":"m","messages":[],"tools":' + "[" * 200_000 + "]" * 200_000 + "}",
        '{"model":"m","metadata":' + '{"a":' * 200_000 + "1" + "}" * 200_000 + "}",
        "{'model': 'm'}",
        b'{"model":"\xff"}',
        b"\xef\xbb\xbf{}",
        '{"model":"m"}'.encode("utf-16"),
        b"\x00" * 100,
    ],
)
def test_what_is_no_strict_json_is_refused(body: str | bytes) -> None:
    with pytest.raises(InvalidInput):
        raw(body)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "messages",
        "prompt",
        "n",
        "stop",
        "seed",
        "logit_bias",
        "stream_options",
        "tools",
        "temperature",
        "user",
        "x",
    ]
)


@given(st.dictionaries(NAMES, ANY_JSON, max_size=5), st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_body_is_a_bug(fields: dict[str, Any], is_chat: bool) -> None:
    body = json.dumps({"model": "m", **fields}).encode()
    with contextlib.suppress(FairwayError):
        (chat_request if is_chat else completion_request)(body)


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
TEXT = json.dumps(SCHEMA)
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
CHOICES = common_pb2.Choices(texts=["yes", "no"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type":"object"}'}),
        ({"response_format": FORMAT}, {"json_schema": TEXT}),
        ({"guided_json": SCHEMA}, {"json_schema": TEXT}),
        ({"guided_json": TEXT}, {"json_schema": TEXT}),
        ({"guided_regex": "[ab]+", "guided_decoding_backend": "guidance"}, {"regex": "[ab]+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": CHOICES}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, {"json_schema": TEXT}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": CHOICES}),
        ({"structured_outputs": {"grammar": "x"}}, {"grammar": "x"}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": '{"type":"object"}'}),
    ],
)
def test_what_an_output_must_match_arrives(options: dict[str, Any], expected: dict[str, Any]) -> None:
    for wanted in (chat(**options), completion(**options)):
        assert wanted.generations[0].sampling.constraint == common_pb2.Constraint(**expected)


def test_a_format_of_text_is_no_constraint() -> None:
    assert not chat(response_format={"type": "text"}).generations[0].sampling.HasField("constraint")
    assert not chat(structured_outputs={}).generations[0].sampling.HasField("constraint")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": FORMAT | {"type": "text"}}, "response_format.json_schema"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": ""}, "guided_json"),
    ],
)
def test_constraints_that_are_not_served_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat(**options)
    assert caught.value.metadata["field"] == field
