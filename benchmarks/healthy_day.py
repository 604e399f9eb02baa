"""A healthy day of 2,000 engines, in which no alert may fire: a real Prometheus evaluates the rules as they ship.

    python benchmarks/healthy_day.py [--engines 2000] [--out FILE]

Twenty models with a hundred engines each, a sample a minute. Every engine is restarted by a rolling upgrade of the
plugin, some by their node too; a scrape in 500 fails; traffic follows the day, and stops at night for a fifth of the
models; canary engines are 2 % slower; and at 18:00 the rollout goes from 5 to 25 %. Alerts join metrics of one engine,
or of one model, so a model at a time is the same as all of them. Its day is stored by promtool, and so are its
recording rules; each alert's expression is evaluated once a minute, and has fired where it held for as long as its
`for` says. Exit code 1 if an alert has fired, or if none does on a day on which one engine has a wrong replay.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from live_alerts import expanded
from live_alerts import minutes as minutes_of
from measuring import PROJECT

from deployed import RULES, rules  # isort: skip # on the path by the lines before
from fetch_promtool import tool  # isort: skip
from record_dashboard import prometheus, stored  # isort: skip
from vllm_graphfix.settings.decision import bucket

DAY = 24 * 60
BEFORE, AFTER, RAISED = 0.05, 0.25, 18 * 60
ACTIVE, WATCHED = ("mamba-padding", "prefill-dispatch", "idle-rank"), ("shadow", "kv-marks")


class Engine:
    """The day of one engine as samples of promtool."""

    def __init__(self, name: str, model: str, chance: random.Random, number: int, idle_at_night: bool) -> None:
        self._labels = f'job="vllm", namespace="{model}", instance="{name}"'
        self._model = f'{self._labels}, model_name="{model}", engine="0"'
        self._chance, self._idle = chance, idle_at_night
        upgrade = 8 * 60 + number * 4 + chance.randrange(4)
        restarts = {upgrade}
        if chance.random() < 0.03:
            restarts.add(chance.choice((chance.randrange(60, 6 * 60), chance.randrange(20 * 60, DAY - 60))))
        share = bucket(name) / 10_000
        if BEFORE <= share < AFTER:
            restarts.add(RAISED + number % 40)
        self._lives: list[tuple[int, int]] = []
        begins = 0
        for restart in sorted(restarts):
            self._lives.append((begins, restart))
            begins = restart + chance.randint(3, 9)
        self._lives.append((begins, DAY))
        self._upgrade, self._share = upgrade, share
        self._missed = {minute for minute in range(DAY) if chance.random() < 0.002}

    def _samples(self, value: Callable[[int, int, int], float | None]) -> str:
        """Return samples by *value* of the minute and of the life's first and last; None for no sample."""
        samples: list[float | None] = [None] * DAY
        for first, end in self._lives:
            for minute in range(first, end):
                if minute not in self._missed:
                    samples[minute] = value(minute, first, end - 1)
        return " ".join(_compressed(samples))

    def _constant(self, number: float) -> str:
        return self._samples(lambda *_: number)

    def _counter(self, a_minute: Callable[[int], float]) -> str:
        total = 0.0

        def count(minute: int, first: int, _: int) -> float:
            nonlocal total
            total = 0.0 if minute == first else total + a_minute(minute)
            return round(total, 3)

        return self._samples(count)

    def _counter_by_load(self, at_the_peak: float, noise: float = 0.0) -> str:
        def a_minute(minute: int) -> float:
            return at_the_peak * self._load(minute) * self._chance.uniform(1 - noise, 1 + noise)

        return self._counter(a_minute)

    def _while_canary(self, canary: bool) -> str:
        return self._samples(lambda _, first, __: 8 if self._canary(first) == canary else None)

    def _while_upgraded(self, upgraded: bool) -> str:
        return self._samples(lambda _, first, __: 1 if (first > self._upgrade) == upgraded else None)

    def _load(self, minute: int) -> float:
        """Return the share of the peak: least at 3:00."""
        if self._idle and minute < 6 * 60:
            return 0.0
        return 0.25 + 0.75 * (1 - abs((minute / 60 - 15) % 24 - 12) / 12) if minute >= 180 else 0.2

    def _canary(self, first: int) -> bool:
        return self._share < (AFTER if first >= RAISED else BEFORE)

    def series(self, *, wrong: bool) -> Iterable[tuple[str, str]]:
        """Yield name and samples of each series."""
        own, chance = self._labels, self._chance
        names = "agreeing", "expected"
        yield from ((f"graphfix_ranks_{name}{{{own}}}", self._constant(8)) for name in names)
        for name in ("ranks_unchecked", "ranks_outdated", "records_unreadable", "steps_stuck"):
            yield f"graphfix_{name}{{{own}}}", self._constant(0)
        # Ranks end a moment before the front-end, and their records are read a moment after its start.
        yield f"graphfix_ranks_silent{{{own}}}", self._samples(lambda minute, _, last: 8 * (minute == last < DAY - 1))
        yield f"graphfix_ranks_unrecorded{{{own}}}", self._samples(lambda minute, first, _: 8 * (minute == first > 0))
        yield (
            f"graphfix_records_read_timestamp_seconds{{{own}}}",
            self._samples(lambda minute, *_: minute * 60 - chance.choice((2, 5))),
        )
        yield f"graphfix_canary{{{own}}}", self._samples(lambda _, first, __: int(self._canary(first)))
        yield (
            f"graphfix_rollout_ratio{{{own}}}",
            self._samples(lambda _, first, __: AFTER if first >= RAISED else BEFORE),
        )
        for version, upgraded in (("0.1.0", False), ("0.2.0", True)):
            build = f'{own}, version="{version}", vllm="0.21.0"'
            yield (
                f"graphfix_build_info{{{build}}}",
                self._while_upgraded(upgraded),
            )
        for fix in ACTIVE + WATCHED:
            for state, canary in (("active", True), ("not-in-canary", False)):
                labels = f'{own}, fix="{fix}", mode="auto", state="{state}", code="none"'
                yield (
                    f"graphfix_fix_ranks{{{labels}}}",
                    self._while_canary(canary),
                )
        planted = 'fix="shadow", event="mismatches"'
        rates = {'fix="shadow", event="checks"': 0.6, 'fix="kv-marks", event="looks"': 6.0, planted: 0.0}
        rates |= {'fix="mamba-padding", event="padded-row-prefilling"': 3.0, 'fix="addresses", event="failures"': 0.0}
        for labels, rate in rates.items():
            if wrong and labels == planted:
                yield f"graphfix_events_total{{{own}, {labels}}}", self._samples(lambda minute, *_: int(minute > 720))
            else:
                yield (
                    f"graphfix_events_total{{{own}, {labels}}}",
                    self._counter_by_load(rate),
                )
        yield from self._series_of_vllm()

    def _series_of_vllm(self) -> Iterable[tuple[str, str]]:
        chance, load, model = self._chance, self._load, self._model
        slower = 1.02 if self._share < AFTER else 1.0
        yield f"up{{{self._labels}}}", " ".join(_compressed([int(self._is_up(minute)) for minute in range(DAY)]))
        yield f"process_start_time_seconds{{{self._labels}}}", self._samples(lambda _, first, __: first * 60)
        yield f"vllm:num_requests_running{{{model}}}", self._samples(lambda minute, *_: round(20 * load(minute)))
        rates: dict[str, Callable[[int], float]] = {
            "generation_tokens_total": lambda minute: 24_000 * load(minute),
            "iteration_tokens_total_count": lambda minute: 1_200 * min(1, 4 * load(minute)),
            "inter_token_latency_seconds_count": lambda minute: 24_000 * load(minute),
            "inter_token_latency_seconds_sum": lambda minute: 480 * load(minute) * slower * chance.uniform(0.9, 1.1),
            "time_to_first_token_seconds_count": lambda minute: 120 * load(minute),
            "time_to_first_token_seconds_sum": lambda minute: 24 * load(minute) * chance.uniform(0.8, 1.3),
        }
        for name, rate in rates.items():
            yield f"vllm:{name}{{{model}}}", self._counter(rate)
        for reason, share in {"stop": 0.875, "length": 0.12, "abort": 0.004, "error": 0.001}.items():
            yield (
                f'vllm:request_success_total{{{model}, finished_reason="{reason}"}}',
                self._counter_by_load(120 * share, 0.5),
            )

    def _is_up(self, minute: int) -> bool:
        return minute not in self._missed and any(first <= minute < end for first, end in self._lives)


