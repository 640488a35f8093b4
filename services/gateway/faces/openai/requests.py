"""Converts the OpenAI dialects to generations of fairway.v1, so that the same validator checks them.

Structured output is ``response_format``, or one of vLLM's fields of the same purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.core.generation import JSON_OBJECT
from services.gateway.faces.openai.types import (
    SEARCHES,
    ChatBody,
    ChatTurn,
    ChosenTool,
    CompletionBody,
    OfferedTool,
    Options,
    ResponseFormat,
    StructuredOutputs,
    ToolSelection,
    is_neutral,
    parse_body,
    require_neutral,
)
from services.gateway.requests.scoring import MAX_PROMPT_SCORES

MAX_TOOLS = 128  # the bound in the proto
_MODES = {
    "none": inference_pb2.TOOL_MODE_NONE,
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}
_MAX_CHOICES = 1024  # the bound in the proto
Dialect = Literal["chat", "completions"]

MAX_PROMPTS: Final = 128
MAX_OUTPUTS: Final = 128
_MAX_STOPS: Final = 16
_MAX_BIASES: Final = 1024  # the bound in the proto
_TOKEN_ID: Final = re.compile(r"\d{1,10}")
_NAME: Final = re.compile(r"[^<>|\\/\x00-\x1f\x7f]+")
PRIORITIES: Final = {
    "batch": common_pb2.PRIORITY_BATCH,
    "standard": common_pb2.PRIORITY_STANDARD,
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
}
_TIERS: Final = {"flex": "batch", "priority": "interactive"}
# Fields other than response_format that constrain the output, with the kind of their constraint.
_GUIDES: Final = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# OpenAI's, where a completion states no max_tokens.
DEFAULT_COMPLETION_TOKENS: Final = 16


def set_tools(generation: inference_pb2.Generation, body: ChatBody) -> Mapping[str, str]:
    """Write the tools and the choice among them; return the client's names of their fields.

    Raises InvalidInput, UnsupportedFeature.
    """
    choice = generation.tool_choice
    choice.single = body.parallel_tool_calls is False
    if isinstance(body.tool_choice, ToolSelection):
        _set_selection(choice, body.tool_choice)
    elif body.tool_choice is not None:
        choice.mode = _MODES[body.tool_choice]
    if not body.tools or choice.mode == inference_pb2.TOOL_MODE_NONE:
        generation.ClearField("tool_choice")
        if choice_needs_tools(body):
            raise InvalidInput(
                "tool_choice asks for a call, and there are no tools that this server offers; those that a "
                f"server runs ({', '.join(SEARCHES)}) are left out: send functions, or tool_choice auto",
                field="tool_choice",
            )
        return {}
    offer(generation.chat, body.tools)
    if not choice.ByteSize():
        generation.ClearField("tool_choice")
    names = {f"chat.tools[{index}].": f"tools[{index}].function." for index in range(len(body.tools))}
    return {**names, "chat.tools": "tools", "tool_choice.names": "tool_choice"}


def choice_needs_tools(body: ChatBody) -> bool:
    """Whether the choice is one of calls."""
    return body.tool_choice not in (None, "none", "auto")


def offer(chat: inference_pb2.Chat, tools: Sequence[OfferedTool]) -> None:
    """Write the tools that the template shows. Raises InvalidInput, UnsupportedFeature."""
    if len(tools) > MAX_TOOLS:
        raise InvalidInput(f"there are {len(tools)} tools; at most {MAX_TOOLS} are taken", field="tools")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.type != "function":
            raise UnsupportedFeature(
                f"{path}.type {tool.type[:64]!r} is not offered by this server: function is",
                field=f"{path}.type",
            )
        if tool.function is None:
            raise InvalidInput(f"{path}.function is required", field=f"{path}.function")
        function = tool.function
        parameters = function.parameters
        chat.tools.add(
            name=function.name,
            description=function.description or "",
            parameters="" if parameters is None else json.dumps(parameters, ensure_ascii=False),
            strict=bool(function.strict),
        )


def _set_selection(choice: inference_pb2.ToolChoice, selection: ToolSelection) -> None:
    if selection.type == "function" and selection.function is not None:
        choice.mode = inference_pb2.TOOL_MODE_REQUIRED
        choice.names.append(selection.function.name)
        choice.single = True  # who names a function expects one call of it
    elif selection.type == "allowed_tools" and selection.allowed_tools is not None:
        choice.mode = _MODES[selection.allowed_tools.mode]
        choice.names.extend(
            _chosen(tool, f"tool_choice.allowed_tools.tools[{index}]")
            for index, tool in enumerate(selection.allowed_tools.tools[: MAX_TOOLS + 1])
        )
    else:
        raise UnsupportedFeature(
            f"tool_choice of the type {selection.type[:64]!r} is not offered by this server: none, auto, "
            "required, a function by its name, and allowed_tools are",
            field="tool_choice",
        )


def _chosen(tool: ChosenTool, path: str) -> str:
    if tool.type != "function" or tool.function is None:
        raise UnsupportedFeature(f"{path} has to name a function", field=path)
    return tool.function.name


def constraint_of(body: Options) -> common_pb2.Constraint | None:
    """Return what the output must match; None for any text.

    Raises InvalidInput for two constraints, UnsupportedFeature for a kind that is not offered.
    """
    found = {
        "response_format": _of_format(body.response_format),
        "guided_json": _schema(body.guided_json, "guided_json"),
        "guided_regex": _text("regex", body.guided_regex, "guided_regex"),
        "guided_choice": _choice(body.guided_choice, "guided_choice"),
        "guided_grammar": _text("grammar", body.guided_grammar, "guided_grammar"),
        "structured_outputs": _of_structured(body.structured_outputs),
    }
    requested = {name: constraint for name, constraint in found.items() if constraint is not None}
    if len(requested) > 1:
        first, second, *_ = requested
        raise InvalidInput(f"{first} and {second} both constrain the output; send one", field=second)
    return next(iter(requested.values()), None)


def _of_format(requested: ResponseFormat | None) -> common_pb2.Constraint | None:
    if requested is None:
        return None
    if requested.type != "json_schema" and requested.json_schema is not None:
        raise InvalidInput(
            "response_format.json_schema needs the type json_schema", field="response_format.json_schema"
        )
    match requested.type:
        case "text":
            return None
        case "json_object":
            return common_pb2.Constraint(json_schema=JSON_OBJECT)
        case "json_schema":
            if requested.json_schema is None:
                raise InvalidInput(
                    "response_format.json_schema is required", field="response_format.json_schema"
                )
            if requested.json_schema.schema is None:  # any value
                return common_pb2.Constraint(json_schema="{}")
            return _schema(requested.json_schema.schema, "response_format.json_schema.schema")
    raise UnsupportedFeature(
        f"response_format.type {requested.type[:64]!r} is not offered by this server: text, json_object and "
        "json_schema are",
        field="response_format.type",
    )


def _of_structured(requested: StructuredOutputs | None) -> common_pb2.Constraint | None:
    if requested is None:
        return None
    require_neutral(requested, "structured_outputs.")
    found = [
        _schema(requested.json, "structured_outputs.json"),
        _text("regex", requested.regex, "structured_outputs.regex"),
        _choice(requested.choice, "structured_outputs.choice"),
        _text("grammar", requested.grammar, "structured_outputs.grammar"),
        common_pb2.Constraint(json_schema=JSON_OBJECT) if requested.json_object else None,
    ]
    stated = [constraint for constraint in found if constraint is not None]
    if len(stated) > 1:
        raise InvalidInput("structured_outputs has more than one constraint", field="structured_outputs")
    return stated[0] if stated else None


def _schema(schema: dict[str, Any] | bool | str | None, field: str) -> common_pb2.Constraint | None:
    """A schema may come as text, as vLLM takes it."""
    if schema is None:
        return None
    if schema == "":
        raise InvalidInput(f"{field} is empty", field=field)
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return common_pb2.Constraint(json_schema=text)


def _text(kind: Literal["regex", "grammar"], text: str | None, field: str) -> common_pb2.Constraint | None:
    if text == "":
        raise InvalidInput(f"{field} is empty", field=field)
    if text is None:
        return None
    return common_pb2.Constraint(regex=text) if kind == "regex" else common_pb2.Constraint(grammar=text)


def _choice(texts: list[str] | None, field: str) -> common_pb2.Constraint | None:
    if texts is None:
        return None
    if not 1 <= len(texts) <= _MAX_CHOICES:
        raise InvalidInput(f"{field} must have 1 to {_MAX_CHOICES} texts", field=field)
    return common_pb2.Constraint(choice=common_pb2.Choices(texts=texts))


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
    # Whether each frame of the stream has the usage so far.
    continuous_usage: bool = False
    # The service tier that the client named; empty without one.
    service_tier: str = ""
    # Fields of fairway.v1 that the client sent by another of their names.
    names: Mapping[str, str] = field(default_factory=dict)
    # Whether the answer includes the stage times.
    stage_clock: bool = False
    # Whether the text of each choice begins with the prompt.
    echo: bool = False
    # Whether the answer includes vLLM's list of the prompt's log probabilities.
    prompt_logprobs: bool = False
    # Whether the output of each choice begins with the prompt's tokens and their log probabilities.
    scores_prompt: bool = False

    def echoed(self, number: int) -> str:
        """Return the text that precedes the output of a generation whose prompt is not scored."""
        return self.generations[number].prompt if self.echo else ""


def chat_request(data: bytes) -> ApiRequest:
    """Return the request of a /v1/chat/completions body. Raises InvalidInput, UnsupportedFeature."""
    return chat_of(parse_body(data, ChatBody, waived=_without_effect))


def chat_of(body: ChatBody) -> ApiRequest:
    """Return the request of a body of chat completions. Raises InvalidInput, UnsupportedFeature."""
    generation = _generation(body, _chat_max_tokens(body))
    if not body.messages:
        raise InvalidInput("messages is empty", field="messages")
    set_chat(generation.chat, body.messages, _template_variables(body))
    generation.parts = True
    names = {"logprobs": "top_logprobs", **set_tools(generation, body)}
    _set_prompt_logprobs(generation, body, body.prompt_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs needs logprobs to be true", field="top_logprobs")
    if body.logprobs:
        generation.logprobs = body.top_logprobs or 0
    if body.max_completion_tokens is not None:
        names["max_output_tokens"] = "max_completion_tokens"
    return _api_request(body, "chat", (generation,), logprobs=bool(body.logprobs), names=names)


def completion_request(data: bytes) -> ApiRequest:
    """Return the request of a /v1/completions body. Raises InvalidInput, UnsupportedFeature."""
    body = parse_body(data, CompletionBody, waived=_without_effect)
    template = _generation(body, body.max_tokens)
    if body.max_tokens is None:
        template.default_output_tokens = DEFAULT_COMPLETION_TOKENS
    if body.logprobs is not None:
        template.logprobs = body.logprobs
    prompts, names = _prompts(body.prompt), {}
    scores = body.prompt_logprobs
    if scores is None and body.echo:
        scores = _echoed_logprobs(body, by_ids=not isinstance(prompts[0], str))
        names["prompt_logprobs"] = "echo" if body.logprobs is None else "logprobs"
    if scores is not None and len(prompts) > 1:
        _check_scored_prompts(prompts, (1 + scores) * (body.n or 1))
    _set_prompt_logprobs(template, body, scores)
    generations = []
    for prompt in prompts:
        generation = inference_pb2.Generation()
        generation.CopyFrom(template)
        if isinstance(prompt, str):
            generation.prompt = prompt
        else:
            generation.token_ids.ids.extend(prompt)
        generations.append(generation)
    logprobs = body.logprobs is not None
    request = _api_request(body, "completions", tuple(generations), logprobs=logprobs, names=names)
    return replace(request, echo=bool(body.echo))


def _check_scored_prompts(prompts: Sequence[str | list[int]], of_a_token: int) -> None:
    """Raise InvalidInput for prompts with more log-probabilities than an answer may have.

    A text counts its bytes: it has no more tokens.
    """
    sizes = [len(prompt.encode()) if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    if sum(sizes) * of_a_token > MAX_PROMPT_SCORES:
        raise InvalidInput(
            f"the prompts of one request may have {MAX_PROMPT_SCORES} log-probabilities together, a text as "
            "many as it has bytes: send fewer prompts in one request",
            field="prompt",
            limit=MAX_PROMPT_SCORES,
        )


def _echoed_logprobs(body: CompletionBody, *, by_ids: bool) -> int | None:
    """Return how many log probabilities an echoed prompt needs in addition to its tokens' own; None: not even
    those.

    The text of token ids comes with their own, and a request without output has nothing else.
    """
    return 0 if body.logprobs is None and (by_ids or body.max_tokens == 0) else body.logprobs


def _set_prompt_logprobs(generation: inference_pb2.Generation, body: Options, scores: int | None) -> None:
    """Raises UnsupportedFeature for vLLM's list in a stream."""
    if body.prompt_logprobs is not None and body.stream:
        raise UnsupportedFeature(
            "prompt_logprobs is not offered with stream; use echo with logprobs, or no stream",
            field="prompt_logprobs",
        )
    if scores is not None:
        generation.prompt_logprobs = scores


