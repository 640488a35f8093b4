"""Log-probabilities of prompts over HTTP and gRPC, against one forward pass of the bundled model."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch
from tokenizers import Tokenizer

from fairway.v1 import inference_pb2
from tests.support.stack import ROOT, Stack, kill, metadata, processes

CLIENT: Final = Path(__file__).with_name("scoring_client.py")
CHECKPOINT: Final = ROOT / "models" / "tiny" / "checkpoint"
TEXT: Final = "def naïve(x):  # 日本語 🙂 ½\n    return x\n"
RNG: Final = random.Random(3)
LONG: Final = [[0, *(RNG.randrange(5, 4096) for _ in range(900))] for _ in range(12)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    torch.set_num_threads(1)
    return transformers.LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]


def logprobs_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return [ids - 1, vocabulary]: of what follows each token but the last."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(dim=-1)
    return found


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = tokenizer.encode(TEXT).ids
    lines = ("import os\n", "class Stack:\n    def ", "for i in range(", "x = {'é': 1}\n", "return ")
    ends = ("import sys", "pop(self):", "10):", "print(x)", "None\n")
    contexts = [tokenizer.encode(line).ids for line in lines]
    endings = [tokenizer.encode(end, add_special_tokens=False).ids for end in ends]
    pairs = [(context, ending) for context in contexts for ending in endings]
    return {"text": TEXT, "ids": ids, "pairs": pairs, "key": "scores-1"}


@pytest.fixture(scope="module")
def answers(openai_python: str, stack: Stack, asked: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the client script received."""
    file = tmp_path_factory.mktemp("scores") / "asked.json"
    file.write_text(json.dumps(asked))
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [openai_python, str(CLIENT), stack.http, stack.api_key, stack.model, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(logprobs: Any, ids: Sequence[int], model: Any, tokenizer: Tokenizer, *, outputs: int) -> None:
    """Assert that the lists are of these tokens, then of so many more, as one pass gives them."""
    assert {len(logprobs[name]) for name in logprobs} == {len(ids) + outputs}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    expected = logprobs_of(model, ids)
    own = torch.tensor(logprobs["token_logprobs"][1 : len(ids)])
    places = torch.tensor(ids[1:])[:, None]
    assert torch.allclose(own, expected.gather(1, places)[:, 0], atol=1e-4)
    for place in range(1, len(ids)):
        top, row = logprobs["top_logprobs"][place], expected[place - 1]
        assert logprobs["token_logprobs"][place] == top[logprobs["tokens"][place]]
        assert abs(max(top.values()) - float(row.max())) < 1e-4
    assert logprobs["tokens"][0] == tokenizer.id_to_token(ids[0])


def test_an_echo_with_logprobs_is_the_whole_text_with_exact_offsets(
    answers: Any, asked: Any, model: Any, tokenizer: Tokenizer
) -> None:
    (choice,) = answers["whole"]["choices"]
    silent = answers["silent"]["choices"][0]["text"]
    assert choice["text"].startswith(TEXT + silent), "the echo changed the completion"
    usage = answers["whole"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"] > 0) == (len(asked["ids"]), True)
    check(choice["logprobs"], asked["ids"], model, tokenizer, outputs=usage["completion_tokens"])
    offsets = choice["logprobs"]["text_offset"]
    for place, token in enumerate(choice["logprobs"]["tokens"][1:], 1):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offsets[place] :].startswith(token), (place, token)
    pieces = [tokenizer.decode(asked["ids"][:count]).rstrip("\ufffd") for count in range(len(asked["ids"]))]
    assert offsets[: len(asked["ids"])] == [len(piece) for piece in pieces]
    assert any(token.startswith("bytes:") for token in choice["logprobs"]["tokens"]), (
        "no character has two tokens"
    )


def test_a_stream_is_the_same(answers: Any, asked: Any) -> None:
    for whole, parts in (("whole", "streamed"), ("zero", "zero_streamed")):
        (choice,), streamed = answers[whole]["choices"], answers[parts]["choices"]["0"]
        assert streamed["text"] == choice["text"]
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert {name: streamed[name] for name in choice["logprobs"]} == choice["logprobs"]
        assert answers[parts]["usage"]["total_tokens"] == answers[whole]["usage"]["total_tokens"]
        assert TEXT.startswith(streamed["first"]) or streamed["first"].startswith(TEXT)


def test_no_output_is_a_result(answers: Any, asked: Any, model: Any, tokenizer: Tokenizer) -> None:
    for answer in (answers["zero"], answers["zero_plain"], *answers["keyed"]):
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(asked["ids"]), 0)
    check(answers["zero"]["choices"][0]["logprobs"], asked["ids"], model, tokenizer, outputs=0)
    assert answers["zero_plain"]["choices"][0]["logprobs"] is None
    first, again = answers["keyed"]
    assert first == again, "a repeated key has another answer"
    assert first["choices"][0]["logprobs"] == answers["zero"]["choices"][0]["logprobs"]


