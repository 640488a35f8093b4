"""Port of the way from a gateway's measurements to the leading control plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.arms import SliReport


@dataclass(frozen=True, slots=True)
class SliReceipt:
    """``last``: every report of the source up to it is counted. ``durable``: these outlive the leader."""

    last: int
    durable: int


class SliReports(Protocol):
    """The leading control plane's store of service level indicators."""

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        """Count reports of a source, which numbers them; ``oldest`` is the first that it still has.

        A report with a number that is already counted is skipped. With a gap before ``first`` that the source
        can fill, nothing is counted. Raises FairwayError, within a bounded time.
        """
