"""The examples of docs/client.md do what the page says."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.client.scripted import ScriptedGateway

PAGE: Final = Path(__file__).parents[3] / "docs" / "client.md"
FOUND: Final = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
# Those of the operators' client are run by tests/e2e/test_admin_client.py.
EXAMPLES: Final = [each for each in FOUND if "AdminClient" not in each and "Client" in each]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_example_runs(gateways: tuple[ScriptedGateway, ScriptedGateway], number: int) -> None:
    addresses = [gateway.address for gateway in gateways]
    names: dict[str, Any] = {"endpoints": addresses, "api_key": "secret", "print": lambda *_, **__: None}
    names["model"] = "tiny"
    exec(f"async def example():\n{textwrap.indent(EXAMPLES[number], '    ')}", names)
    await names["example"]()
    assert sum(gateway.calls for gateway in gateways)