def _compressed(samples: list[float | None]) -> Iterable[str]:
    """Yield promtool's notation of *samples*; what ends becomes stale, as after a scrape that fails."""
    runs: list[tuple[float | None, int]] = []
    for sample in samples:
        if runs and runs[-1][0] == sample:
            runs[-1] = sample, runs[-1][1] + 1
        else:
            runs.append((sample, 1))
    before: float | None = None
    for sample, length in runs:
        if sample is None:
            ends = before is not None
            yield from ["stale"] if ends else []
            yield from [f"_x{length - ends}"] if length > ends else []
        else:
            yield f"{sample:g}x{length - 1}" if isinstance(sample, int) else f"{sample!r}x{length - 1}"
        before = sample


def fired(folder: Path, model: str, engines: int, *, wrong: bool = False) -> dict[str, int]:
    """Return the alerts of one model that have fired, with the minute in which each first did."""
    start = int(time.time()) // (DAY * 60) * DAY * 60 - 2 * DAY * 60
    text, blocks = folder / f"{model}.txt", folder / model
    with text.open("w") as file:
        for line in _exposed(model, engines, start, wrong=wrong):
            file.write(line)
        file.write("# EOF\n")
    stored(text, blocks)
    text.unlink()
    # A series ends with the scrape that fails, of which nothing is stored but that there is no sample.
    flags = ["--query.lookback-delta=59s", "--query.max-samples=500000000", "--query.timeout=10m"]
    span = {"start": f"{start}", "end": f"{start + (DAY - 1) * 60}"}
    command = [str(tool("promtool")), "tsdb", "create-blocks-from", "rules", "--eval-interval=1m"]
    command += [f"--{key}={value}" for key, value in span.items()] + [f"--output-dir={blocks}"]
    nothing = folder / "none.yml"
    nothing.write_text("groups: []")
    with prometheus([], nothing, {"scrape_configs": []}, flags, blocks=blocks) as running:
        subprocess.run([*command, f"--url={running.address}", str(RULES)], check=True, capture_output=True)
    alerts = {}
    with prometheus([], nothing, {"scrape_configs": []}, flags, blocks=blocks) as running:
        for rule in rules():
            if "alert" in rule:
                answer = running.get("query_range", query=rule["expr"], step="60", **span)["result"]
                minutes = [
                    (int(at) - start) // 60 for each in answer for at in _firing(each["values"], rule.get("for"))
                ]
                if minutes:
                    alerts[rule["alert"]] = min(minutes)
    shutil.rmtree(blocks)
    return alerts


