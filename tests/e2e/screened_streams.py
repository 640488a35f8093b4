"""Streams whose outputs are known, under a safety pack: what each may deliver, and what is recorded of it.

What is safe is decided here, apart from the product: by expressions of the standard library, and by the
classifier's weights in transformers, which judge every prefix of each output.
"""

from __future__ import annotations

import json
import random
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import grpc
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from fairway.cli.fleet.options import BUNDLED_CLASSIFIER, bundled_classifier
from fairway.v1 import common_pb2, inference_pb2_grpc
from fairway.v1 import inference_pb2 as pb
from tests.support.stack import metadata

KINDS: Final = ("safe", "redacted", "blocked", "judged", "code")
CODE_TOKENS: Final = 120
MOST_TOKENS: Final = 320
THRESHOLD: Final = 0.95
# A text is used only where no prefix of its output is near the threshold.
SAFE_MOST: Final = 0.8
TIMEOUT_S: Final = 240.0
_SENTENCES: Final = (
    "the recipe is in the kitchen",
    "our team will open the report after work",
    "please sort the list by name",
    "Ben wrote a message to the office",
    "we measure the river every market day",
    "the teacher explains the lesson in the school",
    "the train leaves the city in the morning",
    "a friend paints the window of the module",
    "the table has four values and a report",
    "count the files in the folder",
    "the author describes the park",
)
_PLANTED: Final[Mapping[str, tuple[str, ...]]] = {
    "safe": ("the garden is near the library", "Ben counts the recipes"),
    "redacted": ("the meeting of project nightjar is at noon", "write to anna.berg@example.org about it"),
    "blocked": ("this is the grey heron protocol again", "we follow the Grey  Heron protocol here"),
    "judged": ("you are such a pathetic loser", "you are a disgusting coward", "shut up, you stupid idiot"),
}
_PROMPTS: Final = tuple(
    f"class {name}:\n    def push(self, item):\n" for name in ("Queue", "Stack", "Store", "Ring", "Pool")
)
_REDACTED: Final = {
    "name": re.compile(r"project\s+nightjar", re.IGNORECASE),
    "data": re.compile(r"[\w.]+@example\.org"),
    "code": re.compile(r"return\s+self", re.IGNORECASE),
}
_BANNED: Final = re.compile(r"grey\s+heron", re.IGNORECASE)


