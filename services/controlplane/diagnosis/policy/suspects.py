"""The suspects of a change: for each, the window's latencies as they would be without it.

A suspect is accused only if three things hold: its own figure changed beyond chance and beyond a least size;
the part of the latency through which it acts grew; and those whom it cannot reach did not change likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from services.controlplane.diagnosis.policy.comparison import Comparison, Side
from services.controlplane.diagnosis.policy.quantiles import rises
from services.controlplane.diagnosis.policy.samples import Floats, Mask, Metric, Part, slowness

LEAST_REQUESTS: Final = 8  # sampled requests of a subject in each time
LEAST_GROWTH: Final = 1.2  # of a mean
LEAST_ARRIVALS: Final = 1.3
LEAST_HITS: Final = 0.1  # fall of the hit ratio
LEAST_SLOWNESS: Final = 1.2
LEAST_EXCESS_S: Final = 1e-3
LONG_PROMPTS: Final = 2.0  # times those of others
_LOAD_PARTS: Final = (Part.QUEUE, Part.ENGINE_WAIT, Part.BATCH, Part.BATCH_WAIT, Part.RETURNING)
_PRICE_S: Final = 1e-6
_RANKS: Final = {"batch": 0, "standard": 1, "interactive": 2}


class CauseKind(StrEnum):
    ARRIVALS_GREW = "arrivals_grew"
    PROMPTS_GREW = "prompts_grew"
    OUTPUTS_GREW = "outputs_grew"
    CACHE_HITS_FELL = "cache_hits_fell"
    SLOW_WORKER = "slow_worker"
    SLOW_VERSION = "slow_version"
    NOISY_NEIGHBOUR = "noisy_neighbour"
    PREEMPTED = "preempted"
    QUOTA_STORE_SLOW = "quota_store_slow"
    ZONE_NETWORK_SLOW = "zone_network_slow"
    READER_STALLED = "reader_stalled"
    LOG_DISK_SLOW = "log_disk_slow"
    BUCKETS_FRAGMENTED = "buckets_fragmented"
    VERSION_LOAD = "version_load"
    CAPACITY_LOST = "capacity_lost"


@dataclass(frozen=True, slots=True)
class Suspect:
    """``values`` and ``weights``: the window's requests without it. ``chance``: of its change by chance."""

    kind: CauseKind
    subject: str
    values: Floats
    weights: Floats
    chance: float
    evidence: tuple[str, ...]
    figure: tuple[Floats, Floats]  # its own figure by bucket, in the baseline and in the window


def ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def suspects_of(found: Comparison) -> Iterator[Suspect]:
    """Yield every suspect whose figure changed by the least size."""
    if not len(found.baseline.samples) or not len(found.window.samples):
        return
    yield from _log_disks(found)
    yield from _quota_store(found)
    yield from _zones(found)
    yield from _readers(found)
    yield from _engines(found)
    yield from _loads(found)
    yield from _fragmentation(found)
    yield from _Demand(found).suspects()


def _both(found: Comparison, name: str, value: str) -> tuple[Mask, Mask]:
    before, after = found.baseline.samples, found.window.samples
    return getattr(before, name) == value, getattr(after, name) == value


def _values(found: Comparison, name: str) -> list[str]:
    return sorted({str(one) for one in getattr(found.window.samples, name) if one})


def _enough(masks: tuple[Mask, Mask]) -> bool:
    return min(int(mask.sum()) for mask in masks) >= LEAST_REQUESTS


def _everyone(found: Comparison) -> tuple[Mask, Mask]:
    return np.ones(len(found.baseline.samples), bool), np.ones(len(found.window.samples), bool)


# --- what stands in the way of every request ---------------------------------------------------------


def _log_disks(found: Comparison) -> Iterator[Suspect]:
    columns = found.baseline.samples.log_s, found.window.samples.log_s
    total = found.window.parts.total
    for gateway in _values(found, "gateway"):
        masks = _both(found, "gateway", gateway)
        usual_s = found.baseline.mean(columns[0], masks[0])
        now_s = found.window.mean(columns[1], masks[1])
        if not _enough(masks) or now_s < usual_s + LEAST_EXCESS_S or now_s < LEAST_GROWTH * usual_s:
            continue
        excess = np.where(masks[1], np.clip(columns[1] - usual_s, 0.0, total), 0.0)
        yield Suspect(
            CauseKind.LOG_DISK_SLOW,
            gateway,
            total - excess,
            found.window.samples.weight,
            found.chance(columns, masks),
            (f"while a request was there, {gateway} wrote its log for {ms(usual_s)}, then for {ms(now_s)}",),
            (found.baseline.means(columns[0], masks[0]), found.window.means(columns[1], masks[1])),
        )


