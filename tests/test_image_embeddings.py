"""image-embeddings: which dummy batches get embeddings, and whose compiled code a cache holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stock import run_in_release
from vllm_graphfix.fix import Activity
from vllm_graphfix.fixes.image_embeddings import COMPILED_WITHOUT, _with_embeddings

BUFFER = list(range(8))
"""The buffer of embeddings, a number for each token."""


class Model:
    """A model that torch.compile compiles, or not."""

    def __init__(self, *, compiles: bool = True, error: Exception | None = None) -> None:
        self.compiles, self.error = compiles, error
        self.called: list[dict[str, Any]] = []
        self.vocabulary = 32

    def modules(self) -> list[Any]:
        return [self, SimpleNamespace(do_not_compile=not self.compiles)]

    def __call__(self, **kwargs: Any) -> None:
        self.called.append(kwargs)
        if self.error is not None:
            raise self.error


class Runner:
    """Stands in for vLLM's, with what `_dummy_run` does to the model."""

    def __init__(self, model: Model) -> None:
        self.model, self.supports_mm_inputs = model, True
        self.inputs: dict[str, Any] = {"inputs_embeds": None}
        self.encoder_runner = SimpleNamespace(inputs_embeds=BUFFER)
        self.vocabulary = 0

    def _dummy_run(self, num_tokens: int, *, skip_attn: bool = True) -> int:
        self.vocabulary = self.model.vocabulary
        self.model(input_ids=[0] * num_tokens, positions=[0] * num_tokens, **self.inputs)
        return num_tokens


def dummy_run(runner: Runner, activity: Activity, tokens: int = 3) -> Any:
    return _with_embeddings(Runner._dummy_run, activity)(runner, tokens, skip_attn=True)


@pytest.fixture
def activity() -> Activity:
    return Activity((COMPILED_WITHOUT,))


def test_a_dummy_batch_gets_as_many_rows_of_the_buffer_as_it_has_tokens(activity: Activity) -> None:
    model = Model()
    runner = Runner(model)
    assert dummy_run(runner, activity) == 3
    assert model.called == [{"input_ids": [0] * 3, "positions": [0] * 3, "inputs_embeds": [0, 1, 2]}]
    assert (runner.model, runner.vocabulary) == (model, model.vocabulary)
    assert activity.counts == {"compiled-without-embeddings": 1}


def test_a_model_is_counted_once(activity: Activity) -> None:
    runner = Runner(Model())
    wrapped = _with_embeddings(Runner._dummy_run, activity)
    for tokens in (8, 1, 1):  # profiling, then idle steps
        wrapped(runner, tokens)
    assert [len(each["inputs_embeds"]) for each in runner.model.called] == [8, 1, 1]
    assert activity.counts == {"compiled-without-embeddings": 1}


def test_a_model_that_nothing_compiles_is_not_counted(activity: Activity) -> None:
    dummy_run(Runner(Model(compiles=False)), activity)
    assert activity.counts == {"compiled-without-embeddings": 0}


def test_it_observes_without_changing_a_thing() -> None:
    activity = Activity((COMPILED_WITHOUT,), corrects=False)
    model = Model()
    dummy_run(Runner(model), activity)
    assert model.called[0]["inputs_embeds"] is None
    assert activity.counts == {"compiled-without-embeddings": 1}


@pytest.mark.parametrize("inputs", [{"inputs_embeds": [7, 7, 7]}, {"embeds": None}])
def test_a_batch_with_embeddings_or_of_another_kind_is_left_alone(activity: Activity, inputs: dict[str, Any]) -> None:
    runner = Runner(Model())
    runner.inputs = inputs
    dummy_run(runner, activity)
    assert runner.model.called == [{"input_ids": [0] * 3, "positions": [0] * 3, **inputs}]
    assert activity.counts == {"compiled-without-embeddings": 0}


def test_a_runner_of_text_alone_is_left_alone(activity: Activity) -> None:
    runner = Runner(Model())
    runner.supports_mm_inputs = False
    del runner.encoder_runner
    dummy_run(runner, activity)
    assert runner.model.called[0]["inputs_embeds"] is None
    assert (activity.counts, activity.error) == ({"compiled-without-embeddings": 0}, None)


