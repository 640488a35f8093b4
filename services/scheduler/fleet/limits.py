"""How long a leader counts on what it heard of its workers, and how much it keeps of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """``silence_s``: longest gap between two reports of a worker that is placed on. ``prefix_blocks``: how
    many names of cached blocks are kept; 0 places without regard to what is cached."""

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
