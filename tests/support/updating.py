"""A deployment that is updated under streams, and what its clients observed."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from tests.support.stack import ROOT, Stack, fairway, metadata

CHECKPOINT = ROOT / "models/tiny/checkpoint"
PROMPTS = tuple(f"class Queue{number}:\n    def push(self, item):\n" for number in range(8))
TOKENS = (8, 24, 24, 240)
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """One stream. Times in seconds of ``time.monotonic``; ``failure`` is empty when it had all its tokens."""

    began_s: float
    ttft_s: float
    version_digest: str
    failure: str


@dataclass(slots=True)
class Traffic:
    """Clients that stream one request after another.

    ``texts``: the one output of each (digest of the weights, prompt, tokens).
    """

    served: list[Served] = field(default_factory=list)
    texts: dict[tuple[str, str, int], str] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        return [one.failure for one in self.served if one.failure]

    def versions(self) -> list[str]:
        """Return the versions that answered, in the order in which their first streams began."""
        found = sorted(self.served, key=lambda one: one.began_s)
        return list(dict.fromkeys(one.version_digest for one in found if one.version_digest))

    def ttft_s(self, began_s: float, ended_s: float) -> list[float]:
        """Return the times to first token of the streams that began then."""
        return [one.ttft_s for one in self.served if began_s <= one.began_s < ended_s and not one.failure]

    @asynccontextmanager
    async def running(self, stack: Stack, clients: int) -> AsyncIterator[None]:
        """Stream with so many clients until the end of the block, which waits for their last streams."""
        stopping = asyncio.Event()
        async with grpc.aio.insecure_channel(stack.endpoints["grpc"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self._client(stack, stub, number, stopping))
                try:
                    yield
                finally:
                    stopping.set()

    async def _client(
        self,
        stack: Stack,
        stub: inference_pb2_grpc.InferenceServiceAsyncStub,
        number: int,
        stopping: asyncio.Event,
    ) -> None:
        for turn in itertools.count(number):
            if stopping.is_set():
                return
            prompt, tokens = PROMPTS[turn % len(PROMPTS)], TOKENS[turn % len(TOKENS)]
            self.served.append(await self._stream(stack, stub, prompt, tokens))

    async def _stream(
        self, stack: Stack, stub: inference_pb2_grpc.InferenceServiceAsyncStub, prompt: str, tokens: int
    ) -> Served:
        generation = pb.Generation(
            model=stack.model, prompt=prompt, max_output_tokens=tokens, ignore_eos=True
        )
        generation.sampling.temperature = 0.0
        began_s, first_s, digest, text, count = time.monotonic(), 0.0, "", "", 0
        weights = ""
        try:
            async for event in stub.Generate(
                pb.GenerateRequest(generation=generation), metadata=metadata(stack.api_key), timeout=TIMEOUT_S
            ):
                if event.HasField("accepted"):
                    digest, weights = event.accepted.version_digest, event.accepted.weights_digest
                elif event.HasField("chunk"):
                    first_s = first_s or time.monotonic()
                    text += event.chunk.text
                    count += len(event.chunk.ids)
        except grpc.aio.AioRpcError as error:
            return Served(began_s, 0.0, digest, f"{error.code().name}: {error.details()}")
        failure = "" if count == tokens else f"{count} of {tokens} tokens"
        if self.texts.setdefault((weights, prompt, tokens), text) != text:
            failure = failure or "another text than before"
        return Served(began_s, first_s - began_s, digest, failure)


def publish_twin(stack: Stack, folder: Path, tag: str) -> None:
    """Publish the bundled weights once more, as a version with another digest."""
    shutil.copytree(CHECKPOINT, folder)
    (folder / "README.md").write_text(f"The same weights, published as {tag}.\n")
    publish(stack, folder, stack.model, tag)


def publish(stack: Stack, folder: Path, name: str, tag: str) -> None:
    """Publish a folder to the stack, with a tag."""
    fairway("models", "publish", str(folder), "--name", name, "--tag", tag, "--state-dir", str(stack.state))


def admin_of(stack: Stack) -> AdminClient:
    endpoints = stack.endpoints
    return AdminClient(
        endpoints["controlplane"],
        admin_key=endpoints["admin_key"],
        registry=endpoints["registry"],
        credentials=stack.credentials,
    )


async def move_to(admin: AdminClient, name: str, version: str, *, timeout_s: float = 180) -> cp.Deployment:
    """Update a deployment and return it once all its replicas run the version."""

    def change(found: cp.Deployment) -> None:
        found.version = version

    await admin.deployments.change(name, change)
    return await admin.deployments.wait_ready(name, timeout_s=timeout_s)
