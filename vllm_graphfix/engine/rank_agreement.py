"""Whether all ranks of an engine will do the same, found out before a graph is captured and without a collective.

Ranks that disagree about a fix can run different graphs, and then wait for each other in a collective for ever. A
collective that compares them would hang in just that case, and where a rank lacks the plugin. So each rank leaves its
report in the key-value store that torch.distributed has for its rendezvous, and reads the others' with a timeout.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from vllm_graphfix.settings.environment import effective, is_brief
from vllm_graphfix.settings.json_object import JsonObject
from vllm_graphfix.text import printable, ranks_named

WARN_AFTER = 30.0
"""Seconds after which ranks that are waited for are named in the log."""
_SLICE = 3.0
"""Seconds after which a rank that waits looks whether the engine has ended on another."""
TIMEOUT_FOR_A_WARNING = 10.0
"""Seconds where a silent rank does not stop the engine."""
_LONGEST = 255
"""Characters of a text in another rank's report."""
MOST_GRAPHS = 4096
"""Graphs in another rank's report: more than vLLM captures, for all fixes."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_GRAPH = re.compile(r"[A-Za-z0-9_.]{1,80} (FULL|PIECEWISE) [0-9]{1,9}")
_HEX_ID = r"[0-9a-f]{16}"
"""Engines and tokens."""
_LAST_READERS = 5.0
"""Seconds that the rank which holds the store waits before it goes, so that the others can read why."""


class RankReport(NamedTuple):
    """What one rank says of itself."""

    host: str
    pid: int
    engine: str
    """The engine of the decision that the rank goes by; nodes that start on their own have one each, which is no
    difference."""
    graphfix: str
    vllm: str
    canary: bool
    master: str
    modes: Mapping[str, str]
    states: Mapping[str, str]
    token: str
    """Made up by each rank for each comparison; that of rank 0 names the group."""
    reasons: Mapping[str, str] = {}
    """Why fixes are not applied that should be, by name: shown where states differ, and not compared."""
    off: bool = False
    """Its settings give the fixes to nobody: the kill switch, or a percentage that means nothing."""
    misconfigured: Mapping[str, str] = {}
    """Variables whose value means nothing on this rank, and names that do, each with that value."""
    fault: str = ""
    """What failed, on a rank that cannot tell its states: it is a difference even where all ranks say the same."""
    failed: Mapping[str, str] = {}
    """Fixes that failed while graphs were captured, each with its first error: no difference, but all ranks have to go
    by it."""
    graphs: Sequence[tuple[str, str]] = ()
    """Each fix of `failed` and the name of a graph that it failed in; an empty name for one that cannot be taken out of
    dispatch."""
    can_leave_out: bool = True
    """Whether vLLM's dispatch on this rank is known well enough to take a graph out of it."""
    ended: bool = False
    """The capture on this rank has ended in an error of vLLM's own, which vLLM will tell of."""

    def compared(self) -> dict[str, str]:
        """What must be the same on all ranks, in the order in which a person would look at it.

        A fix that is `waiting` concerns code that this rank does not run, such as a drafter, which only the last stage
        of a pipeline has: that differs from nothing.
        """
        told = {
            "vllm-graphfix": self.graphfix,
            "vLLM": self.vllm,
            "VLLM_GRAPHFIX": self.master,
            "in the rollout": "yes" if self.canary else "no",
            "misconfigured": ", ".join(effective(self.misconfigured, self.master, self.modes)) or "nothing",
        }
        told |= {f"the mode of {name}": mode for name, mode in sorted(self.modes.items())}
        return told | {name: state for name, state in sorted(self.states.items()) if state != "waiting"}


class Agreement(NamedTuple):
    """What came of a comparison."""

    group: str
    """Names the ranks that were compared with each other; the same on all of them."""
    leader: str | None
    """The engine of rank 0; None if it said nothing."""
    world_size: int
    agreeing: int
    """Ranks that say the same as most do."""
    difference: str | None
    """One or more sentences that name ranks, hosts and what differs."""
    all_off: bool
    """Whether every rank that spoke is off: beside one that is silent they are stock as it is."""
    failing: Mapping[int, RankReport] = {}
    """The reports of ranks in which a fix failed during the capture, or the capture itself, or which can leave no graph
    out."""
    unchecked: Mapping[int, str] = {}
    """Ranks that left no report because of an error of their own and go on all the same, each with that error."""
    followers: tuple[str, ...] = ()
    """On rank 0: the engines of the other ranks, where nodes that started on their own have other ones."""


