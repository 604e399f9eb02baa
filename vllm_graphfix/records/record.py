"""The status record of one process, and its JSON form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

from vllm_graphfix.fix import Code, Mode, State
from vllm_graphfix.records.process_identity import reduced
from vllm_graphfix.settings.environment import Master, is_brief, was_always_brief
from vllm_graphfix.settings.json_object import LONGEST_TEXT, JsonError, JsonObject
from vllm_graphfix.text import printable

SCHEMA = 1
ROLES = ("front-end", "api-server", "engine-core", "worker")
SHORT = 200
"""Characters of a text of a finding, a `Wrong` or `MovedTensor` for example; a record has five of each kind at most."""
LARGEST = 64 * 1024
"""Bytes of a record. All texts are cut shorter where those of at most `LONGEST_TEXT` characters come to more."""
MOST_FOLLOWERS = 512
"""Engines of other nodes in a record: a sixth of `LARGEST`."""
_LEAST_TEXT = 32
"""Characters down to which texts are cut."""

_ENGINE = r"[0-9a-f]{16}"
_HOST = r"[A-Za-z0-9._-]{1,64}"
FILE_NAME = rf"({_ENGINE})-({_HOST})-([0-9]{{1,10}})\.json"
"""Engine, host and PID of a record, in the name of its file."""
_GROUP = r"[!-~]{1,128}"
_WORD = r"[!-~]{0,128}"
_MASTERS = frozenset(master.value for master in Master)
_MODES = frozenset(mode.value for mode in Mode)
_STATES = frozenset(state.value for state in State)
_CODES = frozenset(code.value for code in Code)
_AS_FIELD = {State.UNKNOWN.value: State.NOT_NEEDED, State.BYPASSED.value: State.FAILED}
"""States that the first readers do not know, each with the one that they read instead."""


class RecordError(ValueError):
    """Data is not a status record; the text gives the reason."""


class Rank(NamedTuple):
    """The place of a process among the ranks of its engine."""

    rank: int
    local_rank: int | None
    world_size: int
    data_parallel_rank: int


class Decided(NamedTuple):
    """The decision of the engine, as this process has it."""

    canary: bool
    bucket: int | None
    percentage: float | None
    master: str
    inherited: bool


class FixReport(NamedTuple):
    """One fix in a process; `shadow` is reported like one."""

    mode: str
    state: str
    reason: str
    code: str = Code.NONE.value
    """The kind of *reason*, one of `Code`."""


class Wrong(NamedTuple):
    """A replayed graph that the shadow check found wrong, for a report; every text is of at most `SHORT` characters."""

    graph: str
    padded_rows: int
    rows: int
    """The number of rows that are not padding."""
    backends: str
    errors: str
    """The relative error of each row: ``0 0.31 inf``."""
    noise: str
    """The largest error of runs without the graph among themselves."""
    layer: str
    """The first layer whose cache differs; empty if that is not known."""
    check: int
    accepted: str = ""
    """Drafts of this graph that the target accepted: ``3 of 120 drafts accepted, 96 without the graph, …``."""


class MovedTensor(NamedTuple):
    """A tensor that does not lie where graphs have it; every text is of at most `SHORT` characters."""

    name: str
    kind: str
    after: str
    """The function after whose call the move was noticed."""
    outcome: str
    """``reported``, ``repaired``, or why it was not."""


class FalseClaim(NamedTuple):
    """A builder of attention metadata that takes decodes for prompts; every text is of at most `SHORT` characters."""

    builder: str
    graph: str
    """The first full graph of such decodes, by its tokens: ``FULL 8``."""

    @property
    def advice(self) -> str:
        """Return what to serve with, as the rest of a sentence (docs/claims.md has the reasons)."""
        if self.builder == "Mamba1AttentionMetadataBuilder":  # its layers take no drafts back, with graphs or without
            return "serve without --speculative-config"
        also = ", and --no-async-scheduling with MTP or Eagle" if self.builder == "TurboQuantMetadataBuilder" else ""
        return f"serve with -cc.cudagraph_mode=PIECEWISE (NONE where nothing is compiled){also}"


class OtherMetadata(NamedTuple):
    """A field that is not as it was when a graph read it; every text is of at most `SHORT` characters."""

    field: str
    graph: str
    difference: str


class TracedArgument(NamedTuple):
    """An argument that is not as it was when a model was traced; every text is of at most `SHORT` characters."""

    model: str
    """The class of the compiled model."""
    argument: str
    traced: str
    """The value that the compiled code keeps: ``None``, ``3``, ``a tensor``."""
    now: str
    """The value of the first call that differs."""


class OverwrittenBlock(NamedTuple):
    """A finished cache block that has changed; every text is of at most `SHORT` characters."""

    block: int
    group: int
    place: int
    """The number of blocks of its request before it. Its name is in the log only: a client may have chosen it."""
    layers: str
    ran: str
    """The steps between the last check that it passed and the first that it failed."""


class AgreementReport(NamedTuple):
    """The result of comparing the ranks before the first capture."""

    group: str
    world_size: int
    agreeing: int
    difference: str | None


class Record(NamedTuple):
    """The status of one process, for one engine."""

    graphfix: str
    vllm: str
    engine: str
    host: str
    pid: int
    start_ticks: int
    boot: str
    pid_namespace: str
    role: str
    model: str | None
    rank: Rank | None
    decision: Decided
    fixes: Mapping[str, FixReport]
    events: Mapping[str, Mapping[str, int]]
    agreement: AgreementReport | None = None
    leader: str | None = None
    problem: str | None = None
    unchecked: str | None = None
    """The reason for which this rank was not checked before its capture, or after it; the engine has gone on."""
    serves_metrics: bool = False
    """/metrics of this process covers its engine."""
    ranks_here: int | None = None
    """Ranks that the engine configured by this process starts on its host; None if that is not known, and in a process
    that has configured none."""
    wrong: tuple[Wrong, ...] = ()
    moved: tuple[MovedTensor, ...] = ()
    claims: tuple[FalseClaim, ...] = ()
    metadata: tuple[OtherMetadata, ...] = ()
    traced: tuple[TracedArgument, ...] = ()
    overwritten: tuple[OverwrittenBlock, ...] = ()
    misconfigured: Mapping[str, str] = {}
    """Variables with an invalid value or an unknown name, each with its value. Not a state, since older readers refuse
    an unknown one."""
    graphs: bool | None = None
    """This rank captures CUDA graphs; None until that is known, and in a process that is no rank."""
    starting: bool = False
    """This process's part of the engine is not up yet."""
    in_step_since: float | None = None
    """Start of its present step, in epoch seconds, if the step lasts so long that it may never end. Heartbeats do not
    show that: they come from a thread of their own."""
    followers: tuple[str, ...] = ()
    """On rank 0: the engines of nodes that started on their own and follow it, at most `MOST_FOLLOWERS`. Its front-end
    reads the files of these engines, too."""
    clock_offset: float | None = None
    """Seconds by which the clock that dates this file is ahead of this process's; None if equal. Set by `Reporter`."""
    kept: bool = False
    """A thread of this process touches the record every few seconds. Set by `Reporter`."""
    written: float = 0.0

    @property
    def file_name(self) -> str:
        return f"{self.engine}-{reduced(self.host)}-{self.pid}.json"

    def as_json(self, longest: int = LONGEST_TEXT) -> dict[str, Any]:
        """Return the content of the file; no text has more than *longest* characters."""
        mistyped = {name: each for name, each in self.misconfigured.items() if not was_always_brief(name)}
        return {
            "schema": SCHEMA,
            "graphfix": _cut_to_fit(self.graphfix, longest),
            "vllm": _cut_to_fit(self.vllm, longest),
            "engine": self.engine,
            "host": reduced(self.host),
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "boot": self.boot,
            "pid_namespace": self.pid_namespace,
            "role": self.role,
            "model": _cut_to_fit(self.model, longest),
            "rank": self.rank and self.rank._asdict(),
            "decision": self.decision._asdict(),
            "fixes": {name: _written(fix, longest) for name, fix in self.fixes.items()},
            "events": {name: dict(events) for name, events in self.events.items()},
            "agreement": self.agreement
            and self.agreement._replace(difference=_cut_to_fit(self.agreement.difference, longest))._asdict(),
            "leader": self.leader,
            "problem": _cut_to_fit(self.problem, longest),
            **({} if self.unchecked is None else {"unchecked": _cut_to_fit(self.unchecked, longest)}),
            **({"followers": list(self.followers)} if self.followers else {}),
            "serves_metrics": self.serves_metrics,
            **({} if self.ranks_here is None else {"ranks_here": self.ranks_here}),
            "wrong": _numbered(self.wrong, longest),
            **({"moved": _numbered(self.moved, longest)} if self.moved else {}),
            **({"claims": _numbered(self.claims, longest)} if self.claims else {}),
            **({"metadata": _numbered(self.metadata, longest)} if self.metadata else {}),
            **({"traced": _numbered(self.traced, longest)} if self.traced else {}),
            **({"overwritten": _numbered(self.overwritten, longest)} if self.overwritten else {}),
            "misconfigured": {name: each for name, each in self.misconfigured.items() if was_always_brief(name)},
            **({"mistyped": mistyped} if mistyped else {}),  # older readers would refuse such names
            **({} if self.graphs is None else {"graphs": self.graphs}),
            "starting": self.starting,
            **({} if self.in_step_since is None else {"in_step_since": self.in_step_since}),
            **({} if self.clock_offset is None else {"clock_offset": self.clock_offset}),
            "kept": self.kept,
            "written": self.written,
        }

    def encode(self) -> bytes:
        """Return the bytes of the file, its texts cut until they are at most `LARGEST`: readers refuse a larger one.

        They are more if texts of `_LEAST_TEXT` characters still do not fit; `write` raises then.
        """
        longest = LONGEST_TEXT
        while True:
            data = json.dumps(
                self.as_json(longest), ensure_ascii=False, allow_nan=False, separators=(",", ":")
            ).encode()
            if len(data) <= LARGEST or longest <= _LEAST_TEXT:
                return data
            longest = longest * 3 // 4

    @classmethod
    def from_json(cls, value: object) -> Record:
        """Return *value* as a record, with printable texts and without unknown keys. Raises RecordError."""
        try:
            return cls._parse(JsonObject(value, "the record"))
        except JsonError as error:
            raise RecordError(str(error)) from None

    @classmethod
    def _parse(cls, fields: JsonObject) -> Record:
        schema = fields.whole("schema")
        if schema > SCHEMA:
            raise JsonError(f"it has schema {schema}, but this vllm-graphfix knows only {SCHEMA}: use a newer version")
        if schema != SCHEMA:
            fields.refuse("schema")
        rank, agreement = fields.maybe("rank"), fields.maybe("agreement")
        decision = JsonObject(fields.get("decision"), "decision")
        fixes = {name: JsonObject(fix, f"fixes.{name}") for name, fix in fields.named("fixes")}
        events = {name: JsonObject(counts, f"events.{name}") for name, counts in fields.named("events")}
        wrong, moved, claims, metadata, traced, overwritten = (
            _objects(fields, key) for key in ("wrong", "moved", "claims", "metadata", "traced", "overwritten")
        )
        return cls(
            graphfix=fields.text("graphfix"),
            vllm=fields.text("vllm"),
            engine=fields.name("engine", _ENGINE),
            host=fields.name("host", _HOST),
            pid=fields.whole("pid"),
            start_ticks=fields.whole("start_ticks"),
            boot=fields.name("boot", _WORD),
            pid_namespace=fields.name("pid_namespace", _WORD),
            role=fields.one_of("role", ROLES),
            model=fields.text("model") if fields.has("model") else None,
            rank=None
            if rank is None
            else Rank(
                rank.whole("rank"),
                rank.whole("local_rank") if rank.has("local_rank") else None,
                rank.whole("world_size"),
                rank.whole("data_parallel_rank"),
            ),
            decision=Decided(
                decision.truth("canary"),
                decision.whole("bucket") if decision.has("bucket") else None,
                decision.number("percentage", 100.0) if decision.has("percentage") else None,
                decision.one_of("master", _MASTERS),
                decision.truth("inherited"),
            ),
            fixes={
                name: FixReport(fix.one_of("mode", _MODES), _state(fix), fix.text("reason"), _code(fix))
                for name, fix in fixes.items()
            },
            events={name: {event: counts.whole(event) for event in counts.names()} for name, counts in events.items()},
            agreement=None
            if agreement is None
            else AgreementReport(
                agreement.name("group", _GROUP),
                agreement.whole("world_size"),
                agreement.whole("agreeing"),
                agreement.text("difference") if agreement.has("difference") else None,
            ),
            leader=fields.name("leader", _ENGINE) if fields.has("leader") else None,
            problem=fields.text("problem") if fields.has("problem") else None,
            unchecked=fields.text("unchecked") if fields.has("unchecked") else None,
            serves_metrics=fields.truth("serves_metrics") if fields.has("serves_metrics") else False,
            ranks_here=fields.whole("ranks_here") if fields.has("ranks_here") else None,
            wrong=tuple(
                Wrong(
                    graph=each.text("graph"),
                    padded_rows=each.whole("padded_rows"),
                    rows=each.whole("rows"),
                    backends=each.text("backends"),
                    errors=each.text("errors"),
                    noise=each.text("noise"),
                    layer=each.text("layer"),
                    check=each.whole("check"),
                    accepted=each.text("accepted") if each.has("accepted") else "",
                )
                for each in wrong
            ),
            moved=tuple(MovedTensor(*(each.text(field) for field in MovedTensor._fields)) for each in moved),
            claims=tuple(FalseClaim(*(each.text(field) for field in FalseClaim._fields)) for each in claims),
            metadata=tuple(OtherMetadata(*(each.text(field) for field in OtherMetadata._fields)) for each in metadata),
            traced=tuple(TracedArgument(*(each.text(field) for field in TracedArgument._fields)) for each in traced),
            overwritten=tuple(
                OverwrittenBlock(
                    each.whole("block"),
                    each.whole("group"),
                    each.whole("place"),
                    each.text("layers"),
                    each.text("ran"),
                )
                for each in overwritten
            ),
            misconfigured={
                name: value
                for field in ("misconfigured", "mistyped")
                if fields.has(field)
                for name, value in fields.table(field, is_brief).items()
            },
            graphs=fields.truth("graphs") if fields.has("graphs") else None,
            starting=fields.truth("starting") if fields.has("starting") else False,
            followers=_engines(fields, "followers"),
            in_step_since=fields.number("in_step_since", 1e11) if fields.has("in_step_since") else None,
            clock_offset=fields.number("clock_offset", 1e11, -1e11) if fields.has("clock_offset") else None,
            kept=fields.truth("kept") if fields.has("kept") else False,
            written=fields.number("written", 1e11),
        )


