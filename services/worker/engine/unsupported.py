"""The refusal of a model that would not load on a retry either."""

from __future__ import annotations

from typing import Final

from fairway.formats.config_fields import UnsupportedModel


class LoadError(Exception):
    """Loading cannot succeed, and would not on a retry. ``reason`` is a stable word for the agent.

    LoadError
    ├── BadCheckpoint      the weights are not those that the configuration implies
    ├── BadEngineConfig    the model does not fit the limits that the process was started with
    └── TooLittleMemory    weights and working memory leave too little for KV
    """

    reason = "load_failed"


class BadCheckpoint(LoadError):
    reason = "bad_checkpoint"


class BadEngineConfig(LoadError):
    reason = "bad_engine_config"


class TooLittleMemory(LoadError):
    """The bytes are the least that is needed."""

    reason = "does_not_fit"

    def __init__(self, message: str, *, weight_bytes: int, working_bytes: int, kv_bytes: int) -> None:
        super().__init__(message)
        self.weight_bytes = weight_bytes
        self.working_bytes = working_bytes
        self.kv_bytes = kv_bytes


# What loading raises of a model that cannot be served; each has a ``reason``.
REFUSALS: Final = (LoadError, UnsupportedModel)
