"""The public inference protocol v2 over HTTP, in JSON and with its binary tensor data extension."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.integration.rows.http import ask
from tests.support.rows_gateway import RowsGateway, digest_of, served

BATCH = np.arange(8, dtype=np.float32).reshape(2, 4)
INFER = "/v2/models/mlp/infer"


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "input", "shape": [2, 4], "datatype": "FP32", "data": BATCH.ravel().tolist(), **fields}


def binary(head: dict[str, Any], *tail: bytes) -> tuple[bytes, str]:
    """Return a body with binary data, and the length of its JSON."""
    text = json.dumps(head).encode()
    return b"".join((text, *tail)), str(len(text))


async def test_health_and_metadata(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        port = sockets.http_port
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert (await ask(port, "GET", path, key=None)).status == 200
        for path in ("/v2", "/v2/models/mlp", "/v2/models/mlp/ready", INFER):
            method = "POST" if path == INFER else "GET"
            assert (await ask(port, method, path, key=None)).status == 401
        assert (await ask(port, "GET", "/v2")).json["extensions"] == ["binary_tensor_data"]
        model = (await ask(port, "GET", "/v2/models/mlp")).json
        assert model["name"] == "mlp"
        assert model["versions"] == [digest_of("mlp")]
        assert model["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}]
        by_version = f"/v2/models/mlp/versions/{digest_of('mlp')}"
        assert (await ask(port, "GET", by_version)).json == model
        assert (await ask(port, "GET", by_version + "/ready")).status == 200
        gone = await ask(port, "GET", "/v2/models/mlp/versions/sha256:0")
        assert "does not serve" in gone.json["error"]
        missing = await ask(port, "GET", "/v2/models/none/ready")
        assert (missing.status, type(missing.json["error"])) == (404, str)


async def test_flat_and_nested_json_are_one_tensor(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        flat = await ask(sockets.http_port, "POST", INFER, {"id": "7", "inputs": [tensor()]})
        assert flat.status == 200, flat.body
        assert (flat.json["model_name"], flat.json["model_version"]) == ("mlp", digest_of("mlp"))
        assert flat.json["id"] == "7"
        (output,) = flat.json["outputs"]
        assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [2, 3])
        nested = await ask(sockets.http_port, "POST", INFER, {"inputs": [tensor(data=BATCH.tolist())]})
        assert nested.json["outputs"] == [output]


async def test_binary_data_in_and_out(gateway: RowsGateway) -> None:
    described = tensor(parameters={"binary_data_size": BATCH.nbytes})
    del described["data"]
    async with served(gateway) as sockets:
        plain = await ask(sockets.http_port, "POST", INFER, {"inputs": [tensor()]})
        expected = np.array(plain.json["outputs"][0]["data"], np.float32)
        for extra in (
            {"outputs": [{"name": "output", "parameters": {"binary_data": True}}]},
            {"parameters": {"binary_data_output": True}},
        ):
            body, length = binary({"inputs": [described], **extra}, BATCH.tobytes())
            found = await ask(
                sockets.http_port,
                "POST",
                INFER,
                body,
                inference_header_content_length=length,
                content_type="application/octet-stream",
            )
            assert found.status == 200, found.body
            size = int(found.headers["inference-header-content-length"])
            head = json.loads(found.body[:size])
            assert head["outputs"][0]["parameters"] == {"binary_data_size": 24}
            np.testing.assert_array_equal(np.frombuffer(found.body[size:], np.float32), expected)


@pytest.mark.parametrize(
    ("head", "tail", "text"),
    [
        ({"inputs": []}, b"", "0 tensors"),
        ({"inputs": [tensor(data=[1.0])]}, b"", "4 bytes"),
        ({"inputs": [tensor(data="x")]}, b"", "no FP32"),
        ({"inputs": [tensor(data=[[1.0], 2.0])]}, b"", "nested lists"),
        ({"inputs": [tensor(data=[None] * 8)]}, b"", "no FP32"),
        ({"inputs": [tensor(datatype="INT64", data=[1.5] * 8)]}, b"", "no INT64"),
        ({"inputs": [tensor(datatype="UINT8", data=[256] * 8)]}, b"", "out of the range"),
        ({"inputs": [tensor(datatype="BYTES", data=["a"] * 8)]}, b"", "BYTES is not offered"),
        ({"inputs": [tensor(shape=[-1, 4])]}, b"", "shape"),
        ({"inputs": [tensor(shape=[10**12, 4])]}, b"", "shape"),
        ({"inputs": [tensor(parameters={"shared_memory_region": "r"})]}, b"", "shared_memory_region"),
        ({"inputs": [tensor(parameters={"binary_data_size": 32})]}, b"\0" * 32, "no 32 bytes"),
        ({"inputs": [tensor()]}, b"1234", "4 bytes follow"),
        ({"inputs": [tensor()], "outputs": [{"name": "x"}]}, b"", "is no output"),
        ({"inputs": [tensor()], "parameters": {"sequence_id": 1}}, b"", "sequence_id"),
        ({"inputs": [tensor()], "unheard_of": 1}, b"", "unheard_of"),
        ({"inputs": [tensor()] * 2}, b"", "twice"),
    ],
)
async def test_a_bad_request_is_refused_by_name(
    gateway: RowsGateway, head: dict[str, Any], tail: bytes, text: str
) -> None:
    body, length = binary(head, tail)
    async with served(gateway) as sockets:
        found = await ask(sockets.http_port, "POST", INFER, body, inference_header_content_length=length)
        assert found.status == 400, found.body
        assert text in found.json["error"]
    assert not gateway.runner.requests


@pytest.mark.parametrize("length", ["x", "-1", "99999", "0"])
async def test_a_wrong_head_length_is_refused(gateway: RowsGateway, length: str) -> None:
    body, _ = binary({"inputs": [tensor()]})
    async with served(gateway) as sockets:
        found = await ask(sockets.http_port, "POST", INFER, body, inference_header_content_length=length)
        assert found.status == 400
        assert isinstance(found.json["error"], str)
