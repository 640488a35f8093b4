from __future__ import annotations

import ast

from tests.conftest import LONG_TESTS
from tests.tidy.sources import ROOT


def test_every_long_test_exists() -> None:
    """One that was renamed would run in `make test` again."""
    missing = []
    for path in {name.partition("::")[0] for name in LONG_TESTS}:
        tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).exists() else ast.Module([], [])
        there = {getattr(node, "name", "") for node in tree.body}
        # A state machine's test class is assigned from its machine.
        there |= {target.id for node in tree.body if isinstance(node, ast.Assign)
                  for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
        missing += [
            name for name in LONG_TESTS if name.startswith(f"{path}::") and name.split("::")[1] not in there
        ]
    assert missing == []
