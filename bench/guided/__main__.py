"""What structured output costs, and whether it holds: ``make bench-guided``, about ten minutes on two cores.

- ``valid_ratio``: of drawn schemas whose outputs ended by ``stop``, those whose text is valid, by the package
  jsonschema with its formats. ``ended`` and ``refused`` count the others.
- ``identical_resume_ratio``: outputs that another engine resumed at a random token and that came out equal.
- ``throughput_ratio``: tokens per second of 32 constrained streams over 32 free ones, of a random model with
  131,072 tokens.
- ``neighbours_itl_ratio``: the 99th percentile of the time between tokens of free streams of that model
  while 100 hostile schemas are checked as a gateway does and submitted as a worker does, over that of none.
  ``hostile_itl_over_harmless``: over that of 100 harmless schemas, whose prompts and rows cost as much.
  ``checked_before_itl_ratio``: that of hostile ones which another machine's gateway checked, over none.
- ``slow_masks_itl_ratio``: the same beside eight streams whose masks take milliseconds, over that beside
  eight whose masks are quick.

The last line is ``RESULT`` with the ratios.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from bench.guided.engines import BUNDLED, engine_of, run, submit, tokenizer_of, write_large
from bench.guided.gateway import Arriving, CheckedBefore, Gateway, checked, of_schema
from bench.guided.schemas import drawn, harmless, hostile, is_valid
from bench.results import Figure, print_result
from services.core.generation import Constraint, ConstraintKind
from services.worker.engine.core import Engine
from services.worker.engine_protocol import Cancel

STREAMS: Final = 32
OUTPUT: Final = 160  # tokens of a drawn schema's output at most
HOSTILE: Final = 1 << 16  # handles from here on are of hostile schemas
NEIGHBOURS: Final = 8
STEPS: Final = 300
STEPS_APART: Final = 4
QUICK: Final = Constraint(ConstraintKind.REGEX, "[a-z ]*")
SLOW: Final = Constraint(ConstraintKind.REGEX, "(a|b| |[a-z])*a(a|b|[a-z]){14}[a-z ]*")
PROMPT: Final = 'x = {"name": "a", "size": 3}\ny = '
LONG_ARRAY: Final = json.dumps(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "sizes": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["name", "sizes"],
        },
        "minItems": 1000,
    }
)


def validity(schemas: int) -> dict[str, float]:
    """Generate one output per schema, and resume each in another engine."""
    tokenizer, engine, other = tokenizer_of(BUNDLED), engine_of(BUNDLED), engine_of(BUNDLED)
    ids = tokenizer.encode(PROMPT).ids
    constraints = [of_schema(json.dumps(drawn(number))) for number in range(schemas)]
    submits = [submit(n, ids, max_tokens=OUTPUT, constraint=each) for n, each in enumerate(constraints)]
    whole = run(engine, submits)
    ended = [handle for handle, reason in whole.finished.items() if reason == "stop"]
    valid = sum(is_valid(tokenizer.decode(whole.tokens[handle]), drawn(handle)) for handle in ended)
    rng = Random(1)
    cuts = {handle: rng.randrange(len(tokens)) for handle, tokens in whole.tokens.items()}
    resumed = run(
        other,
        [
            submit(
                handle,
                ids,
                max_tokens=OUTPUT,
                constraint=constraints[handle],
                produced_ids=whole.tokens[handle][:cut],
            )
            for handle, cut in cuts.items()
        ],
    )
    equal = sum(resumed.tokens.get(handle, []) == whole.tokens[handle][cut:] for handle, cut in cuts.items())
    return {
        "schemas": schemas,
        "ended": len(ended),
        "refused": len(whole.errors),
        "valid_ratio": valid / max(1, len(ended)),
        "identical_resume_ratio": equal / max(1, len(cuts)),
    }


def throughput_ratio(engine: Engine, ids: list[int], *, tokens: int, rounds: int) -> list[float]:
    """Return the tokens per second with a constraint over those without, by turn."""
    constraint = of_schema(LONG_ARRAY)
    _rate(engine, ids, constraint, tokens=4)  # the tokenizer is prepared and the grammar kept
    found = []
    for number in range(rounds):
        pair = [None, constraint] if number % 2 else [constraint, None]
        rates = {each is None: _rate(engine, ids, each, tokens=tokens) for each in pair}
        found.append(rates[False] / rates[True])
        print(f"tokens/s free {rates[True]:.1f}, constrained {rates[False]:.1f}", flush=True)
    return found


def _rate(engine: Engine, ids: list[int], constraint: Constraint | None, *, tokens: int) -> float:
    submits = [
        submit(n, ids, max_tokens=tokens, constraint=constraint, ignore_eos=True, temperature=0.0)
        for n in range(STREAMS)
    ]
    began_s = time.monotonic()
    found = run(engine, submits)
    assert all(len(each) == tokens for each in found.tokens.values()), found.errors
    return STREAMS * tokens / (time.monotonic() - began_s)


def neighbours_ratios(
    engine: Engine, folder: Path, ids: list[int], *, count: int, rounds: int
) -> dict[str, list[float]]:
    """Return the p99 of the time between tokens while hostile schemas come, over those of baselines.

    Checked before, they take only the engine's processors, not a gateway's beside it.
    """
    found = []
    for number in range(rounds):
        before = [hostile(each) for each in range((rounds + number) * count, (rounds + number + 1) * count)]
        arriving = CheckedBefore(checked(folder, before), every=STEPS_APART)
        p99_s = {
            "nothing": _itl_p99_s(engine, ids, steps=STEPS),
            "checked before": _itl_p99_s(engine, ids, steps=STEPS, arriving=arriving),
        }
        kinds = (harmless, hostile) if number % 2 else (hostile, harmless)
        for kind in kinds:
            schemas = [kind(each) for each in range(number * count, (number + 1) * count)]
            with Gateway.started(folder, schemas) as gateway:
                p99_s[kind.__name__] = _itl_p99_s(engine, ids, steps=STEPS, arriving=gateway)
        found.append(
            [
                p99_s["hostile"] / p99_s["nothing"],
                p99_s["hostile"] / p99_s["harmless"],
                p99_s["checked before"] / p99_s["nothing"],
            ]
        )
        shown = ", ".join(f"{name} {each * 1e3:.1f} ms" for name, each in p99_s.items())
        print(f"ITL p99: {shown}", flush=True)
    names = ("neighbours_itl_ratio", "hostile_itl_over_harmless", "checked_before_itl_ratio")
    return {name: list(values) for name, *values in zip(names, *found, strict=True)}


def slow_masks_ratio(engine: Engine, ids: list[int], *, rounds: int) -> list[float]:
    """Return the p99 of the time between tokens of free streams beside slow masks over beside quick ones."""
    found = []
    for number in range(rounds):
        p99_s = {}
        for constraint in (QUICK, SLOW) if number % 2 else (SLOW, QUICK):
            for handle in range(HOSTILE, HOSTILE + NEIGHBOURS):
                each = submit(handle, ids, max_tokens=1 << 12, constraint=constraint, ignore_eos=True)
                engine.apply(each)
            p99_s[constraint] = _itl_p99_s(engine, ids, steps=STEPS, last=HOSTILE + NEIGHBOURS)
        found.append(p99_s[SLOW] / p99_s[QUICK])
        quick_ms, slow_ms = (p99_s[each] * 1e3 for each in (QUICK, SLOW))
        print(f"ITL p99 {quick_ms:.1f} ms beside quick masks, {slow_ms:.1f} ms beside slow ones", flush=True)
    return found


def _itl_p99_s(
    engine: Engine, ids: list[int], *, steps: int, arriving: Arriving | None = None, last: int = HOSTILE
) -> float:
    """Run free streams for so many steps, and on while schemas arrive, which are submitted.

    ``last``: handles up to there are in use.
    """
    for handle in range(NEIGHBOURS):
        engine.apply(submit(handle, ids, max_tokens=1 << 12, ignore_eos=True))
    gaps: list[float] = []
    last_s, handle = time.monotonic(), last
    while len(gaps) < steps or (arriving is not None and arriving.any_left):
        if arriving is not None and (constraint := arriving.passed()) is not None:
            engine.apply(submit(handle, ids, max_tokens=2, constraint=constraint))
            handle += 1
        stepped = engine.step()
        assert stepped.errors.keys().isdisjoint(range(NEIGHBOURS)), stepped.errors
        if any(each < HOSTILE for each in stepped.handles):
            now_s = time.monotonic()
            gaps.append(now_s - last_s)
            last_s = now_s
    engine.apply(Cancel([*range(NEIGHBOURS), *range(HOSTILE, handle)]))
    while engine.has_work:
        engine.step()
    return float(np.percentile(gaps[2:], 99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=40, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hostile", type=int, default=100)
    options = parser.parse_args()
    result: dict[str, Figure] = {**validity(options.schemas)}
    print(json.dumps(result), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_large(folder)
        ids = tokenizer_of(folder).encode(PROMPT).ids
        engine = engine_of(folder)
        # Turns of some seconds differ by a quarter.
        rounds = 4 * options.rounds
        result["throughput_ratio"] = throughput_ratio(engine, ids, tokens=options.tokens, rounds=rounds)
        result |= neighbours_ratios(engine, folder, ids, count=options.hostile, rounds=options.rounds)
        result["slow_masks_itl_ratio"] = slow_masks_ratio(engine, ids, rounds=options.rounds)
    print_result(result)


if __name__ == "__main__":
    main()
