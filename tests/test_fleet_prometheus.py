"""The fleet by series: a real Prometheus that scrapes a double of an engine in each state; and servers that fail."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import record_dashboard
from fleet_simulator import NO_PLUGIN, STATES, Simulator, simulated
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.fleet import Fleet, FleetError, Source, as_json, kind, look_at, prometheus, render
from vllm_graphfix.commands.output import console

DOWN = "does not answer"


@pytest.fixture(scope="module")
def scraped(promtool: Path) -> Iterator[tuple[str, Simulator]]:
    """The address of a Prometheus that has scraped an engine in each state, and one that has ended since."""
    states = (*STATES, "fixed")
    with simulated(states) as simulator, record_dashboard.prometheus(simulator.urls, scrape=3) as running:
        deadline = time.monotonic() + 90  # a scrape takes seconds where other tests run beside
        for end in (len(states), len(states) - 1):
            while len(running.get("query", query="up == 1")["result"]) != end and time.monotonic() < deadline:
                time.sleep(0.5)
            simulator.states[-1] = None
        yield running.address, simulator


@pytest.fixture(scope="module")
def fleet(scraped: tuple[str, Simulator]) -> Fleet:
    return look_at(Source(scraped[0]))


def by_state(fleet: Fleet) -> dict[str, Any]:
    return {(*STATES, DOWN)[int(engine.name.rpartition("/")[2])]: engine for engine in fleet.engines}


EXPECTED = {
    "fixed": [],
    "counting": [],
    "stock": [],
    "wrong replay": ["the shadow check found wrong CUDA graph replays (3)"],
    "refused drafts": ["far fewer drafts of a CUDA graph are accepted than without it (8)"],
    "misconfigured": ["misconfigured: the value of VLLM_GRAPHFIX_SHADOW means nothing"],
    "failed fix": ["capture-state is failed: error (8 ranks)"],
    "full disk": ["record not written: what has changed since is not known (no space, a quota) (2)"],
    "hung rank": [
        "in one step for over two minutes: a collective or kernel that does not end, or a compiler (1)",
    ],
    "silent rank": ["not heard from for 60 s, or ended while it serves (1)"],
    "error of the gate": ["not checked: the comparison failed by an error of the plugin's own (8)"],
    "ranks of two versions": [
        "the ranks do not agree (7 do)",
        "capture-state is incompatible: new-code (1 rank)",
        "capture-state differs (2 states)",
    ],
    "older plugin": [],
    "older vLLM": [],
    "old numbers": ["its numbers are old: its records were not read (15 min)"],
    NO_PLUGIN: [
        "serves no graphfix_* series: the plugin is not loaded there, or its front-end is not vLLM's Python one"
    ],
    DOWN: [],
}


def test_each_planted_state_shows_and_nothing_else(fleet: Fleet) -> None:
    states = {state: list(engine.wrong) for state, engine in by_state(fleet).items()}
    states["old numbers"] = [re.sub(r"\d+ min", "15 min", text) for text in states["old numbers"]]
    assert states == EXPECTED
    kinds = {state: kind(engine) for state, engine in by_state(fleet).items() if not engine.wrong}
    assert kinds == {
        "fixed": "fixed",
        "counting": "counting",
        "stock": "stock",
        "older plugin": "fixed",
        "older vLLM": "fixed",
        DOWN: "starting",
    }
    assert fleet.exit_code == 1


def test_an_engine_that_does_not_answer_is_no_all_clear(scraped: tuple[str, Simulator], fleet: Fleet) -> None:
    engine = by_state(fleet)[DOWN]
    assert engine.notes == ("does not answer, and did before: it starts again, hangs, or has ended",)
    alone = look_at(Source(scraped[0], selector=f'instance=~".*/({len(STATES)}|0)"'))
    assert (len(alone.engines), alone.exit_code) == (2, 4)


@pytest.fixture(scope="module")
def history(promtool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Engines by what is stored of them: when each answered, in minutes before now, and then did not."""
    folder, now = tmp_path_factory.mktemp("history"), time.time()
    answered = {
        "serves": (range(-30, 1), ()),
        "restarts": (range(-30, -4), range(-4, 1)),
        "vanished": (range(-60, -20), range(-20, 1)),
        "vanished long ago": (range(-1450, -1430), range(-60, 1)),
        "never": ((), range(-30, 1)),
    }
    lines = []
    for instance, (up, down) in answered.items():
        for minute in (*up, *down):
            labels = f'{{job="vllm",instance="{instance}"}} '
            lines.append(f"up{labels}{int(minute in up)} {now + minute * 60}")
            if minute in up:
                lines.append(f"graphfix_canary{labels}1 {now + minute * 60}")
                lines.append(f'graphfix_build_info{{version="1",vllm="2",{labels[1:]}1 {now + minute * 60}')
    for pod in ("a", "b"):
        labels = f'{{job="vllm",instance="twins",pod="{pod}"}} '
        lines.append(f"graphfix_canary{labels}1 {now}")
        lines.append(f'graphfix_build_info{{version="{pod}",vllm="2",{labels[1:]}1 {now}')
        lines.append(f"graphfix_ranks_expected{labels}8 {now}")
        lines.append(f"graphfix_ranks_agreeing{labels}{8 - (pod == 'a')} {now}")
    lines += [f'up{{job="of others",instance="x"}} 0 {now}', "# EOF"]
    (folder / "text").write_text("\n".join(lines) + "\n")
    record_dashboard.stored(folder / "text", folder / "blocks")
    with record_dashboard.prometheus([], blocks=folder / "blocks") as running:
        yield look_at(Source(running.address))


