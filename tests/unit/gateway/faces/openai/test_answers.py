"""Errors and answers in the shapes that OpenAI's clients read."""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from msgspec import structs

from fairway.v1 import inference_pb2
from services.core import errors
from services.core.generation import FinishReason, StageClock, TokenLogprobs, Usage
from services.gateway.events import Accepted, ChoiceResult, Finished, Tokens
from services.gateway.faces.messages.routes import messages_error
from services.gateway.faces.openai import answers as lists
from services.gateway.faces.openai.answers import (
    AnswerHead,
    Frames,
    chat_logprobs,
    completion_logprobs,
    whole_answer,
)
from services.gateway.faces.openai.errors import HttpProblem, error_body, error_headers, status_of
from services.gateway.faces.openai.requests import ApiRequest
from services.gateway.requests.streaming import Completion

ENTRY = TokenLogprobs(-0.5, (1, 2), (-0.25, -math.inf), ("a", "é"), "b", "b")


def wanted(dialect: Any = "chat", **changes: Any) -> ApiRequest:
    values: dict[str, Any] = {
        "generations": (None,), "choices": 1, "stream": True, "include_usage": False, "logprobs": False
    }  # fmt: skip
    return ApiRequest(dialect, **{**values, **changes})


IDENTITY = AnswerHead("req_1", 1_800_000_000, "m", "sha256:" + "ab" * 32)


def frame(data: bytes) -> Any:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return json.loads(data[6:])


def test_a_frame_of_a_chat() -> None:
    assert frame(Frames(wanted(), IDENTITY).tokens(2, Tokens(0, 0, [5], 'a"\n\u2028é\x00'))) == {
        "id": "chatcmpl-req_1",
        "object": "chat.completion.chunk",
        "created": 1_800_000_000,
        "model": "m",
        "system_fingerprint": "fp_abababababab",
        "choices": [
            {"index": 2, "delta": {"content": 'a"\n\u2028é\x00'}, "logprobs": None, "finish_reason": None}
        ],
    }


def test_held_back_text_makes_no_frame_unless_its_logprobs_are_wanted() -> None:
    held = Tokens(0, 0, [5], "", (ENTRY,))
    assert Frames(wanted(), IDENTITY).tokens(0, held) == b""
    found = frame(Frames(wanted(logprobs=True), IDENTITY).tokens(0, held))["choices"][0]
    assert found["delta"] == {"content": ""}
    assert len(found["logprobs"]["content"]) == 1


def test_with_usage_every_frame_has_the_field() -> None:
    frames = Frames(wanted(include_usage=True), IDENTITY)
    assert frame(frames.role(0))["usage"] is None
    first, second = (
        Finished((ChoiceResult(0, FinishReason.STOP, "", 4, reasoning_tokens=count),), usage, StageClock(0))
        for usage, count in ((Usage(3, 4, 1), 3), (Usage(1, 1, 0), 1))
    )
    last = frame(frames.usage([first, second]))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    uncounted = replace(second.choices[0], reasoning_tokens=None)
    last = frame(frames.usage([first, structs.replace(second, choices=(uncounted,))]))
    assert "completion_tokens_details" not in last["usage"]
    assert "usage" not in frame(Frames(wanted(), IDENTITY).role(0))
    assert Frames(wanted(), IDENTITY).usage([]) == b""


def test_logprobs_of_a_chat_have_bytes_and_no_infinity() -> None:
    found = chat_logprobs([ENTRY]).content[0]
    assert (found.token, found.logprob, found.bytes) == ("b", -0.5, [98])
    assert [(top.token, top.logprob, top.bytes) for top in found.top_logprobs] == [
        ("a", -0.25, [97]),
        ("é", -9999.0, [195, 169]),
    ]
    nan = TokenLogprobs(math.nan, (), (), (), "")
    assert chat_logprobs([nan]).content[0].logprob == -9999.0


def test_offsets_of_completion_logprobs_go_on_over_frames() -> None:
    frames = Frames(wanted("completions", logprobs=True), IDENTITY)
    one = frame(frames.tokens(0, Tokens(0, 0, [98, 98], "bb", (ENTRY, ENTRY))))["choices"][0]
    other = frame(frames.tokens(1, Tokens(0, 0, [98], "b", (ENTRY,))))["choices"][0]
    two = frame(frames.tokens(0, Tokens(0, 2, [98], "b", (ENTRY,))))["choices"][0]
    assert one["logprobs"]["text_offset"] == [0, 1]
    assert other["logprobs"]["text_offset"] == [0]
    assert two["logprobs"]["text_offset"] == [2]
    assert one["logprobs"]["top_logprobs"][0] == {"a": -0.25, "é": -9999.0, "b": -0.5}


