"""Compares the ranks of an engine before a graph is captured, without a collective.

Ranks that disagree about a fix can run different graphs, and then wait for each other in a collective for ever. A
collective to compare them would hang in that very case, and beside a rank without the plugin. So each rank publishes
its report in the key-value store of torch.distributed's rendezvous, and reads the others' with a timeout.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from vllm_graphfix.engine.rank_report import HEX_ID, RankReport, one_line
from vllm_graphfix.text import ranks_named

WARN_AFTER = 30.0
"""Seconds after which the log names the ranks that have not reported."""
_SLICE = 3.0
"""Seconds between two checks of a waiting rank for the end of the engine on another."""
TIMEOUT_FOR_A_WARNING = 10.0
"""Seconds to wait if an unresponsive rank does not stop the engine."""
_LAST_READERS = 5.0
"""Seconds that the rank which holds the store waits at its end, so that the others can read the difference."""


class Agreement(NamedTuple):
    """The result of a comparison."""

    group: str
    """The name of the group of ranks that were compared; equal on all of them."""
    leader: str | None
    """The engine of rank 0; None without a report of it."""
    world_size: int
    agreeing: int
    """The number of ranks that report the same as the majority."""
    difference: str | None
    """One or more sentences that name ranks, hosts and what differs."""
    all_off: bool
    """Every rank that reported is off: they are stock, like a rank without a report."""
    failing: Mapping[int, RankReport] = {}
    """The reports of ranks on which a fix or the capture itself failed, or which cannot take graphs out of dispatch."""
    unchecked: Mapping[int, str] = {}
    """Ranks that go on without a report because of an error of their own, each with that error."""
    followers: tuple[str, ...] = ()
    """On rank 0: the other engines among the ranks, of nodes that started on their own."""


def publish(store: Any, stage: str, rank: int, report: RankReport) -> str:
    """Write *report* of *rank* to *store*, a `torch.distributed.Store`; return the place to `compare` at.

    A rank's n-th report for *stage* is compared with the others' n-th in the same store: if vLLM makes its groups anew,
    old and new ranks start with the first. Raises the store's error if it cannot be reached.
    """
    # Read and then set, not added to, so that a retry of either does not count twice.
    count = f"{stage}/count/{rank}"
    number = int(with_one_retry(store.add, count, 0)) + 1
    with_one_retry(store.set, count, str(number))
    place = f"{stage}-{number}"
    # The report before its digest: a rank that sees the digest may read the report. Most read only digests, which
    # keeps the traffic of a thousand ranks small.
    with_one_retry(store.set, f"{place}/word/{rank}", report.encode())
    with_one_retry(store.set, f"{place}/engine/{rank}", report.engine)
    with_one_retry(store.set, f"{place}/{rank}", report.digest())
    return place


def with_one_retry(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of *call*, after a second attempt if need be: without a report the other ranks wait minutes."""
    try:
        return call(*args, **kwargs)
    except Exception:
        return call(*args, **kwargs)


def publish_end(store: Any, place: str) -> None:
    """Stop the wait of ranks at *place*, which `publish` has returned: no more reports will come."""
    store.set(f"{place}/ended", b"1")


def publish_unchecked(store: Any, stage: str, rank: int, why: str) -> None:
    """Publish at *stage* that *rank* goes on without a report, because of the error *why*.

    The number of the comparison is not part of the key: `publish` may have failed before it was known.
    """
    with_one_retry(store.set, f"{stage}/unchecked/{rank}", one_line(why))


def publish_stop(store: Any, stage: str, rank: int, why: str) -> None:
    """Stop ranks that wait at *stage* for a report of *rank*, which stops because of the error *why*."""
    with_one_retry(store.set, f"{stage}/stops/{rank}", one_line(why))


def _notes(store: Any, kind: str, place: str, ranks: list[int]) -> dict[int, str]:
    """Return the errors of *ranks* that called `publish_unchecked`, or `publish_stop`, for the stage of *place*."""
    stage = place.rpartition("-")[0]
    keys = {rank: f"{stage}/{kind}/{rank}" for rank in ranks}
    return {rank: one_line(store.get(key)) for rank, key in keys.items() if store.check([key])}


