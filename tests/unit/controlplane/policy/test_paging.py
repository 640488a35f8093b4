"""Alerts as an Alertmanager receives them: which are on, since when, and how they end."""

from __future__ import annotations

from datetime import datetime

from services.controlplane.policy.paging import (
    ENDED_S,
    ENDS_S,
    MAX_ALERTS,
    AlertBook,
    PagedAlert,
    burn_alert,
    spend_alert,
)
from services.core.records import BurnAlert, Meta, Objective, Sli, SliStatus

NOW = 1_800_000_000.0
FIRST = PagedAlert((("alertname", "A"),), {"summary": "a"})
SECOND = PagedAlert((("alertname", "B"),))


def sent(book: AlertBook, unix_s: float) -> dict[str, tuple[float, float]]:
    """Return from when and until when each alert is on, in seconds after NOW."""

    def seconds(text: str) -> float:
        return datetime.fromisoformat(text).timestamp() - NOW

    return {
        one["labels"]["alertname"]: (seconds(one["startsAt"]), seconds(one["endsAt"]))
        for one in book.payload(unix_s)
    }


def test_an_alert_lasts_until_its_source_drops_it_and_its_end_is_repeated() -> None:
    book = AlertBook()
    book.replace("x", [FIRST])
    assert sent(book, NOW) == {"A": (0.0, ENDS_S)}
    assert sent(book, NOW + 60) == {"A": (0.0, 60 + ENDS_S)}, "a leader that dies lets it end"
    book.replace("y", [SECOND])
    book.replace("x", [])
    assert sent(book, NOW + 90) == {"A": (0.0, 90.0), "B": (90.0, 90 + ENDS_S)}
    assert sent(book, NOW + 120)["A"] == (0.0, 90.0)
    assert sent(book, NOW + 91 + ENDED_S).keys() == {"B"}
    book.replace("x", [FIRST])
    assert sent(book, NOW + 2000)["A"] == (2000.0, 2000.0 + ENDS_S), "it is a new one"


def test_only_what_changes_which_alerts_are_on_is_a_version() -> None:
    book = AlertBook()
    book.replace("x", [FIRST])
    book.replace("x", [PagedAlert(FIRST.labels, {"summary": "other"})])
    assert book.version == 1
    assert book.payload(NOW)[0]["annotations"] == {"summary": "other"}
    book.replace("x", [])
    assert book.version == 2
    book.clear()
    assert book.payload(NOW) == [], "another leader ends them, or goes on"


def test_alerts_are_bounded() -> None:
    book = AlertBook()
    many = [PagedAlert((("alertname", f"A{number}"),)) for number in range(3 * MAX_ALERTS)]
    for at in range(3):
        book.replace("x", many[at * MAX_ALERTS :])
        assert len(sent(book, NOW + at)) <= 2 * MAX_ALERTS
    book.replace("x", [])
    assert len(sent(book, NOW + 9)) == MAX_ALERTS


def of_objective(sli: Sli, alert: BurnAlert) -> PagedAlert | None:
    return burn_alert(Objective(Meta("chat-o"), "chat"), SliStatus(sli, 0.5, 100, 9, alert))


def test_a_latency_alert_names_the_diagnosis() -> None:
    assert of_objective(Sli.TTFT, BurnAlert.NONE) is None
    for sli in (Sli.TTFT, Sli.ITL, Sli.TOTAL):
        found = of_objective(sli, BurnAlert.ACUTE)
        assert found is not None
        assert found.annotations["command"] == f"fairway diagnose --model chat --metric {sli} --since 15m"
        assert dict(found.labels)["severity"] == "page"
    slow = of_objective(Sli.AVAILABILITY, BurnAlert.SLOW)
    assert slow is not None
    assert slow.annotations["command"] == "fairway slis --model chat"
    assert dict(slow.labels) == {
        "alertname": "FairwayObjectiveBurnsSlowly",
        "severity": "ticket",
        "objective": "chat-o",
        "sli": "availability",
        "model": "chat",
    }


def test_a_budget_alerts_from_four_fifths_on() -> None:
    found = [spend_alert("b", "day", ratio) for ratio in (0.79, 0.8, 0.999, 1.0, 7.0)]
    names = [one and dict(one.labels)["alertname"] for one in found]
    assert names == [None, *["FairwayBudgetNearlySpent"] * 2, *["FairwayBudgetSpent"] * 2]
