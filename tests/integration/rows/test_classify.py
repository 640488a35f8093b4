"""Classifiers of texts: over HTTP in vLLM's shape, over gRPC by Infer; logits are those of transformers."""

from __future__ import annotations

import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from tests.integration.rows.http import ask
from tests.support import picture_files
from tests.support.row_versions import WORDS, tokenizer
from tests.support.rows_gateway import AUTH, RowsGateway, served

LABELS = ["anger", "joy", "fear \u00e9"]


def logits_of(folder: Path, text: str, most: int | None = None) -> Any:
    ids = tokenizer().encode(text).ids
    if most is not None:
        ids = [*ids[: most - 1], ids[-1]]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy().astype(np.float64)


async def classified(sockets: Any, body: Any, **headers: str) -> Any:
    return await ask(sockets.http_port, "POST", "/v1/classify", body, **headers)


def drawn(seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS[4:], k=rng.randint(1, 30))) for _ in range(12)]


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
@pytest.mark.parametrize("model", ["emotion", "topics"])
async def test_texts_get_labels_and_probabilities(
    gateway: RowsGateway, folders: dict[str, Path], path: str, model: str
) -> None:
    texts = drawn(7)
    async with served(gateway) as sockets:
        found = (await ask(sockets.http_port, "POST", path, {"model": model, "input": texts})).json
        assert found["id"].startswith("classify-")
        assert (found["object"], found["model"]) == ("list", model)
        tokens = sum(len(tokenizer().encode(text).ids) for text in texts)
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        for index, (text, entry) in enumerate(zip(texts, found["data"], strict=True)):
            logits = logits_of(folders[model], text)
            if model == "topics":
                expected = 1 / (1 + np.exp(-logits))
            else:
                expected = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(entry["probs"], expected, atol=1e-5)
            assert entry["label"] == LABELS[int(expected.argmax())]
            assert (entry["index"], entry["num_classes"]) == (index, 3)
        one = (await ask(sockets.http_port, "POST", path, {"model": model, "input": texts[0]})).json
        assert one["data"] == found["data"][:1]


async def test_a_text_is_as_long_as_the_context_or_cut(
    gateway: RowsGateway, folders: dict[str, Path]
) -> None:
    async with served(gateway) as sockets:

        async def classify(words: int, **more: Any) -> Any:
            body = {"model": "emotion", "input": "dog " * words, **more}
            return await ask(sockets.http_port, "POST", "/v1/classify", body)

        assert (await classify(38)).json["usage"]["prompt_tokens"] == 40
        long = await classify(39)
        assert (long.status, long.json["error"]["param"]) == (400, "input[0]")
        assert "at most 40" in long.json["error"]["message"]
        for cut, tokens in ((-1, 40), (5, 5)):
            found = (await classify(60, truncate_prompt_tokens=cut)).json
            assert found["usage"]["prompt_tokens"] == tokens
            logits = logits_of(folders["emotion"], "dog " * 60, tokens)
            expected = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(found["data"][0]["probs"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": ["dog"] * 2049}, "input", "2049"),
        ({"input": [1, 2]}, "input", ""),
        ({"input": {"text": "dog"}}, "input", ""),
        ({}, "input", ""),
        ({"input": "dog", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "dog", "messages": []}, "messages", ""),
        ({"input": "dog", "model": "rerank"}, "model", "operation of rerank is score"),
        ({"input": "dog", "model": "embed"}, "model", "operation of embed is embed"),
        ({"input": "dog", "model": "mlp"}, "model", "operation of mlp is infer"),
    ],
)
async def test_refusals_name_the_field(
    gateway: RowsGateway, body: dict[str, Any], param: str, text: str
) -> None:
    async with served(gateway) as sockets:
        found = await ask(sockets.http_port, "POST", "/v1/classify", {"model": "emotion", **body})
        assert found.status == 400
        assert found.json["error"]["param"] == param or param in found.json["error"]["message"]
        assert text in found.json["error"]["message"]


