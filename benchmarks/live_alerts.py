"""The alerts and the judges of `deploy/`, in a real Prometheus with an Alertmanager.

    python benchmarks/live_alerts.py [--step 2] [--out FILE]

A minute of the rules' unit tests takes *step* seconds: a server replays their series, and each duration of the rules is
as much shorter. Each alert has to reach a receiver of the Alertmanager with the labels that its test expects, within
that time; each query of the dashboard has to be answered; and each judge of Argo Rollouts and Flagger decides about
the fleets of `tests/support/judged_fleets.py`, by the limits of its template. Exit code 1 if
anything is not as expected.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from measuring import PROJECT

sys.path.insert(0, str(PROJECT / "tests" / "support"))  # a folder of scripts, not an installed module

from deployed import ARGO, FLAGGER, JUDGES, RULE_TESTS, RULES, documents, of_argo, of_flagger
from judged_fleets import FLEETS
from record_dashboard import Prometheus, PrometheusError, panels, prometheus

JUDGED_AT = 20
"""The minute of the first measurement: the windows of the queries are 10."""
VERDICTS = {
    "healthy": "goes on",
    "that ends wrong answers": "goes on",
    "sick": "taken back",
    "idle": "waits for a person",
    "without the plugin": "waits for a person",
    "of another model": "waits for a person",
}
"""Argo's. Flagger has no such wait: it takes back what it cannot judge."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def expanded(values: str) -> list[float | None]:
    """Return the samples of promtool's notation; None for no sample."""
    samples: list[float | None] = []
    for part in values.split():
        number = r"(-?[\d.]+(?:e[+-]?\d+)?)"
        if part == "stale":
            samples.append(None)
        elif match := re.fullmatch(r"_(?:x(\d+))?", part):
            samples += [None] * int(match[1] or 1)
        elif match := re.fullmatch(rf"{number}(?:([+-])([\d.e-]+))?(?:x(\d+))?", part):
            step = float(f"{match[2] or '+'}{match[3] or 0}")
            samples += [float(match[1]) + step * index for index in range(int(match[4] or 0) + 1)]
        else:
            raise ValueError(part)
    return samples


