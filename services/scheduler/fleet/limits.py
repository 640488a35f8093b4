"""Limits of the fleet view: how long a leader relies on a worker's last report, and how much it stores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Times in seconds and bounds of the fleet view.

    ``silence_s``: longest gap between two reports of a worker that receives grants. ``prefix_blocks``: number
    of stored names of cached blocks; 0: placement ignores cached blocks.
    """

    grant_ttl_s: float = 2.0
    transit_margin_s: float = 3.0
    silence_s: float = 2.5
    forget_s: float = 30.0
    max_workers: int = 4096
    prefix_blocks: int = 262_144

    def __post_init__(self) -> None:
        if self.silence_s > self.transit_margin_s:
            raise ValueError("a worker may not be silent for longer than the transit margin")
        if self.forget_s <= self.silence_s + self.grant_ttl_s + self.transit_margin_s:
            raise ValueError("a worker is forgotten before its last grant lapsed")