def set_chat(chat: inference_pb2.Chat, turns: Sequence[ChatTurn], variables: Mapping[str, Any]) -> None:
    """Write a conversation. Raises InvalidInput, UnsupportedFeature."""
    for index, turn in enumerate(turns):
        path = f"messages[{index}]."
        message = chat.messages.add(
            role=turn.role,
            content=_content(turn, path),
            name=_name(turn, path),
            tool_call_id=turn.tool_call_id or "",
            reasoning_content=turn.reasoning_content or turn.reasoning or "",
        )
        for call in turn.tool_calls or ():
            message.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
    if variables:
        chat.template_variables = msgspec.json.encode(dict(variables), order="deterministic").decode()


def _without_effect(body: Options) -> tuple[str, ...]:
    """Return the fields that have no effect, whatever their value, because of the others of the body."""
    found = []
    if isinstance(body.best_of, Raw) and is_neutral(body.best_of, (body.n,)):  # all are returned
        found.append("best_of")
    return tuple(found)


def _template_variables(body: ChatBody) -> dict[str, Any]:
    """Return what the chat template gets in addition to the messages. Raises InvalidInput."""
    found, effort = dict(body.chat_template_kwargs or {}), body.reasoning_effort
    if effort is not None and found.setdefault("reasoning_effort", effort) != effort:
        raise InvalidInput("reasoning_effort and chat_template_kwargs disagree", field="reasoning_effort")
    return found


