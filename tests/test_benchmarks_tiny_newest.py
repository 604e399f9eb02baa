"""The tiny models of the newest kinds of attention, as far as they need no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarked  # noqa: F401 - puts the benchmarks on the path

# isort: split
from measuring import tiny_newest
from measuring.shadow_cases import NEWEST, OF_NO_VERIFY, ONLY_WHERE_NAMED
from vllm_graphfix.fixes import BY_NAME


@pytest.mark.parametrize("name", ["minimax-m3", "kimi-k3", "deepseek-v41"])
def test_a_tiny_model_is_a_folder_like_any_checkpoint(name: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    made = tiny_newest.write(name, tmp_path)
    config, described = tiny_newest.MODELS[name]
    assert json.loads((made / "config.json").read_text()) == config
    with safe_open(str(made / "model.safetensors"), "pt") as tensors:
        found = {each: tuple(tensors.get_slice(each).get_shape()) for each in tensors.keys()}  # noqa: SIM118
    assert found == described(config)


def test_each_table_of_n_grams_is_as_long_as_another_prime_number() -> None:
    config, described = tiny_newest.MODELS["qwen4-exp"]
    tables = described(config)["model.layers.0.ple.ple_embedding.ngram_embedding.shard_0.weight"]
    primes = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097)
    assert tables == (-(-sum(primes) // 128) * 128, 512 // 16)


def test_each_model_has_an_engine_that_runs_where_it_is_named() -> None:
    assert {case.model for case in NEWEST} == set(tiny_newest.MODELS)
    assert set(NEWEST) <= set(ONLY_WHERE_NAMED)
    assert set(OF_NO_VERIFY) <= set(BY_NAME)
