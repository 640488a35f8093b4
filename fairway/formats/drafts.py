"""A version's draft: the checkpoint of a smaller model that proposes tokens, in the folder ``draft``.

Its weights count among those that the version's ``weights_digest`` names. It has the tokenizer, template and
limits of its version, so files that would decide these are none of a draft.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fairway.formats.names import TENSOR_SUFFIX, TEXT_NAMES, suffix_of

FOLDER: Final = "draft"
CONFIG: Final = "config.json"
WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_DOCUMENTS: Final = frozenset((".md", ".txt"))


def draft_problem_of(paths: Iterable[str]) -> str:
    """Return why the files of a version make no draft, or an empty text. A version need not have one."""
    names = [path.removeprefix(FOLDER + "/") for path in paths if path.startswith(FOLDER + "/")]
    for name in names:
        if not _belongs(name):
            return (
                f"{FOLDER}/{name} is none of a draft, which is {CONFIG} and safetensors files: "
                "it has the tokenizer and the limits of its version"
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
