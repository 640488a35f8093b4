"""A periodic task of the leading control plane."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from services.core.errors import NoLeader, StoreUnavailable
from services.ports.clock import Clock
from services.ports.store import LeaseLost
from services.runtime.fleet_state.leadership import Leadership

log = structlog.get_logger()


async def repeat_while_leading(
    leadership: Leadership,
    clock: Clock,
    check: Callable[[int], Awaitable[None]],
    *,
    each_s: float,
    failed: str,
) -> None:
    """Call ``check`` with the epoch, every ``each_s`` while leading, until cancelled.

    A check that the store or a lost leadership interrupts is logged as the event ``failed``, and repeated.
    """
    while True:
        epoch = await leadership.wait_leading()
        try:
            await check(epoch)
        except (StoreUnavailable, LeaseLost, NoLeader) as error:
            log.info(failed, error=repr(error))
        await clock.sleep(each_s)
