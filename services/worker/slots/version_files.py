"""The files of one version on this worker, and what the worker reads from them before an engine starts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from fairway.formats import version_files
from fairway.formats.adapter import adapter_bytes, parse_adapter
from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import parse_config
from fairway.formats.limits import LIMITS_NAME, EngineLimits, check_limits
from fairway.formats.safetensors import TensorHeader, tensors_of
from fairway.formats.weights import weight_files
from services.core.errors import FailedPrecondition, NotReplaceable, Unavailable
from services.core.manifest import Manifest
from services.core.records import AssignedVersion
from services.core.rollouts.computation import READ, parts_but_weights
from services.ports.clock import Clock
from services.ports.registry import TextCheck
from services.runtime.version_trust import VersionTrust
from services.worker.detokenizer import Vocabulary, load_vocabulary
from services.worker.engine.load.config import names_in, read_json, read_part
from services.worker.engine_protocol import EngineConfig

CHECK_COUNTS_S: Final = 10.0  # a start within this time after the check of its files needs no new check


class ModelSource(Protocol):
    """The source of a version's files; see ``adapters/model_files/cache.py``."""

    def fetch(
        self,
        model: str,
        digest: str,
        *,
        only: Callable[[str], bool] | None = None,
        progress: Callable[[float], None] | None = None,
        recheck: bool = False,
        spare: bool = False,
    ) -> Awaitable[Path]: ...

    async def readable(self, model: str, digest: str) -> Manifest: ...

    async def computation(self, model: str, digest: str, *, contents: Mapping[str, bytes]) -> str: ...

    def pin(self, folder: Path, *, spare: bool = False) -> None: ...

    def unpin(self, folder: Path, *, spare: bool = False) -> None: ...


class LocalFiles(Protocol):
    """What a slot needs of its version's files."""

    folder: Path | None  # None: not fetched, or lost
    template_fault: str  # why gateways cannot serve chat with it

    async def fetch(self, progress: Callable[[float], None], *, spare: bool = False) -> None:
        """Fetch the files, or check those that are there. The next start needs no further check.

        ``spare``: they take no room from versions that are to run, and yield theirs.
        """

    async def checked(self, progress: Callable[[float], None]) -> None:
        """Return once the files of a start are checked, which they are after ``fetch`` for a short time."""

    def lost(self) -> bool:
        """Return whether the files were deleted from the cache; they are unpinned then."""

    def unpin(self) -> None:
        """Release the files to the cache. Idempotent."""

    async def kind(self) -> str:
        """Return the kind that the manifest states."""

    async def computation(self, folder: Path) -> str:
        """Return what versions that one engine can serve have in common; empty: it shares with none."""

    async def parts(self, folder: Path) -> Mapping[str, str]:
        """Return what the version computes with but the values of its weights, by name.

        Raises FailedPrecondition, NotReplaceable for an adapter.
        """

    async def vocabulary(self, folder: Path) -> Vocabulary:
        """Return the vocabulary, after the check that a gateway can load the version.

        Raises FailedPrecondition, Unavailable.
        """

    async def limited(self, config: EngineConfig, folder: Path) -> EngineConfig:
        """Return the configuration within the limits of the version. Raises FailedPrecondition."""

    async def weight_bytes(self, folder: Path, bytes_per_value: int) -> int:
        """Return the bytes of the weights in a folder of the version. Raises FailedPrecondition."""

    async def adapter_bytes(self, folder: Path, bytes_per_value: int) -> int:
        """Return the memory of the version's adapter, 0 where it is none. Raises FailedPrecondition."""


