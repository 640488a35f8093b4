"""What operators change takes hold on a whole installation while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc
from fairway.v1 import inference_pb2 as pb
from tests.support.stack import Stack, at_rest, metadata

HANG_S = 60.0


@dataclass
class Operator:
    stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub
    admin: tuple[tuple[str, str], ...]

    async def call(self, method: str, request: Any) -> Any:
        return await getattr(self.stub, method)(request, metadata=self.admin, timeout=10)


@asynccontextmanager
async def operator(stack: Stack) -> AsyncIterator[Operator]:
    async with stack.channel(stack.endpoints["controlplane"]) as channel:
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)
        yield Operator(stub, metadata(stack.endpoints["admin_key"]))


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await check():  # other processes hear of it from the store
            await asyncio.sleep(0.05)


def generation(stack: Stack, tokens: int = 4) -> pb.Generation:
    return pb.Generation(model=stack.model, prompt="def f():", max_output_tokens=tokens, ignore_eos=True)


async def outcome(stack: Stack, stub: Any, secret: str) -> str:
    """Return OK, or the status of a short request with this key."""
    try:
        request = pb.CompleteRequest(generation=generation(stack))
        await stub.Complete(request, metadata=metadata(secret), timeout=30)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def idle_twin(here: Operator, stack: Stack, name: str) -> cp.CreateDeploymentRequest:
    """Return the creation of a deployment of 0 replicas with the version that the fleet serves."""
    served = (await here.call("GetDeployment", cp.GetDeploymentRequest(name=stack.model))).deployment
    twin = cp.Deployment(metadata=cp.Metadata(name=name), model=served.model, version=served.version_digest)
    return cp.CreateDeploymentRequest(deployment=twin)


async def test_a_deployment_of_no_replicas_answers_nothing_though_others_run_its_version(
    stack: Stack,
) -> None:
    async with operator(stack) as here, stack.inference() as stub:
        await here.call("CreateDeployment", await idle_twin(here, stack, "idle"))
        asked = generation(stack)
        asked.model = "idle"

        async def refusal() -> grpc.aio.AioRpcError:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Complete(
                    pb.CompleteRequest(generation=asked), metadata=metadata(stack.api_key), timeout=30
                )
            return caught.value

        async def refused() -> bool:
            return (await refusal()).code() is grpc.StatusCode.UNAVAILABLE

        await eventually(refused)
        text = (await refusal()).details() or ""
        assert "0 replicas" in text
        assert "`fairway deployments update idle --replicas 1`" in text
        models = (await stub.ListModels(pb.ListModelsRequest(), metadata=metadata(stack.api_key))).models
        ready = {model.name: model.ready_replicas for model in models}
        assert ready["idle"] == 0
        assert ready[stack.model] > 0
        await here.call("DeleteDeployment", cp.DeleteDeploymentRequest(name="idle"))


async def test_keys_and_tenants_change_under_a_running_stream(stack: Stack) -> None:
    async with operator(stack) as here, stack.inference() as stub:
        tenant = cp.Tenant(metadata=cp.Metadata(name="ops"))
        await here.call("CreateTenant", cp.CreateTenantRequest(tenant=tenant))
        key = cp.Key(
            metadata=cp.Metadata(name="ops.1"), role=cp.KEY_ROLE_TENANT, tenant="ops", models=["other"]
        )
        await here.call("CreateDeployment", await idle_twin(here, stack, "other"))
        made = await here.call("CreateKey", cp.CreateKeyRequest(key=key, request_id="ops-1"))
        secret = made.secret

        async def answers(secret: str, status: str) -> bool:
            return await outcome(stack, stub, secret) == status

        await eventually(lambda: answers(secret, "NOT_FOUND"))  # it is for another model
        key.models[:] = [stack.model]
        await here.call("UpdateKey", cp.UpdateKeyRequest(key=key))
        await eventually(lambda: answers(secret, "OK"))

        rotate = cp.RotateKeyRequest(name="ops.1", request_id="ops-2")
        rotate.grace.FromSeconds(60)
        rotated = (await here.call("RotateKey", rotate)).secret
        assert (await here.call("RotateKey", rotate)).secret == rotated != secret
        await eventually(lambda: answers(rotated, "OK"))
        assert await answers(secret, "OK"), "the old secret has its grace"

        request = pb.GenerateRequest(generation=generation(stack, 300))
        stream = stub.Generate(request, metadata=metadata(rotated), timeout=HANG_S)
        first: Any = await stream.read()
        assert first.HasField("accepted")
        tenant.disabled = True
        await here.call("UpdateTenant", cp.UpdateTenantRequest(tenant=tenant))
        await eventually(lambda: answers(rotated, "UNAUTHENTICATED"))
        last = first
        while (event := await stream.read()) is not grpc.aio.EOF:
            last = event
        assert last.finished.usage.output_tokens == 300, "what runs goes on to its end"

        await here.call("DeleteDeployment", cp.DeleteDeploymentRequest(name="other"))
        await here.call("DeleteKey", cp.DeleteKeyRequest(name="ops.1"))
        await here.call("DeleteTenant", cp.DeleteTenantRequest(name="ops"))


async def test_a_node_drains_without_a_failed_stream_and_events_tell_it(stack: Stack) -> None:
    async with operator(stack) as here, stack.inference() as stub:
        found = await here.call("GetDeployment", cp.GetDeploymentRequest(name=stack.model))
        names = sorted(
            node.metadata.name for node in (await here.call("ListNodes", cp.ListNodesRequest())).nodes
        )
        streams = [asyncio.create_task(_run(stack, stub)) for _ in range(8)]
        drained = (await here.call("DrainNode", cp.DrainNodeRequest(name=names[0]))).node
        assert not drained.drain.done
        assert "has_a_replica" in drained.drain.waiting_for[0], "it stays until there is a place for it"
        found.deployment.replicas, found.deployment.metadata.etag = 1, ""
        await here.call("UpdateDeployment", cp.UpdateDeploymentRequest(deployment=found.deployment))

        async def done() -> bool:
            node = (await here.call("GetNode", cp.GetNodeRequest(name=names[0]))).node
            return bool(node.drain.done)

        await eventually(done)
        assert await asyncio.gather(*streams) == [200] * 8
        queues = (await here.call("ListQueues", cp.ListQueuesRequest())).queues
        assert [list(queue.deployments) for queue in queues] == [[stack.model]]
        assert queues[0].pool.serving_workers == 1

        async def told() -> bool:
            request = cp.ListEventsRequest(resource=names[0])
            return any(e.reason == "NODE_DRAINED" for e in (await here.call("ListEvents", request)).events)

        await eventually(told)
        await here.call("UncordonNode", cp.UncordonNodeRequest(name=names[0]))
        found.deployment.replicas = 2
        await here.call("UpdateDeployment", cp.UpdateDeploymentRequest(deployment=found.deployment))
    await stack.wait_workers(at_rest, HANG_S)


async def _run(stack: Stack, stub: Any) -> int:
    """Return how many tokens a stream had."""
    request = pb.GenerateRequest(generation=generation(stack, 200))
    tokens = 0
    async for event in stub.Generate(request, metadata=metadata(stack.api_key), timeout=HANG_S):
        tokens += len(event.chunk.ids) if event.HasField("chunk") else 0
    return tokens