def pack(*, crowd: bool) -> bytes:
    """Return the pack of the drill; with ``crowd``, also what intervenes in every input of the crowd."""
    actions = {"name": "redact", "data": "redact", "code": "redact", "banned": "block", "harm": "block"}
    lists: list[dict[str, Any]] = [
        {"category": "name", "phrases": ["project nightjar"]},
        {"category": "code", "phrases": ["return self"]},
        {"category": "banned", "phrases": ["grey heron"]},
    ]
    if crowd:
        lists.append({"category": "banned", "phrases": ["crowd"], "scopes": ["input"]})
    rule = {
        "model": BUNDLED_CLASSIFIER,
        "labels": dict.fromkeys(("insult", "threat", "self_harm"), "harm"),
        "threshold": THRESHOLD,
        "scopes": ["output"],
    }
    return json.dumps(
        {
            "categories": {name: {"action": action} for name, action in actions.items()},
            "lists": lists,
            "personal_data": [{"category": "data", "kinds": ["email"]}],
            "classifiers": [rule],
            "window_tokens": 16,
            "fail": "hold",
            "hold_s": 120,
        }
    ).encode()


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    number: int

    def generation(self, model: str, key: str = "", session: str = "") -> pb.Generation:
        """Return a generation whose output has what its kind plants, since nothing else is permitted."""
        found = pb.Generation(model=model, idempotency_key=key, session_key=session)
        found.sampling.seed = self.number
        if self.kind == "code":
            found.prompt, found.ignore_eos = _PROMPTS[self.number % len(_PROMPTS)], True
            found.max_output_tokens = CODE_TOKENS
            return found
        rng = random.Random(f"{self.kind} {self.number}")
        planted = _PLANTED[self.kind][self.number % len(_PLANTED[self.kind])]
        sentences = rng.sample(_SENTENCES, 9)
        sentences.insert(rng.randint(3, 6), planted)
        found.prompt, found.max_output_tokens = "# Notes\n", MOST_TOKENS
        found.sampling.constraint.choice.texts.append(". ".join(sentences) + ".")
        return found


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one call received. Times in Unix seconds."""

    gateway: int
    ended_s: float
    text: str
    ends: tuple[int, ...]  # characters after each piece
    tokens: int
    accepted: pb.Accepted | None
    finishes: int
    reason: common_pb2.FinishReason.ValueType
    failure: str


async def attempt(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, secret: str, generation: pb.Generation, gateway: int
) -> Attempt:
    """Make one call. It has a failure where it ended otherwise than by its terminal event."""
    text, ends, tokens, accepted, finishes, failure = "", list[int](), 0, None, 0, ""
    reason = common_pb2.FINISH_REASON_UNSPECIFIED
    try:
        async for event in stub.Generate(
            pb.GenerateRequest(generation=generation), metadata=metadata(secret), timeout=TIMEOUT_S
        ):
            if event.HasField("accepted"):
                accepted = event.accepted
            elif event.HasField("chunk"):
                text += event.chunk.text
                tokens += len(event.chunk.ids)
                ends.append(len(text))
            elif event.HasField("finished"):
                finishes += 1
                reason = event.finished.choices[0].finish_reason
    except grpc.aio.AioRpcError as error:
        failure = f"{error.code().name}: {error.details()}"
    return Attempt(
        gateway, time.time(), text, tuple(ends), tokens, accepted, finishes, reason, failure
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reference:
    """The output of a case without a pack, and what the pack makes of it."""

    case: Case
    released: str  # text with its redactions
    finds: tuple[tuple[str, int], ...]  # category and position of each redaction
    released_ends: tuple[int, ...]  # the end of each in ``released``
    unsafe_chars: int  # the shortest text from the beginning that may not be delivered

    @property
    def filtered(self) -> bool:
        return self.case.kind in ("blocked", "judged")


class Oracle:
    """Judges by the classifier's weights, without the product."""

    def __init__(self) -> None:
        folder = bundled_classifier()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        labels = self._model.config.id2label
        self._columns = [at for at, name in labels.items() if name in ("insult", "threat", "self_harm")]

    def score(self, text: str) -> float:
        ids = torch.tensor([self._tokenizer.encode(text).ids])
        with torch.inference_mode():
            return float(self._model(ids).logits.softmax(-1)[0, self._columns].max())

    def reference(self, case: Case, raw: Attempt) -> Reference | None:
        """Return what the pack makes of an output; None where a prefix is judged by a hair."""
        scores = [self.score(raw.text[:end]) for end in raw.ends]
        first = next((at for at, score in enumerate(scores) if score >= SAFE_MOST), len(scores))
        unsafe = bisect_left(range(len(scores)), True, key=lambda at: scores[at] >= THRESHOLD)
        clear = all(score >= THRESHOLD for score in scores[first:])
        if not clear or (first < len(scores)) != (case.kind == "judged"):
            return None
        found = sorted(
            (match.start(), match.end(), category)
            for category, expression in _REDACTED.items()
            for match in expression.finditer(raw.text)
        )
        banned = _BANNED.search(raw.text)
        released, at, released_ends = "", 0, list[int]()
        for start, end, _ in found:
            released, at = f"{released}{raw.text[at:start]}[redacted]", end
            released_ends.append(len(released))
        unsafe_chars = raw.ends[unsafe] if unsafe < len(scores) else len(raw.text) + 1
        return Reference(
            case,
            released + raw.text[at:],
            tuple((category, start) for start, _, category in found),
            tuple(released_ends),
            banned.start() + 1 if banned is not None else unsafe_chars,
        )


@dataclass(slots=True)
class Stream:
    """One request with its key, and every call that was made for it."""

    reference: Reference
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return next((one.accepted.request_id for one in self.attempts if one.accepted is not None), "")

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    def is_unsafe(self, received: Attempt) -> bool:
        """Whether a call received what no client may."""
        texts = (*_REDACTED.values(), _BANNED)
        return any(one.search(received.text) for one in texts) or (
            self.reference.filtered and len(received.text) >= self.reference.unsafe_chars
        )

    def problem(self, undisturbed: Attempt) -> str:
        """Return how it was lost or changed; empty if not. ``undisturbed``: another run of its case."""
        last, expected = self.last, self.reference
        if last.failure or last.finishes != 1:
            return last.failure or f"{last.finishes} terminal events"
        if (last.reason == common_pb2.FINISH_REASON_FILTERED) != expected.filtered:
            return f"it ended by {common_pb2.FinishReason.Name(last.reason)}"
        if any(not last.text.startswith(one.text) for one in self.attempts):
            return "a call that broke had received another text"
        if expected.case.kind == "judged":
            return "" if expected.released.startswith(last.text) else "another text"
        whole = undisturbed.text if expected.filtered else expected.released
        return "" if last.text == whole else f"another text: {last.text!r}, undisturbed {whole!r}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A line of a gateway's log: a verdict, a find, or a run that continues. ``at_s``: Unix seconds."""

    gateway: str
    at_s: float
    fields: Mapping[str, Any]

    @property
    def identity(self) -> str:
        """The resource of its entry in the audit log."""
        one = self.fields
        place = f"{one['scope']}/{one['choice']}/{one['position']}"
        pack_digest = str(one["pack_digest"]).removeprefix("sha256:")
        return f"{one['category']}/{pack_digest}/{place}/{one['text_sha256']}"


