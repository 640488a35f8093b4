"""Models of a Hugging Face hub: the safetensors of one commit, through ``huggingface_hub``.

A branch or tag is resolved to its commit first. A download that was cut continues at its last byte.
``HF_ENDPOINT`` and ``HF_TOKEN`` are those of the library.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Final

from fairway.formats.fixed_cost.pooling import FILES as POOLING_FILES
from fairway.formats.version_files import GATEWAY_FILES
from fairway.importing.sources import (
    GGUF,
    MAX_FILES,
    Counted,
    ImportRefused,
    Origin,
    Report,
    fetch_all,
    missing_extra,
    model_name,
    require_room,
    unreachable,
    wanted,
)

_CHECK: Final = "the name, HF_ENDPOINT, and HF_TOKEN for a private model"
_SOURCE: Final = re.compile(r"hf://([\w.-]{1,96}/[\w.-]{1,96})(?:@([\w./-]{1,200}))?", re.ASCII)


def origin(source: str, report: Report, most_bytes_per_s: int) -> Origin:
    """Return the commit of ``hf://ORG/NAME@REVISION``. Raises ImportRefused."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
    except ModuleNotFoundError as error:
        raise missing_extra("hub", "hf:// sources") from error
    found = _SOURCE.fullmatch(source)
    if found is None:
        raise ImportRefused(
            f"{source[:300]} is not of the form hf://ORG/NAME@REVISION", next_step="correct it"
        )
    repository, revision = found[1], found[2] or "main"
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except (HTTPError, HFValidationError, OSError) as error:
        raise unreachable(f"{repository} at {revision}", error, check=_CHECK) from error
    commit = str(info.sha)
    files = [file for file in info.siblings or [] if _is_part(file.rfilename)]
    if len(files) > MAX_FILES:
        raise ImportRefused(
            f"{repository} at {commit} has {len(files)} files of a model, more than {MAX_FILES}",
            next_step="name a repository of one checkpoint",
        )
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise ImportRefused(
            f"{repository} at {commit} has no safetensors; nothing else is read from a hub",
            next_step="name a revision that has them",
        )
    licence = info.card_data.get("license") if info.card_data else None

    def fetch(folder: Path) -> tuple[str, ...]:
        by_name = {file.rfilename: file for file in files}
        sizes = {name: file.size or 0 for name, file in by_name.items()}
        require_room(folder, sum(sizes.values()), repository)

        def download(name: str, counted: Counted) -> None:
            try:
                _download(repository, commit, by_name[name], folder / name, counted)
            except (HTTPError, OSError) as error:
                raise unreachable(f"{name} of {repository}", error, check=_CHECK) from error

        fetch_all(sizes, download, report, most_bytes_per_s)
        return (f"licence: {licence or 'the hub states none'}", f"revision: {revision} is commit {commit}")

    return Origin(f"hf:{repository}@{commit}", model_name(repository.partition("/")[2]), fetch)


def _download(repository: str, commit: str, file: Any, target: Path, counted: Counted) -> None:
    """Download a file of a commit after the bytes of an earlier attempt, and compare it with its digest.

    ``hf_hub_download`` begins a file again in each process.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if target.exists():
        counted(file.size or 0)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with part.open("a+b") as out:
        if out.tell() > file.size:
            out.truncate(0)
        http_get(
            hf_hub_url(repository, file.rfilename, revision=commit),
            out,
            resume_size=out.tell(),
            headers=build_hf_headers(),
            expected_size=file.size,
            tqdm_class=_counting(counted),
        )
        out.seek(0)
        if file.lfs and hashlib.file_digest(out, "sha256").hexdigest() != file.lfs.sha256:
            out.truncate(0)
            raise OSError("what was received has another sha256 than the hub states")
    part.rename(target)


def _is_part(name: str) -> bool:
    """Return whether a file of a repository is part of a version: those at its top, and those of gateways."""
    known = name in GATEWAY_FILES or name in POOLING_FILES
    return wanted(name) and not name.lower().endswith(GGUF) and ("/" not in name or known)


def _counting(counted: Counted) -> Any:
    """Return a class in place of tqdm's that states how many bytes of a file are there."""
    from tqdm import tqdm

    class Counting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._done = int(options.get("initial") or 0)
            counted(self._done)
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            counted(self._done)

    return Counting
