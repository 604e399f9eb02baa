"""The graphs that vLLM's metadata builders claim to support, and what they make of the batches of such graphs.

Every builder of `vllm.v1.attention.backends` is made by its own constructor, and builds the metadata of a capture of
two rows, and of a step with other lengths in the same buffers. Stand-ins: the configuration, of which what nobody sets
is None; groups of ranks; FlashInfer and other libraries of kernels, and Triton's kernels, which compute nothing. Memory
of devices is the CPU's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import vllm
import vllm.v1.kv_cache_interface as caches
from vllm import platforms
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.config import vllm as configured
from vllm.distributed import parallel_state
from vllm.v1.attention import backends
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

from vllm_graphfix.verify.double.arguments import supported_kwargs
from vllm_graphfix.verify.double.flashmla import plan_blocks

TABLE = Path(__file__).parents[1] / "claims.json"
CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn.attn"
ROWS, DRAFTS, LENGTHS = 2, 3, (37, 21)
BLOCK, LONGEST, CAPTURED = 64, 256, 16
NOT_HERE = ("aiter", "b12x", "deep_gemm", "flashinfer", "hpc")
"""Libraries of kernels that nothing but stand-ins can be imported of."""

READ = (
    "CPUAttention",
    "DeepseekV41RocmMxfp4Indexer",
    "DeepseekV41SparseIndexer",
    "FlashInferMLASparseSM90Builder",
    "ROCMAiterMLASparse",
    "RocmMxfp4Indexer",
)
"""Builders that such stand-ins do not do for: they are read, and not run."""


class Case(NamedTuple):
    """A deployment, and the batches of one of its graphs."""

    drafts: int = 0
    ranks: int = 1
    """Ranks that share the context of a request."""
    causal: bool = True
    blackwell: bool = False


CASES = {
    "one token": Case(),
    "drafts": Case(DRAFTS),
    "drafts, context parallel": Case(DRAFTS, ranks=2),
    "drafts, not causal": Case(DRAFTS, causal=False),
}
ON_BLACKWELL = {f"{name}, Blackwell": case._replace(blackwell=True) for name, case in CASES.items()}
"""For FlashInfer's builder, which has TRT-LLM's kernels there."""


# -- stand-ins


class Part(SimpleNamespace):
    """A part of a configuration: what nobody sets is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of libraries that are not here: their functions and classes do nothing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] in NOT_HERE or name.startswith("vllm.vllm_flash_attn"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update(__path__=[], __version__="0.0", __getattr__=_kernel)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are made when they are read."""


def _kernel(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "get_mla_metadata_info_v1":  # sizes and types of buffers
        return lambda *_, **__: [((8,), torch.int32)] * 6
    return type(name, (_Wrapper,), {}) if name[0].isupper() else mock.MagicMock(name=name)


class _Wrapper:
    """A class of such a library: what is done with its objects does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        self._kernels = mock.MagicMock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._kernels, name)