def _without_log(side: Side, part: Part) -> Floats:
    """Return a part less its share of the time in which the gateway wrote its log."""
    total = np.maximum(1e-9, side.parts.total)
    return np.asarray(side.parts[part] * (1 - np.minimum(1.0, side.samples.log_s / total)))


def _quota_store(found: Comparison) -> Iterator[Suspect]:
    columns = _without_log(found.baseline, Part.ADMIT), _without_log(found.window, Part.ADMIT)
    sends = _without_log(found.baseline, Part.SEND), _without_log(found.window, Part.SEND)
    masks = _everyone(found)
    usual_s, now_s = found.baseline.mean(columns[0], masks[0]), found.window.mean(columns[1], masks[1])
    if now_s < usual_s + LEAST_EXCESS_S or now_s < 1.5 * usual_s * found.host_ratio:
        return
    ratios: list[float] = []
    for gateway in _values(found, "gateway"):
        here = _both(found, "gateway", gateway)
        if _enough(here):
            before_s, after_s = (
                side.mean(column, mask)
                for side, column, mask in zip((found.baseline, found.window), columns, here, strict=True)
            )
            ratios.append((after_s - before_s) / (now_s - usual_s))
    if min(ratios, default=1.0) < 0.3:
        return  # a store is slow for all gateways alike
    excess = np.maximum(0.0, columns[1] - usual_s)
    excess = excess + np.maximum(0.0, sends[1] - found.baseline.mean(sends[0], masks[0]))
    yield Suspect(
        CauseKind.QUOTA_STORE_SLOW,
        "redis",
        found.window.parts.total - excess,
        found.window.samples.weight,
        found.chance(columns, masks),
        (
            f"admission took {ms(usual_s)} on average, then {ms(now_s)}",
            f"it did so on each of {max(1, len(ratios))} gateways",
            f"control: what their processors do took {found.host_ratio:.2f} times as long",
        ),
        (found.baseline.means(columns[0], masks[0]), found.window.means(columns[1], masks[1])),
    )


def _zones(found: Comparison) -> Iterator[Suspect]:
    columns = _without_log(found.baseline, Part.NETWORK), _without_log(found.window, Part.NETWORK)
    for name in ("worker_zone", "zone"):
        for zone in _values(found, name):
            masks = _both(found, name, zone)
            others = ~masks[0], ~masks[1]
            if not _enough(masks) or not _enough(others):
                continue
            usual_s, now_s = (
                found.baseline.mean(columns[0], masks[0]),
                found.window.mean(columns[1], masks[1]),
            )
            control_s = found.window.mean(columns[1], others[1]) - found.baseline.mean(columns[0], others[0])
            grown_s = now_s - usual_s - max(0.0, control_s)
            least_s = 1.5 * usual_s * found.host_ratio
            if grown_s < LEAST_EXCESS_S or now_s < least_s or control_s > 0.5 * (now_s - usual_s):
                continue
            excess = np.where(masks[1], np.maximum(0.0, columns[1] - usual_s), 0.0)
            yield Suspect(
                CauseKind.ZONE_NETWORK_SLOW,
                zone,
                found.window.parts.total - excess,
                found.window.samples.weight,
                found.chance(columns, masks),
                (
                    f"the way to and from workers took {ms(usual_s)} in {zone}, then {ms(now_s)}",
                    f"control: in other zones it changed by {ms(control_s)}",
                ),
                (found.baseline.means(columns[0], masks[0]), found.window.means(columns[1], masks[1])),
            )


