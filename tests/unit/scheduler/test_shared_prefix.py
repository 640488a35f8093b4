"""What workers share, by name: against a plain model, within its bound, and who may lean on it."""

from __future__ import annotations

from random import Random

from services.scheduler.policy.placement.shared_prefix import (
    NOTHING_SHARED,
    SharedPrefixIndex,
    shareable_blocks,
)

CHAINS = [tuple(100 * family + place for place in range(1, 40)) for family in range(1, 5)]


def test_runs_are_those_of_a_plain_model() -> None:
    rng = Random(3)
    shared = SharedPrefixIndex()
    model: dict[tuple[str, str], set[int]] = {}
    for _ in range(1500):
        worker, digest = f"w{rng.randrange(4)}", f"v{rng.randrange(2)}"
        family = rng.randrange(2) + 2 * int(digest[1:])  # a name holds its version
        chain = CHAINS[family]
        known = model.setdefault((worker, digest), set())
        if rng.random() < 0.03:
            shared.drop(worker)
            model = {key: names for key, names in model.items() if key[0] != worker}
        else:
            keep = rng.randrange(len(chain) + 1)  # what is shared is a leading part of each chain
            want = (known - set(chain)) | set(chain[:keep])
            shared.change(worker, digest, sorted(want - known), sorted(known - want))
            model[worker, digest] = want
        shared.check_integrity()
        tokens = rng.randrange(0, 64 * 42)
        for worker, digest in model:
            if digest != f"v{family // 2}":
                continue
            names = model[worker, digest]
            run = next((at for at, name in enumerate(chain) if name not in names), len(chain))
            expected = min(run, shareable_blocks(chain, tokens))
            assert shared.blocks_on(worker, chain, tokens) == expected
        for version in ("v0", "v1"):
            assert shared.any_in(version) == any(model.get((f"w{n}", version)) for n in range(4))


def test_names_are_bounded_and_what_is_not_known_is_not_shared() -> None:
    shared = SharedPrefixIndex(max_names=5)
    shared.change("w0", "v", CHAINS[0], ())
    assert (len(shared), shared.blocks_on("w0", CHAINS[0], 10_000)) == (5, 5)
    shared.change("w1", "v", CHAINS[0], ())
    assert shared.blocks_on("w1", CHAINS[0], 10_000) == 0
    shared.change("w0", "v", (), (*CHAINS[0], 9999))
    assert len(shared) == 0
    assert not shared.any_in("v")
    shared.check_integrity()


def test_one_grant_leans_on_a_beginning_at_a_time() -> None:
    shared = SharedPrefixIndex()
    chain, longer = CHAINS[0][:3], CHAINS[0][:5]
    for worker in ("w0", "w1"):
        shared.change(worker, "v", longer, ())
    shared.attach("w0", chain, 4)
    run = shared.run_of(longer, 1000)
    assert (run.tokens_on("w0"), run.tokens_on("w1")) == (0, 5 * 64)
    assert shared.leaning_on("w0") == (4,)
    shared.detach("w0", chain, 3)
    assert run.tokens_on("w0") == 0, "another grant's number"
    shared.detach("w0", chain, 4)
    assert run.tokens_on("w0") == 5 * 64
    shared.attach("w0", chain, 5)
    shared.detach_all("w0")
    assert shared.leaning_on("w0") == ()


def test_those_that_share_a_beginning_are_drawn() -> None:
    shared = SharedPrefixIndex()
    for number in range(20):
        shared.change(f"w{number}", "v", CHAINS[1][:2], ())
    run = shared.run_of(CHAINS[1], 1000)
    drawn = [tuple(run.workers(8, Random(seed))) for seed in range(30)]
    assert all(len(set(names)) == 8 for names in drawn)
    assert {name for names in drawn for name in names} == {f"w{number}" for number in range(20)}
    assert shared.run_of(CHAINS[2], 1000) is NOTHING_SHARED
    assert NOTHING_SHARED.tokens_on("w0") == 0
    assert NOTHING_SHARED.workers(8, Random(0)) == []
