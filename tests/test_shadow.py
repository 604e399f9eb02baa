"""The shadow check on stock releases: model runners and drafters of each shape, right graphs and wrong ones."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shadow_table
from behaviours import check_behaviours
from edited import Change, edited_source, swap
from shadow_table import RELEASES as OF_CACHES
from stock import ALL_RELEASES, release_root
from table import slow_but_for
from vllm_graphfix.fix import Verdict, variable
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings.environment import SHADOW, SHADOW_GRAPHS
from vllm_graphfix.shadow import runner_v1, runner_v2
from vllm_graphfix.shadow.forward import unsafe
from vllm_graphfix.shadow.runners import RUNNERS
from vllm_graphfix.source.files import open_source

LATER = {"shadow-v2-drafter": (0, 19), "shadow-v2-dflash-drafter": (0, 24), "shadow-v2-pieces": (0, 23)} | {
    "shadow-encoder": (0, 24)
}


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: runner.name)
def test_the_code_of_every_release_from_0_18_on_is_known(runner: Any, release: str) -> None:
    actual = runner.diagnose(open_source(release_root(release)))
    first = LATER.get(runner.name, (0, 18))
    if tuple(map(int, release.split("."))) >= first:
        assert actual.verdict is Verdict.AFFECTED, actual.reason
    elif runner.name in LATER:
        assert actual.verdict is Verdict.ABSENT, actual.reason


@pytest.mark.parametrize(
    "release", slow_but_for(("0.18.1", "0.21.0", "0.33.0"), ("0.18.1", "0.21.0", "0.30.0", "0.33.0"))
)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_model_runner(release: str, runner: str) -> None:
    also = ("shadow_layers", "shadow_connector") if runner == "v1" else ()
    check_behaviours(release, f"shadow_{runner}", {SHADOW: "1/1"}, also=also)


@pytest.mark.parametrize("release", slow_but_for(("0.29.0",), ("0.22.0", "0.25.1", "0.27.1", "0.29.0")))
def test_breakable_graphs_of_model_runner_v1(release: str) -> None:
    check_behaviours(release, "shadow_breakable", {SHADOW: "1/1"})


ALL_GRAPHS = {SHADOW: "1/1", SHADOW_GRAPHS: "all", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}


@pytest.mark.parametrize(
    "release", slow_but_for(("0.21.0", "0.33.0"), ("0.15.0", "0.18.0", "0.21.0", "0.23.0", "0.29.0", "0.33.0"))
)
def test_steps_in_pieces(release: str) -> None:
    """0.21.0 has no breakable graphs, and no function of model runner V2 for pieces."""
    check_behaviours(release, "shadow_pieces", ALL_GRAPHS)


def test_a_defect_of_padded_rows_in_pieces_is_no_mismatch() -> None:
    check_behaviours("0.18.1", "shadow_positions", ALL_GRAPHS | {variable("roberta-positions"): "off"})


def test_where_breakable_graphs_take_the_place_of_full_ones_they_are_watched(release: str) -> None:
    (v1,) = (runner for runner in RUNNERS if runner.name == "shadow-v1")
    actual = v1.diagnose(open_source(release_root(release)))
    watched = {patch.name for patch in v1.patches(actual.shape)} if actual.shape else set()
    in_place = (0, 22) <= tuple(map(int, release.split(".")))[:2] <= (0, 29)
    assert ("BreakableCUDAGraphWrapper.__init__" in watched) == in_place


@pytest.mark.parametrize(
    ("release", "change"),
    [
        ("0.22.0", swap(r"self\.model = BreakableCUDAGraphWrapper\(", "self.model = made(BreakableCUDAGraphWrapper, ")),
        ("0.29.0", swap(r"(def load_model)\(", r"\1_and_wrap(")),
        ("0.33.0", swap(r"(self\.model = CUDAGraphWrapper\()", r"self.outer = \1")),
    ],
    ids=["made otherwise", "elsewhere", "no full graphs around"],
)
def test_breakable_graphs_of_an_unknown_form_are_not_taken_for_watched(release: str, change: Change) -> None:
    (v1,) = (runner for runner in RUNNERS if runner.name == "shadow-v1")
    changed = edited_source(release_root(release), {runner_v1.RUNNER: change})
    assert v1.diagnose(changed).verdict is Verdict.UNRECOGNISED


@pytest.mark.parametrize(
    ("name", "path", "change"),
    [
        ("shadow-v1-pieces", runner_v1.RUNNER, swap(r"return self\.model\((\s+input_ids=)", r"return self.run(\1")),
        ("shadow-v1-pieces", runner_v1.RUNNER, swap(r"model_output = self\._model_forward\(", "model_output = run(")),
        ("shadow-v1-pieces", runner_v1.CONTEXT, swap(r"def override_forward_context\(", "def override(")),
        ("shadow-v2-pieces", runner_v2.GRAPHS, swap(r"(self\.breakable_cg_runner)\(\*\*", r"\1.run(**")),
        ("shadow-v2-pieces", runner_v2.RUNNER, swap(r"self\.model, model_inputs\n", "self.model, inputs\n")),
        ("shadow-v2-pieces", runner_v2.CONTEXT, swap(r"slot_mapping: ", "slots: ")),
    ],
)
def test_steps_in_pieces_of_an_unknown_form_are_not_taken_for_checked(name: str, path: str, change: Change) -> None:
    (runner,) = (runner for runner in RUNNERS if runner.name == name)
    changed = edited_source(release_root("0.33.0"), {path: change})
    assert runner.diagnose(changed).verdict is Verdict.UNRECOGNISED


INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Triton's own interpreter runs vLLM's kernels on a CPU."""


