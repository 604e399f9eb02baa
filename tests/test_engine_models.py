"""The tiny models: checkpoints that transformers and vLLM's own loader recognise, with weights of sensible scales."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vllm_graphfix.verify.engine import adapters, deepseek_v4, models
from vllm_graphfix.verify.engine.models import MODELS, write
from warm_release import run_in_fork

WHOLE_MODELS = [name for name in MODELS if name not in ("eagle", "mixtral", "qwen3-next", "deepseek-v4")]
"""Models that transformers knows; an Eagle head, which is a draft without embeddings, it does not, nor the names in
DeepSeek V4's own checkpoints. Experts it joins while it loads."""


Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The folder of a model, which is made once for all tests that look at what is in it."""
    return functools.cache(lambda name: write(name, tmp_path_factory.mktemp(name)))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def numbers_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values of each tensor; of a matrix in fp8, multiplied by the scales of its blocks."""
    block = deepseek_v4.BLOCK
    scales = {key.removesuffix("scale") + "weight": scale for key, scale in tensors.items() if key.endswith(".scale")}
    blocks = {key: scale.repeat_interleave(block, 0).repeat_interleave(block, 1) for key, scale in scales.items()}
    values = {key: tensor.float() for key, tensor in tensors.items() if not key.endswith(".scale")}
    return {key: numbers * blocks.get(key, 1.0) for key, numbers in values.items()}


def transformers() -> Any:
    """The library, imported late: every process that collects these tests would take seconds longer."""
    return import_module("transformers")


def shapes_in_transformers(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    rest = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        described = transformers().AutoConfig.for_model(config["model_type"], **rest)
        model = transformers().AutoModelForCausalLM.from_config(described)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.xdist_group("test_engine_models")  # where transformers is imported for others, too
@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_names_and_shapes_are_those_of_transformers_own_implementation(name: str) -> None:
    """A draft layer behind the last one, as checkpoints with multi-token prediction have it, is vLLM's alone."""
    config, shapes = MODELS[name]
    actual = shapes(config)
    behind = (f"model.layers.{config['num_hidden_layers']}.", "model.mtp_layers.")
    theirs = shapes_in_transformers(config)
    if config["tie_word_embeddings"]:
        del theirs["lm_head.weight"]  # the embeddings' own, which no checkpoint names twice
    assert {key: shape for key, shape in actual.items() if not key.startswith(behind)} == theirs
    assert any(key.startswith(behind) for key in actual) == ("num_nextn_predict_layers" in config)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-next"])
def test_transformers_finds_every_weight_of_every_expert(name: str, written: Written) -> None:
    folder = written(name)
    actual = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, lines = actual
    assert not any(lines.values()), lines
    with torch.inference_mode():
        (logits,) = model(torch.arange(5, 37).unsqueeze(0)).logits
    assert len(set(logits.argmax(-1).tolist())) > 24


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_what_was_described(name: str, written: Written) -> None:
    config, shapes = MODELS[name]
    folder = written(name)
    tensors = tensors_of(folder)
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == shapes(config)
    in_fp8 = {key for key in tensors if key.removesuffix("weight") + "scale" in tensors and key.endswith("weight")}
    kinds = {torch.bfloat16} | ({torch.float8_e4m3fn, torch.float32} if in_fp8 else set())
    assert {tensor.dtype for tensor in tensors.values()} == kinds
    assert {key for key, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn} == in_fp8
    assert folder.name == name
    assert json.loads((folder / "config.json").read_text()) == config
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers refuses others"


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_one_and_matrices_preserve_the_scale_of_their_inputs(name: str, written: Written) -> None:
    for key, values in numbers_of(tensors_of(written(name))).items():
        if key.endswith("A_log"):
            assert (values.exp() > 0.4).all()
            assert (values.diff() > 0).all(), "each head forgets at its own pace"
        elif key.endswith("bias"):
            assert (values == 0).all(), key
        elif values.dim() == 1:
            assert (values == deepseek_v4.LOUD.get(key, 1.0)).all(), key
        else:
            # A row of an embedding is looked up, not summed over; but for one that is the output matrix too.
            looked_up = "embed" in key and not MODELS[name][0]["tie_word_embeddings"]
            fan_in = 1 if looked_up else values[0].numel()
            assert values.mean() * fan_in**0.5 == pytest.approx(0.0, abs=0.1), key
            assert values.std() * fan_in**0.5 == pytest.approx(1.0, rel=0.05), key


@pytest.mark.parametrize("name", MODELS)
def test_two_folders_hold_the_same_bytes(name: str, written: Written, tmp_path: Path) -> None:
    """Made in another state of torch's generator, too."""
    one = written(name)
    torch.rand(3)
    other = write(name, tmp_path)
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in other.iterdir()) == ["config.json", "model.safetensors"]
    assert all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


