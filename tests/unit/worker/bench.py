"""A sequence table whose engine is a list of commands, and a byte-level tokenizer with traps in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.core.generation import GenerationSpec, Grant, OutputLimits, Prompt, Sampling, StartSpec
from services.core.records import Priority
from services.worker import engine_protocol as wire
from services.worker.detokenizer import ByteLevelVocabulary, byte_of_char
from services.worker.step_recorder import StepRecorder
from services.worker.streams.charges import DeviceKind, DeviceTime, UsageAccounting
from services.worker.streams.host import SequenceHost
from services.worker.streams.kv import PoolLimits
from services.worker.streams.sequences import SequenceTable, ServedVersion
from tests.support.clocks import HandClock
from tests.support.kept_usage import KeptUsage

Kind = TypeVar("Kind", bound=wire.EngineMessage)
DIGEST = "sha256:" + "b" * 64
EOS = 300
IDLE_BEAT = wire.EngineHeartbeat(step=0, kv_blocks_used=0, running=1, waiting=0)


def byte_level_tokenizer() -> Tokenizer:
    """256 bytes, pairs of them that cut through UTF-8 characters, special and plain added tokens."""
    char_of = {byte: char for char, byte in byte_of_char().items()}
    vocab = {char_of[byte]: byte for byte in range(256)}
    merges = []
    pairs = [(0xC3, 0xA9), (0xF0, 0x9F), (0x98, 0x80), (0x61, 0xC3), (0xE2, 0x82), (0x20, 0x61), (0x61, 0x62)]
    for index, (first, second) in enumerate(pairs):
        vocab[char_of[first] + char_of[second]] = 256 + index
        merges.append((char_of[first], char_of[second]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    filler = [AddedToken(f"<f{index}>", special=True) for index in range(256 + len(pairs), EOS)]
    tokenizer.add_tokens([AddedToken("two words", special=False)])
    tokenizer.add_special_tokens(filler[1:])
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    assert tokenizer.token_to_id("<eos>") == EOS
    return tokenizer


@dataclass
class Bench:
    """A host with one table whose engine is a list of the commands that it was sent."""

    host: SequenceHost
    table: SequenceTable
    clock: HandClock
    new_table: Callable[[PoolLimits], SequenceTable]
    usage: KeptUsage
    recorder: StepRecorder
    sent: list[wire.Command] = field(default_factory=list)
    connected: bool = True
    members: tuple[int, ...] = ()  # of the step that the engine announces
    changes: int = 0
    step: int = 0
    tokens: int = 0  # those of sequences that lived
    _sequence: int = 0

    def spec(
        self,
        *,
        prompt: int = 16,
        blocks: int = 2,
        credit: int = 1000,
        max_tokens: int = 100,
        min_tokens: int = 0,
        stop: tuple[str, ...] = (),
        logprobs: int | None = None,
        produced: tuple[int, ...] = (),
        delivered_chars: int = 0,
        time_left_s: float | None = None,
        tenant: str = "t1",
        **grant: Any,
    ) -> StartSpec:
        self._sequence += 1
        values: dict[str, Any] = {
            "worker_id": "w1",
            "address": "a:1",
            "incarnation": 5,
            "epoch": 3,
            "sequence": self._sequence,
            "kv_blocks": blocks,
            "ttl_s": 5.0,
            "version_digest": DIGEST,
        }
        return StartSpec(
            generation=GenerationSpec(
                request_id=f"r{self._sequence}",
                model="m",
                version_digest=DIGEST,
                route_revision=1,
                prompt=Prompt(list(range(prompt))),
                sampling=Sampling(seed=1, logprobs=logprobs),
                limits=OutputLimits(max_tokens, min_tokens, stop),
                priority=Priority.STANDARD,
            ),
            choice=0,
            tenant_id=tenant,
            grant=Grant(**{**values, **grant}),
            initial_credit_tokens=credit,
            produced_ids=produced,
            delivered_chars=delivered_chars,
            time_left_s=time_left_s,
        )

    def stepped(
        self,
        tokens: dict[int, int],
        *,
        finished: dict[int, wire.FinishReason] | None = None,
        prefill_tokens: int = 0,
        logprobs: dict[int, wire.SampledLogprobs] | None = None,
        errors: dict[int, str] | None = None,
        step_s: float = 0.01,
        device_us: dict[int, int] | None = None,
        settled: Sequence[int] = (),
    ) -> None:
        """One engine step that made these tokens, by the engine's handle."""
        self.step += 1
        live = {sequence.number for sequence in self.table.sequences()}
        self.tokens += sum(number in live for number in tokens)
        self.table.on_stepped(
            wire.Stepped(
                step=self.step,
                step_s=step_s,
                handles=list(tokens),
                tokens=list(tokens.values()),
                finished=finished or {},
                prefill_tokens=prefill_tokens,
                kv_blocks_used=0,
                running=len(tokens),
                waiting=0,
                logprobs={number: [entry] for number, entry in (logprobs or {}).items()},
                errors=errors or {},
                attended_tokens=len(tokens),
                device_us=device_us or {},
                settled=list(settled),
            )
        )
        self.host.check_integrity()

    def ran(
        self,
        tokens: list[tuple[int, int]],
        *,
        finished: dict[int, wire.FinishReason] | None = None,
        logprobs: dict[int, list[wire.SampledLogprobs]] | None = None,
    ) -> None:
        """One engine step that made several tokens of a sequence: (handle, token), in order."""
        self.step += 1
        live = {sequence.number for sequence in self.table.sequences()}
        self.tokens += sum(number in live for number, _ in tokens)
        self.table.on_stepped(
            wire.Stepped(
                step=self.step,
                step_s=0.01,
                handles=[number for number, _ in tokens],
                tokens=[token for _, token in tokens],
                finished=finished or {},
                prefill_tokens=0,
                kv_blocks_used=0,
                running=1,
                waiting=0,
                logprobs=logprobs or {},
            )
        )
        self.host.check_integrity()

    def restart(self, limits: PoolLimits | None = None) -> None:
        """The engine is gone, and another takes its place."""
        self.host.remove(self.table)
        self.table = self.new_table(limits or self.table.limits)
        self.host.add(self.table)

    def commands(self, kind: type[Kind]) -> list[Kind]:
        return [command for command in self.sent if isinstance(command, kind)]