def _readers(found: Comparison) -> Iterator[Suspect]:
    columns = found.baseline.parts[Part.READER], found.window.parts[Part.READER]
    for tenant in _values(found, "tenant"):
        masks = _both(found, "tenant", tenant)
        usual_s, now_s = found.baseline.mean(columns[0], masks[0]), found.window.mean(columns[1], masks[1])
        if masks[1].sum() < LEAST_REQUESTS or now_s < usual_s + LEAST_EXCESS_S or now_s < 1.5 * usual_s:
            continue
        if not masks[0].any():
            masks = _everyone(found)[0], masks[1]  # it is compared with the readers of others
        yield Suspect(
            CauseKind.READER_STALLED,
            tenant,
            found.window.parts.total - np.where(masks[1], np.maximum(0.0, columns[1] - usual_s), 0.0),
            found.window.samples.weight,
            found.chance(columns, masks),
            (f"streams of {tenant} waited {ms(usual_s)} for their reader on average, then {ms(now_s)}",),
            (found.baseline.means(columns[0], masks[0]), found.window.means(columns[1], masks[1])),
        )


# --- engines -----------------------------------------------------------------------------------------


def _ratios(side: Side, found: Comparison, mask: Mask) -> Floats:
    """Return the time of steps over the predicted time, by bucket."""
    samples, ratios = side.samples, []
    for bucket in np.unique(side.buckets[mask]):
        ratios.append(slowness(samples, found.prices, mask & (side.buckets == bucket)))
    return np.array(ratios)


def _faster(found: Comparison, mask: Mask, ratio: float) -> Floats:
    """Return the window's latencies with the steps of these requests faster by a ratio above 1."""
    spent = sum(found.window.parts[part] for part in (Part.OWN_PREFILL, Part.NEIGHBOURS, Part.BATCH))
    spent = spent + found.window.parts[Part.SLOWNESS] + found.window.parts[Part.ROWS]
    saved = np.where(mask, np.maximum(0.0, spent) * (1 - 1 / ratio), 0.0)
    return np.asarray(found.window.parts.total - saved)


def _engines(found: Comparison) -> Iterator[Suspect]:
    versions, workers = _values(found, "version"), _values(found, "worker")
    grown: dict[str, float] = {}
    for worker in workers:
        masks = _both(found, "worker", worker)
        if masks[1].sum() >= LEAST_REQUESTS:
            usual = slowness(found.baseline.samples, found.prices, masks[0]) if _enough(masks) else 1.0
            grown[worker] = slowness(found.window.samples, found.prices, masks[1]) / max(1e-9, usual)
    for version in versions:
        masks = _both(found, "version", version)
        yield from _version(found, version, masks, grown)
    for worker, ratio in grown.items():
        peers = [other for name, other in grown.items() if name != worker]
        usual = float(np.median(peers)) if peers else 1.0
        if not peers or ratio / usual < LEAST_SLOWNESS:
            continue
        masks = _both(found, "worker", worker)
        figure = _ratios(found.baseline, found, masks[0]), _ratios(found.window, found, masks[1])
        if not _enough(masks):
            everyone = _everyone(found)[0]
            figure = _ratios(found.baseline, found, everyone), figure[1]
        yield Suspect(
            CauseKind.SLOW_WORKER,
            worker,
            _relieved(found, _faster(found, masks[1], ratio / usual), masks[1]),
            found.window.samples.weight,
            rises(*figure),
            (
                f"steps of {worker} take {ratio:.2f} times what they took for the same work",
                f"control: {usual:.2f} times on {len(peers)} other workers",
            ),
            figure,
        )


def _relieved(found: Comparison, values: Floats, mask: Mask) -> Floats:
    """Return the values without the growth of waits for room on workers that these requests ran on."""
    reduced = values
    for part in (Part.ENGINE_WAIT, Part.QUEUE):
        usual_s, now_s = found.part_means(part)
        if now_s > usual_s + LEAST_EXCESS_S / 2:
            column = found.window.parts[part]
            everyone = mask if part is Part.ENGINE_WAIT else np.ones(len(mask), bool)
            reduced = reduced - np.where(everyone, column * (1 - usual_s / now_s), 0.0)
    return np.asarray(reduced)