def compare(
    store: Any,
    place: str,
    rank: int,
    world_size: int,
    report: RankReport,
    warn: Callable[[str], None],
    *,
    host_of: Callable[[int], str | None] = lambda rank: None,
    timeout: float,
) -> Agreement:
    """Compare *report*, published at *place*, with the reports of the other ranks.

    *host_of* returns the host of a rank without a report, *timeout* is in seconds. Raises the store's error if it
    cannot be reached.
    """
    missing = _wait_for(store, place, [other for other in range(world_size) if other != rank], timeout, warn)
    reporting = [other for other in range(world_size) if other not in missing]
    unchecked, stopping = _notes(store, "unchecked", place, missing), _notes(store, "stops", place, missing)
    # If a rank stops, this one has not waited for the rest, so they are not unresponsive.
    unresponsive = [] if stopping else [other for other in missing if other not in unchecked]
    digests = store.multi_get([f"{place}/{other}" for other in reporting])
    if len(set(digests)) == 1 and not missing and not (report.fault or report.needs_action):
        first = _read_report(store, f"{place}/word/0") or report
        followers = _followers(store, place, reporting, report.engine) if rank == 0 else ()
        return Agreement(first.token, first.engine, world_size, world_size, None, first.off, followers=followers)
    read = {other: report if other == rank else _read_report(store, f"{place}/word/{other}") for other in reporting}
    reports = {other: each for other, each in read.items() if each is not None}
    unreadable = [other for other, each in read.items() if each is None]
    difference = _difference(reports, unresponsive, unreadable, timeout, host_of)
    if stopping:
        errors = "; ".join(f"rank {other}: {why.rstrip('.')}" for other, why in stopping.items())
        difference = " ".join(filter(None, (difference, f"Stopped by an error of its own: {errors}.")))
    failing = {other: each for other, each in reports.items() if each.needs_action}
    differing = _minority_ranks(reports) | {other for other, each in reports.items() if each.fault}
    if difference is not None or failing:
        _wait_for_readers(store, place, rank, reporting)
    return Agreement(
        group=reports[min(reports)].token,
        leader=reports[0].engine if 0 in reports else None,
        world_size=world_size,
        agreeing=len(reports) - len(differing),
        difference=difference,
        all_off=all(each.off for each in reports.values()),
        failing=failing,
        unchecked=unchecked,
        followers=_without(report.engine, (each.engine for each in reports.values())) if rank == 0 else (),
    )


def _followers(store: Any, place: str, reporting: list[int], engine: str) -> tuple[str, ...]:
    """Return the engines of the ranks *reporting* other than *engine*, without reading a thousand reports."""
    keys = [f"{place}/engine/{other}" for other in reporting]
    # Checked first: another build of this version may write none, and `get` waits minutes for a missing key.
    if not store.check(keys):
        return ()
    engines = [each.decode() for each in store.multi_get(keys) if re.fullmatch(HEX_ID.encode(), each)]
    return _without(engine, engines)


def _without(engine: str, engines: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(engines) - {engine}))


def _wait_for(store: Any, place: str, others: list[int], limit: float, warn: Callable[[str], None]) -> list[int]:
    """Wait up to *limit* seconds; return those of *others* without a report."""
    started = time.monotonic()
    missing = others
    for until in (min(WARN_AFTER, limit), limit):
        while missing:
            remaining = max(started + until - time.monotonic(), 0.001)
            try:
                store.wait([f"{place}/{rank}" for rank in missing], timedelta(seconds=min(remaining, _SLICE)))
            except RuntimeError:  # DistStoreError, after the timeout; a store that is gone raises again below
                missing = [rank for rank in missing if not store.check([f"{place}/{rank}"])]
                if store.check([f"{place}/ended"]) or _notes(store, "stops", place, missing):
                    return missing
                if len(_notes(store, "unchecked", place, missing)) == len(missing):
                    return missing
            else:
                return []
            if remaining <= _SLICE:
                break
        if missing and until < limit:
            warn(f"waiting up to {limit - until:.0f} s more for {ranks_named(missing)} to report which fixes they have")
    return missing


