"""Facts of a deployment.

The GPU and the environment of this machine, who runs which model runner, and other facts that fixes use.
"""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from edited import stock_source
from served_models import AMPERE, EAGLE, HOPPER, answer
from stock import ALL_RELEASES, release_root
from update_docs import default_runner_of
from vllm_graphfix.commands.status import status
from vllm_graphfix.commands.status_table import show
from vllm_graphfix.deployment import Concern, Deployment, hardware, read_deployment
from vllm_graphfix.deployment.runner import CHOOSERS, SERVED_BY_V2, default_runner
from vllm_graphfix.source.files import open_source, stock_release

pytestmark = pytest.mark.usefixtures("among_models")
YES, NO, MAYBE = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN


def test_the_gpu_is_this_machines_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, concern in (((HOPPER, HOPPER), YES), ((AMPERE,), NO), ((AMPERE, HOPPER), MAYBE)):
        monkeypatch.setattr(hardware, "gpus", lambda gpus=gpus: gpus)
        actual, reason = answer("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8")
        assert actual is concern, reason
    assert answer("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8", HOPPER)[0] is YES


def test_variables_are_those_of_this_process_under_those_of_the_line() -> None:
    source = stock_source(release_root("0.18.1"))
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
    ("0.32.0", "./llama", "V2"),
    ("0.33.0", './mamba2 -dp 2 --speculative-config {"method":"ngram"}', "V2"),
    ("0.33.0", './llama --speculative-config {"model":"./small"}', None),
    ("0.33.0", './llama --speculative-config {"method":"suffix"}', None),
    ("0.33.0", "./llama --enable-dbo", None),
    ("0.33.0", "./llama --config serve.yaml", None),
    ("0.33.0", "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ./llama", "V1"),
]


@pytest.mark.parametrize(("release", "line", "runner"), RUNNERS)
def test_who_runs_which_model_runner_by_default_is_read_from_the_code(
    release: str, line: str, runner: str | None
) -> None:
    deployment = Deployment(line, {}, stock_source(release_root(release)))
    assert {wanted: deployment.runner(wanted).holds for wanted in ("V1", "V2")} == {
        wanted: None if runner is None else wanted == runner for wanted in ("V1", "V2")
    }


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_the_default_runner_of_each_release_is_known(release: str) -> None:
    at = ALL_RELEASES.index
    of_some = "V1, V2 for some models" if at(release) >= at("0.22.0") else "V1"
    expected = "V2" if at(release) >= at("0.29.0") else of_some
    assert default_runner(stock_source(release_root(release))) == expected == default_runner_of(release)


@pytest.mark.parametrize(("release", "line", "runner"), RUNNERS)
def test_a_release_whose_code_is_not_here_has_the_same_runner(release: str, line: str, runner: str | None) -> None:
    assert (
        Deployment(line, {}, stock_release(release)).runner("V1").holds is {"V1": True, "V2": False, None: None}[runner]
    )


V2_OF = {
    "0.22.0": {"Qwen3"},
    "0.23.0": {"Llama", "Mistral", "Qwen3"},
    "0.24.0": {"DeepseekV2", "GraniteMoe", "Llama", "Mistral", "Qwen2Moe", "Qwen3"},
    "0.25.0": {"DeepseekV2", "GraniteMoe", "Qwen2Moe"},
    "0.26.0": {"DeepseekV2", "GraniteMoe", "Inkling", "LongcatFlashNgram", "Qwen2Moe"},
    "0.27.0": {"DeepseekV2", "GraniteMoe", "Inkling", "KimiK3", "LongcatFlashNgram", "Qwen2Moe"},
    "0.28.0": {"DeepseekV2", "DeepseekV4", "GraniteMoe", "Inkling", "KimiK3", "LongcatFlashNgram", "Qwen2Moe"},
}
"""The architectures that V2 serves from a release on, until it serves all, less ``For…``."""
REFUSED = {
    "0.29.0": {"stock torch.compile", "sequence", "pipeline", "ngram", "speculative", "parallel", "EAGLE3", "dual"}
    | {"elastic", "custom", "KV"},
    "0.30.0": {"stock torch.compile", "sequence", "pipeline", "speculative", "parallel", "elastic", "custom", "mamba"},
    "0.31.0": {"stock torch.compile", "sequence", "pipeline", "speculative", "parallel", "elastic", "mamba"},
    "0.32.0": {"pipeline", "speculative", "parallel", "heterogeneous-vocabulary"},
    "0.33.0": {"pipeline", "speculative", "parallel", "heterogeneous-vocabulary"},
}
"""The first words of what V2 refuses there, micro-batches aside."""


