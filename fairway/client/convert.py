"""Conversion between the client's values and messages of fairway.v1."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from fairway.client.values import (
    Accepted,
    ChoiceResult,
    CompletedChoice,
    Completion,
    Constraint,
    Degradation,
    Finished,
    FinishReason,
    Grammar,
    Input,
    JsonSchema,
    Message,
    Moderated,
    ModeratedCategory,
    Moderation,
    OneOf,
    Options,
    Priority,
    Regex,
    SafetyDigests,
    ServedModel,
    StageClock,
    TokenCount,
    TokenLogprobs,
    Tokens,
    Tool,
    Usage,
)
from fairway.formats.answers import CallDelta, ContentText, OutputPart, ReasoningText, ToolCall
from fairway.mirror import Mirror, Pair, numbers_of
from fairway.v1 import common_pb2 as common
from fairway.v1 import inference_pb2 as pb

PRIORITIES: Final = numbers_of(Priority, common.Priority)
_FINISH_REASONS: Final = {
    number: reason
    for reason, number in numbers_of(
        [one for one in FinishReason if one is not FinishReason.OTHER], common.FinishReason
    ).items()
}
_TOOL_MODES: Final = {
    "auto": pb.TOOL_MODE_AUTO,
    "none": pb.TOOL_MODE_NONE,
    "required": pb.TOOL_MODE_REQUIRED,
}
_MAX_TIMEOUT_S: Final = 86_400
_OF_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")  # options of a chat alone
_SAMPLED: Final = frozenset(common.Sampling.DESCRIPTOR.fields_by_name)


def generation(model: str, source: Input, options: Options, idempotency_key: str) -> pb.Generation:
    """Return the request. Raises ValueError for an empty list and for tools or parts without a chat, and
    TypeError for a list of mixed items."""
    found = _generation(model, source, options, idempotency_key)
    if options.parts and not found.HasField("chat"):
        raise ValueError("only a chat has an output in parts: pass messages")
    if options.tools:
        _set_tools(found, options)
    return found


def _set_tools(found: pb.Generation, options: Options) -> None:
    if not found.HasField("chat"):
        raise ValueError("tools are offered in a chat: pass messages")
    found.parts = True
    found.chat.tools.extend(map(_TOOL.to_proto, options.tools))
    choice = found.tool_choice
    named = options.tool_choice not in _TOOL_MODES
    choice.single = named or not options.parallel_tool_calls
    choice.mode = _TOOL_MODES.get(options.tool_choice, pb.TOOL_MODE_REQUIRED)
    if named:
        choice.names.append(options.tool_choice)


def _generation(model: str, source: Input, options: Options, idempotency_key: str) -> pb.Generation:
    return _GENERATION.to_proto(
        options,
        model=model,
        **_input(source),
        sampling=_SAMPLING.to_proto(options),
        idempotency_key=idempotency_key,
    )


def count_request(model: str, source: str | Sequence[Message]) -> pb.CountTokensRequest:
    return pb.CountTokensRequest(model=model, **_input(source))


def duration(seconds: float) -> Duration:
    """Return the duration within the server's bounds: at least a millisecond, at most a day."""
    found = Duration()
    found.FromMilliseconds(max(1, round(min(seconds, _MAX_TIMEOUT_S) * 1000)))
    return found


def frame(message: common.TokenFrame, choice_bits: int) -> list[tuple[int, Tokens]]:
    """Return (stream id, tokens) of each entry of a frame."""
    logprobs = {entry.entry: _logprobs(entry.tokens) for entry in message.logprobs}
    parts = {entry.entry: _parts(entry.parts) for entry in message.parts}
    ids, start = tuple(message.ids), 0
    mask = (1 << choice_bits) - 1
    found = []
    columns = zip(message.handles, message.offsets, message.counts, message.texts, strict=True)
    for entry, (handle, offset, count, text) in enumerate(columns):
        piece = Tokens(
            handle & mask,
            offset,
            ids[start : start + count],
            text,
            logprobs.get(entry, ()),
            parts.get(entry, ()),
        )
        found.append((handle >> choice_bits, piece))
        start += count
    return found


def completion(message: pb.CompleteResponse) -> Completion:
    end = finished(message.finished)
    results = {one.choice: one for one in end.choices}
    return Completion(
        accepted(message.accepted),
        tuple(
            completed_choice(
                one.text,
                tuple(one.ids),
                _logprobs(one.logprobs),
                results.get(one.choice) or ChoiceResult(one.choice, FinishReason.OTHER, "", len(one.ids)),
                content=one.answer.content if one.HasField("answer") else one.text,
                reasoning=one.answer.reasoning,
                calls=tuple(map(_CALL.from_proto, one.answer.tool_calls)),
            )
            for one in message.choices
        ),
        end,
    )


def completed_choice(
    text: str,
    ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
    result: ChoiceResult,
    *,
    content: str = "",
    reasoning: str = "",
    calls: tuple[ToolCall, ...] = (),
) -> CompletedChoice:
    """Return a whole choice. Ids beyond its output are those of the prompt, which precede it."""
    prompt = len(ids) - result.output_tokens
    return CompletedChoice(
        result.choice,
        text,
        ids[prompt:],
        result.finish_reason,
        logprobs[prompt:],
        content,
        reasoning,
        calls,
        logprobs[:prompt],
    )