def _objects(fields: JsonObject, key: str) -> list[JsonObject]:
    return [JsonObject(each, f"{key}.{name}") for name, each in fields.named(key)] if fields.has(key) else []


def _engines(fields: JsonObject, key: str) -> tuple[str, ...]:
    if not fields.has(key):
        return ()
    value = fields.get(key)
    if (
        not isinstance(value, list)
        or len(value) > MOST_FOLLOWERS
        or not all(isinstance(each, str) and re.fullmatch(_ENGINE, each) for each in value)
    ):
        fields.refuse(key, f"a list of at most {MOST_FOLLOWERS} engines")
    return tuple(value)


def _written(fix: FixReport, longest: int) -> dict[str, Any]:
    """Return *fix* for the file, newer states as fields: older readers refuse an unknown state and skip a field."""
    fields = fix._replace(reason=_cut_to_fit(fix.reason, longest))._asdict()
    if fix.code == Code.NONE.value:
        del fields["code"]
    if fix.state in _AS_FIELD:
        fields |= {"state": _AS_FIELD[fix.state].value, fix.state: True}
    return fields


def _state(fix: JsonObject) -> str:
    newer = next((state for state in _AS_FIELD if fix.has(state) and fix.truth(state)), None)
    return newer or fix.one_of("state", _STATES)


def _code(fix: JsonObject) -> str:
    """Return the code of *fix*; `Code.NONE` for one that only a newer release knows."""
    code = fix.text("code") if fix.has("code") else Code.NONE.value
    return code if code in _CODES else Code.NONE.value


def _numbered(
    findings: Sequence[Wrong | MovedTensor | FalseClaim | OtherMetadata | TracedArgument | OverwrittenBlock],
    longest: int,
) -> dict[str, dict[str, Any]]:
    return {
        str(number): {
            name: _cut_to_fit(value, longest) if isinstance(value, str) else value
            for name, value in one._asdict().items()
        }
        for number, one in enumerate(findings)
    }


@overload
def _cut_to_fit(text: str, longest: int) -> str: ...
@overload
def _cut_to_fit(text: str | None, longest: int) -> str | None: ...
def _cut_to_fit(text: str | None, longest: int) -> str | None:
    """Return *text* on one line of at most *longest* characters: readers refuse a record with a longer text."""
    if text is None:
        return None
    text = printable(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
