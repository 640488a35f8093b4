"""Structured output in the OpenAI dialects: ``response_format``, and vLLM's fields of the same purpose."""

from __future__ import annotations

import json
from typing import Any, Literal

from fairway.v1 import common_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.core.generation import JSON_OBJECT
from services.gateway.faces.openai.types import Options, ResponseFormat, StructuredOutputs, require_neutral

_MAX_CHOICES = 1024  # the bound in the proto


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