def _version(
    found: Comparison, version: str, masks: tuple[Mask, Mask], grown: dict[str, float]
) -> Iterator[Suspect]:
    if masks[1].sum() < LEAST_REQUESTS:
        return
    others = ~masks[1]
    usual = slowness(found.baseline.samples, found.prices, masks[0]) if _enough(masks) else 1.0
    ratio = slowness(found.window.samples, found.prices, masks[1]) / max(1e-9, usual)
    control = found.host_ratio
    if others.sum() >= LEAST_REQUESTS:
        control = slowness(found.window.samples, found.prices, others)
    if ratio / max(1.0, control) < LEAST_SLOWNESS:
        return
    here = {str(worker) for worker in found.window.samples.worker[masks[1]] if worker}
    slow = [grown[worker] for worker in here if worker in grown]
    if len(slow) > 1 and not others.any() and min(slow) < 1 + (ratio - 1) / 3:
        return  # not all workers of the version are slow: it is the workers
    if len(slow) == 1 and not others.any() and masks[0].any():
        return  # one worker with one version: there is no control
    figure = _ratios(found.baseline, found, _everyone(found)[0]), _ratios(found.window, found, masks[1])
    control_text = (
        f"control: {control:.2f} times in other versions"
        if others.any()
        else f"all {len(slow)} workers of it are slow alike, and gateways took {control:.2f} times as long"
    )
    yield Suspect(
        CauseKind.SLOW_VERSION,
        version,
        _relieved(found, _faster(found, masks[1], ratio / max(1.0, control)), masks[1]),
        found.window.samples.weight,
        rises(*figure),
        (
            f"steps of {version[:19]} take {ratio:.2f} times what the same work took in the baseline",
            control_text,
        ),
        figure,
    )


def _loads(found: Comparison) -> Iterator[Suspect]:
    """Yield workers that loaded a version while they served."""
    loading = {worker for moment in found.window.moments for worker in moment.loading}
    for worker in sorted(loading):
        before = [float(worker in moment.loading) for moment in found.baseline.moments]
        times = [moment.unix_s for moment in found.window.moments if worker in moment.loading]
        masks = _both(found, "worker", worker)
        samples = found.window.samples
        began_s = samples.ended_s - samples.stages.sum(axis=1)
        during = masks[1] & (samples.ended_s >= min(times) - 2) & (began_s <= max(times) + 2)
        rest = masks[0]
        if during.sum() < LEAST_REQUESTS or rest.sum() < LEAST_REQUESTS or np.mean(before or [0.0]) > 0.1:
            continue
        usual = slowness(found.baseline.samples, found.prices, rest)
        ratio = slowness(samples, found.prices, during) / max(1e-9, usual)
        peers = slowness(samples, found.prices, ~masks[1])
        waits = found.baseline.parts[Part.ENGINE_WAIT], found.window.parts[Part.ENGINE_WAIT]
        usual_s, now_s = found.baseline.mean(waits[0], rest), found.window.mean(waits[1], during)
        if ratio / max(1.0, peers) < LEAST_SLOWNESS and now_s < usual_s + 2 * LEAST_EXCESS_S:
            continue
        values = _faster(found, during, max(1.0, ratio / max(1.0, peers)))
        values = values - np.where(during, np.maximum(0.0, waits[1] - usual_s), 0.0)
        figure = _ratios(found.baseline, found, rest), _ratios(found.window, found, during)
        yield Suspect(
            CauseKind.VERSION_LOAD,
            worker,
            values,
            samples.weight,
            min(rises(*figure), found.chance(waits, (rest, during))),
            (
                f"{worker} fetched or loaded a version for about {max(times) - min(times) + 2:.0f} s; "
                f"its steps took {ratio:.2f} times as long then",
                f"control: {peers:.2f} times on other workers",
            ),
            figure,
        )


# --- rows --------------------------------------------------------------------------------------------


