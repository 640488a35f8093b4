"""The rules as promtool evaluates them: alerts with their texts, indicators with their values and zones."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.controlplane.policy.paging import PagedAlert, burn_alert, spend_alert
from services.core.records import BurnAlert, Meta, Objective, Sli, SliStatus
from tests.prometheus.servers import PROMTOOL, RULES

LEVELS = {BurnAlert.SLOW: 1, BurnAlert.FAST: 2, BurnAlert.ACUTE: 3}
GATEWAY = '{job="gateway",instance="g-0"'
WORKER = '{job="worker",instance="w-0"'


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=120, check=False)


def check(folder: Path, series: dict[str, str], **tests: list[dict[str, Any]]) -> None:
    """Evaluate the rules over series of samples, one a minute, and compare."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        **tests,
    }
    path = folder / "tests.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]})
    )
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def fires(alert: PagedAlert) -> list[dict[str, Any]]:
    """Return the test that exactly this alert fires, with the control plane's labels and texts."""
    labels = dict(alert.labels)
    name = labels.pop("alertname")
    expected = {"exp_labels": labels, "exp_annotations": dict(alert.annotations)}
    return [{"eval_time": "5m", "alertname": name, "exp_alerts": [expected]}]


@pytest.mark.parametrize("sli", list(Sli))
@pytest.mark.parametrize("alert", list(LEVELS))
def test_a_burn_alert_is_that_of_the_control_plane(tmp_path: Path, sli: Sli, alert: BurnAlert) -> None:
    found = burn_alert(Objective(Meta("chat-o"), "chat"), SliStatus(sli, 0.1, 99, 9, alert))
    assert found is not None
    level = f'fairway_objective_burn_level{{objective="chat-o",sli="{sli}",model="chat",job="controlplane"}}'
    check(tmp_path, {level: f"{LEVELS[alert]}x9"}, alert_rule_test=fires(found))


@pytest.mark.parametrize("ratio", [0.85, 1.0])
def test_a_spend_alert_is_that_of_the_control_plane(tmp_path: Path, ratio: float) -> None:
    found = spend_alert("acme", "month", ratio)
    assert found is not None
    level = 'fairway_budget_spent_ratio{budget="acme",period="month",job="controlplane"}'
    check(tmp_path, {level: f"{ratio}x9"}, alert_rule_test=fires(found))


def value(record: str, labels: str, number: float, eval_time: str = "10m") -> dict[str, Any]:
    return {
        "expr": f"round({record}, 1e-6)",
        "eval_time": eval_time,
        "exp_samples": [{"labels": labels, "value": number}],
    }


def test_indicators_of_a_tenant_a_model_and_a_zone(tmp_path: Path) -> None:
    """60 device seconds, 1,200 prompt and 800 output tokens a minute, on two workers, one without a price."""
    tenant = 'tenant="acme",model="chat"'
    series = {
        f'fairway_runtime_zone{GATEWAY},zone="eu-1a"}}': "1x20",
        f'fairway_gateway_tokens_total{GATEWAY},{tenant},kind="prompt"}}': "0+1200x20",
        f'fairway_gateway_tokens_total{GATEWAY},{tenant},kind="cached"}}': "0+300x20",
        f'fairway_gateway_tokens_total{GATEWAY},{tenant},kind="output"}}': "0+800x20",
        f"fairway_sli_tenant_device_seconds_total{GATEWAY},{tenant}}}": "0+60x20",
        **{
            f'fairway_sli_requests_total{GATEWAY},{tenant},result="{result}"}}': f"0+{each}x20"
            for result, each in (("good", 90), ("broken", 10), ("error", 50))
        },
        f'fairway_worker_version_state{WORKER},model="chat",state="ready"}}': "1x20",
        f'fairway_worker_cost_per_hour{WORKER},device_type="cpu"}}': "3.6x20",
        'fairway_worker_version_state{job="worker",instance="w-1",model="chat",state="ready"}': "1x20",
    }
    of = '{tenant="acme", model="chat", zone="eu-1a"}'
    values = [
        value("fairway:stream_completion:ratio_rate5m", of, 0.9),
        value("fairway:kv_hit:ratio_rate5m", of, 0.25),
        value("fairway:tokens_per_device_second:ratio_rate5m", of, round(2000 / 60, 6)),
        # A second of a device that costs 3.6 an hour costs 0.001: 60 of them for 2,000 tokens.
        value("fairway:cost_per_1k_tokens:ratio_rate5m", of, 0.03),
    ]
    check(tmp_path, series, promql_expr_test=values)


def test_latencies_have_the_names_of_the_genai_conventions(tmp_path: Path) -> None:
    ours, ends = {"time_to_first_token": "ttft", "time_per_output_token": "tpot"}, ("bucket", "count", "sum")
    of = f'{GATEWAY},model="chat",gen_ai_request_model="chat",gen_ai_provider_name="fairway"'
    of += ',gen_ai_operation_name="generate_content"}'
    series = {
        f'fairway_gateway_{name}_seconds_{end}{GATEWAY},model="chat"}}': f"0+{number}x20"
        for name in ours.values()
        for number, end in enumerate(ends, start=1)
    }
    names = {f"{name}_seconds_{end}": number for name in ours for number, end in enumerate(ends, start=1)}
    values = [value(f"gen_ai_server_{name}", of, 10.0 * number) for name, number in names.items()]
    check(tmp_path, series, promql_expr_test=values)