def test_an_engine_that_does_not_answer_starts_or_is_a_fault(history: Fleet) -> None:
    engines = {engine.name.removeprefix("vllm/"): engine for engine in history.engines}
    assert {name: (engine.status, kind(engine)) for name, engine in engines.items()} == {
        "serves": ("in order", "stock"),
        "twins": ("not in order", "WRONG"),
        "restarts": ("starting", "starting"),
        "never": ("starting", "starting"),
        "vanished": ("silent", "WRONG"),
        "vanished long ago": ("silent", "WRONG"),
    }
    assert engines["never"].notes == ("has not answered in a day, as far as is known: it starts, or its start fails",)
    assert engines["vanished"].wrong[0].startswith("has not answered for 15 minutes, and did within a day")
    assert [
        replace(history, engines=(engines["serves"], engines[name])).exit_code for name in ("never", "vanished")
    ] == [4, 1]


def test_engines_that_labels_do_not_tell_apart_are_counted(history: Fleet) -> None:
    (twins,) = [engine for engine in history.engines if engine.name.endswith("twins")]
    assert (twins.wrong, twins.values_of("graphfix")) == (("the ranks do not agree (7 do)",), ("a", "b"))
    assert [note for note in history.notes if "several versions" not in note] == [
        (
            "1 name for 2 engines with equal cluster, namespace, job, instance, each name judged as one: relabel "
            "them, or have replicas of a Prometheus deduplicated (labels that differ: pod)"
        )
    ]


def test_what_no_series_has_is_null(fleet: Fleet) -> None:
    answer = as_json(fleet)
    (engine,) = [each for each in answer["engines"] if each["engine"] == by_state(fleet)["misconfigured"].name]
    assert (answer["folder"], engine["processes"], engine["fixes"], engine["master"], engine["bucket"]) == (None,) * 5
    assert engine["ranks"] == {"expected": 8, "recorded": None, "agreeing": 8, "unreadable": None, "missing": None}
    assert engine["misconfigured"] == {"VLLM_GRAPHFIX_SHADOW": None}
    assert (engine["model"], engine["vllm"], engine["graphfix"], engine["percentage"]) == (
        "m",
        ["0.33.0"],
        ["0.2.0"],
        25,
    )


def test_several_versions_are_a_note(fleet: Fleet) -> None:
    engines = len(STATES) - 1  # less the one without the plugin
    assert fleet.notes == (
        f"several versions of vLLM, on so many engines: 0.21.0 on 1, 0.33.0 on {engines - 1}",
        f"several versions of vllm-graphfix, on so many engines: 0.1.9 on 1, 0.2.0 on {engines - 1}",
    )


def test_a_selector_leaves_engines_out(scraped: tuple[str, Simulator]) -> None:
    done = CliRunner().invoke(
        app, ["fleet", "--prometheus", scraped[0], "--selector", '{instance=~".*/[01]"}', "--json"]
    )
    engines = json.loads(done.output)["engines"]
    assert (done.exit_code, [each["status"] for each in engines]) == (0, ["in order", "in order"])


def test_without_series_no_engine_runs(scraped: tuple[str, Simulator]) -> None:
    done = CliRunner().invoke(app, ["fleet", "--prometheus", scraped[0], "--selector", 'namespace="elsewhere"'])
    assert (done.exit_code, "has no series of vLLM's for these labels" in done.output) == (3, True)