@pytest.mark.xdist_group("caches")  # in no fork of a release
@pytest.mark.parametrize("release", slow_but_for(("0.33.0",), OF_CACHES))
def test_caches_that_a_step_can_write_twice(release: str) -> None:
    check_behaviours(release, "shadow_caches", {SHADOW: "1/1"} | INTERPRETED, fresh=True)


@pytest.mark.xdist_group("0.21.0")
def test_faults_of_one_of_two_ranks_whose_graphs_are_in_quarantine() -> None:
    """Shows also what would be served without the wait that keeps their collectives paired.

    Checks take as long again, nearly all of it asleep.
    """
    select = "quarantine and not raise_in_a_layer or sums"
    check_behaviours("0.21.0", "shadow_ranks", {SHADOW: "1/1"}, select=select)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.18.0", "0.21.0", "0.33.0"])
def test_faults_of_one_of_two_ranks(release: str) -> None:
    check_behaviours(release, "shadow_ranks", {SHADOW: "1/1"})


@pytest.mark.xdist_group("0.33.0")
def test_data_parallel_ranks_that_share_experts_check_the_same_steps() -> None:
    check_behaviours("0.33.0", "shadow_lockstep", {SHADOW: "1/1"}, select="check_the_same_steps or agrees or late")


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.20.0", "0.21.0", "0.25.1", "0.33.0"])
def test_data_parallel_ranks_that_share_experts(release: str) -> None:
    check_behaviours(release, "shadow_lockstep", {SHADOW: "1/1"})


