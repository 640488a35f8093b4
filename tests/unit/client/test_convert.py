from __future__ import annotations

from dataclasses import fields

import pytest

from fairway.client import convert
from fairway.client.values import FinishReason, Message, Options, Priority, Regex, TokenLogprobs, Tokens, Tool
from fairway.formats.answers import ToolCall
from fairway.v1 import common_pb2 as common
from fairway.v1 import inference_pb2 as pb

EVERY = Options(
    max_output_tokens=9,
    min_output_tokens=2,
    temperature=0.0,
    top_p=0.5,
    top_k=0,
    min_p=0.25,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.5,
    logit_bias={7: -100.0},
    seed=0,
    stop=("a", "b"),
    stop_token_ids=(3,),
    choices=2,
    logprobs=0,
    prompt_logprobs=0,
    priority=Priority.BATCH,
    session_key="s",
    ignore_eos=True,
    constraint=Regex("a+"),
)


def test_every_option_reaches_the_message_and_zeros_are_set() -> None:
    found = convert.generation("tiny", "hi", EVERY, "key")
    for option in fields(Options):
        if option.name in ("tools", "tool_choice", "parallel_tool_calls", "parts"):  # of a chat: see below
            continue
        holder = found if option.name in found.DESCRIPTOR.fields_by_name else found.sampling
        value, wanted = getattr(holder, option.name), getattr(EVERY, option.name)
        if isinstance(wanted, Priority):
            assert value == common.PRIORITY_BATCH
        elif isinstance(wanted, dict):
            assert dict(value) == wanted
        elif isinstance(wanted, Regex):
            assert value == common.Constraint(regex=wanted.pattern)
        elif isinstance(wanted, tuple):
            assert tuple(value) == wanted
        else:
            assert value == wanted
        if holder.DESCRIPTOR.fields_by_name[option.name].has_presence:
            assert option.name in {field.name for field, _ in holder.ListFields()}
    assert (found.model, found.prompt, found.idempotency_key) == ("tiny", "hi", "key")


def test_options_that_are_not_given_are_absent() -> None:
    found = convert.generation("tiny", "hi", Options(), "")
    assert found == pb.Generation(model="tiny", prompt="hi", sampling=common.Sampling())


def test_input_kinds() -> None:
    chat = convert.generation("tiny", [Message("user", "hi", "ann")], Options(), "")
    assert chat.chat.messages[0] == pb.ChatMessage(role="user", content="hi", name="ann")
    assert list(convert.generation("tiny", [1, 2], Options(), "").token_ids.ids) == [1, 2]
    with pytest.raises(ValueError, match="empty list"):
        convert.generation("tiny", [], Options(), "")
    with pytest.raises(TypeError, match="neither"):
        convert.generation("tiny", [1, Message("user", "hi")], Options(), "")  # type: ignore[arg-type]


def test_frame_columns_become_events() -> None:
    frame = common.TokenFrame(
        handles=[5 * 16, 6 * 16 + 3], offsets=[4, 0], counts=[2, 1], ids=[1, 2, 3], texts=["ab", ""]
    )
    top = common.TokenLogprobs(sampled=-0.5, token="c", top_ids=[3], top_logprobs=[-0.5], top_tokens=["c"])
    frame.logprobs.add(entry=1, tokens=[top])
    assert convert.frame(frame, 4) == [
        (5, Tokens(0, 4, (1, 2), "ab")),
        (6, Tokens(3, 0, (3,), "", (TokenLogprobs("c", -0.5, ((3, "c", -0.5),)),))),
    ]


def test_every_finish_reason_that_a_client_sees_has_a_name() -> None:
    internal = {"UNSPECIFIED", "PREEMPTED", "ENGINE_LOST", "ERROR"}
    for name, number in common.FinishReason.items():
        message = pb.Finished(choices=[pb.ChoiceResult(finish_reason=number)])
        found = convert.finished(message).choices[0].finish_reason
        short = name.removeprefix("FINISH_REASON_")
        assert found is (FinishReason.OTHER if short in internal else FinishReason[short])


def test_clock_is_in_seconds() -> None:
    message = pb.Finished(clock=common.StageClock(queue_us=1_500_000))
    assert convert.finished(message).clock.queue_s == 1.5


@pytest.mark.parametrize(("seconds", "millis"), [(0.0001, 1), (1.5, 1500), (1e9, 86_400_000)])
def test_duration_is_what_the_server_takes(seconds: float, millis: int) -> None:
    assert convert.duration(seconds).ToMilliseconds() == millis


def test_tools_and_their_calls() -> None:
    tools = (Tool("f", "Does.", {"type": "object"}, strict=True), Tool("now"))
    turns = [
        Message("user", "hi"),
        Message("assistant", "", tool_calls=(ToolCall("c1", "f", "{}"),)),
        Message("tool", "7", tool_call_id="c1"),
    ]
    found = convert.generation("tiny", turns, Options(tools=tools), "")
    offered = [(tool.name, tool.description, tool.parameters, tool.strict) for tool in found.chat.tools]
    assert offered == [("f", "Does.", '{"type": "object"}', True), ("now", "", "", False)]
    assert (found.parts, found.tool_choice.mode, found.tool_choice.single) == (True, pb.TOOL_MODE_AUTO, False)
    made, result = found.chat.messages[1:]
    assert (made.tool_calls[0].id, made.tool_calls[0].name, result.tool_call_id) == ("c1", "f", "c1")
    named = Options(tools=tools, tool_choice="now")
    choice = convert.generation("tiny", turns, named, "").tool_choice
    assert (choice.mode, list(choice.names), choice.single) == (pb.TOOL_MODE_REQUIRED, ["now"], True)
    with pytest.raises(ValueError, match="pass messages"):
        convert.generation("tiny", "a text", Options(tools=tools), "")


def test_a_completion_has_the_calls_of_its_answer() -> None:
    answer = pb.AssistantAnswer(content="c", reasoning="r", tool_calls=[pb.ToolCall(id="i", name="f")])
    choices = [
        pb.CompletedChoice(choice=0, text="raw", answer=answer),
        pb.CompletedChoice(choice=1, text="x"),
    ]
    reason = common.FINISH_REASON_TOOL_CALLS
    end = pb.Finished(choices=[pb.ChoiceResult(choice=0, finish_reason=reason)])
    found = convert.completion(pb.CompleteResponse(choices=choices, finished=end)).choices
    assert (found[0].text, found[0].content, found[0].reasoning) == ("raw", "c", "r")
    assert found[0].calls == (ToolCall("i", "f", ""),)
    assert found[0].finish_reason is FinishReason.TOOL_CALLS
    assert (found[1].content, found[1].calls) == ("x", ())


def test_a_choice_has_the_entries_of_its_prompt_apart() -> None:
    entries = [common.TokenLogprobs(sampled=-float(place), token=f"t{place}") for place in range(4)]
    choice = pb.CompletedChoice(choice=0, text="x", ids=[7, 8, 9, 10], logprobs=entries)
    result = pb.ChoiceResult(choice=0, finish_reason=common.FINISH_REASON_LENGTH, output_tokens=1)
    message = pb.CompleteResponse(choices=[choice], finished=pb.Finished(choices=[result]))
    (found,) = convert.completion(message).choices
    assert found.ids == (10,)
    assert [each.token for each in found.logprobs] == ["t3"]
    assert [each.sampled for each in found.prompt_logprobs] == [0.0, -1.0, -2.0]
