"""A fleet by the series that its front-ends expose, as a Prometheus has them, or what answers as one does.

Every question is filtered and summed by the server: a few series of each engine, and those of what is wrong. What no
series has is not known: which rank it is, reasons in words, graphs, and what an engine does that has not come to serve.
"""

from __future__ import annotations

import json
import math
import re
import ssl
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from threading import Thread
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
"""Seconds for which the server may send nothing."""
_LONGEST = 120.0
"""Seconds that all answers together may take, which is Prometheus's own limit of one query."""
_LARGEST_ANSWER = 256 * 1024 * 1024
"""Bytes; the series of ten thousand engines are a tenth of that."""
_LONGEST_TEXT = 500
"""Characters of a text of the server's in a message."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
_DETECTORS = "shadow|kv-marks|abort"
_STALE = 120
"""Seconds after which the numbers of a front-end are old, as in `GraphfixRecordsStale`."""
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Characters with a special meaning in a regular expression of RE2."""
_NOT_COUNTED = "what its ranks do about the fixes is not known"

Labels = dict[str, str]


class Source(NamedTuple):
    """A Prometheus, and what it is asked for."""

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
    ("shadow", "acceptance-collapses"): "far fewer drafts of a CUDA graph are accepted than without it",
    ("kv-marks", "changed"): "finished cache blocks have changed",
    ("claims", "prompts-in-graphs"): "full graphs hold decodes with drafts as prompts, and may answer wrongly",
    ("metadata", "differing"): "full graphs replay on other metadata than they were captured with",
    ("traced", "differing"): "compiled models are called with other arguments than torch.compile traced",
    ("addresses", "failures"): "addresses are not compared any more",
    ("claims", "failures"): "claims of builders were not checked",
    ("metadata", "failures"): "metadata of replays are not compared",
    ("traced", "failures"): "arguments of compiled models are not compared",
}
_FINDINGS = f'fix=~"{"|".join({fix for fix, _ in _EVENTS})}", event=~"{"|".join({event for _, event in _EVENTS})}"'
_TROUBLES = (
    _Trouble(
        f'{{__name__=~"{"|".join(_GAUGES)}", $}} > 0',
        lambda labels, number: f"{_GAUGES[labels['__name__']]} ({number:.0f})",
    ),
    _Trouble(
        'graphfix_fix_ranks{state=~"failed|conflict|incompatible|bypassed", $} > 0',
        lambda labels, number: f"{labels['fix']} is {labels['state']}: {labels['code']} {_ranks(number)}",
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
_STATES = f'min by ({_IDS}, state) (graphfix_fix_ranks{{fix!~"{_DETECTORS}", state!="waiting", $}} > 0)'
"""The one query that reads each series of each fix, which are nearly all that a fleet has."""
_STATES_OF_DETECTORS = f'min by ({_IDS}, state) (graphfix_fix_ranks{{fix=~"shadow|kv-marks", state!="waiting", $}} > 0)'
_DIFFERING = (
    f"count by ({_IDS}, fix) "
    f'(group by ({_IDS}, fix, state) (graphfix_fix_ranks{{fix!="abort", state!="waiting", $}} > 0)) > 1'
)
_MOST_BY_NAME = 500
"""Instances that a query names; for more of them it reads all."""
_SERVING = f"group by ({_IDS}, model_name) (vllm:num_requests_running{{$}})"
_UNKNOWN = f'count by (fix) (group by ({_IDS}, fix) (graphfix_fix_ranks{{state="unknown", $}} > 0))'
_ENGINES = '{__name__=~"graphfix_canary|vllm:num_requests_running", $}'
_AGO = ("10m", "30m", "1h", "4h", "1d")
_ENGINES_OF_A_DAY = f"(last_over_time({_ENGINES}[10m]) or {' or '.join(f'{_ENGINES} offset {ago}' for ago in _AGO)})"
"""Instants of the day, not all of it, which would be millions of samples of a large fleet."""
_UNANSWERED = "count(up{$} == 0)"
_DOWN = f"group by ({_IDS}) (up{{$}} == 0 and on (cluster, namespace, job) {_ENGINES_OF_A_DAY})"
_DOWN_AND_SERVED = f"group by ({_IDS}) (up{{$}} == 0 and on ({_IDS}) {_ENGINES_OF_A_DAY})"
_DOWN_FOR_LONG = f"group by ({_IDS}) (max_over_time(up{{$}}[15m]) == 0 and up{{$}} offset 15m == 0)"
"""The 15 minutes of `GraphfixCanaryDown`, at both ends: a target may have been added since."""


class Down(Enum):
    """True if scrapes of the target fail (`up` is 0)."""

    NO = None
    SINCE_BEFORE_IT_SERVED = "has not answered in a day, as far as is known: it starts, or its start fails"
    LATELY = "does not answer, and did before: it starts again, hangs, or has ended"
    FOR_LONG = "has not answered for 15 minutes, and did within a day: it hangs, has ended, or does not come up again"


@dataclass(frozen=True)
class SeriesEngine(Engine):
    """An engine of which only series are known: no processes, and no ranks of its own."""

    facts: dict[str, float] = field(default_factory=dict)
    """The value of each series that an engine has once, without its prefix."""
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Versions and models of the engine, each once: by name of the field, as a record calls it."""
    applied: frozenset[str] = frozenset()
    down: Down = Down.NO

    @cached_property
    def live(self) -> bool:
        return self.down is Down.NO

    @property
    def owner(self) -> int | None:
        return None

    @property
    def status(self) -> str:
        if self.down is not Down.NO:
            return "silent" if self.down is Down.FOR_LONG else "starting"
        return "not in order" if self.wrong else "in order"

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
    """Return the engines of which the Prometheus of *source* has series.

    Raises FleetError if it does not answer, or not within `_LONGEST`.
    """
    client, fleet = _client(source), Future[Fleet]()

    def look() -> None:
        try:
            with client:
                fleet.set_result(replace(_fleet(_Server(client, source.selector)), prometheus=source.url))
        except (LookupError, OverflowError, TypeError, ValueError) as error:
            fleet.set_exception(FleetError(f"{source.url} answers otherwise than a Prometheus ({error!r})"))
        except BaseException as error:
            fleet.set_exception(error)

    # httpx limits each wait for bytes, not a header that comes byte by byte: such a server is left to a thread that
    # does not keep the process from ending.
    Thread(target=look, daemon=True).start()
    try:
        return fleet.result(_LONGEST)
    except FutureTimeoutError:
        raise FleetError(f"{source.url} takes longer than {_LONGEST:.0f} s") from None


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
    headers = {"Accept-Encoding": "gzip"} | ({} if source.tenant is None else {"X-Scope-OrgID": source.tenant})
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

    def ask(self, query: str, matcher: str = "") -> Iterator[tuple[Labels, float]]:
        """Yield labels and value of each sample of *query*, in which ``$`` stands for selector and *matcher*.

        A label that a series lacks is empty, as in PromQL. Numbers that are not finite are left out.
        """
        for sample in self._data(query.replace("$", ", ".join(filter(None, (self._selector, matcher)))))["result"]:
            value = float(sample["value"][1])
            if math.isfinite(value):
                # Printable, since any target writes its labels as it likes, and they end up on a terminal.
                labels = {name: printable(str(each)) for name, each in dict(sample["metric"]).items()}
                yield defaultdict(str, labels), value

    def _data(self, query: str) -> Any:
        import httpx

        try:
            with self._client.stream("POST", "query", data={"query": query, **self._moment}) as response:
                answer = self._bytes(response)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise FleetError(f"{self._client.base_url} does not answer: {str(error) or type(error).__name__}") from None
        body: Any = None
        with suppress(ValueError, RecursionError):
            body = json.loads(answer)
        if not isinstance(body, dict) or body.get("status") not in ("success", "error"):
            raise FleetError(
                f"{self._client.base_url}query is no Prometheus: HTTP {response.status_code} {response.reason_phrase}"
            )
        if body["status"] == "error":
            raise FleetError(f"{self._client.base_url} refuses {query!r}: {_brief(body.get('error'))}")
        self.warnings += map(_brief, body.get("warnings") or ())
        return body["data"]

    def _bytes(self, response: httpx.Response) -> bytes:
        """Read the answer. Raises FleetError for one that is too large."""
        if response.headers.get("content-encoding", "identity") not in ("identity", "gzip"):
            # Of several encodings, one over the other, a few bytes may stand for more than there is memory.
            raise FleetError(f"{self._client.base_url} answers in an encoding that was not requested")
        answer = bytearray()
        for part in response.iter_bytes():
            answer += part
            if len(answer) > _LARGEST_ANSWER:
                raise FleetError(
                    f"{self._client.base_url} answers more than {_LARGEST_ANSWER >> 20} MiB: use --selector"
                )
        return bytes(answer)


def _brief(text: object) -> str:
    return printable(str(text)[:_LONGEST_TEXT])


@dataclass
class _Answers:
    """One engine, as its samples describe it."""

    facts: dict[str, float] = field(default_factory=dict)
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    fewest: dict[str, float] = field(default_factory=dict)
    """By state: on how many ranks the fix is that is in it on the fewest."""
    label_sets: list[Labels] = field(default_factory=list)
    """Labels of each `graphfix_canary` series; more than one if several engines have equal labels."""
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    down: Down = Down.NO

    def add(self, key: str, value: str) -> None:
        self.values[key] = tuple(dict.fromkeys((*self.values.get(key, ()), value)))

    @property
    def may_differ(self) -> bool:
        """True if some fix may be in several states: no state then holds on all ranks that are known."""
        return len(self.fewest) > 1 and min(self.fewest.values()) < self.facts.get("ranks_expected", math.inf)

    def compare_ranks(self) -> None:
        expected, agreeing = self.facts.get("ranks_expected"), self.facts.get("ranks_agreeing")
        if expected is not None and agreeing is None:
            self.notes.append("not compared with each other, as far as is known")
        elif expected is not None and agreeing is not None and agreeing < expected:
            self.wrong.append(f"the ranks do not agree ({agreeing:.0f} do)")

    def engine(self, target: tuple[str, ...]) -> SeriesEngine:
        return SeriesEngine(
            "/".join(filter(None, map(printable, target))),
            (),
            wrong=tuple(dict.fromkeys(self.wrong)),
            notes=tuple(dict.fromkeys(self.notes)),
            facts=self.facts,
            values=self.values,
            applied=frozenset(self.applied),
            down=self.down,
        )


def _fleet(server: _Server) -> Fleet:
    targets: defaultdict[tuple[str, ...], _Answers] = defaultdict(_Answers)
    for labels, value in server.ask(_FACTS):
        answers, name = targets[_target(labels)], labels["__name__"].removeprefix("graphfix_")
        # Of engines that cannot be told apart the least agree.
        answers.facts[name] = min(value, answers.facts.get(name, value)) if name == "ranks_agreeing" else value
        if name == "canary":
            answers.label_sets.append(labels)
        elif name == "build_info":
            answers.add("graphfix", labels.get("version", ""))
            answers.add("vllm", labels.get("vllm", ""))
    for labels, value in server.ask(_STATES):
        answers = targets[_target(labels)]
        answers.applied.add(labels["state"])
        answers.fewest[labels["state"]] = value
    for labels, value in server.ask(_STATES_OF_DETECTORS):
        answers = targets[_target(labels)]
        answers.fewest[labels["state"]] = min(value, answers.fewest.get(labels["state"], value))
    for labels, _ in server.ask(_SERVING):
        targets[_target(labels)].add("model", labels.get("model_name", ""))
    for answers in targets.values():
        if "canary" not in answers.facts:
            answers.wrong.append(
                "serves no graphfix_* series: the plugin is not loaded there, or its front-end is not vLLM's Python one"
            )
        elif "build_info" not in answers.facts:
            answers.wrong.append(f"its vllm-graphfix has no graphfix_build_info: {_NOT_COUNTED}")
        answers.compare_ranks()
    for trouble in _TROUBLES:
        for labels, value in server.ask(trouble.query):
            answers = targets[_target(labels)]
            if "variable" in labels:
                answers.add("misconfigured", labels["variable"])
            is_wrong = trouble.is_wrong(labels) if callable(trouble.is_wrong) else trouble.is_wrong
            (answers.wrong if is_wrong else answers.notes).append(printable(trouble.text(labels, value)))
    for target, text in _differing(server, [target for target, answers in targets.items() if answers.may_differ]):
        targets[target].wrong.append(text)
    for target, down in _down(server).items():
        targets[target].down = down
        (targets[target].wrong if down is Down.FOR_LONG else targets[target].notes).append(str(down.value))
    engines = [answers.engine(target) for target, answers in targets.items()]
    general = [*_about_versions(engines), *_about_merged([answers.label_sets for answers in targets.values()])]
    if unknown := [f"{labels['fix']} ({value:.0f})" for labels, value in server.ask(_UNKNOWN)]:
        general.append(
            f"cannot be told, since vLLM is newer than what is known, on so many engines: {', '.join(sorted(unknown))}"
        )
    problems = tuple(f"the answer may lack engines: {each}" for each in dict.fromkeys(server.warnings))
    ordered = tuple(sorted(engines, key=lambda engine: (not engine.live, engine.name)))
    return Fleet(Path(), identity(), ordered, (), tuple(general), problems, skipped=len(problems))


def _differing(server: _Server, targets: Sequence[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each of *targets* that has a fix in several states, and a sentence about it."""
    if targets:
        instances = "|".join(sorted({_SPECIAL.sub(r"\\\g<0>", target[-1]) for target in targets}))
        matcher = f"instance=~{json.dumps(instances)}" if len(targets) <= _MOST_BY_NAME else ""
        for labels, number in server.ask(_DIFFERING, matcher):
            yield _target(labels), printable(f"{labels['fix']} differs ({number:.0f} states)")


def _down(server: _Server) -> dict[tuple[str, ...], Down]:
    """Return the targets that are scraped in vain, of jobs that have engines."""
    if not [*server.ask(_UNANSWERED)]:
        return {}
    down = {_target(labels): Down.SINCE_BEFORE_IT_SERVED for labels, _ in server.ask(_DOWN)}
    if down:
        down |= {_target(labels): Down.LATELY for labels, _ in server.ask(_DOWN_AND_SERVED)}
        for_long = {_target(labels) for labels, _ in server.ask(_DOWN_FOR_LONG)}
        down |= {target: Down.FOR_LONG for target in for_long if down.get(target) is Down.LATELY}
    return down


def _about_merged(engines: Iterable[Sequence[Labels]]) -> Iterator[str]:
    """Yield how many engines their names do not tell apart, and which labels would."""
    merged = [label_sets for label_sets in engines if len(label_sets) > 1]
    if merged:
        differing = {
            name
            for label_sets in merged
            for name in set[str]().union(*label_sets)
            if len({labels.get(name) for labels in label_sets}) > 1
        }
        yield (
            f"{len(merged)} name{'' if len(merged) == 1 else 's'} for {sum(map(len, merged))} engines with equal "
            f"{', '.join(TARGET)}, each name judged as one: relabel them, or have replicas of a Prometheus "
            f"deduplicated (labels that differ: {printable(', '.join(sorted(differing)))})"
        )


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
