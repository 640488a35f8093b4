"""Models of a Hugging Face hub: the safetensors of one commit, through ``huggingface_hub``.

A branch or tag is resolved to its commit first. A download that was cut continues: the library keeps partial
files beside the complete ones. ``HF_ENDPOINT`` and ``HF_TOKEN`` are those of the library.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from fairway.formats.fixed_cost.pooling import FILES as POOLING_FILES
from fairway.formats.version_files import GATEWAY_FILES
from fairway.importing.sources import (
    GGUF,
    MAX_FILES,
    ImportRefused,
    Origin,
    Report,
    missing_extra,
    model_name,
    require_room,
    wanted,
)

_SOURCE: Final = re.compile(r"hf://([\w.-]{1,96}/[\w.-]{1,96})(?:@([\w./-]{1,200}))?", re.ASCII)


def origin(source: str, report: Report) -> Origin:
    """Return the commit of ``hf://ORG/NAME@REVISION``. Raises ImportRefused."""
    try:
        import huggingface_hub as hub
    except ModuleNotFoundError as error:
        raise missing_extra("hub", "hf:// sources") from error
    found = _SOURCE.fullmatch(source)
    if found is None:
        raise ImportRefused(
            f"{source[:300]} is not of the form hf://ORG/NAME@REVISION", next_step="correct it"
        )
    repository, revision = found[1], found[2] or "main"
    try:
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError, OSError) as error:
        raise _unreachable(f"{repository} at {revision}", error) from error
    commit = str(info.sha)
    sizes = {file.rfilename: file.size or 0 for file in (info.siblings or [])[:MAX_FILES]}
    names = [name for name in sizes if _is_part(name)]
    if not any(name.endswith(".safetensors") for name in names):
        raise ImportRefused(
            f"{repository} at {commit} has no safetensors; nothing else is read from a hub",
            next_step="name a revision that has them",
        )
    licence = info.card_data.get("license") if info.card_data else None

    def fetch(folder: Path) -> tuple[str, ...]:
        total, done = sum(sizes[name] for name in names), 0
        require_room(folder, total, repository)
        for name in names:
            try:
                hub.hf_hub_download(
                    repository,
                    name,
                    revision=commit,
                    local_dir=folder,
                    tqdm_class=_reporting(report, done, total),
                )
            except (hub.errors.HfHubHTTPError, OSError) as error:
                raise _unreachable(f"{name} of {repository}", error) from error
            done += sizes[name]
        return (f"licence: {licence or 'the hub states none'}", f"revision: {revision} is commit {commit}")

    return Origin(f"hf:{repository}@{commit}", model_name(repository.partition("/")[2]), fetch)


def _is_part(name: str) -> bool:
    """Return whether a file of a repository is part of a version: those at its top, and those of gateways."""
    known = name in GATEWAY_FILES or name in POOLING_FILES
    return wanted(name) and not name.lower().endswith(GGUF) and ("/" not in name or known)


def _unreachable(what: str, error: Exception) -> ImportRefused:
    return ImportRefused(
        f"cannot fetch {what}: {str(error).strip().splitlines()[0][:400]}",
        next_step="check the name, HF_ENDPOINT, and HF_TOKEN for a private model; then run it again: "
        "what was fetched is kept",
    )


def _reporting(report: Report, before: int, total: int) -> Any:
    """Return a class in place of tqdm's that reports the bytes of one file after those before it."""
    from tqdm import tqdm

    class Reporting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._done = int(options.get("initial") or 0)
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            report("fetching", before + self._done, total)

    return Reporting
