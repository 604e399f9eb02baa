"""A fleet by the series that its front-ends expose, as a Prometheus has them, or what answers as one does.

Every question is filtered and summed by the server: a few series of each engine, and those of what is wrong. What no
series has is not known: which rank it is, reasons in words, graphs, and what an engine does that has not come to serve.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.commands.fleet.engine import Engine
from vllm_graphfix.commands.fleet.judgement import LIMITED
from vllm_graphfix.commands.fleet.member import Member
from vllm_graphfix.commands.fleet.survey import Fleet, FleetError
from vllm_graphfix.records import identity
from vllm_graphfix.records.liveness import SILENT_AFTER
from vllm_graphfix.text import lasting, printable

if TYPE_CHECKING:
    import httpx

TARGET = ("cluster", "namespace", "job", "instance")
"""The labels that name an engine; those that a Prometheus does not have are empty."""
_IDS = ", ".join(TARGET)
_TIMEOUT = 30.0
_LOCAL = ("localhost", "127.0.0.1", "::1")
_DETECTORS = "shadow|kv-marks|abort"
_STALE = 120
"""Seconds after which the numbers of a front-end are old, as in `GraphfixRecordsStale`."""
_NOT_COUNTED = "what its ranks do about the fixes is not known"

Labels = dict[str, str]


class Source(NamedTuple):
    """Whom to ask."""

    url: str
    selector: str = ""
    """Matchers of target labels, such as ``namespace="llm"``."""
    token_file: Path | None = None
    ca_file: Path | None = None
    tenant: str | None = None
    """The X-Scope-OrgID of a Mimir or Cortex with several tenants."""


class _Trouble(NamedTuple):
    """A query whose every sample is a finding about an engine."""

    query: str
    text: Callable[[Labels, float], str]
    """The sentence of a sample. What differs between engines with the same problem is in brackets at its end."""
    is_wrong: bool | Callable[[Labels], bool] = True


def _ranks(number: float) -> str:
    return f"({number:.0f} rank{'' if number == 1 else 's'})"


def _limit(labels: Labels, number: float) -> str:
    return f"{labels['fix']} is limited: {labels['code']} {_ranks(number)}"


_GAUGES = {
    "graphfix_ranks_silent": f"not heard from for {SILENT_AFTER:.0f} s, or ended while it serves",
    "graphfix_ranks_unrecorded": "no record of ranks: without the plugin, or with another status folder",
    "graphfix_ranks_unchecked": "not checked: the comparison failed by an error of the plugin's own",
    "graphfix_ranks_outdated": "record not written: what has changed since is not known (no space, a quota)",
    "graphfix_steps_stuck": "in one step for over two minutes: a collective or kernel that does not end, or a compiler",
    "graphfix_records_unreadable": "a record cannot be read",
}
_EVENTS = {
    ("shadow", "mismatches"): "the shadow check found wrong CUDA graph replays",
    ("kv-marks", "changed"): "finished cache blocks have changed",
    ("claims", "prompts-in-graphs"): "full graphs hold decodes with drafts as prompts, and may answer wrongly",
    ("addresses", "failures"): "addresses are not compared any more",
    ("claims", "failures"): "claims of builders were not checked",
}
_MORE_STATES = f'(group by ({_IDS}, fix, state) (graphfix_fix_ranks{{fix!="abort", state!="waiting", $}} > 0)) > 1'
_FINDINGS = f'fix=~"{"|".join({fix for fix, _ in _EVENTS})}", event=~"{"|".join({event for _, event in _EVENTS})}"'
_TROUBLES = (
    _Trouble(
        f'{{__name__=~"{"|".join(_GAUGES)}", $}} > 0',
        lambda labels, number: f"{_GAUGES[labels['__name__']]} ({number:.0f})",
    ),
    _Trouble(
        "graphfix_ranks_agreeing{$} < graphfix_ranks_expected{$}",
        lambda labels, number: f"the ranks do not agree ({number:.0f} do)",
    ),
    _Trouble(
        f"graphfix_ranks_expected{{$}} unless on ({_IDS}) graphfix_ranks_agreeing{{$}}",
        lambda labels, number: "not compared with each other, as far as is known",
        is_wrong=False,
    ),
    _Trouble(
        'graphfix_fix_ranks{state=~"failed|conflict|incompatible", $} > 0',
        lambda labels, number: f"{labels['fix']} is {labels['state']}: {labels['code']} {_ranks(number)}",
    ),
    _Trouble(
        f"count by ({_IDS}, fix) {_MORE_STATES}",
        lambda labels, number: f"{labels['fix']} differs ({number:.0f} states)",
    ),
    _Trouble(
        f'graphfix_fix_ranks{{state="active", code=~"{"|".join(LIMITED)}", $}} > 0',
        _limit,
        lambda labels: LIMITED[labels["code"]],
    ),
    _Trouble(
        'graphfix_fix_ranks{state="active", code="nothing-marked", $} > 0',
        lambda labels, number: f"no cache block is watched {_ranks(number)}",
        is_wrong=False,
    ),
    _Trouble(
        f"graphfix_events_total{{{_FINDINGS}, $}} > 0",
        lambda labels, number: f"{_EVENTS.get((labels['fix'], labels['event']), '')} ({number:.0f})",
        lambda labels: labels["event"] != "failures",
    ),
    _Trouble(
        'graphfix_events_total{fix="addresses", event="moved", $} '
        '- ignoring (event) graphfix_events_total{fix="addresses", event="repaired", $} > 0',
        lambda labels, number: f"tensors lie elsewhere than CUDA graphs have them ({number:.0f})",
    ),
    _Trouble(
        "graphfix_misconfigured_variable{$} > 0",
        lambda labels, number: f"misconfigured: the value of {labels['variable']} means nothing",
    ),
    _Trouble(
        f"time() - graphfix_records_read_timestamp_seconds{{$}} > {_STALE}",
        lambda labels, number: f"its numbers are old: its records were not read ({lasting(number)})",
    ),
)
_FACTS = '{__name__=~"graphfix_(canary|rollout_ratio|ranks_expected|ranks_agreeing|build_info)", $}'
_STATES = f'group by ({_IDS}, state) (graphfix_fix_ranks{{fix!~"{_DETECTORS}", state=~"active|observing", $}} > 0)'
_SERVING = f"group by ({_IDS}, model_name) (vllm:num_requests_running{{$}})"
_UNKNOWN = f'count by (fix) (group by ({_IDS}, fix) (graphfix_fix_ranks{{state="unknown", $}} > 0))'
_GONE = (
    f"group by ({_IDS}) (last_over_time(graphfix_canary{{$}}[1h])) unless on ({_IDS}) graphfix_canary{{$}} "
    f"and on ({_IDS}) up{{$}} == 0"
)


@dataclass(frozen=True)
class SeriesEngine(Engine):
    """An engine of which only series are known: no processes, and no ranks of its own."""

    facts: dict[str, float] = field(default_factory=dict)
    """The value of each series that an engine has once, without its prefix."""
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Versions and models of the engine, each once: by name of the field, as a record calls it."""
    applied: frozenset[str] = frozenset()

    @cached_property
    def live(self) -> bool:
        return self.facts.get("gone") is None

    @property
    def owner(self) -> int | None:
        return None

    @property
    def status(self) -> str:
        return "silent" if not self.live else "not in order" if self.wrong else "in order"

    @property
    def starting(self) -> tuple[Member, ...]:
        return ()

    def values_of(self, key: str) -> tuple[Any, ...]:
        return self.values.get(key, ())

    def whole(self, name: str) -> int | None:
        return int(self.facts[name]) if name in self.facts else None

    @property
    def agreeing(self) -> int | None:
        return self.whole("ranks_agreeing")

    @property
    def canary(self) -> bool | None:
        return bool(self.facts["canary"]) if "canary" in self.facts else None

    @property
    def graphs(self) -> bool | None:
        return None

    @property
    def states_of_fixes(self) -> frozenset[str]:
        return self.applied


