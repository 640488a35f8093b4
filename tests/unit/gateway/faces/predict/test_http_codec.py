from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from services.core.errors import InvalidInput, UnsupportedFeature
from services.core.fixed_cost.rows import RawTensor
from services.core.generation import StageClock, Usage
from services.gateway.faces.predict.codecs import InferCall, infer_answer, infer_call
from services.gateway.rows.service import Inferred
from services.gateway.rows.work import RowsAnswer

IDS, TYPES = np.arange(6, dtype=np.int64), np.ones(6, np.int64)


def described(name: str, size: int) -> dict[str, Any]:
    return {"name": name, "shape": [2, 3], "datatype": "INT64", "parameters": {"binary_data_size": size}}


def call(head: dict[str, Any], *tail: bytes) -> InferCall:
    text = json.dumps(head).encode()
    return infer_call(b"".join((text, *tail)), len(text))


def test_binary_tensors_follow_in_the_order_of_their_descriptions() -> None:
    head = {"inputs": [described("input_ids", 48), described("token_type_ids", 48)]}
    found = call(head, IDS.tobytes(), TYPES.tobytes()).message
    assert [(tensor.name, tensor.data) for tensor in found.inputs] == [
        ("input_ids", IDS.tobytes()),
        ("token_type_ids", TYPES.tobytes()),
    ]


@pytest.mark.parametrize("tail", [b"", IDS.tobytes(), IDS.tobytes() * 3])
def test_a_tail_of_another_size_is_refused(tail: bytes) -> None:
    head = {"inputs": [described("input_ids", 48), described("token_type_ids", 48)]}
    with pytest.raises(InvalidInput):
        call(head, tail)


def test_binary_data_and_json_data_mix() -> None:
    plain = {"name": "token_type_ids", "shape": [2, 3], "datatype": "INT64", "data": [[1, 1, 1], [1, 1, 1]]}
    found = call({"inputs": [plain, described("input_ids", 48)]}, IDS.tobytes()).message
    assert [tensor.data for tensor in found.inputs] == [TYPES.tobytes(), IDS.tobytes()]


def test_the_timeout_parameter_is_microseconds() -> None:
    head = {"inputs": [described("x", 48)], "parameters": {"timeout": 1_500_000}}
    found = call(head, IDS.tobytes()).message
    assert found.timeout.ToMilliseconds() == 1500


def test_classification_is_refused() -> None:
    outputs = [{"name": "logits", "parameters": {"classification": 3}}]
    with pytest.raises(UnsupportedFeature, match="classification"):
        call({"inputs": [described("x", 48)], "outputs": outputs}, IDS.tobytes())


def test_each_output_has_the_form_that_was_asked_for() -> None:
    outputs = [{"name": "a", "parameters": {"binary_data": True}}, {"name": "b"}]
    asked = call({"id": "7", "inputs": [described("x", 48)], "outputs": outputs}, IDS.tobytes())
    values = np.array([1.5, np.nan], np.float32)
    tensors = tuple(RawTensor(name, "FP32", (2, 1), values.tobytes()) for name in "ab")
    answer = RowsAnswer("r", "m", "sha256:0", tensors, (1, 1), Usage(2, 0), StageClock(1))
    body, head_bytes = infer_answer(asked, Inferred(answer, tensors))
    assert body[head_bytes:] == values.tobytes()
    head = json.loads(body[:head_bytes])
    assert head["id"] == "7"
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert head["outputs"][1]["data"] == [1.5, None]  # JSON has no NaN
