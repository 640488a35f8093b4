"""What an engine reads of a model's folder besides its shape (``fairway.formats.decoder_config``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from fairway.formats import generation, safetensors
from fairway.formats.config_fields import MAX_JSON_BYTES, UnsupportedModel, object_in, positive_int
from fairway.formats.version_files import TENSOR_SUFFIX

DEFAULT_VOCAB_SIZE: Final = 32000  # size for a null model whose config has none


def names_in(model_dir: Path) -> frozenset[str]:
    """Return the names of the files in a model's folder, without those in its folders."""
    return frozenset(path.name for path in model_dir.iterdir()) if model_dir.is_dir() else frozenset()


def read_part(model_dir: Path, name: str) -> bytes:
    """Return a small file, or the header of a tensor file. Raises UnsupportedModel, BadHeader."""
    path = model_dir / name
    try:
        size_bytes = path.stat().st_size
        if name.endswith(TENSOR_SUFFIX):
            with path.open("rb") as stream:
                return safetensors.read_header(stream, size_bytes)
        if size_bytes > MAX_JSON_BYTES:
            raise UnsupportedModel(name, f"{size_bytes} bytes")
        return path.read_bytes()
    except OSError as error:
        problem = "missing" if isinstance(error, FileNotFoundError) else error.strerror
        raise UnsupportedModel(name, problem) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnsupportedModel for anything else and for a huge file."""
    return object_in(path.name, partial(read_part, path.parent))


def vocab_size_of(fields: Mapping[str, Any]) -> int:
    """Return the vocabulary of a null model, whose config may name nothing else."""
    return positive_int(fields, "vocab_size") if "vocab_size" in fields else DEFAULT_VOCAB_SIZE


def eos_ids(model_dir: Path, fields: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence ids of the version in a folder. Raises UnsupportedModel."""
    return generation.eos_ids(names_in(model_dir), partial(read_part, model_dir), fields, vocab_size)
