"""The target model's part in speculative decoding: it verifies the drafts of the step before."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

STEPS = 9
VERIFIED = STEPS - 1
"""Steps whose drafts were verified before the last check."""


class Verified(NamedTuple):
    """Arguments of `propose`: what the target has sampled of each request."""

    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    """(largest number of requests, 1)"""


Propose = Callable[[Verified], torch.Tensor]
"""Returns drafts, (requests, drafts of each)."""
Target = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns what the target samples, after the drafts of a speculator and those of one without graphs."""


def like_eager(drafts: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    return eager


def like_served(drafts: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    return drafts


def like_neither(drafts: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    return torch.where(drafts + 1 == eager, drafts + 2, drafts + 1) % (1 + max(drafts.max(), eager.max()))


def decode(speculator: Propose, eager: Propose, target: Target, places: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the drafts of *speculator* in some steps, of which *target* verifies each.

    *places*: those of the requests in buffers.
    """
    random = torch.Generator().manual_seed(3)
    last = torch.zeros(int(places.max()) + 1, 1, dtype=torch.int64)
    ones = torch.ones(len(places), dtype=torch.int32)
    verified, drafted = Verified(ones, torch.zeros_like(ones), last), []
    for _ in range(STEPS):
        drafts, right = speculator(verified), eager(verified)
        bonus = torch.randint(vocabulary, (len(places), 1), generator=random)
        tokens = torch.cat((target(drafts, right), bonus), 1)
        accepted = (drafts == tokens[:, :-1]).long().cumprod(1).sum(1)
        last = last.index_copy(0, places, tokens.gather(1, accepted[:, None]))
        verified = Verified((accepted + 1).int(), (drafts.shape[1] - accepted).int(), last)
        drafted.append(drafts)
    return torch.stack(drafted)