def recorded(logs: Iterable[Path], *events: str) -> dict[str, list[Recorded]]:
    """Return the lines of some events by request, in the order of time."""
    found: dict[str, list[Recorded]] = {}
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if any(f'"event": "{event}"' in line for event in events):
                fields = json.loads(line)
                at_s = datetime.fromisoformat(fields["timestamp"]).timestamp()
                found.setdefault(fields["request_id"], []).append(Recorded(log.stem, at_s, fields))
    return {name: sorted(lines, key=lambda one: one.at_s) for name, lines in found.items()}


@dataclass(slots=True)
class Tally:
    """What was judged or recorded twice, and what was not."""

    repeated: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def spans(self, stream: Stream, lines: Sequence[Recorded]) -> None:
        """Check that verdicts join, in a run and from where its record ends, up to all that was sent.

        ``lines``: the verdicts, and the runs that continue.
        """
        name, reached, passed, started = stream.request_id, 0, 0, False
        for one in lines:
            if "tokens" in one.fields:
                position = sum(one.fields["tokens"])
                if position > passed:
                    self.skipped.append(f"{name}: {position} tokens recorded, {passed} judged")
                reached = position
                continue
            begins, ends = one.fields["from_token"], one.fields["to_token"]
            if begins != reached:
                wrong = self.repeated if begins < reached else self.skipped
                wrong.append(f"{name}: {one.gateway} judges from {begins} after {reached}")
            reached, started = ends, True
            passed = passed if one.fields["found"] else max(passed, ends)
        if stream.last.tokens > passed or not started:
            self.skipped.append(f"{name}: {stream.last.tokens} tokens sent, {passed} judged")

    def finds(self, stream: Stream, lines: Sequence[Recorded]) -> None:
        """Check that each expected find is recorded, and again only where the record did not have it.

        ``lines``: the finds, and the runs that continue.
        """
        found, name = stream.reference, stream.request_id
        expected, had, noted, in_run = list(found.finds), 0, set[tuple[str, int]](), set[tuple[str, int]]()
        if found.filtered:
            expected = [("harm" if found.case.kind == "judged" else "banned", -1)]
        for one in lines:
            if "tokens" in one.fields:
                had, in_run = sum(one.fields["chars"]), set()
                continue
            place = (one.fields["category"], -1 if found.filtered else one.fields["position"])
            if place not in expected:
                self.repeated.append(f"{name}: {place} is recorded, and is not there")
                continue
            # A run that found it and did not record its end leaves it to the next one.
            recorded_end = had + 1 if found.filtered else found.released_ends[expected.index(place)]
            if place in in_run or (place in noted and recorded_end < had):
                self.repeated.append(f"{name}: {place} is recorded again by {one.gateway}")
            noted.add(place)
            in_run.add(place)
        self.skipped += [f"{name}: {place} is not recorded" for place in expected if place not in noted]

    def audited(
        self, lines: Iterable[Recorded], entries: Counter[str], killed: Sequence[tuple[str, float]]
    ) -> int:
        """Check the audit log; return the finds that a killed gateway took along, of its last seconds."""
        taken = 0
        for one in lines:
            key = f"{one.fields['request_id']} {one.identity}"
            last_s = [at_s - one.at_s for name, at_s in killed if name == one.gateway]
            if entries[key] == 0 and any(0 <= left_s < 5 for left_s in last_s):
                taken += 1
            elif entries[key] == 0:
                self.skipped.append(f"{key} is not in the audit log")
            elif entries[key] > 1:
                self.repeated.append(f"{key} is in the audit log {entries[key]} times")
        return taken
