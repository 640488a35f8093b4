"""Suspects by what tenants request of devices: arrivals, lengths, cache hits, classes; and lost capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.controlplane.diagnosis.policy.comparison import Masks, Side, TwoTimes
from services.controlplane.diagnosis.policy.samples import DECODE, Floats, Mask, Metric, SpentOn
from services.controlplane.diagnosis.policy.suspects import (
    LEAST_ARRIVALS,
    LEAST_EXCESS_S,
    LEAST_GROWTH,
    LEAST_REQUESTS,
    CauseKind,
    Suspect,
    enough,
    ms,
    suspect_of,
    values_of,
)

LEAST_HITS: Final = 0.1  # fall of the hit ratio
LONG_PROMPTS: Final = 2.0  # times those of others
_LOAD_PARTS: Final = (
    SpentOn.QUEUE,
    SpentOn.ENGINE_WAIT,
    SpentOn.BATCH,
    SpentOn.BATCH_WAIT,
    SpentOn.RETURNING,
)
_PRICE_S: Final = 1e-6
_RANKS: Final = {"batch": 0, "standard": 1, "interactive": 2}


@dataclass(frozen=True, slots=True)
class _Use:
    """What one tenant requested of the devices in one time: its rate, and means of its requests."""

    rate: float
    prompt: float
    hit_ratio: float
    output: float

    @property
    def uncached(self) -> float:
        return self.prompt * (1 - self.hit_ratio)


class DemandSuspects:
    """Tenants by the device time that they requested, and what its growth explains.

    Waits follow the load: the work per second over the capacity. The growth of the load is divided over
    tenants, and over the factors of each, in proportion to logarithmic means (Ang, The LMDI Approach to
    Decomposition Analysis, 2005), so that no factor's share depends on the order of replacing them.
    """

    def __init__(self, found: TwoTimes) -> None:
        self._found = found
        self._tenants = values_of(found, "tenant")
        self._uses = {tenant: self._use(tenant) for tenant in self._tenants}
        self._price = self._output_price()
        self._load, self._prefills = self._shares()
        self._waits = sum(found.excess(part) for part in _LOAD_PARTS)

    def suspects(self) -> Iterator[Suspect]:
        yield from self._cache()
        for tenant in self._tenants:
            yield from self._lengths(tenant)
            yield from self._arrivals(tenant)
        yield from self._overtaken()
        yield from self._capacity()

    # --- figures ---------------------------------------------------------------------------------

    def _use(self, tenant: str) -> tuple[_Use, _Use]:
        def use(side: Side, mask: Mask) -> _Use:
            prompt = side.mean(side.samples.prompt, mask)
            hits = side.mean(side.samples.cached, mask) / prompt if prompt else 0.0
            return _Use(side.rate(mask), prompt, hits, side.mean(side.samples.output, mask))

        return self._found.both(use, self._found.masks("tenant", tenant))

    def _output_price(self) -> float:
        """Return the seconds of device time per output token in the baseline: its part of a step."""
        prices, steps = self._found.prices, self._found.baseline.samples.after.sum(axis=0)
        if steps[3] <= 0:
            return prices.decode_s
        return float(prices.without_prefill(steps[None, :])[0] / steps[3])

    def _works(self, use: _Use) -> tuple[float, float]:
        """Return the device time per second of its prompts and of its outputs."""
        prefill_s = self._found.prices.prefill_s or _PRICE_S  # rows have no steps: their tokens weigh alike
        return use.rate * use.uncached * prefill_s, use.rate * use.output * self._price

    def _shares(self) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
        """Return each factor's share of the growth of the load, and of prefill alone; shares of all that grew
        sum to at most 1."""
        whole: dict[tuple[str, str], float] = {}
        prefill: dict[tuple[str, str], float] = {}
        totals = [0.0, 0.0]
        for tenant, (before, after) in self._uses.items():
            works = self._works(before), self._works(after)
            totals = [totals[0] + sum(works[0]), totals[1] + sum(works[1])]
            mean = _log_mean(works[0][0], works[1][0])
            factors = {
                "rate": _log_ratio(before.rate, after.rate),
                "prompt": _log_ratio(before.prompt, after.prompt),
                "cache": _log_ratio(1 - before.hit_ratio, 1 - after.hit_ratio),
            }
            if not before.rate:
                prefill[tenant, "rate"] = works[1][0]
            else:
                prefill |= {(tenant, name): mean * value for name, value in factors.items()}
            decode = _log_mean(works[0][1], works[1][1])
            whole |= {(tenant, name): prefill.get((tenant, name), 0.0) for name in factors}
            whole[tenant, "rate"] += decode * factors["rate"] if before.rate else works[1][1]
            whole[tenant, "output"] = decode * _log_ratio(before.output, after.output) if before.rate else 0.0
        mean = _log_mean(totals[0], totals[1])
        whole["", "capacity"] = mean * max(0.0, -_log_ratio(*self._capacities()))
        return _positive(whole), _positive(prefill)

    def _capacities(self) -> tuple[float, float]:
        """Return the workers that served in both times, as far as the fleet's records or the samples show."""
        model = self._found.model
        known = any(self._found.both(lambda side: any(model in moment.ready for moment in side.moments)))

        def capacity(side: Side) -> float:
            ready = [moment.ready.get(model, 0) for moment in side.moments if known]
            return float(np.mean(ready)) if ready else float(len({one for one in side.samples.worker if one}))

        return self._found.both(capacity)

    def _unloaded(self, key: tuple[str, str]) -> Floats:
        """Return what the window's requests would save of waits without this factor's growth."""
        prefills = self._prefills.get(key, 0.0) * self._found.excess(SpentOn.NEIGHBOURS)
        return np.asarray(self._load.get(key, 0.0) * self._waits + prefills)

    # --- suspects --------------------------------------------------------------------------------

    def _lengths(self, tenant: str) -> Iterator[Suspect]:
        """Yield the tenant's prompts and its outputs, if they grew."""
        found, masks = self._found, self._found.masks("tenant", tenant)
        if not enough(masks):
            return
        own = found.window.parts[SpentOn.OWN_PREFILL] + found.window.parts[SpentOn.ROWS]
        decode = np.zeros(len(masks[1]))
        if found.metric is Metric.TOTAL:
            decode = found.window.samples.stages[:, DECODE] - found.window.parts[SpentOn.READER]
        for kind, name, spent in (
            (CauseKind.PROMPTS_GREW, "prompt", own),
            (CauseKind.OUTPUTS_GREW, "output", np.maximum(0.0, decode)),
        ):
            before, after = (getattr(use, name) for use in self._uses[tenant])
            if after < LEAST_GROWTH * max(1.0, before):
                continue
            saved = np.where(masks[1], spent * (1 - before / after), 0.0) + self._unloaded((tenant, name))
            text = f"{name}s of {tenant}: {before:.0f} tokens on average, then {after:.0f}"
            yield suspect_of(found, kind, tenant, saved, found.column(name), masks, text)

    def _cache(self) -> Iterator[Suspect]:
        found, fallen = self._found, dict[str, tuple[Floats, Masks, str]]()
        for tenant, (before, after) in self._uses.items():
            masks, fell = found.masks("tenant", tenant), before.hit_ratio - after.hit_ratio
            if not enough(masks) or fell < LEAST_HITS:
                continue
            lost = after.uncached and fell * after.prompt / after.uncached
            saved = np.where(masks[1], found.window.parts[SpentOn.OWN_PREFILL] * lost, 0.0)
            saved = saved + self._unloaded((tenant, "cache"))
            ratios = f"{before.hit_ratio:.0%} of its prompt tokens, then {after.hit_ratio:.0%}"
            fallen[tenant] = saved, masks, f"cache hits of {tenant}: {ratios}"
        had = sum(before.hit_ratio >= LEAST_HITS for before, _ in self._uses.values())
        if 1 < len(fallen) == had:
            whole = np.asarray(sum(saved for saved, *_ in fallen.values()))
            text = f"cache hits fell for all {had} tenants that had any"
            fallen = {found.model: (whole, found.masks("tenant", *fallen), text)}
        columns = found.both(lambda side: side.samples.cached / np.maximum(1.0, side.samples.prompt))
        for subject, (saved, masks, text) in fallen.items():
            yield suspect_of(
                found, CauseKind.CACHE_HITS_FELL, subject, saved, columns, masks, text, falls=True
            )

    def _arrivals(self, tenant: str) -> Iterator[Suspect]:
        """Yield a tenant that sends more: as a neighbour if its prompts stand in the steps of others."""
        found = self._found
        before, after = self._uses[tenant]
        masks = found.masks("tenant", tenant)
        if masks[1].sum() < LEAST_REQUESTS or after.rate < LEAST_ARRIVALS * before.rate:
            return
        others = ~masks[0], ~masks[1]
        uncached = [
            float(np.average(np.maximum(0.0, one.prompt - one.cached), weights=one.weight))
            for one in (found.window.samples.where(masks[1]), found.window.samples.where(others[1]))
            if len(one)
        ]
        is_long = len(uncached) == 2 and uncached[0] >= LONG_PROMPTS * uncached[1]
        grown = {}
        for part in (SpentOn.NEIGHBOURS, SpentOn.QUEUE, SpentOn.BATCH):
            usual_s, now_s = found.means(found.part(part), others)
            grown[part] = now_s - usual_s
        noisy = is_long and grown[SpentOn.NEIGHBOURS] >= max(grown[SpentOn.QUEUE], grown[SpentOn.BATCH])
        weights = np.where(masks[1], before.rate / after.rate, 1.0) * found.window.samples.weight
        values = found.window.parts.total - self._unloaded((tenant, "rate"))
        texts = [f"{tenant} sent {before.rate:.3g} requests per second, then {after.rate:.3g}"]
        if noisy:
            texts.append(
                f"its prompts have {uncached[0]:.0f} tokens to compute, those of others {uncached[1]:.0f}; "
                f"they lengthen the steps of others by {ms(grown[SpentOn.NEIGHBOURS])} per request"
            )
        yield Suspect(
            CauseKind.NOISY_NEIGHBOUR if noisy else CauseKind.ARRIVALS_GREW,
            tenant,
            values,
            weights,
            tuple(texts),
            found.rates(masks),
        )

    def _overtaken(self) -> Iterator[Suspect]:
        """Yield the classes that wait because higher ones ask for more."""
        found = self._found
        classes = sorted(values_of(found, "priority"), key=lambda name: _RANKS.get(name, 0))
        waits = found.both(lambda side: side.parts[SpentOn.QUEUE] + side.parts[SpentOn.RETURNING])
        tokens = found.both(lambda side: side.samples.prompt - side.samples.cached + side.samples.output)
        for place, name in enumerate(classes[:-1]):
            masks, higher = found.masks("priority", name), found.masks("priority", *classes[place + 1 :])
            usual_s, now_s = found.means(waits, masks)
            before_s, after_s = found.means(waits, higher)
            works = found.both(_per_second, tokens, higher)
            grown_s, above_s = now_s - usual_s, after_s - before_s
            if not enough(masks) or grown_s < LEAST_EXCESS_S or works[1] < LEAST_ARRIVALS * works[0]:
                continue
            if above_s > 0.5 * grown_s:
                continue  # all classes wait alike
            preempted = found.window.mean(found.window.samples.preemptions, masks[1])
            values = found.window.parts.total - np.where(masks[1], np.maximum(0.0, waits[1] - usual_s), 0.0)
            yield Suspect(
                CauseKind.PREEMPTED,
                name,
                values,
                found.window.samples.weight,
                (
                    f"requests of class {name} waited {ms(usual_s)} on average, then {ms(now_s)}; "
                    f"{preempted:.2f} preemptions per request",
                    f"higher classes requested {works[0]:.0f} tokens per second, then {works[1]:.0f}",
                    f"control: the wait of higher classes changed by {ms(above_s)}",
                ),
                found.rates(higher),
            )

    def _capacity(self) -> Iterator[Suspect]:
        before, after = self._capacities()
        if after >= 0.9 * before or not after:
            return
        found, model = self._found, self._found.model
        lost = before - after
        columns = found.both(
            lambda side: np.array([float(moment.ready.get(model, 0)) for moment in side.moments])
        )
        yield Suspect(
            CauseKind.CAPACITY_LOST,
            model,
            found.window.parts.total - self._unloaded(("", "capacity")),
            found.window.samples.weight,
            (f"{before:.3g} replicas served on average, then {after:.3g}: {lost:.2g} fewer",),
            (-columns[0], -columns[1]),
            1.0 if len(columns[0]) and len(columns[1]) else 1e-6,
        )


def _per_second(side: Side, values: Floats, mask: Mask) -> float:
    return side.mean(values, mask) * side.rate(mask)


def _positive(values: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    whole = sum(max(0.0, value) for value in values.values())
    return {key: max(0.0, value) / whole if whole > 0 else 0.0 for key, value in values.items()}


def _log_ratio(before: float, after: float) -> float:
    return float(np.log(after / before)) if before > 0 and after > 0 else 0.0


def _log_mean(before: float, after: float) -> float:
    if before <= 0 or after <= 0:
        return 0.0
    return before if before == after else (after - before) / float(np.log(after / before))
