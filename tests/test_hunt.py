"""The hunt: its design, its shards, its results in a folder, and its verdicts."""

from __future__ import annotations

import functools
import io
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

import warm_python
from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare.report import Report
from vllm_graphfix.commands.hunt import run as hunting
from vllm_graphfix.commands.hunt import twins
from vllm_graphfix.commands.hunt.deployed import read
from vllm_graphfix.commands.hunt.design import (
    DIMENSIONS,
    NAMES,
    ON_TWO_GPUS,
    YOURS,
    Architecture,
    HuntCase,
    around,
    design,
)
from vllm_graphfix.commands.hunt.smaller import Size
from vllm_graphfix.shadow.verdict import TARGET
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify.comparison import Comparison, Judgement, Kind
from vllm_graphfix.verify.engine import device
from vllm_graphfix.verify.engine.device import Device
from vllm_graphfix.verify.engine.exact import ExactRank
from vllm_graphfix.verify.engine.exact_report import ExactReport
from vllm_graphfix.verify.engine.job import COMPILED, EAGER, EngineResult, Job, PoisonPass
from vllm_graphfix.verify.engine.processes import JobResult

RESULT = EngineResult((), {}, {}, None, {"vllm": "0.33.0"}, 1.0, cudagraph_mode="FULL")
EQUAL = Comparison((Judgement(Kind.EQUAL, 64, None),), 0.0, 0.0625)
STEPS = {"steps": 9, "most": {}, "findings": [], "notes": [], "padded": None, "error": None}
POISONED = PoisonPass(("rows",), None, False, (), 0.0, (STEPS,))
DENSE = Architecture("LlamaForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64})
LATENT = Architecture(
    "DeepseekV3ForCausalLM", {"num_attention_heads": 8, "kv_lora_rank": 512, "num_nextn_predict_layers": 1}
)
STATES = Architecture("Mamba2ForCausalLM", {"state_size": 64, "model_type": "mamba2"}, takes_adapters=False)
HYBRID = Architecture("JambaForCausalLM", {"num_attention_heads": 8, "head_dim": 64, "mamba_d_state": 16})
MIXTURE = Architecture("MixtralForCausalLM", {"num_attention_heads": 8, "head_dim": 64, "num_local_experts": 8})
ALL = (DENSE, LATENT, STATES, HYBRID, MIXTURE)


@functools.cache
def every_case() -> list[HuntCase]:
    return list(design(ALL))


def pairs(case: HuntCase) -> set[Any]:
    return set(combinations(case.settings.items(), 2))


def test_each_pair_that_an_architecture_allows_is_in_a_case() -> None:
    cases = every_case()
    made = set.union(*map(pairs, cases))
    missing = {
        pair
        for one, other in combinations(DIMENSIONS, 2)
        for a in DIMENSIONS[one]
        for b in DIMENSIONS[other]
        if (pair := ((one, a), (other, b))) not in made and any(each.allows(dict(pair)) for each in ALL)
    }
    # What a third value forbids: piecewise graphs without torch.compile need breaks, and breaks need the runner V2.
    assert all(
        {("compile", "uncompiled"), ("graphs", "PIECEWISE")} & set(pair) or ("cache", "turboquant_k8v4") in pair
        for pair in missing
    ), missing


def test_each_architecture_has_each_value_that_it_allows() -> None:
    for architecture in ALL:
        cases = [case for case in every_case() if case.architecture == architecture.name]
        for key, names in DIMENSIONS.items():
            allowed = {name for name in names if architecture.allows({key: name})}
            assert {case.settings[key] for case in cases} == allowed


MIXED = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("config", "chosen", "allowed"),
    [
        ({"model_type": "ernie4_5_moe"}, {"drafts": "draft-model"}, False),  # taken for layers of drafts
        ({"model_type": "ernie4_5"}, {"drafts": "draft-model"}, True),
        (MIXED, {"drafts": "draft-model", "runner": "V1"}, False),
        (MIXED, {"drafts": "draft-model", "runner": "V2"}, True),
        ({"sliding_window": 128}, {"drafts": "draft-model", "runner": "V1"}, True),  # one kind of attention
        ({"model_type": "bloom"}, {"attention": "FLEX_ATTENTION"}, False),
        ({"model_type": "bloom"}, {"attention": "TRITON_ATTN"}, True),
        ({"model_type": "falcon", "alibi": True}, {"attention": "FLEX_ATTENTION"}, False),
        ({"model_type": "falcon", "alibi": False}, {"attention": "FLEX_ATTENTION"}, True),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, {"attention": "FLASH_ATTN_MLA"}, False),
    ],
)
def test_what_vllm_is_sure_to_refuse_is_not_allowed(
    config: dict[str, Any], chosen: dict[str, str], allowed: bool
) -> None:
    assert Architecture("Any", {"num_attention_heads": 8, "head_dim": 64, **config}).allows(chosen) is allowed


