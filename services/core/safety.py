"""The safety packs that a request obeys, by their digests. Every later run of it obeys the same."""

from __future__ import annotations

from msgspec import Struct


class SafetyPins(Struct, frozen=True):
    """New fields are added at the end, with a default: gateways of two releases read each other's records."""

    # Digest of the safety_policy.json of the request's version; empty: it has none.
    default_digest: str = ""
    # Deployment of the tenant's pack; empty: the tenant has none.
    deployment: str = ""
    # Name in the registry of the tenant's pack.
    model: str = ""
    # Version of the tenant's pack.
    pack_digest: str = ""
    # Step of the rollout that drew the version; empty: no draw.
    step: str = ""
    # Version that the request is compared with, whose verdicts only flag; empty: none.
    shadow_digest: str = ""

    @property
    def text(self) -> str:
        """What an explanation shows."""
        found = [f"{self.default_digest} of the version"] if self.default_digest else []
        if self.pack_digest:
            found.append(f"{self.pack_digest} of {self.deployment}")
        if self.shadow_digest:
            found.append(f"{self.shadow_digest} flags only")
        return ", ".join(found)
