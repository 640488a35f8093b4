"""The files of one version on this worker, and what the worker reads from them before an engine starts."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from fairway.formats import drafts
from fairway.formats.limits import LIMITS_NAME, EngineLimits, check_limits
from services.core.errors import FailedPrecondition
from services.core.records import AssignedVersion
from services.core.rollouts.computation import GENERATION_CONFIG
from services.ports.clock import Clock
from services.ports.text_check import TextCheck
from services.worker.engine_protocol import EngineConfig
from services.worker.text.detokenizer import Vocabulary, load_vocabulary

CHECK_COUNTS_S: Final = 10.0  # a start within this time after the check of its files needs no new check
MAX_HEADER_BYTES: Final = 64 * 1024 * 1024
MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


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
    ) -> Awaitable[Path]: ...

    async def max_context_tokens(self, model: str, digest: str) -> int: ...

    async def kind(self, model: str, digest: str) -> str: ...

    async def computation(self, model: str, digest: str, *, generation_config: bytes) -> str: ...

    def pin(self, folder: Path) -> None: ...

    def unpin(self, folder: Path) -> None: ...


class LocalFiles(Protocol):
    """What a slot needs of its version's files."""

    folder: Path | None  # None: not fetched, or lost
    template_fault: str  # why gateways cannot serve chat with it

    async def fetch(self, progress: Callable[[float], None]) -> None:
        """Fetch the files, or check those that are there. The next start needs no further check."""

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

    async def vocabulary(self, folder: Path) -> Vocabulary:
        """Return the vocabulary, after the check that a gateway can load the version.

        Raises FailedPrecondition, Unavailable.
        """

    async def limited(self, config: EngineConfig, folder: Path) -> EngineConfig:
        """Return the configuration within the limits of the version. Raises FailedPrecondition."""

    async def weight_bytes(self, folder: Path, bytes_per_value: int) -> int:
        """Return the bytes of the weights in a folder of the version. Raises FailedPrecondition."""


class VersionFiles:
    """Implements ``LocalFiles``: the pinned folder of a version, and its vocabulary."""

    def __init__(
        self, version: AssignedVersion, source: ModelSource, texts: TextCheck | None, clock: Clock
    ) -> None:
        """``texts`` checks the files that gateways read; None for no check."""
        self._version = version
        self._source = source
        self._texts = texts
        self._clock = clock
        self._checked_until_s = -math.inf  # until then one engine may start without a new check
        self._vocabulary: Vocabulary | None = None
        self.folder: Path | None = None
        self.template_fault = ""  # why gateways cannot serve chat with it

    async def fetch(self, progress: Callable[[float], None]) -> None:
        await self._checked(progress)
        self._checked_until_s = self._clock.monotonic_s() + CHECK_COUNTS_S

    async def checked(self, progress: Callable[[float], None]) -> None:
        fresh = self._clock.monotonic_s() <= self._checked_until_s
        self._checked_until_s = -math.inf
        if not fresh:
            await self._checked(progress)

    async def _checked(self, progress: Callable[[float], None]) -> None:
        """Read every chunk, compare it with the manifest, and pin the folder.

        Damaged files are fetched again. Raises as ``ModelSource.fetch``; no folder is pinned then.
        """
        self.unpin()  # pinned files would not be replaced
        only = without_weights if self._version.executor == "null" else None
        folder = await self._source.fetch(
            self._version.model, self._version.version_digest, only=only, progress=progress, recheck=True
        )
        self._source.pin(folder)
        self.folder = folder

    def lost(self) -> bool:
        if self.folder is None or self.folder.is_dir():
            return False
        self.unpin()
        return True

    def unpin(self) -> None:
        folder, self.folder = self.folder, None
        if folder is not None:
            self._source.unpin(folder)

    async def kind(self) -> str:
        return await self._source.kind(self._version.model, self._version.version_digest)

    async def computation(self, folder: Path) -> str:
        generation = await asyncio.to_thread(_content_of, folder / GENERATION_CONFIG)
        version = self._version
        return await self._source.computation(
            version.model, version.version_digest, generation_config=generation
        )

    async def vocabulary(self, folder: Path) -> Vocabulary:
        if self._vocabulary is None:
            if self._texts is not None:
                self.template_fault = await self._texts.fault(folder, self._version.version_digest)
            self._vocabulary = await asyncio.to_thread(load_vocabulary, folder)
        return self._vocabulary

    async def limited(self, config: EngineConfig, folder: Path) -> EngineConfig:
        limits = await asyncio.to_thread(read_limits, folder)
        context = await self._source.max_context_tokens(self._version.model, self._version.version_digest)
        return limited(config, limits, max_context_tokens=context)

    async def weight_bytes(self, folder: Path, bytes_per_value: int) -> int:
        return await asyncio.to_thread(weight_bytes, folder, bytes_per_value)


def without_weights(path: str) -> bool:
    """Return whether a null engine needs the file."""
    return not path.endswith(".safetensors")


def draft_of(folder: Path) -> Path | None:
    """Return the folder of the version's draft, or None. Blocks for I/O."""
    draft = folder / drafts.FOLDER
    return draft if (draft / drafts.CONFIG).exists() else None


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


def _content_of(path: Path) -> bytes:
    """Return the file's content, empty without it. Blocks for I/O. Raises FailedPrecondition."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise FailedPrecondition(f"{path.name} of the version: {error.strerror}") from error


def weight_bytes(folder: Path, bytes_per_value: int) -> int:
    """Return the bytes of all tensors at ``bytes_per_value``. Blocks for I/O. Raises FailedPrecondition.

    Counts only what the engine opens: some publishers add the same weights in another layout.
    """
    return sum(_values(folder / name) for name in _files(folder)) * bytes_per_value


def _files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise FailedPrecondition(f"the version has no weights: neither {SINGLE} nor {INDEX}")
        return [SINGLE]
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("the index's size")
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("a file outside the folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise FailedPrecondition(f"{INDEX} is no readable index") from exc
    return sorted(names)


def _values(path: Path) -> int:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= min(MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError("the header's size")
            header = json.loads(file.read(size))
        return sum(
            math.prod(int(extent) for extent in entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        )
    except FileNotFoundError as exc:
        raise FailedPrecondition(f"the version has no {path.name}, which {INDEX} names") from exc
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise FailedPrecondition(f"{path.name} has no readable safetensors header") from exc
