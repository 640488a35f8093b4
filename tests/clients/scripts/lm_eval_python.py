"""The features of lm-eval: its local models over completions and chat, on tasks of a few lines."""

from __future__ import annotations

import contextlib
import json
import logging.handlers
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

os.environ["OPENAI_API_KEY"] = json.loads(sys.argv[1])["key"]  # read when a model is made

import aiohttp
import lm_eval
from harness import TARGET, Features, Wrong, check
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

FEATURES = Features()
GENERATE: Final = """
task: own_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/lines.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
CHOOSE: Final = """
task: own_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/lines.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["self", "None"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
AT: Final = {"model": TARGET.model, "num_concurrent": 2, "max_retries": 1, "max_length": 1024}
LOCAL: Final = {
    "tokenizer_backend": "huggingface",
    "tokenizer": TARGET.checkpoint,
    "tokenized_requests": False,
}


def write_tasks() -> None:
    folder = Path(TARGET.scratch)
    lines = [
        {"question": text, "answer": "self"} for text in ("def __init__(", "    return ", "class A(", "if ")
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        (folder / f"own_{name}.yaml").write_text(text.format(folder=folder))


def evaluated(model: Any, task: str, **options: Any) -> Any:
    manager = TaskManager(include_path=TARGET.scratch, include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, **options
    )
    if found is None or task not in found["results"]:
        raise Wrong(repr(found))
    check(len(found["samples"][task]) == 4, found["results"])
    return found


@contextlib.contextmanager
def refusals_in_full() -> Iterator[None]:
    """Add to an error of a request what lm-eval logs of the answer: the error itself has the status alone."""
    logged = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("lm_eval.models.api_models")
    logger.addHandler(logged)
    try:
        yield
    except aiohttp.ClientResponseError as error:
        raise RuntimeError(" ".join(record.getMessage() for record in logged.buffer)) from error
    finally:
        logger.removeHandler(logged)


@FEATURES.shows("eval_generate")
def eval_generate() -> None:
    model = LocalCompletionsAPI(base_url=f"{TARGET.v1}/completions", **AT, **LOCAL)
    samples = evaluated(model, "own_generate")["samples"]["own_generate"]
    check(all(sample["resps"][0][0] for sample in samples), samples)


@FEATURES.shows("eval_chat")
def eval_chat() -> None:
    model = LocalChatCompletion(base_url=f"{TARGET.v1}/chat/completions", tokenizer_backend=None, **AT)
    samples = evaluated(model, "own_generate", apply_chat_template=True)["samples"]["own_generate"]
    check(all(sample["resps"][0][0] for sample in samples), samples)


@FEATURES.shows("eval_loglikelihood", "echo")
def eval_loglikelihood() -> None:
    local = {**LOCAL, "tokenized_requests": True}
    model = LocalCompletionsAPI(base_url=f"{TARGET.v1}/completions", **AT, **local)
    with refusals_in_full():
        samples = evaluated(model, "own_choose")["samples"]["own_choose"]
    scores = [score for sample in samples for ((score, _),) in sample["resps"]]
    check(len(scores) == 8 and all(score < 0 for score in scores), scores)


write_tasks()
FEATURES.run()
