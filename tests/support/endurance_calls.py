"""The calls that are made again and again, to see what they leave; ``main`` runs in a process of its own."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import endurance_layers as layers
import endurance_records as of_records
from endurance_growth import Case, growth_by
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes import BY_NAME


def main(calls: dict[str, int]) -> None:
    """Prints a line of JSON for each case of *calls*, which says how often."""
    logging.disable()
    for name, times in calls.items():
        case = CASES[name].make()
        activities = case.activities
        for activity in activities.values():
            activity.error = None
        growth = growth_by(case.call, times, functools.partial(_count_afresh, activities))
        counts = {event: count for activity in activities.values() for event, count in activity.counts.items()}
        result = {
            "case": name,
            "left": growth._asdict(),
            "counted": {event: count for event, count in counts.items() if count},
            "expected": dict.fromkeys(case.counted, times),
            "failing": [fix for fix, activity in activities.items() if activity.error is not None],
            "expected_failing": [] if case.failing is None else [case.failing],
        }
        print(json.dumps(result), flush=True)  # noqa: T201 - the result


def _count_afresh(activities: Mapping[str, Activity]) -> None:
    """Sets what has been counted to 0; what failed before stays."""
    for fix, activity in activities.items():
        for event in BY_NAME[fix].events:
            activity.counter(event).count = 0


class Planned(NamedTuple):
    make: Callable[[], Case]
    release: str | None
    """The release that it is about; None for what needs no vLLM."""
    calls: tuple[int, int] = (3_200, 1_000_000)
    """In `make test`, where an object that stays of one call in 100 exceeds what is allowed (of what does nothing, of
    one in 30; of slow calls, of each), and in `make test-all`."""


_MAMBA, _FLASHMLA, _DRAFTS, _INDEXER, _TRITON_MLA, _ADAPTIVE = (
    "0.21.0",
    "0.17.1",
    "0.17.1",
    "0.27.1",
    "0.25.1",
    "0.33.0",
)
_UNEVENTFUL, _SLOWER = (1_000, 1_000_000), (3_200, 1_000_000)
_WRITTEN, _MADE = (250, 10_000), (400, 100_000)
CASES: dict[str, Planned] = {
    "mamba-padding, active, a padded row that reads as prefilling": Planned(
        lambda: layers.mamba(active=True, stale=True), _MAMBA
    ),
    "mamba-padding, active, no such row": Planned(lambda: layers.mamba(active=True, stale=False), _MAMBA, _UNEVENTFUL),
    "mamba-padding, active, failing at each call": Planned(
        lambda: layers.mamba(active=True, stale=True, broken=True), _MAMBA
    ),
    "mamba-padding, observed, a padded row that reads as prefilling": Planned(
        lambda: layers.mamba(active=False, stale=True), _MAMBA
    ),
    "mamba-padding, observed, a request that is prefilling": Planned(
        lambda: layers.mamba(active=False, stale=True, padded=False), _MAMBA
    ),
    "mamba-padding, observed, no such row": Planned(
        lambda: layers.mamba(active=False, stale=False), _MAMBA, _UNEVENTFUL
    ),
    "prompt-logprobs, active, a scored prompt": Planned(lambda: layers.samples(active=True), _MAMBA),
    "prompt-logprobs, active, nobody asks": Planned(
        lambda: layers.samples(active=True, scored=False), _MAMBA, _UNEVENTFUL
    ),
    "prompt-logprobs, active, failing at each call": Planned(lambda: layers.samples(active=True, broken=True), _MAMBA),
    "prompt-logprobs, observed, a scored prompt": Planned(lambda: layers.samples(active=False), _MAMBA),
    "FlashMLA, both fixes active, padding": Planned(lambda: layers.flashmla(active=True, padded=True), _FLASHMLA),
    "FlashMLA, both fixes active, no padding": Planned(
        lambda: layers.flashmla(active=True, padded=False), _FLASHMLA, _UNEVENTFUL
    ),
    "FlashMLA, both fixes observed, padding": Planned(lambda: layers.flashmla(active=False, padded=True), _FLASHMLA),
    "flash-mixed-schedule, active, decodes": Planned(lambda: layers.flash(active=True), _MAMBA, _SLOWER),
    "flash-mixed-schedule, active, a prompt as long as the graph": Planned(
        lambda: layers.flash(active=True, decodes=False), _MAMBA, _UNEVENTFUL
    ),
    "flash-mixed-schedule, observed, decodes": Planned(lambda: layers.flash(active=False), _MAMBA, _SLOWER),
    "indexer-padding, active, padding": Planned(lambda: layers.indexer(active=True, padded=True), _INDEXER, _SLOWER),
    "indexer-padding, active, no padding": Planned(
        lambda: layers.indexer(active=True, padded=False), _INDEXER, _UNEVENTFUL
    ),
    "indexer-padding, observed, padding": Planned(lambda: layers.indexer(active=False, padded=True), _INDEXER, _SLOWER),
    "triton-mla-padding, active, padding": Planned(lambda: layers.triton_mla(active=True, padded=True), _TRITON_MLA),
    "triton-mla-padding, active, no padding": Planned(
        lambda: layers.triton_mla(active=True, padded=False), _TRITON_MLA, _UNEVENTFUL
    ),
    "triton-mla-padding, observed, padding": Planned(lambda: layers.triton_mla(active=False, padded=True), _TRITON_MLA),
    "workspace-growth, active, a recorded workspace in use": Planned(
        lambda: layers.workspace(active=True), _MAMBA, _UNEVENTFUL
    ),
    "workspace-growth, active, a recorded workspace that was outgrown": Planned(
        lambda: layers.workspace(active=True, outgrown=True), _MAMBA, _UNEVENTFUL
    ),
    "workspace-growth, observed, a recorded workspace in use": Planned(
        lambda: layers.workspace(active=False), _MAMBA, _UNEVENTFUL
    ),
    "draft-decode-mode, active": Planned(lambda: layers.drafts(active=True), _DRAFTS),
    "draft-decode-mode, observed": Planned(lambda: layers.drafts(active=False), _DRAFTS),
    "draft-decode-mode of nightlies, active": Planned(lambda: layers.nightly_prefills(active=True), _DRAFTS),
    "draft-decode-mode of nightlies, observed": Planned(lambda: layers.nightly_prefills(active=False), _DRAFTS),
    "prefill-dispatch, active, a prefill of one token": Planned(lambda: layers.dispatch(active=True), _MAMBA),
    "prefill-dispatch, active, decodes": Planned(
        lambda: layers.dispatch(active=True, prefills=False), _MAMBA, _UNEVENTFUL
    ),
    "prefill-dispatch, active, failing at each call": Planned(
        lambda: layers.dispatch(active=True, broken=True), _MAMBA
    ),
    "prefill-dispatch, observed, a prefill of one token": Planned(lambda: layers.dispatch(active=False), _MAMBA),
    "prefill-dispatch of V2, active, a prefill of one token": Planned(lambda: layers.dispatch_v2(active=True), _MAMBA),
    "prefill-dispatch of V2, active, decodes": Planned(
        lambda: layers.dispatch_v2(active=True, prefills=False), _MAMBA, _UNEVENTFUL
    ),
    "prefill-dispatch of V2, observed, a prefill of one token": Planned(
        lambda: layers.dispatch_v2(active=False), _MAMBA
    ),
    "adaptive-schedule, active, a step shorter than its graph": Planned(lambda: layers.steps(active=True), _ADAPTIVE),
    "adaptive-schedule, active, a step as long": Planned(
        lambda: layers.steps(active=True, shorter=False), _ADAPTIVE, _UNEVENTFUL
    ),
    "adaptive-schedule, active, failing at each call": Planned(
        lambda: layers.steps(active=True, broken=True), _ADAPTIVE
    ),
    "adaptive-schedule, observed, a step shorter than its graph": Planned(
        lambda: layers.steps(active=False), _ADAPTIVE
    ),
    "records of 64 ranks read": Planned(of_records.watcher, None, (5, 10_000)),
    "records of 64 ranks read, beside another engine's": Planned(
        lambda: of_records.watcher(others=4), None, (5, 1_000)
    ),
    "a record touched": Planned(of_records.reporter, None, _WRITTEN),
    "a record written": Planned(lambda: of_records.reporter(changing=True), None, _WRITTEN),
    "a record that cannot be written": Planned(lambda: of_records.reporter(base=Path("/proc")), None, _WRITTEN),
    "records of one engine after the other": Planned(lambda: of_records.reporter(engines=True), None, _WRITTEN),
    # Behind all of its release: it registers, and what the others wrap has layers then.
    "a record made": Planned(of_records.telling, _MAMBA, _MADE),
}