def _on_the_cpu(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, device: object = None, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made


class _StreamStandIn:
    def __init__(self, *_: object, **__: object) -> None:
        """On no device."""


@contextlib.contextmanager
def no_device(case: Case) -> Iterator[None]:
    """Let builders be made and build on the CPU within the block, as on the GPU of *case*."""
    generation = 10 if case.blackwell else 9
    device = SimpleNamespace(
        multi_processor_count=4, name="stand-in", total_memory=1 << 34, major=generation, minor=0, warp_size=32,
        gcnArchName="gfx942",
    )  # fmt: skip
    of_platform = {
        "num_compute_units": lambda *_: 4,
        "is_device_capability": lambda number, *_: number in (generation, generation * 10),
        "is_device_capability_family": lambda number, *_: number == generation * 10,
        "has_device_capability": lambda number, *_: number in (generation, generation * 10),
    }
    ranks = SimpleNamespace(world_size=case.ranks, rank_in_group=0, rank=0)
    alone = SimpleNamespace(world_size=1, rank_in_group=0, rank=0)
    with contextlib.ExitStack() as stack:

        def patch(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value, create=True))

        for name in ("zeros", "empty", "ones", "full", "arange", "tensor", "empty_like", "zeros_like", "full_like"):
            patch(torch, name, _on_the_cpu(getattr(torch, name)))
        patch(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
        patch(torch.cuda, "get_device_properties", lambda *_, **__: device)
        patch(torch.cuda, "get_device_capability", lambda *_, **__: (generation, 0))
        patch(torch.cuda, "Stream", _StreamStandIn)
        patch(torch.cuda, "Event", mock.MagicMock)
        for name, value in of_platform.items():
            patch(platforms.current_platform, name, value)
        for name in ("_DCP", "_TP", "_PCP", "_PP"):
            patch(parallel_state, name, ranks if name in ("_DCP", "_TP") else alone)
        yield


def _config(case: Case) -> Any:
    compilation = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=[1, 2, 4, 8, CAPTURED]
    )
    compilation.max_cudagraph_capture_size = CAPTURED
    compilation.static_forward_context = {LAYER: _layer(case)}
    text = Part(
        architectures=["StandIn"], model_type="stand-in", num_attention_heads=4, num_hidden_layers=1, index_topk=8,
        index_n_heads=4, index_head_dim=8, q_lora_rank=8, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, sliding_window=8, head_dim=576, compress_ratios=[],
    )  # fmt: skip
    model = Part(
        max_model_len=LONGEST, dtype=torch.bfloat16, hf_config=text, hf_text_config=text, use_mla=True,
        get_head_size=lambda: 576, get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 1,
        get_total_num_kv_heads=lambda: 1, get_sliding_window=lambda: None, get_mamba_chunk_size=lambda: 8,
        get_vocab_size=lambda: 8, get_num_layers=lambda _: 1, model_arch_config=Part(total_num_attention_heads=4),
    )  # fmt: skip
    speculative = Part(
        num_speculative_tokens=case.drafts, method="eagle" if case.causal else "dflash", draft_model_config=model,
        use_eagle=lambda: True, use_eagle_block_drop=lambda: True, uses_draft_model=lambda: False,
        use_dflash=lambda: not case.causal, uses_dynamic_speculative_decoding=lambda: False,
        speculative_token_tree=str([(0,) * (level + 1) for level in range(case.drafts)]), use_ngram_gpu=lambda: False,
        use_dspark=lambda: False,
    )  # fmt: skip
    return Part(
        compilation_config=compilation,
        model_config=model,
        speculative_config=speculative if case.drafts else None,
        num_speculative_tokens=case.drafts,
        parallel_config=Part(
            decode_context_parallel_size=case.ranks, tensor_parallel_size=case.ranks, prefill_context_parallel_size=1,
            pipeline_parallel_size=1, data_parallel_size=1, cp_kv_cache_interleave_size=1,
            dcp_kv_cache_interleave_size=1, dcp_comm_backend="ag_rs", num_ubatches=1,
        ),
        scheduler_config=Part(max_num_seqs=4, max_num_batched_tokens=64, max_num_partial_prefills=1),
        cache_config=Part(
            cache_dtype="auto", block_size=BLOCK, mamba_block_size=LONGEST, mamba_cache_mode="none", num_gpu_blocks=64,
            mamba_cache_dtype="auto", get_resolved_kv_cache_layout=_layout,
        ),
        attention_config=Part(
            flash_attn_max_num_splits_for_cuda_graph=8, tq_max_kv_splits_for_cuda_graph=8,
            sparse_mla_prefill_workspace_factor=1, disable_flashinfer_prefill=True, use_non_causal=not case.causal,
            resolve_indexer_kv_dtype=lambda default: default,
        ),
        kernel_config=Part(),
        device_config=Part(device=CPU, device_type="cpu"),
        mamba_config=Part(),
        additional_config={},
        observability_config=Part(),
    )  # fmt: skip


def _layout() -> Any:
    return next(iter(caches.KVCacheLayout))


def _layer(case: Case) -> Any:
    implementation = Part(
        sliding_window=(-1, -1), num_heads=4, head_size=64, scale=1.0, vllm_flash_attn_version=3,
        dcp_world_size=case.ranks,
    )  # fmt: skip
    dcp = getattr(sys.modules.get("vllm.model_executor.layers.attention.mla_attention"), "MLADCPManager", None)
    widths = {"q_lora_rank": 8, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    return Part(
        impl=implementation, num_heads=4, num_kv_heads=1, head_size=64, qk_head_dim=64, v_head_dim=128, **widths,
        prefill_backend=mock.MagicMock(), dcp_manager=mock.MagicMock(spec=dcp) if dcp else None,
    )  # fmt: skip


def _spec(builder: type, case: Case) -> Any:
    """Return the cache of the layers that *builder* is for."""
    if re.search("mamba|gdn|linear_attn|short_conv", builder.__module__):
        states = {"num_speculative_blocks": case.drafts}
        return caches.MambaSpec(
            block_size=LONGEST,
            shapes=((2,), (2,)),
            dtypes=(torch.float32,) * 2,
            **supported_kwargs(caches.MambaSpec, states),
        )
    mla = "MLA" in builder.__name__ or ".mla" in builder.__module__
    kind = caches.MLAAttentionSpec if mla else caches.FullAttentionSpec
    size = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 576 if mla else 64, "dtype": torch.bfloat16}
    return kind(**size)


