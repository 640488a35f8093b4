"""Fixed-cost models over gRPC: this project's own calls, on real sockets."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from tests.support.rows_gateway import AUTH, RowsGateway, digest_of, served


async def test_embed_rerank_score_and_infer_return_what_the_model_computes(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        stub = sockets.stub
        request = pb.EmbedRequest(model="embed", inputs=["the fox", "dog"])
        embedded = await stub.Embed(request, metadata=AUTH)
        assert [entry.prompt_tokens for entry in embedded.embeddings] == [4, 3]
        assert np.linalg.norm(embedded.embeddings[0].values) == pytest.approx(1.0, abs=1e-5)
        assert embedded.version_digest == digest_of("embed")
        assert (embedded.usage.prompt_tokens, embedded.usage.device_us) == (7, 500_000)
        assert embedded.request_id

        ranked = await stub.Rerank(
            pb.RerankRequest(model="rerank", query="the fox", documents=["dog", "over", "lazy dog"], top_n=2),
            metadata=AUTH,
        )
        scores = await stub.Score(
            pb.ScoreRequest(model="rerank", firsts=["the fox"], seconds=["dog", "over", "lazy dog"]),
            metadata=AUTH,
        )
        best = sorted(range(3), key=lambda index: -scores.scores[index])[:2]
        assert [result.index for result in ranked.results] == best
        assert [result.score for result in ranked.results] == [scores.scores[index] for index in best]

        rows = np.arange(8, dtype=np.float32)
        tensor = common_pb2.Tensor(name="input", datatype="FP32", shape=[2, 4], data=rows.tobytes())
        inferred = await stub.Infer(
            pb.InferRequest(model="mlp", inputs=[tensor], outputs=["output"]), metadata=AUTH
        )
        (output,) = inferred.outputs
        assert (output.name, list(output.shape), len(output.data)) == ("output", [2, 3], 24)


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (pb.EmbedRequest(model="none", inputs=["a"]), grpc.StatusCode.NOT_FOUND, "none"),
        (pb.EmbedRequest(model="embed"), grpc.StatusCode.INVALID_ARGUMENT, "no inputs"),
        (pb.EmbedRequest(inputs=["a"]), grpc.StatusCode.INVALID_ARGUMENT, "model"),
        (pb.EmbedRequest(model="mlp", inputs=["a"]), grpc.StatusCode.INVALID_ARGUMENT, "operation of mlp"),
        (
            pb.EmbedRequest(model="embed", inputs=["fox " * 99]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "at most 40",
        ),
    ],
)
async def test_errors_have_a_status(
    gateway: RowsGateway, request_: pb.EmbedRequest, code: grpc.StatusCode, text: str
) -> None:
    async with served(gateway) as sockets:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await sockets.stub.Embed(request_, metadata=AUTH)
        assert refused.value.code() is code
        assert text in (refused.value.details() or "")


async def test_a_call_without_a_key_is_refused(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        for call in (
            sockets.stub.Embed(pb.EmbedRequest(model="embed", inputs=["a"])),
            sockets.stub.Rerank(pb.RerankRequest(model="rerank", query="a", documents=["b"])),
            sockets.stub.Score(pb.ScoreRequest(model="rerank", firsts=["a"], seconds=["b"])),
            sockets.stub.Infer(pb.InferRequest(model="mlp")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_deadline_of_the_rpc_and_a_cancellation_withdraw_the_rows(gateway: RowsGateway) -> None:
    gateway.runner.gate.clear()
    request = pb.EmbedRequest(model="embed", inputs=["dog"])
    async with served(gateway) as sockets:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await sockets.stub.Embed(request, metadata=AUTH, timeout=1.0)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call = sockets.stub.Embed(request, metadata=AUTH)
        waiting = asyncio.ensure_future(call)
        while len(gateway.runner.requests) < 2:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(30):
            while gateway.service.running or await gateway.limiter.concurrency("acme"):
                await asyncio.sleep(0.005)
        assert not gateway.runner.running


async def test_a_fixed_cost_model_generates_no_text(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        generation = pb.Generation(model="embed", prompt="the fox")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await sockets.stub.Complete(pb.CompleteRequest(generation=generation), metadata=AUTH)
        assert "operation embed" in (refused.value.details() or "")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
