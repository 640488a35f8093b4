"""Conversion between the client's values and messages of fairway.v1."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    OneOf,
    Options,
    Priority,
    Regex,
    ServedModel,
    StageClock,
    TokenLogprobs,
    Tokens,
    Usage,
)
from fairway.formats.answers import CallDelta, ContentText, OutputPart, ReasoningText, ToolCall
from fairway.v1 import common_pb2 as common
from fairway.v1 import inference_pb2 as pb

PRIORITIES: Final = {
    Priority.BATCH: common.PRIORITY_BATCH,
    Priority.STANDARD: common.PRIORITY_STANDARD,
    Priority.INTERACTIVE: common.PRIORITY_INTERACTIVE,
}
_FINISH_REASONS: Final[dict[int, FinishReason]] = {
    common.FINISH_REASON_STOP: FinishReason.STOP,
    common.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
    common.FINISH_REASON_SLOW_READER: FinishReason.SLOW_READER,
    common.FINISH_REASON_FILTERED: FinishReason.FILTERED,
    common.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}
_TOOL_MODES: Final = {
    "auto": pb.TOOL_MODE_AUTO,
    "none": pb.TOOL_MODE_NONE,
    "required": pb.TOOL_MODE_REQUIRED,
}
_MAX_TIMEOUT_S: Final = 86_400
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


def generation(model: str, source: Input, options: Options, idempotency_key: str) -> pb.Generation:
    """Return the request. Raises ValueError for an empty list and for tools or parts without a chat, and
    TypeError for a list of mixed items."""
    found = _generation(model, source, options, idempotency_key)
    if options.parts and not found.HasField("chat"):
        raise ValueError("only a chat has an output in parts: pass messages")
    found.parts = options.parts
    if options.tools:
        _set_tools(found, options)
    return found


def _set_tools(found: pb.Generation, options: Options) -> None:
    if not found.HasField("chat"):
        raise ValueError("tools are offered in a chat: pass messages")
    found.parts = True
    for tool in options.tools:
        schema = "" if tool.parameters is None else json.dumps(tool.parameters, ensure_ascii=False)
        found.chat.tools.add(
            name=tool.name, description=tool.description, parameters=schema, strict=tool.strict
        )
    choice = found.tool_choice
    named = options.tool_choice not in _TOOL_MODES
    choice.single = named or not options.parallel_tool_calls
    choice.mode = _TOOL_MODES.get(options.tool_choice, pb.TOOL_MODE_REQUIRED)
    if named:
        choice.names.append(options.tool_choice)


def _generation(model: str, source: Input, options: Options, idempotency_key: str) -> pb.Generation:
    optional: dict[str, Any] = {
        "max_output_tokens": options.max_output_tokens,
        "logprobs": options.logprobs,
        "prompt_logprobs": options.prompt_logprobs,
        "choices": options.choices if options.choices != 1 else None,
        "priority": PRIORITIES[options.priority] if options.priority is not None else None,
    }
    return pb.Generation(
        model=model,
        **_input(source),
        sampling=_sampling(options),
        min_output_tokens=options.min_output_tokens,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        session_key=options.session_key,
        user=options.user,
        ignore_eos=options.ignore_eos,
        version=options.version,
        idempotency_key=idempotency_key,
        **{name: value for name, value in optional.items() if value is not None},
    )


def count_request(model: str, source: str | Sequence[Message]) -> pb.CountTokensRequest:
    return pb.CountTokensRequest(model=model, **_input(source))


def duration(seconds: float) -> Duration:
    """Return the duration within the server's bounds: at least a millisecond, at most a day."""
    found = Duration()
    found.FromMilliseconds(max(1, round(min(seconds, _MAX_TIMEOUT_S) * 1000)))
    return found


def accepted(message: pb.Accepted) -> Accepted:
    return Accepted(
        request_id=message.request_id,
        model=message.model,
        version_digest=message.version_digest,
        route_revision=message.route_revision,
        seed=message.seed,
        prompt_tokens=message.prompt_tokens,
        replayed=message.replayed,
        degradations=tuple(map(_degradation, message.degradations)),
    )


def _degradation(message: pb.Degradation) -> Degradation:
    try:
        name = pb.DegradationKind.Name(message.kind)
    except ValueError:  # a kind of a newer server
        name = str(message.kind)
    kind = name.removeprefix("DEGRADATION_KIND_").lower()
    return Degradation(kind, message.original, message.applied, message.pressure_ratio)


def tokens(message: pb.TokenChunk) -> Tokens:
    return Tokens(
        message.choice,
        message.offset,
        tuple(message.ids),
        message.text,
        _logprobs(message.logprobs),
        _parts(message.parts),
    )


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


def usage(message: common.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.output_tokens, message.cached_tokens, message.device_us / 1e6)


def finished(message: pb.Finished) -> Finished:
    clock = message.clock
    return Finished(
        choices=tuple(
            ChoiceResult(
                choice=one.choice,
                finish_reason=_FINISH_REASONS.get(one.finish_reason, FinishReason.OTHER),
                stop=one.stop,
                output_tokens=one.output_tokens,
                parts=_parts(one.parts),
            )
            for one in message.choices
        ),
        usage=usage(message.usage),
        clock=StageClock(
            received_unix_us=clock.received_unix_us,
            validate_s=clock.validate_us / 1e6,
            admit_s=clock.admit_us / 1e6,
            queue_s=clock.queue_us / 1e6,
            dispatch_s=clock.dispatch_us / 1e6,
            engine_wait_s=clock.engine_wait_us / 1e6,
            prefill_s=clock.prefill_us / 1e6,
            decode_s=clock.decode_us / 1e6,
            send_s=clock.send_us / 1e6,
        ),
        resumes=message.resumes,
    )


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
                calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in one.answer.tool_calls),
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


def served_model(message: pb.ServedModel) -> ServedModel:
    return ServedModel(
        name=message.name,
        version_digest=message.version_digest,
        max_context_tokens=message.max_context_tokens,
        ready_replicas=message.ready_replicas,
        created_unix_s=message.created_unix_s,
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
                found.append(CallDelta(one.call.index, one.call.id, one.call.name, one.call.arguments))
    return tuple(found)


def _sampling(options: Options) -> common.Sampling:
    chosen = {name: getattr(options, name) for name in _SAMPLING if getattr(options, name) is not None}
    constraint = None if options.constraint is None else _constraint(options.constraint)
    return common.Sampling(logit_bias=options.logit_bias, constraint=constraint, **chosen)


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
        messages = [
            pb.ChatMessage(
                role=one.role,
                content=one.content,
                name=one.name,
                tool_call_id=one.tool_call_id,
                tool_calls=[
                    pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                    for call in one.tool_calls
                ],
            )
            for one in source
            if isinstance(one, Message)
        ]
        return {"chat": pb.Chat(messages=messages)}
    if all(isinstance(one, int) for one in source):
        return {"token_ids": pb.TokenIds(ids=[one for one in source if isinstance(one, int)])}
    raise TypeError("the input is neither a text nor a list of Message or of int alone")
