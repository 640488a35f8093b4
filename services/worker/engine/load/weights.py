"""Weights from safetensors files, one or in shards; nothing here can run code from a checkpoint.

Every header is compared with the layout that the configuration implies before a tensor is allocated
(``fairway.formats.weights``): names, shapes and dtypes.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.weights import BadWeights, TensorLayout, require_layout
from services.worker.engine.load.config import names_in, read_part
from services.worker.engine.unsupported import BadCheckpoint


def not_finite(name: str, dtype: torch.dtype) -> BadCheckpoint:
    return BadCheckpoint(f"{name} holds values that are not finite in {dtype}")


def tensor_of(file: Any, name: str, dtype: torch.dtype, *, owned: bool = True) -> torch.Tensor:
    """Return a tensor of an open file, converted and finite, for its caller to own. Raises BadCheckpoint.

    If not ``owned`` it may be a view of the file, unchecked, for a caller that copies and checks it while the
    file is open: a file that is overwritten in place must not change a loaded model.
    """
    try:
        stored: torch.Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise BadCheckpoint(f"{name} cannot be read") from error
    found = stored.to(dtype, copy=owned)
    if not owned:
        return found
    least, most = torch.aminmax(found)  # both are NaN where any is
    if not (least.isfinite() and most.isfinite()):
        raise not_finite(name, dtype)
    return found


class Checkpoint:
    """The open files of one model. A context manager: the files are mapped while it is open."""

    def __init__(self, model_dir: Path, layout: TensorLayout) -> None:
        """Every tensor of the layout is there, and no other. Raises BadCheckpoint otherwise."""
        self._stack = ExitStack()
        self._sources: dict[str, Any] = {}  # tensor name -> the open file that holds it
        try:
            files = require_layout("", names_in(model_dir), partial(read_part, model_dir), layout)
            opened = {file: self._open(model_dir / file) for file in sorted(set(files.values()))}
            self._sources = {name: opened[file] for name, file in files.items()}
            for name, original in layout.copies.items():
                self._check_copy(name, original)
        except (BadWeights, UnsupportedModel) as error:
            raise BadCheckpoint(str(error)) from error
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sources.clear()
        self._stack.close()

    def tensor(self, name: str, *, dtype: torch.dtype, owned: bool = True) -> torch.Tensor:
        """Return a tensor in its checked shape, converted to ``dtype``; ``owned`` as in ``tensor_of``."""
        return tensor_of(self._sources[name], name, dtype, owned=owned)

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path.name} is no valid safetensors file") from error

    def _check_copy(self, name: str, original: str) -> None:
        if name not in self._sources:
            return
        copy, tensor = (self._sources[each].get_tensor(each) for each in (name, original))
        if not torch.equal(copy, tensor):
            raise BadCheckpoint(f"{name} differs from {original}, to which it is tied")