# -- one builder


class Buffers:
    """The model runner's buffers, which keep their addresses from the capture on."""

    def __init__(self, case: Case, width: int) -> None:
        self.case, self.tokens = case, case.drafts + 1
        self.starts = torch.arange(ROWS + 1, dtype=torch.int32) * self.tokens
        self.starts_cpu = self.starts.clone()
        self.lengths, self.local = (torch.zeros(ROWS, dtype=torch.int32) for _ in range(2))
        self.tables = torch.arange(1, 1 + ROWS * width, dtype=torch.int32).view(ROWS, width)
        self.slots, self.positions = (torch.arange(ROWS * self.tokens) for _ in range(2))

    def captured(self) -> Any:
        """Write the batch of a capture."""
        return self.batch([self.tokens] * ROWS, LONGEST)

    def batch(self, lengths: Sequence[int], longest: int) -> Any:
        """Write a batch into the buffers: decodes of drafts and one token more."""
        self.lengths.copy_(torch.tensor(lengths))
        self.local.copy_(self.lengths // self.case.ranks)
        self.positions.copy_(torch.cat([torch.arange(length - self.tokens, length) for length in lengths]))
        on_the_host = self.lengths.clone()
        values = {
            "query_start_loc": self.starts,
            "query_start_loc_cpu": self.starts_cpu,
            "seq_lens": self.lengths,
            "num_reqs": ROWS,
            "num_actual_tokens": ROWS * self.tokens,
            "max_query_len": self.tokens,
            "max_seq_len": longest,
            "block_table_tensor": self.tables,
            "slot_mapping": self.slots,
            "causal": self.case.causal,
            "positions": self.positions,
            "is_prefilling": torch.zeros(ROWS, dtype=torch.bool),
            "seq_lens_cpu_upper_bound": on_the_host,
            "_seq_lens_cpu": on_the_host.clone(),
            "_num_computed_tokens_cpu": on_the_host - self.tokens,
        }
        if self.case.ranks > 1:
            names = ("dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound")
            values |= {"dcp_local_seq_lens": self.local} | {name: self.local.clone() for name in names}
        return CommonAttentionMetadata(**supported_kwargs(CommonAttentionMetadata, values))


def values_of(metadata: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of *metadata* by their paths."""
    if metadata is None or isinstance(metadata, (torch.Tensor, int, float)):
        yield path, metadata
    elif depth < 6:
        parts: Mapping[Any, Any] = {}
        if isinstance(metadata, dict):
            parts = metadata
        elif isinstance(metadata, (list, tuple)):
            parts = dict(enumerate(metadata))
        elif dataclasses.is_dataclass(metadata):
            names = (field.name for field in dataclasses.fields(metadata))
            parts = {name: getattr(metadata, name) for name in names if hasattr(metadata, name)}
        for name, part in parts.items():
            yield from values_of(part, f"{path}.{name}" if path else str(name), depth + 1)


def _split(values: Mapping[str, Any]) -> str:
    """Say if a uniform batch of decodes is taken for decodes; "alike" if the builder makes no difference."""
    counts = {name: int(values[name]) for name in SPLIT if isinstance(values.get(name), (int, torch.Tensor))}
    if counts.get("num_prefills") or counts.get("num_extends") or counts.get("is_prefill"):
        return "prompts"
    decodes = counts.get("num_decodes", 0) + counts.get("num_spec_decodes", 0)
    if "num_decodes" in counts:
        return "decodes" if decodes else "prompts"
    return "alike"


SPLIT = ("num_decodes", "num_spec_decodes", "num_prefills", "num_extends", "is_prefill")


class Truth(NamedTuple):
    """A builder's claim, and what it does with the batches of a graph."""

    claim: str
    rows: str
    """"decodes", "prompts", "alike", and the error that ends the capture."""
    elsewhere: tuple[str, ...] = ()
    """Tensors of the step that lie elsewhere than those of the capture."""
    other: tuple[str, ...] = ()
    """Numbers of the host that differ from those of the capture, which kernels may have been launched with."""

    def __str__(self) -> str:
        parts = [f"{self.claim}: {self.rows}"]
        parts += [f"elsewhere {', '.join(self.elsewhere)}"] if self.elsewhere else []
        parts += [f"other {', '.join(self.other)}"] if self.other else []
        return "; ".join(parts)


def _shares_the_context(backend: Any) -> bool:
    """Tell if an engine whose ranks share the context starts with this backend's layers: they return log-sums."""
    try:
        implementation = backend.get_impl_cls()
    except NotImplementedError:  # recurrent layers, which are not looked at
        return True
    return bool(getattr(implementation, "can_return_lse_for_decode", False))


@contextlib.contextmanager
def prepared(builder: Any, case: Case) -> Iterator[tuple[Any, Buffers]]:
    """Give a builder of that class, and buffers for its batches, within the block."""
    config, spec, functions = _config(case), _spec(builder, case), _of_module(case)
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_device(case))
        stack.enter_context(mock.patch.object(configured, "_current_vllm_config", config))
        for module in [module for name, module in sys.modules.items() if name.startswith("vllm.v1.attention")]:
            for name in vars(module).keys() & functions:
                stack.enter_context(mock.patch.object(module, name, functions[name]))
        # Blocks of a request: of states, one for each draft, too.
        width = 1 + case.drafts if isinstance(spec, caches.MambaSpec) else LONGEST // BLOCK // case.ranks
        needs_width = getattr(builder, "requires_block_table_width", False)
        made = builder(spec, [LAYER], config, CPU, **({"block_table_width": width} if needs_width else {}))
        yield made, Buffers(case, width)


def truth_of(of_builder: Sequence[Any], case: Case) -> Truth:
    """Return the truth of the builder of these backends."""
    builder = of_builder[0].get_builder_cls()
    with prepared(builder, case) as (made, buffers):
        claim = builder.get_cudagraph_support(made.vllm_config, made.kv_cache_spec).name
        if case.ranks > 1 and not any(map(_shares_the_context, of_builder)):
            return Truth(claim, "refused, without graphs too")
        refusal = ""
        try:
            capture = made.build_for_cudagraph_capture(buffers.captured())
        except (AssertionError, NotImplementedError, ValueError) as error:  # as builders refuse a capture: reported
            refusal = f", and the capture ends with {type(error).__name__}"
            try:
                capture = made.build(0, buffers.captured())
            except (AssertionError, NotImplementedError, ValueError):  # it refuses a step, too: in the table
                return Truth(claim, "refused, without graphs too")
        before = dict(values_of(capture))
        step = dict(values_of(made.build(0, buffers.batch(LENGTHS, max(LENGTHS)), **_of_drafts(made, case))))
    tensors = [name for name in before if isinstance(before[name], torch.Tensor)]
    elsewhere = [name for name in tensors if _address(before[name]) != _address(step.get(name))]
    other = [name for name in before if name not in tensors and before[name] != step.get(name)]
    rows = {_split(before), _split(step)}
    return Truth(claim, " or ".join(sorted(rows)) + refusal, _fields(elsewhere), _fields(other))


def _fields(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({re.sub(r"\.\d+(?=\.)", "", path) for path in paths} - {"max_seq_len"}))


def _of_module(case: Case) -> dict[str, Any]:
    """Return functions that a builder's module may have imported, by name."""
    alike = {"window_left": -1, "logits_soft_cap": None, "sm_scale": 1.0, "has_sinks": False}
    alike |= {"has_same_window_lefts": True, "has_same_all_params": True}
    # Later releases ask other operators for it, which have stand-ins.
    plan = {"get_mla_metadata": lambda lengths, *_, **__: plan_blocks(lengths, BLOCK)}
    plans = plan if vllm.__version__.startswith("0.14.") else {}
    return plans | {
        "fast_plan_decode": lambda *_, **__: None,
        "get_per_layer_parameters": lambda *_, **__: {LAYER: SimpleNamespace(**alike)},
        "can_use_trtllm_attention": lambda *_, **__: case.blackwell,
        "supports_trtllm_attention": lambda *_, **__: case.blackwell,
    }


def _address(tensor: Any) -> int | None:
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) and tensor.numel() else None


