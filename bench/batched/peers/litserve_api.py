"""LitServe's API class, at the top of a module because its worker process imports it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

_litserve: Any = importlib.import_module("litserve")  # not installed where types are checked


class Api(_litserve.LitAPI):  # type: ignore[misc]
    """``load`` returns the model, in the worker process."""

    load: Callable[[], Any]

    def setup(self, device: str) -> None:
        self.runner = self.load()

    # LitServe takes what is annotated here as types of its route.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return np.array(request["x"], self.runner.dtype)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, rows: Any) -> Any:
        return self.runner.run(rows)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        return {"y": output.tolist()}