def look_at(source: Source) -> Fleet:
    """Return the engines of which the Prometheus of *source* has series. Raises FleetError if it does not answer."""
    with _client(source) as client:
        try:
            return replace(_fleet(_Server(client, source.selector)), prometheus=source.url)
        except (LookupError, TypeError, ValueError) as error:
            raise FleetError(f"{source.url} answers otherwise than a Prometheus ({error!r})") from None


def _client(source: Source) -> httpx.Client:
    try:
        import httpx
    except ImportError:
        raise FleetError("--prometheus needs httpx: pip install 'vllm-graphfix[prometheus]'") from None
    try:
        address = httpx.URL(source.url)
    except httpx.InvalidURL:
        address = httpx.URL("")
    if address.userinfo:
        raise FleetError("--prometheus takes no password, which other users would see: put a token into a --token-file")
    if address.scheme not in ("http", "https") or not address.host:
        raise FleetError(f"--prometheus takes an address such as https://prometheus:9090, not {source.url!r}")
    is_local = address.host in _LOCAL
    headers = {} if source.tenant is None else {"X-Scope-OrgID": source.tenant}
    try:
        if source.token_file is not None:
            if address.scheme != "https" and not is_local:
                raise FleetError("a token is sent over https only")
            words = source.token_file.read_text(encoding="ascii").split()
            if len(words) != 1:
                raise FleetError(f"--token-file={str(source.token_file)!r} does not hold one token")
            headers["Authorization"] = f"Bearer {words[0]}"
        trusted = ssl.create_default_context(cafile=source.ca_file)
    except (OSError, UnicodeError) as error:
        which = source.token_file if isinstance(error, UnicodeError) else getattr(error, "filename", None)
        raise FleetError(
            f"cannot read {which or source.ca_file}: {getattr(error, 'strerror', None) or error}"
        ) from None
    return httpx.Client(
        base_url=source.url.rstrip("/") + "/api/v1/",
        headers=headers,
        verify=trusted,
        timeout=_TIMEOUT,
        trust_env=not is_local,  # a proxy of the environment would read a token for this machine in the clear
    )


