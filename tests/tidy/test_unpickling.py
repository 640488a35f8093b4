"""The lint that bans what may run code of the file that it reads."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.tidy.sources import ROOT

RUFF: Final = (str(ROOT / ".venv" / "bin" / "ruff"), "check", "--config", str(ROOT / "pyproject.toml"))
PLANTED: Final = {
    "import": "import pickle",
    "from": "from pickle import loads",
    "alias": "import pickle as p\np.loads(b'')",
    "inside": "def f(x: bytes) -> object:\n    import _pickle\n\n    return _pickle.loads(x)",
    "cloudpickle": "import cloudpickle",
    "dill": "import dill",
    "joblib": "from joblib import load",
    "jsonpickle": "import jsonpickle",
    "marshal": "import marshal",
    "shelve": "import shelve",
    "torch": "import torch as t\nt.load('a.pt')",
    "torch-name": "from torch import load",
    "weights-only": "import torch\ntorch.load('a.pt', weights_only=True)",
    "torch-jit": "import torch\ntorch.jit.load('a.pt')",
    "torch-hub": "import torch.hub\ntorch.hub.load('a', 'b')",
    "numpy": "import numpy as np\nnp.load('a.npy', allow_pickle=True)",
    "pandas": "import pandas\npandas.read_pickle('a')",
    "yaml": "import yaml\nyaml.load('a', Loader=yaml.Loader)",
    "yaml-name": "from yaml import unsafe_load",
}


def check(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUFF, "--no-cache", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", PLANTED)
def test_unpickling_is_found(name: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(PLANTED[name] + "\n", "utf-8")
    found = check(path)
    assert found.returncode == 1
    assert any(rule in found.stdout for rule in ("TID251", "S301", "S302", "S506")), found.stdout


def test_reading_data_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(
        "import pickletools\n\nimport yaml\n\nyaml.safe_load('a')\npickletools.dis(b'.')\n", "utf-8"
    )
    assert check(path).returncode == 0
