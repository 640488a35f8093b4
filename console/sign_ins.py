"""The sign-ins of this process, and the bound on attempts. A cookie holds a random name of one, nothing else.

A credential stays in the memory of this process until its sign-in ends: after an idle time, after a working
day, with the token, at the sign-out, or once the API refuses the credential.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fairway.v1 import controlplane_pb2 as cp
from services.ports.clock import Clock

IDLE_S: Final = 3600.0
LONGEST_S: Final = 12 * 3600.0
MAX_SIGN_INS: Final = 1024
MAX_OF_CALLER: Final = 16
ATTEMPTS: Final = 10  # attempts of one source in a row
REFILL_S: Final = 6.0  # time until a source has one more attempt
ALL_ATTEMPTS: Final = 200  # attempts of all sources in a row, each back after ALL_REFILL_S
ALL_REFILL_S: Final = 0.05
MAX_SOURCES: Final = 4096


@dataclass(slots=True)
class SignIn:
    """One person at one browser."""

    name: str  # the hash of the cookie's value
    caller: cp.GetCallerResponse
    credential: str = field(repr=False)
    csrf: str = field(repr=False)
    begin_s: float
    used_s: float
    end_unix_s: float  # the end of the token; infinite for a key
    refresh_token: str = field(default="", repr=False)
    is_open: bool = True
    running: int = 0  # generations of the playground
    notice: tuple[str, str] | None = None  # the kind and the text that the next page shows
    renewal: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def role(self) -> cp.KeyRole.ValueType:
        return self.caller.role

    @property
    def who(self) -> str:
        return self.caller.subject or self.caller.key


class SignIns:
    """The open sign-ins by the hash of their cookie: reading this process's table yields no cookie."""

    def __init__(
        self,
        clock: Clock,
        new_secret: Callable[[], str],
        ended: Callable[[str], None] = lambda name: None,
    ) -> None:
        """``ended`` is called with the name of each sign-in that is over."""
        self._clock = clock
        self._new_secret = new_secret
        self._ended = ended
        self._open: OrderedDict[str, SignIn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, credential: str, caller: cp.GetCallerResponse, *, refresh_token: str = "") -> str:
        """Return the value of the cookie of a new sign-in. The longest unused one is ended for room."""
        mine = [name for name, each in self._open.items() if each.caller.key == caller.key]
        for name in mine[: max(0, len(mine) - MAX_OF_CALLER + 1)]:
            self._end(name)
        while len(self._open) >= MAX_SIGN_INS:
            self._end(next(iter(self._open)))
        cookie, now_s = self._new_secret(), self._clock.monotonic_s()
        name = _hashed(cookie)
        self._open[name] = SignIn(
            name, caller, credential, self._new_secret(), now_s, now_s, end_of(caller), refresh_token
        )
        return cookie

    def find(self, cookie: str, *, is_use: bool = True) -> SignIn | None:
        """Return the open sign-in of a cookie; None without one. ``is_use``: its idle time starts again."""
        name, now_s = _hashed(cookie), self._clock.monotonic_s()
        found = self._open.get(name)
        if found is None:
            return None
        if now_s - found.used_s > IDLE_S or now_s - found.begin_s > LONGEST_S:
            self._end(name)
            return None
        if is_use:
            found.used_s = now_s
            self._open.move_to_end(name)
        return found

    def end(self, sign_in: SignIn) -> None:
        """Forget the sign-in and its credential. Idempotent."""
        if sign_in.name in self._open:
            self._end(sign_in.name)

    def check_integrity(self) -> None:
        assert len(self._open) <= MAX_SIGN_INS
        assert all(name == each.name for name, each in self._open.items())

    def _end(self, name: str) -> None:
        found = self._open.pop(name)
        found.is_open = False
        found.credential = found.refresh_token = ""
        self._ended(name)


def end_of(caller: cp.GetCallerResponse) -> float:
    """Return the Unix time at which the caller's token ends; infinite for a key."""
    return float(caller.expire_time.seconds) if caller.HasField("expire_time") else float("inf")


def csrf_matches(sign_in: SignIn, presented: str) -> bool:
    return hmac.compare_digest(sign_in.csrf.encode(), presented.encode())


class SignInAttempts:
    """Bounds the attempts to sign in, per source and in all. A success gives its attempt back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sources: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._all = (float(ALL_ATTEMPTS), clock.monotonic_s())

    def begin(self, source: str) -> float:
        """Count an attempt and return 0, or return the seconds until the source may try again."""
        left, of_all = self._left(source), self._left_of_all()
        if left < 1.0:
            return (1.0 - left) * REFILL_S
        if of_all < 1.0:
            return ALL_REFILL_S
        self._set(source, left - 1.0)
        self._all = of_all - 1.0, self._clock.monotonic_s()
        return 0.0

    def succeeded(self, source: str) -> None:
        self._set(source, min(float(ATTEMPTS), self._left(source) + 1.0))

    def _left(self, source: str) -> float:
        left, time_s = self._sources.get(source, (float(ATTEMPTS), 0.0))
        return min(float(ATTEMPTS), left + (self._clock.monotonic_s() - time_s) / REFILL_S)

    def _left_of_all(self) -> float:
        left, time_s = self._all
        return min(float(ALL_ATTEMPTS), left + (self._clock.monotonic_s() - time_s) / ALL_REFILL_S)

    def _set(self, source: str, left: float) -> None:
        self._sources[source] = left, self._clock.monotonic_s()
        self._sources.move_to_end(source)
        if len(self._sources) > MAX_SOURCES:
            self._sources.popitem(last=False)


def _hashed(cookie: str) -> str:
    return hashlib.sha256(cookie.encode("utf-8", "surrogateescape")).hexdigest()