class _Server:
    """A server that answers queries, all of them for one moment by its own clock."""

    def __init__(self, client: httpx.Client, selector: str) -> None:
        self._client, self._selector = client, selector.strip().removeprefix("{").removesuffix("}").strip(", ")
        self._moment: dict[str, str] = {}
        self.warnings: list[str] = []
        now = self._data("time()")
        self._moment = {"time": str(now["result"][0])}

    def ask(self, query: str) -> Iterator[tuple[Labels, float]]:
        """Yield labels and value of each sample of *query*, in which ``$`` stands for the selector. No NaN."""
        for sample in self._data(query.replace("$", self._selector))["result"]:
            value = float(sample["value"][1])
            if not math.isnan(value):
                yield sample["metric"], value

    def _data(self, query: str) -> Any:
        import httpx

        try:
            response = self._client.post("query", data={"query": query, **self._moment})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise FleetError(f"{self._client.base_url} does not answer: {str(error) or type(error).__name__}") from None
        body: Any = None
        with suppress(ValueError):
            body = response.json()
        if not isinstance(body, dict) or body.get("status") not in ("success", "error"):
            raise FleetError(
                f"{self._client.base_url}query is no Prometheus: HTTP {response.status_code} {response.reason_phrase}"
            )
        if body["status"] == "error":
            raise FleetError(f"{self._client.base_url} refuses {query!r}: {printable(str(body.get('error')))}")
        self.warnings += [printable(str(each)) for each in body.get("warnings") or ()]
        return body["data"]


