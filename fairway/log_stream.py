"""Standard error of a process that must outlive its log: a write never raises and never blocks on a reader.

Lines that cannot be written (disk full, reader closed or slow) are dropped and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

PIPE_BYTES: Final = 1024 * 1024
_WRITABLE_BYTES: Final = 4096  # what a writable pipe or socket accepts without blocking
_F_SETPIPE_SZ: Final = getattr(fcntl, "F_SETPIPE_SZ", None)


def lost_notice(lines: int) -> str:
    """Return the line that reports ``lines`` lost lines."""
    return f"{lines} lines were lost here: the log could not be written\n"


class LogStream(io.TextIOBase):
    """A text stream on a descriptor, for ``sys.stderr``.

    ``lost`` counts dropped lines, ``spent_s`` the time in writes; ``notice`` precedes the next line that is
    written. Thread-safe. Never closes the descriptor.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(
        self,
        descriptor: int | None,
        notice: Callable[[int], str] = lost_notice,
        *,
        patience_s: float = 0.0,
    ) -> None:
        """``descriptor`` None: there is no output, and every line is lost.

        ``patience_s`` is how long to wait for a slow reader, once until it reads again.
        """
        self._descriptor = descriptor
        self._notice = notice
        self._patience_s = patience_s
        self._lock = threading.RLock()  # a finalizer may log while this thread writes
        self._unreported = 0
        self._torn = False  # a line was written in part
        self._piecewise = False
        self.lost = 0
        self.spent_s = 0.0
        with contextlib.suppress(OSError):
            if descriptor is not None and not stat.S_ISREG(os.fstat(descriptor).st_mode):
                self._piecewise = True
                _make_nonblocking(descriptor)

    @classmethod
    def on(
        cls, stream: TextIO | None, notice: Callable[[int], str] = lost_notice, *, patience_s: float = 0.0
    ) -> LogStream:
        """Return one for the descriptor of ``stream``, which is None if the process started without it."""
        return cls(None if stream is None else stream.fileno(), notice, patience_s=patience_s)

    def write(self, text: str) -> int:
        """Write as much of ``text`` as possible without blocking."""
        began_s = time.monotonic()
        with self._lock:
            head = "\n" if self._torn else ""
            if self._unreported:
                head += self._notice(self._unreported)
            first, data = head.encode(), text.encode(self.encoding, self.errors)
            done = self._put(first + data)
            if done >= len(first):
                self._torn, self._unreported = False, 0
            if done < len(first) + len(data):
                self._torn = self._torn if done == 0 else (first + data)[done - 1 : done] != b"\n"
                lines = text.count("\n")
                self.lost += lines
                self._unreported += lines
            self.spent_s += time.monotonic() - began_s
        return len(text)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._descriptor is not None and os.isatty(self._descriptor)

    def fileno(self) -> int:
        if self._descriptor is None:
            raise io.UnsupportedOperation("this process has no standard error")
        return self._descriptor

    def _put(self, data: bytes) -> int:
        """Return how many bytes were written."""
        done = 0
        with contextlib.suppress(OSError):
            while self._descriptor is not None and done < len(data):
                if self._piecewise and not self._ready():
                    break
                end = done + _WRITABLE_BYTES if self._piecewise else len(data)
                done += os.write(self._descriptor, data[done:end])
        return done

    def _ready(self) -> bool:
        """Whether a piece can be written without blocking."""
        poll = select.poll()
        poll.register(self._descriptor or 0, select.POLLOUT)
        patience_s = 0.0 if self._unreported else self._patience_s
        return bool(poll.poll(patience_s * 1000))


def hold_standard_descriptors() -> None:
    """Open descriptors 0 to 2: a socket with one of these numbers would receive log output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _make_nonblocking(descriptor: int) -> None:
    """Make the pipe or terminal non-blocking, also for C libraries, where the system supports it.

    The descriptor gets its own open file: otherwise the flag would affect every process that shares it.
    """
    with contextlib.suppress(OSError):  # a socket cannot be reopened; ``_ready`` prevents blocking for it
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        own = os.open(f"/proc/self/fd/{descriptor}", flags)
        os.dup2(own, descriptor)
        os.close(own)
    if _F_SETPIPE_SZ is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _F_SETPIPE_SZ, PIPE_BYTES)
