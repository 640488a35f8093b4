"""Values and messages of fixed-cost models: embeddings, rankings and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fairway.client.convert import PRIORITIES, usage
from fairway.client.values import Priority, Usage
from fairway.v1 import common_pb2 as common
from fairway.v1 import inference_pb2 as pb

EmbedInput = str | Sequence[str] | Sequence[Sequence[int]]
ClassifyInput = str | bytes | Sequence[str] | Sequence[bytes]

# Format characters of buffers, by data type of the public inference protocol v2.
_FORMATS: Final = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
_DATATYPES: Final = {code: datatype for datatype, code in _FORMATS.items()} | {
    "l": "INT64",
    "L": "UINT64",
    "e": "FP16",
}


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of a request of a fixed-cost model. None: the default of the model or the server."""

    priority: Priority | None = None
    # Cut each text to so many tokens; 0: to the most that the model takes. None: a longer text is an error.
    truncate_tokens: int | None = None
    # Requests with one key stay on one side of a version split.
    session_key: str = ""
    # A repeat with the same key receives the same answer and is not charged; empty: every request runs.
    idempotency_key: str = ""
    user: str = ""  # the caller's name of its end user, whose limits and budgets apply
    version: str = ""  # digest or arm of the version that answers; empty: the model's split decides


@dataclass(frozen=True, slots=True)
class RowsAccepted:
    """What every answer of a fixed-cost model states."""

    request_id: str
    model: str
    version_digest: str
    usage: Usage
    # Whether this is the answer of an earlier request with the same idempotency key.
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector per input, in the order of the inputs."""

    accepted: RowsAccepted
    vectors: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """``index``: its place in the request. ``score``: how well it matches the query."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """The documents, the best first."""

    accepted: RowsAccepted
    results: tuple[RankedDocument, ...]


@dataclass(frozen=True, slots=True)
class Classified:
    """``label``: the most probable one. ``probabilities``: of every label, in the order of the model."""

    label: str
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Classification:
    """One result per input, in the order of the inputs."""

    accepted: RowsAccepted
    results: tuple[Classified, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Row-major, little-endian. The first extent is the batch."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def view(self) -> memoryview[Any]:
        """The elements with their shape; ``numpy.asarray`` takes it. Raises ValueError for FP16 and BF16."""
        if self.datatype not in _FORMATS:
            raise ValueError(f"{self.datatype} has no elements in Python: read the bytes")
        data: Any = memoryview(self.data)
        found: memoryview[Any] = data.cast(_FORMATS[self.datatype], self.shape)
        return found


@dataclass(frozen=True, slots=True)
class Inference:
    """The outputs by name."""

    accepted: RowsAccepted
    outputs: dict[str, Tensor]


def embed_request(
    model: str, inputs: EmbedInput, dimensions: int | None, options: RowOptions
) -> pb.EmbedRequest:
    """Return the request. Raises TypeError for inputs of mixed kinds."""
    rows: Sequence[Any] = [inputs] if isinstance(inputs, str) else inputs
    request = pb.EmbedRequest(model=model, dimensions=dimensions or 0, **_options(options))
    if all(isinstance(row, str) for row in rows):
        request.inputs.extend(rows)
    elif any(isinstance(row, str | int) for row in rows):
        raise TypeError("inputs must be texts, or lists of token ids")
    else:
        for ids in rows:
            request.token_ids.add(ids=ids)
    return request


def rerank_request(
    model: str, query: str, documents: Sequence[str], top_n: int, options: RowOptions
) -> pb.RerankRequest:
    return pb.RerankRequest(model=model, query=query, documents=documents, top_n=top_n, **_options(options))


def classify_request(model: str, inputs: ClassifyInput, options: RowOptions) -> pb.InferRequest:
    rows: Sequence[Any] = [inputs] if isinstance(inputs, str | bytes) else inputs
    request = pb.InferRequest(model=model, **_options(options))
    (request.images if rows and isinstance(rows[0], bytes) else request.texts).extend(rows)
    return request


def infer_request(
    model: str, inputs: Mapping[str, Any], outputs: Sequence[str], options: RowOptions
) -> pb.InferRequest:
    """Return the request. ``inputs``: a Tensor, or any array that offers its buffer, such as numpy's.

    Raises TypeError for an input that is neither, and ValueError for truncate_tokens.
    """
    if options.truncate_tokens is not None:
        raise ValueError("truncate_tokens is for texts")
    tensors = []
    for name, value in inputs.items():
        tensor = value if isinstance(value, Tensor) else _tensor(value)
        tensors.append(
            common.Tensor(name=name, datatype=tensor.datatype, shape=tensor.shape, data=tensor.data)
        )
    return pb.InferRequest(model=model, inputs=tensors, outputs=outputs, **_options(options))


def embeddings(answer: pb.EmbedResponse) -> Embeddings:
    return Embeddings(_accepted(answer), tuple(tuple(entry.values) for entry in answer.embeddings))


def ranking(answer: pb.RerankResponse) -> Ranking:
    found = tuple(RankedDocument(result.index, result.score) for result in answer.results)
    return Ranking(_accepted(answer), found)


def classification(answer: pb.InferResponse) -> Classification:
    found = inference(answer)
    names, data = [], found.outputs["label"].data
    while data:
        end = 4 + int.from_bytes(data[:4], "little")
        names.append(data[4:end].decode())
        data = data[end:]
    rows: Any = found.outputs["probs"].view.tolist() if names else []
    results = (Classified(name, tuple(row)) for name, row in zip(names, rows, strict=True))
    return Classification(found.accepted, tuple(results))


def inference(answer: pb.InferResponse) -> Inference:
    outputs = {
        tensor.name: Tensor(tensor.datatype, tuple(tensor.shape), tensor.data) for tensor in answer.outputs
    }
    return Inference(_accepted(answer), outputs)


def _accepted(answer: pb.EmbedResponse | pb.RerankResponse | pb.InferResponse) -> RowsAccepted:
    return RowsAccepted(
        answer.request_id, answer.model, answer.version_digest, usage(answer.usage), answer.replayed
    )


def _tensor(value: Any) -> Tensor:
    view = memoryview(value)
    datatype = _DATATYPES.get(view.format.lstrip("@=<"))
    if datatype is None:
        raise TypeError(f"an array of format {view.format!r} has no data type of the protocol")
    return Tensor(datatype, tuple(view.shape or ()), view.tobytes())


def _options(options: RowOptions) -> dict[str, Any]:
    optional: dict[str, Any] = {
        "priority": PRIORITIES[options.priority] if options.priority is not None else None,
        "truncate_tokens": options.truncate_tokens,
    }
    return {
        "session_key": options.session_key,
        "user": options.user,
        "idempotency_key": options.idempotency_key,
        "version": options.version,
        **{name: value for name, value in optional.items() if value is not None},
    }
