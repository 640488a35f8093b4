"""The digest of a version's weights, independent of its other files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fairway.formats.names import TENSOR_SUFFIX, suffix_of


def weights_digest(files: Iterable[tuple[str, str]]) -> str:
    """Return one digest of all tensor files, given as (path, digest): of the lines ``digest path``, sorted.

    Empty without tensor files.
    """
    lines = sorted(f"{digest} {path}\n" for path, digest in files if suffix_of(path) == TENSOR_SUFFIX)
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""