def test_no_case_comes_twice_and_the_seed_decides_which_there_are() -> None:
    names, few = [case.name for case in every_case()], 50
    assert len(names) == len(set(names))
    first = [[case.name for case in islice(design(ALL, seed), few)] for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]


def test_the_first_cases_have_every_architecture() -> None:
    assert {case.architecture for case in every_case()[: len(ALL)]} == {each.name for each in ALL}


def test_a_value_that_is_left_out_is_in_no_case() -> None:
    assert not any("FLASHINFER" in case.settings.values() for case in design(ALL, leave_out=["FLASHINFER"]))


def test_without_one_rank_each_case_has_two_gpus() -> None:
    cases = list(design(ALL, leave_out=["one-rank"]))
    assert {case.gpus for case in cases} == {2}
    by_ranks: dict[str, set[str]] = {}
    for case in cases:
        by_ranks.setdefault(case.settings["ranks"], set()).add(case.architecture)
    assert by_ranks["tp2"] == {each.name for each in ALL}
    assert by_ranks["tp2-experts"] == {MIXTURE.name}
    assert by_ranks["dcp2"] == {LATENT.name}
    assert by_ranks["dcp2-one-head"] == {DENSE.name}


def test_names_of_values_are_unique() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_a_result_that_an_interrupt_has_cut_is_run_again(tmp_path: Path) -> None:
    (tmp_path / hunting.RESULTS).write_text('{"case": "a", "vllm": "0.33.0"}\n{"case": "b", "vll')
    assert hunting.read_results(tmp_path, "0.33.0").keys() == {"a"}


def test_results_of_another_vllm_are_not_continued(tmp_path: Path) -> None:
    (tmp_path / hunting.RESULTS).write_text('{"case": "a", "vllm": "0.32.0"}\n')
    with pytest.raises(CompareError, match=r"0\.32\.0"):
        hunting.read_results(tmp_path, "0.33.0")


NO_DEVICE = Device(None, "", (0, 0), 0.0, 0.0, "", "", "", "")
MODELS = "vllm/model_executor/models/"
REGISTRY = b"""_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MambaForCausalLM": ("mamba", "MambaForCausalLM"),
    "Own": ("own", "Own"),
}
_MULTIMODAL_MODELS = {"Sees": ("sees", "Sees")}
"""
CONFIGS = Path(__file__).parent / "configs"
FILES = {f"{MODELS}registry.py": REGISTRY, f"{MODELS}llama.py": b"1", f"{MODELS}mamba.py": b"1"}
SOURCE = Source("a vLLM", FILES.get, lambda: "0.33.0")


@pytest.fixture
def hunt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], hunting.Hunted]]:
    """Hunt with results that are made up, and return the cases that ran, too."""
    configs = {each.name: each.config for each in (DENSE, Architecture("MambaForCausalLM", STATES.config))}
    monkeypatch.setattr(twins, "pool", ThreadPoolExecutor)
    monkeypatch.setattr(twins, "default_config", lambda name: configs.get(name, "no class"))
    monkeypatch.setattr(device, "find", lambda: NO_DEVICE)

    def run(**options: Any) -> tuple[list[str], hunting.Hunted]:
        ran: list[str] = []

        def run_case(runner: hunting.CaseRunner, case: HuntCase) -> dict[str, Any]:
            ran.append(case.name)
            return hunting._about(case, runner.hunt.folder, (), Size(16, 192)) | {"verdict": hunting.RIGHT, "why": None}

        monkeypatch.setattr(hunting.CaseRunner, "run", run_case)
        return ran, hunting.run(SOURCE, hunting.Hunt(tmp_path, **options), Console(file=io.StringIO()))

    return run


def test_a_second_call_goes_on_where_the_first_one_ended(hunt: Callable[..., Any]) -> None:
    first, _ = hunt(cases=3)
    second, hunted = hunt(cases=5)
    assert len(first) == 3
    assert len(second) == 2
    assert not set(first) & set(second)
    assert {row["case"] for row in hunted.rows} == {*first, *second}
    assert hunted.without_twin == {"Own": "no class", "Sees": "images are not made"}


