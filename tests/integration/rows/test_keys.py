"""Idempotency keys of fixed-cost models by every interface: two gateways, encrypted records in Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import numpy as np
import pytest

from fairway.inference import v2_pb2
from fairway.v1 import inference_pb2 as pb
from services.adapters.record_cipher import EncryptedRecords
from services.adapters.redis.idempotency import RedisIdempotency
from services.adapters.redis.limiter import RedisLimiter
from services.core import errors
from services.core.generation import Usage
from services.rpc.status import from_rpc_error
from tests.integration.rows.http import ask
from tests.support.metered import MeteredLimiter, charged
from tests.support.rows_gateway import AUTH, CLOCK, Sockets, rows_gateway, served
from tests.support.tenant_keys import record_cipher

BATCH = np.arange(8, dtype=np.float32).reshape(2, 4)


async def test_every_interface_repeats_an_answer_charged_once(
    redis_url: str, folders: dict[str, Path]
) -> None:
    limiter = RedisLimiter(redis_url, CLOCK, timeout_s=2.0)
    store = RedisIdempotency(redis_url, CLOCK, timeout_s=2.0)
    records = EncryptedRecords(store, record_cipher())
    parts: dict[str, Any] = {"limiter": MeteredLimiter(limiter), "records": records}
    before = await charged(limiter, "acme")
    async with (
        rows_gateway(folders, owner="g0", **parts) as left,
        rows_gateway(folders, owner="g1", **parts) as right,
        served(left) as one,
        served(right) as other,
    ):
        await _embedded(one, other)
        await _by_http(one, other)
        await _by_protocol_v2(one, other)
        assert not right.runner.requests
        assert len(left.runner.requests) == 4
        tokens = 7 + 3 + 2 + 2
        assert await charged(limiter, "acme") == Usage(before.prompt_tokens + tokens, 0)
        assert await limiter.concurrency("acme") == 0
    await store.close()
    await limiter.close()


async def _embedded(one: Sockets, other: Sockets) -> None:
    request = pb.EmbedRequest(model="embed", inputs=["the fox", "dog"], idempotency_key=uuid4().hex)
    first = await one.stub.Embed(request, metadata=AUTH)
    again = await other.stub.Embed(request, metadata=AUTH)
    assert (first.replayed, again.replayed) == (False, True)
    again.replayed = False
    assert again == first
    request.inputs[0] = "the dog"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await other.stub.Embed(request, metadata=AUTH)
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert isinstance(from_rpc_error(refused.value), errors.IdempotencyConflict)


async def _by_http(one: Sockets, other: Sockets) -> None:
    key, body = uuid4().hex, {"model": "embed", "input": "dog"}
    first = await ask(one.http_port, "POST", "/v1/embeddings", body, idempotency_key=key)
    again = await ask(other.http_port, "POST", "/v1/embeddings", body, idempotency_key=key)
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json == first.json
    conflict = await ask(
        other.http_port, "POST", "/v1/embeddings", body | {"input": "fox"}, idempotency_key=key
    )
    assert conflict.status == 409, conflict.body


async def _by_protocol_v2(one: Sockets, other: Sockets) -> None:
    tensor = v2_pb2.ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=[2, 4])
    request = v2_pb2.ModelInferRequest(
        model_name="mlp",
        inputs=[tensor],
        raw_input_contents=[BATCH.tobytes()],
        parameters={"idempotency_key": v2_pb2.InferParameter(string_param=uuid4().hex)},
    )
    first = await one.predict.ModelInfer(request, metadata=AUTH)
    again = await other.predict.ModelInfer(request, metadata=AUTH)
    assert not first.parameters
    assert again.parameters["replayed"].bool_param
    assert again.raw_output_contents == first.raw_output_contents

    key = uuid4().hex
    data = {"name": "input", "datatype": "FP32", "shape": [2, 4], "data": BATCH.ravel().tolist()}
    http = [
        await ask(port, "POST", "/v2/models/mlp/infer", {"inputs": [data]}, idempotency_key=key)
        for port in (one.http_port, other.http_port)
    ]
    assert "idempotent-replayed" not in http[0].headers
    assert http[1].headers["idempotent-replayed"] == "true"
    assert http[1].json == http[0].json