def test_an_error_of_the_model_leaves_the_runner_with_its_model(activity: Activity) -> None:
    model = Model(error=MemoryError())
    runner = Runner(model)
    with pytest.raises(MemoryError):
        dummy_run(runner, activity)
    assert runner.model is model


def test_without_a_buffer_the_batch_is_stocks(activity: Activity) -> None:
    runner = Runner(Model())
    del runner.encoder_runner
    dummy_run(runner, activity)
    assert runner.model.called[0]["inputs_embeds"] is None
    assert activity.error is not None
    assert "encoder_runner" in activity.error


def test_a_model_of_transformers_gets_embeddings_alone(activity: Activity, monkeypatch: pytest.MonkeyPatch) -> None:
    base = "vllm.model_executor.models.transformers.base"
    monkeypatch.setitem(sys.modules, base, SimpleNamespace(Base=Model))
    model = Model()
    dummy_run(Runner(model), activity)
    assert model.called == [{"input_ids": None, "positions": [0] * 3, "inputs_embeds": [0, 1, 2]}]


TRANSFORMERS = """
import json
import vllm_graphfix
vllm_graphfix.register()
import torch
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.multimodal import DYNAMIC_ARG_DIMS
from vllm_graphfix.verify.double.scenarios import image_embeddings as scenario

class Either(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(scenario.VOCABULARY, scenario.WIDTH)

    def forward(self, input_ids=None, inputs_embeds=None, **_):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("either tokens or embeddings")
        return ((self.embed(input_ids) if inputs_embeds is None else inputs_embeds) * 2,)

@support_torch_compile(dynamic_arg_dims=DYNAMIC_ARG_DIMS)
class Model(Base):
    def __init__(self, *, vllm_config, prefix=""):
        torch.nn.Module.__init__(self)
        self.pp_group, self.embed_scale = SimpleNamespace(is_first_rank=True, is_last_rank=True), None
        self.model_config, self.attention_instances = SimpleNamespace(uses_mrope=False), {}
        self._output_aux_hidden_states_kwargs = {}
        self.model = Either()

    def embed_input_ids(self, input_ids, multimodal_embeddings, *, is_multimodal):
        states = self.model.embed(input_ids)
        if multimodal_embeddings:
            states[is_multimodal] = torch.cat(multimodal_embeddings)
        return states

compilation = CompilationConfig(
    mode=CompilationMode.DYNAMO_TRACE_ONCE, backend="eager", cudagraph_mode=CUDAGraphMode.NONE
)
with mock.patch.object(scenario, "_model", lambda config: Model(vllm_config=config)), torch.no_grad():
    states = torch.tensor(scenario.hidden_states(compilation)).view(-1, scenario.WIDTH)
tokens, image = scenario.STEPS[0]
random = torch.Generator().manual_seed(0)
torch.randint(scenario.PLACEHOLDER + 1, scenario.VOCABULARY, (tokens,), generator=random)
wanted = 2 * torch.randn(len(image), scenario.WIDTH, generator=random)
print(json.dumps({
    "right": torch.allclose(states[image.start : image.stop], wanted),
    "state": vllm_graphfix.states()["image-embeddings"].state.value,
}))
"""


