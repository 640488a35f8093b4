"""How much service each tenant of a class had, and who is owed most.

A virtual token counter per tenant: weighted tokens over the tenant's weight. Whoever waits and has the least
goes first; a tenant that comes back from idle is lifted to the least of those that wait, to the last that did
where nobody does, and in any case to the floor, so that nobody saves up service while away. Sheng et al.,
Fairness in Serving Large Language Models, OSDI'24.

What differs from the paper: a grant charges the expected cost ahead (an *advance*), since many grants go out
between two reports, and reports then use the advance up; see ``value``. The floor is the most that whoever
was first in order was served so far, without advances: it never falls, although advances that were too
large are given back, so that the bound does not grow with the number of tenants that come and go.
How far two tenants may come apart is in ``fairness_bound``.

Pure: values only, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

MIN_WEIGHT: Final = 1e-3
MAX_WEIGHT: Final = 1e6
MAX_ACCOUNTS: Final = 16384
_KEPT_ACCOUNTS: Final = 12288  # of those, once there are too many
_SPARE_ACCOUNTS: Final = 64  # of idle tenants, kept before any is looked at for forgetting


@dataclass(frozen=True, slots=True)
class ServiceWeights:
    """What one token costs, in weighted tokens: of a prompt that is computed, of output, of a prompt from the
    prefix cache. Output reads all weights for one token: twice a prompt's, as in the paper."""

    prompt: float = 1.0
    output: float = 2.0
    cached: float = 0.1

    def cost(self, prompt_tokens: float, output_tokens: float, *, cached_tokens: float = 0.0) -> float:
        """Return the service of a sequence; ``cached_tokens`` are part of ``prompt_tokens``."""
        hit = cached_tokens if cached_tokens < prompt_tokens else prompt_tokens
        return self.prompt * (prompt_tokens - hit) + self.cached * hit + self.output * output_tokens


@dataclass(slots=True)
class Tab:
    """Advances of one tenant on one worker, and what reports charged since the first of them; virtual."""

    advances: int = 0
    expected: float = 0.0
    reported: float = 0.0

    @property
    def open(self) -> float:
        left = self.expected - self.reported
        return left if left > 0.0 else 0.0


@dataclass(slots=True, eq=False)
class Account:
    """One tenant in one class of a pool; all in virtual tokens, weighted tokens over ``weight``.

    ``base`` is where it started: what an earlier leader counted, or the floor at its return. ``served`` is
    what reports charged since, ``advanced`` what grants charged ahead and no report speaks for yet.
    ``unweighted`` tokens were reported before the weight was known. ``told``: what an earlier leader counted,
    and ``lag`` how far below that leader's floor it was. ``waited``: under this one. ``lifted``: what of
    ``base`` is for want of such a word.
    """

    tenant: str
    number: int
    weight: float | None = None
    base: float = 0.0
    served: float = 0.0
    advanced: float = 0.0
    unweighted: float = 0.0
    told: float | None = None
    lag: float = 0.0
    lifted: float = 0.0
    waited: bool = False
    waiting: int = 0
    listed: float = 0.0  # the value under which it stands in the order
    tabs: dict[str, Tab] = field(default_factory=dict)

    @property
    def settled(self) -> float:
        """What is known to be served."""
        return self.base + self.served

    @property
    def value(self) -> float:
        return self.base + self.served + self.advanced

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.tabs

    @property
    def awaited(self) -> bool:
        """It waited under an earlier leader, as far as is known, and its gateways did not ask again yet."""
        return self.told is not None and not self.waited


