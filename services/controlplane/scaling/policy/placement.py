"""Which nodes of unlike types to order, and which of them serve which requests, at the least price.

A mixed-integer program. For load b of rank k, type t, share x and nodes n:

    minimise    sum_t price_t * n_t + move_price * moves
    subject to  sum_t x_bt = 1
                sum_{b' of rank >= k} busy_b't * x_b't + spare_bt * [x_bt > 0] <= carried_t for each b, t
                sum_b busy_bt * x_bt <= carried_t = n_t * (zones - 1) / zones, or n_t in one zone

``busy`` and ``spare`` are those of ``services.core.estimates.node_need``; a type that misses a load's KV,
first token or gap between tokens gets no share of it. A move is a node ordered or released, or a load on a
type that has not served it. Present nodes carry ``tolerance_ratio`` more than planned as long as none is
released, and one is released only if the rest carries as much more: small changes of the rates move nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.core.estimates.node_need import LoadClass, NodeNeed, NodeType, Unfit, need_of, spare_for

_TIE: Final = 1e-6  # dollars per hour by which the types' order decides between equal plans
_SHIFT: Final = 1e-3  # dollars per hour that keep a load where it is served, if nothing else decides
_LEAST_SHARE: Final = 1e-6
_OPTIONS: Final = {"threads": 1, "random_seed": 0, "mip_rel_gap": 1e-4}
Pair = tuple[str, str]  # names of a load and of a type


@dataclass(frozen=True, slots=True)
class PresentFleet:
    """Nodes by type, and the share of each load that each type serves now."""

    nodes: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[Pair, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What bounds a plan, besides the load."""

    zones: int = 1
    move_price_per_h: float = 0.1  # price of one move, over the hours until the next plan
    max_moves: int = 4096
    tolerance_ratio: float = 0.05
    time_limit_s: float = 10.0


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """What one type would do for a load. ``unfit`` None: it could serve it."""

    node_type: str
    share_ratio: float
    price_per_1k: float | None  # dollars per 1,000 requests on busy nodes
    unfit: Unfit | None


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Nodes by type, and the share of each load that each type serves."""

    nodes: dict[str, int]
    shares: dict[Pair, float]
    price_per_h: float
    moves: int
    gap_ratio: float  # most by which another plan may be cheaper; 0 if the search ended
    choices: dict[str, tuple[TypeChoice, ...]]
    note: str = ""

    @property
    def fleet(self) -> PresentFleet:
        """The fleet once the plan is carried out."""
        return PresentFleet(self.nodes, self.shares)

    def explain(self, load: str) -> str:
        """Return why these types serve a load: its price on each, and which cannot meet its target."""
        parts = []
        for one in sorted(self.choices[load], key=lambda one: (-one.share_ratio, one.price_per_1k or 0.0)):
            if one.unfit is not None:
                parts.append(f"{one.node_type} cannot: {one.unfit.text}")
            else:
                served = f" serves {one.share_ratio:.0%}" if one.share_ratio else ""
                parts.append(f"{one.node_type}{served} at {one.price_per_1k:.4f} per 1,000 requests")
        return "; ".join(parts)


def plan_fleet(
    loads: Sequence[LoadClass],
    types: Sequence[NodeType],
    present: PresentFleet,
    limits: PlanLimits,
) -> FleetPlan | Unfit:
    """Return the cheapest fleet for the loads, or what no fleet of these types can do.

    Equal arguments give equal plans, unless ``limits.time_limit_s`` ends the search first. If the load needs
    more moves than allowed, the fewest that carry it are made, and the plan's note states so.
    """
    needs = {(load.name, kind.name): need_of(kind.costs, load) for load in loads for kind in types}
    for load in loads:
        found = [needs[load.name, kind.name] for kind in types]
        unfit = [one for one in found if isinstance(one, Unfit)]
        if len(unfit) == len(found):
            names = (f"{kind.name}: {one.text}" for kind, one in zip(types, unfit, strict=True))
            return Unfit(unfit[0].field, f"no type serves {load.name}: {'; '.join(names)}")
    program = _Program(loads, types, needs, present, limits)
    plan = program.solve(limits.max_moves)
    if isinstance(plan, FleetPlan) or plan.field != "available":
        return plan
    least = program.solve(None)
    if isinstance(least, Unfit):
        return least
    note = f"{limits.max_moves} moves do not carry the load: these are the fewest that do"
    plan = program.solve(least.moves, note)
    return plan if isinstance(plan, FleetPlan) else least


@dataclass(frozen=True, slots=True)
class _Column:
    """What a load needs of a type, and the solver's variables for its share and for whether there is one."""

    need: NodeNeed
    share: Any
    serves: Any


