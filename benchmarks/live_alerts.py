"""The alerts and the judges of `deploy/`, in a real Prometheus with an Alertmanager.

    python benchmarks/live_alerts.py [--only alerts|judges] [--step 2] [--out FILE]

A minute of the rules' unit tests takes *step* seconds: a server replays their series, and each duration of the rules is
as much shorter. Each alert has to reach a receiver of the Alertmanager with the labels that its test expects, within
that time, and from its labels alone the queries of docs/alerts.md have to find the engine; each query of the dashboard
has to be answered. Before that, each judge of Argo Rollouts and Flagger decides about 2,000 engines, named as a
StatefulSet, a Deployment and a LeaderWorkerSet name them: the canaries of `tests/support/judged_fleets.py` at 5 %, a
healthy and a sick one also at 1, 25 and 50 %. Exit code 1 if anything is not as expected.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import compress, product
from pathlib import Path
from typing import Any

from measuring import PROJECT

sys.path.insert(0, str(PROJECT / "tests" / "support"))  # a folder of scripts, not an installed module

from deployed import (
    ARGO,
    FLAGGER,
    JUDGES,
    RULES,
    about,
    documents,
    of_argo,
    of_flagger,
    rule_tests,
    runbook,
)
from fetch_promtool import ALERTMANAGER, tool
from judged_fleets import FLEETS, HEALTHY, NAMED, ON_ONE_ENGINE
from record_dashboard import Prometheus, PrometheusError, panels, prometheus, stored
from vllm_graphfix.settings.decision import bucket

JUDGED = range(15, 30)
"""The minutes of the measurements: the windows of the queries are 10."""
GOES_ON, BACK, WAITS = "goes on", "taken back", "waits for a person"
VERDICTS = {
    "healthy": GOES_ON,
    "that ends wrong answers": GOES_ON,
    "sick": BACK,
    "with ranks that differ": BACK,
    "with a failed fix": BACK,
    "that is slow": BACK,
    "that fails requests": BACK,
    "idle": WAITS,
    "without the plugin": WAITS,
    "of another model": WAITS,
}
"""Argo's. Flagger has no such wait: it takes back what it cannot judge."""
SHARES = (1, 5, 25, 50)
ALL_AT = 5
"""The share at which every fleet is judged."""
MISSED = 0.002
"""The share of scrapes that fail."""
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
    """The series of all tests: `series` has (name, labels as text, samples)."""

    def __init__(self, step: float) -> None:
        self.step, self.start = step, 0.0
        self.series: list[tuple[str, str, list[float | None]]] = []
        self.expected: list[tuple[float, dict[str, str]]] = []
        for number, test in enumerate(rule_tests()):
            for each in test["input_series"]:
                self._add(each["series"], each["values"], cluster=f"test-{number}")
            for case in test["alert_rule_test"]:
                for alert in case["exp_alerts"]:
                    labels = {**alert["exp_labels"], "alertname": case["alertname"], "cluster": f"test-{number}"}
                    self.expected.append((minutes(case["eval_time"]), labels))

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
    binary = tool(ALERTMANAGER)
    command = [str(binary), f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/am"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=warn"]
    if not Path("/usr/share/prometheus/alertmanager/default.tmpl").exists():
        # Debian's build reads its templates there, so the package's folder takes that place, for this process alone.
        mounted = 'mount --bind "$0" /usr/share && exec "$@"'
        share = str(binary.parent.parent / "share")
        command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, share, *command]
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
        return BACK
    return WAITS if inconclusive > metric["inconclusiveLimit"] else GOES_ON


def flagger_verdict(limits: Mapping[str, float], values: Sequence[float | None], threshold: int) -> str:
    """Return what becomes of a canary by one metric: *threshold* failed checks take it back."""
    inside = [value is not None and limits.get("min", value) <= value <= limits.get("max", value) for value in values]
    return BACK if inside.count(False) >= threshold else GOES_ON


