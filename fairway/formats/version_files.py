"""The files of a version: allowed names, the digest of its weights, and the limit on repetition.

A version contains only data: no pickled objects, no archives, no program code.

A version's draft is the checkpoint of a smaller model that proposes tokens, in the folder ``draft``. The
version's ``weights_digest`` includes its weights. It uses the tokenizer, template and limits of its
version, so a draft must not contain such files.

An adapter is a version that names a base: a low-rank change of the base's weights, in PEFT's two files. What
else a reader needs of it are the base's files, unless it has its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Final

# fmt: off
PICKLE_SUFFIXES: Final = frozenset(
    [
        ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle", ".joblib", ".dill", ".npy", ".npz", ".msgpack",
        ".h5", ".hdf5", ".keras", ".pb", ".onnx", ".tflite", ".mar", ".nemo", ".t7", ".data", ".zip",
        ".tar", ".gz",
    ]
)
# fmt: on
CODE_SUFFIXES: Final = frozenset(
    (".py", ".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib", ".sh", ".exe", ".ipynb")
)
TEXT_SUFFIXES: Final = frozenset((".json", ".jinja", ".txt", ".md"))
TEXT_NAMES: Final = frozenset(("license", "notice", "readme", "copying", "use_policy"))
TENSOR_SUFFIX: Final = ".safetensors"
# SentencePiece or tiktoken: the only file without a format that can be checked.
OPAQUE_NAME: Final = "tokenizer.model"
# A version may have this many times its distinct bytes, and FREE_BYTES more. Valid versions have some
# repetition: one file under several names, padding, zeros. But a worker stores every repetition, and the
# registry reads it, so a few stored bytes must not expand to many.
MAX_RATIO: Final = 4
FREE_BYTES: Final = 64 * 1024 * 1024
# Chat templates; a later one of a name goes before an earlier one.
TEMPLATES: Final = (
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "additional_chat_templates/default.jinja",
)
# The files of a version that a gateway reads.
GATEWAY_FILES: Final = (
    *TEMPLATES,
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    # Settings of a fixed-cost model: how it embeds, and the most tokens of a row.
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "modules.json",
    # Settings of an image model: how a picture becomes pixels.
    "preprocessor_config.json",
    "sentence_bert_config.json",
)


def is_text(path: str) -> bool:
    """Return whether a file of this name is text."""
    name = path.rpartition("/")[2].lower()
    return suffix_of(name) in TEXT_SUFFIXES or name in TEXT_NAMES


def suffix_of(name: str) -> str:
    """Return the last suffix with its dot, lower case; empty without one."""
    _, dot, last = name.lower().rpartition(".")
    return dot + last if dot else ""


def name_problem(path: str) -> str:
    """Return why a version cannot contain a file of this name, or an empty text."""
    name = path.rpartition("/")[2].lower()
    suffixes = {"." + part for part in name.split(".")[1:]}
    if suffixes & PICKLE_SUFFIXES:
        return f"{path} may contain pickled objects: publish weights as safetensors"
    if suffixes & CODE_SUFFIXES:
        return f"{path} is program code: a version contains only data"
    if name != OPAQUE_NAME and suffix_of(name) != TENSOR_SUFFIX and not is_text(path):
        allowed = ", ".join(sorted("*" + suffix for suffix in (*TEXT_SUFFIXES, TENSOR_SUFFIX)))
        return f"{path} is not a kind of file that a version may contain ({allowed})"
    return ""


def weights_digest(files: Iterable[tuple[str, str]]) -> str:
    """Return one digest of all tensor files, given as (path, digest), over the sorted lines ``digest path``.

    Empty without tensor files.
    """
    lines = sorted(f"{digest} {path}\n" for path, digest in files if suffix_of(path) == TENSOR_SUFFIX)
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def repetition_problem(size_bytes: int, distinct_bytes: int) -> str:
    """Return why a version of this size and these distinct bytes is rejected, or an empty text."""
    if size_bytes <= MAX_RATIO * distinct_bytes + FREE_BYTES:
        return ""
    return (
        f"the version has {size_bytes} bytes, of which {distinct_bytes} differ: it may have at most "
        f"{MAX_RATIO} times those and {FREE_BYTES} more"
    )


ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_FILES: Final = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
_SHAPES: Final = ("config.json", "model.safetensors.index.json")  # files that only the base has


def adapter_problem(paths: Collection[str]) -> str:
    """Return why these files are no adapter, or an empty text."""
    if missing := [name for name in ADAPTER_FILES if name not in paths]:
        return f"{missing[0]} is missing: an adapter needs it"
    for path in paths:
        is_weight = suffix_of(path) == TENSOR_SUFFIX and path != ADAPTER_WEIGHTS
        if is_weight or path in _SHAPES or path.startswith(DRAFT_FOLDER + "/"):
            return f"{path} does not belong in an adapter: its base has the shape and the other weights"
    return ""


DRAFT_FOLDER: Final = "draft"
DRAFT_CONFIG: Final = "config.json"
_DRAFT_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_DOCUMENTS: Final = frozenset((".md", ".txt"))


def draft_problem(paths: Iterable[str]) -> str:
    """Return why the files of a version contain no valid draft, or an empty text. A draft is optional."""
    names = [path.removeprefix(DRAFT_FOLDER + "/") for path in paths if path.startswith(DRAFT_FOLDER + "/")]
    for name in names:
        if not _belongs(name):
            return (
                f"{DRAFT_FOLDER}/{name} does not belong in a draft, which has {DRAFT_CONFIG} and safetensors "
                "files: it uses the tokenizer and the limits of its version"
            )
    if names and DRAFT_CONFIG not in names:
        return f"{DRAFT_FOLDER}/{DRAFT_CONFIG} is missing: a draft needs it"
    if names and not any(name in names for name in _DRAFT_WEIGHTS):
        return f"a draft needs {DRAFT_FOLDER}/{_DRAFT_WEIGHTS[0]} or {DRAFT_FOLDER}/{_DRAFT_WEIGHTS[1]}"
    return ""


def _belongs(name: str) -> bool:
    if "/" in name:
        return False
    if name == DRAFT_CONFIG or name in _DRAFT_WEIGHTS or suffix_of(name) == TENSOR_SUFFIX:
        return True
    return suffix_of(name) in _DOCUMENTS or name.lower() in TEXT_NAMES
