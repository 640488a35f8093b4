"""From serving roles to a model that answers: publish, tenant, key, deployment, READY."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from fairway.cli.calls import CALL_TIMEOUT_S, admin_client, admin_error, checked
from fairway.cli.errors import CliError
from fairway.cli.fleet.options import UpOptions
from fairway.cli.fleet.progress import Progress
from fairway.cli.fleet.publishing import VERB, publish_folder
from fairway.cli.fleet.remote import FleetAddresses
from fairway.cli.state import StateDir, read_secret, write_private
from fairway.cli.waiting import until_deployed
from fairway.client import (
    AdminClient,
    Client,
    ClientOptions,
    Conflict,
    FairwayError,
    NotFound,
    Unauthenticated,
)
from fairway.client.admin_wait import describe
from fairway.client.publish import PublishProgress
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp

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
        client = admin_client(
            self.addresses.of("controlplane"),
            self.addresses.of("registry"),
            admin_key=read_secret(self.state, "admin_key"),
        )
        async with client as admin:
            await self._until_admin_is_known(admin)
            digest = await self._publish(admin) if self.options.deploy else ""
            await self._ensure_tenant(admin)
            api_key = await self._ensure_key(admin)
            if digest:
                await self._ensure_deployment(admin, digest)
                await self._until_deployed(admin)
            return await self._until_served(api_key, admin)

    async def _until_admin_is_known(self, admin: AdminClient) -> None:
        """Return once control plane and registry accept the admin key: they hear of it from the store."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                await admin.tenants.list(limit=1)
                await admin.models.list(limit=1)
                return
            except FairwayError as exc:
                if not isinstance(exc, Unauthenticated) or time.monotonic() > deadline:
                    raise admin_error(exc, what="the admin key is not accepted") from exc
            await asyncio.sleep(_POLL_S)

    async def _publish(self, admin: AdminClient) -> str:
        name, folder = self.options.model_name, self.options.model_folder
        self.progress.event("model", "starting", f"publishing {folder}")

        def report(progress: PublishProgress) -> None:
            detail = f"{VERB[progress.phase]} {folder}: {100 * progress.done_ratio:.0f} %"
            self.progress.event("model", "starting", detail)

        published = await publish_folder(admin, folder, name, TAG, report=report)
        digest = published.digest
        self.progress.event("model", "ready", f"{name} is {digest[:19]}…")
        return digest

    async def _ensure_tenant(self, admin: AdminClient) -> None:
        tenant = cp.Tenant(
            metadata=cp.Metadata(name=TENANT),
            display_name="Default",
            max_priority=common_pb2.PRIORITY_INTERACTIVE,
        )
        try:
            await admin.tenants.create(tenant)
        except FairwayError as exc:
            if not _is_there(exc):
                raise admin_error(exc, what=f"cannot create the tenant {TENANT}") from exc

    async def _ensure_key(self, admin: AdminClient) -> str:
        """Return the remembered key while the control plane knows its name, else a new one."""
        remembered = read_secret(self.state, "api_key")
        known = True
        try:
            await admin.keys.get(KEY_NAME)
        except NotFound:
            known = False
        except FairwayError as exc:
            raise admin_error(exc, what=f"cannot look up the key {KEY_NAME}") from exc
        if known and remembered:
            return remembered
        return await self._new_key(admin, replace=known)

    async def _new_key(self, admin: AdminClient, *, replace: bool) -> str:
        if replace:
            await checked(admin.keys.delete(KEY_NAME), what=f"cannot replace the key {KEY_NAME}")
        key = cp.Key(metadata=cp.Metadata(name=KEY_NAME), role=cp.KEY_ROLE_TENANT, tenant=TENANT)
        created = await checked(admin.keys.create(key), what=f"cannot create the key {KEY_NAME}")
        with self.state.writing():
            write_private(self.state.secret("api_key"), created.secret + "\n")
        return created.secret

    async def _ensure_deployment(self, admin: AdminClient, digest: str) -> None:
        name = self.options.model_name
        wanted = cp.Deployment(
            metadata=cp.Metadata(name=name), model=name, version=digest, replicas=self.options.replicas
        )
        try:
            await admin.deployments.create(wanted)
        except FairwayError as exc:
            if not _is_there(exc):
                raise admin_error(exc, what=f"cannot create the deployment {name}") from exc
            await checked(admin.deployments.update(wanted), what=f"cannot update the deployment {name}")

    async def _until_deployed(self, admin: AdminClient) -> None:
        name = self.options.model_name
        began = time.monotonic()

        def report(found: cp.Deployment) -> None:
            self.progress.event("replicas", "starting", describe(found))

        try:
            deployed = await until_deployed(admin, name, report, timeout_s=self.options.ready_s)
        except CliError as exc:
            step = f"see the logs of the workers under {self.state.logs}; another model with --model-dir"
            raise CliError(exc.reason, exc.message, next_step=step, exit_code=exc.exit_code) from exc
        ready, elapsed = deployed.status.ready_replicas, time.monotonic() - began
        self.progress.event("replicas", "ready", f"{ready} READY after {elapsed:.1f} s")

    async def _until_served(self, api_key: str, admin: AdminClient) -> str:
        """Return the key that every gateway accepts: a stale one, left by lost state, is replaced once."""
        reason = await self._served("gateway", api_key, patience_s=_STALE_KEY_S)
        if isinstance(reason, Unauthenticated):
            api_key = await self._new_key(admin, replace=True)
        for gateway in self.addresses.gateway_names:
            reason = await self._served(gateway, api_key, patience_s=_SETTLE_S)
            if isinstance(reason, FairwayError):
                raise admin_error(reason, what=f"{gateway} does not serve yet") from reason
            if reason is not None:
                raise CliError(
                    "NOT_SERVED",
                    f"{gateway} does not offer {self.options.model_name}: {reason}",
                    next_step=f"see {self.state.log(gateway)}",
                )
        return api_key

    async def _served(self, gateway: str, api_key: str, *, patience_s: float) -> str | FairwayError | None:
        """Return None once the gateway lists the model as ready for this key, else what it last said."""
        options = ClientOptions(timeout_s=CALL_TIMEOUT_S, wait_for_ready=False)
        address = self.addresses.grpc_of(gateway)
        async with Client(address, api_key=api_key, options=options) as client:
            return await self._listed(client, patience_s=patience_s)

    async def _listed(self, client: Client, *, patience_s: float) -> str | FairwayError | None:
        deadline = time.monotonic() + patience_s
        wanted = self.options.model_name if self.options.deploy else None
        last: str | FairwayError = "never asked"
        while time.monotonic() < deadline:
            try:
                ready = {model.name: model.ready_replicas for model in await client.list_models()}
                if wanted is None or ready.get(wanted, 0) >= 1:
                    return None
                last = f"it lists {ready}"
            except FairwayError as exc:
                last = exc
            await asyncio.sleep(_POLL_S)
        return last


def _is_there(error: FairwayError) -> bool:
    return isinstance(error, Conflict) and error.reason == "ALREADY_EXISTS"
