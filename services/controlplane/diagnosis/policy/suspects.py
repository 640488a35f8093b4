"""The suspects of a change: for each, the window's latencies as they would be without it.

A suspect is accused only if three things hold: its own figure changed beyond chance and beyond a least size;
the part of the latency through which it acts grew; and those whom it cannot reach did not change likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

import numpy as np

from services.controlplane.diagnosis.policy.comparison import Columns, Masks, Side, TwoTimes
from services.controlplane.diagnosis.policy.quantiles import quantile, rises
from services.controlplane.diagnosis.policy.samples import Floats, Mask, SpentOn, slowness

LEAST_REQUESTS: Final = 8  # sampled requests of a subject in each time
LEAST_GROWTH: Final = 1.2  # least ratio of two means
LEAST_ARRIVALS: Final = 1.3
LEAST_SLOWNESS: Final = 1.2
LEAST_EXCESS_S: Final = 1e-3


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


@dataclass(frozen=True)
class Suspect:
    """A possible cause, and the window's requests as they would be without it."""

    kind: CauseKind
    subject: str
    values: Floats  # latencies without it
    weights: Floats  # weights without it
    evidence: tuple[str, ...]
    figure: Columns  # its own figure by bucket, in the baseline and in the window
    most_chance: float = 1.0  # probability of its change by another test, 1 without one

    @cached_property
    def chance(self) -> float:
        """Return the probability of its change without a cause."""
        return min(self.most_chance, rises(*self.figure))


def suspect_of(
    found: TwoTimes,
    kind: CauseKind,
    subject: str,
    saved: Floats,
    columns: Columns,
    masks: Masks,
    *evidence: str,
    falls: bool = False,
) -> Suspect:
    """Return the suspect whose figure is the mean of these requests' values of a column, in both times.

    ``saved``: what each request of the window would save without it.
    """
    sign = -1.0 if falls else 1.0
    before, after = found.by_bucket(columns, masks)
    values = found.window.parts.total - saved
    return Suspect(
        kind, subject, values, found.window.samples.weight, evidence, (sign * before, sign * after)
    )


def ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def suspects_of(found: TwoTimes) -> Iterator[Suspect]:
    """Yield every suspect whose figure changed by the least size."""
    yield from _log_disks(found)
    yield from _quota_store(found)
    yield from _zones(found)
    yield from _readers(found)
    yield from _engines(found)
    yield from _loads(found)
    yield from _fragmentation(found)


def values_of(found: TwoTimes, name: str) -> list[str]:
    return sorted({str(one) for one in getattr(found.window.samples, name) if one})


def enough(masks: Masks) -> bool:
    return min(int(mask.sum()) for mask in masks) >= LEAST_REQUESTS


# --- what stands in the way of every request ---------------------------------------------------------


def _log_disks(found: TwoTimes) -> Iterator[Suspect]:
    columns = found.column("log_s")
    total = found.window.parts.total
    for gateway in values_of(found, "gateway"):
        masks = found.masks("gateway", gateway)
        usual_s, now_s = found.means(columns, masks)
        if not enough(masks) or now_s < usual_s + LEAST_EXCESS_S or now_s < LEAST_GROWTH * usual_s:
            continue
        excess = np.where(masks[1], np.clip(columns[1] - usual_s, 0.0, total), 0.0)
        yield suspect_of(
            found,
            CauseKind.LOG_DISK_SLOW,
            gateway,
            excess,
            columns,
            masks,
            f"while a request was there, {gateway} wrote its log for {ms(usual_s)}, then for {ms(now_s)}",
        )


def _without_log(found: TwoTimes, part: SpentOn) -> Columns:
    """Return a part less its share of the time in which the gateway wrote its log."""

    def rest(side: Side) -> Floats:
        total = np.maximum(1e-9, side.parts.total)
        return np.asarray(side.parts[part] * (1 - np.minimum(1.0, side.samples.log_s / total)))

    return found.both(rest)


def _floor_s(side: Side, column: Floats, mask: Mask) -> float:
    """Return the lower quartile of these requests: what delays every request raises it, what delays some does
    not."""
    return quantile(column[mask], side.samples.weight[mask], 0.25)


def _floors_s(found: TwoTimes, columns: Columns, masks: Masks) -> tuple[float, float]:
    """Return the floor that hosts as loaded as the window's would have, and by how much it is exceeded."""
    usual_s, now_s = found.both(_floor_s, columns, masks)
    return found.host_ratio * usual_s, now_s - found.host_ratio * usual_s


