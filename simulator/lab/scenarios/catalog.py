"""The scenarios by name, and those of a caller's own files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from simulator.lab.scenario import Options, Scenario, ScenarioError
from simulator.lab.scenarios import faults, loads

_BUNDLED: Final[dict[str, Callable[[Options], Scenario]]] = {
    build.__name__.replace("_", "-"): build
    for build in (
        loads.burst,
        loads.diurnal,
        faults.failover,
        faults.flapping_worker,
        loads.long_prompts,
        faults.network_cuts,
        loads.shared_prefixes,
        faults.slow_worker,
        loads.steady,
        loads.whale,
    )
}


def names() -> list[str]:
    """Return the names of the scenarios that come with the simulator, sorted."""
    return sorted(_BUNDLED)


def summary(name: str) -> str:
    """Return what a scenario shows, in one line."""
    return (_BUNDLED[name].__doc__ or "").partition("\n")[0]


def load(name: str, options: Options) -> Scenario:
    """Return a scenario by name, or from the file of a caller's own. Raises ScenarioError.

    Such a file has a function ``scenario(options: Options) -> Scenario``.
    """
    if name in _BUNDLED:
        return _BUNDLED[name](options)
    build = _from_file(name)
    if not callable(build):
        raise ScenarioError(f"{name} has no function scenario(options)")
    made = build(options)
    if not isinstance(made, Scenario):
        raise ScenarioError(
            f"scenario(options) of {name} returned {type(made).__name__}, and must return a Scenario"
        )
    return made


def _from_file(name: str) -> Any:
    """Return what the file calls ``scenario``, or None."""
    path = Path(name)
    if path.suffix != ".py":
        raise ScenarioError(
            f"there is no scenario {name!r}; there are {', '.join(names())}, or give a .py file or a trace, "
            "which is a .csv or .jsonl"
        )
    if not path.is_file():
        raise ScenarioError(f"there is no file {name}")
    spec = importlib.util.spec_from_file_location(f"own_scenario_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ScenarioError(f"{name} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file raises is its author's to read
        raise ScenarioError(f"{name} failed while it was read: {type(error).__name__}: {error}") from error
    return getattr(module, "scenario", None)
