"""What a client under an idempotency key receives of acceptances."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.core.errors import FairwayError
from services.gateway.events import Accepted, Finished
from services.gateway.idempotency.followers import FollowerBroadcast, RecordFollower
from services.gateway.idempotency.record_codec import AcceptedTerms


@dataclass(slots=True)
class Client:
    """Implements ``RequestSink``."""

    accepted: list[Accepted] = field(default_factory=list)

    def on_accepted(self, accepted: Accepted) -> None:
        self.accepted.append(accepted)

    def on_tokens(self, *found: object) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_failed(self, error: FairwayError) -> None: ...

    @property
    def versions(self) -> list[str]:
        return [one.version_digest for one in self.accepted]


def terms(digest: str, unix_us: int) -> AcceptedTerms:
    return AcceptedTerms(
        request_id="req_1",
        model="m",
        version_digest=digest,
        route_revision=3,
        seed=7,
        prompt_tokens=1,
        max_output_tokens=8,
        received_unix_us=unix_us,
        degraded=(),
    )


def joined(broadcast: FollowerBroadcast) -> tuple[Client, RecordFollower]:
    client = Client()
    return client, broadcast.join(client, None, None, first=True)


def broadcast_of() -> FollowerBroadcast:
    return FollowerBroadcast(16, lambda follower, withdrawn: None)


def test_a_client_receives_the_acceptance_that_replaces_the_first() -> None:
    """Its version was withdrawn before it had output: seed 12 of the simulated rollouts."""
    broadcast = broadcast_of()
    client, _ = joined(broadcast)
    broadcast.accept(terms("sha256:x", 1), fresh=True)
    broadcast.accept(terms("sha256:y", 2), fresh=False)
    assert client.versions == ["sha256:x", "sha256:y"]
    late, follower = joined(broadcast)
    broadcast.catch_up(follower)
    assert late.versions == ["sha256:y"]


def test_an_acceptance_that_is_read_again_is_not_sent_again() -> None:
    broadcast = broadcast_of()
    client, _ = joined(broadcast)
    for _ in range(2):  # a record is read from its start after its owner was lost
        broadcast.accept(terms("sha256:x", 1), fresh=True)
        broadcast.accept(terms("sha256:y", 2), fresh=False)
    assert client.versions == ["sha256:x", "sha256:y"]
    assert broadcast.terms is not None
    assert broadcast.terms.version_digest == "sha256:y"
