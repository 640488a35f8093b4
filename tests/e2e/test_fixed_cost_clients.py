"""The OpenAI SDK and tritonclient, unchanged, against a gateway whose rows are computed in this process."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import numpy as np

from services.worker.batcher.models.rows import Padded
from tests.support.row_versions import embedding_version, mlp_version, reranker_version
from tests.support.rows_gateway import API_KEY, digest_of, rows_gateway, served

CLIENT = Path(__file__).with_name("fixed_cost_clients.py")
WITHIN_S = 90


async def test_public_clients_receive_what_the_models_compute(tmp_path: Path, openai_python: str) -> None:
    folders = {
        "embed": embedding_version(tmp_path / "embed"),
        "cut": embedding_version(tmp_path / "cut", is_matryoshka=True),
        "rerank": reranker_version(tmp_path / "rerank"),
        "mlp": mlp_version(tmp_path / "mlp"),
    }
    async with rows_gateway(folders) as gateway, served(gateway) as sockets:
        addresses = (f"127.0.0.1:{sockets.http_port}", f"127.0.0.1:{sockets.grpc_port}")
        process = await asyncio.create_subprocess_exec(
            openai_python,
            str(CLIENT),
            *addresses,
            API_KEY,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        )
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate()
        assert process.returncode == 0, (out + err).decode()
        found = json.loads(out.splitlines()[-1])
        batch = np.arange(8, dtype=np.float32).reshape(2, 4)
        rows = gateway.runner.models[digest_of("mlp")].run(Padded([{"input": row} for row in batch]))
        expected = [row["output"].tolist() for row in rows]

    openai = found["openai"]
    assert openai["default"] == openai["floats"] == openai["ids"]
    assert openai["packed"] == openai["floats"][1]
    assert len(openai["packed"]) == 24
    assert openai["tokens"] == 7
    assert openai["cut"] == 8
    assert openai["refused"] == "unsupported_feature dimensions"
    assert openai["models"] == ["cut", "embed", "mlp", "rerank"]

    http = found["http"]
    assert http["live"]
    assert http["ready"]
    assert http["model_ready"]
    assert not http["none_ready"]
    assert http["server"] == "fairway"
    assert http["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}]
    assert http["binary"] == http["json"] == expected
    assert "none" in http["refused"]

    over_grpc = found["grpc"]
    assert over_grpc["live"]
    assert over_grpc["ready"]
    assert over_grpc["model_ready"]
    assert over_grpc["server"] == "fairway"
    assert over_grpc["input"] == [-1, 4]
    assert over_grpc["output"] == expected
    assert "MODEL_NOT_FOUND" in over_grpc["streamed"].pop(4)
    assert over_grpc["streamed"] == [[str(number), expected] for number in range(10) if number != 4]
    assert found["aio"] == expected
