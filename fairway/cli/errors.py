"""Errors of the command line: a stable reason, a message, and the next step."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `fairway`. Scripts may depend on them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    REFUSED = 4
    UNAUTHENTICATED = 5
    UNAVAILABLE = 6
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


class CliError(Exception):
    """A command failed. ``next_step`` is what the user can do about it."""

    def __init__(
        self, reason: str, message: str, *, next_step: str = "", exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.next_step = next_step
        self.exit_code = exit_code