@dataclass(frozen=True, slots=True)
class _Program:
    loads: Sequence[LoadClass]
    types: Sequence[NodeType]
    needs: Mapping[Pair, NodeNeed | Unfit]
    present: PresentFleet
    limits: PlanLimits

    def solve(self, max_moves: int | None, note: str = "") -> FleetPlan | Unfit:
        """Return the cheapest plan, with None the one of the fewest moves, or what prevents one."""
        import highspy  # the control plane starts without it

        class QuietHighs(highspy.Highs):  # type: ignore[misc, unused-ignore]
            def enableCallbacks(self) -> None:
                """Turn output off first: the constructor calls this, which prints a banner on stdout."""
                self.setOptionValue("output_flag", False)
                super().enableCallbacks()

        solver = QuietHighs()
        for option, value in {**_OPTIONS, "time_limit": self.limits.time_limit_s}.items():
            solver.setOptionValue(option, value)
        columns = {
            pair: _Column(need, solver.addVariable(0.0, 1.0), solver.addBinary())
            for pair, need in self.needs.items()
            if isinstance(need, NodeNeed)
        }
        moves, price = [], []
        for load in self.loads:
            served = [column.share for pair, column in columns.items() if pair[0] == load.name]
            solver.addConstr(solver.qsum(served) == 1.0)
        for pair, column in columns.items():
            before, shifted = self.present.shares.get(pair, 0.0), solver.addVariable()
            solver.addConstr(column.share <= column.serves)
            solver.addConstr(shifted >= column.share - before)
            solver.addConstr(shifted >= before - column.share)
            price.append(_SHIFT * shifted)
            if self.present.shares and not before:
                moves.append(1.0 * column.serves)
        per_zone, releases = [], solver.addBinary()
        for index, kind in enumerate(self.types):
            count, now = solver.addIntegral(0, kind.available // self.limits.zones), self._now(kind)
            ordered, released = solver.addVariable(), solver.addVariable()
            solver.addConstr(ordered - released == count * self.limits.zones - now)
            solver.addConstr(released <= now * releases)
            per_zone.append(count)
            moves += [1.0 * ordered, 1.0 * released]
            price.append((kind.price_per_h + index * _TIE) * self.limits.zones * count)
            slack = self.limits.tolerance_ratio * now * (1.0 - 2.0 * releases)
            self._carry(solver, kind, columns, count * max(1, self.limits.zones - 1) + slack)
        if max_moves is None:
            solver.minimize(solver.qsum(moves))
        else:
            solver.addConstr(solver.qsum(moves) <= max_moves)
            move_price = self.limits.move_price_per_h if self.present.nodes else 0.0
            solver.minimize(solver.qsum(price) + move_price * solver.qsum(moves))
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            if solver.getModelStatus() == highspy.HighsModelStatus.kTimeLimit:
                text = f"no plan was found within {self.limits.time_limit_s:g} s: raise it, or merge loads"
                return Unfit("time_limit_s", text)
            return Unfit("available", "the available nodes do not carry the load: raise `available`")
        counts = [round(solver.val(count)) * self.limits.zones for count in per_zone]
        nodes = {kind.name: count for kind, count in zip(self.types, counts, strict=True)}
        found = {pair: solver.val(column.share) for pair, column in columns.items()}
        shares = {pair: share for pair, share in found.items() if share > _LEAST_SHARE}
        return self._plan(nodes, shares, max(0.0, solver.getInfo().mip_gap), note)

    def _now(self, kind: NodeType) -> int:
        return self.present.nodes.get(kind.name, 0)

    def _carry(self, solver: Any, kind: NodeType, columns: Mapping[Pair, _Column], carried: Any) -> None:
        """Add that the nodes of a type carry each load with those of its rank and above, and all of them."""
        here = [
            (load, columns[load.name, kind.name]) for load in self.loads if (load.name, kind.name) in columns
        ]
        for load, column in here:
            above = [each for other, each in here if other.priority.rank >= load.priority.rank]
            spare = spare_for(load, column.need, sum(each.need.nodes for each in above))
            busy = solver.qsum(each.need.nodes * each.share for each in above)
            solver.addConstr(busy + spare * column.serves <= carried)
        if here:
            busy = solver.qsum(column.need.nodes * column.share for _, column in here)
            solver.addConstr(busy <= carried)

    def _plan(
        self, nodes: dict[str, int], shares: dict[Pair, float], gap_ratio: float, note: str
    ) -> FleetPlan:
        moves = sum(abs(nodes[kind.name] - self._now(kind)) for kind in self.types)
        moves += len(shares.keys() - self.present.shares.keys()) if self.present.shares else 0
        price = sum(kind.price_per_h * nodes[kind.name] for kind in self.types)
        choices = {
            load.name: tuple(self._choice(load, kind, shares) for kind in self.types) for load in self.loads
        }
        return FleetPlan(nodes, shares, price, moves, gap_ratio, choices, note)

    def _choice(self, load: LoadClass, kind: NodeType, shares: Mapping[Pair, float]) -> TypeChoice:
        need = self.needs[load.name, kind.name]
        if isinstance(need, Unfit):
            return TypeChoice(kind.name, 0.0, None, need)
        price = kind.price_per_h / 3.6 / need.capacity.requests_per_s
        return TypeChoice(kind.name, shares.get((load.name, kind.name), 0.0), price, None)