def _fleet(server: _Server) -> Fleet:
    facts: dict[tuple[str, ...], dict[str, float]] = {}
    values: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
    applied: dict[tuple[str, ...], set[str]] = {}
    wrong: dict[tuple[str, ...], list[str]] = {}
    notes: dict[tuple[str, ...], list[str]] = {}
    for labels, value in server.ask(_FACTS):
        target, name = _target(labels), labels["__name__"].removeprefix("graphfix_")
        facts.setdefault(target, {})[name] = value
        if name == "build_info":
            for key, label in (("graphfix", "version"), ("vllm", "vllm")):
                versions = values.setdefault(target, {}).get(key, ())
                values[target][key] = tuple(dict.fromkeys((*versions, labels.get(label, ""))))
    for labels, _ in server.ask(_STATES):
        applied.setdefault(_target(labels), set()).add(labels["state"])
    for labels, _ in server.ask(_SERVING):
        target = _target(labels)
        values.setdefault(target, {})["model"] = (labels.get("model_name", ""),)
        if "canary" not in facts.setdefault(target, {}):
            wrong[target] = [
                "serves no graphfix_* series: the plugin is not loaded there, or its front-end is not vLLM's Python one"
            ]
    for labels, _ in server.ask(_GONE):
        facts.setdefault(_target(labels), {})["gone"] = 1.0
        notes[_target(labels)] = ["does not answer, and did within the hour: it starts again, hangs, or is stopped"]
    for trouble in _TROUBLES:
        for labels, value in server.ask(trouble.query):
            facts.setdefault(_target(labels), {})
            if "variable" in labels:
                known = values.setdefault(_target(labels), {})
                known["misconfigured"] = (*known.get("misconfigured", ()), labels["variable"])
            is_wrong = trouble.is_wrong(labels) if callable(trouble.is_wrong) else trouble.is_wrong
            sentences = (wrong if is_wrong else notes).setdefault(_target(labels), [])
            sentences.append(printable(trouble.text(labels, value)))
    for target, of_engine in facts.items():
        if "canary" in of_engine and "build_info" not in of_engine:
            wrong.setdefault(target, []).append(f"its vllm-graphfix has no graphfix_build_info: {_NOT_COUNTED}")
    engines = [
        SeriesEngine(
            "/".join(filter(None, map(printable, target))),
            (),
            wrong=tuple(dict.fromkeys(wrong.get(target, ()))),
            notes=tuple(dict.fromkeys(notes.get(target, ()))),
            facts=of_engine,
            values=values.get(target, {}),
            applied=frozenset(applied.get(target, ())),
        )
        for target, of_engine in facts.items()
    ]
    general = [*_about_versions(engines)]
    if unknown := [f"{labels['fix']} ({value:.0f})" for labels, value in server.ask(_UNKNOWN)]:
        general.append(
            f"cannot be told, since vLLM is newer than what is known, on so many engines: {', '.join(sorted(unknown))}"
        )
    problems = tuple(f"the answer may lack engines: {each}" for each in dict.fromkeys(server.warnings))
    ordered = tuple(sorted(engines, key=lambda engine: (not engine.live, engine.name)))
    return Fleet(Path(), identity(), ordered, (), tuple(general), problems, skipped=len(problems))


def _target(labels: Labels) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in TARGET)


def _about_versions(engines: Iterable[SeriesEngine]) -> Iterator[str]:
    for key, name in (("vllm", "vLLM"), ("graphfix", "vllm-graphfix")):
        numbers: dict[str, int] = {}
        for engine in engines:
            for version in engine.values_of(key):
                numbers[version] = numbers.get(version, 0) + 1
        if len(numbers) > 1:
            listed = ", ".join(f"{printable(version)} on {numbers[version]}" for version in sorted(numbers))
            yield f"several versions of {name}, on so many engines: {listed}"