def _fragmentation(found: Comparison) -> Iterator[Suspect]:
    sides = found.baseline, found.window
    masks = tuple(side.samples.batch_rows > 0 for side in sides)
    if min(int(mask.sum()) for mask in masks) < LEAST_REQUESTS:
        return
    rows = tuple(side.samples.batch_rows for side in sides)
    spread = [
        float(np.exp(_entropy(side.samples.batch_width[mask])))
        for side, mask in zip(sides, masks, strict=True)
    ]
    usual, now = (side.mean(column, mask) for side, column, mask in zip(sides, rows, masks, strict=True))
    rates = [side.rate(mask) for side, mask in zip(sides, masks, strict=True)]
    if spread[1] < LEAST_GROWTH * spread[0] or rates[1] > LEAST_ARRIVALS * rates[0]:
        return
    values = found.window.parts.total
    for part in (Part.BATCH_WAIT, Part.ROWS, Part.NETWORK):
        usual_s, now_s = found.part_means(part)
        if now_s > usual_s:
            values = values - np.where(masks[1], found.window.parts[part] * (1 - usual_s / now_s), 0.0)
    widths = tuple(side.samples.batch_width for side in sides)
    figure = tuple(
        np.array(
            [
                np.exp(_entropy(side.samples.batch_width[mask & (side.buckets == at)]))
                for at in np.unique(side.buckets)
            ]
        )
        for side, mask in zip(sides, masks, strict=True)
    )
    yield Suspect(
        CauseKind.BUCKETS_FRAGMENTED,
        str(found.window.samples.model[0]),
        values,
        found.window.samples.weight,
        rises(figure[0], figure[1]),
        (
            f"rows of {spread[0]:.1f} widths, then of {spread[1]:.1f}, share {len(set(widths[1]))} buckets",
            f"a batch had {usual:.1f} rows on average, then {now:.1f}",
        ),
        (figure[0], figure[1]),
    )


def _entropy(values: Floats) -> float:
    """Return the entropy of the values' frequencies: that of n equally frequent ones is ln n."""
    if not len(values):
        return 0.0
    _, counts = np.unique(values, return_counts=True)
    ratios = counts / counts.sum()
    return float(-(ratios * np.log(ratios)).sum())


# --- demand ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Use:
    """What one tenant asked of the devices in one time: requests per second, and means of its requests."""

    rate: float
    prompt: float
    hit_ratio: float
    output: float

    @property
    def uncached(self) -> float:
        return self.prompt * (1 - self.hit_ratio)