def test_engines_of_which_the_same_is_wrong_are_one_line(fleet: Fleet) -> None:
    one = by_state(fleet)["failed fix"]
    other = replace(one, name="another", wrong=("capture-state is failed: error (3 ranks)",))
    screen = console()
    with screen.capture() as printed:
        screen.print(render(replace(fleet, engines=(one, other, by_state(fleet)["fixed"]))))
    assert "2 engines: capture-state is failed: error" in [line.strip(" ✗") for line in printed.get().splitlines()]


def test_an_engine_by_name_has_its_facts(fleet: Fleet) -> None:
    screen = console()
    with screen.capture() as printed:
        screen.print(render(fleet, engine=by_state(fleet)["hung rank"].name))
    text = " ".join(printed.get().split())
    assert "not in order vLLM 0.33.0, vllm-graphfix 0.2.0, in the rollout, 8 of 8 ranks agree ✗ in one step" in text


def test_a_whole_name_is_no_beginning_of_others(fleet: Fleet) -> None:
    name = by_state(fleet)[STATES[1]].name
    assert sum(engine.name.startswith(name) for engine in fleet.engines) > 1
    screen = console()
    with screen.capture() as printed:
        screen.print(render(fleet, engine=name))
    assert printed.get().count("vLLM 0.33.0") == 1


def test_a_wrong_selector_is_refused_by_the_server(scraped: tuple[str, Simulator]) -> None:
    with pytest.raises(FleetError, match=r"refuses .*parse error"):
        look_at(Source(scraped[0], selector="no matcher"))


