"""prefill-dispatch beside vLLM's own builders.

A step in the shape of a decode loses its graph just where the builder of its layers takes a row for a prefill, and so
leaves the buffers that the graph reads as they were.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from prefill_steps import AS_DECODE, layers, nothing_counted  # noqa: F401 - a fixture among them
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.scenarios import prefill_dispatch as scenario

try:
    from vllm.v1.worker.gpu.cudagraph_utils import get_uniform_token_count  # noqa: F401
    from vllm.v1.worker.gpu.model_states import mamba_hybrid
except ImportError:
    mamba_hybrid = None

_BACKENDS = "vllm.v1.attention.backends"
KDA = "vllm.models.kimi_k3.nvidia.kda_metadata"
BACKENDS = {
    "mamba-1": (f"{_BACKENDS}.mamba1_attn", "Mamba1AttentionBackend"),
    "mamba-2": (f"{_BACKENDS}.mamba2_attn", "Mamba2AttentionBackend"),
    "short convolution": (f"{_BACKENDS}.short_conv_attn", "ShortConvAttentionBackend"),
    "short convolution of Qwen4-exp": (f"{_BACKENDS}.short_conv_attn", "PleShortConvAttentionBackend"),
    "gated delta net": (f"{_BACKENDS}.gdn_attn", "GDNAttentionBackend"),
    "KDA of Kimi K3": (KDA, "KimiK3KDAAttentionBackend"),
    "linear": (f"{_BACKENDS}.linear_attn", "LinearAttentionBackend"),
    "bailing": (f"{_BACKENDS}.linear_attn", "BailingLinearAttentionBackend"),
}
DRAFTS = 2


class Row(NamedTuple):
    """A request of a step: tokens of its prompt, computed ones, known ones, and drafts that it is scheduled with."""

    prompt: int
    computed: int
    known: int
    drafts: int = 0

    def prefill(self, *, v2: bool) -> int:
        """The tokens up to which it counts as prefilling.

        On V2 a request that was preempted comes again with all that is known of it.
        """
        return self.known if v2 and self.computed + 1 < self.known else self.prompt


def kinds(length: int) -> dict[str, Row]:
    """Rows of as many tokens as a decode has, in the order in which vLLM sorts a batch."""
    rows = {
        "decode": Row(3, 6, 7, length - 1),
        "tail with a state": Row(5 + length, 5, 5 + length),
        "own tokens after a preemption": Row(3, 5, 8 + length),
        "first prompt": Row(length, 0, length),
        "first chunk after a preemption": Row(9, 0, 14),
    }
    if length > 1:
        rows["tail with a state and placeholders"] = Row(6, 5, 6, length - 1)
        rows["prompt of one token and placeholders"] = Row(1, 0, 1, length - 1)
    return rows


def steps(length: int) -> list[tuple[str, ...]]:
    """One row, two of a kind, and two of two kinds."""
    names = list(kinds(length))
    return [(name,) for name in names] + list(itertools.combinations_with_replacement(names, 2))


def source_says(function: Any, text: str) -> bool:
    return text in inspect.getsource(function)


class Stock:
    """A builder of vLLM, given what the model runner would give it."""

    def __init__(self, backend: Any, length: int, *, v2: bool) -> None:
        config = scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, length)
        spec = MambaSpec(
            block_size=scenario.MAX_MODEL_LEN,
            shapes=((2,),),
            dtypes=(torch.float32,),
            **supported_kwargs(MambaSpec, {"num_speculative_blocks": length - 1}),
        )
        self.length, self.v2 = length, v2
        config.cache_config.use_kda_recoverssm = False  # as by default
        self.builder = backend.get_builder_cls()(spec, [scenario.LAYER], config, scenario.CPU)
        source = inspect.getsource(GPUModelRunner._build_attention_metadata)
        source = source[source.index("if use_spec_decode and isinstance(") :]
        source = source[: source.index("extra_attn_metadata_args = dict(")]
        self._has_draft_arguments = v2 or any(
            re.search(rf"\b{cls.__name__}\b", source) for cls in type(self.builder).__mro__
        )

    def takes_for_prefills(self, rows: list[Row]) -> int:
        prefilling = [row.computed < row.prefill(v2=self.v2) for row in rows]
        common = scenario._common_metadata(
            [self.length] * len(rows), [row.computed for row in rows], self.length, prefilling
        )
        return int(self.builder.build(0, common, **self._of_drafts(rows, prefilling)).num_prefills)

    def _of_drafts(self, rows: list[Row], prefilling: list[bool]) -> dict[str, torch.Tensor]:
        always = self.v2 or source_says(
            GPUModelRunner.execute_model, "use_spec_decode = self.speculative_config is not None"
        )
        if self.length == 1 or not self._has_draft_arguments or not (always or any(row.drafts for row in rows)):
            return {}
        if self.v2:
            in_prompts = source_says(
                mamba_hybrid.MambaHybridModelState.prepare_attn, "num_scheduled_tokens == num_draft_tokens_per_req + 1"
            )
        else:
            in_prompts = source_says(GPUModelRunner._prepare_inputs, "num_scheduled_tokens[req_idx] == draft_len + 1")
        counted = [
            row.drafts if row.drafts and (in_prompts or not still) else -1
            for row, still in zip(rows, prefilling, strict=True)
        ]
        return {
            "num_accepted_tokens": torch.ones(len(rows), dtype=torch.int32),
            "num_decode_draft_tokens_cpu": torch.tensor(counted, dtype=torch.int32),
        }


def keeps_its_graph_on_v1(backend: Any, length: int, rows: list[Row]) -> bool:
    config = scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, length)
    return _dispatched(scenario.DispatchV1(config, layers(_recurrent()), backend=backend).runner, length, rows)


def _dispatched(runner: Any, length: int, rows: list[Row]) -> bool:
    """Return whether model runner V1 has a full graph for *rows*."""
    batch = runner.input_batch
    for column, values in (
        (batch.num_prompt_tokens, [row.prompt for row in rows]),
        (batch.num_computed_tokens_cpu, [row.computed for row in rows]),
        (batch.num_tokens_no_spec, [row.known for row in rows]),
    ):
        column[: len(rows)] = values
    mode, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=length * len(rows),
        num_reqs=len(rows),
        num_scheduled_tokens_np=np.full(len(rows), length, dtype=np.int32),
        max_num_scheduled_tokens=length,
        use_cascade_attn=False,
    )
    return bool(mode is CUDAGraphMode.FULL)


def keeps_its_graph_on_v2(backend: Any, length: int, rows: list[Row]) -> bool:
    config = scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, length)
    dispatch = scenario.DispatchV2(config, layers(_recurrent()), backend=backend)
    computed = {}
    for number, row in enumerate(rows):
        dispatch._states.add(str(number), row.prefill(v2=True))
        computed[str(number)] = row.computed
    return dispatch(dict.fromkeys(computed, length), computed) is not None


def _recurrent() -> Any:
    return MambaSpec(block_size=32, shapes=((2,),), dtypes=(torch.float32,))


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("length", [1, 2, 1 + DRAFTS])
@pytest.mark.parametrize("layer", BACKENDS)
def test_a_step_loses_its_graph_just_where_the_builder_takes_a_row_for_a_prefill(
    layer: str, length: int, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, v2 = backend_named(layer), runner == "V2"
    if backend is None or (v2 and mamba_hybrid is None):
        pytest.skip("this release has no such layers, or no such dispatch")
    if layer == "KDA of Kimi K3":  # a Triton kernel, which fills the buffers of a graph of decodes with drafts
        monkeypatch.setattr(f"{KDA}.stage_spec_decode_metadata", lambda *_, **__: None)
    stock = Stock(backend, length, v2=v2)
    if length > 1 and layer != "bailing" and stock.builder._cudagraph_support.name == "UNIFORM_SINGLE_TOKEN_DECODE":
        pytest.skip("this builder has full graphs of one token a row alone: decodes with drafts have none to lose")
    decode = kinds(length)["decode"]
    if stock.takes_for_prefills([decode]):
        pytest.skip("stock tells this builder nothing of drafts: it takes every row for a prefill, decodes too")
    keeps = keeps_its_graph_on_v2 if v2 else keeps_its_graph_on_v1
    differing = []
    for step in steps(length):
        rows = sorted(
            (kinds(length)[kind] for kind in step),
            key=lambda row: (row.computed < row.prefill(v2=v2), not row.computed),
        )
        right = stock.takes_for_prefills(rows) == 0
        before = AS_DECODE.count
        keeps_the_graph = keeps(backend, length, rows)
        if keeps_the_graph != right or (AS_DECODE.count == before) != right:
            differing.append((step, "right" if right else "wrong", "kept" if keeps_the_graph else "taken"))
    assert not differing


def taken(*backends: Any, rows: list[Row], length: int = 1) -> bool:
    """Return whether the fix takes a step's graph, in a model with layers of all *backends*."""
    groups = layers(*(_recurrent() for _ in backends))
    runner = scenario.DispatchV1(
        scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, length), groups, backend=backends[0]
    ).runner
    for (group,), backend in zip(runner.attn_groups, backends, strict=True):
        group.backend = backend
    return not _dispatched(runner, length, rows)