async def test_a_repeat_with_the_same_key_receives_the_same_labels(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        body = {"model": "emotion", "input": ["dog", "the fox"]}
        first, again = [await classified(sockets, body, idempotency_key="k") for _ in range(2)]
        assert again.headers["idempotent-replayed"] == "true"
        assert again.json["data"] == first.json["data"]
        other = body | {"input": ["dog", "fox"]}
        assert (await classified(sockets, other, idempotency_key="k")).status in (409, 422)


async def test_grpc_takes_texts_or_tensors(gateway: RowsGateway, folders: dict[str, Path]) -> None:
    ids = np.array([tokenizer().encode("the fox").ids], np.int64)
    tensor = common_pb2.Tensor(name="input_ids", datatype="INT64", shape=ids.shape, data=ids.tobytes())
    async with served(gateway) as sockets:
        infer = sockets.stub.Infer
        found = await infer(pb.InferRequest(model="emotion", texts=["the fox", "dog"]), metadata=AUTH)
        outputs = {output.name: output for output in found.outputs}
        assert list(outputs) == ["logits", "probs", "label"]
        logits = np.frombuffer(outputs["logits"].data, np.float32)
        np.testing.assert_allclose(logits[:3], logits_of(folders["emotion"], "the fox"), atol=1e-5)
        by_tensor = await infer(pb.InferRequest(model="emotion", inputs=[tensor]), metadata=AUTH)
        (only,) = by_tensor.outputs
        np.testing.assert_allclose(np.frombuffer(only.data, np.float32), logits[:3], atol=1e-6)
        for request, text in (
            (pb.InferRequest(model="emotion", inputs=[tensor], texts=["dog"]), "of two kinds"),
            (pb.InferRequest(model="emotion", texts=["dog"], outputs=["x"]), "is no output"),
            (pb.InferRequest(model="mlp", texts=["dog"]), "operation of mlp"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
                await infer(request, metadata=AUTH)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_pictures_are_files_in_base64_or_data_urls(gateway: RowsGateway) -> None:
    files = [
        picture_files.picture(random.Random(seed), 30, 20, kind=kind)
        for seed, kind in enumerate(("PNG", "JPEG"))
    ]
    plain = [b64encode(file).decode() for file in files]
    urls = ["data:image/png;base64," + plain[0], "DATA:image/jpeg;BASE64," + plain[1]]
    async with served(gateway) as sockets:
        found = (await classified(sockets, {"model": "animals", "image": plain})).json
        assert [entry["num_classes"] for entry in found["data"]] == [2, 2]
        assert {entry["label"] for entry in found["data"]} <= {"cat", "dog"}
        assert found["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
        assert (await classified(sockets, {"model": "animals", "image": urls})).json["data"] == found["data"]
        one = (await classified(sockets, {"model": "animals", "image": urls[0]})).json
        assert one["data"] == found["data"][:1]
        by_grpc = await sockets.stub.Infer(pb.InferRequest(model="animals", images=files), metadata=AUTH)
        outputs = {output.name: output for output in by_grpc.outputs}
        probabilities = [value for entry in found["data"] for value in entry["probs"]]
        np.testing.assert_allclose(np.frombuffer(outputs["probs"].data, np.float64), probabilities)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"image": "http://127.0.0.1/a.png"}, "image[0]", "fetches nothing"),
        ({"image": ["AAAA", " file:///etc/passwd"]}, "image[1]", "fetches nothing"),
        ({"image": "data:image/svg+xml;base64,AAAA"}, "image[0]", "fetches nothing"),
        ({"image": "data:image/png,AAAA"}, "image[0]", "fetches nothing"),
        ({"image": "AAA"}, "image[0]", "base64"),
        ({"image": "A A A="}, "image[0]", "base64"),
        ({"image": "\u00e9"}, "image[0]", "base64"),
        ({"image": ""}, "image[0]", "cannot be read"),
        ({"image": "AAAA"}, "image[0]", "cannot be read"),
        ({"image": []}, "image", "empty"),
        ({"image": ["AAAA"] * 65}, "image", "64"),
        ({"image": "AAAA", "input": "dog"}, "input", "either input or image"),
        ({"image": "AAAA", "model": "emotion"}, "image[0]", "no pictures"),
        ({"image": "AAAA", "model": "embed"}, "model", "operation of embed"),
        ({"input": "dog"}, "input", "takes tensors"),
    ],
)
async def test_refused_pictures_are_named(
    gateway: RowsGateway, body: dict[str, Any], param: str, text: str
) -> None:
    async with served(gateway) as sockets:
        found = await classified(sockets, {"model": "animals", **body})
        assert found.status == 400, found.body
        assert text in found.json["error"]["message"]
        assert found.json["error"]["param"] == param


async def test_hostile_pictures_over_http_are_refused_and_the_next_is_served(gateway: RowsGateway) -> None:
    good = b64encode(picture_files.picture(random.Random(2), 9, 9)).decode()
    async with served(gateway) as sockets:
        files = picture_files.refused(random.Random(3))
        del files["thin"]  # a ViT takes every shape
        for name, data in files.items():
            found = await classified(sockets, {"model": "animals", "image": b64encode(data).decode()})
            assert (found.status, found.json["error"]["param"]) == (400, "image[0]"), name
        assert (await classified(sockets, {"model": "animals", "image": good})).status == 200