def _api_request(
    body: Options,
    dialect: Dialect,
    generations: tuple[inference_pb2.Generation, ...],
    *,
    logprobs: bool,
    names: Mapping[str, str],
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
    usage = options is not None and bool(options.include_usage)
    return ApiRequest(
        dialect=dialect,
        generations=generations,
        choices=choices,
        stream=bool(body.stream),
        include_usage=usage,
        logprobs=logprobs,
        continuous_usage=usage and options is not None and bool(options.continuous_usage_stats),
        service_tier=body.service_tier or "",
        names={**names, **_own_names(body)},
        prompt_logprobs=body.prompt_logprobs is not None,
        scores_prompt=generations[0].HasField("prompt_logprobs"),
    )


def _own_names(body: Options) -> dict[str, str]:
    """Return the fields of fairway.v1 that the body states by another name than the usual one."""
    found: dict[str, str] = {}
    if body.user is None and body.safety_identifier is not None:
        found |= {"user": "safety_identifier", "session_key": "safety_identifier"}
    if body.service_tier in _TIERS:
        found["priority"] = "service_tier"
    for name, kind in _GUIDES.items():
        if getattr(body, name) is not None:
            found |= {f"sampling.constraint.{kind}": name, "sampling.constraint": name}
    if body.structured_outputs is not None:
        found["sampling.constraint"] = "structured_outputs"
    return found


def _generation(body: Options, max_tokens: int | None) -> inference_pb2.Generation:
    """Everything except the input. Absent fields stay absent: the validator has the defaults."""
    user = body.user or body.safety_identifier or ""
    generation = inference_pb2.Generation(
        model=body.model,
        sampling=_sampling(body),
        max_output_tokens=max_tokens,
        min_output_tokens=body.min_tokens or 0,
        stop=_stops(body.stop),
        stop_token_ids=body.stop_token_ids or (),
        choices=body.n,
        session_key=user,
        user=user,
        ignore_eos=bool(body.ignore_eos),
        cache=bool(body.cache),
    )
    priority = _priority(body)
    if priority:
        generation.priority = PRIORITIES[priority]
    return generation


def _priority(body: Options) -> str:
    """Return the class that the body names, by itself or by OpenAI's tier; empty for none."""
    requested = body.priority
    if isinstance(requested, int):
        if requested:
            raise UnsupportedFeature(
                "priority names a class here: batch, standard or interactive; of numbers only 0 is accepted",
                field="priority",
            )
        requested = None
    tier = _TIERS.get(body.service_tier or "")
    if requested and tier and requested != tier:
        raise InvalidInput(
            f"priority {requested} and service_tier {body.service_tier} disagree", field="priority"
        )
    return requested or tier or ""


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


def _content(turn: ChatTurn, path: str) -> str:
    require_neutral(turn, path)
    if turn.tool_calls and turn.role != "assistant":
        raise InvalidInput(f"{path}tool_calls is of an assistant's turn", field=f"{path}tool_calls")
    if turn.content is None:
        if turn.role != "assistant":
            raise InvalidInput(f"{path}content is required", field=f"{path}content")
        return turn.refusal or ""
    if isinstance(turn.content, str):
        return turn.content
    texts = []
    for number, part in enumerate(turn.content):
        if part.type not in ("text", "refusal"):
            field = f"{path}content[{number}].type"
            raise UnsupportedFeature(f"{field}: only text is offered by this server", field=field)
        require_neutral(part, f"{path}content[{number}].")
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            field = f"{path}content[{number}].{part.type}"
            raise InvalidInput(f"{field} is required", field=field)
        texts.append(text)
    return "".join(texts)


def _name(turn: ChatTurn, path: str) -> str:
    if turn.name is not None and not _NAME.fullmatch(turn.name):
        field = f"{path}name"
        raise InvalidInput(f"{field} has to have characters, and none of < > | / \\", field=field)
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
            f"prompt is a list of {len(prompt)}; one request takes {MAX_PROMPTS}: send the others in further "
            "requests, or as a batch",
            field="prompt",
            limit=MAX_PROMPTS,
        )
    return [entry for entry in prompt if not isinstance(entry, int)]