@pytest.mark.parametrize(("mode", "state"), [("on", "active"), ("observe", "observing")])
def test_a_compiled_model_of_transformers_sees_images_with_the_fix_alone(mode: str, state: str) -> None:
    """Such a model refuses tokens beside embeddings, which model runner V2 passes to it in each real step."""
    ran = run_in_release(
        "0.16.0",
        TRANSFORMERS,
        {
            "VLLM_GRAPHFIX": "on",
            "VLLM_GRAPHFIX_IMAGE_EMBEDDINGS": mode,
            "VLLM_DISABLE_COMPILE_CACHE": "1",
            "VLLM_USE_AOT_COMPILE": "0",
        },
        libraries_loaded=True,
    )
    assert json.loads(ran.stdout.splitlines()[-1]) == {"right": mode == "on", "state": state}


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
import vllm.v1.worker.gpu_model_runner
v1 = key()
import vllm.v1.worker.gpu.model_runner
v2 = key()
vllm_graphfix._this_process().manager.revert("image-embeddings")
print(json.dumps([before, v1, v2, key()]))
"""


@pytest.mark.parametrize(
    ("release", "mode", "changes"),
    [
        pytest.param("0.15.0", "on", True, marks=pytest.mark.slow),
        pytest.param("0.15.1", "on", True, marks=pytest.mark.slow),
        ("0.16.0", "on", True),
        ("0.16.0", "observe", False),
        pytest.param("0.17.0", "on", False, marks=pytest.mark.slow),
    ],
)
def test_vllms_compile_keys_are_stocks_but_where_the_fix_is_on_model_runner_v2(
    release: str, mode: str, changes: bool
) -> None:
    ran = run_in_release(
        release, KEYS, {"VLLM_GRAPHFIX": "on", "VLLM_GRAPHFIX_IMAGE_EMBEDDINGS": mode}, libraries_loaded=True
    )
    before, v1, v2, reverted = json.loads(ran.stdout.splitlines()[-1])
    assert before == v1 == reverted
    assert (v2[0] != before[0]) == changes
    assert v2[1:] == before[1:]


COMPILED = """
import dataclasses, json
import vllm_graphfix
vllm_graphfix.register()
from vllm_graphfix.verify.double.scenarios import image_embeddings as scenario
import vllm.envs as envs
from vllm.compilation.backends import VllmBackend
from vllm.compilation.counter import compilation_counter
from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode, PassConfig

if {forgets_the_setting}:
    envs.environment_variables["VLLM_GRAPHFIX_IMAGE_EMBEDDINGS"] = lambda: None
VllmBackend.configure_post_pass = lambda self: None  # these passes need kernels
off = PassConfig(**{{each.name: False for each in dataclasses.fields(PassConfig) if "bool" in str(each.type)}})
eager, compiled = (
    scenario.hidden_states(
        CompilationConfig(
            mode=mode, cudagraph_mode=CUDAGraphMode.NONE, splitting_ops=[], compile_sizes=[], pass_config=off
        )
    )
    for mode in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE)
)
print(json.dumps({{
    "wrong": sum(not abs(one - other) < 1e-4 for one, other in zip(eager, compiled, strict=True)),
    "compiles": compilation_counter.num_inductor_compiles,
}}))
"""


def compiled(cache: Path, mode: str, aot: str, *, forgets_the_setting: bool = False) -> dict[str, int]:
    """Serve the scenario's steps on 0.16.0 with Inductor and vLLM's cache of compiled code in *cache*."""
    ran = run_in_release(
        "0.16.0",
        COMPILED.format(forgets_the_setting=forgets_the_setting),
        {
            "VLLM_GRAPHFIX": "on",
            "VLLM_GRAPHFIX_IMAGE_EMBEDDINGS": mode,
            "VLLM_CACHE_ROOT": str(cache),
            "XDG_CACHE_HOME": str(cache),  # in the key, too
            "XDG_CONFIG_HOME": str(cache),
            "VLLM_USE_AOT_COMPILE": aot,
        },
        libraries_loaded=True,
    )
    result: dict[str, int] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("aot", ["0", "1"])
def test_compiled_code_of_stock_is_used_where_it_observes_and_not_where_it_is_active(tmp_path: Path, aot: str) -> None:
    stock, loaded = {"wrong": 36, "compiles": 1}, {"wrong": 36, "compiles": 0}
    assert compiled(tmp_path, "off", aot) == stock
    assert compiled(tmp_path, "observe", aot) == loaded
    assert compiled(tmp_path, "on", aot) == {"wrong": 0, "compiles": 1}
    assert compiled(tmp_path, "on", aot) == {"wrong": 0, "compiles": 0}
    assert compiled(tmp_path, "off", aot) == loaded


@pytest.mark.slow
def test_without_the_setting_in_its_key_the_cache_serves_code_of_stock(tmp_path: Path) -> None:
    """The test above would fail."""
    compiled(tmp_path, "off", "1")
    assert compiled(tmp_path, "on", "1", forgets_the_setting=True) == {"wrong": 36, "compiles": 0}
