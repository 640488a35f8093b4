"""Figures of lm-eval for a served model and for the same files in transformers, on tasks of our own.

Runs in the environment of the client lm-eval, with one argument: a JSON object of ``url`` (with ``/v1``),
``key``, ``model``, ``checkpoint`` (the served files) and ``folder`` (for the tasks). The last line is
``{"served": {"metrics": ..., "answers": ...}, "transformers": ...}``, each by task.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

TARGET: Final = json.loads(sys.argv[1])
CHOICES: Final = (
    ("A cat is an", "animal", "engine", "island"),
    ("Water freezes at zero degrees", "Celsius", "of length", "per hour"),
    ("The capital of France is", "Paris", "London", "Madrid"),
    ("The opposite of hot is", "cold", "warm", "loud"),
    ("Bees make", "honey", "glass", "paper money"),
    ("In winter it often", "snows", "sings", "reads"),
    ("Two plus two is", "four", "seven", "eleven"),
    ("The sun rises in the", "east", "drawer", "afternoon tea"),
    ("A week has seven", "days", "legs", "oceans"),
    ("You read a", "book", "spoon", "cloud of iron"),
)
TEXTS: Final = (
    "A queue holds what arrives faster than it can be served, and a good one is short.",
    "The ferry crosses the sound twice a day; in storms it stays in the harbour until the wind has gone.",
    "She measured the table, wrote down 183 centimetres, and asked whether the door was wide enough.",
    "def area(width, height):\n    return width * height\n\n\nprint(area(3, 4))\n",
    "Il fait beau aujourd'hui, mais demain il pleuvra.",
)
QUESTIONS: Final = (
    ("The capital of France is", " Paris"),
    ("One, two, three, four,", " five"),
    ("Monday, Tuesday, Wednesday,", " Thursday"),
    ("A, B, C, D,", " E"),
)
HEAD: Final = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
"""
TASKS: Final = {
    "own_choose": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "own_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "own_generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
ROWS: Final[dict[str, list[dict[str, Any]]]] = {
    "own_choose": [{"question": question, "choices": answers} for question, *answers in CHOICES],
    "own_text": [{"text": text} for text in TEXTS],
    "own_generate": [{"question": question, "answer": answer} for question, answer in QUESTIONS],
}


def figures(model: Any, manager: TaskManager) -> dict[str, Any]:
    """Return the metrics of each task, and each sample's log-likelihoods or text."""
    found: Any = lm_eval.simple_evaluate(
        model=model, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0, verbosity="ERROR"
    )
    answers = {
        name: [sample["resps"] for sample in sorted(samples, key=lambda each: each["doc_id"])]
        for name, samples in found["samples"].items()
    }
    metrics = {
        name: {key: value for key, value in values.items() if isinstance(value, float)}
        for name, values in found["results"].items()
    }
    return {"metrics": metrics, "answers": answers}


def main() -> None:
    os.environ["OPENAI_API_KEY"] = TARGET["key"]  # a model reads it
    folder = Path(TARGET["folder"])
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(HEAD.format(name=name, folder=folder) + text)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    served = LocalCompletionsAPI(
        base_url=f"{TARGET['url']}/completions", model=TARGET["model"], tokenizer=TARGET["checkpoint"],
        tokenizer_backend="huggingface", max_length=1024, num_concurrent=2, max_retries=1,
    )  # fmt: skip
    loaded = HFLM(
        pretrained=TARGET["checkpoint"], dtype="float32", device="cpu", batch_size=1, max_length=1024
    )
    print(json.dumps({"served": figures(served, manager), "transformers": figures(loaded, manager)}))


main()
