"""Fair sharing: the service of each tenant of a class, and the tenant to serve next.

A virtual token counter per tenant: weighted tokens over the tenant's weight. The waiting tenant with the
smallest counter is served first. A tenant that returns from idle is raised to the smallest counter of the
waiting tenants, or to that of the last waiting tenant when none waits, and always to the floor, so that no
tenant accumulates service while idle. Sheng et al., Fairness in Serving Large Language Models, OSDI'24.

Difference from the paper: a grant charges the expected cost in advance (an *advance*), because many grants
are issued between two reports, and reports then use the advance up; see ``value``. The floor is the largest
service, without advances, that any tenant had while it was first in order: it never decreases, although
unused advances are returned, so that the bound does not grow with the number of tenants that come and go. The
maximum difference between two tenants is in ``simulator/invariants/fairness.py``.

Pure: values only, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

MIN_WEIGHT: Final = 1e-3
MAX_WEIGHT: Final = 1e6
MAX_ACCOUNTS: Final = 16384
_KEPT_ACCOUNTS: Final = 12288  # remaining accounts after a removal at the limit
_SPARE_ACCOUNTS: Final = 64  # idle accounts that are stored before any is removed


@dataclass(frozen=True, slots=True)
class ServiceWeights:
    """Price of one token in weighted tokens.

    Computing an output token reads all weights for one token: twice the price of a prompt token, as in the
    paper.
    """

    prompt: float = 1.0  # cost of a computed prompt token
    output: float = 2.0
    cached: float = 0.1  # cost of a prompt token that the prefix cache holds

    def cost(self, prompt_tokens: float, output_tokens: float, *, cached_tokens: float = 0.0) -> float:
        """Return the cost of a sequence; ``cached_tokens`` are part of ``prompt_tokens``."""
        hit = cached_tokens if cached_tokens < prompt_tokens else prompt_tokens
        return self.prompt * (prompt_tokens - hit) + self.cached * hit + self.output * output_tokens


@dataclass(slots=True)
class AdvanceTotals:
    """Advances of one tenant on one worker, and the service reported since the first of them, in virtual
    tokens."""

    advances: int = 0
    expected: float = 0.0
    reported: float = 0.0

    @property
    def open(self) -> float:
        left = self.expected - self.reported
        return left if left > 0.0 else 0.0


@dataclass(slots=True, eq=False)
class Account:
    """One tenant in one class of a pool; all in virtual tokens, weighted tokens over ``weight``."""

    tenant: str
    number: int
    weight: float | None = None
    base: float = 0.0  # start value: the counter of an earlier leader, or the floor at its return
    served: float = 0.0  # charged by reports since then
    advanced: float = 0.0  # charged in advance by grants and not yet reported
    unweighted: float = 0.0  # reported before the weight was known
    restored: float | None = None  # counter of an earlier leader
    lag: float = 0.0  # how far ``restored`` was below that leader's floor
    raised: float = 0.0  # the part of ``base`` that was raised for lack of ``restored``
    waited: bool = False  # it has waited in this term
    waiting: int = 0
    listed: float = 0.0  # its value in the order
    tabs: dict[str, AdvanceTotals] = field(default_factory=dict)

    @property
    def settled(self) -> float:
        """Service without advances."""
        return self.base + self.served

    @property
    def value(self) -> float:
        return self.base + self.served + self.advanced

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.tabs

    @property
    def expected_back(self) -> bool:
        """It waited in an earlier term, if its counter was restored, and its gateways have not submitted
        again yet."""
        return self.restored is not None and not self.waited


class FairShares:
    """The counters of one class of a pool. Single writer.

    Waiting tenants are ordered by counter. A change costs two binary searches and a memmove; a counter that
    reports changed is moved when the order is next read.
    """

    def __init__(self) -> None:
        self.floor = 0.0
        self._restored_floor = 0.0  # highest floor of an earlier leader
        self._awaits = False  # restored tenants may still submit again
        self._accounts: dict[str, Account] = {}
        self._order: list[tuple[float, int, Account]] = []
        self._moved: dict[str, Account] = {}
        self._last: Account | None = None  # the last one that waited, before the order became empty
        self._numbers = 0
        self._sweep_at = _SPARE_ACCOUNTS

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def idle(self) -> bool:
        """No tenant waits and nothing is granted."""
        return not self._order and all(account.idle for account in self._accounts.values())

    def find(self, tenant: str) -> Account | None:
        return self._accounts.get(tenant)

    def accounts(self) -> Iterator[Account]:
        yield from self._accounts.values()

    # --- waiting tenants --------------------------------------------------------------------------

    def enter(self, tenant: str, weight: float) -> Account:
        """Count a waiting placement; a tenant without others is raised to the waiting tenants."""
        account = self._account(tenant)
        self.weigh(account, weight)
        account.waiting += 1
        if account.waiting == 1:
            self.raise_floor()
            lift = self._start_value(account) - account.value
            if lift > 0.0:
                account.base += lift
                if account.restored is None and not account.waited:
                    account.raised += lift
            account.waited = True
            self._list(account)
        return account

    def leave(self, account: Account) -> None:
        """Count a placement that left."""
        if account.waiting == 1:
            self.raise_floor()
            self._unlist(account)
            self._last = account
        account.waiting -= 1
        if not account.waiting:
            self._sweep()

    def at(self, index: int) -> Account | None:
        """Return the account at this place of the order, the smallest counter first, None beyond its end."""
        self._settle_order()
        return self._order[index][2] if index < len(self._order) else None

    def in_order(self) -> list[Account]:
        """Return the waiting accounts, the smallest counter first."""
        self._settle_order()
        return [account for _, _, account in self._order]

    def gap(self) -> float:
        """Return the spread of the counters of waiting tenants, 0 while fewer than two wait."""
        self._settle_order()
        return self._order[-1][0] - self._order[0][0] if self._order else 0.0

    # --- service ----------------------------------------------------------------------------------

    def charge(self, tenant: str, tokens: float, worker_id: str) -> Account:
        """Charge the service that a worker reported; its advances on that worker are used up first."""
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
        tab = account.tabs.setdefault(worker_id, AdvanceTotals())
        before = tab.open
        tab.advances += 1
        tab.expected += virtual
        account.advanced += tab.open - before
        self._changed(account)
        return virtual

    def close(self, tenant: str, worker_id: str, virtual: float, *, used_tokens: float = 0.0) -> None:
        """End an advance: return its unused part, and change nothing else.

        ``used_tokens`` is what reports have charged for its sequence.
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
                account.advanced = 0.0  # no rounding error remains
        else:
            account.advanced += tab.open - before
        self._changed(account)
        self._sweep()

    def raise_floor(self) -> None:
        """Raise the floor to what the first in order was served so far."""
        self._settle_order()
        if self._order and not self._awaits:
            self.floor = max(self.floor, self._order[0][2].settled)

    def exported_counter(self, account: Account) -> float:
        """Return the counter from which another leader may start the tenant, besides ``floor``: without
        advances. For a tenant with nothing waiting it is at least the floor."""
        settled = account.base + account.served
        return settled if account.waiting or settled > self.floor else self.floor

    def restore(self, tenant: str, counter: float, *, floor: float = 0.0) -> None:
        """Start from the counter of an earlier leader; what was charged since is added.

        ``floor`` belongs to that leader at the same time: no tenant without a restored counter starts lower.
        Calls may come in any order; of several for one tenant the highest counter applies.
        """
        self._awaits = True
        account = self._account(tenant)
        if account.restored is None or counter > account.restored:
            account.restored, account.lag = counter, max(0.0, floor - counter)
            account.base, account.raised = account.base - account.raised, 0.0
            account.base = max(account.base, counter, self._restored_floor - account.lag)
            self._changed(account)
        if floor > self._restored_floor:
            self._restored_floor = floor
            self.floor = max(self.floor, floor)
            for found in self._accounts.values():
                self._start_from(found, floor - found.lag)

    def stop_waiting(self) -> None:
        """End the wait for restored tenants: those that waited in an earlier term have submitted again, or
        count as returning from idle later. After a ``restore`` the floor does not rise until this call,
        because the tenant with the smallest counter may not have submitted yet."""
        if self._awaits:
            self._awaits = False
            for account in self._accounts.values():
                account.waited = account.waited or account.restored is not None

    def _start_from(self, account: Account, start: float) -> None:
        if account.base < start:
            account.raised += start - account.base if account.restored is None else 0.0
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

    def _start_value(self, account: Account) -> float:
        """Return the lowest value from which a returning tenant starts.

        A tenant that is expected back is not a returning one: its distance behind the others of the earlier
        term is preserved."""
        if account.expected_back:
            return self._restored_floor - account.lag
        if self._order:
            return max(self.floor, self._order[0][0])
        return self.floor if self._last is None else max(self.floor, self._last.value)

    def weigh(self, account: Account, weight: float) -> None:
        """Charge the tenant's service by this weight from now on; 0 and below count as 1."""
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
        """Remove idle tenants that would be raised to the same counter at their return: nothing is lost.

        Beyond MAX_ACCOUNTS those next to the floor are removed too, and the excess of their counters is lost.
        Awaited tenants are kept until then.
        """
        if len(self._accounts) < self._sweep_at:
            return
        idle = sorted(
            (account.value, account.number, account) for account in self._accounts.values() if account.idle
        )
        excess = len(self._accounts) - _KEPT_ACCOUNTS if len(self._accounts) >= MAX_ACCOUNTS else 0
        for index, (value, _, account) in enumerate(idle):
            if (value <= self.floor and not account.expected_back) or index < excess:
                del self._accounts[account.tenant]
        self._sweep_at = min(MAX_ACCOUNTS, _SPARE_ACCOUNTS + 2 * len(self._accounts))