def _exposed(model: str, engines: int, start: int, *, wrong: bool) -> Iterator[str]:
    """Yield the samples of all series of a model, in OpenMetrics' format."""
    chance = random.Random(model)  # noqa: S311 # the same day every time
    idle = chance.random() < 0.2
    times = [f" {start + minute * 60}\n" for minute in range(DAY)]
    for number in range(engines):
        engine = Engine(f"{model}-{number}", model, chance, number, idle)
        for name, values in engine.series(wrong=wrong and number == 7):
            ahead = start if name.startswith("graphfix_records_read_timestamp_seconds") else 0
            series = name.replace(", ", ",")
            yield "".join(
                f"{series} {value + ahead!r}{at}"
                for value, at in zip(expanded(values), times, strict=False)
                if value is not None
            )


def _firing(values: Sequence[tuple[float, str]], wait: str | None) -> Iterator[float]:
    """Yield the times at which an alert with these samples fires, by its `for`."""
    since = before = -math.inf
    for at, _ in values:
        if at - before > 60:
            since = at
        before = at
        if at - since >= (minutes_of(wait) if wait else 0) * 60:
            yield at


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2000)
    parser.add_argument("--models", type=int, default=20, help="that serve them, as many engines each")
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks" / "results" / "healthy_day.json")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        control = fired(Path(folder), "control", 10, wrong=True)
        alerts: dict[str, dict[str, int]] = {}
        for number in range(options.models):
            model = f"model-{number:02d}"
            alerts[model] = fired(Path(folder), model, options.engines // options.models)
            print(model, alerts[model] or "no alert", flush=True)
    result = {
        "engines": options.engines,
        "models": len(alerts),
        "fired, and in which minute first": {model: each for model, each in alerts.items() if each},
        "fires on the day with a wrong replay": "GraphfixReplayWrong" in control,
        "seconds": round(time.monotonic() - started),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(any(alerts.values()) or not result["fires on the day with a wrong replay"])


if __name__ == "__main__":
    sys.exit(main())