def test_streams_without_a_broken_one_are_complete(tmp_path: Path) -> None:
    labels = 'tenant="t",model="m",version="1",class="standard",result="good"'
    series = {
        f'fairway_runtime_zone{GATEWAY},zone=""}}': "1x20",
        f"fairway_sli_requests_total{GATEWAY},{labels}}}": "0+9x20",
    }
    values = [value("fairway:stream_completion:ratio_rate5m", '{tenant="t", model="m"}', 1.0)]
    check(tmp_path, series, promql_expr_test=values)


def test_indicators_of_devices(tmp_path: Path) -> None:
    """Of two devices of 100 FLOP/s each, half of the time in steps; a worker without a peak has no MFU."""
    other = '{job="worker",instance="w-1"'
    series = {
        f'fairway_runtime_zone{WORKER},zone="a"}}': "1x90",
        f'fairway_runtime_zone{other},zone="a"}}': "1x90",
        f'fairway_worker_devices{WORKER},device_type="x"}}': "2x90",
        f'fairway_worker_devices{other},device_type="y"}}': "2x90",
        f'fairway_worker_peak_flops{WORKER},device_type="x"}}': "200x90",
        f'fairway_worker_device_seconds_total{WORKER},model="m",kind="prefill"}}': "0+10x90",
        f'fairway_worker_device_seconds_total{WORKER},model="m",kind="decode"}}': "0+20x90",
        f'fairway_worker_device_seconds_total{other},model="m",kind="decode"}}': "0+60x90",
        f'fairway_worker_model_flops_total{WORKER},model="m"}}': "0+1500x90",
        f'fairway_worker_model_flops_total{other},model="m"}}': "0+99999x90",
        f'fairway_worker_tokens_total{WORKER},model="m",kind="output"}}': "0+240x90",
        f"fairway_worker_device_idle_seconds_total{WORKER}}}": "0+30x90",
        f"fairway_worker_device_idle_seconds_total{other}}}": "0+0x90",
        f'fairway_worker_out_of_memory_total{WORKER},model="m",while="serve"}}': "0x40 1x50",
    }
    values = [
        value("fairway:mfu:ratio_rate5m", '{model="m", zone="a"}', 0.25, "80m"),
        value("fairway:tokens_per_device:rate5m", '{zone="a"}', 1.0, "80m"),
        value("fairway:idle_device_minutes:increase1h", '{zone="a"}', 60.0, "80m"),
        value("fairway:out_of_memory:increase1h", '{model="m", zone="a"}', 1.0, "80m"),
    ]
    check(tmp_path, series, promql_expr_test=values)


def test_nothing_is_invented_where_a_peak_or_a_price_is_unknown(tmp_path: Path) -> None:
    tenant = 'tenant="t",model="m"'
    series = {
        f'fairway_runtime_zone{GATEWAY},zone="a"}}': "1x20",
        f'fairway_runtime_zone{WORKER},zone="a"}}': "1x20",
        f'fairway_gateway_tokens_total{GATEWAY},{tenant},kind="output"}}': "0+800x20",
        f"fairway_sli_tenant_device_seconds_total{GATEWAY},{tenant}}}": "0+60x20",
        f'fairway_worker_version_state{WORKER},model="m",state="ready"}}': "1x20",
        f'fairway_worker_device_seconds_total{WORKER},model="m",kind="decode"}}': "0+20x20",
        f'fairway_worker_model_flops_total{WORKER},model="m"}}': "0+1500x20",
    }
    absent: list[dict[str, Any]] = [
        {"expr": name, "eval_time": "10m", "exp_samples": []}
        for name in ("fairway:mfu:ratio_rate5m", "fairway:cost_per_1k_tokens:ratio_rate5m")
    ]
    check(tmp_path, series, promql_expr_test=absent)


def test_the_first_engine_that_lacks_memory_alerts(tmp_path: Path) -> None:
    series = {f'fairway_worker_out_of_memory_total{WORKER},model="m",while="load"}}': "0x5 1x20"}
    labels = {"severity": "ticket", "model": "m"}
    rules = yaml.safe_load(RULES.read_text())["groups"]
    (rule,) = [one for group in rules for one in group["rules"] if one.get("alert") == "FairwayOutOfMemory"]
    texts = {name: text.replace("{{ $labels.model }}", "m") for name, text in rule["annotations"].items()}
    fired = {
        "eval_time": "10m",
        "alertname": "FairwayOutOfMemory",
        "exp_alerts": [{"exp_labels": labels, "exp_annotations": texts}],
    }
    check(tmp_path, series, alert_rule_test=[{**fired, "eval_time": "4m", "exp_alerts": []}, fired])
