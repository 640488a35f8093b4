"""A dedicated tenant on a node of its own beside a packed one, and the loss of that node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from fairway.v1 import inference_pb2 as pb
from tests.support.command_line import CommandLine
from tests.support.stack import Stack, kill, metadata

PATIENCE_S = 60.0
TOKENS = 400
REFUSAL = "no node of dedicated/acme serves"


class Client:
    """One stream of a tenant; ``begun`` is set with its first token."""

    def __init__(self, stack: Stack, model: str, key: str) -> None:
        self._stack, self._model, self._key = stack, model, key
        self.begun = asyncio.Event()

    async def stream(self, tokens: int = TOKENS) -> list[int]:
        generation = pb.Generation(
            model=self._model, prompt="The tide", max_output_tokens=tokens, ignore_eos=True
        )
        generation.sampling.temperature = 0.0
        ids: list[int] = []
        async with self._stack.inference() as stub, asyncio.timeout(PATIENCE_S):
            call = stub.Generate(pb.GenerateRequest(generation=generation), metadata=metadata(self._key))
            async for event in call:
                ids += event.chunk.ids
                if ids:
                    self.begun.set()
        return ids


@pytest.mark.timeout(300)
async def test_the_loss_of_a_dedicated_node_is_its_tenants_alone(tmp_path: Path, installations: None) -> None:
    with Stack.started(tmp_path / "state", workers=2, replicas=2) as stack:
        acme = Client(stack, "acme-chat", await asyncio.to_thread(dedicated, CommandLine(stack.state), stack))
        packed = Client(stack, stack.model, stack.api_key)
        await first_answer(acme)
        undisturbed = await packed.stream()
        packed.begun.clear()
        pid = stack.worker_pid("worker-1")
        async with asyncio.TaskGroup() as group:
            lost, other = group.create_task(ended(acme, 900)), group.create_task(packed.stream())
            await asyncio.gather(acme.begun.wait(), packed.begun.wait())
            before = group.create_task(ended(acme, 900))
            await asyncio.sleep(0)
            kill(pid)
            after = group.create_task(ended(acme, 900))
        assert other.result() == undisturbed, "the packed tenant lost by it"
        assert all(REFUSAL in one.result() for one in (lost, before, after))
        await first_answer(acme)
        assert await packed.stream() == undisturbed


def dedicated(cli: CommandLine, stack: Stack) -> str:
    """Give a new tenant a node and a deployment of its own; return its key."""
    cli("tenants", "create", "acme", "--isolation", "dedicated")
    cli("nodes", "assign", "worker-1", "--tenant", "acme")
    cli("deployments", "create", "acme-chat", "--model", stack.model, "--tenant", "acme")
    return cli("keys", "create", "acme-key", "--tenant", "acme").out.strip()


async def first_answer(client: Client) -> None:
    """Return once the tenant's own node answers."""
    async with asyncio.timeout(PATIENCE_S):
        while await ended(client, 4):
            await asyncio.sleep(0.2)
    client.begun.clear()


async def ended(client: Client, tokens: int = TOKENS) -> str:
    """Return the error of a stream, empty if it ended well."""
    try:
        await client.stream(tokens)
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    return ""
