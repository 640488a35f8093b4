"""Converts the OpenAI dialects to generations of fairway.v1, so that the same validator checks them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.constraints import constraint_of
from services.gateway.faces.openai.types import (
    ChatBody,
    ChatTurn,
    CompletionBody,
    Options,
    parse_body,
    require_neutral,
)

Dialect = Literal["chat", "completions"]

MAX_PROMPTS: Final = 32
MAX_OUTPUTS: Final = 128
_MAX_STOPS: Final = 16
_MAX_BIASES: Final = 1024  # as in the proto
_TOKEN_ID: Final = re.compile(r"\d{1,10}")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
PRIORITIES: Final = {
    "batch": common_pb2.PRIORITY_BATCH,
    "standard": common_pb2.PRIORITY_STANDARD,
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
}


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One HTTP request: a generation per prompt, and the form of the answer.

    Choice c of generation g is number ``g * choices + c`` in the answer.
    """

    # The endpoint's dialect, which defines the form of the answer.
    dialect: Dialect
    generations: tuple[inference_pb2.Generation, ...]
    # Choices of each generation.
    choices: int
    stream: bool
    # Whether the stream ends with a usage frame.
    include_usage: bool
    # Whether the answer includes log probabilities.
    logprobs: bool
    # Whether the answer includes the stage times.
    stage_clock: bool = False


def chat_request(data: bytes) -> ApiRequest:
    """Return the request of a /v1/chat/completions body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, ChatBody)
    generation = _generation(body, _chat_max_tokens(body))
    for index, turn in enumerate(body.messages):
        generation.chat.messages.add(role=turn.role, content=_content(turn, index), name=_name(turn, index))
    if not body.messages:
        raise InvalidInput("messages is empty", field="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidInput("top_logprobs needs logprobs to be true", field="top_logprobs")
    if body.logprobs:
        generation.logprobs = body.top_logprobs or 0
    return _api_request(body, "chat", (generation,), logprobs=bool(body.logprobs))


def completion_request(data: bytes) -> ApiRequest:
    """Return the request of a /v1/completions body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, CompletionBody)
    template = _generation(body, body.max_tokens)
    if body.logprobs is not None:
        template.logprobs = body.logprobs
    generations = []
    for prompt in _prompts(body.prompt):
        generation = inference_pb2.Generation()
        generation.CopyFrom(template)
        if isinstance(prompt, str):
            generation.prompt = prompt
        else:
            generation.token_ids.ids.extend(prompt)
        generations.append(generation)
    return _api_request(body, "completions", tuple(generations), logprobs=body.logprobs is not None)


def _api_request(
    body: Options, dialect: Dialect, generations: tuple[inference_pb2.Generation, ...], *, logprobs: bool
) -> ApiRequest:
    choices = 1 if body.n is None else body.n
    if choices * len(generations) > MAX_OUTPUTS:
        raise InvalidInput(
            f"n {choices} times {len(generations)} prompts exceed {MAX_OUTPUTS} outputs of one request",
            field="n",
        )
    options = body.stream_options
    if options is not None:
        require_neutral(options, "stream_options.")
        if not body.stream:
            raise InvalidInput("stream_options needs stream to be true", field="stream_options")
    return ApiRequest(
        dialect=dialect,
        generations=generations,
        choices=choices,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        logprobs=logprobs,
    )


def _generation(body: Options, max_tokens: int | None) -> inference_pb2.Generation:
    """Everything except the input. Absent fields stay absent: the validator has the defaults."""
    generation = inference_pb2.Generation(
        model=body.model,
        sampling=_sampling(body),
        max_output_tokens=max_tokens,
        min_output_tokens=body.min_tokens or 0,
        stop=_stops(body.stop),
        stop_token_ids=body.stop_token_ids or (),
        choices=body.n,
        session_key=body.user or "",
        user=body.user or "",
        ignore_eos=bool(body.ignore_eos),
        cache=bool(body.cache),
    )
    if body.priority is not None:
        generation.priority = PRIORITIES[body.priority]
    return generation


def _sampling(body: Options) -> common_pb2.Sampling:
    sampling = common_pb2.Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        # -1 is the off value of vLLM's clients.
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=_seed(body.seed),
        constraint=constraint_of(body),
    )
    biases = body.logit_bias or {}
    if len(biases) > _MAX_BIASES:
        raise InvalidInput(
            f"logit_bias has {len(biases)} entries; at most {_MAX_BIASES} are taken", field="logit_bias"
        )
    for text, value in biases.items():
        token = int(text) if _TOKEN_ID.fullmatch(text, endpos=11) else -1
        if not 0 <= token <= 0xFFFF_FFFF:
            raise InvalidInput("the keys of logit_bias must be token ids", field="logit_bias")
        if token in sampling.logit_bias:
            raise InvalidInput(f"logit_bias names token {token} twice", field="logit_bias")
        sampling.logit_bias[token] = value
    return sampling


def _seed(seed: int | None) -> int | None:
    """Seeds may be negative in this dialect; they are taken modulo 2**64."""
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise InvalidInput("seed does not fit into 64 bits", field="seed")
    return None if seed is None else seed & 0xFFFF_FFFF_FFFF_FFFF


def _chat_max_tokens(body: ChatBody) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidInput("max_tokens and max_completion_tokens disagree", field="max_tokens")
    return body.max_completion_tokens


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > _MAX_STOPS:
        raise InvalidInput(f"stop has {len(stops)} strings; at most {_MAX_STOPS} are taken", field="stop")
    return stops


def _content(turn: ChatTurn, index: int) -> str:
    path = f"messages[{index}]."
    require_neutral(turn, path)
    if turn.content is None:
        if turn.role != "assistant":
            raise InvalidInput(f"{path}content is required", field=f"{path}content")
        return ""
    if isinstance(turn.content, str):
        return turn.content
    texts = []
    for number, part in enumerate(turn.content):
        if part.type != "text":
            field = f"{path}content[{number}].type"
            raise UnsupportedFeature(f"{field}: only text is offered by this server", field=field)
        require_neutral(part, f"{path}content[{number}].")
        if part.text is None:
            field = f"{path}content[{number}].text"
            raise InvalidInput(f"{field} is required", field=field)
        texts.append(part.text)
    return "".join(texts)


def _name(turn: ChatTurn, index: int) -> str:
    if turn.name is not None and not _NAME.fullmatch(turn.name):
        field = f"messages[{index}].name"
        raise InvalidInput(f"{field} must be 1 to 64 letters, digits, _ or -", field=field)
    return turn.name or ""


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """A text, a list of texts, token ids, or a list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidInput("prompt is empty", field="prompt")
    first = type(prompt[0])
    # A list has the type of its first element; the others must have it too.
    if any(type(entry) is not first for entry in prompt):
        raise InvalidInput("prompt mixes texts and token ids", field="prompt")
    if first is int:
        ids = [entry for entry in prompt if isinstance(entry, int)]
        if min(ids) < 0 or max(ids) > 0xFFFF_FFFF:
            raise InvalidInput("prompt holds a number that is no token id", field="prompt")
        return [ids]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidInput(
            f"prompt is a list of {len(prompt)}; at most {MAX_PROMPTS} are taken", field="prompt"
        )
    return [entry for entry in prompt if not isinstance(entry, int)]
