"""The detector `traced` on vLLM's own compiled models, traced by Dynamo on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from defects import affected
from vllm import forward_context
from vllm.compilation import wrapper
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode, CUDAGraphMode

from vllm_graphfix.engine.traced import TracedCheck

WIDTH = 4
PARTS = ("parts", "dict(a: a tensor)", "dict(a: a tensor, b: None)")


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> TracedCheck:
    kind = wrapper.TorchCompileWithNoGuardsWrapper
    monkeypatch.setattr(kind, "__init__", kind.__init__)  # to have the wrapper of each test removed
    one = TracedCheck()
    one.begin(is_on=True)
    one.watch(wrapper)
    return one


def config(mode: CompilationMode = CompilationMode.DYNAMO_TRACE_ONCE, backend: str = "eager") -> VllmConfig:
    compilation = CompilationConfig(mode=mode, backend=backend, cudagraph_mode=CUDAGraphMode.NONE)
    return VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=compilation)


def findings(check: TracedCheck) -> list[tuple[str, str, str]]:
    assert check.counts().get("traced", {}).get("failures", 0) == 0
    return [(each.argument, each.traced, each.now) for each in check.findings()]


# -- known defects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fix", "argument", "compared"),
    [
        # Up to 0.20.1 a padded step with an image ends in an error.
        ("deepstack-features", "deepstack_input_embeds", 4),
        ("image-embeddings", "inputs_embeds", 3),
    ],
)
@pytest.mark.parametrize("trigger", [True, False])
def test_what_compiled_code_leaves_out_of_images_is_seen(
    check: TracedCheck, fix: str, argument: str, compared: int, trigger: bool
) -> None:
    try:
        import_module(f"vllm_graphfix.verify.double.scenarios.{fix.replace('-', '_')}").run(trigger=trigger)
    except Exception as error:  # as releases without the code fail
        pytest.skip(f"the scenario does not run here: {error}")
    lost = trigger and affected(fix)
    assert {each[:2] for each in findings(check)} == ({(argument, "None")} if lost else set())
    assert bool(check.counts()["traced"]["differing"]) == lost
    assert check.counts()["traced"]["compared"] >= compared


# -- the rules ---------------------------------------------------------------------------------------------------------


def compiled(**shared: Any) -> Any:
    @support_torch_compile(dynamic_arg_dims={"states": 0, "added": 0})
    class Model(torch.nn.Module):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__()

        def forward(
            self, states: torch.Tensor, added: Any = None, scale: int = 1, unread: Any = None, parts: Any = None
        ) -> torch.Tensor:
            if added is not None:
                states = states + added
            if parts is not None:
                states = states + parts["a"]
            return states * scale

    with set_current_vllm_config(config(**shared)):
        return Model(vllm_config=config(**shared))


ONES = torch.ones(3, WIDTH)


@pytest.mark.parametrize(
    ("traced", "later", "wanted"),
    [
        ({}, {}, []),
        ({}, {"added": None, "scale": 1}, []),
        ({}, {"added": ONES}, [("added", "None", "a tensor")]),
        ({"added": ONES}, {}, [("added", "a tensor", "None")]),
        ({"added": ONES}, {"added": ONES}, []),
        ({}, {"scale": 2}, [("scale", "1", "2")]),
        ({"scale": 2}, {}, [("scale", "2", "1")]),
        ({}, {"unread": 3}, []),
        ({"unread": ONES}, {}, []),
        ({"parts": {"a": ONES}}, {"parts": {"a": ONES}}, []),
        ({"parts": {"a": ONES}}, {"parts": {"a": ONES, "b": None}}, [PARTS]),
    ],
)
def test_arguments_that_the_traced_code_has_read_are_compared(
    check: TracedCheck, traced: dict[str, Any], later: dict[str, Any], wanted: list[Any]
) -> None:
    model = compiled()
    model(ONES, **traced)
    with contextlib.suppress(AttributeError, TypeError):  # stock code that gets None where it has a tensor
        model(ONES, **later)
    assert findings(check) == wanted


def test_a_model_that_is_not_compiled_and_a_call_that_skips_the_code_are_not_compared(check: TracedCheck) -> None:
    for mode in (CompilationMode.NONE, CompilationMode.STOCK_TORCH_COMPILE):
        eager = compiled(mode=mode)
        eager(ONES)
        eager(ONES, ONES)
    assert check.counts() == {}
    model = compiled()
    model(ONES)
    with mock.patch.object(forward_context, "_forward_context", SimpleNamespace(skip_compiled=True)):
        assert not vllm_has_skip() or torch.equal(model(ONES, ONES), ONES + ONES)
    assert (findings(check), check.counts()["traced"]["compared"]) == ([], 0)


def vllm_has_skip() -> bool:
    """Tell if this release can skip compiled code; 0.14.1 cannot."""
    return any(field.name == "skip_compiled" for field in dataclasses.fields(forward_context.ForwardContext))


def test_each_model_has_a_trace_of_its_own_and_a_new_one_when_it_is_compiled_anew(check: TracedCheck) -> None:
    one, other = compiled(), compiled()
    one(ONES)
    other(ONES, ONES)
    for _ in range(2):
        one(ONES)
        other(ONES, ONES)
    assert findings(check) == []
    with set_current_vllm_config(config()):
        wrapper.TorchCompileWithNoGuardsWrapper.__init__(one)  # as when elastic expert parallelism adds ranks
    assert torch.equal(one(ONES, ONES), ONES + ONES)
    one(ONES, ONES)
    assert findings(check) == []


def test_a_model_inside_of_a_compiled_one_is_traced_as_on_stock(check: TracedCheck) -> None:
    inner = compiled()
    inner(ONES)
    outer = torch.compile(lambda states: inner(states, ONES) + 1, fullgraph=True, backend="eager")
    assert torch.equal(outer(ONES), ONES + ONES + 1)
    assert findings(check) == []


def test_vllms_own_options_are_as_on_stock_once_a_model_is_made(check: TracedCheck) -> None:
    """vLLM hashes them, and refuses functions among them."""
    model = compiled(backend="inductor")
    assert "guard_filter_fn" not in model.vllm_config.compilation_config.inductor_compile_config
    assert findings(check) == []


def test_switched_off_it_does_nothing_more(check: TracedCheck) -> None:
    model = compiled()
    model(ONES)
    check.begin(is_on=False)
    model(ONES, ONES)
    compiled()(ONES)
    assert (check.counts(), check.findings()) == ({}, ())