@contextmanager
def server(
    status: int, answer: bytes | Callable[[bytes], bytes], requests: list[dict[str, str]] | None = None
) -> Iterator[str]:
    """A server that gives one answer, or one for each query."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = self.rfile.read(int(self.headers["Content-Length"]))
            body = answer if isinstance(answer, bytes) else answer(query)
            if requests is not None:
                requests.append(dict(self.headers))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the name is the base class's
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as serving:
        Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


NOW = b'{"status": "success", "data": {"result": [1764500000, "1764500000"]}}'
EMPTY = b'{"status": "success", "warnings": ["no store"], "data": {"result": []}}'


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, b"Unauthorized", "is no Prometheus: HTTP 401 Unauthorized"),
        (302, b"", "is no Prometheus: HTTP 302 Found"),
        (200, b"<html>", "is no Prometheus: HTTP 200 OK"),
        (422, b'{"status": "error", "error": "too\\nmany samples"}', r"refuses 'time\(\)': too many samples"),
    ],
)
def test_an_answer_that_is_none_is_an_error(status: int, body: bytes, error: str) -> None:
    with server(status, body) as address, pytest.raises(FleetError, match=error):
        look_at(Source(address))


def test_a_server_that_is_not_there_is_an_error() -> None:
    done = CliRunner().invoke(app, ["fleet", "--prometheus", "http://127.0.0.1:1"])
    assert (done.exit_code, "http://127.0.0.1:1/api/v1/ does not answer" in done.output) == (2, True)


def test_token_and_tenant_are_sent(tmp_path: Path) -> None:
    requests: list[dict[str, str]] = []
    (tmp_path / "token").write_text("a.b.c\n")
    with server(401, b"", requests) as address, pytest.raises(FleetError):
        look_at(Source(address, token_file=tmp_path / "token", tenant="team"))
    assert (requests[0]["Authorization"], requests[0]["X-Scope-OrgID"]) == ("Bearer a.b.c", "team")


def test_an_answer_that_may_lack_engines_is_no_all_clear() -> None:
    """Thanos says in a warning which of its stores did not answer."""
    with server(200, lambda query: NOW if query == b"query=time%28%29" else EMPTY) as address:
        fleet = look_at(Source(address))
    assert (fleet.problems, fleet.exit_code) == (("the answer may lack engines: no store",), 1)


def test_json_of_something_else_is_an_error() -> None:
    with server(200, EMPTY) as address, pytest.raises(FleetError, match="answers otherwise than a Prometheus"):
        look_at(Source(address))


def replying(*samples: tuple[dict[str, Any], Any], when: bytes = b"rollout_ratio") -> Callable[[bytes], bytes]:
    """Answer the query that contains *when* with *samples*, and all others with nothing."""
    result = [{"metric": labels, "value": [0, value]} for labels, value in samples]
    body = json.dumps({"status": "success", "data": {"result": result}}).encode()
    nothing = b'{"status": "success", "data": {"result": []}}'
    return lambda query: NOW if query == b"query=time%28%29" else body if when in query else nothing


CANARY = {"__name__": "graphfix_canary", "instance": "a"}


@pytest.mark.parametrize(
    "answer",
    [
        replying((CANARY | {"instance": "\x1b]0;a\x07"}, "1")),
        replying(
            (CANARY, "1"), (CANARY | {"__name__": "graphfix_build_info", "version": "\x1b[2J", "vllm": "\r"}, "1")
        ),
        replying(({"instance": "a", "model_name": "\x1b]8;;http://a\x07"}, "1"), when=b"model_name"),
        replying(({"fix": "\x1b[2J"}, "1"), when=b"count+by+%28fix%29"),
    ],
    ids=["instance", "version", "model", "fix"],
)
def test_labels_move_no_cursor(answer: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]) -> None:
    with server(200, answer) as address:
        console().print(render(look_at(Source(address)), everything=True))
    printed = capsys.readouterr().out
    assert "\N{REPLACEMENT CHARACTER}" in printed
    assert not {"\x1b", "\x07", "\r"} & {*printed}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"[" * 200_000, "is no Prometheus"),
        (replying((CANARY, 10**400)), "answers otherwise than a Prometheus"),
        (lambda query: NOW.replace(b"[1764500000", b'[{"metric": "", "value": [0, "1"]}'), "answers otherwise"),
        (json.dumps({"status": "error", "error": "a" * 10**6}).encode(), "refuses 'time\\(\\)': a{500}$"),
        (b" " * 2000, "more than 0 MiB"),
    ],
    ids=["depth", "number", "labels", "long error", "size"],
)
def test_a_hostile_answer_is_an_error(answer: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_LARGEST_ANSWER", 1500 if error.startswith("more") else 1 << 24)
    with server(200, answer) as address, pytest.raises(FleetError, match=error):
        look_at(Source(address))


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\nA: ", b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"])
def test_an_answer_that_trickles_in_is_not_waited_for(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_LONGEST", 1.0)

    def trickle(server: socket.socket) -> None:
        connection = server.accept()[0]
        with connection, suppress(OSError):
            connection.sendall(begin)
            while True:
                connection.sendall(b" ")
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=trickle, args=(server,), daemon=True).start()
        started = time.monotonic()
        with pytest.raises(FleetError, match="takes longer than 1 s"):
            look_at(Source(f"http://127.0.0.1:{server.getsockname()[1]}"))
        assert time.monotonic() - started < 20


def test_encodings_one_over_the_other_are_not_unpacked() -> None:
    class Answer(httpx.BaseTransport):
        def handle_request(self, _: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers={"Content-Encoding": "gzip, gzip"}, stream=httpx.ByteStream(b""))

    with (
        httpx.Client(transport=Answer(), base_url="http://a") as client,
        pytest.raises(FleetError, match="in an encoding that was not requested"),
    ):
        prometheus._Server(client, "")


@pytest.mark.parametrize("value", ["+Inf", "NaN"])
def test_a_target_without_labels_or_finite_numbers_hides_no_other(value: str) -> None:
    """Any target may serve what it likes."""
    bad = {"__name__": "graphfix_ranks_expected", "instance": "a"}
    with server(200, replying((CANARY, "1"), (bad, value))) as address:
        assert [engine.values_of("vllm") for engine in look_at(Source(address)).engines] == [()]
    with server(200, replying(({"instance": "a"}, "1"), when=b"failed%7Cconflict")) as address:
        (engine,) = look_at(Source(address)).engines
        assert engine.wrong == (" is :  (1 rank)",)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (Source("prometheus:9090"), "takes an address such as"),
        (Source("http://[::1"), "takes an address such as"),
        (Source("http://prometheus:99999x"), "takes an address such as"),
        (Source("https://me:secret@prometheus:9090"), "takes no password"),
        (Source("http://prometheus:9090", token_file=Path("/dev/null")), "over https only"),
        (Source("https://prometheus:9090", token_file=Path("/dev/null")), "does not hold one token"),
        (Source("https://prometheus:9090", token_file=Path("/nonexistent")), "cannot read /nonexistent"),
        (Source("https://prometheus:9090", ca_file=Path("/nonexistent")), "cannot read /nonexistent"),
    ],
)
def test_an_impossible_query_is_an_error_before_anything_is_sent(source: Source, error: str) -> None:
    with pytest.raises(FleetError, match=error):
        look_at(source)


@pytest.mark.parametrize(
    "options", [["--selector", 'job="a"'], ["--tenant", "a"], ["--prometheus", "http://a", "--dir", "."]]
)
def test_options_that_make_no_sense_together_are_refused(options: list[str]) -> None:
    assert CliRunner().invoke(app, ["fleet", *options]).exit_code == 2
