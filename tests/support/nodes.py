"""Node providers: one in memory that a test makes fail, and the operator's command as a script."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.core.errors import Unavailable
from services.ports.nodes import ProvidedNode

SCRIPT = """
import json, pathlib, sys
path = pathlib.Path(__file__).with_name("nodes.json")
nodes = json.loads(path.read_text()) if path.exists() else {}
request = json.load(sys.stdin)
if request["call"] == "order":
    nodes.setdefault(request["order"], f"node-{len(nodes)}")
elif request["call"] == "release":
    nodes = {order: node for order, node in nodes.items() if node != request["node"]}
path.write_text(json.dumps(nodes))
print(json.dumps({"nodes": [{"order": order, "node": node} for order, node in nodes.items()]}))
"""


def write_script(folder: Path, text: str = SCRIPT) -> Path:
    """Return a node command in a folder, which keeps its nodes there."""
    path = folder / "node_command.py"
    path.write_text(text)
    return path


@dataclass
class MemoryNodes:
    """Implements ``NodeProvider``. ``failing``: every call fails; ``forgets``: orders are not listed.

    ``kept``: nodes that are released later; ``untyped``: orders of a type fail.
    """

    nodes: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    failing: bool = False
    forgets: bool = False
    kept: set[str] = field(default_factory=set)
    untyped: bool = False

    async def list(self) -> tuple[ProvidedNode, ...]:
        self._note("list", "")
        return tuple(ProvidedNode(order, node) for order, node in self.nodes.items())

    async def order(self, order_id: str, node_type: str, zone: str) -> None:
        self._note("order", order_id)
        if self.untyped and node_type:
            raise Unavailable(f"there are no nodes of the type {node_type}")
        if not self.forgets:
            self.nodes.setdefault(order_id, f"node-{len(self.nodes)}")

    async def release(self, node: str) -> bool:
        self._note("release", node)
        if node in self.kept:
            return False
        self.nodes = {order: name for order, name in self.nodes.items() if name != node}
        return True

    def _note(self, call: str, name: str) -> None:
        self.calls.append((call, name))
        if self.failing:
            raise Unavailable("the provider is out of order")
