"""What the public inference protocol v2 returns of the server and of a model."""

from __future__ import annotations

from typing import Any, Final

from services.core.errors import NoWorkerAvailable
from services.core.fixed_cost.signature import Signature
from services.core.fixed_cost.tensors import ANY, TensorSpec
from services.gateway.catalog import Route

NAME: Final = "fairway"
VERSION: Final = "2"  # version of the protocol
EXTENSIONS: Final = ("binary_tensor_data",)
PLATFORM: Final = "fairway"
_RETRY_S: Final = 1.0


def metadata_of(route: Route, signature: Signature) -> dict[str, Any]:
    """Return the metadata of a model: shapes have the batch as their first extent, -1 for any extent."""
    return {
        "name": route.model,
        "versions": [route.version_digest],
        "platform": PLATFORM,
        "inputs": [tensor_metadata(spec) for spec in signature.inputs],
        "outputs": [tensor_metadata(spec) for spec in signature.outputs],
    }


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [ANY, *spec.shape]}


def require_ready(route: Route) -> None:
    """Return if a replica serves the model. Raises NoWorkerAvailable."""
    if not route.ready_replicas:
        raise NoWorkerAvailable(
            f"no replica of {route.model} is ready", retry_after_s=_RETRY_S, model=route.model
        )
