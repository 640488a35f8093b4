"""The public inference protocol v2, over HTTP and gRPC: its messages as requests of fairway.v1, and back.

An HTTP request with the binary tensor data extension begins with a JSON object, whose length a header
states; the bytes of the tensors follow it in the order of their descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from google.protobuf.duration_pb2 import Duration
from msgspec import Meta, Raw, Struct

from fairway.inference import v2_pb2
from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import InvalidInput, UnsupportedFeature
from services.core.fixed_cost.signature import ANY, Signature, TensorSpec
from services.gateway.catalog import Route
from services.gateway.faces.openai.types import parse_body
from services.gateway.rows.service import Inferred

NAME: Final = "fairway"
VERSION: Final = "2"  # version of the protocol
EXTENSIONS: Final = ("binary_tensor_data",)
PLATFORM: Final = "fairway"
# The data types whose elements are numbers or truth values in JSON and in typed contents.
DTYPES: Final[dict[str, Any]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "FP64": np.float64,
}
_NUMBERS: Final = frozenset((int, float))
_MAX_DEPTH: Final = 16
_MAX_EXTENT: Final = 1 << 30
_MAX_TENSORS: Final = 64
_encode: Final = msgspec.json.Encoder().encode
Extent = Annotated[int, Meta(ge=0, le=_MAX_EXTENT)]
Parameters = dict[str, bool | int | float | str]
# Parameter of a request: the metadata of a stream belongs to all its requests.
KEY_PARAMETER: Final = "idempotency_key"
# Parameters of an answer that an earlier request with the same key received.
_REPLAYED: Final = {"replayed": v2_pb2.InferParameter(bool_param=True)}
# The field of typed contents for each data type.
_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def metadata_of(route: Route, signature: Signature) -> dict[str, Any]:
    """Return the metadata of a model: shapes have the batch as their first extent, -1 for any extent."""
    return {
        "name": route.model,
        "versions": [route.version_digest],
        "platform": PLATFORM,
        "inputs": [tensor_metadata(spec) for spec in signature.inputs],
        "outputs": [tensor_metadata(spec) for spec in signature.outputs],
    }


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [ANY, *spec.shape]}


def bytes_of(elements: Sequence[Any], datatype: str, field: str) -> bytes:
    """Return flat elements as bytes. Raises InvalidInput, UnsupportedFeature."""
    if datatype not in DTYPES:
        raise UnsupportedFeature(f"{field}: {datatype} is taken as raw bytes only", field=field)
    allowed = _NUMBERS if datatype.startswith("FP") else {bool if datatype == "BOOL" else int}
    if not allowed.issuperset(map(type, elements)):
        raise InvalidInput(f"{field} has an element that is no {datatype}", field=field)
    try:
        with np.errstate(over="ignore"):
            return np.array(elements, DTYPES[datatype]).tobytes()
    except (OverflowError, ValueError):
        raise InvalidInput(f"{field} has an element out of the range of {datatype}", field=field) from None


def elements_of(data: bytes, datatype: str) -> list[Any]:
    """Return the elements of raw bytes. Raises UnsupportedFeature for a data type without such a form."""
    if datatype not in DTYPES:
        raise UnsupportedFeature(f"{datatype} is returned as raw bytes only", field="outputs")
    found: list[Any] = np.frombuffer(data, DTYPES[datatype]).tolist()
    return found


def flat(value: Any, field: str) -> list[Any]:
    """Return the elements of nested lists in row-major order. Raises InvalidInput."""
    found, level = [value], 0
    while found and isinstance(found[0], list):
        level += 1
        if level > _MAX_DEPTH or not all(isinstance(part, list) for part in found):
            raise InvalidInput(f"{field} is not a tensor in nested lists", field=field)
        found = [element for part in found for element in part]
    return found


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


def infer_request(request: v2_pb2.ModelInferRequest) -> inference_pb2.InferRequest:
    """Return the request. Raises InvalidInput, UnsupportedFeature."""
    message = inference_pb2.InferRequest(model=request.model_name, version=request.model_version)
    if request.parameters:
        parameters = _parameters(request.parameters)
        check_parameters(parameters, ("timeout", KEY_PARAMETER), "")
        message.idempotency_key = parameter(parameters, KEY_PARAMETER, str, "") or ""
        if timeout_us := parameter(parameters, "timeout", int, ""):
            message.timeout.CopyFrom(duration_of(timeout_us))
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidInput(
            f"there are {len(request.inputs)} inputs and {len(raw)} raw contents", field="raw_input_contents"
        )
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{index}]"
        if tensor.parameters:
            check_parameters(_parameters(tensor.parameters), (), field)
        if raw and tensor.HasField("contents"):
            raise InvalidInput(f"{field} has typed contents beside raw contents", field=f"{field}.contents")
        data = raw[index] if raw else _typed(tensor, field)
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, data=data)
    for index, output in enumerate(request.outputs):
        if output.parameters:
            check_parameters(_parameters(output.parameters), (), f"outputs[{index}]")
        message.outputs.append(output.name)
    return message


def infer_response(request: v2_pb2.ModelInferRequest, found: Inferred) -> v2_pb2.ModelInferResponse:
    """Return the answer, its tensors as raw contents."""
    return v2_pb2.ModelInferResponse(
        model_name=found.answer.model,
        model_version=found.answer.version_digest,
        id=request.id,
        outputs=[
            v2_pb2.ModelInferResponse.InferOutputTensor(
                name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
            )
            for tensor in found.outputs
        ],
        raw_output_contents=[tensor.data for tensor in found.outputs],
        parameters=_REPLAYED if found.answer.replayed else None,
    )


def _typed(tensor: v2_pb2.ModelInferRequest.InferInputTensor, field: str) -> bytes:
    name = _CONTENTS.get(tensor.datatype)
    if name is None:
        return b""  # its data type is refused with the reason of that type
    elements: Sequence[Any] = getattr(tensor.contents, name)
    return bytes_of(elements, tensor.datatype, f"{field}.contents")


def _parameters(parameters: Mapping[str, v2_pb2.InferParameter]) -> Parameters:
    found: Parameters = {}
    for name, entry in parameters.items():
        kind = entry.WhichOneof("parameter_choice")
        if kind is not None:
            found[name] = getattr(entry, kind)
    return found
