"""Requests and answers of the public inference protocol v2 over HTTP, with its binary tensor data extension.

A request with the extension begins with a JSON object, whose length a header states; the bytes of the
tensors follow it in the order of their descriptions.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from google.protobuf.duration_pb2 import Duration
from msgspec import Meta, Raw, Struct

from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.types import parse_body
from services.gateway.faces.predict.contents import DTYPES, bytes_of, elements_of, flat
from services.gateway.rows.service import Inferred

_MAX_EXTENT: Final = 1 << 30
_MAX_TENSORS: Final = 64
_encode: Final = msgspec.json.Encoder().encode
Extent = Annotated[int, Meta(ge=0, le=_MAX_EXTENT)]
Parameters = dict[str, bool | int | float | str]


class _Input(Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    shape: list[Extent]
    datatype: str
    parameters: Parameters | None = None
    data: Raw = Raw()


class _Output(Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    parameters: Parameters | None = None


class _InferBody(Struct, forbid_unknown_fields=True, frozen=True):
    inputs: list[_Input]
    outputs: list[_Output] | None = None
    id: Annotated[str, Meta(max_length=256)] | None = None
    parameters: Parameters | None = None


class InferCall(Struct, frozen=True):
    """One inference request. ``binary``: the outputs that are returned as bytes; None: all of them."""

    message: inference_pb2.InferRequest
    id: str
    binary: frozenset[str] | None


def infer_call(data: bytes, head_bytes: int | None) -> InferCall:
    """Return the request in a body whose JSON has ``head_bytes``; None: all of it.

    Raises InvalidInput, UnsupportedFeature.
    """
    if head_bytes is not None and head_bytes > len(data):
        raise InvalidInput("inference-header-content-length is more than the body has")
    body = parse_tensors(data if head_bytes is None else data[:head_bytes])
    tail = memoryview(data)[len(data) if head_bytes is None else head_bytes :]
    message = inference_pb2.InferRequest()
    _check_tensors(len(body.inputs), "inputs")
    for index, tensor in enumerate(body.inputs):
        field = f"inputs[{index}]"
        size = parameter(tensor.parameters, "binary_data_size", int, field)
        check_parameters(tensor.parameters, ("binary_data_size",), field)
        if size is None:
            content = _json_data(tensor, field)
        elif not 0 <= size <= len(tail) or bytes(tensor.data):
            raise InvalidInput(f"{field} has no {size} bytes of binary data", field=field)
        else:
            content, tail = bytes(tail[:size]), tail[size:]
        message.inputs.append(
            common_pb2.Tensor(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, data=content)
        )
    if tail:
        raise InvalidInput(f"{len(tail)} bytes follow the tensors", field="inputs")
    check_parameters(body.parameters, ("binary_data_output", "timeout"), "")
    timeout_us = parameter(body.parameters, "timeout", int, "")
    if timeout_us:
        message.timeout.CopyFrom(duration_of(timeout_us))
    return InferCall(message, body.id or "", _binary_outputs(body, message))


def parse_tensors(data: bytes) -> _InferBody:
    """Return the JSON of a request. Raises InvalidInput."""
    return parse_body(data, _InferBody)


def parameter(parameters: Parameters | None, name: str, kind: type, field: str) -> Any:
    """Return a parameter, None without it. Raises InvalidInput for another type."""
    value = (parameters or {}).get(name)
    if value is not None and type(value) is not kind:
        raise InvalidInput(f"{field} parameter {name} must be {kind.__name__}".strip(), field=name)
    return value


def check_parameters(parameters: Parameters | None, known: tuple[str, ...], field: str) -> None:
    """Return if every parameter is one of these: a dropped parameter is a wrong answer."""
    for name in parameters or ():
        if name not in known:
            raise UnsupportedFeature(
                f"{field} parameter {name[:64]} is not offered by this server".strip(), field=name[:64]
            )


def duration_of(timeout_us: int) -> Duration:
    """Return the timeout of a request. Raises InvalidInput."""
    if not 0 <= timeout_us <= 86_400_000_000:
        raise InvalidInput("timeout must be microseconds of at most a day", field="timeout")
    found = Duration()
    found.FromMicroseconds(timeout_us)
    return found


def infer_answer(call: InferCall, found: Inferred) -> tuple[bytes, int | None]:
    """Return the body, and the bytes of its JSON where binary data follows it."""
    outputs: list[dict[str, Any]] = []
    tail: list[bytes] = []
    for tensor in found.outputs:
        output: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if call.binary is None or tensor.name in call.binary:
            output["parameters"] = {"binary_data_size": len(tensor.data)}
            tail.append(tensor.data)
        else:
            output["data"] = elements_of(tensor.data, tensor.datatype)
        outputs.append(output)
    answer = {"model_name": found.answer.model, "model_version": found.answer.version_digest}
    head = _encode(answer | ({"id": call.id} if call.id else {}) | {"outputs": outputs})
    return (b"".join((head, *tail)), len(head)) if tail else (head, None)


def _json_data(tensor: _Input, field: str) -> bytes:
    raw = bytes(tensor.data)
    if not raw:
        raise InvalidInput(f"{field} has no data", field=f"{field}.data")
    if tensor.datatype not in DTYPES:
        return b""  # its data type is refused with the reason of that type
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidInput(f"{field}.data is not valid JSON", field=f"{field}.data") from None
    return bytes_of(flat(value, f"{field}.data"), tensor.datatype, f"{field}.data")


def _binary_outputs(body: _InferBody, message: inference_pb2.InferRequest) -> frozenset[str] | None:
    every = parameter(body.parameters, "binary_data_output", bool, "") is True
    if not body.outputs:
        return None if every else frozenset()
    _check_tensors(len(body.outputs), "outputs")
    binary = set()
    for index, output in enumerate(body.outputs):
        field = f"outputs[{index}]"
        check_parameters(output.parameters, ("binary_data", "classification"), field)
        if parameter(output.parameters, "classification", int, field):
            raise UnsupportedFeature(f"{field} classification is not offered by this server", field=field)
        wanted = parameter(output.parameters, "binary_data", bool, field)
        if wanted or (wanted is None and every):
            binary.add(output.name)
        message.outputs.append(output.name)
    return frozenset(binary)


def _check_tensors(count: int, field: str) -> None:
    if not 1 <= count <= _MAX_TENSORS:
        raise InvalidInput(f"{field} has {count} tensors; 1 to {_MAX_TENSORS} are taken", field=field)