def _quota_store(found: TwoTimes) -> Iterator[Suspect]:
    columns = _without_log(found, SpentOn.ADMIT)
    sends = _without_log(found, SpentOn.SEND)
    masks = found.everyone
    usual_s, now_s = found.means(columns, masks)
    expected_s, grown_s = _floors_s(found, columns, masks)
    if grown_s < max(LEAST_EXCESS_S, expected_s):
        return
    ratios: list[float] = []
    for gateway in values_of(found, "gateway"):
        here = found.masks("gateway", gateway)
        if enough(here):
            before_s, after_s = found.means(columns, here)
            ratios.append((after_s - before_s) / (now_s - usual_s))
    if min(ratios, default=1.0) < 0.3:
        return  # a store is slow for all gateways alike
    excess = np.clip(columns[1] - usual_s, 0.0, 2 * grown_s)
    excess = excess + np.clip(sends[1] - found.baseline.mean(sends[0], masks[0]), 0.0, 2 * grown_s)
    yield suspect_of(
        found,
        CauseKind.QUOTA_STORE_SLOW,
        "redis",
        excess,
        columns,
        masks,
        f"admission took {ms(usual_s)} on average, then {ms(now_s)}",
        f"it did so on each of {max(1, len(ratios))} gateways",
        f"control: what their processors do took {found.host_ratio:.2f} times as long",
    )


def _zones(found: TwoTimes) -> Iterator[Suspect]:
    columns = _without_log(found, SpentOn.NETWORK)
    for name in ("worker_zone", "zone"):
        for zone in values_of(found, name):
            masks = found.masks(name, zone)
            others = ~masks[0], ~masks[1]
            if not enough(masks) or not enough(others):
                continue
            usual_s, now_s = found.means(columns, masks)
            before_s, after_s = found.means(columns, others)
            control_s = after_s - before_s
            expected_s, grown_s = _floors_s(found, columns, masks)
            if grown_s < max(LEAST_EXCESS_S, expected_s / 2) or control_s > 0.5 * (now_s - usual_s):
                continue
            excess = np.where(masks[1], np.clip(columns[1] - usual_s, 0.0, 2 * grown_s), 0.0)
            yield suspect_of(
                found,
                CauseKind.ZONE_NETWORK_SLOW,
                zone,
                excess,
                columns,
                masks,
                f"the way to and from workers took {ms(usual_s)} in {zone}, then {ms(now_s)}",
                f"control: in other zones it changed by {ms(control_s)}",
            )


def _readers(found: TwoTimes) -> Iterator[Suspect]:
    columns = found.part(SpentOn.READER)
    for tenant in values_of(found, "tenant"):
        masks = found.masks("tenant", tenant)
        usual_s, now_s = found.means(columns, masks)
        if masks[1].sum() < LEAST_REQUESTS or now_s < usual_s + LEAST_EXCESS_S or now_s < 1.5 * usual_s:
            continue
        if not masks[0].any():
            masks = found.everyone[0], masks[1]  # it is compared with the readers of others
        yield suspect_of(
            found,
            CauseKind.READER_STALLED,
            tenant,
            np.where(masks[1], np.maximum(0.0, columns[1] - usual_s), 0.0),
            columns,
            masks,
            f"streams of {tenant} waited {ms(usual_s)} for their reader on average, then {ms(now_s)}",
        )


# --- engines -----------------------------------------------------------------------------------------


def _grown(found: TwoTimes, masks: Masks) -> float:
    """Return the slowness of these requests over their usual one."""
    usual = slowness(found.baseline.samples, found.prices, masks[0]) if enough(masks) else 1.0
    return slowness(found.window.samples, found.prices, masks[1]) / max(1e-9, usual)


def _ratios(found: TwoTimes, masks: Masks) -> Columns:
    """Return the time of steps over the predicted time, by bucket."""

    def ratios(side: Side, mask: Mask) -> Floats:
        places = [mask & (side.buckets == bucket) for bucket in np.unique(side.buckets[mask])]
        return np.array([slowness(side.samples, found.prices, place) for place in places])

    return found.both(ratios, masks)


def _faster(found: TwoTimes, mask: Mask, ratio: float) -> Floats:
    """Return the window's latencies with the steps of these requests faster by a ratio above 1."""
    spent = sum(found.window.parts[part] for part in (SpentOn.OWN_PREFILL, SpentOn.NEIGHBOURS, SpentOn.BATCH))
    spent = spent + found.window.parts[SpentOn.SLOWNESS] + found.window.parts[SpentOn.ROWS]
    saved = np.where(mask, np.maximum(0.0, spent) * (1 - 1 / ratio), 0.0)
    return np.asarray(found.window.parts.total - saved)


def _engines(found: TwoTimes) -> Iterator[Suspect]:
    versions, workers = values_of(found, "version"), values_of(found, "worker")
    grown: dict[str, float] = {}
    for worker in workers:
        masks = found.masks("worker", worker)
        if masks[1].sum() >= LEAST_REQUESTS:
            grown[worker] = _grown(found, masks)
    for version in versions:
        masks = found.masks("version", version)
        yield from _version(found, version, masks, grown)
    for worker, ratio in grown.items():
        peers = [other for name, other in grown.items() if name != worker]
        usual = float(np.median(peers)) if peers else 1.0
        if not peers or ratio / usual < LEAST_SLOWNESS:
            continue
        masks = found.masks("worker", worker)
        figure = _ratios(found, masks if enough(masks) else (found.everyone[0], masks[1]))
        yield Suspect(
            CauseKind.SLOW_WORKER,
            worker,
            _relieved(found, _faster(found, masks[1], ratio / usual), masks[1]),
            found.window.samples.weight,
            (
                f"steps of {worker} take {ratio:.2f} times what they took for the same work",
                f"control: {usual:.2f} times on {len(peers)} other workers",
            ),
            figure,
        )


