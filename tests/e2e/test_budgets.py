"""Limits, budgets and prices on a whole installation: an operator's commands and a client's answers."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.command_line import CommandLine
from tests.support.stack import Stack

HANG_S = 60.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"]) if self.status != 200 else ""

    @property
    def micros(self) -> int:
        """What the answer costs: one per prompt token, two per output token."""
        return int(self.body["usage"]["prompt_tokens"] + 2 * self.body["usage"]["completion_tokens"])


@dataclass
class Customer:
    """A tenant of the test's own with one key, on a deployment with a price."""

    stack: Stack
    cli: CommandLine
    secret: str

    def ask(self, max_tokens: int | None = 4, **fields: Any) -> Answer:
        body = {"model": self.stack.model, "prompt": "def f():", "ignore_eos": True, **fields}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        request = urllib.request.Request(
            f"{self.stack.http}/v1/completions",
            json.dumps(body).encode(),
            {"authorization": f"Bearer {self.secret}", "content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return Answer(reply.status, dict(reply.headers.items()), json.load(reply))
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers.items()), json.load(error))

    def until(self, holds: Callable[[Answer], bool], **fields: Any) -> Answer:
        """Ask until the answer is as awaited: gateways follow the operator's changes within moments."""
        deadline = time.monotonic() + HANG_S
        while not holds(answer := self.ask(**fields)):
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)
        return answer

    def operate(self, command: str) -> Any:
        return self.cli(*command.split())

    def budget(self, name: str) -> Any:
        return self.cli("budgets", "show", name, "-o", "json").json


@pytest.fixture
def customer(stack: Stack) -> Iterator[Customer]:
    cli = CommandLine(stack.state)
    cli("tenants", "create", "budgeted")
    cli("deployments", "update", stack.model, "--input-price", "1", "--output-price", "2")
    secret = cli("keys", "create", "budgeted-key", "--tenant", "budgeted").out.strip()
    found = Customer(stack, cli, secret)
    found.until(lambda answer: answer.status == 200)
    yield found
    for budget in cli("budgets", "list", "-o", "json").json["budgets"]:
        cli("budgets", "delete", budget["metadata"]["name"], "--yes")
    cli("keys", "revoke", "budgeted-key", "--yes")
    cli("tenants", "delete", "budgeted", "--yes")
    cli("deployments", "update", stack.model, "--input-price", "0", "--output-price", "0")


def test_a_month_budget_is_spent_rejected_raised_and_served(customer: Customer) -> None:
    worst = customer.ask().micros  # the output is as long as it may be
    customer.operate(f"budgets create month --tenant budgeted --per-month 0.{3 * worst + 1:06d}")
    rejected = customer.until(lambda answer: answer.status != 200)
    assert (rejected.status, rejected.code) == (429, "insufficient_quota")
    assert rejected.body["error"]["type"] == "insufficient_quota"
    assert rejected.headers["x-should-retry"] == "false"
    assert 0 < int(rejected.headers["retry-after"]) <= 31 * 86_400
    found = customer.budget("month")
    spent, reserved = int(found["spent_micros"]), int(found["reserved_micros"])
    assert 2 * worst + 1 < spent <= 3 * worst + 1, "no room for another, and never above the budget"
    assert (spent % worst, reserved) == (0, 0)
    reasons = [f"BUDGET_SPENT_{percent}" for percent in (50, 80)]
    deadline = time.monotonic() + HANG_S
    while True:
        events = customer.cli("events", "--resource", "month", "-o", "json").json["events"]
        alerts = [event["reason"] for event in events if event["reason"].startswith("BUDGET_SPENT")]
        if sorted(alerts) == reasons:
            break
        assert time.monotonic() < deadline, alerts
        time.sleep(0.2)
    customer.operate("budgets update month --per-month 1")
    customer.until(lambda answer: answer.status == 200)


def test_a_day_cap_holds_below_the_month(customer: Customer) -> None:
    worst = customer.ask().micros
    customer.operate(f"budgets create day --tenant budgeted --per-month 100 --per-day 0.{worst:06d}")
    rejected = customer.until(lambda answer: answer.status != 200)
    assert (rejected.status, rejected.code) == (429, "insufficient_quota")
    assert "day" in rejected.body["error"]["message"]
    assert 0 < int(rejected.headers["retry-after"]) <= 86_400


def test_limits_of_a_key_and_of_end_users(customer: Customer) -> None:
    customer.operate("keys update budgeted-key --max-output-tokens 6")
    rejected = customer.until(lambda answer: answer.status != 200, max_tokens=7)
    assert rejected.status == 400
    assert rejected.body["error"]["param"] == "max_tokens"
    assert "max_tokens of the key, 6" in rejected.body["error"]["message"]
    assert customer.ask(None).body["usage"]["completion_tokens"] == 6
    customer.operate("tenants update budgeted --requests-per-minute 1000 --user-requests-per-minute 2")
    served = customer.until(lambda answer: "x-ratelimit-limit-requests" in answer.headers, user="ann")
    assert served.headers["x-ratelimit-limit-requests"] == "2", "the scope with the least room"
    rejected = customer.until(lambda answer: answer.status != 200, user="ann")
    assert (rejected.status, rejected.code) == (429, "rate_limit_exceeded")
    assert customer.ask(user="bob").status == 200
    assert customer.ask().headers["x-ratelimit-limit-requests"] == "1000"