def test_shards_have_each_case_once(hunt: Callable[..., Any]) -> None:
    ran = [name for number in (1, 2, 3) for name in hunt(cases=8, shard=(number, 3))[0]]
    assert len(ran) == len(set(ran)) == 8


def test_an_architecture_that_vllm_lacks_is_an_error(hunt: Callable[..., Any]) -> None:
    with pytest.raises(CompareError, match="Unknown"):
        hunt(architectures=["Unknown"])


def test_two_ranks_need_two_gpus(hunt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompareError, match="no value of ranks is left to hunt with on 1 GPU"):
        hunt(leave_out=["one-rank"])
    monkeypatch.setattr(device, "find", lambda: replace(NO_DEVICE, count=2))
    _, hunted = hunt(leave_out=["one-rank"], cases=2)
    assert all(row["settings"]["ranks"] in ON_TWO_GPUS for row in hunted.rows)


def deployed(line: str) -> dict[str, HuntCase]:
    """Return the cases around *line* by what each has besides it."""
    whole, *others = around(read(re.sub(r"\bMODEL\b", str(CONFIGS / "llama-3.1-8b.json"), line), SOURCE))
    return {"": whole} | {case.name.removeprefix(f"{whole.name} "): case for case in others}


def test_the_first_case_has_the_flags_as_they_are_and_its_neighbours_one_other_value() -> None:
    config = json.dumps({"cudagraph_mode": "FULL", "custom_ops": ["none"]})
    flags = ("-tp=2", "--kv-cache-dtype", "fp8", "-cc", config)
    cases = deployed(f"VLLM_USE_V2_MODEL_RUNNER=1 vllm serve MODEL {shlex.join(flags)} --gpu-memory-utilization=0.9")
    assert cases[""].flags == flags
    assert cases[""].environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert (cases[""].gpus, cases["one-rank"].gpus) == (2, 1)
    dotted = ('-cc.custom_ops=["none"]', "-cc.cudagraph_mode=FULL")
    assert cases["one-rank"].flags == (*dotted, "--kv-cache-dtype", "fp8")
    assert cases["auto"].flags == (*dotted, "-tp=2")
    assert cases["FLASHINFER"].flags[2:] == ("--attention-backend", "FLASHINFER", "--kv-cache-dtype", "fp8", "-tp=2")
    assert cases["PIECEWISE"].flags[:2] == (dotted[0], "-cc.cudagraph_mode=PIECEWISE")
    assert cases["V1"].environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert not cases.keys() & {"fp8", "async", "no-drafts", "FLASHMLA"}  # as they are, or refused
    further = [case for case in cases.values() if list(case.settings.values()).count(YOURS) < len(DIMENSIONS) - 1]
    assert further
    assert all({"-tp=2", "fp8", dotted[1]} <= set(case.flags) for case in further)


def test_drafts_of_a_deployment_may_be_ngrams() -> None:
    cases = deployed("""MODEL -sc '{"method": "ngram", "num_speculative_tokens": 2}'""")
    assert cases[""].drafts_ngrams
    assert not deployed("""MODEL -sc '{"method": "mtp", "num_speculative_tokens": 2}'""")[""].drafts_ngrams
    assert not cases["no-drafts"].has_drafts
    assert "-sc" not in cases["no-drafts"].flags


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "--for is empty"),
        ("-tp 2", "the model first"),
        ("MODEL --config a.yaml", "all flags themselves"),
        ("MODEL --enforce-eager", "no graphs to compare"),
        ("no/model", "not in this machine's cache"),
    ],
)
def test_a_deployment_that_cannot_be_read_is_an_error(line: str, why: str) -> None:
    with pytest.raises(CompareError, match=why):
        deployed(line)


def test_a_deployment_is_hunted_alone(hunt: Callable[..., Any]) -> None:
    architecture = read(f"{CONFIGS / 'llama-3.1-8b.json'} --kv-cache-dtype fp8", SOURCE)
    ran, hunted = hunt(deployed=architecture, cases=3)
    assert len(ran) == 3
    assert {row["architecture"] for row in hunted.rows} == {architecture.name}


@pytest.mark.parametrize("changed", ["LlamaForCausalLM", "MambaForCausalLM"])
def test_what_has_changed_comes_first(hunt: Callable[..., Any], changed: str) -> None:
    files = {f"{MODELS}{name}.py": b"1  # a comment" for name in ("llama", "mamba")}
    files[f"{MODELS}{changed[:5].lower()}.py"] = b"2"
    _, hunted = hunt(cases=4, earlier=Source("earlier", files.get, lambda: "0.32.0"))
    assert {row["architecture"] for row in hunted.rows} == {changed}