def _relieved(found: TwoTimes, values: Floats, mask: Mask) -> Floats:
    """Return the values without the growth of waits for room on workers that these requests ran on."""
    here = np.where(mask, found.excess(SpentOn.ENGINE_WAIT, LEAST_EXCESS_S / 2), 0.0)
    return np.asarray(values - here - found.excess(SpentOn.QUEUE, LEAST_EXCESS_S / 2))


def _version(found: TwoTimes, version: str, masks: Masks, grown: dict[str, float]) -> Iterator[Suspect]:
    if masks[1].sum() < LEAST_REQUESTS:
        return
    others = ~masks[1]
    ratio = _grown(found, masks)
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
    figure = _ratios(found, (found.everyone[0], masks[1]))
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
        (
            f"steps of {version[:19]} take {ratio:.2f} times what the same work took in the baseline",
            control_text,
        ),
        figure,
    )


def _loads(found: TwoTimes) -> Iterator[Suspect]:
    """Yield workers that loaded a version while they served."""
    loading = {worker for moment in found.window.moments for worker in moment.loading}
    for worker in sorted(loading):
        before = [float(worker in moment.loading) for moment in found.baseline.moments]
        times = [moment.unix_s for moment in found.window.moments if worker in moment.loading]
        masks = found.masks("worker", worker)
        samples = found.window.samples
        began_s = samples.ended_s - samples.stages.sum(axis=1)
        during = masks[1] & (samples.ended_s >= min(times) - 2) & (began_s <= max(times) + 2)
        rest = masks[0]
        if during.sum() < LEAST_REQUESTS or rest.sum() < LEAST_REQUESTS or np.mean(before or [0.0]) > 0.1:
            continue
        ratio = _grown(found, (rest, during))
        peers = slowness(samples, found.prices, ~masks[1])
        waits = found.part(SpentOn.ENGINE_WAIT)
        usual_s, now_s = found.means(waits, (rest, during))
        if ratio / max(1.0, peers) < LEAST_SLOWNESS and now_s < usual_s + 2 * LEAST_EXCESS_S:
            continue
        values = _faster(found, during, max(1.0, ratio / max(1.0, peers)))
        values = values - np.where(during, np.maximum(0.0, waits[1] - usual_s), 0.0)
        figure = _ratios(found, (rest, during))
        yield Suspect(
            CauseKind.VERSION_LOAD,
            worker,
            values,
            samples.weight,
            (
                f"{worker} fetched or loaded a version for about {max(times) - min(times) + 2:.0f} s; "
                f"its steps took {ratio:.2f} times as long then",
                f"control: {peers:.2f} times on other workers",
            ),
            figure,
            rises(*found.by_bucket(waits, (rest, during))),
        )


# --- rows --------------------------------------------------------------------------------------------


def _fragmentation(found: TwoTimes) -> Iterator[Suspect]:
    masks = found.both(lambda side: side.samples.batch_rows > 0)
    if not enough(masks):
        return
    spread = found.both(_spread, masks)
    usual, now = found.means(found.column("batch_rows"), masks)
    rates = found.both(Side.rate, masks)
    if spread[1] < LEAST_GROWTH * spread[0] or rates[1] > LEAST_ARRIVALS * rates[0]:
        return
    saved = sum(found.excess(part) for part in (SpentOn.BATCH_WAIT, SpentOn.ROWS, SpentOn.NETWORK))
    buckets = len(set(found.window.samples.batch_width))

    def by_bucket(side: Side, mask: Mask) -> Floats:
        return np.array([_spread(side, mask & (side.buckets == at)) for at in np.unique(side.buckets)])

    yield Suspect(
        CauseKind.BUCKETS_FRAGMENTED,
        found.model,
        found.window.parts.total - np.where(masks[1], saved, 0.0),
        found.window.samples.weight,
        (
            f"rows of {spread[0]:.1f} widths, then of {spread[1]:.1f}, share {buckets} buckets",
            f"a batch had {usual:.1f} rows on average, then {now:.1f}",
        ),
        found.both(by_bucket, masks),
    )


def _spread(side: Side, mask: Mask) -> float:
    """Return the perplexity of the widths of these rows: that of n equally frequent widths is n."""
    _, counts = np.unique(side.samples.batch_width[mask], return_counts=True)
    ratios = counts / max(1, counts.sum())
    return float(np.exp(-(ratios * np.log(ratios)).sum()))