@pytest.mark.parametrize("name", adapters.NAMES)
def test_what_an_adapter_adds_to_a_matrix_is_as_large_as_the_matrix(
    name: str, written: Written, tmp_path: Path
) -> None:
    folder = write(name, tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == 1
    llama, tensors = tensors_of(written("llama")), load_file(folder / "adapter_model.safetensors")
    changed = [key for key in llama if key.split(".")[-2] in config["target_modules"]]
    assert len(changed) == len(adapters.MODULES) * models.LAYERS == len(tensors) / 2
    for key in changed:
        a, b = (tensors[f"base_model.model.{key.removesuffix('weight')}lora_{part}.weight"].float() for part in "AB")
        assert a.shape[0] == adapters.RANK
        assert (b @ a).std() == pytest.approx(llama[key].float().std(), rel=0.2)


def test_each_sum_of_an_adapter_has_one_input(tmp_path: Path) -> None:
    """Then the order in which kernels add up parts of the inputs makes no difference."""
    tensors = load_file(write(adapters.ONE, tmp_path) / "adapter_model.safetensors")
    inner = [tensor for key, tensor in tensors.items() if "lora_A" in key]
    assert all((tensor != 0).sum(1).tolist() == [1] * adapters.RANK for tensor in inner)
    assert all((tensor != 0).sum(0).max() == 1 for tensor in inner)


def test_two_adapters_have_nothing_in_common(tmp_path: Path) -> None:
    one, two = (load_file(write(name, tmp_path) / "adapter_model.safetensors") for name in adapters.NAMES)
    assert one.keys() == two.keys()
    assert not any(torch.equal(one[key], two[key]) for key in one)


def test_no_two_matrices_are_the_same(written: Written) -> None:
    """Layers that are alike would hide which of them is read."""
    matrices = [tensor for tensor in tensors_of(written("llama")).values() if tensor.dim() > 1]
    rows = {tuple(tensor.flatten()[:64].tolist()) for tensor in matrices}
    assert len(rows) == len(matrices)


def test_the_global_generator_of_torch_is_not_used(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    write("eagle", tmp_path)
    assert torch.equal(torch.rand(1), expected)


def test_a_llama_computes_something_else_for_every_token(written: Written) -> None:
    """With weights near zero, as vLLM's own dummies, every output would be the same; with large ones, no number."""
    model = transformers().AutoModelForCausalLM.from_pretrained(written("llama"), dtype=torch.float32)
    with torch.inference_mode():
        (logits,) = model(torch.arange(5, 37).unsqueeze(0)).logits
    assert len(set(logits.argmax(-1).tolist())) > 24
    assert 0.5 < logits.std() < 2.0


LOADS_INTO_VLLM = """
    import os
    from pathlib import Path

    import torch
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    torch.cpu._is_amx_tile_supported = lambda: False  # a CPU that has it would be asked for those kernels, too


    class PlatformStandIn(CpuPlatform):
        # A CPU without vLLM's kernels, which serves every model.
        @classmethod
        def get_attn_backend_cls(cls, *args, **kwargs):
            return "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"

        @classmethod
        def get_punica_wrapper(cls):
            return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"

        @classmethod
        def import_kernels(cls):
            pass

        @classmethod
        def check_and_update_config(cls, config):
            pass


    class AttentionStandIn(torch.nn.Module):
        # Of MLA, whose kernels want a GPU; no weights are its own.
        def __init__(self, *args, **kwargs):
            super().__init__()


    vllm.platforms._current_platform = PlatformStandIn()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import mla, utils
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models import registry
    from vllm_graphfix.fixes import FIXES
    from vllm_graphfix.verify.engine import adapters, deepseek_v4, models
    from vllm_graphfix.verify.engine.cases import GDN_MTP
    from vllm_graphfix.verify.trial import further_cases, trial_of

    mla.MLAAttention = AttentionStandIn
    torch.accelerator.empty_cache = lambda: None
    utils.dispatch_cpu_unquantized_gemm = lambda *layer, **how: None  # 0.16.0's fails at the weights of a convolution
    registry._run_in_subprocess = lambda look: look()  # vLLM looks at each model in a process of its own, for ten seconds
    torch.set_default_dtype(torch.bfloat16)
    folder = Path.cwd()
    for name in {names!r}:
        cases = [GDN_MTP, *(case for fix in FIXES for case in (trial_of(fix.name).case, *further_cases(fix.name)))]
        case = next(case for case in cases if case is not None and case.name == name)
        for made in case.models:
            models.write(made, folder)
        arguments = case.jobs(folder)[0].arguments
        del arguments["worker_extension_cls"]
        config = EngineArgs(**arguments).create_engine_config()
        if "layer_types" in (given := models.MODELS[case.model][0]):
            config.model_config.hf_config.layer_types = given["layer_types"]  # newer transformers say it in other words
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{{folder}}/rendezvous", 0, "gloo")
                initialize_model_parallel()
            model = get_model(vllm_config=config)
            print("loaded", name, type(model).__name__)
            if config.lora_config is not None:
                from vllm.lora.punica_wrapper import punica_selector
                punica_selector.current_platform = vllm.platforms._current_platform  # it may have been imported before
                from vllm.lora.request import LoRARequest
                from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
                torch.Tensor.pin_memory = lambda tensor: tensor
                runner = LoRAModelRunnerMixin()
                runner.load_lora_model(model, config, torch.device("cpu"))
                for number, adapter in enumerate(adapters.NAMES, 1):
                    runner.add_lora(LoRARequest(adapter, number, str(folder / adapter)))
                    found = runner.lora_manager._adapter_manager.get_adapter(number).loras
                    print("loaded", name, adapter, len(found))
            if config.speculative_config is not None:
                draft = config.speculative_config.draft_model_config
                print("loaded", name, type(get_model(vllm_config=config, model_config=draft)).__name__)
            layers = config.compilation_config.static_forward_context
            if name == "granite-all-mode":
                from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
                specs = {{layer: found.get_kv_cache_spec(config) for layer, found in layers.items()}}
                for group in get_kv_cache_configs(config, [specs], [1 << 30])[0].kv_cache_groups:
                    print("group", type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size, *group.layer_names)
                print("group", config.cache_config.mamba_cache_mode)
"""  # noqa: E501

# In each layer, of the matrices as vLLM joins them: queries, keys and values; the output; gate and up.
WITH_ADAPTERS = [
    "llama-lora LlamaForCausalLM",
    *(f"llama-lora {adapter} {3 * models.LAYERS}" for adapter in adapters.NAMES),
]
LOADED = [
    ("0.16.0", ["granite-all-mode GraniteMoeHybridForCausalLM", *WITH_ADAPTERS]),
    (
        "0.21.0",
        [
            "mla DeepseekV2ForCausalLM",
            "mla-mtp DeepseekV3ForCausalLM",
            "mla-mtp DeepSeekMTP",
            "sparse-mtp DeepseekV3ForCausalLM",
            "sparse-mtp DeepSeekMTP",
            "mamba2 Mamba2ForCausalLM",
            "llama-eagle LlamaForCausalLM",
            "llama-eagle EagleLlamaForCausalLM",
            "mixtral MixtralForCausalLM",
            "llama-eagle-scored LlamaForCausalLM",
            "llama-eagle-scored EagleLlamaForCausalLM",
        ],
    ),
    # The first one decides whether there is a group of experts.
    ("0.17.1", ["mixtral MixtralForCausalLM", "llama-eagle LlamaForCausalLM", "llama-eagle EagleLlamaForCausalLM"]),
    (
        "0.25.1",
        [
            "mixtral MixtralForCausalLM",
            *WITH_ADAPTERS,
            "lfm2-one-token Lfm2ForCausalLM",
            "gdn-mtp Qwen3NextForCausalLM",
            "gdn-mtp Qwen3NextMTP",
        ],
    ),
    ("0.33.0", WITH_ADAPTERS),
]


GROUPS = [
    "MambaSpec 128 model.layers.0.mixer",
    "MambaSpec 128 model.layers.2.mixer",
    "FullAttentionSpec 128 model.layers.1.self_attn.attn",
    "all",
]


@pytest.mark.parametrize(("release", "loaded"), LOADED, ids=[release for release, _ in LOADED])
def test_vllms_loader_finds_every_weight_of_every_model_and_draft(release: str, loaded: list[str]) -> None:
    """It raises for a parameter that the checkpoint does not name. Attention and platform are stand-ins."""
    names = list(dict.fromkeys(line.split()[0] for line in loaded))
    done = run_in_fork(release, LOADS_INTO_VLLM.format(names=names))
    lines = [line.removeprefix("loaded ") for line in done.stdout.splitlines() if line.startswith("loaded ")]
    assert lines == loaded
    groups = [line.removeprefix("group ") for line in done.stdout.splitlines() if line.startswith("group ")]
    # The defect is in the second group of Mamba-2 layers, and shows in requests of more than one block.
    assert groups == (GROUPS if "granite-all-mode" in names else [])


@pytest.mark.xdist_group("0.21.0")
def test_a_checkpoint_without_one_of_the_weights_is_refused_by_vllm() -> None:
    """So that the test before can fail."""
    name = f"model.layers.{models.LAYERS}.enorm.weight"
    code = LOADS_INTO_VLLM.replace(
        "    folder = Path.cwd()\n",
        "    folder = Path.cwd()\n"
        f"    values, config, shapes = models.values_of, *models.MODELS['mla-mtp']\n"
        f"    models.MODELS['mla-mtp'] = (config, lambda c: {{{{k: v for k, v in shapes(c).items() if k != "
        f"{name!r}}}}})\n",
    )
    done = run_in_fork("0.21.0", code.format(names=["mla-mtp"]), check=False)
    assert done.returncode != 0
    assert name.removeprefix("model.") in done.stdout
    assert "not initialized from checkpoint" in done.stdout


def test_a_matrix_in_fp8_is_the_matrix_up_to_fp8s_own_rounding() -> None:
    """Also one whose blocks are of different sizes, and with scales that are powers of two."""
    random = torch.Generator().manual_seed(1)
    matrix = torch.randn(256, 384, generator=random) * torch.tensor([1e-3, 1.0, 40.0]).repeat_interleave(128)
    tensors = models.in_blocks("m", matrix, (2, 3))
    actual = numbers_of(tensors)["m.weight"]
    assert ((actual - matrix).abs() <= 2**-4 * matrix.abs() + 2**-9 * tensors["m.scale"].max()).all()
    assert (tensors["m.scale"].frexp().mantissa == 0.5).all()
    assert 200 < tensors["m.weight"].float().abs().max() <= 448