def _of_drafts(builder: Any, case: Case) -> dict[str, torch.Tensor]:
    parameters = inspect.signature(builder.build).parameters
    if not case.drafts or not {"num_decode_draft_tokens_cpu", "kwargs"} & {*parameters}:
        return {}
    return {
        "num_accepted_tokens": torch.ones(ROWS, dtype=torch.int32),
        "num_decode_draft_tokens_cpu": torch.full((ROWS,), case.drafts, dtype=torch.int32),
    }


# -- all builders


class _Launch:
    """In the place of a Triton kernel: a launch does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


def builders() -> dict[str, list[Any]]:
    """Import all backends, and return them by the names of their builders."""
    if not any(isinstance(each, _Kernels) for each in sys.meta_path):
        sys.meta_path.append(_Kernels())
    # It looks for compiled kernels when it is imported.
    kernels = importlib.machinery.ModuleSpec("vllm.vllm_flash_attn", None)
    sys.modules.setdefault(kernels.name, _Kernels().create_module(kernels))
    for module in pkgutil.walk_packages(backends.__path__, f"{backends.__name__}."):
        with no_device(Case()):
            _import(module.name)
    for name in [name for name in sys.modules if name.startswith("vllm.v1.attention")]:
        for function in [each for each in vars(sys.modules[name]) if each.endswith("_kernel")]:
            setattr(sys.modules[name], function, _Launch())
    if "vllm.utils.flashinfer" in sys.modules:  # it would ask a server for kernels
        vars(sys.modules["vllm.utils.flashinfer"])["has_nvidia_artifactory"] = lambda: False
    helper: Any = sys.modules.get("vllm.model_executor.warmup.jit_warmup_triton_helper")
    if helper is not None and hasattr(helper, "VllmTritonJitKernel"):
        helper.VllmTritonJitKernel.launch = lambda self, spec, inputs: spec[2] if len(spec) == 3 else None
    made: dict[str, list[Any]] = {}
    for backend in sorted(_derived(AttentionBackend), key=lambda each: (each.__module__, each.__name__)):
        with contextlib.suppress(NotImplementedError):  # an abstract base has no builder
            builder = backend.get_builder_cls() if backend.__module__.startswith("vllm.") else None
            if builder is not None:
                name = builder.__name__.removesuffix("MetadataBuilder")
                is_other = name in made and made[name][0].get_builder_cls() is not builder
                made.setdefault(f"{name} ({backend.__name__})" if is_other else name, []).append(backend)
    return dict(sorted(made.items()))


NOT_IMPORTED: dict[str, str] = {}


def _import(name: str) -> None:
    """Import a module; functions of kernels that it looks for in vLLM's modules in vain are stand-ins."""
    for _ in range(9):
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing = re.match(r"cannot import name '(\w+)' from '(vllm[\w.]*)'", str(error))
            if missing is None:
                NOT_IMPORTED[name] = repr(error)
                return
            setattr(sys.modules[missing[2]], missing[1], mock.MagicMock())
        except Exception as error:
            NOT_IMPORTED[name] = repr(error)
            return
        else:
            return


def _derived(backend: Any) -> Iterator[Any]:
    for each in backend.__subclasses__():
        yield each
        yield from _derived(each)


def measured() -> dict[str, dict[str, str]]:
    """Return the truth of every builder in every case, as text."""
    table: dict[str, dict[str, str]] = {}
    for name, of_builder in builders().items():
        cases = CASES | (ON_BLACKWELL if name.startswith("FlashInfer") and "MLA" not in name else {})
        table[name] = {}
        for title, case in cases.items():
            if name in READ:
                table[name][title] = "not run"
                continue
            try:
                table[name][title] = str(truth_of(of_builder, case))
            except Exception as error:
                table[name][title] = f"not run: {type(error).__name__}"
    return table


def test_every_builder_claims_and_does_what_the_table_says() -> None:
    wanted: dict[str, dict[str, dict[str, list[str]]]] = json.loads(TABLE.read_text())
    of_release = {
        name: {
            title: next(text for text, releases in texts.items() if vllm.__version__ in releases)
            for title, texts in cases.items()
        }
        for name, cases in wanted.items()
        if any(vllm.__version__ in releases for texts in cases.values() for releases in texts.values())
    }
    assert measured() == of_release
