"""The faces of a gateway that take generations, each with its own names of the same fields."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import grpc
from websockets.exceptions import ConnectionClosed

from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.runtime.clock import SystemClock
from tests.security.drills.http import connected, head, post
from tests.security.drills.target import Target
from tests.security.table.cells import Answer, Cell, Outcome, of_grpc, of_http
from tests.security.table.inputs import Input
from tests.support.socket_client import opened, received, request
from tests.support.stack import metadata

TENANT: Final = "drills"
TOKENS: Final = 4
LIMIT_S: Final = 40.0
_ANSWER_BYTES: Final = 1 << 20
_BATCH_LINE_BYTES: Final = 1 << 20
_BATCH_S: Final = 120.0
now_s = SystemClock().monotonic_s
# The names that a dialect has of OpenAI's fields, where they differ; a field that is not here has none.
_RESPONSES: Final = {
    "max_tokens": "max_output_tokens",
    **dict.fromkeys(("model", "temperature", "top_p", "user", "cache_salt", "chat_template", "n", "stop")),
}
_MESSAGES: Final = {
    "stop": "stop_sequences",
    **dict.fromkeys(("model", "max_tokens", "temperature", "top_p", "top_k", "cache_salt", "chat_template")),
}
# The fields of a generation and of its sampling in the protos.
_GENERATION: Final = {
    "max_tokens": "max_output_tokens",
    "min_tokens": "min_output_tokens",
    "n": "choices",
    **dict.fromkeys(("model", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "ignore_eos", "user")),
}
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed",
)  # fmt: skip
_CONSTRAINTS: Final = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar"}


async def ask(address: str, data: bytes) -> Answer:
    """Send bytes and return the first answer with all that follows until the connection ends."""
    received, began_s = b"", now_s()
    try:
        async with asyncio.timeout(LIMIT_S), connected(address, "127.0.0.66") as (reader, writer):
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()
            while len(received) < _ANSWER_BYTES and (piece := await reader.read(1 << 16)):
                received += piece
    except OSError:
        pass
    except TimeoutError:
        return Answer(Outcome.FAILED, "silence", f"{received[:80]!r}", now_s() - began_s)
    first = received.split(b"\r\n", 1)[0].split()
    status = int(first[1]) if len(first) > 1 and first[1].isdigit() else 0
    return of_http(status, received.partition(b"\r\n\r\n")[2].decode("utf-8", "replace"), now_s() - began_s)


def chat_body(model: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a chat with these fields; None where a chat has no such field."""
    values = dict(fields)
    prompt = values.pop("prompt", "hi")
    if not isinstance(prompt, str):
        return None
    if isinstance(values.get("logprobs"), int):
        values |= {"logprobs": True, "top_logprobs": values["logprobs"]}
    return {"model": model, "max_tokens": TOKENS, "messages": [{"role": "user", "content": prompt}], **values}


