"""Tools of a request: what is refused by its field, and the form and the constraint that it gets."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from fairway.formats.answers import answer_of
from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from services.core.errors import ConstraintRefused, InvalidInput, UnsupportedFeature
from services.core.generation import ConstraintKind, GenerationSpec, Principal
from services.core.outputs.forms import CALL_FORMS, REASONING_FORMS, OutputForm, Tool
from services.core.records import DEPLOYMENTS, Deployment, KeyRole, Meta
from services.gateway.outputs.forms import MarkToken
from services.gateway.outputs.splitter import OutputSplitter
from services.gateway.requests.tool_use import (
    MAX_TOOL_BYTES,
    check_tools,
    conversation_of,
    declared_form,
    spelled_ids,
    tool_use,
)
from services.gateway.requests.validate import Validator
from services.gateway.text.encoder import load_encoder
from services.gateway.text.text_model import ChatMessage
from tests.unit.gateway.conftest import DIGEST, TEMPLATE

WHO = Principal("alpha", KeyRole.TENANT, "acme")
OBJECT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
REQUIRED = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)


FIRST = "chat.tools[0].parameters"
MANY = 1 + MAX_TOOL_BYTES // 16_000


def generation(*tools: pb.Tool, **fields: Any) -> pb.Generation:
    messages = [pb.ChatMessage(role="user", content="hi")]
    return pb.Generation(model="chat-small", chat=pb.Chat(messages=messages, tools=tools), **fields)


def tool(name: str = "f", parameters: str = OBJECT, **fields: Any) -> pb.Tool:
    return pb.Tool(name=name, parameters=parameters, **fields)


def nested(levels: int) -> str:
    return '{"x":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (generation(tool(), tool()), "chat.tools[1].name"),
        (generation(tool(parameters="[1]")), FIRST),
        (generation(tool(parameters="{")), FIRST),
        (generation(tool(parameters='{"type":"string"}')), FIRST),
        (generation(tool(), tool("g", nested(70))), "chat.tools[1].parameters"),
        (
            generation(tool(parameters='{"x":' + "[" * 20_000 + "]" * 20_000 + "}")),
            "chat.tools[0].parameters",
        ),
        (generation(*(tool(f"f{n}", description="x" * 16_000) for n in range(MANY))), "chat.tools"),
        (generation(tool_choice=REQUIRED), "tool_choice"),
        (generation(tool(), tool_choice=pb.ToolChoice(names=["g"])), "tool_choice"),
        (pb.Generation(prompt="x", parts=True), "parts"),
        (pb.Generation(prompt="x", tool_choice=REQUIRED), "tool_choice"),
    ],
)
def test_what_is_wrong_names_its_field(wrong: pb.Generation, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_tools(wrong)
    assert caught.value.metadata["field"] == field


def test_what_is_in_bounds_passes() -> None:
    check_tools(generation(tool(), tool("g", ""), tool("h", nested(60)), tool_choice=REQUIRED))
    check_tools(generation())
    none = generation(tool(), tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_NONE))
    assert tool_use(none).tools == ()


class Resolver:
    """Resolves requests of a deployment of the small model."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._validator = Validator(fleet.catalog, fleet.identity, Random(7))
        self.form("hermes+think")

    def form(self, name: str) -> None:
        deployment = Deployment(Meta("chat-small"), "chat-small", "v1", DIGEST, 1, output_form=name)
        self._fleet.deployments.put(DEPLOYMENTS + "chat-small", deployment, 42)

    def unconstrained(self, make_folder: Any) -> None:
        """The model gets a tokenizer that cannot be constrained."""
        folder = make_folder()
        state = json.loads((folder / "tokenizer.json").read_text())
        state |= {"decoder": None, "pre_tokenizer": {"type": "Whitespace"}}
        (folder / "tokenizer.json").write_text(json.dumps(state))
        self._fleet.files.folder = folder

    async def __call__(self, asked: pb.Generation, accepted: OutputForm | None = None) -> GenerationSpec:
        checked = self._validator.check(WHO, asked)
        return await self._validator.resolve(WHO, asked, "r", checked, accepted=accepted)


@pytest.fixture
def resolve(fleet: Any, executor: ThreadPoolExecutor) -> Resolver:
    return Resolver(fleet)


def grammar(spec: GenerationSpec) -> str:
    assert spec.sampling.constraint is not None
    assert spec.sampling.constraint.kind is ConstraintKind.GRAMMAR
    return spec.sampling.constraint.source


async def test_required_calls_are_held_to_their_schemas(resolve: Resolver) -> None:
    tools = (tool(), tool("g", ""))
    spec = await resolve(generation(*tools, tool_choice=REQUIRED, parts=True))
    assert spec.form is not None
    assert (spec.form.calls, spec.form.reasoning) == (CALL_FORMS["hermes"], REASONING_FORMS["think"])
    assert spec.form.held
    assert '"a":{"type":"integer"}' in grammar(spec)
    named = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, names=["g"])
    assert "integer" not in grammar(await resolve(generation(*tools, tool_choice=named)))


