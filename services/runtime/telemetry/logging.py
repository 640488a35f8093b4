"""Logging set-up. Events are constants `noun.verb_past`; values are keys; no prompts or outputs."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final

import structlog
from structlog.tracebacks import ExceptionDictTransformer

from fairway.log_stream import LogStream

# Callers can often trigger a library's log lines, such as by disconnecting during a response.
LIBRARY_LINES_PER_S: Final = 5.0
_LIBRARY_TEXT: Final = 2000  # characters of one message
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def clean_id(text: object) -> str:
    """Return the client's id of its request if it is safe in a log and a header, else an empty text."""
    return text if isinstance(text, str) and _CLIENT_ID.fullmatch(text) else ""


class LineBudget:
    """Bounds the lines of one kind: ``per_s`` per second, with a burst of the same size and at least one.

    Dropped lines are counted, so that the log shows how incomplete it is.
    """

    def __init__(self, monotonic_s: Callable[[], float], per_s: float) -> None:
        self._monotonic_s = monotonic_s
        self._per_s = per_s
        self._most = max(per_s, 1.0) if per_s else 0.0
        self._left = self._most
        self._at_s = monotonic_s()
        self.suppressed = 0

    def take(self) -> bool:
        """Return whether to write a line now."""
        now_s = self._monotonic_s()
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            self.suppressed += 1
            return False
        self._left -= 1.0
        return True


class LibraryLines(logging.Handler):
    """Writes records of the standard library's loggers as Fairway log events, within a budget of lines."""

    def __init__(self, lines: LineBudget) -> None:
        super().__init__()
        self._lines = lines
        self._log = structlog.get_logger()

    def emit(self, record: logging.LogRecord) -> None:
        if not self._lines.take():
            return
        lost, self._lines.suppressed = self._lines.suppressed, 0
        try:
            self._log.log(
                logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING,
                "library.logged",
                logger=record.name,
                message=record.getMessage()[:_LIBRARY_TEXT],
                **({"exc_info": record.exc_info} if record.exc_info else {}),
                **({"suppressed_lines": lost} if lost else {}),
            )
        except Exception:
            self.handleError(record)


def _named(role: str) -> structlog.typing.Processor:
    """Return a processor that adds the role to each line."""

    def name(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if role:
            event["role"] = role
        return event

    return name


def open_log(*, role: str = "") -> LogStream:
    """Return the stream that replaces stdout and stderr from now on: no write to it raises or waits."""

    def notice(lines: int) -> str:
        event = {"event": "log.lines_lost", "lines": lines, "level": "warning", "role": role}
        at = datetime.datetime.now(datetime.UTC).isoformat()
        return json.dumps({**event, "timestamp": at}) + "\n"

    stream = LogStream.on(sys.stderr, notice)
    sys.stdout = sys.stderr = stream
    return stream


def configure(level: str = "info", *, role: str = "") -> None:
    """Make structlog and the standard library's loggers write one line per event to stderr."""
    number = logging.getLevelNamesMapping()[level.upper()]
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _named(role),  # not a context variable: tasks that grpc starts have their own context
        # The frames' variables are left out: they contain prompts and keys.
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(),
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    libraries = LibraryLines(LineBudget(time.monotonic, LIBRARY_LINES_PER_S))
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[libraries])
