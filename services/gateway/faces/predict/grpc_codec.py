"""Messages of the public inference protocol v2 over gRPC as requests of fairway.v1, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fairway.inference import v2_pb2
from fairway.v1 import inference_pb2
from services.core.errors import InvalidInput
from services.gateway.faces.predict.contents import bytes_of
from services.gateway.faces.predict.http_codec import (
    Parameters,
    check_parameters,
    duration_of,
    parameter,
)
from services.gateway.rows.service import Inferred

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
