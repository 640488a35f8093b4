"""Metrics of the worker's devices: their number, price and peak, where these are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from services.runtime.telemetry.metrics import Metrics, Reading
from services.worker.agent.report import WorkerIdentity

# Dense bfloat16 operations per second of one whole device, by the name that its driver states. Source: the
# data sheet of each, whose figures with sparsity are halved.
_BFLOAT16_FLOPS: Final[Mapping[str, float]] = {
    "nvidia-a10": 125e12,
    "nvidia-a100-pcie-40gb": 312e12,
    "nvidia-a100-80gb-pcie": 312e12,
    "nvidia-a100-sxm4-40gb": 312e12,
    "nvidia-a100-sxm4-80gb": 312e12,
    "nvidia-h100-pcie": 756e12,
    "nvidia-h100-80gb-hbm3": 989e12,
    "nvidia-h200": 989e12,
    "nvidia-l4": 121e12,
    "nvidia-l40s": 362e12,
}


def peak_flops(identity: WorkerIdentity, dtype: str, stated: float) -> float:
    """Return the dense peak of one device: the stated one, else the published one; 0: unknown.

    None is published for a part of a device, and for float32, whose peak depends on the products' mode.
    """
    if stated or identity.slice or dtype != "bfloat16":
        return stated
    return _BFLOAT16_FLOPS.get(identity.device_type, 0.0)


def export_devices(metrics: Metrics, identity: WorkerIdentity, peak: float) -> None:
    """Export the devices of a worker. ``peak`` is that of one."""

    def known(value: float) -> Callable[[], Reading]:
        return lambda: [((identity.device_type,), value)] if value else ()

    metrics.gauge(
        "fairway_worker_devices", "Devices of the worker", known(identity.devices), ("device_type",)
    )
    metrics.gauge(
        "fairway_worker_cost_per_hour",
        "Price of the worker (FAIRWAY_COST_PER_HOUR); absent: unknown",
        known(identity.cost_per_hour),
        ("device_type",),
    )
    metrics.gauge(
        "fairway_worker_peak_flops",
        "Dense floating-point operations per second of the worker's devices together, at the type of its "
        "engines; absent: unknown",
        known(peak * identity.devices),
        ("device_type",),
    )
