"""`fairway models|deployments|keys|tenants|nodes`: thin commands over the control plane and the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fairway.cli import targets
from fairway.cli.calls import CALL_TIMEOUT_S, bearer, checked, open_channel
from fairway.cli.fleet.publishing import publish_folder
from fairway.cli.output import err, out, plain, show_table
from fairway.cli.targets import (
    DEFAULT_STATE_DIR,
    AdminKeyOption,
    ControlPlaneOption,
    RegistryOption,
    StateDirOption,
    Target,
)
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, registry_pb2_grpc, worker_pb2
from fairway.v1 import registry_pb2 as rg

if TYPE_CHECKING:
    ControlPlaneStub = controlplane_pb2_grpc.ControlPlaneServiceAsyncStub
    RegistryStub = registry_pb2_grpc.RegistryServiceAsyncStub

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

models = typer.Typer(help="Model versions in the registry.", no_args_is_help=True)
deployments = typer.Typer(help="Which versions are kept running.", no_args_is_help=True)
keys = typer.Typer(help="API keys.", no_args_is_help=True)
tenants = typer.Typer(help="Tenants: the unit of quotas and isolation.", no_args_is_help=True)
nodes = typer.Typer(help="Workers.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="Lower-case letters, digits and hyphens.")]


@models.command("publish")
def publish_model(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A checkpoint folder.")],
    name: Annotated[str, typer.Option("--name", help="Name of the model.")],
    tag: Annotated[str, typer.Option("--tag")] = "latest",
    registry: RegistryOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Publish a checkpoint folder as an immutable version and point a tag at it."""
    target = targets.registry(registry, admin_key, state_dir)

    async def run() -> str:
        async with open_channel(target.address) as channel:
            return await publish_folder(
                channel, folder, name, tag, admin=bearer(target.key), report=lambda text: plain(err(), text)
            )

    plain(out(), asyncio.run(run()))