def test_no_case_begins_when_time_is_up(hunt: Callable[..., Any]) -> None:
    ran, hunted = hunt(cases=2, minutes=0.0)
    assert (ran, hunted.rows, hunted.planned) == ([], [], 2)


def rank(**fields: Any) -> ExactRank:
    made = ExactRank(150, 0, 0, 10, 0.0, 0.0, 0.0, {f"{TARGET} full": 150}, (), None)
    return replace(made, **fields)


@pytest.mark.parametrize(
    ("fields", "verdict", "why"),
    [
        ({}, hunting.RIGHT, None),
        ({"compared": 20, "unseen": 3}, hunting.UNCLEAR, "only 23 replays"),
        ({"compared": 0, "graphs": {}, "unseen": 300}, hunting.UNCLEAR, "no replay of a graph of the target model"),
        ({"compared": 0, "graphs": {}, "unseen": 300, "reason": "it ended"}, hunting.UNCLEAR, "it ended"),
        ({"wrong": 1, "findings": ("rows differ",)}, hunting.WRONG, "rows differ"),
        ({"skipped": 2}, hunting.UNCLEAR, "2 replays could not be judged"),
    ],
)
def test_verdict(fields: dict[str, Any], verdict: str, why: str | None) -> None:
    row = hunting._row_of(Report("m", (), RESULT, RESULT, EQUAL, exact=ExactReport([rank(**fields)])))
    assert row["verdict"] == verdict
    assert (why or "") in (row["why"] or "")
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        ("AssertionError: Workspace is locked", hunting.FAILS),
        ("ValueError: CUDAGraphMode.FULL is not supported with FlexAttention backend", hunting.REFUSED),
        ("did not finish in 300 s", hunting.UNCLEAR),
        ("torch.OutOfMemoryError: CUDA out of memory", hunting.UNCLEAR),
        ("ended with signal 9", hunting.UNCLEAR),
        ("ValueError: Free memory on device cuda:0 (1/139 GiB) is less than desired", hunting.UNCLEAR),
        ("OSError: [Errno 28] No space left on device", hunting.UNCLEAR),
        ("CUDA error: an illegal memory access was encountered", hunting.WRONG),
    ],
)
def test_an_engine_that_ends_with_graphs_alone(error: str, verdict: str) -> None:
    row = hunting._row_of(Report("m", (), RESULT, None, None, error=error))
    assert (row["verdict"], error in row["why"]) == (verdict, True)


def test_an_eagle_head_is_made_for_a_llama_alone_and_named_by_the_config_of_the_case(tmp_path: Path) -> None:
    llama = DENSE._replace(config={**DENSE.config, "model_type": "llama"})
    drafting = [case for case in design([llama, *ALL[1:]]) if case.settings["drafts"] in ("eagle", "draft-model")]
    assert {case.architecture for case in drafting if case.settings["drafts"] == "eagle"} == {llama.name}
    runner = hunting.CaseRunner(SOURCE, hunting.Hunt(tmp_path), ThreadPoolExecutor(1), mock.Mock())
    for case in drafting:
        flags = runner._flags(case)
        drafts = json.loads(flags[flags.index("--speculative-config") + 1])
        assert drafts["model"] == str(tmp_path / hunting.CONFIGS / f"{case.architecture}.json")
        assert case.has_drafts


def test_a_model_that_takes_no_adapters_has_none() -> None:
    adapters = {case.settings["adapters"] for case in every_case() if case.architecture == STATES.name}
    assert adapters == {"no-adapters"}


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ({}, {"adapters-by-number", "breakable", "turboquant_k8v4"}),
        (
            {
                "vllm/envs.py": b"VLLM_USE_BREAKABLE_CUDAGRAPH = False",
                "vllm/config/cache.py": b'DTYPES = "auto", "turboquant_k8v4"',
                "vllm/engine/arg_utils.py": b"_MAMBA_CACHE_MODE_DEPRECATION_MESSAGE = specialize_active_lora",
            },
            {"states-aligned"},
        ),
    ],
)
def test_what_a_release_does_not_have_is_not_tried(files: dict[str, bytes], missing: set[str]) -> None:
    assert set(hunting.without_effect(Source("a vLLM", files.get, lambda: "0.1.0"))) == missing


