"""The shadow check on graphs of an encoder, replayed by vLLM's own manager and model runners, from 0.24.0 on.

Stand-ins: those of the scenario for `encoder-adapters`; graphs are the CPU double's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.shadow_rate import Action, Rate
from vllm_graphfix.shadow import encoder, process
from vllm_graphfix.source.files import open_source
from vllm_graphfix.verify.double.scenarios import encoder_adapters as scenario
from vllm_graphfix.verify.double.scenarios import encoder_padding

RUNNERS = pytest.mark.parametrize("kind", scenario.runners(), ids=lambda kind: kind.__name__)


class Served:
    """A model runner whose encoder's graphs are checked, unless *every* is None."""

    def __init__(self, kind: Any, *, every: int | None = 1, action: Action = Action.REPORT, parallel: Any = ()) -> None:
        process.start(Rate(every=every), action, pieces=True)
        self.shadow: Any = process.SHADOW
        self.model = scenario.EncoderWithAdapters()
        self._runner = kind(self.model, graphs=True)
        vars(self._runner.manager.vllm_config.parallel_config).update({"data_parallel_size": 1} | dict(parallel))
        self._random = torch.Generator().manual_seed(1)

    def step(self, lengths: tuple[int, ...] = (5, 3), adapters: tuple[int, ...] = (0, 0)) -> list[torch.Tensor]:
        process.SHADOW = self.shadow
        images = [scenario.image(length, self._random) for length in lengths]
        encoded: list[torch.Tensor] = self._runner.encode(list(zip(images, adapters, strict=True)))
        return encoded

    def move_weights(self) -> None:
        """Put other weights elsewhere: the graph reads the old ones."""
        self.model._weights = {
            name: (weight * 2, *of_adapters) for name, (weight, *of_adapters) in self.model._weights.items()
        }

    def graphs(self) -> list[Any]:
        sets = self._runner.manager.budget_graphs.values()
        return [each.graph for graphs in sets for each in graphs.values()]

    def seen(self) -> tuple[int, int, str | None]:
        results = self.shadow.results
        return results.checks, results.mismatches, self.shadow.stopped


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with scenario.encoders_on_the_cpu(), torch.inference_mode():
        yield
    process.start(Rate(), Action.REPORT)


@RUNNERS
def test_right_graphs_encode_the_same_with_and_without_the_check(kind: Any) -> None:
    unwatched, served = Served(kind, every=None), Served(kind)
    for lengths in ((5, 3), (2, 6), (8,)):
        no_adapter = (0,) * len(lengths)
        assert all(map(torch.equal, served.step(lengths, no_adapter), unwatched.step(lengths, no_adapter)))
    assert served.seen() == (3, 0, None)


@RUNNERS
def test_moved_weights_are_a_mismatch_and_quarantine_encodes_with_the_new_ones(kind: Any) -> None:
    old, served = Served(kind, every=None), Served(kind, action=Action.QUARANTINE)
    held = served.graphs()
    served.move_weights()
    steps = [(served.step(), old.step()) for _ in range(3)]
    assert [all(map(torch.equal, *each)) for each in steps] == [True, True, False]  # reported, and not meddled with
    assert served.seen() == (2, 2, None)
    first = served.shadow.results.first_mismatches[0]
    assert (first.graph.name, first.rows) == (f"encoder, a graph for {scenario.BUDGET} tokens", 8)
    assert served.graphs() == held


@RUNNERS
def test_padded_rows_are_not_compared(kind: Any) -> None:
    served = Served(kind)
    served.step((2,), (0,))
    assert served.seen() == (1, 0, None)
    served.move_weights()
    served.step((2,), (0,))
    assert [len(each.errors) for each in served.shadow.results.first_mismatches] == [2]


@RUNNERS
@pytest.mark.parametrize(
    ("config", "because"), [({"pipeline_parallel_size": 2}, "same steps"), ({"data_parallel_size": 2}, "same steps")]
)
def test_where_ranks_encode_apart_graphs_are_left_alone_with_the_reason(
    kind: Any, config: dict[str, int], because: str
) -> None:
    served = Served(kind, parallel=config)
    served.step()
    assert served.seen() == (0, 0, None)
    assert because in served.shadow.without_encoder


@RUNNERS
def test_ranks_that_encode_images_of_their_own_are_left_alone(kind: Any) -> None:
    served = Served(kind)
    served._runner.manager.use_dp = True
    assert not encoder._is_due(served.shadow, served._runner.manager)
    assert "images of its own" in served.shadow.without_encoder


class Attending:
    """A manager with graphs of an encoder that attends by FlashAttention, whose kernel is the scenario's stand-in."""

    def __init__(self) -> None:
        process.start(Rate(every=1), Action.QUARANTINE, pieces=True)
        self.shadow: Any = process.SHADOW
        config = encoder_padding.config_of(encoder_padding.BUDGETS, encoder_padding.IMAGES)
        config.parallel_config.data_parallel_size = 1
        config.lora_config = None
        encoder: Any = encoder_padding.EncoderStandIn()
        made = EncoderCudaGraphManager(config, torch.device("cpu"), torch.float32, encoder)
        self._manager = encoder_padding.captured(made)

    def encode(self, number: int, lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.cat(self._manager.execute(encoder_padding.images_of(number, lengths)))


def _as_it_was(like: torch.Tensor, **_: Any) -> torch.Tensor:
    """Stand for memory in which somebody has left NaN."""
    return torch.full_like(like, torch.nan)


def test_rows_that_attention_does_not_write_are_zeros_in_a_run_without_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", encoder_padding.kernel_stand_in, raising=False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda *_: True)
    monkeypatch.setattr(torch, "empty_like", _as_it_was)
    served = Attending()
    kernel = fa_utils.flash_attn_varlen_func
    encoded = [served.encode(number, lengths) for number, lengths in enumerate(encoder_padding.BATCHES)]
    is_affected = manifest.diagnose(BY_NAME["encoder-padding"], open_source()).verdict is Verdict.AFFECTED
    results = served.shadow.results
    assert (results.checks, results.mismatches) == (3, 3 * is_affected)
    assert (results.skipped, served.shadow.stopped) == (0, None)
    assert all(each.isfinite().all() for each in encoded) is not is_affected, "the first mismatches are served"
    assert fa_utils.flash_attn_varlen_func is kernel


def test_the_kernel_of_another_platform_takes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", encoder_padding.kernel_stand_in, raising=False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda *_: False)
    with encoder._attention_on_zeros():
        assert fa_utils.flash_attn_varlen_func is encoder_padding.kernel_stand_in