@models.command("list")
def list_models(
    registry: RegistryOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List the models of the registry with their tags."""
    target = targets.registry(registry, admin_key, state_dir)

    async def run(stub: RegistryStub, metadata: Metadata) -> list[rg.RegisteredModel]:
        found: list[rg.RegisteredModel] = []
        token = ""
        while True:
            request = rg.ListRegisteredModelsRequest(page_size=1000, page_token=token)
            call = stub.ListRegisteredModels(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            page = await checked(call, what="cannot list the models")
            found.extend(page.models)
            token = page.next_page_token
            if not token:
                return found

    async def connected() -> list[rg.RegisteredModel]:
        async with open_channel(target.address) as channel:
            return await run(registry_pb2_grpc.RegistryServiceStub(channel), bearer(target.key))

    rows = [
        (
            model.name,
            str(model.versions),
            " ".join(f"{tag}={digest}" for tag, digest in sorted(model.tags.items())),
        )
        for model in asyncio.run(connected())
    ]
    show_table(("name", "versions", "tags"), rows)


@deployments.command("create")
def create_deployment(
    name: NameArgument,
    model: Annotated[str, typer.Option("--model", help="Name in the registry; else the deployment's.")] = "",
    version: Annotated[str, typer.Option("--version", help="A digest or a tag.")] = "latest",
    replicas: Annotated[int, typer.Option("--replicas", min=0, max=10000)] = 1,
    executor: Annotated[str, typer.Option("--executor", help='"torch" or "null".')] = "",
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Keep a version running on as many workers."""
    wanted = cp.Deployment(
        metadata=cp.Metadata(name=name),
        model=model or name,
        version=version,
        replicas=replicas,
        executor=executor,
    )

    async def run(stub: ControlPlaneStub, metadata: Metadata) -> cp.Deployment:
        request = cp.CreateDeploymentRequest(deployment=wanted)
        call = stub.CreateDeployment(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        return (await checked(call, what=f"cannot create the deployment {name}")).deployment

    created = _control(targets.controlplane(controlplane, admin_key, state_dir), run)
    plain(out(), f"{created.metadata.name}\t{created.version_digest}")


@deployments.command("list")
def list_deployments(
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List the deployments and how many replicas are ready."""

    async def page(stub: ControlPlaneStub, metadata: Metadata, token: str) -> cp.ListDeploymentsResponse:
        request = cp.ListDeploymentsRequest(page_size=1000, page_token=token)
        return await stub.ListDeployments(request, timeout=CALL_TIMEOUT_S, metadata=metadata)

    pages = _pages(targets.controlplane(controlplane, admin_key, state_dir), page, "deployments")
    rows = [
        (
            each.metadata.name,
            each.model,
            each.version_digest or each.version,
            f"{each.status.ready_replicas}/{each.replicas}",
            each.status.message,
        )
        for answer in pages
        for each in answer.deployments
    ]
    show_table(("name", "model", "version", "ready", "message"), rows)


@deployments.command("delete")
def delete_deployment(
    name: NameArgument,
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Stop keeping it running; its workers drain and unload it."""

    async def run(stub: ControlPlaneStub, metadata: Metadata) -> None:
        call = stub.DeleteDeployment(
            cp.DeleteDeploymentRequest(name=name), timeout=CALL_TIMEOUT_S, metadata=metadata
        )
        await checked(call, what=f"cannot delete the deployment {name}")

    _control(targets.controlplane(controlplane, admin_key, state_dir), run)
    plain(out(), name)


@keys.command("create")
def create_key(
    name: NameArgument,
    tenant: Annotated[str, typer.Option("--tenant")] = "default",
    admin: Annotated[bool, typer.Option("--admin", help="An operator's key, of no tenant.")] = False,
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Create a key and print it. It is shown this once."""
    role = cp.KEY_ROLE_ADMIN if admin else cp.KEY_ROLE_TENANT
    wanted = cp.Key(metadata=cp.Metadata(name=name), role=role, tenant="" if admin else tenant)

    async def run(stub: ControlPlaneStub, metadata: Metadata) -> str:
        call = stub.CreateKey(cp.CreateKeyRequest(key=wanted), timeout=CALL_TIMEOUT_S, metadata=metadata)
        return (await checked(call, what=f"cannot create the key {name}")).secret

    plain(out(), _control(targets.controlplane(controlplane, admin_key, state_dir), run))


@keys.command("list")
def list_keys(
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List the keys, without their secrets."""

    async def page(stub: ControlPlaneStub, metadata: Metadata, token: str) -> cp.ListKeysResponse:
        request = cp.ListKeysRequest(page_size=1000, page_token=token)
        return await stub.ListKeys(request, timeout=CALL_TIMEOUT_S, metadata=metadata)

    pages = _pages(targets.controlplane(controlplane, admin_key, state_dir), page, "keys")
    rows = [
        (
            each.metadata.name,
            cp.KeyRole.Name(each.role).removeprefix("KEY_ROLE_").lower(),
            each.tenant,
            each.expire_time.ToJsonString() if each.HasField("expire_time") else "never",
        )
        for answer in pages
        for each in answer.keys
    ]
    show_table(("name", "role", "tenant", "expires"), rows)


@keys.command("revoke")
def revoke_key(
    name: NameArgument,
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Delete a key: it opens nothing any more."""

    async def run(stub: ControlPlaneStub, metadata: Metadata) -> None:
        call = stub.DeleteKey(cp.DeleteKeyRequest(name=name), timeout=CALL_TIMEOUT_S, metadata=metadata)
        await checked(call, what=f"cannot revoke the key {name}")

    _control(targets.controlplane(controlplane, admin_key, state_dir), run)
    plain(out(), name)


@tenants.command("create")
def create_tenant(
    name: NameArgument,
    display_name: Annotated[str, typer.Option("--display-name")] = "",
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    max_concurrency: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Create a tenant with its limits."""
    wanted = cp.Tenant(
        metadata=cp.Metadata(name=name),
        display_name=display_name,
        requests_per_minute=requests_per_minute,
        max_concurrency=max_concurrency,
    )

    async def run(stub: ControlPlaneStub, metadata: Metadata) -> None:
        call = stub.CreateTenant(
            cp.CreateTenantRequest(tenant=wanted), timeout=CALL_TIMEOUT_S, metadata=metadata
        )
        await checked(call, what=f"cannot create the tenant {name}")

    _control(targets.controlplane(controlplane, admin_key, state_dir), run)
    plain(out(), name)


@tenants.command("list")
def list_tenants(
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List the tenants with their limits."""

    async def page(stub: ControlPlaneStub, metadata: Metadata, token: str) -> cp.ListTenantsResponse:
        request = cp.ListTenantsRequest(page_size=1000, page_token=token)
        return await stub.ListTenants(request, timeout=CALL_TIMEOUT_S, metadata=metadata)

    pages = _pages(targets.controlplane(controlplane, admin_key, state_dir), page, "tenants")
    rows = [
        (
            each.metadata.name,
            each.display_name,
            str(each.requests_per_minute or "no limit"),
            str(each.max_concurrency or "no limit"),
            "disabled" if each.disabled else "",
        )
        for answer in pages
        for each in answer.tenants
    ]
    show_table(("name", "display name", "requests/min", "concurrency", ""), rows)


@nodes.command("list")
def list_nodes(
    controlplane: ControlPlaneOption = "",
    admin_key: AdminKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List the workers and what they have loaded."""

    async def page(stub: ControlPlaneStub, metadata: Metadata, token: str) -> cp.ListNodesResponse:
        request = cp.ListNodesRequest(page_size=1000, page_token=token)
        return await stub.ListNodes(request, timeout=CALL_TIMEOUT_S, metadata=metadata)

    pages = _pages(targets.controlplane(controlplane, admin_key, state_dir), page, "nodes")
    rows = [
        (
            each.metadata.name,
            each.address,
            each.device,
            ", ".join(name for name, on in (("cordoned", each.cordoned), ("draining", each.draining)) if on)
            or "open",
            " ".join(
                f"{loaded.deployment}:{worker_pb2.VersionState.Name(loaded.state).removeprefix('VERSION_STATE_').lower()}"
                for loaded in each.versions
            ),
        )
        for answer in pages
        for each in answer.nodes
    ]
    show_table(("name", "address", "device", "state", "versions"), rows)


def _control(target: Target, run: Callable[[ControlPlaneStub, Metadata], Awaitable[T]]) -> T:
    """Return what ``run`` returns with a stub of the control plane."""

    async def connected() -> T:
        async with open_channel(target.address) as channel:
            return await run(controlplane_pb2_grpc.ControlPlaneServiceStub(channel), bearer(target.key))

    return asyncio.run(connected())


def _pages(
    target: Target, page: Callable[[ControlPlaneStub, Metadata, str], Awaitable[T]], what: str
) -> list[T]:
    """Return every page of a listing."""

    async def run(stub: ControlPlaneStub, metadata: Metadata) -> list[T]:
        answers: list[T] = []
        token = ""
        while True:
            answer = await checked(page(stub, metadata, token), what=f"cannot list the {what}")
            answers.append(answer)
            token = str(getattr(answer, "next_page_token", ""))
            if not token:
                return answers

    return _control(target, run)