def _logprobs(messages: Sequence[common.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            one.token,
            one.sampled,
            tuple(zip(one.top_ids, one.top_tokens, one.top_logprobs, strict=True)),
            one.token_bytes,
            tuple(one.top_bytes),
        )
        for one in messages
    )


def _parts(messages: Sequence[common.OutputPart]) -> tuple[OutputPart, ...]:
    """Return the parts; a kind of a newer server is left out."""
    found: list[OutputPart] = []
    for one in messages:
        match one.WhichOneof("kind"):
            case "content":
                found.append(ContentText(one.content))
            case "reasoning":
                found.append(ReasoningText(one.reasoning))
            case "call":
                found.append(_DELTA.from_proto(one.call))
    return tuple(found)


def _constraint(constraint: Constraint) -> common.Constraint:
    match constraint:
        case JsonSchema(schema=schema):
            return common.Constraint(json_schema=json.dumps(schema, ensure_ascii=False))
        case Regex(pattern=pattern):
            return common.Constraint(regex=pattern)
        case OneOf(texts=texts):
            return common.Constraint(choice=common.Choices(texts=texts))
        case Grammar(source=source):
            return common.Constraint(grammar=source)


def _input(source: Input) -> dict[str, Any]:
    if isinstance(source, str):
        return {"prompt": source}
    if not source:
        raise ValueError("the input is an empty list: pass a text, messages or token ids")
    if all(isinstance(one, Message) for one in source):
        return {"chat": pb.Chat(messages=map(_MESSAGE.to_proto, source))}
    if all(isinstance(one, int) for one in source):
        return {"token_ids": pb.TokenIds(ids=[one for one in source if isinstance(one, int)])}
    raise TypeError("the input is neither a text nor a list of Message or of int alone")


def _degradation(number: int) -> str:
    try:
        name = pb.DegradationKind.Name(number)  # type: ignore[arg-type]
    except ValueError:  # a kind of a newer server
        name = str(number)
    return name.removeprefix("DEGRADATION_KIND_").lower()


def _in_seconds(stage: str) -> Pair:
    return Pair(f"{stage}_us", read=lambda us: us / 1e6)


_CALL: Final = Mirror(ToolCall, pb.ToolCall)
_DELTA: Final = Mirror(CallDelta, common.ToolCallDelta)
_MESSAGE: Final = Mirror(Message, pb.ChatMessage, {"tool_calls": _CALL.each("tool_calls")})
_TOOL: Final = Mirror(
    Tool,
    pb.Tool,
    {"parameters": Pair("parameters", lambda schema: json.dumps(schema, ensure_ascii=False), unset=True)},
)
_SAMPLING: Final = Mirror(
    Options,
    common.Sampling,
    {"constraint": Pair("constraint", _constraint, unset=True)},
    apart=[one.name for one in fields(Options) if one.name not in _SAMPLED],
)
_GENERATION: Final = Mirror(
    Options,
    pb.Generation,
    {
        "choices": Pair("choices", unset=True),
        "priority": Pair("priority", PRIORITIES.__getitem__, unset=True),
    },
    apart={*_SAMPLED, *_OF_TOOLS},
)
_USAGE: Final = Mirror(Usage, common.Usage, {"device_s": _in_seconds("device")})
usage: Final = _USAGE.from_proto
_STAGES: Final = [one.name.removesuffix("_s") for one in fields(StageClock) if one.name.endswith("_s")]
_CLOCK: Final = Mirror(StageClock, common.StageClock, {f"{stage}_s": _in_seconds(stage) for stage in _STAGES})
_CHOICE: Final = Mirror(
    ChoiceResult,
    pb.ChoiceResult,
    {
        "finish_reason": Pair(
            "finish_reason", read=lambda number: _FINISH_REASONS.get(number, FinishReason.OTHER)
        ),
        "parts": Pair("parts", read=_parts),
    },
)
finished: Final = Mirror(
    Finished,
    pb.Finished,
    {"choices": _CHOICE.each("choices"), "usage": _USAGE.one("usage"), "clock": _CLOCK.one("clock")},
).from_proto
accepted: Final = Mirror(
    Accepted,
    pb.Accepted,
    {
        "degradations": Mirror(Degradation, pb.Degradation, {"kind": Pair("kind", read=_degradation)}).each(
            "degradations"
        ),
        "safety": Mirror(SafetyDigests, pb.SafetyDigests).one("safety", unset=True),
    },
).from_proto
moderated: Final = Mirror(
    Moderated,
    pb.ModerateResponse,
    {
        "results": Mirror(
            Moderation,
            pb.Moderation,
            {"categories": Mirror(ModeratedCategory, pb.ModeratedCategory).each("categories")},
        ).each("results")
    },
).from_proto
tokens: Final = Mirror(
    Tokens, pb.TokenChunk, {"logprobs": Pair("logprobs", read=_logprobs), "parts": Pair("parts", read=_parts)}
).from_proto
served_model: Final = Mirror(ServedModel, pb.ServedModel).from_proto
token_count: Final = Mirror(TokenCount, pb.CountTokensResponse).from_proto
