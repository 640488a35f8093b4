"""The tools of a request: checked, and turned into the form of its outputs and their constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from fairway.v1 import inference_pb2
from services.core.errors import ConstraintRefused, FairwayError, InvalidInput, UnsupportedFeature
from services.core.generation import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from services.core.outputs.forms import OutputForm, Tool, ToolChoice, ToolMode, name_for_model, named_form
from services.core.records import Deployment
from services.gateway.outputs.forms import CallRules, call_grammar, reasoned_grammar, texts_of
from services.gateway.text.text_model import ChatMessage, Conversation, TextModel
from services.gateway.text.tokenise import Tokeniser
from services.rpc.convert.inference import CALL, tool_choice_from_proto, tools_from_proto

MAX_TOOL_BYTES: Final = 256 * 1024
MAX_SCHEMA_DEPTH: Final = 64
# Tools whose schema is tried alone, to name the one that is refused.
_MAX_TRIED: Final = 16
_TOOLS: Final = "chat.tools"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the prompt shows, and the choice among them."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)

    @property
    def allowed(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        names = self.choice.names
        return tuple(tool for tool in self.tools if not names or tool.name in names)


def tool_use(generation: inference_pb2.Generation) -> ToolUse:
    """Return the tools of a generation, none where none may be called."""
    choice = tool_choice_from_proto(generation.tool_choice)
    if choice.mode is ToolMode.NONE or not generation.chat.tools:
        return ToolUse()
    return ToolUse(tools_from_proto(generation.chat.tools), choice)


def check_tools(generation: inference_pb2.Generation) -> None:
    """Return if the tools can be offered to a model. Raises InvalidInput naming the field."""
    if generation.WhichOneof("input") != "chat":
        for field in ("tool_choice", "parts"):
            if generation.HasField("tool_choice") if field == "tool_choice" else generation.parts:
                raise InvalidInput(f"{field} is of a chat; send chat", field=field)
        return
    tools, names = generation.chat.tools, set[str]()
    size = sum(len(text.encode()) for tool in tools for text in (tool.description, tool.parameters))
    if size > MAX_TOOL_BYTES:
        raise InvalidInput(
            f"the tools have {size} bytes of descriptions and schemas; at most {MAX_TOOL_BYTES} are taken: "
            "send fewer tools, or shorter ones",
            field=_TOOLS,
            size_bytes=size,
            limit=MAX_TOOL_BYTES,
        )
    for index, tool in enumerate(tools):
        if name_for_model(tool.name) in names:
            raise InvalidInput(f"two tools have the name {tool.name}", field=f"{_TOOLS}[{index}].name")
        names.add(name_for_model(tool.name))
        _check_parameters(tool.parameters, f"{_TOOLS}[{index}].parameters")
    choice = generation.tool_choice
    if choice.mode == inference_pb2.TOOL_MODE_REQUIRED and not tools:
        raise InvalidInput("tool_choice asks for a call, and there are no tools", field="tool_choice")
    for name in choice.names:
        if name_for_model(name) not in names:
            raise InvalidInput(
                f"tool_choice names {name}, which is none of the tools: name one of them, or send auto",
                field="tool_choice",
            )


def _check_parameters(text: str, field: str) -> None:
    if not text:
        return
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidInput(f"{field} is not a JSON schema: it has to be an object", field=field) from None
    if schema.get("type", "object") != "object":
        raise InvalidInput(f"{field}: the arguments of a tool are of the type object", field=field)
    if depth_of(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidInput(f"{field} is nested more than {MAX_SCHEMA_DEPTH} levels deep", field=field)


def depth_of(value: object) -> int:
    """Return the levels of lists and objects, by levels, since a client chooses their number."""
    level, depth = [value], 0
    while level := [
        item
        for found in level
        if isinstance(found, dict | list)
        for item in (found.values() if isinstance(found, dict) else found)
    ]:
        depth += 1
    return depth


@dataclass(frozen=True, slots=True)
class ResolvedForm:
    """How a generation's outputs are written; ``constraint``: what holds them to it, None: nothing."""

    form: OutputForm | None = None
    constraint: Constraint | None = None
    # Special tokens whose spelling is part of the text.
    spelled_ids: tuple[int, ...] = ()
    # Of calls in outputs that are not split.
    constrained_form: OutputForm | None = None