class _Held(Struct):
    sequences: int
    weight: float


_NOTHING: Final = _Held(0, 0.0)


class HeldShares:
    """The granted sequences of one pool, by tenant. Bounded by the open grants. Single writer.

    A fair queue determines the next placement, and a pool frees room a piece at a time. A tenant with a
    standing queue takes each piece at once, so that the next tenant finds workers without room and with
    queued prompts. A tenant with a queue loses little when a placement starts slightly later; the others
    would miss their time to first token. So a placement of such a tenant starts only where almost no
    prefill is queued (``length``). Networks limit a flooding stream to the capacity that it leaves free
    for the same reason: trunk reservation (Key, Optimal control and trunk reservation in loss networks,
    1990).

    The share is by weight, among the tenants that hold sequences: granted and not ended. A tenant that is
    alone is not limited, nor is one whose queue is short. Where no worker has a slot, a tenant that would
    stay within its share with one more sequence may get a slot that a worker takes from the tenant with the
    most. A change costs O(1).
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._sequences = 0
        self._weight = 0.0

    def __len__(self) -> int:
        """Return how many tenants hold a sequence."""
        return len(self._held)

    @property
    def sequences(self) -> int:
        return self._sequences

    def take(self, tenant: str, weight: float) -> None:
        """Count a granted sequence. The latest weight applies to all sequences of the tenant."""
        held = self._held.get(tenant)
        if held is None:
            held = self._held[tenant] = _Held(0, 0.0)
        self._weight += weight - held.weight
        held.weight = weight
        held.sequences += 1
        self._sequences += 1

    def release(self, tenant: str) -> None:
        """Count an ended sequence. KeyError for a tenant that holds none."""
        held = self._held[tenant]
        held.sequences -= 1
        self._sequences -= 1
        if not held.sequences:
            del self._held[tenant]
            self._weight = self._weight - held.weight if self._held else 0.0  # no rounding error remains

    def over_share(self, tenant: str, waiting: int) -> bool:
        """Return whether the tenant holds more than its share, with more than its share ``waiting`` too."""
        held = self._held.get(tenant)
        if held is None or len(self._held) < 2:
            return False
        share = self._sequences * held.weight / self._weight
        return held.sequences > share and waiting > share

    def is_below(self, tenant: str, weight: float) -> bool:
        """Return whether one more sequence leaves it within its share, while others hold some."""
        held = self._held.get(tenant, _NOTHING)
        others = self._weight - held.weight
        if len(self._held) - (held is not _NOTHING) == 0:
            return False
        return held.sequences + 1 <= self._sequences * weight / (others + weight)

    def check_integrity(self) -> None:
        """Raise AssertionError when the sums are not those of the tenants."""
        assert self._sequences == sum(held.sequences for held in self._held.values())
        assert all(held.sequences > 0 for held in self._held.values()), "a tenant holds nothing"
        weight = sum(held.weight for held in self._held.values())
        assert abs(self._weight - weight) <= 1e-6 * max(1.0, weight), "the weights are miscounted"
