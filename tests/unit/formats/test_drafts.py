"""What a version's draft is made of."""

from __future__ import annotations

import pytest

from fairway.formats.version_files import draft_problem

WHOLE = ("config.json", "draft/config.json", "draft/model.safetensors", "model.safetensors")


@pytest.mark.parametrize(
    "paths",
    [
        (),
        ("config.json", "model.safetensors"),
        WHOLE,
        (*WHOLE, "draft/README.md", "draft/LICENSE"),
        ("draft/config.json", "draft/a-1.safetensors", "draft/model.safetensors.index.json"),
        ("drafts/tokenizer.json", "notes/draft/x.md"),
    ],
)
def test_a_version_has_a_whole_draft_or_none(paths: tuple[str, ...]) -> None:
    assert draft_problem(paths) == ""


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (("draft/model.safetensors",), "draft/config.json is missing"),
        (("draft/config.json",), "a draft needs draft/model.safetensors"),
        (("draft/config.json", "draft/other.safetensors"), "a draft needs draft/model.safetensors"),
        *(
            ((*WHOLE, f"draft/{name}"), f"draft/{name} does not belong in a draft")
            for name in (
                "tokenizer.json",
                "tokenizer.model",
                "tokenizer_config.json",
                "chat_template.jinja",
                "generation_config.json",
                "engine_limits.json",
                "safety_policy.json",
                "draft/config.json",
                "deep/model.safetensors",
            )
        ),
    ],
)
def test_what_is_missing_or_would_decide_something_is_named(paths: tuple[str, ...], problem: str) -> None:
    assert draft_problem(paths).startswith(problem)
