"""Points a real Prometheus at engines, and draws the answers: docs/dashboard.svg.

It asks Prometheus what every panel of the dashboard asks.

    python tools/record_dashboard.py --seconds 120 http://127.0.0.1:8000/metrics ...

Fails if an engine cannot be scraped, if Prometheus refuses a query, or if our rules do not load. It is not Grafana that
draws, so the picture shows what the panels ask and are told, roughly as Grafana lays them out.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from fetch_promtool import tool
from fetch_vllm import FetchError

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "deploy" / "grafana" / "vllm-graphfix.json"
RULES = ROOT / "deploy" / "prometheus" / "vllm-graphfix.rules.yml"
SCRAPE = 1
"""Seconds between two scrapes, and two evaluations of the rules."""
RATE = 10
"""Seconds that Grafana's $__rate_interval stands for here."""


class PrometheusError(RuntimeError):
    """Prometheus did not start, cannot scrape, or refuses a query."""


class Series(NamedTuple):
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]
    """Time in epoch seconds, and value."""


class Target(NamedTuple):
    """One query of a panel, with the variables of the dashboard put in."""

    query: str
    legend: str
    instant: bool


class Panel(NamedTuple):
    title: str
    kind: str
    unit: str
    place: Mapping[str, int]
    """Grafana's grid: x and w of 24 columns, y and h."""
    targets: Sequence[Target]
    renamed: Mapping[str, str]
    """Columns of a table."""
    excluded: frozenset[str]


def panels(dashboard: Path = DASHBOARD) -> list[Panel]:
    """Return the panels of the dashboard in order, rows included."""
    read = []
    for panel in json.loads(dashboard.read_text(encoding="utf-8"))["panels"]:
        targets = [
            Target(with_variables(each["expr"]), each.get("legendFormat", ""), bool(each.get("instant")))
            for each in panel.get("targets", ())
        ]
        organised: dict[str, Any] = panel.get("transformations", [{}])[0].get("options", {})
        read.append(
            Panel(
                panel["title"],
                panel["type"],
                panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""),
                panel["gridPos"],
                targets,
                organised.get("renameByName", {}),
                frozenset(organised.get("excludeByName", ())),
            )
        )
    return read


def with_variables(query: str) -> str:
    """Return *query* as Grafana sends it with All chosen."""
    return query.replace("$__rate_interval", f"{RATE}s").replace("$namespace", ".*").replace("$model_name", ".*")


class Prometheus:
    """A running Prometheus, by its HTTP API."""

    def __init__(self, address: str, engines: int) -> None:
        self.address = address
        self._engines = engines

    def get(self, path: str, **parameters: str) -> Any:
        """Return the ``data`` of an answer. Raises PrometheusError with its error."""
        url = f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 # our own, on this machine
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(json.load(error).get("error", str(error))) from error

    def instant(self, query: str) -> list[Series]:
        return [Series(each["metric"], _points([each["value"]])) for each in self.get("query", query=query)["result"]]

    def range(self, query: str, start: float, end: float) -> list[Series]:
        step = max(SCRAPE, (end - start) / 120)
        answer = self.get("query_range", query=query, start=f"{start}", end=f"{end}", step=f"{step}")
        return [Series(each["metric"], _points(each["values"])) for each in answer["result"]]

    def scraped(self) -> None:
        """Check the targets. Raises PrometheusError unless each was scraped at least once and none fails."""
        targets = self.get("targets")["activeTargets"]
        if len(targets) < self._engines:
            raise PrometheusError(
                f"{len(targets)} of {self._engines} engines were found: it takes Prometheus seconds to read their list"
            )
        for target in targets:
            if target["health"] != "up":
                raise PrometheusError(
                    f"{target['scrapeUrl']} cannot be scraped: {target['lastError'] or 'not yet tried'}"
                )

    def firing(self) -> list[str]:
        """Return alerts that are pending or firing, with state and labels."""
        return [
            f"{each['labels']['alertname']} ({each['state']}): {each['annotations']['summary']}"
            for each in self.get("alerts")["alerts"]
        ]


def _points(values: Sequence[tuple[float, str]]) -> list[tuple[float, float]]:
    return [(float(at), float(value)) for at, value in values if math.isfinite(float(value))]