def flagger_limits() -> tuple[dict[str, dict[str, float]], int]:
    """Return the range of each template and the number of failed checks, from the example in the file's comment."""
    text = FLAGGER.read_text()
    ranges = re.findall(
        r"templateRef: \{name: ([\w-]+)\}(?:\n#.*?)*?\n# +thresholdRange: \{(min|max): ([\d.]+)\}", text
    )
    threshold = re.search(r"# +threshold: (\d+)", text)
    assert threshold  # noqa: S101 # it is in the comment
    return {name: {kind: float(value)} for name, kind, value in ranges}, int(threshold[1])


@cache
def dated(values: str, start: int) -> list[str]:
    """Return value and time of each sample of *values*, a minute apart, from the first that a judge may read."""
    samples = enumerate(expanded(values))
    return [f"{value!r} {start + minute * 60}\n" for minute, value in samples if JUDGED.start - 11 < minute]


def of_fleet(fleet: str, names: Sequence[str], percentage: int, start: int) -> Iterator[str]:
    """Yield the samples of *fleet* with an engine of each of *names*, *percentage* of them in its canary."""
    chosen = {name for name in names if bucket(name) < percentage * 100}
    first = min(chosen)
    for name in names:
        chance = random.Random(name)  # noqa: S311 # the same in every run
        answered = [chance.random() >= MISSED for _ in range(JUDGED.stop)]
        series = HEALTHY if fleet in ON_ONE_ENGINE and name != first else FLEETS[fleet]
        here = f'instance="{"in" if name in chosen else "out"}"'
        for each, values in series.items():
            if here in each:
                target = each.replace(here, f'instance="{name}"').replace(", ", ",") + " "
                yield "".join(target + sample for sample in compress(dated(values, start), answered))


def judged(folder: Path, kind: str, percentage: int, fleet: str) -> tuple[float | None, dict[str, str]]:
    """Store and judge a fleet; return its share of the canary by Prometheus, and the worst verdict of each judge."""
    argo, (limits, threshold) = documents(ARGO)[0]["spec"]["metrics"], flagger_limits()
    queries = {f"argo {each['name']}": of_argo(each) for each in argo}
    queries |= {f"flagger {each['metadata']['name']}": of_flagger(each) for each in documents(FLAGGER)}
    assert queries == JUDGES  # noqa: S101 # none is left out
    text, nothing = folder / "text", folder / "none.yml"
    nothing.write_text("groups: []")
    start = int(time.time()) // 3600 * 3600 - 6 * 3600
    with text.open("w") as file:
        file.writelines(of_fleet(fleet, NAMED[kind], percentage, start))
        file.write("# EOF\n")
    stored(text, folder / "blocks")
    queries["share"] = "sum(graphfix_canary) / count(graphfix_canary)"
    span = {"start": f"{start + JUDGED.start * 60}", "end": f"{start + (JUDGED.stop - 1) * 60}", "step": "60"}
    values: dict[str, list[float | None]] = {}
    # A series ends with the scrape that fails, of which nothing is stored but that there is no sample.
    flags = ["--query.lookback-delta=59s"]
    with prometheus([], nothing, {"scrape_configs": []}, flags, blocks=folder / "blocks") as running:
        for name, query in queries.items():
            result = running.get("query_range", query=query, **span)["result"]
            samples = {int(at): float(value) for at, value in result[0]["values"]} if result else {}
            values[name] = [samples.get(start + minute * 60) for minute in JUDGED]
    by_argo = [argo_verdict(each, values[f"argo {each['name']}"]) for each in argo]
    by_flagger = [flagger_verdict(limits[name], values[f"flagger {name}"], threshold) for name in limits]
    worst = (BACK, WAITS, GOES_ON)
    return values["share"][0], {"argo": min(by_argo, key=worst.index), "flagger": min(by_flagger, key=worst.index)}


def walked(running: Prometheus, labels: Mapping[str, str], step: float) -> list[str]:
    """Return the queries of the runbook that have nothing about an alert with *labels*."""
    queries = [about(query, labels) for query in runbook()[labels["alertname"]]]
    return [query for query in queries if not running.instant(shortened(query, step))]