def new_bench(byte_level: Tokenizer) -> Bench:
    """Total 10 blocks of 16 tokens, at most 8 sequences; slow readers after 30 s."""
    clock = HandClock(100.0)
    usage = KeptUsage()
    host = SequenceHost(changed=lambda: None, device=DeviceTime(DeviceKind("w1", "h100", 3.6), usage, clock))
    host.grants.registered(5)

    def send(command: wire.Command) -> bool:
        if made.connected:
            made.sent.append(command)
        return made.connected

    vocabulary = ByteLevelVocabulary(byte_level)
    vocabulary.cover(512)

    recorder = StepRecorder(clock)

    def new_table(limits: PoolLimits) -> SequenceTable:
        return SequenceTable(
            ServedVersion(DIGEST, "m"),
            limits=limits,
            vocabulary=vocabulary,
            send=send,
            members=lambda: made.members,
            clock=clock,
            charges=UsageAccounting(host.tally, host.device),
            recorder=recorder.engine(DIGEST, "m", kv_blocks_total=limits.kv_blocks_total),
            changed=host.note_change,
            slow_reader_s=30.0,
        )

    table = new_table(PoolLimits(kv_blocks_total=10, block_size=16, max_model_len=160, max_sequences=8))
    made = Bench(host, table, clock, new_table, usage, recorder)
    host.changed = lambda: setattr(made, "changes", made.changes + 1)
    host.add(table)
    return made
