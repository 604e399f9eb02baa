"""What is known of a deployment.

The GPU and the environment of this machine, who runs which model runner, and other facts that fixes use.
"""

from __future__ import annotations

import pytest

from served_models import AMPERE, EAGLE, HOPPER, answer
from stock import release_root
from vllm_graphfix.deployment import Concern, Deployment, hardware, read_deployment
from vllm_graphfix.source.files import open_source

pytestmark = pytest.mark.usefixtures("among_models")
YES, NO, MAYBE = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN


def test_the_gpu_is_this_machines_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, concern in (((HOPPER, HOPPER), YES), ((AMPERE,), NO), ((AMPERE, HOPPER), MAYBE)):
        monkeypatch.setattr(hardware, "gpus", lambda gpus=gpus: gpus)
        found, reason = answer("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8")
        assert found is concern, reason
    assert answer("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8", HOPPER)[0] is YES


def test_variables_are_those_of_this_process_under_those_of_the_line() -> None:
    source = open_source(release_root("0.18.1"))
    here = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert read_deployment("x", source, environment=here).runner("V2").holds
    assert not read_deployment("VLLM_USE_V2_MODEL_RUNNER=0 x", source, environment=here).runner("V2").holds


RUNNERS = [
    ("0.14.1", "./qwen3", "V1"),
    ("0.21.0", "./qwen3", "V1"),
    ("0.22.1", "./llama", "V1"),
    ("0.22.1", "./qwen3", None),
    ("0.24.0", "./mamba2", "V1"),
    ("0.26.0", "./mamba2", "V1"),
    ("0.26.0", "./llama", None),
    ("0.29.0", "./mamba2", None),
    ("0.33.0", "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ./llama", "V1"),
]


@pytest.mark.parametrize(("release", "line", "runner"), RUNNERS)
def test_who_runs_which_model_runner_by_default_is_read_from_the_code(
    release: str, line: str, runner: str | None
) -> None:
    deployment = Deployment(line, {}, open_source(release_root(release)))
    assert {wanted: deployment.runner(wanted).holds for wanted in ("V1", "V2")} == {
        wanted: None if runner is None else wanted == runner for wanted in ("V1", "V2")
    }


FACTS = [
    ("graphs", "./llama", True),
    ("graphs", "./llama --enforce-eager", False),
    ("prompts_in_graphs", "./llama -cc.cudagraph_mode=FULL_DECODE_ONLY", False),
    ("prompts_in_graphs", "./llama", True),
    ("recurrent", "./qwen3-next", True),
    ("recurrent", "./llama", False),
    ("experts", "./llama", False),
    ("experts", "some/model", None),
    ("sparse_mla", "./v32", True),
    ("sparse_mla", "./v3", False),
    ("triton_mla", "./v3 --attention-backend triton_mla", True),
    ("triton_mla", "./v3", None),
    ("triton_mla", "./llama", False),
    ("drafts", "./llama" + EAGLE, True),
    ("drafts", "./llama", False),
    ("drafts", "./llama --spec-method ngram", True),
    ("drafts", './llama -sc \'{"model": "draft"}\'', None),
    ("data_parallel", "./llama -dp 2", True),
    ("data_parallel", "./llama", False),
    ("data_parallel", "./llama -dp many", None),
    ("data_parallel", "./llama --data-parallel-rank 0", None),
]


@pytest.mark.parametrize(("fact", "line", "holds"), FACTS, ids=[f"{fact}: {line}" for fact, line, _ in FACTS])
def test_a_fact_holds_or_does_not_or_is_not_known(fact: str, line: str, holds: bool | None) -> None:
    found = getattr(read_deployment(line, open_source(release_root("0.22.1"))), fact)()
    assert found.holds is holds
    assert found.told
