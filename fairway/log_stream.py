"""Standard error of a process that must outlive its log: a write never raises and never waits for a reader.

What cannot be written, because the disk is full, the reader is gone or does not read, is lost and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import stat
import threading
from collections.abc import Callable
from typing import Final, TextIO

PIPE_BYTES: Final = 1024 * 1024
_SURE_BYTES: Final = 4096  # what a pipe or socket that polls as writable takes without waiting
_F_SETPIPE_SZ: Final = getattr(fcntl, "F_SETPIPE_SZ", None)


def lost_notice(lines: int) -> str:
    """Return the line that reports ``lines`` lost ones."""
    return f"{lines} lines were lost here: the log could not be written\n"


class LogStream(io.TextIOBase):
    """A text stream on a descriptor, for ``sys.stderr``.

    Lines that could not be written are counted in ``lost``; the next one that can be is preceded by
    ``notice``. Safe to use from several threads. Never closes the descriptor.
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
        """``descriptor`` None: there is nothing to write to, and every line is lost.

        ``patience_s`` is how long a reader that does not keep up is waited for, once until it reads again.
        """
        self._descriptor = descriptor
        self._notice = notice
        self._patience_s = patience_s
        self._lock = threading.RLock()  # a finalizer may log while this thread writes
        self._unreported = 0
        self._torn = False  # a part of a line was written, and its end was not
        self._piecewise = False
        self.lost = 0
        with contextlib.suppress(OSError):
            if descriptor is not None and not stat.S_ISREG(os.fstat(descriptor).st_mode):
                self._piecewise = True
                _never_wait(descriptor)

    @classmethod
    def on(
        cls, stream: TextIO | None, notice: Callable[[int], str] = lost_notice, *, patience_s: float = 0.0
    ) -> LogStream:
        """Return one for where ``stream`` writes: it is None where the process began without."""
        return cls(None if stream is None else stream.fileno(), notice, patience_s=patience_s)

    def write(self, text: str) -> int:
        """Write ``text``, as far as that is possible at once."""
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
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

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
                end = done + _SURE_BYTES if self._piecewise else len(data)
                done += os.write(self._descriptor, data[done:end])
        return done

    def _ready(self) -> bool:
        """Whether a piece can be written without waiting."""
        poll = select.poll()
        poll.register(self._descriptor or 0, select.POLLOUT)
        patience_s = 0.0 if self._unreported else self._patience_s
        return bool(poll.poll(patience_s * 1000))


def hold_standard_descriptors() -> None:
    """Descriptors 0 to 2 are open: a socket that got one of these numbers would receive what is logged."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _never_wait(descriptor: int) -> None:
    """Let no write to a pipe or terminal wait, one by a C library neither, where the system can do that.

    The descriptor gets an open file of its own: the flag would else hold for everybody who shares it.
    """
    with contextlib.suppress(OSError):  # a socket cannot be opened again; ``_ready`` is enough for ours
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        own = os.open(f"/proc/self/fd/{descriptor}", flags)
        os.dup2(own, descriptor)
        os.close(own)
    if _F_SETPIPE_SZ is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _F_SETPIPE_SZ, PIPE_BYTES)