@pytest.mark.parametrize(
    "release",
    slow_but_for(
        ("0.25.1", "0.33.0"), ("0.24.0", "0.25.1", "0.27.1", "0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
    ),
)
def test_speculators_that_draft_in_one_pass(release: str) -> None:
    """A release of each shape, with attention that is causal: `draft-non-causal` has no part in it."""
    check_behaviours(release, "shadow_parallel", {SHADOW: "1/1"})


@pytest.mark.parametrize(
    ("release", "mode"), [("0.24.0", "off"), ("0.24.0", "on"), ("0.25.1", "off"), ("0.26.0", "off")]
)
def test_drafts_that_are_hardly_accepted_on_account_of_their_graph_are_a_collapse(release: str, mode: str) -> None:
    """0.26.0 has upstream's remedy."""
    check_behaviours(release, "shadow_acceptance", {SHADOW: "1/1", variable("draft-non-causal"): mode})


WITHOUT_FIXES = {variable(name): "off" for name in ("encoder-adapters", "encoder-padding", "encoder-input-norm")}


@pytest.mark.parametrize("release", slow_but_for(("0.33.0",), ("0.24.0", "0.25.1", "0.28.0", "0.30.0", "0.33.0")))
def test_graphs_of_encoders(release: str) -> None:
    check_behaviours(release, "shadow_encoder", ALL_GRAPHS | WITHOUT_FIXES)


CAPTURES_OFF = {"capture-state": "off", "draft-prefill-state": "off"}


@pytest.mark.parametrize(
    "release",
    slow_but_for(
        ("0.19.1", "0.24.0", "0.33.0"), ("0.19.1", "0.20.2", "0.22.1", "0.24.0", "0.28.0", "0.31.0", "0.33.0")
    ),
)
def test_drafters_of_model_runner_v2(release: str) -> None:
    """A release of each shape, with the fixes that are applied by default."""
    check_behaviours(release, "shadow_drafter", {SHADOW: "1/1"})


@pytest.mark.parametrize(
    ("release", "fixes", "behaviours"),
    [
        *((release, {"draft-idx-mapping": "off"}, "sampled") for release in ("0.19.1", "0.20.2", "0.22.1", "0.24.0")),
        *((release, CAPTURES_OFF, "plan") for release in ("0.19.1", "0.20.2", "0.22.1")),
    ],
)
def test_drafts_of_stock_releases_that_are_wrong_are_mismatches(
    release: str, fixes: dict[str, str], behaviours: str
) -> None:
    modes = {variable(fix): mode for fix, mode in fixes.items()}
    check_behaviours(release, "shadow_drafter", {SHADOW: "1/1", **modes}, select=behaviours)


@pytest.mark.parametrize("release", ["0.21.0", "0.22.1"])
def test_a_draft_prefill_that_is_mended_is_no_mismatch(release: str) -> None:
    check_behaviours(release, "shadow_defects", select="draft-prefill-state")


@pytest.mark.parametrize(
    ("release", "scenarios"),
    [
        ("0.16.0", "mamba-all-mode"),
        *((release, "") for release in ("0.18.1", "0.21.0")),
        ("0.24.0", "draft-non-causal"),
        ("0.33.0", "adaptive-schedule or draft-non-causal"),
        pytest.param("0.22.1", "", marks=pytest.mark.slow),
        pytest.param("0.27.1", "c128a-stride", marks=pytest.mark.slow),
    ],
)
def test_defects_of_stock_releases_are_caught_and_releases_without_them_are_silent(
    release: str, scenarios: str
) -> None:
    """Model runner V1 is checked from 0.15.0 on."""
    off = {variable(fix): "off" for fix in BY_NAME}
    check_behaviours(release, "shadow_defects", off, select=scenarios)


@pytest.mark.parametrize("release", OF_CACHES)
def test_every_setting_of_parallelism_is_in_the_table_which_says_what_is_refused(release: str) -> None:
    """Sizes above 1, and what is enabled; the table is docs/shadow.md's."""
    source = (release_root(release) / "vllm/config/parallel.py").read_text(encoding="utf-8")
    tree, page = ast.parse(source), shadow_table.PAGE.read_text("utf-8")
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ParallelConfig")
    fields = [node.target.id for node in config.body if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (checked|refused)", page, re.MULTILINE)
    listed = {name: outcome for names, outcome in rows for name in re.findall(r"`(\w+)`", names)}
    for field in fields:
        if re.search("_parallel_size$|^enable_", field):
            values = DEFAULTS | {field: 2 if field.endswith("_size") else True}
            assert listed[field] == _what_becomes_of(**values), field
    backends = re.search(r"^All2AllBackend = Literal\[(.*?)^\]", source, re.MULTILINE | re.DOTALL)
    assert backends is not None
    for backend in re.findall(r'"(\w+)"', backends[1]):
        values = DEFAULTS | {"data_parallel_size": 2, "all2all_backend": backend}
        assert listed[backend] == _what_becomes_of(**values), backend
    for kernels in _exchange_tokens_themselves(release):
        assert listed[kernels] == _what_becomes_of(kernels, **DEFAULTS, data_parallel_size=2) == "refused"
        assert _what_becomes_of(kernels, **DEFAULTS) == "checked"


def _exchange_tokens_themselves(release: str) -> set[str]:
    """Kernels of experts: those that vLLM lists, and those that are named as they are."""
    path = release_root(release) / "vllm/config/kernel.py"
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    named = {name for name in re.findall(r'^    "(\w+)",$', source, re.MULTILINE) if "mega_moe" in name}
    listed = re.findall(
        r"^(?:FLASHINFER_MOE_EP|MEGA_MOE)_BACKENDS = frozenset\((.*?)\)", source, re.MULTILINE | re.DOTALL
    )
    constants = dict(re.findall(r'^(FLASHINFER_MOE_EP_\w+) = "(\w+)"', source, re.MULTILINE))
    names = {name for text in listed for name in re.findall(r'"(\w+)"', text)}
    return named | names | {value for name, value in constants.items() if any(name in text for text in listed)}


DEFAULTS: dict[str, Any] = {"is_moe_model": True, "all2all_backend": "allgather_reducescatter"}


def _what_becomes_of(kernels: str = "auto", **parallel: Any) -> str:
    engine: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(),
        kernel_config=SimpleNamespace(moe_backend=kernels),
    )
    return "refused" if unsafe(engine) else "checked"


def test_the_table_of_cache_classes_is_that_of_the_releases() -> None:
    assert shadow_table.main(["--check"]) == 0


def test_the_cache_classes_of_a_new_release_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fetch_vllm.ALL_RELEASES", (*ALL_RELEASES, "99.0.0"))
    assert runpy.run_path(shadow_table.__file__)["RELEASES"] == (*OF_CACHES, "99.0.0")


def test_a_class_that_nobody_has_looked_at_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, text in {
        "models/new/attention.py": "class NewCache(AttentionLayerBase):\n    def get_kv_cache_spec(self): ...\n",
        "models/new/amd/attention.py": "class NewCache(AttentionLayerBase):\n    def get_kv_cache_spec(self): ...\n",
        "v1/kv_cache_interface.py": "",
    }.items():
        file = tmp_path / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr("fetch_vllm.release", lambda _: tmp_path)
    assert shadow_table.main(["--check"]) == 2
    assert "does not know models.new.attention.NewCache: what does" in capsys.readouterr().err
