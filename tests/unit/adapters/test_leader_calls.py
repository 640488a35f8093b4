"""How long a call waits for a leader."""

from __future__ import annotations

import pytest

from fairway.v1 import controlplane_pb2 as cp
from services.adapters.grpc.leader_calls import DIAGNOSES_S, LEADERLESS_S, GrpcDiagnoses
from services.adapters.links.scheduler_directory import LeaderAddress
from services.core.errors import NoLeader
from tests.support.clocks import HandClock

CLOCK_S = 1_800_000_000.0


class Candidates:
    """A ``LeaderDirectory`` of leaders that refuse every connection: each follows the last after a while."""

    def __init__(self, clock: HandClock, *addresses: str, after_s: float) -> None:
        self._clock, self._after_s = clock, after_s
        self._addresses = list(addresses)
        self.leader: LeaderAddress | None = None

    async def wait_changed(self, seen: LeaderAddress | None, timeout_s: float) -> LeaderAddress | None:
        if self._addresses and self._after_s < timeout_s:
            self._clock.now_s += self._after_s
            self.leader = LeaderAddress("p", self._addresses.pop(0), 1)
        else:
            self._clock.now_s += timeout_s
        return self.leader


async def test_a_diagnosis_without_a_leader_is_refused_long_before_its_time_is_over() -> None:
    clock = HandClock(CLOCK_S)
    calls = GrpcDiagnoses(Candidates(clock, after_s=0.0), "token", clock)
    with pytest.raises(NoLeader, match="no leader exists; start a control plane"):
        await calls.diagnose(cp.DiagnoseLatencyRequest())
    assert clock.now_s - CLOCK_S == LEADERLESS_S < DIAGNOSES_S


async def test_each_new_leader_is_asked() -> None:
    clock = HandClock(CLOCK_S)
    candidates = Candidates(clock, "127.0.0.1:1", "127.0.0.1:2", after_s=4.0)
    calls = GrpcDiagnoses(candidates, "token", clock)
    with pytest.raises(NoLeader, match="UNAVAILABLE"):
        await calls.diagnose(cp.DiagnoseLatencyRequest())
    assert clock.now_s - CLOCK_S == 2 * 4.0 + LEADERLESS_S
    await calls.close()
