"""The drills, as data: what is done, for how long, what a client may notice, and when it must be over.

The times are limits for a machine with nothing else to do; ``--patience`` multiplies them for a busy one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from tests.chaos.faults import Fault, FillDisk, Freeze, Kill, LoseModels, LoseState, Net, Term
from tests.chaos.fleet import SMALL_DISK
from tests.chaos.proxy import Mode


@dataclass(frozen=True, slots=True)
class Drill:
    """``faults`` are injected in order and lifted in reverse after ``hold_s``.

    ``silence_s``: longest time without an event that a client sees. ``heal_s``: from the lifting until
    every gateway streams and every replica is READY. ``gateways``: whose connections may break. ``reasons``:
    errors that an accepted request may end with. ``slots_s``: until Redis holds no slot of its requests.
    ``replaced``: what must be another process afterwards.
    """

    name: str
    faults: tuple[Fault, ...]
    hold_s: float
    silence_s: float
    heal_s: float
    gateways: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    slots_s: float = 25.0
    replaced: tuple[str, ...] = ()


ENGINE: Final = "engine:worker-0"
FREEZE_S: Final = 10.0
STORE_FREEZE_S: Final = 5.0
CUT_S: Final = 5.0
HOLE_S: Final = 9.0
# After so much silence an agent kills its engine.
ENGINE_SILENCE_S: Final = 20.0
# A gateway that was killed gives its slots back by their lease.
LEASE_S: Final = 65.0


def _process_drills() -> Iterator[Drill]:
    """Kill -9, SIGSTOP for ten seconds and SIGTERM of each role."""
    engine_dies = Drill("", (), 0.0, silence_s=6, heal_s=20)
    yield replace(engine_dies, name="engine-kill", faults=(Kill(ENGINE),), replaced=(ENGINE,))
    yield Drill("gateway-kill", (Kill("gateway-1"),), 0, 6, 15, ("gateway-1",), slots_s=LEASE_S,
                replaced=("gateway-1",))  # fmt: skip
    yield Drill("scheduler-kill", (Kill("scheduler:leader"),), 0, 6, 15)
    yield Drill("worker-kill", (Kill("worker-1"),), 0, 6, 25, replaced=("worker-1",))
    both = (Kill("worker-0"), Kill("scheduler:leader"))
    yield Drill("worker-and-scheduler-kill", both, 0, 10, 30, replaced=("worker-0",))
    yield Drill("registry-kill", (LoseModels("worker-0"), Kill("registry")), 0, 6, 30, replaced=("registry",))
    yield Drill("controlplane-kill", (Kill("controlplane:leader"),), 0, 4, 15)
    yield Drill("engine-term", (Term("engine:worker-1"),), 0, 6, 20, replaced=("engine:worker-1",))
    yield Drill("scheduler-term", (Term("scheduler:leader"),), 0, 4, 15)
    yield Drill("gateway-term", (Term("gateway"),), 0, 6, 40, replaced=("gateway",))
    yield Drill("worker-term", (Term("worker-0"),), 0, 6, 45, replaced=("worker-0",))
    yield Drill("registry-term", (LoseModels("worker-1"), Term("registry")), 0, 6, 30, replaced=("registry",))
    yield Drill("controlplane-term", (Term("controlplane:leader"),), 0, 4, 15)
    yield Drill("engine-stop", (Freeze("engine:worker-1"),), FREEZE_S, 9, 20)
    yield Drill("engine-hang", (Freeze(ENGINE),), ENGINE_SILENCE_S + 4, 9, 30, replaced=(ENGINE,))
    yield Drill("gateway-stop", (Freeze("gateway"),), FREEZE_S, FREEZE_S + 5, 15, ("gateway",))
    yield Drill("scheduler-stop", (Freeze("scheduler:leader"),), FREEZE_S, 9, 15)
    # Nobody leads for ten seconds: gateways place by themselves, and nobody waits for the end of it.
    yield Drill("schedulers-stop", (Freeze("scheduler"), Freeze("scheduler-1")), FREEZE_S, 6, 15)
    yield Drill("worker-stop", (Freeze("worker-0"),), FREEZE_S, 9, 20)
    yield Drill("registry-stop", (Freeze("registry"),), FREEZE_S, 4, 10)
    yield Drill("controlplane-stop", (Freeze("controlplane:leader"),), FREEZE_S, 4, 15)


def _store_drills() -> Iterator[Drill]:
    """etcd and Redis frozen for five seconds, killed and started again, and Redis without its state."""
    yield Drill("etcd-freeze", (Freeze("etcd"),), STORE_FREEZE_S, STORE_FREEZE_S + 7, 15)
    yield Drill("redis-freeze", (Freeze("redis"),), STORE_FREEZE_S, 4, 10)
    yield Drill("etcd-kill", (Kill("etcd"),), 0, 12, 20, replaced=("etcd",))
    yield Drill("redis-kill", (Kill("redis"),), 0, 4, 10, replaced=("redis",))
    yield Drill("redis-empty", (LoseState("redis"),), 0, 4, 10, replaced=("redis",))


def _edge(source: str, target: str, mode: Mode, silence_s: float, heal_s: float = 15) -> Drill:
    """A drill of one edge; the name says between whom."""
    name = f"{source.rstrip('*')}-{target.rstrip('*')}-{mode}"
    hold_s = HOLE_S if mode == "hole" else CUT_S
    return Drill(name, (Net(source, target, mode),), hold_s, silence_s, heal_s)


def _network_drills() -> Iterator[Drill]:
    """Each edge cut and turned into a hole."""
    for mode, more_s in (("cut", 0.0), ("hole", 4.0)):
        kind: Mode = "cut" if mode == "cut" else "hole"
        yield _edge("gateway*", "scheduler*", kind, 9 + more_s)
        yield _edge("gateway*", "worker-0", kind, 5 + more_s)
        yield replace(_edge("gateway*", "worker*", kind, 9 + 2 * more_s), name=f"gateway-workers-{mode}")
        yield _edge("worker*", "scheduler*", kind, 9 + more_s)
        yield replace(
            _edge("worker*", "registry", kind, 6),
            faults=(Net("worker*", "registry", kind), LoseModels("worker-1")),
            heal_s=40,
        )
        yield replace(
            _edge("gateway*", "registry", kind, 6),
            faults=(Net("gateway*", "registry", kind), LoseModels("gateway-1")),
            gateways=("gateway-1",),
            slots_s=LEASE_S,
            heal_s=40,
        )
        yield _edge("gateway*", "redis", kind, 4)
        yield replace(
            _edge("client", "gateway", kind, HOLE_S + 5 if kind == "hole" else 6), gateways=("gateway",)
        )
        for role in ("gateway", "scheduler", "worker", "registry", "controlplane"):
            silence_s = 12 + more_s if role == "scheduler" else 6
            yield _edge(f"{role}*", "etcd", kind, silence_s)
    slow = Net("*", "*", "delay", 0.05)
    yield Drill("network-slow", (slow,), 8, 6, 15)


def _disk_drills() -> Iterator[Drill]:
    yield Drill("worker-disk-full", (FillDisk(SMALL_DISK),), 8, 6, 60)


def matrix() -> tuple[Drill, ...]:
    """Every drill, in an order that gives each process a while between two of its deaths."""
    groups = [list(_process_drills()), [*_store_drills(), *_disk_drills()], list(_network_drills())]
    ordered: list[Drill] = [Drill("calm", (), 5, 3, 10)]
    while any(groups):
        for group in groups:
            take = 2 if len(group) > 20 else 1
            ordered += group[:take]
            del group[:take]
    return tuple(ordered)
