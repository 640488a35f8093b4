"""Every error reason has a party at fault."""

from __future__ import annotations

import importlib
import pkgutil

import services
from scripts.reference import kinds
from services.core.errors import FairwayError
from services.core.faults import ERRORS, FINISHED, Fault, fault_of

WITH_TORCH_OR_MAIN = (  # or vLLM
    "services.worker.engine.",
    "services.worker.engines.",
    "services.worker.batcher.models.",
    "services.worker.batcher.measure",
    "services.worker.batcher.process",
    "services.__main__",
)


def test_every_reason_of_the_error_tree_is_classed_and_no_other() -> None:
    for module in pkgutil.walk_packages(services.__path__, "services."):
        if not module.name.startswith(WITH_TORCH_OR_MAIN):
            importlib.import_module(module.name)
    every: list[type[FairwayError]] = [FairwayError, *kinds()]
    reasons = {kind.reason for kind in every if kind.__module__.startswith("services.")}
    assert reasons == set(ERRORS) - {FINISHED}


def test_a_reason_that_nobody_classed_counts_against_the_platform() -> None:
    assert fault_of("FROM_A_NEWER_SERVER") is Fault.OURS