@pytest.mark.parametrize("release", [release for release in ALL_RELEASES if int(release.split(".")[1]) >= 22])
def test_whom_v2_serves_is_as_am_i_hit_says(release: str) -> None:
    """The tables of docs/am-i-hit.md#which-model-runner; a release with others needs a row there."""
    tree = ast.parse((release_root(release) / "vllm" / "config" / "vllm.py").read_text())
    (listed,) = [
        ast.literal_eval(node.value.args[0])
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
        if isinstance(node.value, ast.Call)
    ] or [None]
    if release in REFUSED:
        assert listed is None
        (refused,) = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "_get_v2_model_runner_unsupported_features"
        ]
        texts = re.findall(r"append\(f?[\"'](stock torch\.compile|[\w-]+)", ast.unparse(refused))
        assert {re.split("/", text)[0] for text in texts} == REFUSED[release]
        assert (release in CHOOSERS) == (len(REFUSED[release]) == 4)
    else:
        since = max((first for first in V2_OF if _at(first) <= _at(release)), key=_at)
        assert {re.sub("For.*", "", name) for name in listed or ()} == V2_OF[since]
        assert SERVED_BY_V2.get(tuple(map(int, release.split(".")))[:2], listed) == listed


def _at(release: str) -> int:
    return ALL_RELEASES.index(release)


def test_a_vllm_that_chooses_otherwise_is_not_known(tmp_path: Path) -> None:
    for file, text in (
        ("__init__.py", ""),
        ("config/vllm.py", ""),
        ("envs.py", "VLLM_USE_V2_MODEL_RUNNER: bool = asked()"),
    ):
        (tmp_path / "vllm" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / file).write_text(text)
    assert default_runner(open_source(tmp_path)) == ""
    (tmp_path / "vllm" / "config" / "vllm.py").write_text("def use_v2_model_runner(self): return asked()")
    assert default_runner(open_source(tmp_path)) == ""


@pytest.mark.parametrize(
    ("release", "summary", "beginning"),
    [
        (
            "0.33.0",
            "8 of these 10 apply only if you changed a default.",
            {
                "prefill-dispatch": "model runner V1 (not the default here), recurrent layers",
                "prompt-logprobs": "model runner V1 (not the default here), speculative decoding other than n-grams",
                "idle-rank": "model runner V1 (not the default here), data parallelism",
                "triton-mla-padding": "Triton MLA, full graphs",
                "flash-mixed-schedule": "cudagraph_mode FULL (not the default here), FlashAttention 3",
            },
        ),
        (
            "0.29.0",
            "9 of these 14 apply",
            {
                "prefill-dispatch": "model runner V1 (not the default here), recurrent layers",
                "idle-rank": "data parallelism",  # V2 has it there, too
            },
        ),
        ("0.28.0", "7 of these 14 apply", {"prefill-dispatch": "model runner V1, recurrent layers"}),
        ("0.25.1", "5 of these 14 apply", {"prefill-dispatch": "recurrent layers", "idle-rank": "data parallelism"}),
        ("0.18.1", "6 of these 14 apply", {"capture-state": "model runner V2 (not the default here), full graphs"}),
    ],
)
def test_what_is_not_the_default_of_a_release_is_reported(
    release: str, summary: str, beginning: dict[str, str]
) -> None:
    console = Console(file=io.StringIO(), width=400)
    show(status(stock_source(release_root(release)), {}), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith(f"vLLM {release}, stock release; model runner {default_runner_of(release)} by default\n")
    assert summary in text
    for name, needed in beginning.items():
        (line,) = (line for line in text.splitlines() if line.startswith(name))
        assert f"  {needed}" in line


def test_an_idle_rank_of_the_newest_release_spares_the_default_model_runner() -> None:
    line = "VLLM_USE_V2_MODEL_RUNNER={} vllm serve ./qwen3-next --data-parallel-size 2"
    assert answer("0.33.0", "idle-rank", line.format(1))[0] is NO
    assert answer("0.33.0", "idle-rank", line.format(0))[0] is YES
    assert answer("0.30.0", "idle-rank", line.format(1))[0] is YES


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
    ("cutlass_mla", "./v3 --attention-backend triton_mla", False),
    ("cutlass_mla", "./v3 --attention-backend cutlass_mla", True),
    ("drafts", "./llama" + EAGLE, True),
    ("drafts", "./llama", False),
    ("drafts", "./llama --spec-method ngram", True),
    ("drafts", './llama -sc \'{"model": "draft"}\'', None),
    ("data_parallel", "./llama -dp 2", True),
    ("data_parallel", "./llama", False),
    ("data_parallel", "./llama --data-parallel-rank 0", None),
]


