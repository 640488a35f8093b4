"""The file of node types: cost model, price and availability by name, and what each figure is based on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from services.core.estimates.cost_model import PRESETS, CostModel
from services.core.estimates.node_need import NodeType
from simulator.capacity.load import BadLoad
from simulator.engine.cost_model import cost_model

SHIPPED: Final = Path(__file__).parents[2] / "deploy" / "node-types.json"
FIGURES: Final = (*(field.name for field in fields(CostModel) if field.name != "name"), "price_per_h")
MAX_FILE_BYTES: Final = 1 << 20


class Basis(StrEnum):
    """What a figure is based on."""

    PUBLISHED = "published"
    ASSUMED = "assumed"
    CALIBRATED = "calibrated"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    model: str  # model that its cost model is of: types of one model compare
    cost_model: str  # name of a preset, or a file of `fairway calibrate`, relative to this one
    price_per_h: float
    basis: dict[Basis, list[str]]
    available: int = 4096


@dataclass(frozen=True, slots=True)
class NodeTypes:
    """Types in the order of the file, with the model of each and the basis of its figures."""

    types: tuple[NodeType, ...]
    models: dict[str, str]
    basis: dict[str, dict[str, Basis]]

    def only(self, names: list[str]) -> NodeTypes:
        """Return the named types; without a name, all of the first one's model. Raises BadLoad."""
        known = {kind.name: kind for kind in self.types}
        for name in names:
            if name not in known:
                raise BadLoad(f"--types: {name} is not a node type; there are {', '.join(known)}")
        model = self.models[names[0] if names else self.types[0].name]
        chosen = names or [name for name in known if self.models[name] == model]
        if other := [name for name in chosen if self.models[name] != model]:
            text = f"{other[0]} is described for {self.models[other[0]]}, {chosen[0]} for {model}"
            raise BadLoad(f"--types: {text}: plan each model apart")
        types = tuple(known[name] for name in chosen)
        return NodeTypes(types, self.models, {name: self.basis[name] for name in chosen})


def read_node_types(path: Path) -> NodeTypes:
    """Return the types in a file. Raises BadLoad with the type and the field that is wrong."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadLoad(f"--node-types: {path} is larger than {MAX_FILE_BYTES} bytes")
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Entry])
    except OSError as error:
        raise BadLoad(f"--node-types: {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadLoad(f"--node-types: {path}: {error}") from None
    types = {one.name: _node_type(one, path) for one in entries}
    if not entries or len(types) < len(entries):
        raise BadLoad(f"--node-types: {path}: give at least one type, and each name once")
    basis = {
        one.name: {figure: Basis(basis) for basis, figures in one.basis.items() for figure in figures}
        for one in entries
    }
    return NodeTypes(tuple(types.values()), {one.name: one.model for one in entries}, basis)


def _node_type(entry: _Entry, path: Path) -> NodeType:
    where = f"--node-types: {path}: {entry.name}"
    named = sorted(figure for figures in entry.basis.values() for figure in figures)
    if named != sorted(FIGURES):
        raise BadLoad(f"{where}: basis names each of these figures once: {', '.join(FIGURES)}")
    if not 0.0 <= entry.price_per_h < 1e6 or not 0 <= entry.available <= 1_000_000:
        raise BadLoad(f"{where}: price_per_h is 0 to 1e6, available 0 to 1000000")
    model = entry.cost_model
    try:
        costs = cost_model(model if model in PRESETS else str(path.parent / model))
    except ValueError as error:
        raise BadLoad(f"{where}: cost_model: {error}") from None
    return NodeType(entry.name, costs, entry.price_per_h, entry.available)