@pytest.mark.parametrize("own", [1, 2, 3])
def test_tokens_with_one_text_have_names_of_their_own(own: int) -> None:
    twin = TokenLogprobs(-float(own), (1, 2), (-1.0, -2.0), ("a", "a"), "a")
    found = completion_logprobs([own], [twin], 0, begins=False)
    assert found.tokens == [["a", "token_id:2", "token_id:3"][own - 1]]
    third = {"token_id:3": -3.0} if own == 3 else {}
    assert found.top_logprobs == [{"a": -1.0, "token_id:2": -2.0} | third]


def test_parts_of_a_character_have_their_bytes_in_every_dialect() -> None:
    first, second = b"\xe2\x9c", b" \xf0\x9f"
    texts = tuple(data.decode(errors="replace") for data in (first, second))
    entry = TokenLogprobs(
        -0.5, (7, 8, 9), (-0.5, -1.0, -2.0), (*texts, "é"), texts[0], "", 1, first, (first, second, b"")
    )
    chat = chat_logprobs([entry]).content[0]
    assert (chat.token, chat.bytes) == (texts[0], list(first))
    assert [top.bytes for top in chat.top_logprobs] == [list(first), list(second), [195, 169]]
    found = completion_logprobs([7], [entry], 0, begins=False)
    assert found.tokens == [r"bytes:\xe2\x9c"]
    assert found.top_logprobs == [{r"bytes:\xe2\x9c": -0.5, r"bytes: \xf0\x9f": -1.0, "é": -2.0}]
    want = wanted("completions", prompt_logprobs=True, scores_prompt=True)
    accepted = Accepted("r", "m", IDENTITY.version_digest, 1, 1, 2)
    completion = replace(whole(["x"], [[entry, entry]]), accepted=accepted, ids=[[0, 7]])
    scores = json.loads(answer_of(want, [completion], 7, "r"))["choices"][0]["prompt_logprobs"][1]
    assert [score["decoded_token"] for score in scores.values()] == [
        r"bytes:\xe2\x9c",
        r"bytes: \xf0\x9f",
        "é",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_names_are_as_many_as_tokens(seed: int) -> None:
    rng = Random(seed)
    ids = rng.sample(range(100), rng.randint(1, 20))
    data = [rng.choice((b"", b"", bytes(rng.choices(range(0x80, 0xC0), k=2)))) for _ in ids]
    texts = [
        each.decode(errors="replace") or rng.choice(("a", " a", "\ufffd", "bytes:", "é")) for each in data
    ]
    values = sorted((-rng.random() for _ in ids), reverse=True)
    drawn = rng.randrange(len(ids))
    listed = ids[: rng.randint(0, len(ids))]
    entry = TokenLogprobs(
        values[drawn],
        tuple(listed),
        tuple(values[: len(listed)]),
        tuple(texts[: len(listed)]),
        texts[drawn],
        "",
        1,
        data[drawn],
        tuple(data[: len(listed)]),
    )
    found = completion_logprobs([ids[drawn]], [entry], 0, begins=False)
    (top,) = found.top_logprobs
    assert top is not None
    assert len(top) == len({*listed, ids[drawn]})
    assert top[found.tokens[0]] == values[drawn]


def steps_of(steps: Generator[None, None, bytes]) -> tuple[bytes, int]:
    """Return the result of steps, and how many there were."""
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


def answer_of(*args: Any) -> bytes:
    return steps_of(whole_answer(*args))[0]


def whole(texts: list[str], logprobs: list[list[TokenLogprobs]]) -> Completion:
    results = tuple(
        ChoiceResult(n, FinishReason.LENGTH if n else FinishReason.STOP, "", 2) for n in range(len(texts))
    )
    finished = Finished(results, Usage(3, 2 * len(texts), 0), StageClock(0))
    accepted = Accepted("r", "m", IDENTITY.version_digest, 1, 1, 3)
    return Completion(accepted, texts, [[98] * len(entries) for entries in logprobs], logprobs, finished)


def test_choices_of_several_prompts_are_numbered_through() -> None:
    want = wanted("completions", generations=(None, None), choices=2, stream=False)
    answer = json.loads(
        answer_of(want, [whole(["a", "b"], [[], []]), whole(["c", "d"], [[], []])], 7, "req_1")
    )
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "a", "stop"),
        (1, "b", "length"),
        (2, "c", "stop"),
        (3, "d", "length"),
    ]
    assert answer["object"] == "text_completion"
    assert answer["usage"]["total_tokens"] == 14


def test_a_whole_chat_answer() -> None:
    answer = json.loads(answer_of(wanted(logprobs=True), [whole(["hi"], [[ENTRY]])], 7, "req_1"))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert answer["choices"][0]["logprobs"]["refusal"] is None
    assert answer["created"] == 7


