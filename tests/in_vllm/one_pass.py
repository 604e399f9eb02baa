"""Speculators that draft in one pass, after a target model that has verified the drafts of the step before."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verified_drafts

from vllm_graphfix.verify.double.scenarios import draft_non_causal as scenario

NAMES = [f"request-{row}" for row in range(scenario.REQUESTS)]
VERIFIED = scenario.REQUESTS * verified_drafts.VERIFIED
"""Requests of steps whose drafts were verified before the last check."""


def propose(speculator: Any, names: list[str], verified: verified_drafts.Verified) -> torch.Tensor:
    """Return drafts, (requests, drafts of each)."""
    rows, width = scenario.REQUESTS, scenario.WIDTH
    lengths = torch.tensor((17, 30, 29, 42))
    batch = SimpleNamespace(
        req_ids=names,
        num_reqs=rows,
        num_tokens=rows * width,
        num_scheduled_tokens=np.full(rows, width, dtype=np.int32),
        idx_mapping=torch.arange(rows, dtype=torch.int32),
        positions=(lengths[:, None] - width + torch.arange(width)).flatten(),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32) * width,
        seq_lens_cpu_upper_bound=lengths,
    )
    drafts: torch.Tensor = speculator.propose(
        batch,
        {},
        {},
        torch.zeros(rows * width, scenario.HIDDEN),
        None,
        **verified._asdict(),
        next_prefill_tokens=torch.zeros(rows, dtype=torch.int32),
        temperature=torch.zeros(rows),
        seeds=torch.zeros(rows, dtype=torch.int64),
    )
    return drafts.clone()


def decode(speculator: Any, eager: Any, target: verified_drafts.Target, names: list[str] = NAMES) -> torch.Tensor:
    """Return the drafts of *speculator*, of which *target* verifies each; *names* of the requests."""
    graphed, right = (functools.partial(propose, each, names) for each in (speculator, eager))
    return verified_drafts.decode(graphed, right, target, torch.arange(scenario.REQUESTS), scenario.VOCABULARY)
