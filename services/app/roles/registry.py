"""The registry: versions in the store, chunks in a folder or a bucket."""

from __future__ import annotations

from fairway.v1 import (
    registry_pb2,
    registry_pb2_grpc,
)
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.blobs.observed import ObservedBlobs
from services.adapters.blobs.s3 import S3Blobs, open_bucket
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.shared import nothing
from services.gateway.text.child import TextProcessCheck
from services.ports.blob_store import BlobStore
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from services.rpc.server import RpcService


def registry(environment: Environment) -> Role:
    """The registry: versions in the store, chunks in a folder or a bucket."""
    audited, _ = environment.audited_store()
    service = RegistryService(
        audited,
        ObservedBlobs(open_blobs(environment), environment.metrics),
        environment.clock,
        texts=TextProcessCheck(environment.clock, environment.supervisor),
        rng=environment.rng,
        downloads=environment.settings.blob_downloads,
    )
    server = environment.server(
        RpcService(
            registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
            registry_pb2_grpc.add_RegistryServiceServicer_to_server,
            RegistryServicer(service),
        ),
        identity=environment.identity(),
    )
    return Role(server, start=nothing)


def open_blobs(environment: Environment) -> BlobStore:
    """Return the blob store of the settings. Raises ConfigError, StoreUnavailable for an unusable folder."""
    settings = environment.settings
    if settings.blob_store == "folder":
        return FolderBlobs(settings.state_dir / "blobs", environment.disk)
    return S3Blobs(open_bucket(settings, environment.clock))
