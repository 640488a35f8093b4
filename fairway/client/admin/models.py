"""Models: immutable versions in the registry, and the tags that point at them.

Arguments and results are the messages of ``fairway.v1.registry_pb2``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration

from fairway.client.admin.calls import Service
from fairway.client.admin.watch import OnLost, WatchUpdate, watch_resources
from fairway.client.attempts import Attempts
from fairway.client.errors import from_rpc
from fairway.client.publish.publish import Kind, Published, PublishProgress, publish
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import registry_pb2 as rg

Version = cp.ModelVersion | cp.ModelTag
GARBAGE_S: Final = 600.0


class Models:
    """``watch`` calls the control plane, every other method the registry."""

    def __init__(self, registry: Service | None, control: Service | None) -> None:
        self._optional_registry, self._control = registry, control

    async def list(
        self, *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[rg.RegisteredModel]:
        """Return the models with their tags, or the first ``limit``."""
        return await self._registry.pages("ListRegisteredModels", "models", limit=limit, timeout_s=timeout_s)

    async def versions(
        self, model: str, *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[rg.Version]:
        """Return the versions of a model, without their manifests' files, or the first ``limit``."""
        return await self._registry.pages(
            "ListVersions", "versions", limit=limit, timeout_s=timeout_s, model=model
        )

    async def get(self, model: str, version: str, *, timeout_s: float | None = None) -> rg.Version:
        """Return a version by its tag or digest, with its manifest. Raises NotFound."""
        answer: rg.GetVersionResponse = await self._registry.call(
            "GetVersion", model=model, version=version, timeout_s=timeout_s
        )
        return answer.version

    async def tag(
        self, model: str, tag: str, digest: str, *, etag: str = "", timeout_s: float | None = None
    ) -> None:
        """Point a tag at a version. Deployments keep their version until they are updated.

        ``etag``: only if the tag points at this digest now; raises Conflict.
        """
        await self._registry.change(
            "SetTag", model=model, tag=tag, digest=digest, etag=etag, timeout_s=timeout_s
        )

    async def untag(self, model: str, tag: str, *, etag: str = "", timeout_s: float | None = None) -> None:
        """Remove a tag; its version stays. ``etag`` as for ``tag``. Raises NotFound."""
        await self._registry.change("DeleteTag", model=model, tag=tag, etag=etag, timeout_s=timeout_s)

    async def delete(self, model: str, digest: str, *, timeout_s: float | None = None) -> None:
        """Delete a version that no tag and no deployment uses. Raises NotFound and FailedPrecondition."""
        await self._registry.change("DeleteVersion", model=model, digest=digest, timeout_s=timeout_s)

    async def collect_garbage(
        self, *, dry_run: bool = False, min_age_s: float | None = None, timeout_s: float = GARBAGE_S
    ) -> rg.CollectGarbageResponse:
        """Delete unreferenced blobs older than ``min_age_s``; ``dry_run`` only counts them.

        The counts are those of the last attempt; an attempt whose response was lost is not included.
        """
        min_age = None
        if min_age_s is not None:
            min_age = Duration()
            min_age.FromMicroseconds(round(min_age_s * 1e6))
        answer: rg.CollectGarbageResponse = await self._registry.call(
            "CollectGarbage", quick=False, dry_run=dry_run, min_age=min_age, timeout_s=timeout_s
        )
        return answer

    async def publish(
        self,
        folder: Path,
        model: str,
        tag: str = "",
        *,
        kind: Kind | None = None,
        max_context_tokens: int = 0,
        for_another_engine: bool = False,
        progress: Callable[[PublishProgress], None] | None = None,
    ) -> Published:
        """Return once the folder is a verified version and ``tag``, unless empty, points at it.

        The total time is bounded by its parts: each call has a deadline, and a registry that is unreachable
        for a minute ends it. A repeated publication continues where it stopped. Raises FairwayError,
        PublishRefused for a folder that cannot be a version or, unless ``for_another_engine``, cannot be
        served, and OSError for one that cannot be read.
        """
        core = self._registry.core
        endpoint = await self._registry.guard.run(Attempts(core, core.options.timeout_s).begin())
        try:
            return await self._registry.guard.run(
                publish(
                    endpoint.channel,
                    folder,
                    model,
                    tag,
                    progress,
                    metadata=core.metadata,
                    kind=kind,
                    max_context_tokens=max_context_tokens,
                    for_another_engine=for_another_engine,
                )
            )
        except grpc.aio.AioRpcError as exc:
            raise from_rpc(exc) from None
        finally:
            core.pool.release(endpoint)

    def watch(self, *, on_lost: OnLost | None = None) -> AsyncGenerator[WatchUpdate[Version], None]:
        """Yield the versions and tags of all models, then every change, like the watch of a resource.

        Versions are named ``model/digest``, tags ``model:tag``.
        """
        if self._control is None:
            raise ValueError("a watch of models needs the addresses of a control plane")
        return watch_resources(self._control, cp.RESOURCE_KIND_MODEL, _named, on_lost)

    @property
    def _registry(self) -> Service:
        if self._optional_registry is None:
            raise ValueError("this client has no registry address: set registry=")
        return self._optional_registry


def _named(change: cp.ResourceChange) -> tuple[str, Version] | None:
    match change.WhichOneof("resource"):
        case "model_version":
            version = change.model_version
            return f"{version.model}/{version.version_digest}", version
        case "model_tag":
            tag = change.model_tag
            return f"{tag.model}:{tag.tag}", tag
        case _:
            return None
