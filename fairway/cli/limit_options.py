"""The options that set the limits of a tenant, of its end users, and of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from fairway.cli.connection import OptionGroup
from fairway.cli.flags import span_s
from fairway.v1 import controlplane_pb2 as cp

_COUNTS: Final = (
    ("requests_per_minute", 100_000_000, "Requests per minute"),
    ("max_concurrency", 1_000_000, "Requests at once"),
    ("tokens_per_minute", 10**12, "Prompt and output tokens per minute"),
    ("input_tokens_per_minute", 10**12, "Prompt tokens per minute"),
    ("output_tokens_per_minute", 10**12, "Output tokens per minute"),
    ("max_context_tokens", 2_097_152, "Prompt and most output of a request"),
    ("max_output_tokens", 1_048_576, "Most output tokens of a choice"),
)


def limit_options(name: str, *, prefix: str = "", of: str = "") -> OptionGroup:
    """Return the options of all limits. ``name``: of the parameter that receives those that were given."""
    options: dict[str, object] = {}
    for field, largest, what in _COUNTS:
        flag = f"--{prefix}{field.replace('_', '-')}"
        help_ = f"{what}{of}. 0: no limit."
        options[field] = Annotated[int | None, typer.Option(flag, min=0, max=largest, help=help_)]
    options["max_timeout"] = Annotated[
        float | None,
        typer.Option(
            f"--{prefix}max-timeout", parser=span_s, metavar="SPAN", help=f"Longest time of a request{of}."
        ),
    ]
    return OptionGroup(name, prefix.replace("-", "_"), options)


LIMITS: Final = limit_options("limits")
USER_LIMITS: Final = limit_options("user_limits", prefix="user-", of=", of each end user")


def set_limits(message: cp.Tenant | cp.Limits, values: Mapping[str, Any]) -> None:
    """Set the limits that were given; the others stay."""
    for field, value in values.items():
        if field != "max_timeout":
            setattr(message, field, value)
        elif value:
            message.max_timeout.FromMicroseconds(round(value * 1e6))
        else:
            message.ClearField("max_timeout")


def show_limits(limits: cp.Limits) -> str:
    """Return the limits that are set."""
    found = [f"{field}={value}" for field, _, _ in _COUNTS if (value := getattr(limits, field))]
    if limits.HasField("max_timeout"):
        found.append(f"max_timeout={limits.max_timeout.ToTimedelta().total_seconds():g}s")
    return ",".join(found)