class OutputForms:
    """Resolves how the outputs of a generation are written."""

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._tokeniser = tokeniser

    async def resolve(
        self,
        generation: inference_pb2.Generation,
        constraint: Constraint | None,
        tenant_id: str,
        deployment: Deployment,
        model: TextModel,
        ids: Sequence[int],
        accepted: OutputForm | None = None,
    ) -> ResolvedForm:
        """Return the form and the checked constraint of outputs that follow the prompt ``ids``.

        ``accepted``: the form of an earlier run, which stays: its output continues. Raises ConstraintRefused,
        UnsupportedFeature for a model without a form of calls, and what a check of a constraint raises.
        """
        use = tool_use(generation)
        form = accepted or declared_form(generation, use, deployment, model, ids)
        if constraint is not None and not use.tools:
            exact = await self._tokeniser.check_constraint(model, tenant_id, constraint)
            form, found = await self._behind_reasoning(generation, form, constraint, tenant_id, model)
            constraint = found or exact
        if use.tools and (accepted is None or accepted.held):
            form, constraint = await self._with_calls(use, form, constraint, tenant_id, model)
        if not generation.parts:
            return ResolvedForm(None, constraint, constrained_form=form if use.tools else None)
        return ResolvedForm(form, constraint, spelled_ids(form, model))

    async def _behind_reasoning(
        self,
        generation: inference_pb2.Generation,
        form: OutputForm,
        constraint: Constraint,
        tenant_id: str,
        model: TextModel,
    ) -> tuple[OutputForm, Constraint | None]:
        """Return the constraint that holds for content alone, where there may be reasoning before it.

        None: the output matches from its beginning, and has no reasoning.
        """
        whole = replace(form, reasoning=None)
        by_schema = constraint.kind is ConstraintKind.JSON_SCHEMA
        if form.reasoning is None or not generation.parts or not by_schema:
            return whole, None
        try:
            schema = msgspec.json.decode(constraint.source, type=dict[str, Any])
            source = reasoned_grammar(form, schema, model.marks)
            written = Constraint(ConstraintKind.GRAMMAR, source)
            found = await self._tokeniser.check_constraint(model, tenant_id, written)
        except (msgspec.DecodeError, RecursionError, ConstraintRefused):
            return whole, None
        return form, found

    async def _with_calls(
        self,
        use: ToolUse,
        form: OutputForm,
        constraint: Constraint | None,
        tenant_id: str,
        model: TextModel,
    ) -> tuple[OutputForm, Constraint | None]:
        """Return the form with its calls held to it, and the constraint that does so."""
        required = use.choice.mode is ToolMode.REQUIRED
        rules = CallRules(required, use.choice.single, by_schema=required)
        if constraint is not None:
            content = _content(constraint, form, beside_text=not required)
            await self._tokeniser.check_constraint(model, tenant_id, constraint)
            rules = replace(rules, content=None if required else content)
        tools = use.allowed
        asked = rules.by_schema or any(tool.strict for tool in tools) or rules.content is not None
        asked |= use.choice.single or bool(use.choice.names)
        free = replace(form, names=tuple(tool.name for tool in tools))
        try:
            written = self._grammar(form, tools, rules, model)
            found = await self._tokeniser.check_constraint(model, tenant_id, written)
        except ConstraintRefused as error:
            if not asked:
                return free, None
            raise await self._refusal(error, use, rules, tenant_id, model) from error
        except UnsupportedFeature as error:
            if not asked:
                return free, None
            error.metadata["field"] = _TOOLS
            raise
        return replace(form, held=True), found

    def _grammar(
        self, form: OutputForm, tools: Sequence[Tool], rules: CallRules, model: TextModel
    ) -> Constraint:
        source = call_grammar(form, tools, rules, model.marks)
        if (size := len(source.encode())) > MAX_CONSTRAINT_BYTES:
            raise ConstraintRefused(
                f"the grammar of the tools has {size} bytes; at most {MAX_CONSTRAINT_BYTES} are taken: send "
                "fewer tools, or none that is strict",
                field=_TOOLS,
            )
        return Constraint(ConstraintKind.GRAMMAR, source)

    async def _refusal(
        self, error: ConstraintRefused, use: ToolUse, rules: CallRules, tenant_id: str, model: TextModel
    ) -> FairwayError:
        """Return the error that names the tool whose schema is refused, as far as there is one."""
        allowed = use.allowed
        exact = [
            (index, tool)
            for index, tool in enumerate(use.tools)
            if tool.parameters and (rules.by_schema or tool.strict) and tool in allowed
        ]
        tried = exact[:_MAX_TRIED]
        for index, tool in tried:
            alone = Constraint(ConstraintKind.JSON_SCHEMA, tool.parameters)
            try:
                await self._tokeniser.check_constraint(model, tenant_id, alone)
            except ConstraintRefused as refused:
                return ConstraintRefused(
                    f"the schema of the tool {tool.name} is refused: {refused.message}",
                    field=f"{_TOOLS}[{index}].parameters",
                )
        return ConstraintRefused(
            f"the tools are refused together, and the first {len(tried)} of {len(exact)} schemas are not "
            f"refused alone: {error.message}",
            field=_TOOLS,
        )


