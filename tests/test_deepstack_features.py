"""deepstack-features: compiled code that a cache holds is run in engines of the same setting alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stock import run_in_release

COMPILED = """
import dataclasses, json
import vllm_graphfix
vllm_graphfix.register()
from vllm_graphfix.verify.double.scenarios import deepstack_features as scenario
import vllm.envs as envs
from vllm.compilation.backends import VllmBackend
from vllm.compilation.counter import compilation_counter
from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode, PassConfig

if {forgets_the_setting}:
    envs.environment_variables["VLLM_GRAPHFIX_DEEPSTACK_FEATURES"] = lambda: None
VllmBackend.configure_post_pass = lambda self: None  # these passes need kernels
off = PassConfig(**{{each.name: False for each in dataclasses.fields(PassConfig) if "bool" in str(each.type)}})
modes = CompilationMode.NONE, CompilationMode.VLLM_COMPILE
eager, compiled = (
    scenario.hidden_states(
        CompilationConfig(
            mode=mode, cudagraph_mode=CUDAGraphMode.NONE, splitting_ops=[], compile_sizes=[], pass_config=off
        )
    )
    for mode in modes
)
print(json.dumps({{
    "wrong": sum(not abs(one - other) < 1e-4 for one, other in zip(eager, compiled, strict=True)),
    "loaded": compilation_counter.num_aot_artifacts_loaded,
    "saved": compilation_counter.num_aot_artifacts_saved,
    "events": vllm_graphfix.events()["deepstack-features"],
}}))
"""


KEYS = """
import json
import vllm_graphfix
vllm_graphfix.register()
import vllm.envs as envs
from vllm.config import DeviceConfig, VllmConfig
from vllm.compilation.caching import aot_compile_hash_factors
from vllm.config.utils import hash_factors

def key():
    assert hash_factors(envs.compile_factors()) == aot_compile_hash_factors(config)[0]
    return [str(each) for each in aot_compile_hash_factors(config)]

config = VllmConfig(device_config=DeviceConfig("cpu"))
before = key()
from vllm_graphfix.verify.double.image_processors import install_image_processor_stand_ins
install_image_processor_stand_ins()
import vllm.model_executor.models.qwen3_vl
imported = key()
vllm_graphfix._this_process().manager.revert("deepstack-features")
print(json.dumps([before, imported, key()]))
"""


@pytest.mark.parametrize(
    ("release", "mode", "changes"),
    [
        pytest.param("0.20.0", "on", True, marks=pytest.mark.slow),
        ("0.22.1", "on", True),
        ("0.22.1", "observe", False),
        pytest.param("0.23.0", "on", False, marks=pytest.mark.slow),
    ],
)
def test_vllms_compile_keys_are_stocks_but_where_the_fix_is_on_a_model(release: str, mode: str, changes: bool) -> None:
    ran = run_in_release(
        release, KEYS, {"VLLM_GRAPHFIX": "on", "VLLM_GRAPHFIX_DEEPSTACK_FEATURES": mode}, libraries_loaded=True
    )
    before, imported, reverted = json.loads(ran.stdout.splitlines()[-1])
    assert before == reverted
    assert (imported[0] != before[0]) == changes
    assert imported[1:] == before[1:]


def compiled(release: str, cache: Path, mode: str, *, forgets_the_setting: bool = False) -> dict[str, Any]:
    """Serve the scenario's steps with Inductor and vLLM's cache of compiled code in *cache*."""
    ran = run_in_release(
        release,
        COMPILED.format(forgets_the_setting=forgets_the_setting),
        {
            "VLLM_GRAPHFIX": "on",
            "VLLM_GRAPHFIX_DEEPSTACK_FEATURES": mode,
            "VLLM_CACHE_ROOT": str(cache),
            "XDG_CACHE_HOME": str(cache),  # in the key, too
            "XDG_CONFIG_HOME": str(cache),
            "VLLM_USE_AOT_COMPILE": "1",
        },
        libraries_loaded=True,
    )
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.20.2", "0.22.1"])
def test_compiled_code_of_stock_is_used_where_it_observes_and_not_where_it_is_active(
    release: str, tmp_path: Path
) -> None:
    stock = compiled(release, tmp_path, "off")
    assert stock["wrong"] == 88
    assert (stock["saved"], stock["loaded"]) == (2, 0)
    observed = compiled(release, tmp_path, "observe")
    assert observed["wrong"] == 88
    assert (observed["saved"], observed["loaded"]) == (0, 2)
    assert observed["events"] == {"image-features-dropped": 4}
    active = compiled(release, tmp_path, "on")
    assert active["wrong"] == 0
    assert (active["saved"], active["loaded"]) == (2, 0)
    assert compiled(release, tmp_path, "off") == stock | {"saved": 0, "loaded": 2}


@pytest.mark.slow
def test_without_the_setting_in_its_key_the_cache_serves_code_of_stock(tmp_path: Path) -> None:
    """The test above would fail."""
    compiled("0.22.1", tmp_path, "off")
    active = compiled("0.22.1", tmp_path, "on", forgets_the_setting=True)
    assert active["wrong"] == 88
    assert active["loaded"] == 2


HANDED_ON = """
import json
from types import SimpleNamespace
from unittest import mock
import torch
import vllm_graphfix
vllm_graphfix.register()
from vllm_graphfix.verify.double.image_processors import install_image_processor_stand_ins
install_image_processor_stand_ins()
import vllm.v1.worker.ubatching as ubatching
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as Model

def served(device, held):
    model = object.__new__(Model)
    torch.nn.Module.__init__(model)
    model.deepstack_num_level, model.deepstack_input_embeds_num_tokens = 1, held
    model.deepstack_input_embeds = [torch.ones(8, 2, device=device)]
    model.config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=2))
    model.language_model = torch.nn.Linear(2, 2)
    model.language_model.model = SimpleNamespace(do_not_compile=True)
    return model

def step(model, tokens):
    handed_on = model._get_deepstack_input_embeds(tokens)
    rows = [each.tolist() for each in handed_on.tensors.values()] if handed_on is not None else None
    model._clear_deepstack_input_embeds(tokens)
    return rows

print(json.dumps({
    "without a tower": step(served("meta", 0), 2),
    "an image": step(served("cpu", 2), 2),
    "micro-batches": [
        [step(model, 2) for _ in range(2)]
        for model in [served("cpu", 4)]
        for _ in [mock.patch.dict(ubatching._THREAD_ID_TO_CONTEXT, {0: 0}).start()]
    ],
}))
"""


@pytest.mark.parametrize("release", ["0.20.0", "0.22.1"])
def test_a_model_without_a_tower_and_micro_batches_hand_zeros_on(release: str) -> None:
    """Buffers that the model made on the meta device would end the engine in its profiling run."""
    ran = run_in_release(release, HANDED_ON, {"VLLM_GRAPHFIX": "on"}, libraries_loaded=True)
    none, ones = [[[0.0, 0.0]] * 2], [[[1.0, 1.0]] * 2]
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "without a tower": none,
        "an image": ones,
        "micro-batches": [[none, none]],
    }