def _completion_body(model: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    if {"messages", "tools", "chat_template_kwargs", "tool_choice"} & set(fields):
        return None
    return {"model": model, "prompt": "def f(", "max_tokens": TOKENS, **fields}


def _renamed(names: Mapping[str, str | None], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    if set(fields) - set(names):
        return None
    return {names[name] or name: value for name, value in fields.items()}


def _response_body(model: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    values = dict(fields)
    text = values.pop("prompt", "hi")
    found = _renamed(_RESPONSES, values) if isinstance(text, str) else None
    base = {"model": model, "input": text, "max_output_tokens": TOKENS, "store": False}
    return None if found is None else {**base, **found}


def _message_body(model: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    found = _renamed(_MESSAGES, fields)
    base = {"model": model, "max_tokens": TOKENS, "messages": [{"role": "user", "content": "hi"}]}
    return None if found is None else {**base, **found}


def proto_of(model: str, fields: Mapping[str, Any]) -> pb.Generation | None:
    """Return the generation; None where its message cannot have these values."""
    found = pb.Generation(model=model, max_output_tokens=TOKENS)
    try:
        for name, value in fields.items():
            if name in _GENERATION:
                _set(found, _GENERATION[name] or name, value)
            elif name in _SAMPLING:
                _set(found.sampling, name, value)
            elif name == "logit_bias":
                found.sampling.logit_bias.update({int(token): bias for token, bias in value.items()})
            elif name in _CONSTRAINTS:
                text = value if isinstance(value, str) else json.dumps(value)
                setattr(found.sampling.constraint, _CONSTRAINTS[name], text)
            elif name == "guided_choice":
                found.sampling.constraint.choice.SetInParent()
                found.sampling.constraint.choice.texts.extend(value)
            elif name == "chat_template_kwargs":
                found.chat.template_variables = json.dumps(value)
            elif name == "tools":
                for tool in (each["function"] for each in value):
                    schema = json.dumps(tool["parameters"])
                    found.chat.tools.add(name=tool["name"], parameters=schema, strict=True)
            elif name == "tool_choice":
                found.tool_choice.mode = pb.TOOL_MODE_REQUIRED
            elif name == "messages" and all(isinstance(turn["content"], str) for turn in value):
                found.chat.messages.extend(pb.ChatMessage(**turn) for turn in value)
            elif name == "prompt" and isinstance(value, str):
                found.prompt = value
            elif name == "prompt" and value and all(isinstance(token, int) for token in value):
                found.token_ids.ids.extend(value)
            else:
                return None
    except (ValueError, TypeError, KeyError):
        return None
    if found.HasField("chat") and not found.chat.messages:
        found.chat.messages.add(role="user", content="hi")
    elif "prompt" not in fields and not found.HasField("chat"):
        found.prompt = "def f("
    return found


def _set(message: Any, name: str, value: Any) -> None:
    if value is None:
        message.ClearField(name)
    elif isinstance(value, list):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


async def _socket(address: str, key: str, body: Any) -> Answer:
    began_s = now_s()
    async with asyncio.timeout(LIMIT_S), opened(f"http://{address}", key) as socket:
        await socket.send(request("a", body))
        try:
            last: Any = {"type": "started"}
            while last["type"] not in ("end", "answer", "error"):
                last = await received(socket)
        except ConnectionClosed as error:
            return of_http(0, f"{error}", now_s() - began_s)
    status = last.get("status", 400 if last["type"] == "error" else 200)
    return of_http(int(status), json.dumps(last), now_s() - began_s)


async def _rpc(address: str, key: str, method: str, generation: pb.Generation) -> Answer:
    began_s = now_s()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        options: dict[str, Any] = {"metadata": metadata(key), "timeout": LIMIT_S}
        try:
            match method:
                case "Complete":
                    await stub.Complete(pb.CompleteRequest(generation=generation), **options)
                case "Generate":
                    async for _ in stub.Generate(pb.GenerateRequest(generation=generation), **options):
                        pass
                case "Session":
                    call = stub.Session(**options)
                    start = pb.SessionStart(stream_id=1, generation=generation)
                    await call.write(pb.SessionRequest(start=start))
                    async for event in call:
                        for ended in event.finished:
                            error = ended.error
                            if ended.HasField("error"):
                                code = grpc_name(error.code)
                                return of_grpc(code, error.message, now_s() - began_s)
                        if event.finished:
                            break
        except grpc.aio.AioRpcError as error:
            return of_grpc(error.code().name, error.details() or "", now_s() - began_s)
    return of_grpc("OK", "", now_s() - began_s)


def grpc_name(code: int) -> str:
    return next(each.name for each in grpc.StatusCode if each.value[0] == code)


class Batch:
    """The chats of one batch, which is sent when the first of its answers is awaited."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lines: dict[str, str] = {}
        self._running: asyncio.Task[dict[str, Answer]] | None = None

    def add(self, body: Any) -> Callable[[], Awaitable[Answer]] | None:
        """Return how the answer is awaited; None for what is no line of a batch."""
        name = f"{len(self._lines)}"
        line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        text = json.dumps(line)
        if len(text) > _BATCH_LINE_BYTES or "NaN" in text or "Infinity" in text:
            return None  # a line that is not JSON ends the check of its file, which other tests show
        self._lines[name] = text
        return partial(self._answer, name)

    async def _answer(self, name: str) -> Answer:
        self._running = self._running or asyncio.ensure_future(self._run())
        found = await self._running
        return found.get(name, Answer(Outcome.FAILED, "missing", "the batch has no result for the line"))

    async def _run(self) -> dict[str, Answer]:
        data = "\n".join(self._lines.values()).encode() + b"\n"
        file = await self._call("POST", "/v1/files", *upload("lines.jsonl", data))
        wanted = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "1h",
        }
        batch = await self._call("POST", "/v1/batches", json.dumps(wanted).encode())
        async with asyncio.timeout(_BATCH_S):
            while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
                await asyncio.sleep(0.5)
                batch = await self._call("GET", f"/v1/batches/{batch['id']}")
        found = {}
        for kind in ("output_file_id", "error_file_id"):
            if batch.get(kind):
                text = (await ask(self._http, self._request("GET", f"/v1/files/{batch[kind]}/content"))).text
                for result in map(json.loads, text.splitlines()):
                    response = result.get("response") or {"status_code": 400, "body": result["error"]}
                    body = json.dumps(response["body"])
                    found[result["custom_id"]] = of_http(response["status_code"], body, 0.0)
        return found

    @property
    def _http(self) -> str:
        return self._target.gateways[0].http

    def _request(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
        lines = (f"content-length: {len(body)}", "connection: close", "accept-encoding: identity")
        text = head(path, self._target.keys[TENANT], *lines, method=method)
        return text.replace(b"application/json", kind.encode()) + body

    async def _call(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Any:
        answer = await ask(self._http, self._request(method, path, body, kind))
        return json.loads(answer.text)


def upload(name: str, data: bytes) -> tuple[bytes, str]:
    """Return the body of an upload and its content type; ``name`` is written as it is."""
    parts = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f'--x\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode(),
        data,
        b"\r\n--x--\r\n",
    )
    return b"".join(parts), "multipart/form-data; boundary=x"


def generation_cells(target: Target, inputs: Iterable[Input]) -> list[Cell]:
    """Return a cell of each input at each face that has its fields."""
    gateway, key, model = target.gateways[0], target.keys[TENANT], target.model
    batch, cells = Batch(target), list[Cell]()
    bodies: dict[str, tuple[str, Callable[..., Any]]] = {
        "chat": ("/v1/chat/completions", chat_body),
        "completions": ("/v1/completions", _completion_body),
        "responses": ("/v1/responses", _response_body),
        "messages": ("/v1/messages", _message_body),
    }
    for each in inputs:
        sends: dict[str, Callable[[], Awaitable[Answer]] | None] = {}
        for name, (path, body_of) in bodies.items():
            body = body_of(model, each.fields)
            if body is not None:
                sends[name] = partial(ask, gateway.http, post(path, json.dumps(body).encode(), key))
        chat = chat_body(model, each.fields)
        if chat is not None:
            streamed = json.dumps({**chat, "stream": True}).encode()
            sends["chat stream"] = partial(ask, gateway.http, post("/v1/chat/completions", streamed, key))
            sends["batch"] = batch.add(chat)
            if len(streamed) < _BATCH_LINE_BYTES:  # more is no message of a socket
                sends["socket"] = partial(_socket, gateway.http, key, chat)
        generation = proto_of(model, each.fields)
        if generation is not None:
            for method in ("Complete", "Generate", "Session"):
                sends[method] = partial(_rpc, gateway.grpc, key, method, generation)
        for face, send in sends.items():
            if send is not None:
                cells.append(Cell(each.group, each.name, face, send, each.served))
    return cells
