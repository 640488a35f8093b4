"""Rendered conversations and end-of-sequence ids against transformers itself."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import GenerationConfig
from transformers.utils import chat_template_utils

from services.gateway.text.text_model import ChatMessage
from services.worker.engine.load.config import eos_ids
from tests.support import chat_cases
from tests.support.chat_cases import FAMILIES, NOW_S, TOKENS


class StoppedClock:
    @staticmethod
    def now() -> datetime:
        return datetime.fromtimestamp(NOW_S, UTC)


def of_transformers(source: str, messages: list[ChatMessage]) -> str:
    turns = [
        {"role": message.role, "content": message.content} | ({"name": message.name} if message.name else {})
        for message in messages
    ]
    tokens: dict[str, Any] = dict(TOKENS)
    found: Any = chat_template_utils.render_jinja_template(
        conversations=[turns], chat_template=source, add_generation_prompt=True, **tokens
    )
    return str(found[0][0])


def compare(source: str, messages: list[ChatMessage]) -> None:
    """The environment to which the unit tests compare renders as transformers does."""
    try:
        wanted = of_transformers(source, messages)
    except TemplateError as exc:
        with pytest.raises((chat_cases.Refused, type(exc))):
            chat_cases.expected(source, messages)
        return
    except Exception as exc:
        with pytest.raises(type(exc)):
            chat_cases.expected(source, messages)
        return
    assert chat_cases.expected(source, messages) == wanted


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", StoppedClock)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        compare(FAMILIES[name], chat_cases.drawn_messages(rng, hostile=True))


@pytest.mark.parametrize("seed", range(150))
def test_drawn_templates(seed: int) -> None:
    rng = random.Random(seed)
    source = chat_cases.drawn_template(rng)
    for _ in range(4):
        compare(source, chat_cases.drawn_messages(rng, hostile=True))


@pytest.mark.parametrize(
    "generation",
    [None, {}, {"temperature": 0.5}, {"eos_token_id": None}, {"eos_token_id": 9}, {"eos_token_id": [9, 8]}],
)
def test_end_of_sequence_ids(generation: dict[str, Any] | None, tmp_path: Path) -> None:
    fields = {"model_type": "llama", "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if generation is None:
        found = GenerationConfig.from_pretrained(
            tmp_path, config_file_name="config.json", _from_model_config=True
        )
    else:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        found = GenerationConfig.from_pretrained(tmp_path)
    wanted = found.eos_token_id
    ids = wanted if isinstance(wanted, list) else [] if wanted is None else [wanted]
    assert eos_ids(tmp_path, fields, 100) == frozenset(ids)
