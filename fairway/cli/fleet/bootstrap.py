"""Bootstrap of a serving fleet: tenant, key, published model and deployment, until it is READY.

It creates only missing resources. Present resources stay as operators made them, and a deleted deployment
stays deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

from fairway.cli.calls import (
    CALL_TIMEOUT_S,
    PHASE_VERBS,
    admin_client,
    admin_error,
    checked,
    credentials_of,
    publish_folder,
)
from fairway.cli.errors import CliError
from fairway.cli.fleet.options import BUNDLED_CLASSIFIER, UpOptions, bundled_classifier
from fairway.cli.fleet.progress import StartProgress
from fairway.cli.state import StateDir, read_json, read_secret, write_json, write_private
from fairway.cli.watch import until_deployed
from fairway.client import (
    AdminClient,
    Client,
    ClientOptions,
    Conflict,
    DeadlineExceeded,
    FairwayError,
    NotFound,
    Unauthenticated,
    WaitFailed,
)
from fairway.client.admin.watch import describe, ready_replicas, until_any_ready, wanted_replicas
from fairway.client.publish.publish import PublishProgress
from fairway.v1 import common_pb2
from fairway.v1 import controlplane_pb2 as cp

T = TypeVar("T")


class FleetAddresses(Protocol):
    """host:port of the services that a bootstrap calls."""

    def of(self, name: str) -> str:
        """Address of "registry" or "controlplane"."""
        ...

    def grpc_of(self, name: str) -> str:
        """gRPC address of one of ``gateway_names``."""
        ...

    def tls_of(self, name: str) -> Path | None:
        """Folder of the certificate for calls of any of these; None: it serves without TLS."""
        ...

    @property
    def gateway_names(self) -> tuple[str, ...]: ...


TENANT: Final = "default"
KEY_NAME: Final = "local"
TAG: Final = "latest"

_POLL_S: Final = 0.25
_SETTLE_S: Final = 30.0
_REPORT_S: Final = 2.0
_STALE_KEY_S: Final = 3.0  # a gateway receives a new key much sooner


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Creates the missing resources of ``options``; every step can be repeated."""

    options: UpOptions
    state: StateDir
    addresses: FleetAddresses
    progress: StartProgress

    async def run(self) -> str:
        """Return the API key once the gateway accepts it and serves the model. Raises CliError."""
        client = admin_client(
            self.addresses.of("controlplane"),
            self.addresses.of("registry"),
            admin_key=read_secret(self.state, "admin_key"),
            tls_dir=self.addresses.tls_of("controlplane"),
        )
        async with client as admin:
            await self._until_admin_key_accepted(admin)
            await self._ensure_tenant(admin)
            api_key = await self._ensure_key(admin)
            serves = self.options.deploy and await self._ensure_served(admin)
            return await self._until_listed(api_key, admin, serves=serves)

    async def _until_admin_key_accepted(self, admin: AdminClient) -> None:
        """Return once control plane and registry, which read it from the store, accept the admin key."""
        began = time.monotonic()
        deadline = began + _SETTLE_S
        while True:
            try:
                await admin.tenants.list(limit=1)
                await admin.models.list(limit=1)
                self._report_access(began, "", done=True)
                return
            except FairwayError as exc:
                if not isinstance(exc, Unauthenticated) or time.monotonic() > deadline:
                    raise admin_error(exc, what="the admin key is not accepted") from exc
            self._report_access(began, "waiting until the admin key is accepted")
            await asyncio.sleep(_POLL_S)

    async def _publish(self, admin: AdminClient) -> str:
        name, folder = self.options.model_name, self.options.model_folder
        self.progress.event("model", "starting", f"publishing {folder}")

        def report(progress: PublishProgress) -> None:
            detail = f"{PHASE_VERBS[progress.phase]} {folder}: {100 * progress.done_ratio:.0f} %"
            self.progress.event("model", "starting", detail)

        tag = "" if await _is_published(admin, name, TAG) else TAG  # an existing tag is not moved
        published = await publish_folder(admin, folder, name, tag, report=report)
        digest = published.digest
        self.progress.event("model", "ready", f"{name} is {digest[:19]}…")
        return digest

    async def _ensure_tenant(self, admin: AdminClient) -> None:
        tenant = cp.Tenant(
            metadata=cp.Metadata(name=TENANT),
            display_name="Default",
            max_priority=common_pb2.PRIORITY_INTERACTIVE,
        )
        await _ensure(admin.tenants.create(tenant), f"the tenant {TENANT}")

    async def _ensure_key(self, admin: AdminClient) -> str:
        """Return the stored key if the control plane has a key of that name, else a new one."""
        stored = read_secret(self.state, "api_key")
        exists = await _found(admin.keys.get(KEY_NAME), f"the key {KEY_NAME}") is not None
        if exists and stored:
            return stored
        return await self._new_key(admin, replace=exists)

    async def _new_key(self, admin: AdminClient, *, replace: bool) -> str:
        """Return a new secret; an operator's settings of the key stay."""
        if replace:
            secret = (await checked(admin.keys.rotate(KEY_NAME), what=f"cannot rotate {KEY_NAME}")).secret
        else:
            key = cp.Key(metadata=cp.Metadata(name=KEY_NAME), role=cp.KEY_ROLE_TENANT, tenant=TENANT)
            created = await checked(admin.keys.create(key), what=f"cannot create the key {KEY_NAME}")
            secret = created.secret
        with self.state.writing():
            write_private(self.state.secret("api_key"), secret + "\n")
        return secret

    async def _ensure_served(self, admin: AdminClient) -> bool:
        """Return whether the deployment should serve: it exists or was created, and has replicas."""
        name = self.options.model_name
        found = await _found(admin.deployments.get(name), f"the deployment {name}")
        if found is None and name in self._created() and await _is_published(admin, name):
            self.progress.event(
                "model",
                "ready",
                f"{name} stays undeployed, as it was deleted; `fairway deployments create {name} --model "
                f"{name} --version {TAG}` deploys it",
            )
            return False
        digest = await self._publish(admin)
        if found is None:
            wanted = cp.Deployment(
                metadata=cp.Metadata(name=name), model=name, version=digest, replicas=self.options.replicas
            )
            await _ensure(admin.deployments.create(wanted), f"the deployment {name}")
        self._record_created(name)
        await self._ensure_classifier(admin)
        if found is None:
            await self._until_deployed(admin)
            return True
        self._report_unchanged(found, digest)
        return bool(wanted_replicas(found)) and await self._until_any_ready(admin)

    async def _ensure_classifier(self, admin: AdminClient) -> None:
        """Publish the bundled classifier, and deploy it without replicas; the model loads meanwhile."""
        name = BUNDLED_CLASSIFIER
        if name in self._created() or not bundled_classifier().is_dir():  # a wheel has no models
            return
        tag = "" if await _is_published(admin, name, TAG) else TAG
        found = await publish_folder(admin, bundled_classifier(), name, tag, report=lambda _: None)
        wanted = cp.Deployment(metadata=cp.Metadata(name=name), model=name, version=found.digest)
        await _ensure(admin.deployments.create(wanted), f"the deployment {name}")
        self._record_created(name)

    def _created(self) -> list[str]:
        """Return the deployments that a bootstrap from this state folder created."""
        return list((read_json(self.state.created) or {}).get("deployments", []))

    def _record_created(self, name: str) -> None:
        created = self._created()
        if name not in created:
            with self.state.writing():
                write_json(self.state.created, {"deployments": [*created, name]})

    def _report_unchanged(self, found: cp.Deployment, digest: str) -> None:
        """Report how the existing deployment differs from the options."""
        requested, is_other = self.options.replicas, found.version_digest != digest
        if not is_other and found.replicas == requested:
            return
        name = found.metadata.name
        change = (f" --version {digest}" if is_other else "") + (
            f" --replicas {requested}" if found.replicas != requested else ""
        )
        self.progress.event(
            "deployment",
            "ready",
            f"{name} stays as it is: {found.replicas} replicas of {found.version_digest[:19]}…; "
            f"`fairway deployments update {name}{change}` changes it",
        )

    async def _until_any_ready(self, admin: AdminClient) -> bool:
        """Return whether a replica serves, once one does or none can.

        The number of replicas and the version are the operators' decision; they need a running fleet for it.
        """
        name = self.options.model_name
        try:
            found = await until_any_ready(
                lambda: checked(admin.deployments.get(name), what=f"cannot look up the deployment {name}"),
                self._replica_report(),
                timeout_s=self.options.ready_s,
            )
        except (WaitFailed, DeadlineExceeded) as exc:
            step = f"`fairway deployments update {name}` changes it"
            self.progress.event("replicas", "failed", f"{name} does not serve: {exc.message}; {step}")
            return False
        self.progress.event("replicas", "ready", f"{ready_replicas(found)} of {wanted_replicas(found)} READY")
        return True

    def _replica_report(self) -> Callable[[cp.Deployment], None]:
        """Return a function that reports a deployment's replicas with the seconds since now."""
        began = time.monotonic()

        def report(found: cp.Deployment) -> None:
            elapsed = time.monotonic() - began
            self.progress.event("replicas", "starting", f"{describe(found)}, {elapsed:.0f} s")

        return report

    def _report_access(self, began: float, waiting: str, *, done: bool = False) -> None:
        """Report a wait for keys and gateways that takes longer than usual, and its end."""
        elapsed = time.monotonic() - began
        if elapsed >= _REPORT_S:
            detail = f"after {elapsed:.0f} s" if done else f"{waiting}, {elapsed:.0f} s"
            self.progress.event("access", "ready" if done else "starting", detail)

    async def _until_deployed(self, admin: AdminClient) -> None:
        name = self.options.model_name
        began = time.monotonic()
        try:
            deployed = await until_deployed(
                admin, name, self._replica_report(), timeout_s=self.options.ready_s
            )
        except CliError as exc:
            step = f"see the logs of the workers under {self.state.logs}; another model with --model-dir"
            raise CliError(exc.reason, exc.message, next_step=step, exit_code=exc.exit_code) from exc
        ready, elapsed = deployed.status.ready_replicas, time.monotonic() - began
        self.progress.event("replicas", "ready", f"{ready} READY after {elapsed:.1f} s")

    async def _until_listed(self, api_key: str, admin: AdminClient, *, serves: bool) -> str:
        """Return the key once every gateway accepts it; a stale one from lost state is replaced once.

        ``serves``: the gateways must also list the model as served, unless the key excludes it.
        """
        name = self.options.model_name
        reason = await self._served("gateway", api_key, "", patience_s=_STALE_KEY_S)
        if isinstance(reason, Unauthenticated):
            if why := await self._why_key_disabled(admin):
                self.progress.event(
                    "key", "failed", f"the key {KEY_NAME} is rejected by every gateway: {why}"
                )
                return api_key
            api_key = await self._new_key(admin, replace=True)
        key = await checked(admin.keys.get(KEY_NAME), what=f"cannot look up the key {KEY_NAME}")
        wanted = name if serves and (not key.models or name in key.models) else ""
        for gateway in self.addresses.gateway_names:
            reason = await self._served(gateway, api_key, wanted, patience_s=_SETTLE_S)
            if isinstance(reason, FairwayError):
                raise admin_error(reason, what=f"{gateway} does not serve yet") from reason
            if reason is not None:
                raise CliError(
                    "NOT_SERVED",
                    f"{gateway} does not offer {self.options.model_name}: {reason}",
                    next_step=f"see {self.state.log(gateway)}",
                )
        return api_key

    async def _why_key_disabled(self, admin: AdminClient) -> str:
        """Return why operators' settings disable the key at every gateway; empty if they do not."""
        key = await checked(admin.keys.get(KEY_NAME), what=f"cannot look up the key {KEY_NAME}")
        if key.HasField("expire_time") and key.expire_time.ToSeconds() <= time.time():
            return f"it has expired; `fairway keys revoke {KEY_NAME}` lets the next start create another"
        tenant = await checked(admin.tenants.get(TENANT), what=f"cannot look up the tenant {TENANT}")
        if tenant.disabled:
            return f"the tenant {TENANT} is disabled; `fairway tenants enable {TENANT}` enables it"
        return ""

    async def _served(
        self, gateway: str, api_key: str, wanted: str, *, patience_s: float
    ) -> str | FairwayError | None:
        """Return None once the gateway accepts the key and lists a ready model, else the last failure."""
        options = ClientOptions(timeout_s=CALL_TIMEOUT_S, wait_for_ready=False)
        address = self.addresses.grpc_of(gateway)
        credentials = credentials_of(self.addresses.tls_of(gateway))
        async with Client(address, api_key=api_key, options=options, credentials=credentials) as client:
            return await self._listed(client, wanted, patience_s=patience_s)

    async def _listed(self, client: Client, wanted: str, *, patience_s: float) -> str | FairwayError | None:
        began = time.monotonic()
        deadline = began + patience_s
        last: str | FairwayError = "no call was made"
        while time.monotonic() < deadline:
            try:
                ready = {model.name: model.ready_replicas for model in await client.list_models()}
                if not wanted or ready.get(wanted, 0) >= 1:
                    self._report_access(began, "", done=True)
                    return None
                last = f"it lists {ready}"
            except FairwayError as exc:
                last = exc
            self._report_access(began, f"waiting until a gateway serves {wanted or 'the key'}")
            await asyncio.sleep(_POLL_S)
        return last


async def _is_published(admin: AdminClient, name: str, version: str = "") -> bool:
    """Whether the model has the version, or any version if it is empty. Raises CliError."""
    what = f"the model {name}"
    if not version:
        return bool(await _found(admin.models.versions(name, limit=1), what))
    return await _found(admin.models.get(name, version), what) is not None


async def _found(call: Awaitable[T], what: str) -> T | None:
    """Return the result of a look-up, None for what is not there. Raises CliError."""
    try:
        return await call
    except NotFound:
        return None
    except FairwayError as exc:
        raise admin_error(exc, what=f"cannot look up {what}") from exc


async def _ensure(creation: Awaitable[object], what: str) -> None:
    """Return once it is created, or if it exists. Raises CliError."""
    try:
        await creation
    except FairwayError as exc:
        if not (isinstance(exc, Conflict) and exc.reason == "ALREADY_EXISTS"):
            raise admin_error(exc, what=f"cannot create {what}") from exc