class VersionFiles:
    """Implements ``LocalFiles``: the pinned folder of a version, and its vocabulary."""

    def __init__(
        self,
        version: AssignedVersion,
        source: ModelSource,
        texts: TextCheck | None,
        clock: Clock,
        trust: VersionTrust,
    ) -> None:
        """``texts`` checks the files that gateways read; None for no check."""
        self._version = version
        self._source = source
        self._texts = texts
        self._clock = clock
        self._trust = trust
        self._was_trusted = False  # whether a check of its signatures passed
        self._checked_until_s = -math.inf  # time until which one engine may start without a new check
        self._vocabulary: Vocabulary | None = None
        self.folder: Path | None = None
        self._spare = False  # kind of its pin
        self.template_fault = ""  # why gateways cannot serve chat with it

    async def fetch(self, progress: Callable[[float], None], *, spare: bool = False) -> None:
        await self._require_trust()
        await self._checked(progress, spare)
        self._checked_until_s = self._clock.monotonic_s() + CHECK_COUNTS_S

    async def checked(self, progress: Callable[[float], None]) -> None:
        await self._require_trust()
        fresh = self._clock.monotonic_s() <= self._checked_until_s
        self._checked_until_s = -math.inf
        if not fresh:
            await self._checked(progress)

    async def _require_trust(self) -> None:
        """Return if the version and the base of an adapter may be loaded by their models' signer policies.

        While the store is unreachable the last decision holds, so that a crashed engine starts again. Raises
        as ``VersionTrust.require`` and ``ModelSource.fetch``.
        """
        model, digest = self._version.model, self._version.version_digest
        try:
            manifest = await self._source.readable(model, digest)
            await self._trust.require(
                model, digest, base_model=manifest.base_model, base_digest=manifest.base_digest
            )
        except Unavailable:
            if not self._was_trusted:
                raise
        self._was_trusted = True

    async def _checked(self, progress: Callable[[float], None], spare: bool = False) -> None:
        """Read every chunk, compare it with the manifest, and pin the folder.

        Damaged files are fetched again. Raises as ``ModelSource.fetch``; no folder is pinned then.
        """
        self.unpin()  # pinned files would not be replaced
        only = without_weights if self._version.executor == "null" else None
        model, digest = self._version.model, self._version.version_digest
        folder = await self._source.fetch(
            model, digest, only=only, progress=progress, recheck=True, spare=spare
        )
        self._source.pin(folder, spare=spare)
        self.folder, self._spare = folder, spare

    def lost(self) -> bool:
        if self.folder is None or self.folder.is_dir():
            return False
        self.unpin()
        return True

    def unpin(self) -> None:
        folder, self.folder = self.folder, None
        if folder is not None:
            self._source.unpin(folder, spare=self._spare)

    async def kind(self) -> str:
        return (await self._manifest()).kind

    async def computation(self, folder: Path) -> str:
        contents = await asyncio.to_thread(_contents_of, folder)
        version = self._version
        return await self._source.computation(version.model, version.version_digest, contents=contents)

    async def parts(self, folder: Path) -> Mapping[str, str]:
        manifest = await self._manifest()
        if manifest.base_digest:
            raise NotReplaceable("an adapter replaces no weights: it is loaded beside its base")
        contents = await asyncio.to_thread(_contents_of, folder)
        return parts_but_weights(manifest, contents) | await asyncio.to_thread(shapes_of, folder)

    async def vocabulary(self, folder: Path) -> Vocabulary:
        if self._vocabulary is None:
            if self._texts is not None:
                self.template_fault = await self._texts.fault(folder, self._version.version_digest)
            self._vocabulary = await asyncio.to_thread(load_vocabulary, folder)
        return self._vocabulary

    async def limited(self, config: EngineConfig, folder: Path) -> EngineConfig:
        limits = await asyncio.to_thread(read_limits, folder)
        return limited(config, limits, max_context_tokens=(await self._manifest()).max_context_tokens)

    async def weight_bytes(self, folder: Path, bytes_per_value: int) -> int:
        return await asyncio.to_thread(weight_bytes, folder, bytes_per_value)

    async def adapter_bytes(self, folder: Path, bytes_per_value: int) -> int:
        if not (await self._manifest()).base_digest:
            return 0
        return await asyncio.to_thread(bytes_of_adapter, folder, bytes_per_value)

    async def _manifest(self) -> Manifest:
        return await self._source.readable(self._version.model, self._version.version_digest)


def without_weights(path: str) -> bool:
    """Return whether a null engine needs the file."""
    return not path.endswith(".safetensors")


def draft_of(folder: Path) -> Path | None:
    """Return the folder of the version's draft, or None. Blocks for I/O."""
    draft = folder / version_files.DRAFT_FOLDER
    return draft if (draft / version_files.DRAFT_CONFIG).exists() else None


def read_limits(folder: Path) -> EngineLimits:
    """Return the version's limits, empty without the file. Blocks for I/O. Raises FailedPrecondition."""
    try:
        return check_limits((folder / LIMITS_NAME).read_bytes())
    except FileNotFoundError:
        return EngineLimits()
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"{LIMITS_NAME} of the version: {error}") from error


def limited(config: EngineConfig, limits: EngineLimits, *, max_context_tokens: int = 0) -> EngineConfig:
    """Return the configuration within the limits and the manifest's context size (0: unbounded).

    ``max_sequences`` is lowered to the token budget, so that a step still covers every sequence.
    """
    contexts = (config.max_model_len, limits.max_context_tokens, max_context_tokens)
    budget = min(config.token_budget, limits.token_budget or config.token_budget)
    return msgspec.structs.replace(
        config,
        token_budget=budget,
        max_sequences=min(config.max_sequences, limits.max_sequences or config.max_sequences, budget),
        max_model_len=min((size for size in contexts if size), default=0),
        prefix_cache=config.prefix_cache if limits.prefix_cache is None else limits.prefix_cache,
        speculation=limits.speculation or config.speculation,
        draft_model_dir="" if limits.speculation else config.draft_model_dir,
    )


def bytes_of_adapter(folder: Path, bytes_per_value: int) -> int:
    """Return the memory of the adapter. Blocks for I/O. Raises FailedPrecondition."""
    try:
        adapter, base = (read_json(folder / name) for name in (version_files.ADAPTER_CONFIG, "config.json"))
        return adapter_bytes(parse_adapter(adapter), parse_config(base), bytes_per_value)
    except UnsupportedModel as exc:
        raise FailedPrecondition(f"the adapter: {exc}") from exc


def _contents_of(folder: Path) -> dict[str, bytes]:
    """Return the files that decide its computation, by name. Blocks for I/O. Raises FailedPrecondition."""
    try:
        return {name: (folder / name).read_bytes() for name in READ if (folder / name).is_file()}
    except OSError as error:
        raise FailedPrecondition(f"the files of the version: {error.strerror}") from error


def weight_bytes(folder: Path, bytes_per_value: int) -> int:
    """Return the bytes of all tensors at ``bytes_per_value``. Blocks for I/O. Raises FailedPrecondition."""
    return sum(math.prod(tensor.shape) for tensor in _tensors_of(folder).values()) * bytes_per_value


def shapes_of(folder: Path) -> dict[str, str]:
    """Return the shapes of all tensors by name. Blocks for I/O. Raises FailedPrecondition."""
    return {name: str(tensor.shape) for name, tensor in _tensors_of(folder).items()}


def _tensors_of(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of what the engine opens: some publishers add the same weights in another layout."""
    read, place = partial(read_part, folder), ""
    found: dict[str, TensorHeader] = {}
    try:
        for name in weight_files("", names_in(folder), read):
            place = f"{name}: "
            found |= tensors_of(read(name))
    except (UnsupportedModel, ValueError) as exc:
        raise FailedPrecondition(f"the version has no readable weights: {place}{exc}") from exc
    return found