def declared_form(
    generation: inference_pb2.Generation,
    use: ToolUse,
    deployment: Deployment,
    model: TextModel,
    ids: Sequence[int],
) -> OutputForm:
    """Return how a version writes the outputs that follow a prompt. Raises UnsupportedFeature."""
    form = named_form(deployment.output_form) if deployment.output_form else model.form
    if not use.tools:
        form = replace(form, calls=None)
    elif form.calls is None:
        raise UnsupportedFeature(
            "this model declares no form of calls, so it takes no tools of any type; an operator may name "
            f"one with `fairway deployments update {generation.model} --output-form`",
            field=_TOOLS,
        )
    names = ((name_for_model(tool.name), tool.name) for tool in generation.chat.tools)
    renamed = tuple(pair for pair in names if pair[0] != pair[1])
    reasoning = form.reasoning
    thinking = reasoning is not None and any(
        text == reasoning.open and tail and tuple(ids[-len(tail) :]) == tuple(tail)
        for text, tail in model.openings
    )
    ends = (mark.id for mark in model.marks if reasoning is not None and mark.text == reasoning.close)
    return replace(form, thinking=thinking, reasoning_end=next(ends, None), renamed=renamed)


def spelled_ids(form: OutputForm, model: TextModel) -> tuple[int, ...]:
    """Return the special tokens of a form whose spelling has to be in the text."""
    texts = texts_of(form)
    return tuple(mark.id for mark in model.marks if mark.special and any(mark.text in each for each in texts))


def _content(constraint: Constraint, form: OutputForm, *, beside_text: bool) -> dict[str, Any]:
    """Return the schema of content beside calls. Raises UnsupportedFeature for another constraint.

    ``beside_text``: the output may be content instead of calls.
    """
    marked = form.calls is not None and form.calls.mark
    if constraint.kind is not ConstraintKind.JSON_SCHEMA or (beside_text and not marked):
        raise UnsupportedFeature(
            f"tools and the constraint {constraint.kind} together are not offered by this model; send one of "
            "them",
            field=f"sampling.constraint.{constraint.kind}",
        )
    try:
        return msgspec.json.decode(constraint.source, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise ConstraintRefused(
            "json_schema is refused: beside tools it has to be an object",
            field="sampling.constraint.json_schema",
        ) from None


def conversation_of(generation: inference_pb2.Generation) -> Conversation:
    """Return the turns, the variables and the tools that the template sees."""
    chat = generation.chat
    messages = [
        ChatMessage(
            turn.role,
            turn.content,
            turn.name,
            tuple(map(CALL.from_proto, turn.tool_calls)),
            turn.tool_call_id,
            turn.reasoning_content,
        )
        for turn in chat.messages
    ]
    return Conversation(messages, chat.template_variables, tool_use(generation).tools)
