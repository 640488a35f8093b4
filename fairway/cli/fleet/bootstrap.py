"""From serving roles to a model that answers: publish, tenant, key, deployment, READY."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import grpc

from fairway.cli.calls import CALL_TIMEOUT_S, bearer, checked, open_channel, to_cli_error
from fairway.cli.errors import CliError
from fairway.cli.fleet.options import UpOptions
from fairway.cli.fleet.progress import Progress
from fairway.cli.fleet.publishing import VERB, publish_folder
from fairway.cli.fleet.remote import FleetAddresses
from fairway.cli.state import StateDir, read_secret, write_private
from fairway.cli.waiting import describe, until_deployed
from fairway.client.publish import PublishProgress
from fairway.v1 import (
    common_pb2,
    controlplane_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from fairway.v1 import controlplane_pb2 as cp

Metadata = tuple[tuple[str, str], ...]
TENANT: Final = "default"
KEY_NAME: Final = "local"
TAG: Final = "latest"

_POLL_S: Final = 0.25
_SETTLE_S: Final = 30.0
_STALE_KEY_S: Final = 3.0  # a gateway has heard of a key long before


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Brings an installation's resources to what ``options`` ask for; every step may be repeated."""

    options: UpOptions
    state: StateDir
    addresses: FleetAddresses
    progress: Progress

    async def run(self) -> str:
        """Return the API key once the gateway accepts it and serves the model. Raises CliError."""
        admin = bearer(read_secret(self.state, "admin_key"))
        await self._until_admin_is_known(admin)
        digest = await self._publish(admin) if self.options.deploy else ""
        async with open_channel(self.addresses.of("controlplane")) as channel:
            stub = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)
            await self._ensure_tenant(stub, admin)
            api_key = await self._ensure_key(stub, admin)
            if digest:
                await self._ensure_deployment(stub, admin, digest)
                await self._until_deployed(stub, admin)
        return await self._until_served(api_key, admin)

    async def _until_admin_is_known(self, admin: Metadata) -> None:
        """Return once control plane and registry accept the admin key: they hear of it from the store."""
        deadline = time.monotonic() + _SETTLE_S
        async with (
            open_channel(self.addresses.of("controlplane")) as control_channel,
            open_channel(self.addresses.of("registry")) as registry_channel,
        ):
            control = controlplane_pb2_grpc.ControlPlaneServiceStub(control_channel)
            registry = registry_pb2_grpc.RegistryServiceStub(registry_channel)
            while True:
                try:
                    await control.ListTenants(cp.ListTenantsRequest(), timeout=CALL_TIMEOUT_S, metadata=admin)
                    await registry.ListRegisteredModels(
                        registry_pb2.ListRegisteredModelsRequest(), timeout=CALL_TIMEOUT_S, metadata=admin
                    )
                    return
                except grpc.aio.AioRpcError as exc:
                    if exc.code() != grpc.StatusCode.UNAUTHENTICATED or time.monotonic() > deadline:
                        raise to_cli_error(exc, what="the admin key is not accepted") from exc
                await asyncio.sleep(_POLL_S)

    async def _publish(self, admin: Metadata) -> str:
        name, folder = self.options.model_name, self.options.model_folder
        self.progress.event("model", "starting", f"publishing {folder}")

        def report(progress: PublishProgress) -> None:
            detail = f"{VERB[progress.phase]} {folder}: {100 * progress.done_ratio:.0f} %"
            self.progress.event("model", "starting", detail)

        async with open_channel(self.addresses.of("registry")) as channel:
            published = await publish_folder(channel, folder, name, TAG, admin=admin, report=report)
        digest = published.digest
        self.progress.event("model", "ready", f"{name} is {digest[:19]}…")
        return digest

    async def _ensure_tenant(
        self, stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub, admin: Metadata
    ) -> None:
        tenant = cp.Tenant(
            metadata=cp.Metadata(name=TENANT),
            display_name="Default",
            max_priority=common_pb2.PRIORITY_INTERACTIVE,
        )
        request = cp.CreateTenantRequest(tenant=tenant)
        try:
            await stub.CreateTenant(request, timeout=CALL_TIMEOUT_S, metadata=admin)
        except grpc.aio.AioRpcError as exc:
            if exc.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise to_cli_error(exc, what=f"cannot create the tenant {TENANT}") from exc

    async def _ensure_key(
        self, stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub, admin: Metadata
    ) -> str:
        """Return the remembered key while the control plane knows its name, else a new one."""
        remembered = read_secret(self.state, "api_key")
        known = True
        try:
            await stub.GetKey(cp.GetKeyRequest(name=KEY_NAME), timeout=CALL_TIMEOUT_S, metadata=admin)
        except grpc.aio.AioRpcError as exc:
            if exc.code() != grpc.StatusCode.NOT_FOUND:
                raise to_cli_error(exc, what=f"cannot look up the key {KEY_NAME}") from exc
            known = False
        if known and remembered:
            return remembered
        return await self._new_key(stub, admin, replace=known)

    async def _new_key(
        self, stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub, admin: Metadata, *, replace: bool
    ) -> str:
        if replace:
            gone = stub.DeleteKey(cp.DeleteKeyRequest(name=KEY_NAME), timeout=CALL_TIMEOUT_S, metadata=admin)
            await checked(gone, what=f"cannot replace the key {KEY_NAME}")
        key = cp.Key(metadata=cp.Metadata(name=KEY_NAME), role=cp.KEY_ROLE_TENANT, tenant=TENANT)
        created = await checked(
            stub.CreateKey(cp.CreateKeyRequest(key=key), timeout=CALL_TIMEOUT_S, metadata=admin),
            what=f"cannot create the key {KEY_NAME}",
        )
        with self.state.writing():
            write_private(self.state.secret("api_key"), created.secret + "\n")
        return created.secret

    async def _ensure_deployment(
        self, stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub, admin: Metadata, digest: str
    ) -> None:
        name = self.options.model_name
        wanted = cp.Deployment(
            metadata=cp.Metadata(name=name), model=name, version=digest, replicas=self.options.replicas
        )
        request = cp.CreateDeploymentRequest(deployment=wanted)
        try:
            await stub.CreateDeployment(request, timeout=CALL_TIMEOUT_S, metadata=admin)
        except grpc.aio.AioRpcError as exc:
            if exc.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise to_cli_error(exc, what=f"cannot create the deployment {name}") from exc
            update = cp.UpdateDeploymentRequest(deployment=wanted)
            call = stub.UpdateDeployment(update, timeout=CALL_TIMEOUT_S, metadata=admin)
            await checked(call, what=f"cannot update the deployment {name}")

    async def _until_deployed(
        self, stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub, admin: Metadata
    ) -> None:
        name = self.options.model_name
        began = time.monotonic()

        async def read() -> cp.Deployment:
            call = stub.GetDeployment(
                cp.GetDeploymentRequest(name=name), timeout=CALL_TIMEOUT_S, metadata=admin
            )
            return (await checked(call, what=f"cannot read the deployment {name}")).deployment

        def report(found: cp.Deployment) -> None:
            self.progress.event("replicas", "starting", describe(found))

        try:
            deployed = await until_deployed(read, report, timeout_s=self.options.ready_s)
        except CliError as exc:
            step = f"see the logs of the workers under {self.state.logs}; another model with --model-dir"
            raise CliError(exc.reason, exc.message, next_step=step, exit_code=exc.exit_code) from exc
        ready, elapsed = deployed.status.ready_replicas, time.monotonic() - began
        self.progress.event("replicas", "ready", f"{ready} READY after {elapsed:.1f} s")

    async def _until_served(self, api_key: str, admin: Metadata) -> str:
        """Return the key that every gateway accepts: a stale one, left by lost state, is replaced once."""
        reason = await self._served("gateway", api_key, patience_s=_STALE_KEY_S)
        if isinstance(reason, grpc.aio.AioRpcError) and reason.code() == grpc.StatusCode.UNAUTHENTICATED:
            async with open_channel(self.addresses.of("controlplane")) as control:
                api_key = await self._new_key(
                    controlplane_pb2_grpc.ControlPlaneServiceStub(control), admin, replace=True
                )
        for gateway in self.addresses.gateway_names:
            reason = await self._served(gateway, api_key, patience_s=_SETTLE_S)
            if isinstance(reason, grpc.aio.AioRpcError):
                raise to_cli_error(reason, what=f"{gateway} does not serve yet") from reason
            if reason is not None:
                raise CliError(
                    "NOT_SERVED",
                    f"{gateway} does not offer {self.options.model_name}: {reason}",
                    next_step=f"see {self.state.log(gateway)}",
                )
        return api_key

    async def _served(
        self, gateway: str, api_key: str, *, patience_s: float
    ) -> str | grpc.aio.AioRpcError | None:
        """Return None once the gateway lists the model as ready for this key, else what it last said."""
        async with open_channel(self.addresses.grpc_of(gateway)) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return await self._listed(stub, api_key, patience_s=patience_s)

    async def _listed(
        self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, api_key: str, *, patience_s: float
    ) -> str | grpc.aio.AioRpcError | None:
        deadline = time.monotonic() + patience_s
        wanted = self.options.model_name if self.options.deploy else None
        last: str | grpc.aio.AioRpcError = "never asked"
        while time.monotonic() < deadline:
            try:
                answer = await stub.ListModels(
                    inference_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT_S, metadata=bearer(api_key)
                )
                ready = {model.name: model.ready_replicas for model in answer.models}
                if wanted is None or ready.get(wanted, 0) >= 1:
                    return None
                last = f"it lists {ready}"
            except grpc.aio.AioRpcError as exc:
                last = exc
            await asyncio.sleep(_POLL_S)
        return last
