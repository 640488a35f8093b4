"""Suspects by what tenants request of devices: arrivals, lengths, cache hits, classes; and lost capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.controlplane.diagnosis.policy.comparison import TwoTimes
from services.controlplane.diagnosis.policy.samples import DECODE, Floats, Metric, SpentOn
from services.controlplane.diagnosis.policy.suspects import (
    LEAST_ARRIVALS,
    LEAST_EXCESS_S,
    LEAST_GROWTH,
    LEAST_REQUESTS,
    CauseKind,
    Suspect,
    both,
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

    def suspects(self) -> Iterator[Suspect]:
        yield from self._cache()
        for tenant in self._tenants:
            yield from self._prompts(tenant)
            yield from self._outputs(tenant)
            yield from self._arrivals(tenant)
        yield from self._overtaken()
        yield from self._capacity()

    # --- figures ---------------------------------------------------------------------------------

    def _use(self, tenant: str) -> tuple[_Use, _Use]:
        found = []
        masks = both(self._found, "tenant", tenant)
        for side, mask in zip((self._found.baseline, self._found.window), masks, strict=True):
            samples = side.samples
            prompt = side.mean(samples.prompt, mask)
            hits = side.mean(samples.cached, mask) / prompt if prompt else 0.0
            found.append(_Use(side.rate(mask), prompt, hits, side.mean(samples.output, mask)))
        return found[0], found[1]

    def _output_price(self) -> float:
        """Return the seconds of device time per output token in the baseline: its part of a step."""
        samples, prices = self._found.baseline.samples, self._found.prices
        steps = samples.after.sum(axis=0) if len(samples) else np.zeros(5)
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
        found = []
        model = str(self._found.window.samples.model[0])
        for side in (self._found.baseline, self._found.window):
            ready = [moment.ready[model] for moment in side.moments if model in moment.ready]
            workers = len({one for one in side.samples.worker if one})
            found.append(float(np.mean(ready)) if ready else float(workers))
        return found[0], found[1]

    def _unloaded(self, key: tuple[str, str]) -> Floats:
        """Return what the window's requests would save of waits without this factor's growth."""
        found, saved = self._found, np.zeros(len(self._found.window.samples))
        for part in (*_LOAD_PARTS, SpentOn.NEIGHBOURS):
            usual_s, now_s = found.part_means(part)
            share = (self._prefills if part is SpentOn.NEIGHBOURS else self._load).get(key, 0.0)
            if now_s > usual_s and share:
                saved = saved + share * found.window.parts[part] * (1 - usual_s / now_s)
        return np.asarray(saved)

    # --- suspects --------------------------------------------------------------------------------

    def _prompts(self, tenant: str) -> Iterator[Suspect]:
        before, after = self._uses[tenant]
        masks = both(self._found, "tenant", tenant)
        if not enough(masks) or after.prompt < LEAST_GROWTH * max(1.0, before.prompt):
            return
        found, ratio = self._found, before.prompt / after.prompt
        own = found.window.parts[SpentOn.OWN_PREFILL] + found.window.parts[SpentOn.ROWS]
        saved = np.where(masks[1], own * (1 - ratio), 0.0)
        columns = found.baseline.samples.prompt, found.window.samples.prompt
        yield suspect_of(
            found,
            CauseKind.PROMPTS_GREW,
            tenant,
            saved + self._unloaded((tenant, "prompt")),
            columns,
            masks,
            f"prompts of {tenant}: {before.prompt:.0f} tokens on average, then {after.prompt:.0f}",
        )

    def _outputs(self, tenant: str) -> Iterator[Suspect]:
        before, after = self._uses[tenant]
        masks = both(self._found, "tenant", tenant)
        if not enough(masks) or after.output < LEAST_GROWTH * max(1.0, before.output):
            return
        found, saved = self._found, np.zeros(len(masks[1]))
        if found.metric is Metric.TOTAL:
            decode = found.window.samples.stages[:, DECODE] - found.window.parts[SpentOn.READER]
            saved = np.where(masks[1], np.maximum(0.0, decode) * (1 - before.output / after.output), 0.0)
        columns = found.baseline.samples.output, found.window.samples.output
        yield suspect_of(
            found,
            CauseKind.OUTPUTS_GREW,
            tenant,
            saved + self._unloaded((tenant, "output")),
            columns,
            masks,
            f"outputs of {tenant}: {before.output:.0f} tokens on average, then {after.output:.0f}",
        )

    def _cache(self) -> Iterator[Suspect]:
        fallen = []
        for tenant, (before, after) in self._uses.items():
            masks = both(self._found, "tenant", tenant)
            if enough(masks) and before.hit_ratio - after.hit_ratio >= LEAST_HITS:
                fallen.append((tenant, masks, before, after))
        cached = [tenant for tenant, (before, _) in self._uses.items() if before.hit_ratio >= LEAST_HITS]
        found = self._found
        columns = tuple(
            side.samples.cached / np.maximum(1.0, side.samples.prompt)
            for side in (found.baseline, found.window)
        )
        whole = len(fallen) > 1 and len(fallen) == len(cached)
        model_saved = np.zeros(len(found.window.samples))
        for tenant, masks, before, after in fallen:
            lost = after.uncached and (before.hit_ratio - after.hit_ratio) * after.prompt / after.uncached
            saved = np.where(masks[1], found.window.parts[SpentOn.OWN_PREFILL] * lost, 0.0)
            saved = saved + self._unloaded((tenant, "cache"))
            model_saved = model_saved + saved
            ratios = f"{before.hit_ratio:.0%} of its prompt tokens, then {after.hit_ratio:.0%}"
            text = f"cache hits of {tenant}: {ratios}"
            if not whole:
                yield suspect_of(
                    found,
                    CauseKind.CACHE_HITS_FELL,
                    tenant,
                    saved,
                    (columns[0], columns[1]),
                    masks,
                    text,
                    falls=True,
                )
        if whole:
            names = [tenant for tenant, *_ in fallen]
            masks = np.isin(found.baseline.samples.tenant, names), np.isin(found.window.samples.tenant, names)
            yield suspect_of(
                found,
                CauseKind.CACHE_HITS_FELL,
                str(found.window.samples.model[0]),
                model_saved,
                (columns[0], columns[1]),
                masks,
                f"cache hits fell for all {len(names)} tenants that had any",
                falls=True,
            )

    def _arrivals(self, tenant: str) -> Iterator[Suspect]:
        """Yield a tenant that sends more: as a neighbour if its prompts stand in the steps of others."""
        found = self._found
        before, after = self._uses[tenant]
        masks = both(found, "tenant", tenant)
        if masks[1].sum() < LEAST_REQUESTS or after.rate < LEAST_ARRIVALS * before.rate:
            return
        figure = (
            found.baseline.rates(masks[0], found.bucket_s),
            found.window.rates(masks[1], found.bucket_s),
        )
        others = tuple(~mask for mask in masks)
        uncached = [
            float(np.average(np.maximum(0.0, one.prompt - one.cached), weights=one.weight))
            for one in (found.window.samples.where(masks[1]), found.window.samples.where(others[1]))
            if len(one)
        ]
        is_long = len(uncached) == 2 and uncached[0] >= LONG_PROMPTS * uncached[1]
        grown = {
            part: found.window.mean(found.window.parts[part], others[1])
            - found.baseline.mean(found.baseline.parts[part], others[0])
            for part in (SpentOn.NEIGHBOURS, SpentOn.QUEUE, SpentOn.BATCH)
        }
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
            figure,
        )

    def _overtaken(self) -> Iterator[Suspect]:
        """Yield the classes that wait because higher ones ask for more."""
        found = self._found
        classes = sorted(values_of(found, "priority"), key=lambda name: _RANKS.get(name, 0))
        waits = [
            side.parts[SpentOn.QUEUE] + side.parts[SpentOn.RETURNING]
            for side in (found.baseline, found.window)
        ]
        for place, name in enumerate(classes[:-1]):
            masks = both(found, "priority", name)
            higher = tuple(
                np.isin(side.samples.priority, classes[place + 1 :])
                for side in (found.baseline, found.window)
            )
            usual_s, now_s = found.baseline.mean(waits[0], masks[0]), found.window.mean(waits[1], masks[1])
            above_s = found.window.mean(waits[1], higher[1]) - found.baseline.mean(waits[0], higher[0])
            works = [
                float(
                    (side.samples.weight * (side.samples.prompt - side.samples.cached + side.samples.output))[
                        mask
                    ].sum()
                )
                / side.lasted_s
                for side, mask in zip((found.baseline, found.window), higher, strict=True)
            ]
            grown_s = now_s - usual_s
            if not enough(masks) or grown_s < LEAST_EXCESS_S or works[1] < LEAST_ARRIVALS * works[0]:
                continue
            if above_s > 0.5 * grown_s:
                continue  # all classes wait alike
            figure = (
                found.baseline.rates(higher[0], found.bucket_s),
                found.window.rates(higher[1], found.bucket_s),
            )
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
                figure,
            )

    def _capacity(self) -> Iterator[Suspect]:
        before, after = self._capacities()
        if after >= 0.9 * before or not after:
            return
        found, model = self._found, str(self._found.window.samples.model[0])
        lost = before - after
        columns = [
            np.array([float(moment.ready.get(model, 0)) for moment in side.moments])
            for side in (found.baseline, found.window)
        ]
        yield Suspect(
            CauseKind.CAPACITY_LOST,
            model,
            found.window.parts.total - self._unloaded(("", "capacity")),
            found.window.samples.weight,
            (f"{before:.3g} replicas served on average, then {after:.3g}: {lost:.2g} fewer",),
            (-columns[0], -columns[1]),
            1.0 if len(columns[0]) and len(columns[1]) else 1e-6,
        )


def _positive(values: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    whole = sum(max(0.0, value) for value in values.values())
    return {key: max(0.0, value) / whole if whole > 0 else 0.0 for key, value in values.items()}


def _log_ratio(before: float, after: float) -> float:
    return float(np.log(after / before)) if before > 0 and after > 0 else 0.0


def _log_mean(before: float, after: float) -> float:
    if before <= 0 or after <= 0:
        return 0.0
    return before if before == after else (after - before) / float(np.log(after / before))
