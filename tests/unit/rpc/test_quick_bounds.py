"""The quick check accepts what is within its bounds, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from fairway.inference import v2_pb2
from fairway.v1 import common_pb2, inference_pb2, worker_pb2
from services.rpc.bounds import fits

DIGEST = "sha256:" + "a" * 64


def start_row(**fields: Any) -> worker_pb2.StartRow:
    row: dict[str, Any] = {
        "request_id": "req_1",
        "tenant_id": "acme",
        "version_digest": DIGEST,
        "inputs": [common_pb2.Tensor(name="input", datatype="FP32", shape=[4], data=b"0" * 16)],
        "time_left": Duration(seconds=30),
    }
    return worker_pb2.StartRow(**row | fields)


def test_what_each_row_brings_is_decided_quickly() -> None:
    assert fits(start_row())
    tensor = v2_pb2.ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=[1, 4])
    assert fits(v2_pb2.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[b"0" * 16]))
    assert fits(inference_pb2.InferRequest(model="m", inputs=start_row().inputs))


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": ""},
        {"request_id": "r" * 65},
        {"request_id": "é" * 33},
        {"row": 65536},
        {"priority": 99},
        {"time_left": Duration(seconds=86401)},
        {"time_left": Duration(seconds=-1)},
        {"inputs": [common_pb2.Tensor(name="", datatype="FP32")]},
        {"inputs": [common_pb2.Tensor(name="input", datatype="fp32!")]},
        {"inputs": [common_pb2.Tensor(name="input", datatype="FP32", shape=[2**31])]},
        {"inputs": [common_pb2.Tensor(name="input", datatype="FP32")] * 65},
    ],
    ids=str,
)
def test_a_value_out_of_bounds_at_any_depth_does_not_fit(fields: dict[str, Any]) -> None:
    assert not fits(start_row(**fields))


def test_numbers_that_are_not_finite_do_not_fit() -> None:
    sampling = common_pb2.Sampling(temperature=float("nan"))
    assert not fits(inference_pb2.Generation(model="m", prompt="hi", sampling=sampling))
