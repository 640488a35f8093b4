"""Port of the quota limiter: a reservation before a request is placed, a settlement when it has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar

from services.core.generation import Usage
from services.core.limits import Claim, Limit, Price, RateState

P = ParamSpec("P")
T = TypeVar("T")
NO_PRICE: Final = Price()


@dataclass(frozen=True, slots=True)
class Spent:
    """A budget in its current period. ``reserved_micros``: worst-case costs of requests that run now."""

    limit: Limit
    settled_micros: int
    reserved_micros: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """An admitted request.

    It expires at its deadline unless renewed, so that a killed gateway leaks no slot.
    """

    tenant_id: str
    request_id: str
    # Made while the shared store was unreachable.
    local: bool = False
    # What the settlement replaces by the real use: slots, and after ``reserve`` tokens and budgets.
    claims: tuple[Claim, ...] = ()
    # Price at which budgets are charged.
    price: Price = NO_PRICE
    # The store's time of the admission, which names the periods of budgets.
    admitted_us: int = field(default=0, compare=False)
    # The rate with the least room; None where none applies, or where the request had been counted before.
    request_rate: RateState | None = field(default=None, compare=False)
    token_rate: RateState | None = field(default=None, compare=False)


class AtOnce(Generic[T]):
    """An answer that is there at once: its caller needs no task for it, and may await it all the same."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, None, T]:
        yield from ()
        return self.value


class Later(Generic[T]):
    """An answer that is asked for when it is awaited: a task that never began leaves no call behind."""

    def __init__(self, call: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **named: P.kwargs) -> None:
        self._call = partial(call, *args, **named)

    def __await__(self) -> Generator[Any, None, T]:
        return self._call().__await__()


class Limiter(Protocol):
    """What a gateway calls, and its limiter in the shared store, which is exact under any concurrency.

    Raises StoreUnavailable, in a bounded time, when the store cannot be reached.

    A limit of 0 or less is no limit. What a request is charged is the element-wise maximum of all usage that
    was reported for its id: a repeated settlement adds nothing, and a request that is admitted again under
    its id (resumed after a release) reserves and pays only what is new.
    """

    def admit(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        claims: Sequence[Claim] = (),
        price: Price = NO_PRICE,
    ) -> Awaitable[Reservation]:
        """Count the request against every limit of requests and slots, or against none if one is exceeded.

        Raises RequestRateExceeded or ConcurrencyExceeded, with ``retry_after_s``. A repeated request id is
        admitted while it holds its slot, and counts once. Settles a few lapsed reservations of the tenant.

        ``claims`` are those of ``reserve``, where the caller can state them already. They may be reserved in
        the same step, if all of them fit; the reservation then contains them. Otherwise ``reserve`` decides
        on them, so that they reject no request here.
        """

    def reserve(
        self, reservation: Reservation, claims: Sequence[Claim], price: Price
    ) -> Awaitable[Reservation]:
        """Reserve tokens and budgets for an admitted request, all of them or none.

        Called at most once per admission, with at most one claim per limit. A budget's claim is the worst
        case of the request's cost at ``price``. Raises TokenRateExceeded or BudgetExceeded, with
        ``retry_after_s`` unless the request alone exceeds the limit; nothing is reserved then, and the slot
        stays held.
        """

    async def take(self, tenant_id: str, claims: Sequence[Claim]) -> None:
        """Count amounts against rates, all or none, without a request.

        Raises RequestRateExceeded or TokenRateExceeded, with ``retry_after_s``.
        """

    async def renew(self, running: Sequence[tuple[Reservation, Usage]]) -> None:
        """Extend the deadlines of running requests. The usage so far becomes the checkpoint that a lapse
        charges, and raises token rates where it exceeds what was reserved."""

    def settle(self, reservation: Reservation, usage: Usage, *, spooled: bool = False) -> Awaitable[None]:
        """Release the slot and replace the claims by the request's use, once for any number of calls.

        After a success the caller repeats it only within a short time, unless ``spooled``: a restarted
        process may read the settlement from its disk again, or the request may be resumed.
        """
