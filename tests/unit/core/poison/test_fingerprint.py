"""What two requests have in common that are the same input, and what tells others apart."""

from __future__ import annotations

from dataclasses import replace

from services.core.generation import GenerationSpec, OutputLimits, Prompt, Sampling
from services.core.poison.fingerprint import fingerprint_of

SPEC = GenerationSpec(
    "r1", "chat", "sha256:1", 1, Prompt([1, 2, 3]), Sampling(seed=5, temperature=0.5), OutputLimits(8)
)


def test_a_request_that_is_sent_again_has_the_same_fingerprint() -> None:
    again = replace(
        SPEC,
        request_id="r2",
        sampling=replace(SPEC.sampling, seed=6),
        limits=OutputLimits(9),
        prompt=Prompt((1, 2, 3), (7,), 8),
    )
    assert fingerprint_of(again, b"s") == fingerprint_of(SPEC, b"s")


def test_other_prompts_samplings_and_secrets_have_others() -> None:
    others = [
        fingerprint_of(replace(SPEC, prompt=Prompt([1, 2])), b"s"),
        fingerprint_of(replace(SPEC, prompt=Prompt([1, 2, 4])), b"s"),
        fingerprint_of(replace(SPEC, sampling=replace(SPEC.sampling, top_k=3)), b"s"),
        fingerprint_of(replace(SPEC, sampling=replace(SPEC.sampling, logit_bias=((1, 2.0),))), b"s"),
        fingerprint_of(SPEC, b"t"),
    ]
    assert len({*others, fingerprint_of(SPEC, b"s")}) == 6