def minutes(duration: str) -> float:
    return sum(int(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", duration)) / 60


class Replay:
    """The series of all tests and fleets: `series` has (name, labels as text, samples)."""

    def __init__(self, step: float) -> None:
        self.step, self.start = step, 0.0
        self.series: list[tuple[str, str, list[float | None]]] = []
        self.expected: list[tuple[float, dict[str, str]]] = []
        # As text: to YAML 0x30, promtool's notation of 31 zeros, is a number.
        tests = yaml.load(RULE_TESTS.read_text(), Loader=yaml.BaseLoader)["tests"]  # noqa: S506 # makes texts alone
        for number, test in enumerate(tests):
            for each in test["input_series"]:
                self._add(each["series"], each["values"], cluster=f"test-{number}")
            for case in test["alert_rule_test"]:
                for alert in case["exp_alerts"]:
                    labels = {**alert["exp_labels"], "alertname": case["alertname"], "cluster": f"test-{number}"}
                    self.expected.append((minutes(case["eval_time"]), labels))
        for fleet, series in FLEETS.items():
            for name, values in series.items():
                self._add(name.replace('namespace="llm"', f'namespace="{fleet}"'), values.replace("x30", "x90"))

    def _add(self, series: str, values: str, **more: str) -> None:
        name, _, labels = series.partition("{")
        extra = "".join(f',{key}="{value}"' for key, value in more.items())
        self.series.append((name, labels.rstrip("}") + extra, expanded(values)))

    def minute(self) -> float:
        return (time.time() - self.start) / self.step

    def text(self) -> str:
        """Return what is exposed now."""
        now, lines = int(self.minute()), []
        for name, labels, samples in self.series:
            value = samples[now] if now < len(samples) else None
            if value is not None:
                if name == "graphfix_records_read_timestamp_seconds":
                    value = self.start + value / 60 * self.step
                lines.append(f"{name}{{{labels}}} {value!r}")
        return "\n".join(lines) + "\n"


def shortened(rules: str, step: float) -> str:
    """Return *rules* with each duration as much shorter as a minute is."""

    def shorter(match: re.Match[str]) -> str:
        return f"{match[1]}{round(minutes(match[2]) * step * 1000)}ms{match[3]}"

    rules = re.sub(r"(\[)(\d+[smhd])(\])", shorter, rules)
    rules = re.sub(r"(\bfor: )(\d+[smhd])(\s)", shorter, rules)
    return rules.replace("_timestamp_seconds > 120", f"_timestamp_seconds > {120 / 60 * step:g}")


def served(answer: Callable[[bytes], str]) -> tuple[ThreadingHTTPServer, int]:
    """Serve *answer* to the body of each request; return the server and its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(self.rfile.read(int(self.headers.get("Content-Length") or 0))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 # the name is the base class's

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the name is the base class's
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, server.server_port


@contextmanager
def alertmanager(folder: Path, receiver: int) -> Iterator[int]:
    """Run an Alertmanager that passes each alert on at once; yield its port."""
    route = {"receiver": "all", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
    webhook = {"url": f"http://127.0.0.1:{receiver}/", "send_resolved": False}
    config = {"route": route, "receivers": [{"name": "all", "webhook_configs": [webhook]}]}
    (folder / "alertmanager.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/am"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=warn"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.terminate()


def argo_verdict(metric: Mapping[str, Any], values: Sequence[float | None]) -> str:
    """Return the end of one metric's analysis: as Argo counts failures and inconclusive measurements."""
    failures = inconclusive = 0
    for value in values[: metric["count"]]:
        result = [] if value is None else [value]
        failed, succeeded = (
            eval(condition.replace("&&", "and"), {"result": result, "len": len})  # noqa: S307  # of our own template
            for condition in (metric["failureCondition"], metric["successCondition"])
        )
        failures += failed
        inconclusive += not failed and not succeeded
    if failures > metric["failureLimit"]:
        return "taken back"
    return "waits for a person" if inconclusive > metric["inconclusiveLimit"] else "goes on"


def flagger_verdict(limits: Mapping[str, float], values: Sequence[float | None], threshold: int) -> str:
    """Return what becomes of a canary by one metric: *threshold* failed checks take it back."""
    inside = [value is not None and limits.get("min", value) <= value <= limits.get("max", value) for value in values]
    return "taken back" if inside.count(False) >= threshold else "goes on"


def flagger_limits() -> tuple[dict[str, dict[str, float]], int]:
    """Return the range of each template and the number of failed checks, from the example in the file's comment."""
    text = FLAGGER.read_text()
    ranges = re.findall(
        r"templateRef: \{name: ([\w-]+)\}(?:\n#.*?)*?\n# +thresholdRange: \{(min|max): ([\d.]+)\}", text
    )
    threshold = re.search(r"# +threshold: (\d+)", text)
    assert threshold  # noqa: S101 # it is in the comment
    return {name: {kind: float(value)} for name, kind, value in ranges}, int(threshold[1])


def judged(running: Prometheus, replay: Replay) -> dict[str, dict[str, str]]:
    """Ask each judge about each fleet once a minute; return the verdicts, the worst of each fleet's metrics."""
    argo, (limits, threshold) = documents(ARGO)[0]["spec"]["metrics"], flagger_limits()
    queries = {f"argo {each['name']}": of_argo(each) for each in argo}
    queries |= {f"flagger {each['metadata']['name']}": of_flagger(each) for each in documents(FLAGGER)}
    assert queries == JUDGES  # noqa: S101 # none is left out
    values: dict[tuple[str, str], list[float | None]] = {}
    for minute in range(JUDGED_AT, JUDGED_AT + 15):
        while replay.minute() < minute:
            time.sleep(0.05)
        for fleet in FLEETS:
            for name, query in queries.items():
                samples = running.instant(
                    shortened(query.replace('namespace="llm"', f'namespace="{fleet}"'), replay.step)
                )
                values.setdefault((fleet, name), []).append(samples[0].points[0][1] if samples else None)
    worst = ("taken back", "waits for a person", "goes on")
    verdicts: dict[str, dict[str, str]] = {}
    for fleet in FLEETS:
        by_argo = {argo_verdict(each, values[fleet, f"argo {each['name']}"]) for each in argo}
        by_flagger = {flagger_verdict(limits[name], values[fleet, f"flagger {name}"], threshold) for name in limits}
        verdicts[fleet] = {
            "argo": next(each for each in worst if each in by_argo),
            "flagger": next(each for each in worst if each in by_flagger),
        }
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=2.0, help="seconds of a minute")
    parser.add_argument("--minutes", type=float, default=1e9, help="leave out what is expected later")
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks" / "results" / "live_alerts.json")
    options = parser.parse_args()
    replay = Replay(options.step)
    received: dict[str, float] = {}

    def receive(body: bytes) -> str:
        for alert in json.loads(body)["alerts"]:
            received.setdefault(json.dumps(alert["labels"], sort_keys=True), replay.minute())
        return ""

    exporter, scraped_port = served(lambda _: replay.text())
    receiver, receiver_port = served(receive)
    every = f"{options.step:g}s"
    scrape = {
        "job_name": "replay",
        "honor_labels": True,
        "static_configs": [{"targets": [f"127.0.0.1:{scraped_port}"]}],
    }
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.yml"
        rules.write_text(shortened(RULES.read_text(), options.step))
        with alertmanager(Path(folder), receiver_port) as port:
            targets = [{"static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]
            changes = {
                "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
                "alerting": {"alertmanagers": targets},
                "scrape_configs": [scrape],
            }
            replay.start = time.time()
            flags = [f"--query.lookback-delta={round(5 * options.step * 1000)}ms", "--rules.alert.resend-delay=1s"]
            with prometheus([], rules, changes, flags) as running:
                replay.start = time.time()
                verdicts = judged(running, replay)
                unanswered = [
                    f"{panel.title}: {error}" for panel in panels() for error in refused(running, panel.targets)
                ]
                due = [each for each in replay.expected if each[0] <= options.minutes]
                until = max(minute for minute, _ in due) + 5
                missing = due
                while missing and replay.minute() < until:
                    time.sleep(1)
                    missing = [each for each in due if json.dumps(each[1], sort_keys=True) not in received]
    exporter.shutdown()
    receiver.shutdown()
    expected = {json.dumps(labels, sort_keys=True): minute for minute, labels in due}
    alerts: dict[str, dict[str, float]] = {}
    for key, minute in expected.items():
        alerts.setdefault(json.loads(key)["alertname"], {})[json.loads(key)["cluster"]] = minute
    result = {
        "seconds of a minute": options.step,
        "alerts that reached the receiver": sorted(
            {json.loads(key)["alertname"] for key in received.keys() & expected}
        ),
        "expected, and not received": [labels for _, labels in missing],
        "queries of the dashboard refused": unanswered,
        "verdicts": verdicts,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [fleet for fleet, verdict in VERDICTS.items() if verdicts[fleet]["argo"] != verdict]
    print(json.dumps(result, indent=1), f"wrong verdicts: {wrong}")
    return int(bool(missing or unanswered or wrong))


def refused(running: Prometheus, targets: Sequence[Any]) -> list[str]:
    """Return the errors by which Prometheus refuses a query of *targets*."""
    errors = []
    for target in targets:
        try:
            running.instant(target.query)
        except PrometheusError as error:
            errors.append(str(error))
    return errors


if __name__ == "__main__":
    sys.exit(main())