def every_error() -> list[type[errors.FairwayError]]:
    found, queue = [], [errors.FairwayError]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue += kind.__subclasses__()
    return [kind for kind in found if kind.__name__ != "HttpProblem"]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_has_a_shape(kind: type[errors.FairwayError]) -> None:
    error = kind("why", field="sampling.top_p")
    body = json.loads(error_body(error))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == "top_p"
    assert 400 <= status_of(error) < 600
    if status_of(error) == 500:
        assert "why" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidInput("x"), 400, "invalid_request_error", "invalid_input"),
        (errors.PromptTooLong("x"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.Unauthenticated("x"), 401, "authentication_error", "invalid_api_key"),
        (errors.PermissionDenied("x"), 403, "permission_error", "permission_denied"),
        (errors.ModelNotFound("x"), 404, "not_found_error", "model_not_found"),
        (errors.RequestRateExceeded("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.BudgetExceeded("x"), 429, "insufficient_quota", "insufficient_quota"),
        (errors.ConcurrencyExceeded("x"), 429, "rate_limit_error", "concurrency_exceeded"),
        (errors.NoWorkerAvailable("x"), 503, "service_unavailable", "no_worker_available"),
        (errors.DeadlineExceeded("x"), 504, "timeout_error", "deadline_exceeded"),
        (errors.InternalError("x"), 500, "server_error", "internal"),
        (HttpProblem(413, "x"), 413, "invalid_request_error", None),
    ],
)
def test_what_clients_switch_on(error: errors.FairwayError, status: int, kind: str, code: str | None) -> None:
    detail = json.loads(error_body(error))["error"]
    assert (status_of(error), detail["type"], detail["code"]) == (status, kind, code)


def test_a_prompt_that_is_too_long_has_the_words_by_which_clients_shorten_it() -> None:
    error = errors.PromptTooLong("the prompt has 9 tokens, the context 8", field="prompt")
    message = json.loads(error_body(error))["error"]["message"]
    assert "prompt is too long: the prompt has 9 tokens, the context 8" in message  # LangChain's
    assert "exceeds the maximum number of tokens allowed" in message  # LiteLLM's
    assert message in messages_error(error).decode()


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("max_output_tokens", "max_tokens"),
        ("min_output_tokens", "min_tokens"),
        ("choices", "n"),
        ("sampling.logit_bias[5]", "logit_bias[5]"),
        ("chat.messages[3].role", "messages[3].role"),
        ("token_ids", "prompt"),
        ("session_key", "user"),
        ("stop[1]", "stop[1]"),
        ("\u2028x", "?x"),
    ],
)
def test_parameters_have_their_openai_names(field: str, param: str) -> None:
    detail = json.loads(error_body(errors.InvalidInput(f"{field} is wrong", field=field)))["error"]
    assert detail["param"] == param
    assert detail["message"] == f"{param} is wrong"


def test_a_retry_is_told_when() -> None:
    headers = dict(error_headers(errors.RequestRateExceeded("x", retry_after_s=1.2)))
    assert headers == {b"retry-after": b"2", b"retry-after-ms": b"1200"}
    assert error_headers(errors.RequestRateExceeded("x")) == []
    assert dict(error_headers(errors.Unauthenticated("x"))) == {b"www-authenticate": b"Bearer"}


def test_an_incident_is_named() -> None:
    body = error_body(errors.InternalError("secret path /etc", incident="inc_7"))
    assert b"inc_7" in body
    assert b"/etc" not in body


# A character of three tokens, behind a special token: what the detokeniser makes of "<|b|>", "é" of 2, "x".
PROMPT = (
    TokenLogprobs(0.0, (), (), (), "<|b|>"),
    TokenLogprobs(-1.0, (7,), (-0.5,), ("y",), "\ufffd", "", 4),
    TokenLogprobs(-2.0, (3,), (-2.0,), ("\ufffd",), "\ufffd", "é", 1),
    TokenLogprobs(-3.0, (9,), (-0.25,), ("z",), "x", "x", 12),
)
IDS = [0, 2, 3, 4]


def scored(texts: list[str], outputs: int = 1) -> Completion:
    found = whole(texts, [[*PROMPT, *[ENTRY] * outputs] for _ in texts])
    accepted = Accepted("r", "m", IDENTITY.version_digest, 1, 1, len(PROMPT))
    return replace(found, accepted=accepted, ids=[[*IDS, *[5] * outputs] for _ in texts])


def test_an_echoed_prompt_precedes_text_and_logprobs_with_exact_offsets() -> None:
    want = wanted("completions", logprobs=True, echo=True, scores_prompt=True)
    for choice in json.loads(answer_of(want, [scored(["b", "b"])], 7, "r"))["choices"]:
        assert choice["text"] == "éxb"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["<|b|>", "\ufffd", "\ufffd", "x", "b"]
        assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.5]
        assert logprobs["top_logprobs"][:3] == [None, {"y": -0.5, "\ufffd": -1.0}, {"\ufffd": -2.0}]
        assert logprobs["text_offset"] == [0, 0, 0, 1, 2]
        assert "prompt_logprobs" not in choice


