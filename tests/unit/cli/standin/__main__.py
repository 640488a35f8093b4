"""A stand-in for ``python -m services ROLE``: it serves health and the few answers that `fairway up` needs.

What it "stores" is a folder of files beside its state, so that it survives a restart like the real stores.
STANDIN_FAIL names a role that dies at its start, STANDIN_REPLICA the state that deployments report.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from fairway.tls import read_folder
from fairway.v1 import (
    controlplane_pb2,
    controlplane_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    worker_pb2,
)

STORE = Path(os.environ.get("FAIRWAY_STATE_DIR", ".")).parent / "store"


def _node(name: str) -> controlplane_pb2.Node:
    node = controlplane_pb2.Node(metadata=controlplane_pb2.Metadata(name=name))
    node.draining = node.drain.done = (STORE / f"drain-{name}").exists()
    return node


def _credentials() -> grpc.ServerCredentials:
    identity = read_folder(Path(os.environ["FAIRWAY_TLS_DIR"]))
    pair = (identity.key_pem, identity.chain_pem)
    return grpc.ssl_server_credentials([pair], identity.roots_pem, require_client_auth=True)


def _key(context: Any) -> str:
    return str(dict(context.invocation_metadata()).get("authorization", "")).removeprefix("Bearer ")


class ControlPlane(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    """Knows the admin key only from its second call on, as a view that follows the store may."""

    asked = 0

    async def ListTenants(self, request: Any, context: Any) -> Any:
        self.asked += 1
        if self.asked == 1:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not heard of that key yet")
        await self._admin(context)
        return controlplane_pb2.ListTenantsResponse()

    async def CreateTenant(self, request: Any, context: Any) -> Any:
        await self._admin(context)
        return controlplane_pb2.CreateTenantResponse(tenant=request.tenant)

    async def GetTenant(self, request: Any, context: Any) -> Any:
        await self._admin(context)
        tenant = controlplane_pb2.Tenant(disabled=(STORE / "disabled").exists())
        return controlplane_pb2.GetTenantResponse(tenant=tenant)

    async def GetKey(self, request: Any, context: Any) -> Any:
        await self._admin(context)
        if not (STORE / f"key-{request.name}").exists():
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such key")
        return controlplane_pb2.GetKeyResponse()

    async def CreateKey(self, request: Any, context: Any) -> Any:
        await self._admin(context)
        secret = f"fw_{request.key.metadata.name}_{os.urandom(32).hex()}"
        (STORE / f"key-{request.key.metadata.name}").write_text(secret)
        return controlplane_pb2.CreateKeyResponse(key=request.key, secret=secret)

    async def RotateKey(self, request: Any, context: Any) -> Any:
        await self._admin(context)
        secret = f"fw_{request.name}_{os.urandom(32).hex()}"
        (STORE / f"key-{request.name}").write_text(secret)
        return controlplane_pb2.RotateKeyResponse(secret=secret)

    async def CreateDeployment(self, request: Any, context: Any) -> Any:
        path = STORE / f"deployment-{request.deployment.metadata.name}"
        if path.exists():
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "it exists")
        path.write_bytes(request.deployment.SerializeToString())
        return controlplane_pb2.CreateDeploymentResponse(deployment=request.deployment)

    async def ListDeployments(self, request: Any, context: Any) -> Any:
        found = [
            controlplane_pb2.Deployment.FromString(path.read_bytes()) for path in STORE.glob("deployment-*")
        ]
        return controlplane_pb2.ListDeploymentsResponse(deployments=found)

    async def ListNodes(self, request: Any, context: Any) -> Any:
        names = sorted(path.name.removeprefix("node-") for path in STORE.glob("node-*"))
        return controlplane_pb2.ListNodesResponse(nodes=[_node(name) for name in names])

    async def GetNode(self, request: Any, context: Any) -> Any:
        return controlplane_pb2.GetNodeResponse(node=_node(request.name))

    async def DrainNode(self, request: Any, context: Any) -> Any:
        (STORE / f"drain-{request.name}").touch()
        return controlplane_pb2.DrainNodeResponse(node=_node(request.name))

    async def DeleteNode(self, request: Any, context: Any) -> Any:
        if (STORE / f"node-{request.name}").exists():
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it lives")
        (STORE / f"drain-{request.name}").unlink(missing_ok=True)
        return controlplane_pb2.DeleteNodeResponse()

    async def GetDeployment(self, request: Any, context: Any) -> Any:
        path = STORE / f"deployment-{request.name}"
        if not path.exists():
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such deployment")
        deployment = controlplane_pb2.Deployment.FromString(path.read_bytes())
        state = worker_pb2.VersionState.Value(os.environ.get("STANDIN_REPLICA", "VERSION_STATE_READY"))
        deployment.status.replicas.add(worker_id="worker-0", state=state, message="as told")
        deployment.status.ready_replicas = int(state == worker_pb2.VERSION_STATE_READY)
        return controlplane_pb2.GetDeploymentResponse(deployment=deployment)

    async def _admin(self, context: Any) -> None:
        if _key(context) != Path(os.environ["FAIRWAY_ADMIN_KEY_FILE"]).read_text().strip():
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not the admin key")


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    async def ListRegisteredModels(self, request: Any, context: Any) -> Any:
        return registry_pb2.ListRegisteredModelsResponse()

    async def GetVersion(self, request: Any, context: Any) -> Any:
        if not (STORE / f"tag-{request.version}").exists():
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such tag")
        return registry_pb2.GetVersionResponse()

    async def ListVersions(self, request: Any, context: Any) -> Any:
        return registry_pb2.ListVersionsResponse(versions=[registry_pb2.Version()])

    async def FindMissingChunks(self, request: Any, context: Any) -> Any:
        return registry_pb2.FindMissingChunksResponse(digests=request.digests)

    async def UploadChunk(self, request_iterator: AsyncIterator[Any], context: Any) -> Any:
        parts = [part async for part in request_iterator]
        return registry_pb2.UploadChunkResponse(digest=parts[0].header.digest)

    async def CreateVersion(self, request: Any, context: Any) -> Any:
        version = registry_pb2.Version(model=request.model, digest="sha256:" + "0" * 64)
        return registry_pb2.CreateVersionResponse(version=version, created=True)

    async def SetTag(self, request: Any, context: Any) -> Any:
        (STORE / f"tag-{request.tag}").write_text(request.digest)
        return registry_pb2.SetTagResponse()


class Gateway(inference_pb2_grpc.InferenceServiceServicer):
    async def ListModels(self, request: Any, context: Any) -> Any:
        keys = {path.read_text() for path in STORE.glob("key-*")}
        if _key(context) not in keys or (STORE / "disabled").exists():
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such key")
        names = [path.name.removeprefix("deployment-") for path in STORE.glob("deployment-*")]
        return inference_pb2.ListModelsResponse(
            models=[inference_pb2.ServedModel(name=name, ready_replicas=1) for name in names]
        )


async def main(role: str) -> None:
    """Serve until SIGTERM."""
    if os.environ.get("STANDIN_FAIL") == role:
        sys.exit(f"{role} refuses to start, as told")
    STORE.mkdir(parents=True, exist_ok=True)
    server = grpc.aio.server()
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if role == "controlplane":
        controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server(ControlPlane(), server)  # type: ignore[abstract]
    elif role == "registry":
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(Registry(), server)  # type: ignore[abstract]
    elif role == "gateway":
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(Gateway(), server)  # type: ignore[abstract]
        host, _, port = os.environ["FAIRWAY_HTTP_LISTEN"].rpartition(":")
        await asyncio.start_server(lambda _, writer: writer.close(), host, int(port))
    if role == "gateway" or "FAIRWAY_TLS_DIR" not in os.environ:
        server.add_insecure_port(os.environ["FAIRWAY_LISTEN"])
    else:
        server.add_secure_port(os.environ["FAIRWAY_LISTEN"], _credentials())
    await server.start()
    node = STORE / f"node-{os.environ.get('FAIRWAY_WORKER_ID', '')}"
    if role == "worker":
        node.touch()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    node.unlink(missing_ok=True)
    await server.stop(0.2)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
