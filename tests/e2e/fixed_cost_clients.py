"""What applications do with the OpenAI SDK and tritonclient. Runs in an environment without Fairway.

Arguments: HTTP address, gRPC address, API key. The last line is JSON of what happened.
"""

import asyncio
import base64
import json
import queue
import sys
from typing import Any

import numpy as np
import openai
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

HTTP, GRPC, KEY = sys.argv[1:4]
HEADERS = {"authorization": f"Bearer {KEY}"}
BATCH = np.arange(8, dtype=np.float32).reshape(2, 4)


def embeddings() -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"http://{HTTP}/v1", api_key=KEY, max_retries=0)
    # Without an encoding format the SDK asks for base64 and decodes it.
    default = client.embeddings.create(model="embed", input=["the fox", "dog"])
    floats = client.embeddings.create(model="embed", input=["the fox", "dog"], encoding_format="float")
    packed = client.embeddings.create(model="embed", input="dog", encoding_format="base64")
    ids = client.embeddings.create(model="embed", input=[[2, 4, 7, 3], [2, 11, 3]])
    cut = client.embeddings.create(model="cut", input="dog", dimensions=8)
    refused = ""
    try:
        client.embeddings.create(model="embed", input="dog", dimensions=8)
    except openai.BadRequestError as error:
        refused = f"{error.code} {error.param}"
    text: Any = packed.data[0].embedding
    return {
        "default": [entry.embedding for entry in default.data],
        "floats": [entry.embedding for entry in floats.data],
        "ids": [entry.embedding for entry in ids.data],
        "packed": np.frombuffer(base64.b64decode(text), np.float32).tolist(),
        "tokens": default.usage.total_tokens,
        "cut": len(cut.data[0].embedding),
        "refused": refused,
        "models": sorted(entry.id for entry in client.models.list()),
    }


def infer(module: Any, client: Any, *, binary: bool | None = None) -> Any:
    """Return the output of the batch; ``binary``: the form of the tensors over HTTP."""
    tensor = module.InferInput("input", list(BATCH.shape), "FP32")
    options = {} if binary is None else {"binary_data": binary}
    tensor.set_data_from_numpy(BATCH, **options)
    outputs = [module.InferRequestedOutput("output", **options)]
    # The client writes into the headers that it is given.
    found = client.infer("mlp", [tensor], outputs=outputs, headers=dict(HEADERS), request_id="7")
    return found.as_numpy("output").tolist()


def over_http() -> dict[str, Any]:
    client = triton_http.InferenceServerClient(HTTP)
    metadata = client.get_model_metadata("mlp", headers=HEADERS)
    refused = ""
    try:
        client.get_model_metadata("none", headers=HEADERS)
    except InferenceServerException as error:
        refused = str(error)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready("mlp", headers=HEADERS),
        "none_ready": client.is_model_ready("none", headers=HEADERS),
        "server": client.get_server_metadata(headers=HEADERS)["name"],
        "inputs": metadata["inputs"],
        "binary": infer(triton_http, client),
        "json": infer(triton_http, client, binary=False),
        "refused": refused,
    }


def over_grpc() -> dict[str, Any]:
    client = triton_grpc.InferenceServerClient(GRPC)
    metadata = client.get_model_metadata("mlp", headers=HEADERS)
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)), headers=HEADERS)
    tensor = triton_grpc.InferInput("input", list(BATCH.shape), "FP32")
    tensor.set_data_from_numpy(BATCH)
    streamed: list[Any] = []
    for number in range(10):
        client.async_stream_infer("mlp" if number != 4 else "none", [tensor], request_id=str(number))
    for _ in range(10):
        result, error = answers.get(timeout=20)
        if error is not None:
            streamed.append(str(error))
        else:
            streamed.append([result.get_response().id, result.as_numpy("output").tolist()])
    client.stop_stream()
    return {
        "live": client.is_server_live(headers=HEADERS),
        "ready": client.is_server_ready(headers=HEADERS),
        "model_ready": client.is_model_ready("mlp", headers=HEADERS),
        "server": client.get_server_metadata(headers=HEADERS).name,
        "input": list(metadata.inputs[0].shape),
        "output": infer(triton_grpc, client),
        "streamed": streamed,
    }


async def over_aio() -> Any:
    async with triton_aio.InferenceServerClient(GRPC) as client:
        tensor = triton_aio.InferInput("input", list(BATCH.shape), "FP32")
        tensor.set_data_from_numpy(BATCH)
        found = await client.infer("mlp", [tensor], headers=HEADERS)
        return found.as_numpy("output").tolist()


found = {"openai": embeddings(), "http": over_http(), "grpc": over_grpc(), "aio": asyncio.run(over_aio())}
print(json.dumps(found))