@pytest.mark.parametrize("choice", [REQUIRED, None])
async def test_a_model_calls_a_tool_of_a_long_name_by_its_hash(resolve: Resolver, choice: Any) -> None:
    names = [f"mcp__{'x' * size}_{end}" for size in (70, 9000) for end in ("a", "b")]
    asked = generation(*map(tool, names), tool("f"), tool_choice=choice, parts=True)
    spec = await resolve(asked)
    assert spec.form is not None
    assert [long for _, long in spec.form.renamed] == names
    short = [short for short, _ in spec.form.renamed]
    assert len(set(short)) == 4
    assert all(len(name) == 64 and f'"{name}' in grammar(spec).replace("\\", "") for name in short)
    assert [one.name for one in conversation_of(asked).tools] == [*short, "f"]
    # The same name in the history, in the choice, and in the calls of the answer.
    turn = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name=names[1])])
    asked.chat.messages.append(turn)
    assert conversation_of(asked).messages[-1].tool_calls[0].name == short[1]
    named = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, names=[names[3]])
    assert short[0] not in grammar(await resolve(generation(*map(tool, names), tool_choice=named)))
    for form in (spec.form, replace(spec.form, held=False, names=tuple(short))):
        calls = CALL_FORMS["hermes"]
        splitter = OutputSplitter(form, str)
        parts = splitter.feed(f"{calls.begin}{short[2]}{calls.middle}{{}}{calls.close}{calls.last}")
        assert [call.name for call in answer_of([*parts, *splitter.finish()]).calls] == [names[2]]


async def test_under_auto_only_strict_tools_are_held_to_their_schema(resolve: Resolver) -> None:
    found = grammar(await resolve(generation(tool(), tool("g", OBJECT, strict=True), parts=True)))
    assert found.count('"a":{"type":"integer"}') == 1
    assert "TEXT" in found


async def test_a_schema_that_is_refused_names_its_tool(resolve: Resolver) -> None:
    broken = '{"type":"object","not":{}}'
    with pytest.raises(ConstraintRefused) as caught:
        await resolve(generation(tool(), tool("g", broken), tool_choice=REQUIRED))
    assert caught.value.metadata["field"] == "chat.tools[1].parameters"
    assert "not" in caught.value.message
    spec = await resolve(generation(tool(), tool("g", broken)))  # not strict, and the model decides
    assert spec.sampling.constraint is not None


async def test_the_schemas_that_are_tried_are_those_that_hold(resolve: Resolver) -> None:
    """Of many tools the refused one is found behind those that are not strict."""
    loose = [tool(f"f{number}") for number in range(20)]
    with pytest.raises(ConstraintRefused, match="the tool g is refused") as caught:
        await resolve(generation(*loose, tool("g", '{"type":"object","not":{}}', strict=True)))
    assert caught.value.metadata["field"] == "chat.tools[20].parameters"


async def test_a_refusal_of_all_tools_states_how_many_were_tried(resolve: Resolver) -> None:
    broken = tool("g", '{"type":"object","not":{}}')
    with pytest.raises(ConstraintRefused, match="first 16 of 18 schemas") as caught:
        await resolve(generation(*(tool(f"f{n}") for n in range(17)), broken, tool_choice=REQUIRED))
    assert caught.value.metadata["field"] == "chat.tools"


async def test_tools_too_large_for_a_grammar(resolve: Resolver) -> None:
    large = json.dumps({"type": "object", "description": "x" * 60_000})
    tools = (tool("f", large), tool("g", large))
    with pytest.raises(ConstraintRefused) as caught:
        await resolve(generation(*tools, tool_choice=REQUIRED, max_output_tokens=1))
    assert caught.value.metadata["field"] in ("chat.tools", "messages")


async def test_a_schema_of_content_goes_beside_calls(resolve: Resolver) -> None:
    asked = generation(tool())
    asked.sampling.constraint.json_schema = '{"type":"object","properties":{"z":{"type":"null"}}}'
    assert "content: %json" in grammar(await resolve(asked))
    asked.sampling.constraint.regex = "a"
    with pytest.raises(UnsupportedFeature) as caught:
        await resolve(asked)
    assert caught.value.metadata["field"] == "sampling.constraint.regex"


@pytest.mark.parametrize("names", [(), ("f",)])
async def test_a_constraint_beside_required_calls_is_checked(resolve: Resolver, names: Any) -> None:
    asked = generation(tool(), tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED, names=names))
    asked.sampling.constraint.json_schema = OBJECT
    assert "content" not in grammar(await resolve(asked))
    asked.sampling.constraint.json_schema = '{"type":"object","not":{}}'
    with pytest.raises(ConstraintRefused, match="not"):
        await resolve(asked)
    asked.sampling.constraint.regex = "a"
    with pytest.raises(UnsupportedFeature, match="regex") as caught:
        await resolve(asked)
    assert caught.value.metadata["field"] == "sampling.constraint.regex"