class _Demand:
    """Tenants by the device time that they asked for, and what its growth explains.

    Waits follow the load: the work per second over the capacity. The growth of the load is divided over
    tenants, and over the factors of each, in proportion to logarithmic means (Ang, The LMDI Approach to
    Decomposition Analysis, 2005), so that no factor's share depends on the order of replacing them.
    """

    def __init__(self, found: Comparison) -> None:
        self._found = found
        self._tenants = _values(found, "tenant")
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
        masks = _both(self._found, "tenant", tenant)
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
        for part in (*_LOAD_PARTS, Part.NEIGHBOURS):
            usual_s, now_s = found.part_means(part)
            share = (self._prefills if part is Part.NEIGHBOURS else self._load).get(key, 0.0)
            if now_s > usual_s and share:
                saved = saved + share * found.window.parts[part] * (1 - usual_s / now_s)
        return np.asarray(saved)

    # --- suspects --------------------------------------------------------------------------------

    def _prompts(self, tenant: str) -> Iterator[Suspect]:
        before, after = self._uses[tenant]
        masks = _both(self._found, "tenant", tenant)
        if not _enough(masks) or after.prompt < LEAST_GROWTH * before.prompt:
            return
        found, ratio = self._found, before.prompt / after.prompt
        own = found.window.parts[Part.OWN_PREFILL] + found.window.parts[Part.ROWS]
        saved = np.where(masks[1], own * (1 - ratio), 0.0)
        columns = found.baseline.samples.prompt, found.window.samples.prompt
        yield self._suspect(
            CauseKind.PROMPTS_GREW,
            tenant,
            saved + self._unloaded((tenant, "prompt")),
            columns,
            masks,
            f"prompts of {tenant}: {before.prompt:.0f} tokens on average, then {after.prompt:.0f}",
        )

    def _outputs(self, tenant: str) -> Iterator[Suspect]:
        before, after = self._uses[tenant]
        masks = _both(self._found, "tenant", tenant)
        if not _enough(masks) or after.output < LEAST_GROWTH * max(1.0, before.output):
            return
        found, saved = self._found, np.zeros(len(masks[1]))
        if found.metric is Metric.TOTAL:
            decode = found.window.samples.stages[:, 6] - found.window.parts[Part.READER]
            saved = np.where(masks[1], np.maximum(0.0, decode) * (1 - before.output / after.output), 0.0)
        columns = found.baseline.samples.output, found.window.samples.output
        yield self._suspect(
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
            masks = _both(self._found, "tenant", tenant)
            if _enough(masks) and before.hit_ratio - after.hit_ratio >= LEAST_HITS:
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
            saved = np.where(masks[1], found.window.parts[Part.OWN_PREFILL] * lost, 0.0)
            saved = saved + self._unloaded((tenant, "cache"))
            model_saved = model_saved + saved
            ratios = f"{before.hit_ratio:.0%} of its prompt tokens, then {after.hit_ratio:.0%}"
            text = f"cache hits of {tenant}: {ratios}"
            if not whole:
                yield self._suspect(
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
            yield self._suspect(
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
        masks = _both(found, "tenant", tenant)
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
            for part in (Part.NEIGHBOURS, Part.QUEUE, Part.BATCH)
        }
        noisy = is_long and grown[Part.NEIGHBOURS] >= max(grown[Part.QUEUE], grown[Part.BATCH])
        weights = np.where(masks[1], before.rate / after.rate, 1.0) * found.window.samples.weight
        values = found.window.parts.total - self._unloaded((tenant, "rate"))
        texts = [f"{tenant} sent {before.rate:.3g} requests per second, then {after.rate:.3g}"]
        if noisy:
            texts.append(
                f"its prompts have {uncached[0]:.0f} tokens to compute, those of others {uncached[1]:.0f}; "
                f"they lengthen the steps of others by {ms(grown[Part.NEIGHBOURS])} per request"
            )
        yield Suspect(
            CauseKind.NOISY_NEIGHBOUR if noisy else CauseKind.ARRIVALS_GREW,
            tenant,
            values,
            weights,
            rises(*figure),
            tuple(texts),
            figure,
        )

    def _overtaken(self) -> Iterator[Suspect]:
        """Yield the classes that wait because higher ones ask for more."""
        found = self._found
        classes = sorted(_values(found, "priority"), key=lambda name: _RANKS.get(name, 0))
        waits = [
            side.parts[Part.QUEUE] + side.parts[Part.RETURNING] for side in (found.baseline, found.window)
        ]
        for place, name in enumerate(classes[:-1]):
            masks = _both(found, "priority", name)
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
            if not _enough(masks) or grown_s < LEAST_EXCESS_S or works[1] < LEAST_ARRIVALS * works[0]:
                continue
            if above_s > 0.5 * grown_s:
                continue  # all classes wait alike
            figure = (
                found.baseline.rates(higher[0], found.bucket_s),
                found.window.rates(higher[1], found.bucket_s),
            )
            tenants = {str(one) for one in found.window.samples.tenant[masks[1]]}
            preempted = found.window.mean(found.window.samples.preemptions, masks[1])
            values = found.window.parts.total - np.where(masks[1], np.maximum(0.0, waits[1] - usual_s), 0.0)
            yield Suspect(
                CauseKind.PREEMPTED,
                tenants.pop() if len(tenants) == 1 else name,
                values,
                found.window.samples.weight,
                max(found.chance((waits[0], waits[1]), masks), rises(*figure)),
                (
                    f"requests of class {name} waited {ms(usual_s)} on average, then {ms(now_s)}; "
                    f"{preempted:.2f} preemptions per request",
                    f"higher classes asked for {works[0]:.0f} tokens per second, then {works[1]:.0f}",
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
            rises(-columns[0], -columns[1]) if len(columns[0]) and len(columns[1]) else 1e-6,
            (f"{before:.3g} replicas served on average, then {after:.3g}: {lost:.2g} fewer",),
            (-columns[0], -columns[1]),
        )

    def _suspect(
        self,
        kind: CauseKind,
        subject: str,
        saved: Floats,
        columns: tuple[Floats, Floats],
        masks: tuple[Mask, Mask],
        text: str,
        *,
        falls: bool = False,
    ) -> Suspect:
        found, sign = self._found, -1.0 if falls else 1.0
        return Suspect(
            kind,
            subject,
            found.window.parts.total - saved,
            found.window.samples.weight,
            found.chance(columns, masks, falls=falls),
            (text,),
            (
                sign * found.baseline.means(columns[0], masks[0]),
                sign * found.window.means(columns[1], masks[1]),
            ),
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
