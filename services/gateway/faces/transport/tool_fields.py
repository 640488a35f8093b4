"""The tools of a request, as every face that translates to a generation writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fairway.v1 import inference_pb2


def add_tool(
    generation: inference_pb2.Generation,
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    *,
    strict: bool,
) -> None:
    """Add a function that the model may call. The service checks it."""
    text = json.dumps(parameters, ensure_ascii=False) if parameters is not None else ""
    generation.chat.tools.add(name=name, description=description or "", parameters=text, strict=strict)


def set_tool_choice(
    generation: inference_pb2.Generation,
    mode: inference_pb2.ToolMode.ValueType,
    names: Sequence[str] = (),
    *,
    single: bool,
) -> None:
    """Set which calls an output may have. ``single``: at most one."""
    generation.tool_choice.CopyFrom(inference_pb2.ToolChoice(mode=mode, names=names, single=single))
