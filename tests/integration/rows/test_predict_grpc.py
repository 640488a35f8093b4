"""The public inference protocol v2 over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from fairway.inference import v2_pb2 as v2
from tests.support.rows_gateway import AUTH, RowsGateway, digest_of, served

BATCH = np.arange(8, dtype=np.float32).reshape(2, 4)


def request(rows: Any = BATCH, **fields: Any) -> v2.ModelInferRequest:
    tensor = v2.ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=rows.shape)
    values = {"model_name": "mlp", "inputs": [tensor], "raw_input_contents": [rows.tobytes()]}
    return v2.ModelInferRequest(**(values | fields))


def output_of(response: v2.ModelInferResponse) -> Any:
    (output,), (raw,) = response.outputs, response.raw_output_contents
    assert (output.name, output.datatype) == ("output", "FP32")
    return np.frombuffer(raw, np.float32).reshape(list(output.shape))


async def test_server_and_model_metadata(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        stub = sockets.predict
        assert (await stub.ServerLive(v2.ServerLiveRequest(), metadata=AUTH)).live
        assert (await stub.ServerReady(v2.ServerReadyRequest(), metadata=AUTH)).ready
        server = await stub.ServerMetadata(v2.ServerMetadataRequest(), metadata=AUTH)
        assert (server.name, list(server.extensions)) == ("fairway", ["binary_tensor_data"])
        assert (await stub.ModelReady(v2.ModelReadyRequest(name="mlp"), metadata=AUTH)).ready
        model = await stub.ModelMetadata(v2.ModelMetadataRequest(name="embed"), metadata=AUTH)
        assert (model.name, list(model.versions)) == ("embed", [digest_of("embed")])
        assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [
            ("input_ids", "INT64", [-1, -1]),
            ("token_type_ids", "INT64", [-1, -1]),
        ]
        assert [(each.name, list(each.shape)) for each in model.outputs] == [("embedding", [-1, 24])]


async def test_a_model_that_the_next_request_starts_is_ready(gateway: RowsGateway) -> None:
    """A router in front sends to ready models only: it has to send the request that wakes this one."""
    name = v2.ModelReadyRequest(name="mlp")
    async with served(gateway) as sockets:
        gateway.sleep("mlp")
        assert (await sockets.predict.ModelReady(name, metadata=AUTH)).ready
        gateway.sleep("mlp", failure="no tensor x", retry_unix_s=4e9)
        with pytest.raises(grpc.aio.AioRpcError, match="no tensor x"):
            await sockets.predict.ModelReady(name, metadata=AUTH)
        held = gateway.deployments.view["/fairway/v1/deployments/mlp"].record
        gateway.deployments.put("/fairway/v1/deployments/mlp", replace(held, scaling=None), 42)
        del gateway.scaled.records["/fairway/v1/scaled/mlp"]
        with pytest.raises(grpc.aio.AioRpcError, match="no replica of mlp is ready"):
            await sockets.predict.ModelReady(name, metadata=AUTH)


async def test_raw_and_typed_contents_are_the_same_tensor(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        raw = await sockets.predict.ModelInfer(request(id="7"), metadata=AUTH)
        assert (raw.model_name, raw.model_version, raw.id) == ("mlp", digest_of("mlp"), "7")
        typed = request(raw_input_contents=[])
        typed.inputs[0].contents.fp32_contents.extend(BATCH.ravel().tolist())
        again = await sockets.predict.ModelInfer(typed, metadata=AUTH)
        np.testing.assert_array_equal(output_of(raw), output_of(again))
        assert output_of(raw).shape == (2, 3)


async def test_a_stream_answers_in_order_and_survives_an_error(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:

        async def requests() -> AsyncIterator[v2.ModelInferRequest]:
            for number in range(20):
                if number == 3:
                    yield request(id="3", model_name="none")
                elif number == 4:
                    yield request(id="4", model_name="")  # out of bounds
                else:
                    yield request(BATCH + number, id=str(number))

        answers = [answer async for answer in sockets.predict.ModelStreamInfer(requests(), metadata=AUTH)]
        assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(20)]
        assert answers[3].error_message.startswith("MODEL_NOT_FOUND")
        assert answers[4].error_message.startswith("INVALID_INPUT")
        alone = await sockets.predict.ModelInfer(request(BATCH + 19), metadata=AUTH)
        np.testing.assert_array_equal(output_of(answers[19].infer_response), output_of(alone))


async def test_a_stream_that_is_cancelled_withdraws_its_rows(gateway: RowsGateway) -> None:
    gateway.runner.gate.clear()
    async with served(gateway) as sockets:
        call = sockets.predict.ModelStreamInfer(metadata=AUTH)
        for number in range(3):
            await call.write(request(id=str(number)))
        async with asyncio.timeout(30):
            while gateway.runner.running < 3:
                await asyncio.sleep(0.005)
            call.cancel()
            while gateway.runner.running or gateway.service.running:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"raw_input_contents": []}, "0 bytes"),
        ({"raw_input_contents": [b"", b""]}, "1 inputs and 2 raw"),
        ({"raw_input_contents": [b"1234"]}, "4 bytes; its shape and data type need 32"),
        ({"inputs": [], "raw_input_contents": []}, "input is missing"),
        ({"outputs": [v2.ModelInferRequest.InferRequestedOutputTensor(name="logits")]}, "is no output"),
        ({"parameters": {"sequence_id": v2.InferParameter(int64_param=1)}}, "sequence_id"),
        ({"parameters": {"timeout": v2.InferParameter(int64_param=-1)}}, "timeout"),
    ],
)
async def test_a_bad_request_is_refused_by_name(
    gateway: RowsGateway, fields: dict[str, Any], text: str
) -> None:
    async with served(gateway) as sockets:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await sockets.predict.ModelInfer(request(**fields), metadata=AUTH)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in (refused.value.details() or "")
    assert not gateway.runner.requests


@pytest.mark.parametrize(
    ("datatype", "shape", "text"),
    [
        ("BYTES", [2, 4], "BYTES is not offered"),
        ("FP64", [2, 4], "data type FP64, not FP32"),
        ("FP99", [2, 4], "datatype"),
        ("FP32", [2, 5], "shape [2, 5], not [2, 4]"),
        ("FP32", [8], "shape [8], not [8, 4]"),
        ("FP32", [0, 4], "is empty"),
        ("FP32", [1 << 30, 4], "at most 2048"),
        ("FP32", [-1, 4], "shape"),
    ],
)
async def test_a_tensor_that_does_not_fit_is_refused(
    gateway: RowsGateway, datatype: str, shape: list[int], text: str
) -> None:
    tensor = v2.ModelInferRequest.InferInputTensor(name="input", datatype=datatype, shape=shape)
    async with served(gateway) as sockets:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await sockets.predict.ModelInfer(request(inputs=[tensor]), metadata=AUTH)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in (refused.value.details() or "")


async def test_every_call_needs_a_key(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        stub = sockets.predict
        for call in (
            stub.ServerLive(v2.ServerLiveRequest()),
            stub.ServerReady(v2.ServerReadyRequest()),
            stub.ServerMetadata(v2.ServerMetadataRequest()),
            stub.ModelReady(v2.ModelReadyRequest(name="mlp")),
            stub.ModelMetadata(v2.ModelMetadataRequest(name="mlp")),
            stub.ModelInfer(request()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.ModelStreamInfer():
                pass