class FairShares:
    """The counters of one class of a pool. Single writer.

    Tenants that wait are in order of their counters. A change costs two binary searches and a memmove; a
    counter that reports changed is put in place with the next look at the order.
    """

    def __init__(self) -> None:
        self.floor = 0.0
        self._told_floor = 0.0
        self._awaits = False  # those that an earlier leader told of
        self._accounts: dict[str, Account] = {}
        self._order: list[tuple[float, int, Account]] = []
        self._moved: dict[str, Account] = {}
        self._last: Account | None = None  # that waited, before nobody did
        self._numbers = 0
        self._sweep_at = _SPARE_ACCOUNTS

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def idle(self) -> bool:
        """Nobody waits and nothing is granted."""
        return not self._order and all(account.idle for account in self._accounts.values())

    def find(self, tenant: str) -> Account | None:
        return self._accounts.get(tenant)

    def accounts(self) -> Iterator[Account]:
        yield from self._accounts.values()

    # --- who waits --------------------------------------------------------------------------------

    def enter(self, tenant: str, weight: float) -> Account:
        """Count one more that waits; a tenant that had none is lifted to those that wait."""
        account = self._account(tenant)
        self._weigh(account, weight)
        account.waiting += 1
        if account.waiting == 1:
            self.raise_floor()
            lift = self._lift_to(account) - account.value
            if lift > 0.0:
                account.base += lift
                if account.told is None and not account.waited:
                    account.lifted += lift
            account.waited = True
            self._list(account)
        return account

    def leave(self, account: Account) -> None:
        """Count one less that waits."""
        if account.waiting == 1:
            self.raise_floor()
            self._unlist(account)
            self._last = account
        account.waiting -= 1
        if not account.waiting:
            self._sweep()

    def at(self, index: int) -> Account | None:
        """Return the account at this place of the order, the least counter first, None beyond its end."""
        self._settle_order()
        return self._order[index][2] if index < len(self._order) else None

    def in_order(self) -> list[Account]:
        """Return those that wait, the least counter first."""
        self._settle_order()
        return [account for _, _, account in self._order]

    def gap(self) -> float:
        """Return how far apart the counters of those that wait are, 0 while fewer than two do."""
        self._settle_order()
        return self._order[-1][0] - self._order[0][0] if self._order else 0.0

    # --- what they are served ---------------------------------------------------------------------

    def charge(self, tenant: str, tokens: float, worker_id: str) -> Account:
        """Charge what a worker produced; its advances there are used up first."""
        account = self._accounts.get(tenant) or self._account(tenant)
        if account.weight is None:
            account.unweighted += tokens
            return account
        virtual = tokens / account.weight
        account.served += virtual
        tab = account.tabs.get(worker_id)
        if tab is not None:
            before = tab.open
            tab.reported += virtual
            account.advanced += tab.open - before
        if account.waiting:
            self._moved[tenant] = account
        return account

    def advance(self, account: Account, tokens: float, worker_id: str) -> float:
        """Charge the expected cost of a grant ahead; return it in virtual tokens."""
        self.raise_floor()
        virtual = tokens / (account.weight or 1.0)
        tab = account.tabs.setdefault(worker_id, Tab())
        before = tab.open
        tab.advances += 1
        tab.expected += virtual
        account.advanced += tab.open - before
        self._changed(account)
        return virtual

    def close(self, tenant: str, worker_id: str, virtual: float, *, used_tokens: float = 0.0) -> None:
        """End an advance: what it was more than used is given back, and nothing else changes.

        ``used_tokens`` are what reports have charged for its sequence.
        """
        account = self._accounts.get(tenant)
        tab = None if account is None else account.tabs.get(worker_id)
        if account is None or tab is None:
            return
        before = tab.open
        tab.advances -= 1
        tab.expected -= virtual
        tab.reported = max(0.0, tab.reported - used_tokens / (account.weight or 1.0))
        if tab.advances <= 0:
            del account.tabs[worker_id]
            account.advanced -= before
            if not account.tabs:
                account.advanced = 0.0  # no rounding is carried along
        else:
            account.advanced += tab.open - before
        self._changed(account)
        self._sweep()

    def raise_floor(self) -> None:
        """Raise the floor to what the first in order was served so far."""
        self._settle_order()
        if self._order and not self._awaits:
            self.floor = max(self.floor, self._order[0][2].settled)

    def tell(self, account: Account) -> float:
        """Return what another leader may start the tenant from, besides ``floor``: advances apart. One that
        has nothing waiting is told as the lift would leave it."""
        settled = account.base + account.served
        return settled if account.waiting or settled > self.floor else self.floor

    def restore(self, tenant: str, counter: float, *, floor: float = 0.0) -> None:
        """Start from what an earlier leader counted; what was charged since stays on top.

        ``floor`` was that leader's when it said so: of tenants without a word of it, none starts lower. Words
        may come in any order; of several on one tenant the highest counts.
        """
        self._awaits = True
        account = self._account(tenant)
        if account.told is None or counter > account.told:
            account.told, account.lag = counter, max(0.0, floor - counter)
            account.base, account.lifted = account.base - account.lifted, 0.0
            account.base = max(account.base, counter, self._told_floor - account.lag)
            self._changed(account)
        if floor > self._told_floor:
            self._told_floor = floor
            self.floor = max(self.floor, floor)
            for found in self._accounts.values():
                self._start_from(found, floor - found.lag)

    def await_no_more(self) -> None:
        """Who was waiting under an earlier leader has asked again, or returns from idle when it does. Until
        this is said after a ``restore``, the floor does not rise: the least of them may be still to come."""
        if self._awaits:
            self._awaits = False
            for account in self._accounts.values():
                account.waited = account.waited or account.told is not None

    def _start_from(self, account: Account, start: float) -> None:
        if account.base < start:
            account.lifted += start - account.base if account.told is None else 0.0
            account.base = start
            self._changed(account)

    def check_integrity(self) -> None:
        """Raise AssertionError when order, accounts and tabs disagree."""
        self._settle_order()
        assert [entry[:2] for entry in self._order] == sorted(entry[:2] for entry in self._order)
        listed = [account for account in self._accounts.values() if account.waiting]
        assert len(listed) == len(self._order), "a tenant that waits is not in the order"
        for account in self._accounts.values():
            advanced = sum(tab.open for tab in account.tabs.values())
            assert abs(account.advanced - advanced) < 1e-6 * max(1.0, advanced, account.value)
            assert all(tab.advances > 0 for tab in account.tabs.values()), "an advance leaked"

    # --- inside -----------------------------------------------------------------------------------

    def _lift_to(self, account: Account) -> float:
        """What a tenant that returns starts from at least. One that is awaited does not return: it stays as
        far behind those that came before it as it was."""
        if account.awaited:
            return self._told_floor - account.lag
        if self._order:
            return max(self.floor, self._order[0][0])
        return self.floor if self._last is None else max(self.floor, self._last.value)

    def _weigh(self, account: Account, weight: float) -> None:
        account.weight = min(MAX_WEIGHT, max(MIN_WEIGHT, weight)) if weight > 0.0 else 1.0
        if account.unweighted:
            account.served += account.unweighted / account.weight
            account.unweighted = 0.0
            self._changed(account)

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            self._sweep()
            self._numbers += 1
            account = self._accounts[tenant] = Account(tenant, self._numbers)
        return account

    def _changed(self, account: Account) -> None:
        if account.waiting:
            self._moved[account.tenant] = account

    def _settle_order(self) -> None:
        if not self._moved:
            return
        moved, self._moved = self._moved, {}
        if len(moved) > 16 and 4 * len(moved) > len(self._order):
            for _, _, account in self._order:
                account.listed = account.value
            self._order = sorted((account.listed, account.number, account) for _, _, account in self._order)
            return
        for account in moved.values():
            if account.waiting and account.listed != account.value:
                self._unlist(account)
                self._list(account)

    def _list(self, account: Account) -> None:
        account.listed = account.value
        insort(self._order, (account.listed, account.number, account))

    def _unlist(self, account: Account) -> None:
        index = bisect_left(self._order, (account.listed, account.number))
        assert self._order[index][2] is account, "a tenant stands elsewhere than it says"
        del self._order[index]
        self._moved.pop(account.tenant, None)

    def _sweep(self) -> None:
        """Forget idle tenants that the lift would put where they are: nothing is lost by that.

        Beyond MAX_ACCOUNTS those next to the floor go too, and what they were ahead is forgiven. Those that
        are awaited are kept until then.
        """
        if len(self._accounts) < self._sweep_at:
            return
        idle = sorted(
            (account.value, account.number, account) for account in self._accounts.values() if account.idle
        )
        excess = len(self._accounts) - _KEPT_ACCOUNTS if len(self._accounts) >= MAX_ACCOUNTS else 0
        for index, (value, _, account) in enumerate(idle):
            if (value <= self.floor and not account.awaited) or index < excess:
                del self._accounts[account.tenant]
        self._sweep_at = min(MAX_ACCOUNTS, _SPARE_ACCOUNTS + 2 * len(self._accounts))
