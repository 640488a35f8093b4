"""The registry: versions in the store, chunks in a folder."""

from __future__ import annotations

from fairway.v1 import (
    registry_pb2,
    registry_pb2_grpc,
)
from services.adapters.folder_blobs import FolderBlobs
from services.app.environment import Environment
from services.app.process import Role
from services.app.roles.shared import nothing
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from services.rpc.server import Service


def registry(environment: Environment) -> Role:
    """The registry: versions in the store, chunks in a folder."""
    service = RegistryService(
        environment.store, FolderBlobs(environment.settings.state_dir / "blobs"), environment.clock
    )
    server = environment.server(
        Service(
            registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
            registry_pb2_grpc.add_RegistryServiceServicer_to_server,
            RegistryServicer(service),
        ),
        identity=environment.identity(),
    )
    return Role(server, start=nothing)
