"""`status --for`: which fixes concern a deployment, by its command line, model, GPU and environment."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hostile import ARGUMENTS, JSON, KINDS, TEXT, dumped, plant, share
from hypothesis import given
from hypothesis import strategies as st
from stock import release_root
from typer.testing import CliRunner

from vllm_graphfix import hardware
from vllm_graphfix.cli import app
from vllm_graphfix.deployment import Concern, Deployment, FlagsError, read_deployment
from vllm_graphfix.fix import Diagnosis, Fix, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.fixes.draft_decode_mode import applies as draft_decode_mode_applies
from vllm_graphfix.source import open_source
from vllm_graphfix.status import status
from vllm_graphfix.trial import Served

MODELS: Mapping[str, Mapping[str, Any]] = {
    "v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "kv_lora_rank": 512,
        "index_topk": 2048,
    },
    "v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "compress_ratios": [4],
        "head_dim": 512,
    },
    "kimi-vl": {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": {"model_type": "deepseek_v3", "kv_lora_rank": 512},
    },
    "v2-by-default": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mamba2": {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "conv_kernel": 4},
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "linear_conv_kernel_dim": 4},
    "new-hybrid": {"architectures": ["NobodyKnowsForCausalLM"], "model_type": "nobody", "mamba_d_state": 16},
    "modelopt": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    },
    "speculators": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "speculators_config": {"verifier": {}},
    },
    "nameless": {"model_type": "llama"},
}
V2 = "VLLM_USE_V2_MODEL_RUNNER=1 "
MTP = """ --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
EAGLE = """ -sc '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'"""
HOPPER, AMPERE, BLACKWELL = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"
THE_KERNELS = hardware.gpus
YES, NO, MAYBE = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are named by `./name`, and this machine has no GPU."""
    monkeypatch.chdir(models)
    monkeypatch.setattr(hardware, "gpus", lambda: ())


def answer(release: str, fix: str, line: str, gpu: str | None = None) -> tuple[Concern, str]:
    source = open_source(release_root(release))
    found = status(source, {}, read_deployment(line, source, gpu, {}))
    (told,) = [row.answer for row in found.rows if row.fix.name == fix]
    assert told is not None
    return told.concern, told.reason


# What is made of flags, by way of some fix; of each fix its trial has lines. Release, fix, line, GPU, answer, part of the reason.
TABLE: list[tuple[str, str, str, str | None, Concern, str]] = [
    # the graph mode
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype=fp8_e4m3 -O3", HOPPER, YES, "(-O3)"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv_cache_dtype fp8 --enforce-eager", HOPPER, NO, "--enforce-eager"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 --enforce-eager --no-enforce-eager", HOPPER, YES, "FULL"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 --enforce-eager True", HOPPER, MAYBE, "without a value"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 -O0", HOPPER, NO, "-O0"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 -O 1", HOPPER, NO, "PIECEWISE"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 -cc.cudagraph_mode none", HOPPER, NO, "NONE"),
    (
        "0.18.1",
        "flashmla-fp8",
        './v3 --kv-cache-dtype fp8 -cc \'{"cudagraph_mode": "full_decode_only"}\'',
        HOPPER,
        YES,
        "FULL_DECODE_ONLY",
    ),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 -cc '{\"cudagraph_mode\": 1}'", HOPPER, NO, "PIECEWISE"),
    (
        "0.18.1",
        "flashmla-fp8",
        './v3 --kv-cache-dtype fp8 -cc \'{"cudagraph_mode": "PIECEWISE", "pass_config": {"enable_sp": true}}\'',
        HOPPER,
        MAYBE,
        "pass_config",
    ),
    (
        "0.18.1",
        "flashmla-fp8",
        "./v3 --kv-cache-dtype fp8 -cc.cudagraph_mode=PIECEWISE -cc '{}'",
        HOPPER,
        MAYBE,
        "given in one way",
    ),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 --comp '{}'", HOPPER, MAYBE, "written out in full"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 --compilation-config broken", HOPPER, MAYBE, "JSON object"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 --kv-transfer-config '{}'", HOPPER, MAYBE, "vLLM logs"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 --config file.yaml", HOPPER, MAYBE, "--config"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype auto --config file.yaml", HOPPER, NO, "not fp8"),
    (
        "0.18.1",
        "flashmla-fp8",
        "TORCH_COMPILE_DISABLE=1 vllm serve ./v3 --kv-cache-dtype fp8",
        HOPPER,
        MAYBE,
        "TORCH_COMPILE",
    ),
    # the cache and the backend
    ("0.18.1", "flashmla-fp8", "deepseek-ai/DeepSeek-V3 --kv-cache-dtype bfloat16", HOPPER, NO, "bfloat16"),
    (
        "0.18.1",
        "flashmla-fp8",
        "deepseek-ai/DeepSeek-V3 --kv-cache-dtype fp8",
        HOPPER,
        MAYBE,
        "config.json of deepseek-ai/DeepSeek-V3",
    ),
    (
        "0.18.1",
        "flashmla-fp8",
        "deepseek-ai/DeepSeek-V3 --kv-cache-dtype fp8 --attention-backend FLASHMLA",
        None,
        YES,
        "FLASHMLA",
    ),
    (
        "0.18.1",
        "flashmla-fp8",
        "deepseek-ai/DeepSeek-V3 --kv-cache-dtype fp8 --attention-backend TRITON_MLA",
        None,
        NO,
        "TRITON_MLA",
    ),
    ("0.18.1", "flashmla-fp8", "x --kv-cache-dtype fp8 -ac.backend=FLASHMLA", None, YES, "FLASHMLA"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8", None, MAYBE, "--gpu NAME"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8", "AMD Instinct MI300X", NO, "Hopper"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8", "Nobody's GPU", MAYBE, "--gpu NAME"),
    ("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8 --block-size 128", HOPPER, MAYBE, "backend that vLLM logs"),
    ("0.18.1", "flashmla-fp8", "VLLM_MLA_DISABLE=1 vllm serve x --kv-cache-dtype fp8", HOPPER, NO, "VLLM_MLA_DISABLE"),
    ("0.18.1", "flashmla-fp8", "./v2-by-default --kv-cache-dtype fp8", HOPPER, MAYBE, "may have latent attention"),
    ("0.18.1", "flashmla-fp8", "./nameless --kv-cache-dtype fp8", HOPPER, MAYBE, "`architectures`"),
    ("0.18.1", "flashmla-fp8", "./llama --kv-cache-dtype fp8 --hf-overrides '{}'", HOPPER, MAYBE, "--hf-overrides"),
    ("0.18.1", "flashmla-fp8", "--kv-cache-dtype fp8", HOPPER, MAYBE, "the model"),
    ("0.18.1", "flashmla-fp8", "./llama --kv-cache-dtype fp8 --model ./v3", HOPPER, MAYBE, "one model"),
    ("0.18.1", "flashmla-fp8", "--kv-cache-dtype fp8 --model=./llama", HOPPER, NO, "Llama"),
    ("0.18.1", "flashmla-fp8", "-tp 8 --kv-cache-dtype fp8 --enable-prefix-caching ./llama", HOPPER, NO, "Llama"),
    (
        "0.18.1",
        "flashmla-fp8",
        "python3 -m vllm.entrypoints.openai.api_server --model ./llama --kv-cache-dtype fp8",
        None,
        NO,
        "Llama",
    ),
    ("0.19.0", "flashmla-fp8", "./v3 --kv-cache-dtype fp8", HOPPER, NO, "does not have the defect"),
    # the model runner
    (
        "0.18.1",
        "capture-state",
        "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ./v3 --attention-backend FLASHMLA",
        HOPPER,
        NO,
        "=0",
    ),
    (
        "0.18.1",
        "capture-state",
        "VLLM_USE_V2_MODEL_RUNNER=yes vllm serve ./v3 --attention-backend FLASHMLA",
        HOPPER,
        MAYBE,
        "being 0 or 1",
    ),
    # speculators
    (
        "0.21.0",
        "draft-prefill-state",
        V2 + './v3 --attention-backend FLASHMLA -sc \'{"model": "draft"}\'',
        HOPPER,
        MAYBE,
        "`method`",
    ),
    ("0.21.0", "draft-prefill-state", V2 + "./speculators --attention-backend FLASHMLA", HOPPER, MAYBE, "of its own"),
    (
        "0.21.0",
        "draft-prefill-state",
        V2 + "some/model --attention-backend FLASHMLA",
        HOPPER,
        MAYBE,
        "bring a speculator",
    ),
]


TRIALS = [pytest.param(fix, served, id=f"{fix.name}: {served.line}") for fix in FIXES for served in fix.trial().served]


@pytest.mark.parametrize(("fix", "served"), TRIALS)
def test_the_answer_is_that_of_the_trial(fix: Fix, served: Served, models: Path) -> None:
    if served.model:
        (models / "model").mkdir(exist_ok=True)
        (models / "model" / "config.json").write_text(json.dumps(dict(served.model)))
    found, reason = answer(served.release, fix.name, served.line, served.gpu)
    assert (found, served.because in reason) == (served.answer, True), reason


@pytest.mark.parametrize(
    ("release", "fix", "line", "gpu", "concern", "because"), TABLE, ids=[f"{r[1]}: {r[2]} on {r[3]}" for r in TABLE]
)
def test_the_answer_follows_from_the_flags(
    release: str, fix: str, line: str, gpu: str | None, concern: Concern, because: str
) -> None:
    found, reason = answer(release, fix, line, gpu)
    assert (found, because in reason) == (concern, True), reason


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_a_trial_has_lines_that_its_fix_concerns_and_lines_that_it_does_not(fix: Fix) -> None:
    assert {served.answer for served in fix.trial().served} >= {YES, NO}


@pytest.mark.parametrize(("shape", "line", "concern"), [
    ("two-managers-mode", "-O1" + EAGLE, YES),
    ("two-managers-mode", EAGLE, NO),
    ("two-managers-indices", MTP, YES),
    ("two-managers-mode-indices", EAGLE, YES),
    ("two-managers-indices", "--enforce-eager" + EAGLE, NO),
    ("", EAGLE, YES),
])  # fmt: skip
def test_the_nightlies_shapes_of_draft_decode_mode_have_conditions_of_their_own(
    shape: str, line: str, concern: Concern
) -> None:
    deployment = read_deployment(f"{V2} vllm serve ./llama {line}", open_source(release_root("0.18.1")))
    assert draft_decode_mode_applies(deployment, shape).concern is concern


def test_code_that_nobody_has_looked_at_never_makes_it_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = Diagnosis(Verdict.UNRECOGNISED, "in a way that nobody has looked at")
    monkeypatch.setattr("vllm_graphfix.manifest.diagnose", lambda fix, source: unseen)
    assert answer("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8", HOPPER)[0] is MAYBE
    assert answer("0.18.1", "flashmla-fp8", "./v3 --enforce-eager --kv-cache-dtype fp8", HOPPER)[0] is NO


# -- this machine and its environment ------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "major"),
    [
        (HOPPER, 9), (AMPERE, 8), (BLACKWELL, 10), ("NVIDIA GH200 480GB", 9), ("NVIDIA H20", 9), ("NVIDIA GB200", 10),
        ("NVIDIA L40S", 8), ("NVIDIA A10G", 8), ("NVIDIA GeForce RTX 4090", 8), ("NVIDIA GeForce RTX 5090", 12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12), ("Tesla T4", 7), ("Tesla V100-SXM2-16GB", 7),
        ("AMD Instinct MI300X", 0), ("9.0", 9), ("sm_100", 10), ("sm90a", 9), ("", None), ("a GPU", None),
    ],
)  # fmt: skip
def test_a_gpus_name_tells_its_generation(name: str, major: int | None) -> None:
    assert hardware.capability(name) == major


def test_gpus_are_those_that_the_driver_tells_of(tmp_path: Path) -> None:
    for number, name in enumerate((HOPPER, AMPERE)):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 42\n")
    (tmp_path / "gpus" / "broken").mkdir()
    assert THE_KERNELS(tmp_path) == (HOPPER, AMPERE)
    assert THE_KERNELS(tmp_path / "nowhere") == ()


# -- other facts, which fixes use ---------------------------------------------------------------------------------

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
    found = getattr(read_deployment(line, open_source(release_root("0.21.0"))), fact)()
    assert found.holds is holds
    assert found.told


# -- the command --------------------------------------------------------------------------------------------------


def call(*arguments: str, release: str = "0.18.1") -> Any:
    return CliRunner().invoke(app, ["status", "--vllm", str(release_root(release)), *arguments])


def test_json_has_the_answer_of_each_fix_and_nothing_of_the_line() -> None:
    line = "./v3 --kv-cache-dtype fp8 --api-key sk-something-secret"
    done = call("--json", "--for", line, "--gpu", HOPPER)
    assert done.exit_code == 0
    assert "secret" not in done.output
    concerns = {row["name"]: row["concern"] for row in json.loads(done.stdout)["fixes"]}
    assert set(concerns) == set(BY_NAME)
    assert concerns["flashmla-fp8"]["answer"] == "concerns you"
    assert concerns["flashmla-fp8"]["reason"].startswith("--kv-cache-dtype fp8, ")
    assert "concern" not in json.loads(call("--json").stdout)["fixes"][0]


def test_the_table_for_eyes_has_an_answer_for_each_fix() -> None:
    lines = call("--for", "./llama").stdout.split("with these flags")[1].splitlines()
    assert all(any(line.startswith(name) and "does not" in line for line in lines) for name in BY_NAME)


def test_check_counts_no_fix_that_does_not_concern_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GRAPHFIX", "off")
    assert call("--check", "--for", "./v3 --kv-cache-dtype fp8", "--gpu", HOPPER).exit_code == 3
    assert call("--check", "--for", "./llama").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--for", "x '"), "no line of a shell"),
        (("--for", "x" * 20_000), "more than 16,384 characters"),
        (("--gpu", HOPPER), "--gpu is for --for"),
    ],
)
def test_what_is_no_line_is_one_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = call(*arguments)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


# -- hostile lines and models -------------------------------------------------------------------------------------

FLAGS = st.sampled_from(
    """--kv-cache-dtype --kv-cache-dtype=fp8 --attention-backend -ac -cc -cc. -cc.cudagraph_mode=FULL -cc.a.b.c= -cc.+ -O -O3 -O= -O.
    --speculative-config --speculative-config.method=mtp -sc --model --config -- - --= --no-enforce-eager --enforce-eager= --m -dp -tp
    --hf-overrides A=1 =1 env vllm serve ./v3 ./mamba2 --compilation-config={} -q --runner""".split()
)
LINES = st.lists(FLAGS | ARGUMENTS.map(shlex.quote) | JSON.map(dumped).map(shlex.quote) | TEXT, max_size=12).map(
    " ".join
)
SOURCE = open_source(release_root("0.18.1"))


@given(LINES, st.none() | TEXT)
def test_no_line_raises_anything_else_or_takes_long(line: str, gpu: str | None) -> None:
    started = time.process_time()
    try:
        deployment = read_deployment(line, SOURCE, gpu, {})
    except FlagsError:
        return
    for fix in FIXES:
        if fix.applies is not None:
            told = fix.applies(deployment, "")
            assert told.reason
            assert told.reason.isprintable()
    assert time.process_time() - started < 5


@share(50)
@given(
    config=st.dictionaries(TEXT | st.sampled_from(["architectures", "model_type", "kv_lora_rank"]), JSON, max_size=6)
)
def test_no_model_raises(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(dumped(config), encoding="utf-8", errors="surrogatepass")
    deployment = read_deployment(str(folder), SOURCE, HOPPER, {})
    for fix in FIXES:
        if fix.applies is not None:
            assert fix.applies(deployment, "").reason.isprintable()


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_place_of_a_models_config_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("{}")
    plant(tmp_path / "model" / "config.json", kind, b"{}", outside)
    deployment = read_deployment(str(tmp_path / "model"), SOURCE, HOPPER, {})
    assert deployment.mla().holds is None


def test_a_config_that_is_too_large_or_too_deep_is_not_known(tmp_path: Path) -> None:
    for text in ('{"architectures": ["' + "a" * 2_000_000 + '"]}', "[" * 100_000, '{"a": ' * 50_000):
        (tmp_path / "config.json").write_text(text)
        assert read_deployment(str(tmp_path), SOURCE, HOPPER, {}).mla().holds is None
