"""A version's draft: the checkpoint of a smaller model that proposes tokens, in the folder ``draft``.

The version's ``weights_digest`` includes its weights. It uses the tokenizer, template and limits of its
version, so a draft must not contain such files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fairway.formats.version_files import TENSOR_SUFFIX, TEXT_NAMES, suffix_of

FOLDER: Final = "draft"
CONFIG: Final = "config.json"
WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_DOCUMENTS: Final = frozenset((".md", ".txt"))


def draft_problem(paths: Iterable[str]) -> str:
    """Return why the files of a version contain no valid draft, or an empty text. A draft is optional."""
    names = [path.removeprefix(FOLDER + "/") for path in paths if path.startswith(FOLDER + "/")]
    for name in names:
        if not _belongs(name):
            return (
                f"{FOLDER}/{name} does not belong in a draft, which has {CONFIG} and safetensors files: "
                "it uses the tokenizer and the limits of its version"
            )
    if names and CONFIG not in names:
        return f"{FOLDER}/{CONFIG} is missing: a draft needs it"
    if names and not any(name in names for name in WEIGHTS):
        return f"a draft needs {FOLDER}/{WEIGHTS[0]} or {FOLDER}/{WEIGHTS[1]}"
    return ""


def _belongs(name: str) -> bool:
    if "/" in name:
        return False
    if name == CONFIG or name in WEIGHTS or suffix_of(name) == TENSOR_SUFFIX:
        return True
    return suffix_of(name) in _DOCUMENTS or name.lower() in TEXT_NAMES