def replayed(step: float) -> dict[str, Any]:
    """Replay the series of the rules' unit tests; return what of the alerts and queries is not as expected."""
    replay = Replay(step)
    received: dict[str, float] = {}

    def receive(body: bytes) -> str:
        for alert in json.loads(body)["alerts"]:
            received.setdefault(json.dumps(alert["labels"], sort_keys=True), replay.minute())
        return ""

    exporter, scraped_port = served(lambda _: replay.text())
    receiver, receiver_port = served(receive)
    every = f"{step:g}s"
    scrape = {
        "job_name": "replay",
        "honor_labels": True,
        "static_configs": [{"targets": [f"127.0.0.1:{scraped_port}"]}],
    }
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.yml"
        rules.write_text(shortened(RULES.read_text(), step))
        with alertmanager(Path(folder), receiver_port) as port:
            targets = [{"static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]
            changes = {
                "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
                "alerting": {"alertmanagers": targets},
                "scrape_configs": [scrape],
            }
            replay.start = time.time()
            flags = [f"--query.lookback-delta={round(5 * step * 1000)}ms", "--rules.alert.resend-delay=1s"]
            with prometheus([], rules, changes, flags) as running:
                replay.start = time.time()
                unanswered = [
                    f"{panel.title}: {error}" for panel in panels() for error in refused(running, panel.targets)
                ]
                until = max(minute for minute, _ in replay.expected) + 5
                missing, without_answer = replay.expected, list[str]()
                while missing and replay.minute() < until:
                    time.sleep(1)
                    arrived = [each for each in missing if json.dumps(each[1], sort_keys=True) in received]
                    for _, labels in arrived:
                        without_answer += walked(running, labels, step)
                    missing = [each for each in missing if each not in arrived]
    exporter.shutdown()
    receiver.shutdown()
    return {
        "seconds of a minute": step,
        "alerts that reached the receiver": sorted(
            {labels["alertname"] for each, labels in replay.expected if (each, labels) not in missing}
        ),
        "expected, and not received": [labels for _, labels in missing],
        "queries of the dashboard refused": unanswered,
        "queries of the runbook without an answer": without_answer,
    }


def all_judged() -> dict[str, Any]:
    """Judge the fleets at each share; return shares, verdicts, and which of these are not as expected."""
    verdicts: dict[str, dict[str, dict[str, str]]] = {}
    shares: dict[str, dict[str, float]] = {}
    for kind, percentage in product(NAMED, SHARES):
        where = verdicts.setdefault(f"{kind}, {percentage} %", {})
        for fleet in FLEETS if percentage == ALL_AT else ("healthy", "sick"):
            with tempfile.TemporaryDirectory() as folder:
                share, where[fleet] = judged(Path(folder), kind, percentage, fleet)
            if fleet == "healthy" and share is not None:
                shares.setdefault(kind, {})[f"{percentage} %"] = round(share * 100, 2)
            print(kind, percentage, "%:", share, fleet, where[fleet], flush=True)
    wrong = [
        f"{fleet}, {where}"
        for where, by_fleet in verdicts.items()
        for fleet, each in by_fleet.items()
        if each != {"argo": VERDICTS[fleet], "flagger": VERDICTS[fleet].replace(WAITS, BACK)}
    ]
    return {"percent in the canary": shares, "verdicts": verdicts, "wrong verdicts": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("alerts", "judges"))
    parser.add_argument("--step", type=float, default=2.0, help="seconds of a minute")
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks" / "results" / "live_alerts.json")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.only and options.out.exists() else {}
    if options.only != "alerts":
        results |= all_judged()
    if options.only != "judges":
        results |= replayed(options.step)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    faults = ("wrong verdicts", "expected, and not received", "queries of the dashboard refused")
    return int(any(results.get(each) for each in (*faults, "queries of the runbook without an answer")))


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