def leave(store: Any, stage: str, rank: int, report: RankReport) -> str:
    """Leaves *report* of *rank* in *store*, a `torch.distributed.Store`, and returns the stage to `compare` at.

    A rank's n-th report for *stage* is compared with the others' n-th, in this store: where vLLM makes its groups anew,
    old and new ranks begin with the first. Raises what the store raises if it cannot be reached.
    """
    # A count that is read and then set, not added to: either may be done twice.
    count = f"{stage}/count/{rank}"
    number = int(with_one_retry(store.add, count, 0)) + 1
    with_one_retry(store.set, count, str(number))
    place = f"{stage}-{number}"
    # The report first: who sees the digest may read it. Digests keep the traffic of a thousand ranks small.
    with_one_retry(store.set, f"{place}/word/{rank}", json.dumps(report._asdict()))
    with_one_retry(store.set, f"{place}/engine/{rank}", report.engine)
    with_one_retry(store.set, f"{place}/{rank}", _digest(report))
    return place


def with_one_retry(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What *call* returns, if not at once: for want of a report the other ranks wait for minutes, and stop."""
    try:
        return call(*args, **kwargs)
    except Exception:
        return call(*args, **kwargs)


def leave_an_end(store: Any, place: str) -> None:
    """Tells ranks that wait at *place*, which `leave` has returned, that no more reports will come there."""
    store.set(f"{place}/ended", b"1")


def leave_unchecked(store: Any, stage: str, rank: int, why: str) -> None:
    """Tells ranks that wait at *stage* that *rank* could leave no report there, and goes on.

    The number of the comparison is not part of the key: `leave` may have failed before it knew that.
    """
    with_one_retry(store.set, f"{stage}/unchecked/{rank}", one_line(why))


def leave_stop(store: Any, stage: str, rank: int, why: str) -> None:
    """Stop ranks that wait at *stage* for a report of *rank*, which stops because of the error *why*."""
    with_one_retry(store.set, f"{stage}/stops/{rank}", one_line(why))


def _notes(store: Any, kind: str, place: str, ranks: list[int]) -> dict[int, str]:
    """Return the errors of those *ranks* that called `leave_unchecked`, or `leave_stop`, for the stage of *place*."""
    stage = place.rpartition("-")[0]
    keys = {rank: f"{stage}/{kind}/{rank}" for rank in ranks}
    return {rank: one_line(store.get(key).decode(errors="replace")) for rank, key in keys.items() if store.check([key])}


def compare(
    store: Any,
    stage: str,
    rank: int,
    world_size: int,
    report: RankReport,
    warn: Callable[[str], None],
    *,
    silent_host: Callable[[int], str | None] = lambda rank: None,
    timeout: float,
) -> Agreement:
    """Compares *report*, which `leave` has left at *stage*, with what the other ranks have left there.

    *silent_host* says where a rank is that said nothing. Raises what the store raises if it cannot be reached.
    """
    missing = _wait_for(store, stage, [other for other in range(world_size) if other != rank], timeout, warn)
    heard = [other for other in range(world_size) if other not in missing]
    unchecked, stopping = _notes(store, "unchecked", stage, missing), _notes(store, "stops", stage, missing)
    # Nobody has waited for the others once a rank stops.
    silent = [] if stopping else [other for other in missing if other not in unchecked]
    digests = store.multi_get([f"{stage}/{other}" for other in heard])
    if len(set(digests)) == 1 and not missing and not (report.fault or _needs_action(report)):
        first = _read_report(store, f"{stage}/word/0") or report
        followers = _followers(store, stage, heard, report.engine) if rank == 0 else ()
        return Agreement(first.token, first.engine, world_size, world_size, None, first.off, followers=followers)
    reports = {other: report if other == rank else _read_report(store, f"{stage}/word/{other}") for other in heard}
    spoke = {other: said for other, said in reports.items() if said is not None}
    foreign = [other for other, said in reports.items() if said is None]
    difference = _difference(spoke, silent, foreign, timeout, silent_host)
    if stopping:
        errors = "; ".join(f"rank {other}: {why.rstrip('.')}" for other, why in stopping.items())
        difference = " ".join(filter(None, (difference, f"Stopped by an error of its own: {errors}.")))
    failing = {other: said for other, said in spoke.items() if _needs_action(said)}
    if difference is not None or failing:
        _wait_for_readers(store, stage, rank, heard)
    return Agreement(
        group=spoke[min(spoke)].token,
        leader=spoke[0].engine if 0 in spoke else None,
        world_size=world_size,
        agreeing=len(spoke) - len(_outvoted(spoke) | {other for other, said in spoke.items() if said.fault}),
        difference=difference,
        all_off=all(said.off for said in spoke.values()),
        failing=failing,
        unchecked=unchecked,
        followers=_without(report.engine, (said.engine for said in spoke.values())) if rank == 0 else (),
    )


def _followers(store: Any, stage: str, heard: list[int], engine: str) -> tuple[str, ...]:
    """Return the engines of the ranks *heard* other than *engine*, without the words of a thousand ranks."""
    keys = [f"{stage}/engine/{other}" for other in heard]
    # Asked for first: another build of this version leaves none, and to get a key that is not there waits for minutes.
    if not store.check(keys):
        return ()
    engines = [each.decode("ascii", "replace") for each in store.multi_get(keys)]
    return _without(engine, (each for each in engines if re.fullmatch(_HEX_ID, each)))


def _without(engine: str, engines: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(engines) - {engine}))


def _needs_action(report: RankReport) -> bool:
    """Whether the ranks may have to do something about what *report* says of a capture.

    They may have to even if all of them say the same.
    """
    return bool(report.failed) or report.ended or not report.can_leave_out


def _digest(report: RankReport) -> str:
    told = [
        report.compared(),
        report.fault,
        dict(report.failed),
        list(report.graphs),
        report.can_leave_out,
        report.ended,
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _wait_for(store: Any, stage: str, others: list[int], limit: float, warn: Callable[[str], None]) -> list[int]:
    """Those of *others* that have said nothing after *limit* seconds."""
    started = time.monotonic()
    missing = others
    for until in (min(WARN_AFTER, limit), limit):
        while missing:
            left = max(started + until - time.monotonic(), 0.001)
            try:
                store.wait([f"{stage}/{rank}" for rank in missing], timedelta(seconds=min(left, _SLICE)))
            except RuntimeError:  # DistStoreError, when time is up; a store that is gone says so again in the next line
                missing = [rank for rank in missing if not store.check([f"{stage}/{rank}"])]
                if store.check([f"{stage}/ended"]) or _notes(store, "stops", stage, missing):
                    return missing
                if len(_notes(store, "unchecked", stage, missing)) == len(missing):
                    return missing
            else:
                return []
            if left <= _SLICE:
                break
        if missing and until < limit:
            warn(f"waiting up to {limit - until:.0f} s more for {ranks_named(missing)} to report which fixes they have")
    return missing


def _read_report(store: Any, key: str) -> RankReport | None:
    """None for what another version of this package, or somebody else, may have left, or not left beside a digest."""
    if not store.check([key]):  # `get` would wait for it
        return None
    try:
        said = JsonObject(json.loads(store.get(key)), "the report")
        return RankReport(**{name: _FIELDS[name](said, name) for name in RankReport._fields if name in said})
    except (ValueError, TypeError, RecursionError):
        return None


def _one_text(said: JsonObject, key: str) -> str:
    return said.line(key, _LONGEST)


def _hex_id(said: JsonObject, key: str) -> str:
    return said.name(key, _HEX_ID)


def _table_of_texts(said: JsonObject, key: str) -> dict[str, str]:
    return said.table(key, lambda name, value: _NAME.fullmatch(name) is not None and _is_line(value))


def _is_line(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()


def _graphs(said: JsonObject, key: str) -> list[tuple[str, str]]:
    graphs = said.get(key)
    if not isinstance(graphs, list) or len(graphs) > MOST_GRAPHS or not all(map(_is_graph, graphs)):
        said.refuse(key, "pairs of a fix and a graph")
    return [(fix, name) for fix, name in graphs]


def _is_graph(graph: object) -> bool:
    if not isinstance(graph, list) or len(graph) != 2 or not all(isinstance(part, str) for part in graph):
        return False
    fix, name = graph
    return _NAME.fullmatch(fix) is not None and (not name or _GRAPH.fullmatch(name) is not None)


# What is left is shown to people, and kept in records.
_FIELDS: dict[str, Callable[[JsonObject, str], Any]] = {
    **dict.fromkeys(("host", "graphfix", "vllm", "master", "fault"), _one_text),
    **dict.fromkeys(("engine", "token"), _hex_id),
    **dict.fromkeys(("modes", "states", "reasons", "failed"), _table_of_texts),
    **dict.fromkeys(("canary", "off", "can_leave_out", "ended"), JsonObject.truth),
    "pid": JsonObject.whole,
    "misconfigured": lambda said, key: said.table(key, is_brief),
    "graphs": _graphs,
}


def _wait_for_readers(store: Any, stage: str, rank: int, heard: list[int]) -> None:
    """Says that this rank has read the store; rank 0 then waits until the others have.

    The process of rank 0 holds the store. If it went first, the others would say that the store is gone, not what
    differs.
    """
    try:
        store.set(f"{stage}/read/{rank}", b"")
        if rank == 0:
            store.wait([f"{stage}/read/{other}" for other in heard], timedelta(seconds=_LAST_READERS))
    except Exception:  # the difference is known, and whatever this is, it must not be lost
        return


def _differing(spoke: Mapping[int, RankReport]) -> dict[str, dict[str, list[int]]]:
    """What differs: subject to value to ranks."""
    told = {rank: report.compared() for rank, report in spoke.items()}
    found: dict[str, dict[str, list[int]]] = {}
    for subject in dict.fromkeys(name for said in told.values() for name in said):
        values: dict[str, list[int]] = {}
        for rank, said in told.items():
            if subject in said:
                values.setdefault(said[subject], []).append(rank)
        if len(values) > 1:
            found[subject] = values
    return found


def _outvoted(spoke: Mapping[int, RankReport]) -> set[int]:
    """Ranks that say something else than most do; of two halves, that without the lowest rank."""
    outvoted: set[int] = set()
    for values in _differing(spoke).values():
        most = max(values.values(), key=lambda ranks: (len(ranks), -min(ranks)))
        outvoted.update(rank for ranks in values.values() if ranks is not most for rank in ranks)
    return outvoted


def _difference(
    spoke: Mapping[int, RankReport],
    silent: list[int],
    foreign: list[int],
    limit: float,
    silent_host: Callable[[int], str | None],
) -> str | None:
    sentences = []
    differing = _differing(spoke)
    for subject, values in differing.items():
        said = "; ".join(f"{value!r} on {with_hosts(ranks, spoke)}" for value, ranks in values.items())
        sentences.append(f"{subject} is {said}.")
    whys: dict[str, dict[int, list[str]]] = {}
    for rank, report in spoke.items():
        for name in sorted(report.reasons.keys() & differing.keys()):
            whys.setdefault(report.reasons[name], {}).setdefault(rank, []).append(name)
    for why, names in whys.items():
        told = ", ".join(dict.fromkeys(name for each in names.values() for name in each))
        sentences.append(f"The reason on {with_hosts(list(names), spoke)} for {told}: {why.rstrip('.')}.")
    for fault in dict.fromkeys(report.fault for report in spoke.values() if report.fault):
        ranks = [rank for rank, report in spoke.items() if report.fault == fault]
        sentences.append(f"Which fixes are active is not known on {with_hosts(ranks, spoke)}: {fault.rstrip('.')}.")
    if silent:
        where = {rank: silent_host(rank) or "an unknown host" for rank in silent}
        by_host = {host: [rank for rank in silent if where[rank] == host] for host in dict.fromkeys(where.values())}
        said = "; ".join(f"{ranks_named(ranks)} on {host}" for host, ranks in by_host.items())
        sentences.append(
            f"No report within {limit:.0f} s: {said}. There vllm-graphfix is not installed, or VLLM_PLUGINS keeps it "
            "out, or it failed before it could report (see that process's log), or the process hangs."
        )
    if foreign:
        sentences.append(f"Another version of vllm-graphfix reported for {ranks_named(foreign)}.")
    return " ".join(sentences) or None


def with_hosts(ranks: list[int], spoke: Mapping[int, RankReport]) -> str:
    hosts = dict.fromkeys(spoke[rank].host for rank in ranks)
    return ", ".join(f"{ranks_named([rank for rank in ranks if spoke[rank].host == host])} ({host})" for host in hosts)


def one_line(text: str) -> str:
    """On one line, and no longer than a report's texts may be."""
    return printable(text)[:_LONGEST]


def new_token() -> str:
    return os.urandom(8).hex()
