"""Run by the interpreter of the OpenAI SDK: a file, a batch, its results. The last line is JSON."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import openai


def line(number: int, model: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"{number}", "method": "POST", "url": url, "body": {"model": model, **body}}


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    for _ in range(400):
        batch = client.batches.retrieve(batch_id)
        if batch.status not in ("validating", "in_progress", "cancelling", "finalizing"):
            return batch
        time.sleep(0.3)
    raise SystemExit("the batch did not end")


def created(client: openai.OpenAI, lines: list[Any], url: str) -> Any:
    data = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    key = {"Idempotency-Key": f"file-{hashlib.sha256(data).hexdigest()}"}
    file, again = [
        client.files.create(file=("requests.jsonl", io.BytesIO(data)), purpose="batch", extra_headers=key)
        for _ in range(2)
    ]
    if file.id != again.id:
        raise SystemExit("an upload with the same idempotency key created a second file")
    batches = [
        client.batches.create(
            input_file_id=file.id,
            endpoint=url,
            completion_window="24h",
            metadata={"team": "search"},
            extra_headers={"Idempotency-Key": f"batch-of-{file.id}"},
        )
        for _ in range(2)
    ]
    if batches[0].id != batches[1].id:
        raise SystemExit("a request with the same idempotency key created a second batch")
    return batches[0]


def chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    url = "/v1/chat/completions"
    message = [{"role": "user", "content": "Say something."}]
    lines = [line(n, model, url, messages=message, max_tokens=6, seed=n, temperature=1.0) for n in range(8)]
    lines[3] = line(3, "no-such-model", url, messages=message)
    batch = ended(client, created(client, lines, url).id)
    output = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    errors = [json.loads(each) for each in client.files.content(batch.error_file_id).text.splitlines()]
    direct = client.chat.completions.create(
        model=model, messages=message, max_tokens=6, seed=5, temperature=1.0
    )
    texts = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in output
    }
    return {
        "status": batch.status,
        "counts": batch.request_counts.model_dump(),
        "metadata": batch.metadata,
        "ids": sorted(texts),
        "same": texts["5"] == direct.choices[0].message.content,
        "failed": [(each["custom_id"], each["response"]["status_code"]) for each in errors],
        "listed": client.batches.list(limit=1).data[0].id == batch.id,
        "purposes": sorted({file.purpose for file in client.files.list()}),
    }


def refused(client: openai.OpenAI, model: str) -> dict[str, Any]:
    url = "/v1/completions"
    bad = ended(client, created(client, [line(1, model, url), {"custom_id": "2"}], url).id)
    file = client.files.create(file=("x.jsonl", io.BytesIO(b"{}\n")), purpose="batch")
    read = client.files.content(file.id).read()
    client.files.delete(file.id)
    found: dict[str, Any] = {"status": bad.status, "line": bad.errors.data[0].line, "read": read.decode()}
    calls: dict[str, Callable[[], Any]] = {
        "gone": lambda: client.files.retrieve(file.id),
        "purpose": lambda: client.files.create(file=("x", b"x"), purpose="fine-tune"),
        "endpoint": lambda: client.batches.create(
            input_file_id=bad.input_file_id, endpoint="/v1/responses", completion_window="24h"
        ),
    }
    for name, call in calls.items():
        try:
            call()
            found[name] = 200
        except openai.APIStatusError as error:
            found[name] = error.status_code
    return found


def cancelled(client: openai.OpenAI, model: str) -> dict[str, Any]:
    url = "/v1/completions"
    lines = [line(n, model, url, prompt="a", max_tokens=64) for n in range(400)]
    batch = created(client, lines, url)
    client.batches.cancel(batch.id)
    batch = ended(client, batch.id)
    return {"status": batch.status, "counts": batch.request_counts.model_dump()}


def main() -> None:
    url, key, model = sys.argv[1:4]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=60, max_retries=0)
    print(
        json.dumps(
            {
                "chat": chat(client, model),
                "refused": refused(client, model),
                "cancelled": cancelled(client, model),
            }
        )
    )


if __name__ == "__main__":
    main()
