"""Log set-up of a process. Events are constants `noun.verb_past`; values are keys; no prompts or outputs."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.tracebacks import ExceptionDictTransformer


def configure(level: str = "info", output: Literal["json", "console"] = "json", *, role: str = "") -> None:
    """Make structlog and the standard library's loggers write one line per event to stderr."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if output == "json":
        rendering: list[structlog.typing.Processor] = [
            # Without the frames' variables: they hold prompts and keys.
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
    else:
        rendering = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, format="%(name)s %(message)s")
    if role:
        structlog.contextvars.bind_contextvars(role=role)
