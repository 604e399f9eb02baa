"""`status --for`: which fixes concern a deployment, by its command line, model and GPU; and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edited import stock_source
from served_models import EAGLE, HOPPER, MTP, V2, answer
from stock import release_root
from trial_rows import Served, served_of
from vllm_graphfix.commands.cli import app
from vllm_graphfix.deployment import Concern, read_deployment
from vllm_graphfix.deployment.needs import judge
from vllm_graphfix.fix import Diagnosis, Fix, Verdict
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.fixes.draft_decode_mode import needs as needs_of_draft_decode_mode

pytestmark = pytest.mark.usefixtures("among_models")
YES, NO, MAYBE = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN


# What is made of flags, by way of some fix; of each fix its trial has lines: line, GPU, answer, part of the reason.
TABLE: dict[tuple[str, str], list[tuple[str, str | None, Concern, str]]] = {
    ("0.18.1", "flashmla-fp8"): [
        ("./v3 --kv-cache-dtype=fp8_e4m3 -O3", HOPPER, YES, "(-O3)"),
        ("./v3 --kv_cache_dtype fp8 --enforce-eager", HOPPER, NO, "--enforce-eager"),
        ("./v3 --kv-cache-dtype fp8 --enforce-eager --no-enforce-eager", HOPPER, YES, "FULL"),
        ("./v3 --kv-cache-dtype fp8 --enforce-eager True", HOPPER, MAYBE, "without a value"),
        ("./v3 --kv-cache-dtype fp8 -O0", HOPPER, NO, "-O0"),
        ("./v3 --kv-cache-dtype fp8 -O 1", HOPPER, NO, "PIECEWISE"),
        ("./v3 --kv-cache-dtype fp8 -cc.cudagraph_mode none", HOPPER, NO, "NONE"),
        ('./v3 --kv-cache-dtype fp8 -cc \'{"cudagraph_mode": "full_decode_only"}\'', HOPPER, YES, "FULL_DECODE_ONLY"),
        ("./v3 --kv-cache-dtype fp8 -cc '{\"cudagraph_mode\": 1}'", HOPPER, NO, "PIECEWISE"),
        (
            './v3 --kv-cache-dtype fp8 -cc \'{"cudagraph_mode": "PIECEWISE", "pass_config": {"enable_sp": true}}\'',
            HOPPER,
            MAYBE,
            "pass_config",
        ),
        ("./v3 --kv-cache-dtype fp8 -cc.cudagraph_mode=PIECEWISE -cc '{}'", HOPPER, MAYBE, "given in one form"),
        ("./v3 --kv-cache-dtype fp8 --comp '{}'", HOPPER, MAYBE, "written out in full"),
        ("./v3 --kv-cache-dtype fp8 --compilation-config broken", HOPPER, MAYBE, "JSON object"),
        ("./v3 --kv-cache-dtype fp8 --kv-transfer-config '{}'", HOPPER, MAYBE, "vLLM logs"),
        ("./v3 --kv-cache-dtype fp8 --config file.yaml", HOPPER, MAYBE, "--config"),
        ("./v3 --kv-cache-dtype auto --config file.yaml", HOPPER, NO, "not fp8"),
        ("TORCH_COMPILE_DISABLE=1 vllm serve ./v3 --kv-cache-dtype fp8", HOPPER, MAYBE, "TORCH_COMPILE"),
        # the cache and the backend
        ("deepseek-ai/DeepSeek-V3 --kv-cache-dtype bfloat16", HOPPER, NO, "bfloat16"),
        ("deepseek-ai/DeepSeek-V3 --kv-cache-dtype fp8", HOPPER, MAYBE, "config.json of deepseek-ai/DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3 --kv-cache-dtype fp8 --attention-backend FLASHMLA", None, YES, "FLASHMLA"),
        ("deepseek-ai/DeepSeek-V3 --kv-cache-dtype fp8 --attention-backend TRITON_MLA", None, NO, "TRITON_MLA"),
        ("x --kv-cache-dtype fp8 -ac.backend=FLASHMLA", None, YES, "FLASHMLA"),
        ("./v3 --kv-cache-dtype fp8", None, MAYBE, "--gpu NAME"),
        ("./v3 --kv-cache-dtype fp8", "AMD Instinct MI300X", NO, "Hopper"),
        ("./v3 --kv-cache-dtype fp8", "Nobody's GPU", MAYBE, "--gpu NAME"),
        ("./v3 --kv-cache-dtype fp8 --block-size 128", HOPPER, MAYBE, "backend that vLLM logs"),
        ("VLLM_MLA_DISABLE=1 vllm serve x --kv-cache-dtype fp8", HOPPER, NO, "VLLM_MLA_DISABLE"),
        ("./v2-by-default --kv-cache-dtype fp8", HOPPER, MAYBE, "may have latent attention"),
        ("./nameless --kv-cache-dtype fp8", HOPPER, MAYBE, "`architectures`"),
        ("./llama --kv-cache-dtype fp8 --hf-overrides '{}'", HOPPER, MAYBE, "--hf-overrides"),
        ("--kv-cache-dtype fp8", HOPPER, MAYBE, "the model"),
        ("./llama --kv-cache-dtype fp8 --model ./v3", HOPPER, MAYBE, "one model"),
        ("--kv-cache-dtype fp8 --model=./llama", HOPPER, NO, "Llama"),
        ("-tp 8 --kv-cache-dtype fp8 --enable-prefix-caching ./llama", HOPPER, NO, "Llama"),
        ("python3 -m vllm.entrypoints.openai.api_server --model ./llama --kv-cache-dtype fp8", None, NO, "Llama"),
    ],
    ("0.19.0", "flashmla-fp8"): [
        ("./v3 --kv-cache-dtype fp8", HOPPER, NO, "does not have the defect"),
    ],
    ("0.18.1", "capture-state"): [
        # the model runner
        ("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ./v3 --attention-backend FLASHMLA", HOPPER, NO, "=0"),
        ("VLLM_USE_V2_MODEL_RUNNER=yes vllm serve ./v3 --attention-backend FLASHMLA", HOPPER, MAYBE, "being 0 or 1"),
    ],
    ("0.21.0", "draft-prefill-state"): [
        # speculators
        (
            V2 + './v3 --attention-backend FLASHMLA --speculative-config \'{"model": "draft"}\'',
            HOPPER,
            MAYBE,
            "`method`",
        ),
        (V2 + "./speculators --attention-backend FLASHMLA", HOPPER, MAYBE, "its own speculator"),
        (V2 + "some/model --attention-backend FLASHMLA", HOPPER, MAYBE, "bring its own speculator"),
    ],
}
ROWS = [(*key, *row) for key, rows in TABLE.items() for row in rows]


TRIALS = [pytest.param(fix, served, id=f"{fix.name}: {served.line}") for fix in FIXES for served in served_of(fix.name)]


@pytest.mark.parametrize(("fix", "served"), TRIALS)
def test_the_answer_is_that_of_the_trial(fix: Fix, served: Served, served_models: Path) -> None:
    if served.model:
        (served_models / "model").mkdir(exist_ok=True)
        (served_models / "model" / "config.json").write_text(json.dumps(dict(served.model)))
    actual, reason = answer(served.release, fix.name, served.line, served.gpu)
    assert (actual, served.because in reason) == (served.answer, True), reason


@pytest.mark.parametrize(
    ("release", "fix", "line", "gpu", "concern", "because"), ROWS, ids=[f"{r[1]}: {r[2]} on {r[3]}" for r in ROWS]
)
def test_the_answer_follows_from_the_flags(
    release: str, fix: str, line: str, gpu: str | None, concern: Concern, because: str
) -> None:
    actual, reason = answer(release, fix, line, gpu)
    assert (actual, because in reason) == (concern, True), reason


@pytest.mark.parametrize("fix", FIXES, ids=list(BY_NAME))
def test_a_trial_has_lines_that_its_fix_concerns_and_lines_that_it_does_not(fix: Fix) -> None:
    assert {served.answer for served in served_of(fix.name)} >= {YES, NO}


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
    deployment = read_deployment(f"{V2} vllm serve ./llama {line}", stock_source(release_root("0.18.1")))
    assert judge(needs_of_draft_decode_mode(), deployment, shape).concern is concern


def test_code_that_nobody_has_looked_at_never_makes_it_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = Diagnosis(Verdict.UNRECOGNISED, "in a way that this plugin does not recognise")
    monkeypatch.setattr("vllm_graphfix.manifest.diagnose", lambda fix, source: unseen)
    assert answer("0.18.1", "flashmla-fp8", "./v3 --kv-cache-dtype fp8", HOPPER)[0] is MAYBE
    assert answer("0.18.1", "flashmla-fp8", "./v3 --enforce-eager --kv-cache-dtype fp8", HOPPER)[0] is NO


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
    lines = call("--for", "./llama", "--all").stdout.split("does not concern you:")[1].splitlines()
    assert all(any(line.startswith(f"  {name}: ") for line in lines) for name in BY_NAME)


def test_what_concerns_a_deployment_comes_first_and_nothing_else_by_default() -> None:
    out = call("--for", "./v3 --kv-cache-dtype fp8", "--gpu", HOPPER).stdout
    lines = out.splitlines()
    assert lines[0].startswith("YOU ARE HIT by 2 defects of vLLM 0.18.1 (DeepseekV3ForCausalLM, NVIDIA H100 80GB HBM3)")
    assert "mamba" not in out
    first = call("--for", "./llama --enforce-eager").stdout.splitlines()[0]
    assert first.startswith("NOT HIT by a known defect of vLLM 0.18.1")


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--data-paralel-size 8", "--data-parallel-size"),
        ("--data_paralel_size=8", "--data-parallel-size"),
        ("-sc '{}'", None),
        ("--quantisation fp8", "--quantization"),
    ],
)
def test_a_flag_that_this_vllm_does_not_know_is_an_error_with_the_nearest_one(flag: str, nearest: str | None) -> None:
    done = call("--for", f"./v3 -tp 8 {flag}")
    named = re.split("[ =]", flag)[0]
    hint = f"did you mean {nearest}?" if nearest else "`vllm serve --help=all` lists its flags"
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"vllm-graphfix: {named!r} is no flag of vLLM 0.18.1; {hint}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kv-cache-dtype fp9", "takes no --kv-cache-dtype 'fp9'; did you mean fp8?"),
        ("--kv-cache-dtype FP8", "takes no --kv-cache-dtype 'FP8'; did you mean fp8?"),
        ("--kv-cache-dtype x", "takes no --kv-cache-dtype 'x'; it takes auto, bfloat16, float16, fp8, "),
        ("--attention-backend FLASHMALA", "takes no --attention-backend 'FLASHMALA'; did you mean FLASHMLA?"),
        ("-tp eight", "takes no --tensor-parallel-size 'eight'; give a number"),
    ],
)
def test_a_value_that_this_vllm_refuses_is_one_clear_error(flags: str, message: str) -> None:
    arguments = ["status", "--vllm", str(release_root("0.18.1")), "--for", f"./v3 {flags}"]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"vllm-graphfix: vLLM 0.18.1 {message}")


@pytest.mark.parametrize("flags", ["--kv-cache-dtype=fp8_e4m3", "--attention-backend flashmla", "-tp 8 -dcp 2"])
def test_a_value_that_this_vllm_takes_is_none(flags: str) -> None:
    arguments = ["status", "--vllm", str(release_root("0.18.1")), "--for", f"./v3 {flags}"]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_a_line_of_nothing_is_one_clear_error() -> None:
    done = CliRunner().invoke(app, ["status", "--vllm", str(release_root("0.18.1")), "--for", " "])
    assert (done.exit_code, done.stderr.startswith("vllm-graphfix: --for is empty")) == (2, True)


@pytest.mark.parametrize(
    "line",
    ["-tp8", "--tensor_parallel_size 8", "--tensor-parallel 8", "-O3", "-cc.mode=3", "--no-enable-prefix-caching"],
)
def test_a_flag_may_be_short_cut_short_negated_or_have_underscores(line: str) -> None:
    assert call("--for", f"./v3 {line}").exit_code == 0


def test_a_model_of_the_hub_is_read_where_it_was_fetched_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text((Path("llama") / "config.json").read_text())
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "NOT HIT by a known defect of vLLM 0.18.1" in call("--for", "some/model").stdout
    assert "config.json of another/model" in call("--for", "another/model").stdout


@pytest.mark.parametrize(("name", "below"), [("HF_HOME", ""), ("HF_HUB_CACHE", "/hub")])
def test_the_home_folder_in_the_place_of_the_hub_s_cache_is_expanded(
    name: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "cache" / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text((Path("llama") / "config.json").read_text())
    monkeypatch.setenv("HOME", str(tmp_path))
    for home in ("~", "$HOME"):
        monkeypatch.setenv(name, f"{home}/cache{below}")
        assert "NOT HIT by a known defect of vLLM 0.18.1" in call("--for", "some/model").stdout


def test_check_counts_no_fix_that_does_not_concern_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GRAPHFIX", "off")
    assert call("--check", "--for", "./v3 --kv-cache-dtype fp8", "--gpu", HOPPER).exit_code == 3
    assert call("--check", "--for", "./llama").exit_code == 0


SEPARATELY: list[tuple[str, str | None]] = [
    ("./v3 -tp 8", None),
    ("./v3 -tp 8 --nnodes 1", None),
    ("./v3 -dp 8 -dpl 8", None),
    ("./v3 -dp 8 -dpl 4 -dpb ray", None),
    ("./v3 -tp 16 --distributed-executor-backend ray", None),
    ("./v3 -tp 16 --nnodes 2", "--nnodes 2"),
    ("./v3 -tp 16 -n=2 --headless", "--nnodes 2"),
    ("./v3 -dp 8 -dpl 4", "4 of 8 data-parallel ranks on this node"),
    ("./v3 -dp 8 -dpl 4 -dpr 4 --headless", "--headless"),
    ("./v3 -dp 8 --data-parallel-rank 3", "--data-parallel-rank"),
    ("./v3 -dp 8 -dpn 3", "--data-parallel-rank"),
    ("./v3 -dp 8 -dpl 4 -dph", "--data-parallel-hybrid-lb"),
    ("./v3 -dp 8 -dpe --nnodes 1", "--data-parallel-external-lb"),
    ("./v3 --distributed-executor-backend=external_launcher", "an external launcher, such as torchrun,"),
]


@pytest.mark.parametrize(("line", "separately"), SEPARATELY, ids=[line for line, _ in SEPARATELY])
def test_a_percentage_without_a_key_puts_in_no_engine_whose_nodes_decide_separately(
    line: str, separately: str | None
) -> None:
    for key, out in (("", separately is not None), ("VLLM_GRAPHFIX_ROLLOUT_KEY=the-group ", False)):
        report = json.loads(call("--json", "--for", f"{key}VLLM_GRAPHFIX_ROLLOUT=99.99 vllm serve {line}").stdout)
        assert all(row["would_be"] == "not-in-canary" for row in report["fixes"]) == out
        assert any(f" with {separately} the nodes of an engine " in note for note in report["notes"]) == out


def test_variables_of_ours_in_front_of_the_line_count() -> None:
    report = json.loads(call("--json", "--for", "VLLM_GRAPHFIX=observe vllm serve ./llama").stdout)
    assert {row["mode"] for row in report["fixes"]} == {"observe"}
    done = call("--check", "--json", "--for", "VLLM_GRAPHFIX=observ vllm serve ./llama")
    assert (done.exit_code, json.loads(done.stdout)["misconfigured"]) == (3, {"VLLM_GRAPHFIX": "observ"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--for", "x '"), "a shell could not parse"),
        (("--for", "x" * 20_000), "more than 16,384 characters"),
        # What is left of unquoted JSON between double quotes, without blanks and with them.
        (("--for", "x --speculative-config {method:mtp,tokens:3}"), "Put the flags in single quotes: --for 'MODEL …"),
        (("--for", "x -cc {mode: 3, cudagraph_mode: NONE}"), "did the shell remove its quotation marks?"),
        (("--gpu", HOPPER), "--gpu only goes with --for"),
    ],
)
def test_what_is_no_line_is_one_message_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = call(*arguments)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


def test_what_is_missing_is_reported_once_for_all_that_miss_it() -> None:
    out = (
        CliRunner()
        .invoke(app, ["status", "--vllm", str(release_root("0.18.1")), "--for", "no/such-model --kv-cache-dtype fp8"])
        .stdout.splitlines()
    )
    assert out[out.index("LIKELY IF attention runs on FlashMLA:") + 1].startswith("  flashmla-fp8: garbage")
    missing = [line for line in out if "config.json" in line]
    assert len(missing) == 1
    assert out[0].startswith("MAYBE HIT by ")
    assert out[1] == missing[0]
    assert out[1].startswith("First get the config.json of no/such-model: `hf download no/such-model config.json` and ")
    off = (
        CliRunner()
        .invoke(app, ["status", "--vllm", str(release_root("0.18.1")), "--for", "VLLM_GRAPHFIX=off no/such-model"])
        .stdout
    )
    assert "    off: VLLM_GRAPHFIX=off" in off
