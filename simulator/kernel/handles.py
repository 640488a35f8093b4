"""What the loop runs: handles that carry their owner in a context, tasks and futures with a stable hash."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import Context, ContextVar
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


class Owner:
    """The owner of callbacks. Callbacks of a paused owner run later; those of a dead owner never run.

    ``rate`` and ``offset_s`` make the owner's monotonic clock: ``offset_s + loop seconds * rate``.
    """

    def __init__(self, name: str, *, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self.name = name
        self.offset_s = offset_s
        self.rate = rate
        self.stopped = False
        self.dead = False
        self.parked: deque[ReadyCallback | Timer] = deque()

    def local_s(self, now_s: float) -> float:
        """Return what the owner's clock shows at an instant of the loop."""
        return self.offset_s + now_s * self.rate

    def global_s(self, local_s: float) -> float:
        """Return the first instant of the loop at which the owner's clock shows at least ``local_s``."""
        instant_s = (local_s - self.offset_s) / self.rate
        while self.local_s(instant_s) < local_s:
            instant_s = math.nextafter(instant_s, math.inf)
        return instant_s


# The owner of what runs. A context inherits it, so a task's callbacks and timers are its owner's.
OWNER: Final[ContextVar[Owner | None]] = ContextVar("owner", default=None)


class ReadyCallback(asyncio.Handle):
    """A callback that is ready. Asyncio's slots, without what only its debug mode needs."""

    __slots__ = ()

    _callback: Callable[..., object]
    _args: Sequence[Any]
    _context: Context
    _cancelled: bool

    def __init__(self, callback: Callable[..., object], args: Sequence[Any], context: Context) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False

    def __repr__(self) -> str:
        return f"<Handle {self._callback!r}>"

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = _nothing
        self._args = ()


class Timer(asyncio.TimerHandle):
    """A callback that is due at ``_when``, an instant of the loop."""

    __slots__ = ("_on_cancel",)

    _callback: Callable[..., object]
    _args: Sequence[Any]
    _context: Context
    _cancelled: bool
    _scheduled: bool
    _when: float

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        context: Context,
        on_cancel: Callable[[], None],
    ) -> None:
        """Calls back when it is cancelled while it is scheduled."""
        self._when = when_s
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._scheduled = True
        self._on_cancel = on_cancel

    def __repr__(self) -> str:
        return f"<Timer {self._callback!r} at {self._when:g}>"

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = _nothing
            self._args = ()
            if self._scheduled:
                self._on_cancel()


def _nothing() -> None:
    """What a cancelled handle holds, so that it keeps nothing else alive."""


class Task(asyncio.Task[T]):
    """A task whose hash is its number, so that sets of tasks iterate in one order wherever they lie."""

    __slots__ = ("number", "owner")

    def __init__(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        loop: asyncio.AbstractEventLoop,
        name: str,
        number: int,
        owner: Owner | None,
        context: Context | None,
    ) -> None:
        self.number = number
        self.owner = owner
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


@runtime_checkable
class Numbering(Protocol):
    """What a future needs from its loop."""

    def next_number(self) -> int:
        """Return a number that no other object of the loop has."""


class Future(asyncio.Future[T]):
    """A future whose hash is a number, drawn at first use: most futures never use it."""

    __slots__ = ("number",)

    def __hash__(self) -> int:
        try:
            return self.number
        except AttributeError:
            loop = self.get_loop()
            assert isinstance(loop, Numbering)
            self.number: int = loop.next_number()
            return self.number

    def __eq__(self, other: object) -> bool:
        return self is other