def test_prompts_of_one_token_wait_until_others_have_ended() -> None:
    """Their first step is one of decodes, where requests whose prompt is done run beside them (prefill-dispatch)."""
    *longer, one, other = hunting.made_prompts(ngrams=False)
    assert len(one) == len(other) == 1 < min(map(len, longer))
    assert len(longer) == int(hunting._COMMON[hunting._COMMON.index("--max-num-seqs") + 1])


def test_prompts_for_ngrams_have_each_token() -> None:
    prompts = hunting.made_prompts(ngrams=True)
    assert all(set(prompt) == set(range(twins.VOCABULARY)) for prompt in prompts)
    assert max(map(len, prompts)) + hunting._TOKENS_WITH_DRAFTS < 1024


def test_a_finding_is_reduced_to_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines are doubles: replays are wrong with an fp8 cache, of at least 3 requests with 50 tokens."""
    monkeypatch.setattr(twins, "make", lambda config, flags, folder: twins.Made(str(folder), tuple(flags), ()))
    hunting.write_inputs(tmp_path, [DENSE])
    assert all((tmp_path / f"{requests}-prompts.jsonl").exists() for requests in (18, 16, 9, 8, 4, 2, 1))
    jobs: list[Job] = []

    def run_engine(case: HuntCase, job: Job) -> JobResult:
        jobs.append(job)
        is_wrong = "fp8" in job.flags and len(job.prompts) >= 3 and max(job.max_tokens) >= 50
        exact = (rank(wrong=1, findings=("rows differ",)) if is_wrong else rank(),)
        result = replace(RESULT, passes=((), ()), exact=exact if job.exact else (), poisoned=(POISONED,))
        return JobResult(job, result, None, tmp_path / "log", 1.0)

    case = next(case for case in design([DENSE]) if "fp8" in case.flags and "ngram" in case.settings.values())
    with ThreadPoolExecutor(1) as makers:
        row = hunting.CaseRunner(SOURCE, hunting.Hunt(tmp_path), makers, run_engine).run(case)
    reduced = row["reduced"]
    assert (row["verdict"], reduced["requests"], reduced["tokens"]) == (hunting.WRONG, 4, 60)
    needed = {key: next(iter(values)) for key, values in DIMENSIONS.items()} | {"cache": "fp8"}
    assert reduced["case"] == HuntCase("LlamaForCausalLM", needed).name
    assert all(part in reduced["command"] for part in ("4-prompts.jsonl", "--max-tokens 60", "--kv-cache-dtype fp8"))
    assert len(jobs) < 50
    assert all(job.poison_last for job in jobs if job.exact)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_engine_fails_if_it_runs_without_graphs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setattr(twins, "make", lambda config, flags, folder: twins.Made(str(folder), tuple(flags), ()))
    hunting.write_inputs(tmp_path, [DENSE])

    def run_engine(case: HuntCase, job: Job) -> JobResult:
        runs = job.mode == EAGER or (job.mode == COMPILED and compiled)
        result = replace(RESULT, passes=((), ())) if runs else None
        return JobResult(job, result, None if runs else "AssertionError: too small", tmp_path / "log", 1.0)

    with ThreadPoolExecutor(1) as makers:
        row = hunting.CaseRunner(SOURCE, hunting.Hunt(tmp_path), makers, run_engine).run(next(design([DENSE])))
    assert row["verdict"] == (hunting.FAILS if compiled else hunting.REFUSED)
    assert "too small" in row["why"]


DEFAULTS = """
import json, sys
from vllm_graphfix.commands.hunt import twins
print(json.dumps({name: twins.default_config(name) for name in sys.argv[1:]}))
"""


def test_configs_of_defaults_become_twins(tmp_path: Path) -> None:
    names = ("LlamaForCausalLM", "FalconH1ForCausalLM", "BloomForCausalLM", "GPT2LMHeadModel", "MiniCPM3ForCausalLM")
    others = ("LongcatFlashForCausalLM", "KimiLinearForCausalLM", "ChatGLMModel", "InklingForCausalLM")
    command = [warm_python.executable(), "-c", DEFAULTS, *names, *others]  # which has imported transformers
    configs = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert "no class" in configs.pop("ChatGLMModel")
    assert "tokenizer" in configs.pop("InklingForCausalLM")
    for name, config in configs.items():
        assert isinstance(config, dict), config
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        made = twins.make(path, (), tmp_path / name)
        assert made.why_not is None, made