@pytest.mark.parametrize("others", [0, 1, 3, 70])
def test_the_one_row_without_a_state_is_seen_anywhere_and_none_beyond_the_batch(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Stock sorts it to the end where it reorders a batch."""
    for name in ("CAPTURED", "MAX_TOKENS"):
        monkeypatch.setattr(scenario, name, others + 2)
    backend, decode = backend_of(builder_of("mamba-2")), kinds(1)["decode"]
    if not Stock(backend, 1, v2=False).takes_for_prefills([kinds(1)["first prompt"]]):
        pytest.skip("this builder goes by the length alone")
    groups = layers(_recurrent())
    made = scenario.DispatchV1(scenario._config(CUDAGraphMode.FULL_DECODE_ONLY, 1), groups, backend=backend).runner
    for place in range(others + 1):
        rows = [decode] * others
        rows.insert(place, kinds(1)["first prompt"])
        assert not _dispatched(made, 1, rows)
    # That of the last step is now one behind the batch.
    assert not others or _dispatched(made, 1, [decode] * others)


def backend_of(builder: type) -> Any:
    return type("Backend", (), {"get_builder_cls": staticmethod(lambda: builder)})


def backend_named(layer: str) -> Any:
    """None where this release has no such layers."""
    module, name = BACKENDS[layer]
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return None
        raise


def builder_of(layer: str) -> Any:
    return backend_named(layer).get_builder_cls()


def test_of_a_builder_that_decides_itself_nothing_is_assumed() -> None:
    linear = builder_of("linear")
    own = type("Own", (linear,), {"build": lambda self, *_: None})
    tail = [kinds(1)["tail with a state"]]
    assert not taken(backend_of(linear), rows=tail)
    assert taken(backend_of(own), rows=tail)


def test_a_builder_that_only_adds_to_vllms_is_taken_for_it() -> None:
    adds = type("Adds", (builder_of("linear"),), {"update_block_table": lambda self, *_: None})
    assert not taken(backend_of(adds), rows=[kinds(1)["first prompt"]])


def test_one_group_whose_builder_sees_a_prefill_is_enough() -> None:
    linear, unknown = backend_of(builder_of("linear")), backend_of(type("Unknown", (), {}))
    rows = [kinds(1)["first prompt"]]
    assert not taken(linear, linear, rows=rows)
    assert taken(linear, unknown, rows=rows)
    assert taken(unknown, linear, rows=rows)
