"""Models in an S3-compatible bucket: every object below a prefix.

Address and credentials are those of the environment (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID`` and the
like). An object that was cut continues at its last byte, if the object has not changed since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from fairway.importing.sources import (
    MAX_FILES,
    Counted,
    ImportRefused,
    Origin,
    Report,
    fetch_all,
    model_name,
    require_room,
    unreachable,
    wanted,
)

if TYPE_CHECKING:
    from obstore import GetOptions

_CHECK: Final = "the name, AWS_ENDPOINT_URL, AWS_REGION and the AWS_ credentials"
_PIECE: Final = 8 * 1024 * 1024
_CONNECT: Final = timedelta(seconds=5)
_REQUEST: Final = timedelta(minutes=5)


def origin(source: str, report: Report, most_bytes_per_s: int) -> Origin:
    """Return the objects below ``s3://BUCKET/PREFIX`` as they are now. Raises ImportRefused."""
    bucket, _, prefix = source.removeprefix("s3://").strip("/").partition("/")
    if not bucket:
        raise ImportRefused(f"{source} names no bucket", next_step="name s3://BUCKET/PREFIX")
    try:
        store = S3Store(
            bucket,
            prefix=prefix or None,
            # An endpoint without TLS is used only where the environment names one.
            client_options={"connect_timeout": _CONNECT, "timeout": _REQUEST, "allow_http": True},
        )
        objects = {found["path"]: found for page in obstore.list(store) for found in page[:MAX_FILES]}
    except (BaseError, ValueError, OSError) as error:
        raise unreachable(source, error, check=_CHECK) from error
    objects = {name: found for name, found in objects.items() if wanted(name)}
    if not objects or len(objects) > MAX_FILES:
        raise ImportRefused(
            f"{source} contains {len(objects)} files of a model",
            next_step="name the prefix of one checkpoint",
        )
    state = sorted(f"{name} {_tag(found)}" for name, found in objects.items())

    def fetch(folder: Path) -> tuple[str, ...]:
        sizes = {name: found["size"] for name, found in objects.items()}
        require_room(folder, sum(sizes.values()), source)

        def download(name: str, counted: Counted) -> None:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                for size in _download(store, objects[name], target):
                    counted(size)
            except (BaseError, OSError) as error:
                raise unreachable(f"{source}/{name}", error, check=_CHECK) from error

        fetch_all(sizes, download, report, most_bytes_per_s)
        return (f"objects: {len(objects)} of {source}",)

    digest = hashlib.sha256("\n".join(state).encode()).hexdigest()
    return Origin(f"{source} {digest}", model_name(prefix.rpartition("/")[2] or bucket), fetch)


def _tag(found: Mapping[str, Any]) -> str:
    return f"{found['size']} {found['e_tag'] or found['last_modified']}"


def _download(store: S3Store, found: Mapping[str, Any], target: Path) -> Iterator[int]:
    """Download an object by pieces, after the bytes of an earlier attempt; yield how many bytes are there."""
    if target.exists():
        yield found["size"]
        return
    part = target.with_name(f".{target.name}.part")
    with part.open("ab") as out:
        yield out.tell()
        for start in range(out.tell(), found["size"], _PIECE):
            end = min(start + _PIECE, found["size"])
            options: GetOptions = {"range": (start, end)}
            if found["e_tag"]:
                options["if_match"] = found["e_tag"]
            out.write(obstore.get(store, found["path"], options=options).bytes())
            yield end
        if out.tell() != found["size"]:
            part.unlink()
            raise OSError(
                f"{out.tell()} bytes of {found['size']} are there; is another import of it running?"
            )
    part.rename(target)
