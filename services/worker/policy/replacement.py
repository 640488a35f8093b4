"""Weights that are replaced in an engine: when they may be, and what becomes of the sequences that run. Pure.

A sequence belongs to the weights that computed its first token. So an engine whose weights are replaced has
no sequence: those that run finish first, and what runs longer is returned to its gateway. A returned sequence
without output starts over on the new version; one with output ends, unless another worker has its version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MAX_NAMED = 3  # differences that a refusal names


def obstacle(
    before: Mapping[str, str],
    after: Mapping[str, str],
    *,
    deployment: str,
    users: Collection[str],
    sharing: Collection[str],
    nodes: int,
) -> str:
    """Return why the weights of the version before cannot be replaced; empty if they can.

    ``before`` and ``after`` have what each version computes with but its weights, by name. ``users`` are the
    deployments of the version before on this worker, ``sharing`` the other versions that its engine serves.
    """
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    others = sorted({*users} - {deployment})
    if differing:
        more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
        return f"the versions differ in more than weights: {', '.join(differing[:MAX_NAMED])}{more}"
    if others:
        return f"{others[0]} serves the version before on this worker too"
    if sharing:
        return f"the engine serves another version too: {min(sharing)[:19]}"
    if nodes > 1:
        return "the engine runs on several nodes"
    return ""


def hands_back(finish_s: float, waited_s: float) -> bool:
    """Return whether the sequences that still run are returned to their gateways now."""
    return waited_s >= finish_s