def test_batches_and_choices(answers: Any, asked: Any, model: Any, tokenizer: Tokenizer) -> None:
    for index, choice in enumerate(answers["texts"]["choices"]):
        text = (TEXT, "def ", "x = 1")[index // 2]
        assert choice["index"] == index
        assert choice["text"].startswith(text)
        ids = tokenizer.encode(text).ids
        outputs = len(choice["logprobs"]["tokens"]) - len(ids)
        check(choice["logprobs"], ids, model, tokenizer, outputs=outputs)
    for choice, ids in zip(answers["lists"]["choices"], (asked["ids"], asked["ids"][:5]), strict=True):
        check(choice["logprobs"], ids, model, tokenizer, outputs=2)
    for answer in (answers["plain"], answers["plain_ids"]):
        (choice,) = answer["choices"]
        assert choice["text"] == TEXT + answers["silent"]["choices"][0]["text"]
        assert choice["logprobs"] is None


def test_vllms_list(answers: Any, asked: Any, model: Any) -> None:
    ids = asked["ids"]
    for answer, scores in (
        (answers["vllm"], answers["vllm"]["choices"][0]["prompt_logprobs"]),
        (answers["chat"], answers["chat"]["prompt_logprobs"]),
    ):
        assert len(scores) == answer["usage"]["prompt_tokens"]
        assert scores[0] is None
        assert all(min(found["rank"] for found in place.values()) >= 1 for place in scores[1:])
    expected = logprobs_of(model, ids)
    for place, found in enumerate(answers["vllm"]["choices"][0]["prompt_logprobs"][1:], 1):
        row, own = expected[place - 1], found[str(ids[place])]
        assert abs(own["logprob"] - float(row[ids[place]])) < 1e-4
        assert abs(own["rank"] - 1 - int((row > row[ids[place]]).sum())) <= 1
        assert 3 <= len(found) <= 4
    assert not TEXT.startswith(answers["vllm"]["choices"][0]["text"])


def test_what_cannot_be_served_is_named(answers: Any) -> None:
    refused = answers["refused"]
    assert refused["nothing"][:2] == [400, "max_tokens"]
    assert refused["many"][:2] == [400, "logprobs"]
    assert refused["stream"][:2] == [400, "prompt_logprobs"]


def test_loglikelihoods_of_lm_eval_are_those_of_the_model(answers: Any, asked: Any, model: Any) -> None:
    assert len(answers["loglikelihoods"]) == len(asked["pairs"]) == 25
    greedy = 0
    for (total, is_greedy), (context, ending) in zip(answers["loglikelihoods"], asked["pairs"], strict=True):
        rows = logprobs_of(model, [*context, *ending])[len(context) - 1 :]
        own = rows.gather(1, torch.tensor(ending)[:, None])[:, 0]
        assert abs(total - float(own.sum())) < 1e-4 * len(ending)
        if float((rows.max(dim=-1).values - own).abs().min()) > 1e-4:
            assert is_greedy == bool((rows.max(dim=-1).values == own).all())
        greedy += is_greedy
    assert greedy < 25


# --- gRPC, and a lost engine ----------------------------------------------------------------------------


async def generate(stack: Stack, ids: Sequence[int], **fields: Any) -> tuple[list[int], list[Any], Any]:
    """Return ids and entries of the stream, and its end."""
    generation = inference_pb2.Generation(
        model=stack.model, token_ids=inference_pb2.TokenIds(ids=ids), prompt_logprobs=2, **fields
    )
    generation.sampling.temperature = 0
    found: list[int] = []
    entries: list[Any] = []
    async with stack.inference() as service:
        request = inference_pb2.GenerateRequest(generation=generation)
        async for event in service.Generate(request, metadata=metadata(stack.api_key), timeout=120):
            if event.HasField("chunk"):
                assert event.chunk.offset == len(found)
                found += event.chunk.ids
                entries += event.chunk.logprobs
            elif event.HasField("finished"):
                return found, entries, event.finished
    raise AssertionError("the stream has no end")


async def test_a_grpc_stream_begins_with_the_prompt(stack: Stack, asked: Any, model: Any) -> None:
    ids, entries, end = await generate(stack, asked["ids"], max_output_tokens=3)
    assert ids[: len(asked["ids"])] == asked["ids"]
    assert (len(ids), len(entries)) == (len(asked["ids"]) + 3, len(asked["ids"]) + 3)
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (len(asked["ids"]), 3)
    expected = logprobs_of(model, ids)
    for place in range(1, len(ids)):
        assert abs(entries[place].sampled - float(expected[place - 1, ids[place]])) < 1e-4
    assert "".join(entry.text for entry in entries[: len(asked["ids"])]) == TEXT


async def test_a_lost_engine_neither_drops_nor_doubles_an_entry(stack: Stack, model: Any) -> None:
    """Engines are killed while prompts of several chunks are computed."""
    running = [asyncio.ensure_future(generate(stack, ids, max_output_tokens=0)) for ids in LONG]
    await asyncio.sleep(0.7)
    engines = [each for each in processes(stack.state) if _is_engine(each)]
    assert engines
    kill(engines[0].pid)
    ends = await asyncio.gather(*running)
    resumes = 0
    for ids, (found, entries, end) in zip(LONG, ends, strict=True):
        assert found == ids
        assert len(entries) == len(ids)
        assert end.usage.output_tokens == 0
        resumes += end.resumes
        own = torch.tensor([entry.sampled for entry in entries[1:]])
        expected = logprobs_of(model, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert torch.allclose(own, expected, atol=2e-4)
    assert resumes, "no request was lost: kill earlier"


def _is_engine(process: psutil.Process) -> bool:
    return "services.worker.engine.process" in " ".join(process.cmdline())
