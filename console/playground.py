"""The playground: one generation by form, streamed as lines of JSON that the page shows as text."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from console.calls import Api
from console.sign_ins import SignIn
from console.view import STAGES
from fairway.v1 import common_pb2 as common
from fairway.v1 import inference_pb2 as inference
from services.core.errors import FairwayError, InvalidInput, ShareExceeded

MAX_RUNNING: Final = 4  # generations of one sign-in at once
_ROLES: Final = ("system", "user", "assistant", "tool")


def generation_of(form: Mapping[str, str]) -> inference.Generation:
    """Return the generation that a form describes. Raises InvalidInput naming the field and the cause."""
    found = inference.Generation(model=form.get("model", ""), parts=form.get("mode") != "text")
    if form.get("mode") == "text":
        found.prompt = form.get("message", "")
    else:
        for message in _json(form, "messages", list) or []:
            found.chat.messages.append(_message(message))
        for tool in _json(form, "tools", list) or []:
            found.chat.tools.append(_tool(tool))
    if (most := _number(form, "max_tokens", 1, 1_048_576)) is not None:
        found.max_output_tokens = int(most)
    if (temperature := _number(form, "temperature", 0, 2)) is not None:
        found.sampling.temperature = temperature
    if (seed := _number(form, "seed", 0, 2**53)) is not None:
        found.sampling.seed = int(seed)
    if form.get("schema", "").strip():
        found.sampling.constraint.json_schema = json.dumps(_json(form, "schema", dict))
    return found


def check_room(sign_in: SignIn) -> None:
    """Return if one more generation may run. Raises ShareExceeded."""
    if sign_in.running >= MAX_RUNNING:
        raise ShareExceeded(f"{MAX_RUNNING} generations of this sign-in run: wait until one has ended")


async def run(api: Api, sign_in: SignIn, generation: inference.Generation) -> AsyncGenerator[bytes, None]:
    """Yield the events of a generation as lines of JSON; the last is `finished` or `error`."""
    sign_in.running += 1
    try:
        async with aclosing(api.generate(sign_in.credential, generation)) as events:
            async for event in events:
                for found in _shown(event):
                    yield json.dumps(found).encode() + b"\n"
    except FairwayError as error:
        yield json.dumps({"error": {"reason": error.reason, "message": error.message}}).encode() + b"\n"
    finally:
        sign_in.running -= 1


def _shown(event: inference.GenerateResponse) -> list[dict[str, Any]]:
    match event.WhichOneof("event"):
        case "accepted":
            accepted = event.accepted
            return [
                {
                    "accepted": {
                        "request": accepted.request_id,
                        "version": accepted.version_digest,
                        "seed": str(accepted.seed),
                        "prompt_tokens": accepted.prompt_tokens,
                    }
                }
            ]
        case "chunk" if event.chunk.parts:
            return [_part(part) for part in event.chunk.parts]
        case "chunk":
            return [{"text": event.chunk.text}] if event.chunk.text else []
        case "finished":
            last = [part for choice in event.finished.choices for part in choice.parts]
            return [*map(_part, last), {"finished": _finished(event.finished)}]
    return []


def _part(part: common.OutputPart) -> dict[str, Any]:
    match part.WhichOneof("kind"):
        case "call":
            call = part.call
            return {
                "call": {
                    "index": call.index,
                    "id": call.id,
                    "name": call.name,
                    "arguments": call.arguments,
                }
            }
        case "reasoning":
            return {"reasoning": part.reasoning}
    return {"text": part.content}


def _finished(finished: inference.Finished) -> dict[str, Any]:
    reasons = [common.FinishReason.Name(choice.finish_reason) for choice in finished.choices]
    return {
        "reason": ", ".join(each.removeprefix("FINISH_REASON_").lower() for each in reasons),
        "prompt_tokens": finished.usage.prompt_tokens,
        "cached_tokens": finished.usage.cached_tokens,
        "output_tokens": finished.usage.output_tokens,
        "stages_ms": {stage: getattr(finished.clock, f"{stage}_us") / 1e3 for stage in STAGES},
    }


def _message(given: Any) -> inference.ChatMessage:
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        raise InvalidInput(f"messages: each is an object with a role, one of {', '.join(_ROLES)}")
    found = inference.ChatMessage(role=given["role"], content=str(given.get("content") or ""))
    found.tool_call_id = str(given.get("tool_call_id") or "")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidInput("messages: tool_calls is an array of objects with id, name and arguments")
    for call in calls:
        id_, name, arguments = (str(call.get(each) or "") for each in ("id", "name", "arguments"))
        found.tool_calls.append(inference.ToolCall(id=id_, name=name, arguments=arguments))
    return found


def _tool(given: Any) -> inference.Tool:
    """Return a tool of the OpenAI API's form, with or without its outer object."""
    tool = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise InvalidInput('tools: each is an object such as {"name": "weather", "parameters": {...}}')
    parameters = json.dumps(tool["parameters"]) if tool.get("parameters") else ""
    return inference.Tool(
        name=tool["name"],
        description=str(tool.get("description") or ""),
        parameters=parameters,
        strict=tool.get("strict") is True,
    )


def _json(form: Mapping[str, str], name: str, kind: type) -> Any:
    text = form.get(name, "").strip()
    if not text:
        return None
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()  # Lone surrogates cannot be sent.
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} is no JSON: {error}") from None
    if not isinstance(found, kind):
        raise InvalidInput(f"{name} is not a JSON {'array' if kind is list else 'object'}")
    return found


def _number(form: Mapping[str, str], name: str, least: float, most: float) -> float | None:
    text = form.get(name, "").strip()
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not least <= found <= most:
        raise InvalidInput(f"{name} is {text[:40]!r}: write a number from {least:g} to {most:g}")
    return found
