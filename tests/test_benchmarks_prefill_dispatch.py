"""The benchmark of what prefill-dispatch leaves to stock, as far as it needs no engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarked import GPU
from stock import release_root

# isort: split
import prefill_dispatch_cost
from measuring import tiny_recurrent


def cell(*, repeats: bool = True, patched: bool = True) -> dict[str, Any]:
    return {"eager repeats": repeats, "stock": False, "patched": patched, "taken": 1}


@pytest.mark.parametrize(
    ("tokens", "steps", "expected"),
    [
        ({"a": cell()}, {"b": {"taken": 0, "judged": "within noise"}}, "right"),
        ({"a": cell(patched=False)}, {}, "wrong"),
        ({"a": cell(patched=False, repeats=False)}, {}, "right"),
        ({"a": cell()}, {"b": {"taken": 0, "judged": "not met"}}, "wrong"),
        ({"a": cell()}, {"b": {"taken": 3, "judged": "not met"}}, "right"),
    ],
    ids=["as it should be", "another answer", "no answer to compare with", "a slow step", "a step that lost its graph"],
)
def test_prefill_dispatch_is_judged_by_its_answers_and_by_the_steps_that_it_leaves(
    tokens: dict[str, Any], steps: dict[str, Any], expected: str
) -> None:
    assert prefill_dispatch_cost.verdict(tokens, steps) == expected


def test_the_cost_of_prefill_dispatch_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nothing = GPU.__class__(None, "torch sees no GPU", (0, 0), 0.0, 0.0, "unknown", "0", "none", "0")
    monkeypatch.setattr("vllm_graphfix.verify.engine.device.find", lambda: nothing)
    given = ["--site", f"0.21.0={release_root('0.21.0')}", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["prefill_dispatch_cost.py", *given])
    assert prefill_dispatch_cost.main() == 2
    assert capsys.readouterr().err == "not run: no GPU; --rehearse runs this script on a CPU engine\n"


@pytest.mark.parametrize("name", sorted(tiny_recurrent.MODELS))
def test_a_tiny_recurrent_model_is_a_folder_like_any_checkpoint(name: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    made = tiny_recurrent.write(name, tmp_path)
    config, described = tiny_recurrent.MODELS[name]
    assert json.loads((made / "config.json").read_text()) == config
    with safe_open(str(made / "model.safetensors"), "pt") as tensors:
        found = {each: tuple(tensors.get_slice(each).get_shape()) for each in tensors.keys()}  # noqa: SIM118
    assert found == described(config)


@pytest.mark.parametrize("name", sorted(tiny_recurrent.MODELS))
@pytest.mark.parametrize("release", ["0.18.1", "0.21.0", "0.25.1", "0.33.0"])
def test_releases_know_the_architecture_of_a_tiny_recurrent_model(name: str, release: str) -> None:
    registry = release_root(release) / "vllm" / "model_executor" / "models" / "registry.py"
    (architecture,) = tiny_recurrent.MODELS[name][0]["architectures"]
    known = registry.read_text().partition("_PREVIOUSLY_SUPPORTED_MODELS")[0]  # what follows was dropped
    assert f'"{architecture}": (' in known


def test_every_model_of_the_benchmark_can_be_written() -> None:
    from vllm_graphfix.verify.engine import models

    written = {case.model for case in prefill_dispatch_cost.MODELS.values()}
    assert written <= models.MODELS.keys() | tiny_recurrent.MODELS.keys()
    assert not models.MODELS.keys() & tiny_recurrent.MODELS.keys()