def test_a_streamed_prompt_is_the_same_put_together_and_usage_counts_output_alone() -> None:
    want = wanted("completions", logprobs=True, echo=True, scores_prompt=True, continuous_usage=True)
    frames = Frames(want, IDENTITY)
    frames.start(0, len(PROMPT), split=False)
    events = [
        Tokens(0, 0, IDS[:2], "", PROMPT[:2]),
        Tokens(0, 2, [*IDS[2:], 5], "b", (*PROMPT[2:], ENTRY)),
    ]
    found = [frame(frames.tokens(0, event)) for event in events]
    assert [each["choices"][0]["text"] for each in found] == ["", "éxb"]
    logprobs = [each["choices"][0]["logprobs"] for each in found]
    assert [each["token_logprobs"] for each in logprobs] == [[None, -1.0], [-2.0, -3.0, -0.5]]
    assert [each["text_offset"] for each in logprobs] == [[0, 0], [0, 1, 2]]
    assert [each["usage"]["completion_tokens"] for each in found] == [0, 1]


def test_a_prompt_without_logprobs_is_echoed_as_it_came_and_once() -> None:
    want = wanted("completions", echo=True, generations=(inference_pb2.Generation(prompt="Hé "),))
    answer = json.loads(answer_of(want, [whole(["b"], [[]])], 7, "r"))
    assert answer["choices"][0]["text"] == "Hé b"
    frames = Frames(want, IDENTITY)
    frames.start(0, 3, split=False)
    texts = [
        frame(frames.tokens(0, Tokens(0, place, [place], text)))["choices"][0]["text"]
        for place, text in enumerate("bc")
    ]
    assert texts == ["Hé b", "c"]
    assert frame(frames.finish(0, "stop"))["choices"][0]["text"] == ""
    frames.start(0, 3, split=False, tokens=1)  # of a client that has the beginning
    assert frame(frames.tokens(0, Tokens(0, 1, [1], "c")))["choices"][0]["text"] == "c"


def test_prompt_logprobs_are_as_vllm_has_them() -> None:
    expected = [
        None,
        {
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
            "2": {"logprob": -1.0, "rank": 4, "decoded_token": "\ufffd"},
        },
        {"3": {"logprob": -2.0, "rank": 1, "decoded_token": "\ufffd"}},
        {
            "9": {"logprob": -0.25, "rank": 1, "decoded_token": "z"},
            "4": {"logprob": -3.0, "rank": 12, "decoded_token": "x"},
        },
    ]
    for dialect, logprobs in (("chat", True), ("completions", False)):
        want = wanted(dialect, logprobs=logprobs, prompt_logprobs=True, scores_prompt=True)
        answer = json.loads(answer_of(want, [scored(["b"])], 7, "r"))
        choice = answer["choices"][0]
        assert (answer if dialect == "chat" else choice)["prompt_logprobs"] == expected
        if dialect == "chat":
            assert [each["token"] for each in choice["logprobs"]["content"]] == ["b"]
            assert choice["message"]["content"] == "b"
        else:
            assert (choice["text"], choice["logprobs"]) == ("b", None)


def many(count: int, alternatives: int) -> list[TokenLogprobs]:
    """Return entries, each unlike the others."""
    tops = [tuple(f"é{place}.{number}" for number in range(alternatives)) for place in range(count)]
    return [
        TokenLogprobs(
            -place / 7, tuple(range(alternatives)), (-0.5,) * alternatives, top, f"t{place}", "ab", 1
        )
        for place, top in enumerate(tops)
    ]


@pytest.mark.parametrize("alternatives", [0, 3])
def test_large_answers_are_those_of_one_piece(monkeypatch: pytest.MonkeyPatch, alternatives: int) -> None:
    entries = many(1000, alternatives)
    asked = (
        wanted("completions", logprobs=True, scores_prompt=True, prompt_logprobs=True, echo=True),
        wanted("chat", logprobs=True, scores_prompt=True, prompt_logprobs=True),
        wanted("completions", logprobs=True),
    )
    for request in asked:
        completion = replace(
            whole(["x"], [entries]), accepted=Accepted("r", "m", "sha256:x", 1, 1, 900), ids=[[*range(1000)]]
        )
        sliced, steps = steps_of(whole_answer(request, [completion], 7, "r"))
        assert steps > len(entries) * (1 + alternatives) / lists.SLICE_LOGPROBS
        with monkeypatch.context() as patched:
            patched.setattr(lists, "SLICE_LOGPROBS", 10**6)
            at_once, few = steps_of(whole_answer(request, [completion], 7, "r"))
        assert few <= 3
        assert sliced == at_once
