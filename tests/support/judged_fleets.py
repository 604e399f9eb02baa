"""Fleets as series, half an hour of each, for the judges of Argo Rollouts and Flagger; and the values they get."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

CANARY = 'job="vllm", namespace="llm", instance="in"'
OTHER = 'job="vllm", namespace="llm", instance="out"'
MODEL = 'model_name="m", engine="0"'


def an_engine(
    where: str, canary: int, seconds_a_token: float, failed: int, agreeing: int = 2, state: str = "active"
) -> dict[str, str]:
    """Half an hour of one engine: 600 tokens and 100 finished requests a minute, *failed* of which were aborted."""
    fix = 'fix="mamba-padding", mode="auto", code="none"'
    return {
        f"graphfix_canary{{{where}}}": f"{canary}x30",
        f"graphfix_ranks_expected{{{where}}}": "2x30",
        f"graphfix_ranks_agreeing{{{where}}}": f"{agreeing}x30",
        f'graphfix_fix_ranks{{{where}, {fix}, state="{state}"}}': "2x30",
        f"vllm:num_requests_running{{{where}, {MODEL}}}": "5x30",
        f"vllm:inter_token_latency_seconds_sum{{{where}, {MODEL}}}": f"0+{600 * seconds_a_token:g}x30",
        f"vllm:inter_token_latency_seconds_count{{{where}, {MODEL}}}": "0+600x30",
        f'vllm:request_success_total{{{where}, {MODEL}, finished_reason="stop"}}': f"0+{100 - failed}x30",
        f'vllm:request_success_total{{{where}, {MODEL}, finished_reason="abort"}}': f"0+{failed}x30",
    }


def idle(series: Mapping[str, str]) -> dict[str, str]:
    return {name: "0x30" if name.startswith("vllm:") else values for name, values in series.items()}


REST = an_engine(OTHER, 0, 0.02, 3, state="not-in-canary")
HEALTHY = an_engine(CANARY, 1, 0.022, 1) | REST
SICK = an_engine(CANARY, 1, 0.03, 20, agreeing=1, state="failed") | an_engine(OTHER, 0, 0.02, 0, state="not-in-canary")
WATCHED = an_engine(CANARY, 1, 0.022, 20) | REST
"""On the canary a detector has 18 of 100 requests ended, and does not work on another engine of it."""
ENDED = f'graphfix_events_total{{{CANARY}, fix="shadow", event="aborted"}}'
DEAF = f'graphfix_fix_ranks{{{CANARY}, fix="kv-marks", mode="auto", state="incompatible", code="engine"}}'
FLEETS: Mapping[str, Mapping[str, str]] = {
    "that ends wrong answers": WATCHED | {ENDED: "0+18x30", DEAF: "2x30"},
    "healthy": HEALTHY,
    "sick": SICK,
    "with ranks that differ": an_engine(CANARY, 1, 0.022, 1, agreeing=1) | REST,
    "with a failed fix": an_engine(CANARY, 1, 0.022, 1, state="failed") | REST,
    "that is slow": an_engine(CANARY, 1, 0.03, 1) | REST,
    "that fails requests": WATCHED,
    "idle": idle(HEALTHY),
    "without the plugin": {name: values for name, values in HEALTHY.items() if name.startswith("vllm:")},
    "of another model": {name.replace('model_name="m"', 'model_name="n"'): values for name, values in HEALTHY.items()},
}
ON_ONE_ENGINE = ("with ranks that differ", "with a failed fix")
"""Faults that one engine of a large canary has; the others are as in "healthy"."""
ENGINES, RANKS, STATES, SPEED, FAILED = (
    "engines-in-canary",
    "ranks-that-do-not-agree",
    "fixes-not-applied",
    "time-per-token",
    "failed-requests",
)
JUDGE_VALUES: Mapping[str, Mapping[str, float | None]] = {
    "healthy": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: 1.1, FAILED: -0.02},
    "that ends wrong answers": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: 1.1, FAILED: -0.01},
    "sick": {ENGINES: 1, RANKS: 1, STATES: 2, SPEED: 1.5, FAILED: 0.2},
    "with ranks that differ": {ENGINES: 1, RANKS: 1, STATES: 0, SPEED: 1.1, FAILED: -0.02},
    "with a failed fix": {ENGINES: 1, RANKS: 0, STATES: 2, SPEED: 1.1, FAILED: -0.02},
    "that is slow": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: 1.5, FAILED: -0.02},
    "that fails requests": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: 1.1, FAILED: 0.17},
    "idle": {ENGINES: 1, RANKS: 0, STATES: 0, SPEED: None, FAILED: None},
    "without the plugin": {ENGINES: None, RANKS: None, STATES: None, SPEED: None, FAILED: None},
    "of another model": {ENGINES: None, RANKS: None, STATES: 0, SPEED: None, FAILED: None},
}
"""The value that each judge gets of a fleet; None for nothing, which Argo takes for inconclusive and Flagger for a
failed check."""
NAMED: Mapping[str, list[str]] = {
    "pods of a StatefulSet": [f"vllm-{number}" for number in range(2_000)],
    "nodes of a Deployment": [f"gpu-{number // 100:02d}-{number % 100:02d}.eu-1.example" for number in range(2_000)],
    "group keys of a LeaderWorkerSet": [
        hashlib.sha1(f"llm/vllm-{number}".encode()).hexdigest()  # noqa: S324 # its controller's
        for number in range(2_000)
    ],
}
"""Keys of 2,000 engines."""
