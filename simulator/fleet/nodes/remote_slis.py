"""A gateway's reports of service level indicators, to the leading control plane over the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.controlplane.objectives.store import SliStore
from services.core.arms import SliReceipt, SliReport
from services.core.errors import NoLeader
from services.rpc.convert.slis import report_from_proto, report_to_proto
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process

_REPORT_S: Final = 10.0  # the interval of adapters.grpc.slis


class RemoteSlis:
    """Implements the gateway's ``SliReports``. Reports are encoded, so that no sums are shared."""

    def __init__(self, process: Process, network: Network, directory: SchedulerDirectory) -> None:
        self._process = process
        self._network = network
        self._directory = directory

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        leader = self._directory.leader
        if leader is None:
            raise NoLeader("no control plane leads", retry_after_s=1.0)
        messages = [report_to_proto(one) for one in reports]

        async def count(slis: SliStore) -> SliReceipt:
            return slis.report(source, first, oldest, tuple(map(report_from_proto, messages)))

        try:
            return await self._network.ask(self._process, leader.address, count, within_s=_REPORT_S)
        except Unreachable as error:
            raise NoLeader("the control plane does not answer", retry_after_s=1.0) from error