def _read_report(store: Any, key: str) -> RankReport | None:
    """Read the report under *key*; None if there is none, or an unreadable one."""
    # `get` would wait for a missing key.
    return RankReport.decode(store.get(key)) if store.check([key]) else None


def _wait_for_readers(store: Any, place: str, rank: int, reporting: list[int]) -> None:
    """Note that this rank has read the store; on rank 0, wait until the others have, too.

    The process of rank 0 holds the store. If it ended first, the others would report that the store is gone, not the
    difference.
    """
    try:
        store.set(f"{place}/read/{rank}", b"")
        if rank == 0:
            store.wait([f"{place}/read/{other}" for other in reporting], timedelta(seconds=_LAST_READERS))
    except Exception:  # this error must not replace the difference, which is known
        return


def _differing(reports: Mapping[int, RankReport]) -> dict[str, dict[str, list[int]]]:
    """Return the subjects that differ, each with its values and the ranks of each value."""
    compared = {rank: report.compared() for rank, report in reports.items()}
    differing: dict[str, dict[str, list[int]]] = {}
    for subject in dict.fromkeys(name for each in compared.values() for name in each):
        values: dict[str, list[int]] = {}
        for rank, each in compared.items():
            if subject in each:
                values.setdefault(each[subject], []).append(rank)
        if len(values) > 1:
            differing[subject] = values
    return differing


def _minority_ranks(reports: Mapping[int, RankReport]) -> set[int]:
    """Return the ranks that differ from the majority; of two halves, the one without the lowest rank."""
    minority: set[int] = set()
    for values in _differing(reports).values():
        most = max(values.values(), key=lambda ranks: (len(ranks), -min(ranks)))
        minority.update(rank for ranks in values.values() if ranks is not most for rank in ranks)
    return minority


def _difference(
    reports: Mapping[int, RankReport],
    unresponsive: list[int],
    unreadable: list[int],
    limit: float,
    host_of: Callable[[int], str | None],
) -> str | None:
    sentences = []
    differing = _differing(reports)
    for subject, values in differing.items():
        listed = "; ".join(f"{value!r} on {with_hosts(ranks, reports)}" for value, ranks in values.items())
        sentences.append(f"{subject} is {listed}.")
    whys: dict[str, dict[int, list[str]]] = {}
    for rank, report in reports.items():
        for name in sorted(report.reasons.keys() & differing.keys()):
            whys.setdefault(report.reasons[name], {}).setdefault(rank, []).append(name)
    for why, names in whys.items():
        fixes = ", ".join(dict.fromkeys(name for each in names.values() for name in each))
        sentences.append(f"The reason on {with_hosts(list(names), reports)} for {fixes}: {why.rstrip('.')}.")
    for fault in dict.fromkeys(report.fault for report in reports.values() if report.fault):
        ranks = [rank for rank, report in reports.items() if report.fault == fault]
        sentences.append(f"Which fixes are active is not known on {with_hosts(ranks, reports)}: {fault.rstrip('.')}.")
    if unresponsive:
        by_host: dict[str, list[int]] = {}
        for rank in unresponsive:
            by_host.setdefault(host_of(rank) or "an unknown host", []).append(rank)
        listed = "; ".join(f"{ranks_named(ranks)} on {host}" for host, ranks in by_host.items())
        sentences.append(
            f"No report within {limit:.0f} s: {listed}. There vllm-graphfix is not installed, or VLLM_PLUGINS keeps it "
            "out, or it failed before it could report (see that process's log), or the process hangs."
        )
    if unreadable:
        sentences.append(f"Another version of vllm-graphfix reported for {ranks_named(unreadable)}.")
    return " ".join(sentences) or None


def with_hosts(ranks: list[int], reports: Mapping[int, RankReport]) -> str:
    """Return the names of *ranks*, grouped by host."""
    hosts = dict.fromkeys(reports[rank].host for rank in ranks)
    return ", ".join(
        f"{ranks_named([rank for rank in ranks if reports[rank].host == host])} ({host})" for host in hosts
    )
