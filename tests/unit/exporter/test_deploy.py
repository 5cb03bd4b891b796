"""deploy/prometheus and deploy/grafana name only what the declaration has, and the alerts do what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from colibri_daemon.common.metrics import METRICS, Kind

DEPLOY = Path(__file__).parents[3] / "deploy"
PROMETHEUS, GRAFANA = DEPLOY / "prometheus", DEPLOY / "grafana"
DASHBOARDS = sorted(GRAFANA.glob("*.json"))
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is Debian's package prometheus")


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDED = {rule["record"] for rule in rules("rules.yml")}
SERIES = {name for metric in METRICS for name in (
    [f"{metric.full_name}{end}" for end in ("_bucket", "_sum", "_count")]
    if metric.kind is Kind.HISTOGRAM else [metric.full_name])}  # fmt: skip


def expressions() -> Iterator[tuple[str, str]]:
    for name in ("rules.yml", "alerts.yml"):
        yield from ((name, rule["expr"]) for rule in rules(name))
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        yield from ((path.name, variable["query"]) for variable in dashboard["templating"]["list"])
        yield from ((path.name, target["expr"]) for panel in panels(path) for target in panel["targets"])


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:colibri[_:]|process_)[A-Za-z0-9_:]*", re.sub(r'"[^"]*"', "", expression)))


def label_values(expression: str) -> Iterator[tuple[str, str, str]]:
    """(metric, label, value) of every selector."""
    for metric, inside in re.findall(r"\b(colibri_\w+|process_\w+)\{([^}]*)\}", expression):
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', inside):
            for one in value.split("|") if "~" in operator else [value]:
                yield metric, label, one


def test_something_is_read() -> None:
    assert len(DASHBOARDS) == 2
    assert len(list(expressions())) > 80


def test_only_declared_names() -> None:
    for where, expression in expressions():
        assert names(expression) <= SERIES | RECORDED, where


def test_only_declared_labels_and_values() -> None:
    by_series = {name: metric for metric in METRICS for name in SERIES
                 if name.removeprefix(metric.full_name) in ("", "_bucket", "_sum", "_count")
                 and name.startswith(metric.full_name)}  # fmt: skip
    for where, expression in expressions():
        for series, label, value in label_values(expression):
            if label in ("job", "instance"):
                continue
            metric = by_series[series]
            assert label in metric.labels, (where, series)
            assert value in {values[metric.labels.index(label)] for values in metric.series}, (where, series)


def test_sums_are_taken_by_labels_that_are_there() -> None:
    labels = {label for metric in METRICS for label in metric.label_names} | {"job", "instance", "le"}
    for where, expression in expressions():
        for inside in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert {label.strip() for label in inside.split(",")} <= labels, where


@pytest.mark.parametrize("alert", rules("alerts.yml"), ids=lambda rule: rule["alert"])
def test_an_alert_says_who_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert "$labels.instance" in alert["annotations"]["summary"]
    assert alert["annotations"]["description"].endswith(".") or "?" in alert["annotations"]["description"]


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests.yml").read_text())["tests"]
    alerts = {rule["alert"] for rule in rules("alerts.yml")}
    silent = {case["alertname"] for case in tests[0]["alert_rule_test"] if not case["exp_alerts"]}
    firing = " ".join(sample["labels"] for case in tests[2]["promql_expr_test"] for sample in case["exp_samples"])
    raised = set(re.findall(r'alertname="(\w+)"', firing)) | {
        case["alertname"] for case in tests[2]["alert_rule_test"] if case["exp_alerts"]}  # fmt: skip
    assert silent == raised == alerts


@promtool
def test_promtool_accepts_it() -> None:
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "tests.yml"]):
        done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- dashboards ------------------------------------------------------------------------------------------------------


def test_dashboards_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, GRAFANA / "make.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_is_whole(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    variables = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert variables == ["datasource", "job", "instance"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(path):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {"instance", "job", "__rate_interval"}
            assert '$instance"' in target["expr"]
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= {label for metric in METRICS for label in metric.label_names} | {"le"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