@contextmanager
def prometheus(
    urls: Sequence[str],
    rules: Path = RULES,
    changes: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    *,
    scrape: int = SCRAPE,
    blocks: Path | None = None,
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes *urls* every *scrape* seconds with the project's rules, and end it on exit.

    *changes* replace sections of its configuration, *flags* are added to its command line; *blocks* is a folder of what
    it has stored already, as `stored` makes it.
    """
    binary = tool("prometheus")
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        groups = []
        for url in urls:
            parts = urllib.parse.urlsplit(url)
            path = parts.path or "/metrics"
            # Targets of one address are told apart by their paths.
            names = {} if path == "/metrics" else {"instance": f"{parts.netloc}{path.removesuffix('/metrics')}"}
            groups.append({"targets": [parts.netloc], "labels": {"__metrics_path__": path, **names}})
        (here / "engines.json").write_text(json.dumps(groups))
        settings = {
            "global": {
                "scrape_interval": f"{scrape}s",
                "scrape_timeout": f"{scrape}s",
                "evaluation_interval": f"{scrape}s",
            },
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "vllm", "file_sd_configs": [{"files": [str(here / "engines.json")]}]}],
            **(changes or {}),
        }
        (here / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(binary), f"--config.file={here / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={blocks or here / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", *flags]
        with (here / "log").open("w+") as log:
            process = subprocess.Popen(command, cwd=here, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                running = Prometheus(f"http://127.0.0.1:{port}", len(urls))
                _wait_until_ready(running, process, here / "log")
                yield running
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _wait_until_ready(running: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{running.address}/-/ready", timeout=5):  # noqa: S310 # our own, on this machine
                return
        except OSError:
            time.sleep(0.2)
    raise PrometheusError(f"Prometheus did not start:\n{log.read_text()}")


def stored(text: Path, blocks: Path) -> None:
    """Store the samples of *text*, which is in OpenMetrics' format with times, as blocks of a Prometheus.

    Raises PrometheusError with what promtool says of it.
    """
    command = [str(tool("promtool")), "tsdb", "create-blocks-from", "openmetrics", "--quiet"]
    command += ["--max-block-duration=24h", str(text), str(blocks)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PrometheusError(done.stdout + done.stderr)


class Answer(NamedTuple):
    """The series of a panel from Prometheus."""

    panel: Panel
    series: Sequence[tuple[str, Series]]
    """Each with its name in the legend."""


def ask(running: Prometheus, panel: Panel, start: float, end: float) -> Answer:
    """Send every query of *panel*. Raises PrometheusError for one that is refused."""
    series = []
    for target in panel.targets:
        try:
            answered = running.instant(target.query) if target.instant else running.range(target.query, start, end)
        except PrometheusError as error:
            raise PrometheusError(f"{panel.title}: {error}\n{target.query}") from error
        series += [(_legend(target.legend, each.labels), each) for each in answered if each.points]
    return Answer(panel, series)


def _legend(template: str, labels: Mapping[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template


# Drawing. The grid is Grafana's: 24 columns; a unit of height here has 26 pixels.

WIDTH, UNIT, GAP = 1200, 26, 6
INK, FAINT, PAPER = "#24292f", "#8c959f", "#ffffff"
SIDES = {"canary": "#e36209", "rest": "#0969da"}
_WIDEST = 96
"""Characters of a column: more would push the others into each other."""
PALETTE = ("#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0969da", "#cf222e", "#57606a", "#1b7c83")


def picture(answers: Sequence[Answer], start: float, end: float, about: str) -> str:
    """Return the dashboard as SVG, from *start* to *end*; *about* names the servers."""
    height = max((each.panel.place["y"] + each.panel.place["h"]) * UNIT for each in answers) + 34
    drawn = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
            'font-size="11">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="#f6f8fa"/>',
        _text(
            GAP,
            20,
            f"vLLM graphfix: the panels of the Grafana dashboard, answered by Prometheus ({about})",
            size=14,
            bold=True,
        ),
    ]
    for answer in answers:
        place = answer.panel.place
        near, top = place["x"] * WIDTH / 24, place["y"] * UNIT + 30
        width, tall = place["w"] * WIDTH / 24 - GAP, place["h"] * UNIT - GAP
        drawn.append(f'<g transform="translate({near + GAP / 2:.1f} {top:.1f})">')
        if answer.panel.kind == "row":
            drawn.append(_text(2, 16, answer.panel.title, size=13, bold=True))
        else:
            drawn.append(f'<rect width="{width:.1f}" height="{tall}" rx="3" fill="{PAPER}" stroke="#d0d7de"/>')
            drawn.append(_text(8, 16, answer.panel.title, bold=True))
            if not answer.series:
                drawn.append(_text(8, tall / 2 + 8, "no data", fill=FAINT))
            elif answer.panel.kind == "timeseries":
                drawn += _lines(answer, width, tall, start, end)
            else:
                drawn += {"stat": _number, "table": _table}[answer.panel.kind](answer, width, tall)
        drawn.append("</g>")
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _text(
    x: float, y: float, words: str, *, size: int = 11, bold: bool = False, fill: str = INK, anchor: str = "start"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" '
        f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def _formatted(value: float, unit: str) -> str:
    if unit == "percentunit":
        value, unit = value * 100, "percent"
    if unit == "s" and value < 1:
        value, unit = value * 1000, "ms"
    suffix = {"percent": " %", "s": " s", "ms": " ms", "cps": " /s"}.get(unit, "")
    return f"{value:.3g}{suffix}" if value < 1000 else f"{value:.0f}{suffix}"


def _number(answer: Answer, width: float, tall: float) -> list[str]:
    value = answer.series[0][1].points[-1][1]
    return [_text(width / 2, tall / 2 + 22, _formatted(value, answer.panel.unit), size=28, anchor="middle")]


def _cut(cell: str) -> str:
    return cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…"


def _table(answer: Answer, width: float, tall: float) -> list[str]:
    columns = [
        name
        for name in ("instance", "fix", "mode", "state", "code")
        if name not in answer.panel.excluded and any(name in series.labels for _, series in answer.series)
    ]
    rows = [
        [*(_cut(series.labels.get(name, "")) for name in columns), f"{series.points[-1][1]:.0f}"]
        for _, series in answer.series
    ]
    heads = [*columns, answer.panel.renamed.get("Value", "Value")]
    shares = [max(len(row[place]) for row in (heads, *rows)) + 2 for place in range(len(heads))]
    edges = [8 + (width - 16) * sum(shares[:place]) / sum(shares) for place in range(len(shares))]
    drawn = [_text(edge, 36, head, fill=FAINT) for edge, head in zip(edges, heads, strict=True)]
    room = int((tall - 62) // 16)
    for place, row in enumerate(sorted(rows)[:room]):
        drawn += [_text(edge, 54 + 16 * place, cell) for edge, cell in zip(edges, row, strict=True)]
    if len(rows) > room:
        drawn.append(_text(8, 54 + 16 * room, f"and {len(rows) - room} more", fill=FAINT))
    return drawn


def _rounded_up(value: float) -> float:
    """Return the upper end of an axis: a round number, whose half is round, too."""
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * step for step in (1, 2, 3, 4, 5, 6, 8, 10) if size * step >= value * 0.999)


def _lines(answer: Answer, width: float, tall: float, start: float, end: float) -> list[str]:
    top = _rounded_up(max(0, *(value for _, series in answer.series for _, value in series.points)) or 1)
    near, right, upper, lower = 48, width - 10, 28, tall - 58

    def x(at: float) -> float:
        return near + (right - near) * (at - start) / (end - start)

    def y(value: float) -> float:
        return lower - (lower - upper) * value / top

    drawn = [
        _text(near, lower + 13, f"{start - end:.0f} s", size=10, fill=FAINT),
        _text(right, lower + 13, "now", size=10, fill=FAINT, anchor="end"),
    ]
    for tick in (0, top / 2, top):
        drawn.append(f'<path d="M{near} {y(tick):.1f}H{right:.1f}" stroke="#eaeef2"/>')
        drawn.append(
            _text(near - 5, y(tick) + 4, _formatted(tick, answer.panel.unit), size=10, fill=FAINT, anchor="end")
        )
    at, line = 8.0, tall - 31
    unnamed = 0
    for place, (name, series) in enumerate(answer.series):
        side, _, what = name.partition(" ")
        colour = SIDES.get(side, PALETTE[place % len(PALETTE)])
        dashes = ' stroke-dasharray="4 3"' if what in ("p95", "waiting") else ""
        path = " ".join(
            f"{'L' if number else 'M'}{x(when):.1f} {y(value):.1f}"
            for number, (when, value) in enumerate(series.points)
        )
        if len(series.points) == 1:
            path += " h1"
        drawn.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>')
        room = 24 + 5.6 * len(name)
        if at > 8 and at + room > width:
            at, line = 8.0, line + 13
        if line >= tall:
            unnamed += 1
        else:
            drawn.append(f'<path d="M{at:.1f} {line - 4:.1f}h12" stroke="{colour}" stroke-width="2"{dashes}/>')
            drawn.append(_text(at + 16, line, name, size=10))
        at += room
    if unnamed:
        drawn.append(_text(right, 16, f"and {unnamed} more", size=10, fill=FAINT, anchor="end"))
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL", help="/metrics of an engine")
    parser.add_argument("--seconds", type=float, default=120, metavar="N", help="how long to scrape (default: 120)")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "dashboard.svg", metavar="FILE")
    parser.add_argument("--about", metavar="TEXT", help="whose figures these are (default: how many engines)")
    options = parser.parse_args(arguments)
    about = options.about or f"engines: {len(options.urls)}"
    try:
        with prometheus(options.urls) as running:
            start = time.time()
            time.sleep(options.seconds)
            running.scraped()
            end = time.time()
            answers = [ask(running, panel, start, end) for panel in panels()]
            alerts = running.firing()
    except (FetchError, PrometheusError) as error:
        print(f"record_dashboard: {error}", file=sys.stderr)
        return 1
    options.into.write_text(picture(answers, start, end, about), encoding="utf-8")
    for answer in answers:
        if answer.panel.targets:
            print(f"{len(answer.series):3} series  {answer.panel.title}")
    print(*(alerts or ["no alert"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