@pytest.mark.parametrize(("fact", "line", "holds"), FACTS, ids=[f"{fact}: {line}" for fact, line, _ in FACTS])
def test_a_fact_holds_or_does_not_or_is_not_known(fact: str, line: str, holds: bool | None) -> None:
    result = getattr(read_deployment(line, stock_source(release_root("0.22.1"))), fact)()
    assert result.holds is holds
    assert result.source


def test_dense_flashmla_takes_two_kinds_of_fp8() -> None:
    for dtype, concern in (("fp8", YES), ("fp8_e4m3", YES), ("fp8_e5m2", NO), ("fp8_inc", NO)):
        assert answer("0.18.1", "flashmla-fp8", f"./v3 --kv-cache-dtype {dtype}", HOPPER)[0] is concern, dtype


@pytest.mark.parametrize(
    ("gpu", "sentence"),
    [
        ("NVIDIA H200", "10 have run in an engine on this GPU, NVIDIA H200; the project's GPUs are H100, H200."),
        (
            "NVIDIA GH200 480GB",
            "none have run in an engine on this GPU, NVIDIA GH200 480GB; the project's GPUs are H100, H200.",
        ),
        ("NVIDIA B200", "none have run in an engine on this GPU, NVIDIA B200; the project's GPUs are H100, H200."),
        (None, None),
    ],
)
def test_status_says_which_gpus_have_run_the_fixes(
    gpu: str | None, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_graphfix.deployment.hardware.gpus", lambda: (gpu,) * 8 if gpu else ())
    console = Console(file=io.StringIO(), width=400)
    show(status(stock_source(release_root("0.18.1")), {}), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    expected = [f"Of the 14 fixes that this vLLM needs, {sentence}"] if sentence else []
    assert [line for line in lines if "run in an engine" in line] == expected


def test_a_compute_capability_names_no_gpu_that_has_run_them() -> None:
    source, line = stock_source(release_root("0.18.1")), "./v3 --kv-cache-dtype fp8"
    ran = {gpu: status(source, {}, read_deployment(line, source, gpu, {})).ran_on for gpu in ("9.0", "sm90", "H100")}
    assert ran["9.0"] == ran["sm90"] == ""
    assert "all have run in an engine on this GPU, H100." in ran["H100"]


def test_what_spares_a_deployment_is_not_its_model_runner_if_there_is_more_to_say() -> None:
    source = stock_source(release_root("0.18.1"))
    console = Console(file=io.StringIO(), width=200)
    show(status(source, {}, read_deployment("./llama", source, HOPPER, {})), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "NOT HIT" in text
    assert "MODEL_RUNNER" not in text.splitlines()[2]