async def test_where_nothing_can_be_held_a_choice_that_needs_it_is_refused(
    resolve: Resolver, make_folder: Any
) -> None:
    resolve.unconstrained(make_folder)
    tools = (tool(), tool("g"))
    spec = await resolve(generation(*tools, parts=True))
    assert spec.form is not None
    assert (spec.form.held, spec.form.names, spec.sampling.constraint) == (False, ("f", "g"), None)
    for choice in (pb.ToolChoice(single=True), pb.ToolChoice(names=["g"]), REQUIRED):
        with pytest.raises(UnsupportedFeature) as caught:
            await resolve(generation(*tools, tool_choice=choice))
        assert caught.value.metadata["field"] == "chat.tools"


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("held", ["calls", "free calls", "schema"])
async def test_a_later_run_keeps_how_outputs_are_written(
    resolve: Resolver, make_folder: Any, held: str, parts: bool
) -> None:
    asked = generation(*([] if held == "schema" else [tool()]), parts=parts)
    if held == "schema":
        asked.sampling.constraint.json_schema = OBJECT
    elif held == "free calls":
        resolve.unconstrained(make_folder)
    first = await resolve(asked)
    resolve.form("mistral+think-brackets")
    again = await resolve(asked, first.form or first.constrained_form)
    assert (again.form, again.constrained_form) == (first.form, first.constrained_form)
    assert (again.sampling.constraint, again.limits) == (first.sampling.constraint, first.limits)


async def test_a_later_run_of_one_that_ran_free_runs_free(resolve: Resolver) -> None:
    """Also where another gateway can hold its calls."""
    free = OutputForm(calls=CALL_FORMS["hermes"], names=("f",))
    spec = await resolve(generation(tool(), parts=True), free)
    assert (spec.form, spec.sampling.constraint) == (free, None)


async def test_a_model_without_a_form_takes_no_tools(resolve: Resolver) -> None:
    resolve.form("")
    with pytest.raises(UnsupportedFeature) as caught:
        await resolve(generation(tool()))
    assert caught.value.metadata["field"] == "chat.tools"
    assert "--output-form" in caught.value.message
    spec = await resolve(generation(parts=True))
    assert spec.form is not None
    assert (spec.form.calls, spec.form.reasoning, spec.sampling.constraint) == (None, None, None)
    assert (await resolve(generation())).form is None


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("tools", [False, True])
async def test_workers_receive_schemas_that_they_do_not_check_again(
    resolve: Resolver, tools: bool, parts: bool
) -> None:
    used = [tool("g", OBJECT, strict=True)] if tools else []
    asked = generation(*used, parts=parts, tool_choice=REQUIRED if tools else None)
    asked.sampling.constraint.json_schema = OBJECT
    constraint = (await resolve(asked)).sampling.constraint
    assert constraint is not None
    assert constraint.exact
    assert "x-guidance" in constraint.source


async def test_a_constraint_without_tools_is_as_before(resolve: Resolver) -> None:
    asked = generation(parts=True)
    asked.sampling.constraint.CopyFrom(common_pb2.Constraint(regex="a+"))
    spec = await resolve(asked)
    assert spec.sampling.constraint is not None
    assert spec.sampling.constraint.kind is ConstraintKind.REGEX
    assert spec.form is not None
    assert spec.form.reasoning is None  # it matches from its beginning


async def test_a_schema_holds_behind_reasoning(resolve: Resolver) -> None:
    asked = generation(parts=True)
    asked.sampling.constraint.json_schema = OBJECT
    spec = await resolve(asked)
    assert spec.form is not None
    assert spec.form.reasoning == REASONING_FORMS["think"]
    assert "thought" in grammar(spec)
    asked.parts = False
    whole = (await resolve(asked)).sampling.constraint
    assert whole is not None
    assert whole.kind is ConstraintKind.JSON_SCHEMA


def test_the_files_show_form_marks_and_openings(make_folder: Any, clock: Any) -> None:
    template = TEMPLATE + "{# <tool_call> </think> #}{%- if think %}{{- '<think>\n' }}{%- endif %}"
    folder = make_folder(template=template)
    encoder = load_encoder(folder, DIGEST, clock)
    model = encoder.model
    assert (model.form.calls, model.form.reasoning) == (CALL_FORMS["hermes"], REASONING_FORMS["think"])
    asked, deployment = generation(), Deployment(Meta("m"), "m", "v", DIGEST, 1)
    turns = pb.Generation()
    for variables, thinking in (('{"think": true}', True), ("", False)):
        ids = encoder.encode_chat([ChatMessage("user", "hi")], variables, [Tool("f", "", OBJECT)])
        assert declared_form(asked, tool_use(turns), deployment, model, ids).thinking == thinking
    assert spelled_ids(model.form, model) == ()
    for marks, end in (((), None), ((MarkToken("<think>", 6, False), MarkToken("</think>", 7, False)), 7)):
        marked = declared_form(asked, tool_use(turns), deployment, replace(model, marks=marks), [])
        assert marked.reasoning_end == end, "of a mark that is one token"
