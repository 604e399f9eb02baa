"""Jobs of each case: three engines that differ only in graphs and fixes.

They are described in words that every affected release knows.
"""

from __future__ import annotations

import ast
import itertools
import sys
from dataclasses import field, make_dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edited import stock_source
from stock import ALL_RELEASES, release_root
from table import PAIRS
from vllm_graphfix.fix import Fix
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.settings import environment
from vllm_graphfix.verify import gpu_proof
from vllm_graphfix.verify.engine import extension
from vllm_graphfix.verify.engine.case import MODES, Case
from vllm_graphfix.verify.engine.job import EAGER, GRAPHS, Job
from vllm_graphfix.verify.engine.llm import start_engine
from vllm_graphfix.verify.engine.models import MODELS, VOCABULARY
from vllm_graphfix.verify.engine.probes import probe_of
from vllm_graphfix.verify.trial import further_cases, trial_of

FOLDER = Path("models")
FIRST = {fix.name: case for fix in BY_NAME.values() if (case := trial_of(fix.name).case) is not None}
FURTHER = {f"{fix.name} {case.name}": case for fix in BY_NAME.values() for case in further_cases(fix.name)}
CASES = FIRST | FURTHER
"""By name of the fix; a further one of the same fix by its own name too."""
FIXES = pytest.mark.parametrize("name", CASES)


def fix_of(name: str) -> Fix:
    return BY_NAME[name.partition(" ")[0]]


def shows_on(name: str, release: str) -> bool:
    shows_on = CASES[name].shows_on
    return shows_on is None or shows_on(stock_source(release_root(release)))


ON_RELEASES = pytest.mark.parametrize(
    ("name", "release"),
    [
        (name, release)
        for name in CASES
        for fix, release in PAIRS
        if fix == fix_of(name).name and shows_on(name, release)
    ],
)


EACH_RELEASE = pytest.mark.parametrize("release", sorted({release for _, release in PAIRS}))


def jobs_of(case: Case) -> dict[str, Job]:
    return dict(zip(MODES, case.jobs(FOLDER), strict=True))


def test_every_fix_has_a_case_of_its_own() -> None:
    assert list(FIRST) == [fix.name for fix in BY_NAME.values() if trial_of(fix.name).case is not None]
    assert {fix_of(name).name for name in FURTHER} <= set(FIRST)
    assert len({case.name for case in CASES.values()}) == len(CASES)


@FIXES
def test_the_models_and_probes_of_a_case_exist(name: str) -> None:
    case = CASES[name]
    assert {case.model, case.draft} - {None} <= set(MODELS)
    assert all(callable(probe_of(name)) for name in case.probes)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.judge is not None])
def test_a_judge_whose_probe_saw_nothing_says_what_it_should_have_seen(name: str) -> None:
    judge = CASES[name].judge
    assert judge is not None
    verdict = judge({})
    assert verdict.unseen
    assert verdict.numbers
    assert not verdict.numbers.endswith((";", "; ", "."))
    assert len(verdict.right) == len(verdict.observed) > 0
    assert not verdict.hangs
    assert "inf" not in verdict.summary


@FIXES
def test_the_three_engines_of_a_case_differ_in_mode_switch_and_repetition_alone(name: str) -> None:
    jobs = jobs_of(CASES[name])
    assert {mode: (job.mode, job.environment[environment.PREFIX], job.extra_passes) for mode, job in jobs.items()} == {
        "eager": (EAGER, "off", True),
        "stock": (GRAPHS, "off", False),
        "patched": (GRAPHS, "on", False),
    }
    rest = [
        (
            job.arguments,
            job.prompts,
            job.max_tokens,
            job.probes,
            job.prompt_logprobs,
            {**job.environment, environment.PREFIX: ""},
        )
        for job in jobs.values()
    ]
    assert rest[0] == rest[1] == rest[2]
    assert [job.name for job in jobs.values()] == [f"{CASES[name].name} {mode}" for mode in MODES]


@FIXES
def test_watched_engines_are_stock_and_patched_and_stock_has_every_fix_off(name: str) -> None:
    case = CASES[name]
    off = dict.fromkeys((fix.variable for fix in BY_NAME.values()), "off")
    for mode, watched, modes in zip(("stock", "patched"), case.watched_jobs(FOLDER), (off, {}), strict=True):
        job = jobs_of(case)[mode]
        assert watched.environment == {**job.environment, **modes, environment.PREFIX: "on", environment.SHADOW: "1/1"}
        assert (watched.arguments, watched.prompts, watched.probes) == (job.arguments, job.prompts, ())
    assert not case.watched or "FULL" in case.graphs["cudagraph_mode"], "there is nothing to check"


@FIXES
def test_what_the_user_has_set_about_fixes_does_not_reach_the_engines(name: str) -> None:
    for job in jobs_of(CASES[name]).values():
        omitted = {variable for variable, value in job.environment.items() if value is None}
        modes = {fix.variable for fix in BY_NAME.values()}
        assert omitted == set(environment.names(BY_NAME)) - {environment.PREFIX} - modes
        assert {job.environment[variable] for variable in modes} == {"auto"}


@FIXES
def test_the_model_runner_is_the_one_that_the_fix_is_for(name: str) -> None:
    runner = fix_of(name).runner or CASES[name].runner
    for job in jobs_of(CASES[name]).values():
        assert job.environment["VLLM_USE_V2_MODEL_RUNNER"] == {"V1": "0", "V2": "1"}[runner]


@FIXES
def test_engines_need_no_network_no_tokenizer_and_one_process(name: str) -> None:
    for job in jobs_of(CASES[name]).values():
        assert (job.environment["HF_HUB_OFFLINE"], job.arguments["skip_tokenizer_init"]) == ("1", True)
        assert job.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "probes see what is in their own process"


@FIXES
def test_the_extension_that_is_named_is_there(name: str) -> None:
    for job in jobs_of(CASES[name]).values():
        module, _, attribute = job.arguments["worker_extension_cls"].rpartition(".")
        assert module == extension.__name__
        assert callable(getattr(extension, attribute).graphfix_states)


@FIXES
def test_model_and_draft_are_folders_below_the_folder_of_models(name: str) -> None:
    case = CASES[name]
    for job in jobs_of(case).values():
        assert job.arguments["model"] == str(FOLDER / case.model)
        draft = job.arguments.get("speculative_config", {}).get("model")
        assert draft == (None if case.draft is None else str(FOLDER / case.draft))


def test_the_folder_of_one_call_does_not_stay_in_the_next() -> None:
    case = CASES["draft-decode-mode"]
    case.jobs(Path("elsewhere"))
    assert case.jobs(FOLDER)[0].arguments["speculative_config"]["model"] == str(FOLDER / "eagle")


@FIXES
def test_prompts_are_token_ids_of_the_workloads_lengths_and_reproducible(name: str) -> None:
    case = CASES[name]
    job = case.jobs(FOLDER)[0]
    assert [(len(prompt), count) for prompt, count in zip(job.prompts, job.max_tokens, strict=True)] == [*case.workload]
    assert all(isinstance(token, int) and 0 < token < VOCABULARY for prompt in job.prompts for token in prompt)
    assert len(set(job.prompts)) == len(job.prompts)
    assert case.jobs(FOLDER)[0].prompts == job.prompts


@FIXES
def test_prompts_and_answers_fit_the_engine(name: str) -> None:
    case = CASES[name]
    arguments = case.jobs(FOLDER)[0].arguments
    assert max(map(sum, case.workload)) <= arguments["max_model_len"]
    assert arguments["max_model_len"] <= MODELS[case.model][0].get("max_position_embeddings", 1 << 20)
    assert len(case.workload) <= arguments["max_num_seqs"] or arguments["max_num_seqs"] == 1, (
        "all at once, or each alone"
    )


def _ends(case: Case) -> list[int]:
    """The step in which each request has its last token, where decodes come before prompts, and these in order."""
    computed = _computed(case)
    return [computed[number] + tokens - 1 for number, (_, tokens) in enumerate(case.workload)]


def _computed(case: Case) -> list[int]:
    """The step in which each prompt is computed to its end, and its first token is there."""
    budget = case.arguments.get("max_num_batched_tokens", sum(length for length, _ in case.workload))
    remaining = [length for length, _ in case.workload]
    completed = [0] * len(remaining)
    for step in itertools.count(1):
        room = budget - sum(map(bool, completed))
        for number, length in enumerate(remaining):
            taken = min(room, length)
            remaining[number] -= taken
            room -= taken
            if length and not remaining[number]:
                completed[number] = step
        if not any(remaining):
            return completed
    raise AssertionError


@pytest.mark.parametrize("name", ["c128a-stride", "compressor-skip"])
def test_each_request_completes_a_group_of_128_tokens_in_a_step_without_prompts(name: str) -> None:
    case = CASES[name]
    computed, ends = _computed(case), _ends(case)
    for (length, _), first, end in zip(case.workload, computed, ends, strict=True):
        assert length >= 128, "a group is there from the beginning"
        decoded = range(length + max(computed) - first + 1, length + end - first + 1)
        assert any(tokens % 128 == 0 for tokens in decoded)


@FIXES
def test_some_batches_are_between_the_sizes_of_the_graphs(name: str) -> None:
    """Cases of a padding defect have padded batches; in others every batch has a graph of its size."""
    case = CASES[name]
    arguments = case.jobs(FOLDER)[0].arguments
    drafts = arguments.get("speculative_config", {}).get("num_speculative_tokens", 0)
    sizes = case.graphs["cudagraph_capture_sizes"]
    requests = range(1, len(case.workload) + 1)
    # Answers of one length, or that end in one step, end together: the batch is full, or there is none.
    together = 1 in (len({count for _, count in case.workload}), len(set(_ends(case))))
    batches = {
        count * (1 if case.graphs["cudagraph_mode"] == "PIECEWISE" else drafts + 1)
        for count in (requests[-1:] if together else requests)
    }
    padded = {batch for batch in batches if batch not in sizes}
    assert max(batches) <= max(sizes)
    assert bool(padded) == case.padded


def test_scored_prompts_are_as_long_as_graphs_are_large_and_each_is_alone() -> None:
    """Otherwise eager would compute in other shapes, with other kernels, and be as far from itself as from a defect."""
    scored = {name: case for name, case in CASES.items() if case.prompt_logprobs}
    assert scored
    for case in scored.values():
        sizes = case.graphs["cudagraph_capture_sizes"]
        assert case.arguments["max_num_seqs"] == 1
        assert {length for length, _ in case.workload} == set(sizes) - {
            1 + case.arguments["speculative_config"]["num_speculative_tokens"]
        }
        assert max(length for length, _ in case.workload) == max(sizes)
        assert (case.graphs["cudagraph_mode"], case.graphs["backend"]) == ("PIECEWISE", "eager")


def test_prompts_are_scored_with_one_draft_token_where_more_change_the_lengths() -> None:
    """Up to 0.18.1 eager is not the same twice with more draft tokens.

    What the drafter counts up is what the target's lengths are copied from.
    """
    case = CASES["prompt-logprobs"]
    for release in ALL_RELEASES:
        runs = case.on(stock_source(release_root(release)))
        drafted = {job.arguments["speculative_config"]["num_speculative_tokens"] for job in runs.jobs(FOLDER)}
        assert drafted == {1 if ALL_RELEASES.index(release) < ALL_RELEASES.index("0.19.0") else 3}
        assert runs.arguments | {"speculative_config": 0} == case.arguments | {"speculative_config": 0}


@FIXES
def test_a_job_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    for job in CASES[name].jobs(FOLDER):
        job.write(tmp_path / "job")
        assert Job.read(tmp_path / "job") == job


@ON_RELEASES
def test_a_release_on_which_a_case_is_right_on_stock_too_skips_it(name: str, release: str) -> None:
    """Before 0.19.0 a prompt of one token is a decode to Mamba layers without graphs too.

    Before 0.30.0 DeepSeek V4 leaves out no entries on model runner V2.
    """
    skipped = gpu_proof._what_is_missing(replace(CASES[name], needs=None), stock_source(release_root(release)))
    early = ALL_RELEASES.index(release) < ALL_RELEASES.index("0.19.0")
    if name == "prefill-dispatch" and early:
        assert skipped is not None
        assert "GDN" in skipped
        assert "--device cpu" in skipped
    elif name == "compressor-skip" and ALL_RELEASES.index(release) < ALL_RELEASES.index("0.30.0"):
        assert skipped is not None
        assert "microbatches" in skipped
        assert "--device cpu" in skipped
    else:
        assert skipped is None


def test_one_token_prompts_run_on_model_runner_v2_where_it_ignores_the_phase() -> None:
    """0.21.0 - 0.22.1 have the code and refuse such models, 0.28.0 has the remedy."""
    (name,) = (name for name in FURTHER if fix_of(name).name == "prefill-dispatch" and CASES[name].runner == "V2")
    releases = [release for release in ALL_RELEASES if shows_on(name, release)]
    assert releases == ["0.23.0", "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1"]


@pytest.mark.parametrize(("fix", "first"), [("flash-mixed-schedule", "0.18.0"), ("active-lora-count", "0.24.0")])
def test_the_further_case_shows_on_model_runner_v2_from_some_release_on(fix: str, first: str) -> None:
    """0.18.0 pads before it schedules, 0.24.0 counts adapters."""
    (name,) = (each for each in FURTHER if fix_of(each).name == fix)
    assert CASES[name].runner == "V2"
    releases = [release for release in ALL_RELEASES if shows_on(name, release)]
    assert releases == list(ALL_RELEASES[ALL_RELEASES.index(first) :])


def test_a_job_with_flags_and_text_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(
        "one", GRAPHS, flags=("--model", "ünï"), prompts=("text", (1, 2)), generated=3, max_tokens=(4,), extra_passes=1
    )
    job.write(tmp_path / "job")
    assert Job.read(tmp_path / "job") == job


def test_arguments_that_a_release_does_not_support_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a double of vLLM that hands back what its engine is given."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **arguments: arguments))
    monkeypatch.setitem(sys.modules, "vllm.engine", SimpleNamespace())
    fields = [("moe_backend", str, "auto"), ("kernel_config", dict, field(default_factory=dict))]
    arguments = make_dataclass("EngineArgs", fields)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=arguments))
    known = {"moe_backend": "triton", "kernel_config": {"enable_jit_warmup": False}}
    job = Job("one", GRAPHS, arguments={"model": "m"}, supported_arguments=known | {"of_another": 1})
    assert start_engine(job) == {"model": "m"} | known
    assert job.arguments == {"model": "m"}


@cache
def parsed(release: str, path: str) -> ast.Module:
    return ast.parse((release_root(release) / path).read_text())


def parameters(release: str, path: str, qualname: str) -> set[str]:
    """Fields of a dataclass of a stock release, or parameters of one of its functions, without importing it."""
    body: list[ast.stmt] = parsed(release, path).body
    node: Any = None
    for name in qualname.split("."):
        node = next(
            child for child in body if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and child.name == name
        )
        body = node.body
    if isinstance(node, ast.FunctionDef):
        return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return {
        child.target.id for child in body if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }


@ON_RELEASES
def test_every_affected_release_knows_the_arguments(name: str, release: str) -> None:
    """An unknown one would end the engine."""
    job = CASES[name].jobs(FOLDER)[0]
    engine = parameters(release, "vllm/engine/arg_utils.py", "EngineArgs")
    assert len(engine) > 100
    assert set(job.arguments) | {"enforce_eager"} <= engine
    compilation = parameters(release, "vllm/config/compilation.py", "CompilationConfig")
    assert set(job.arguments["compilation_config"]) <= compilation
    attention = parameters(release, "vllm/config/attention.py", "AttentionConfig")
    assert set(job.arguments.get("attention_config", {})) <= attention
    speculation = parameters(release, "vllm/config/speculative.py", "SpeculativeConfig")
    assert set(job.arguments.get("speculative_config", {})) <= speculation


def test_mixtures_of_experts_have_tritons_kernels_where_there_is_a_choice() -> None:
    """FlashInfer's, which 0.20.0 would choose, are compiled for minutes, and some of them use no workspace."""
    job = CASES["workspace-growth"].jobs(FOLDER)[0]
    assert job.supported_arguments == {"moe_backend": "triton", "enable_flashinfer_autotune": False}
    for release, known in (("0.16.0", False), ("0.17.0", True), ("0.20.0", True), ("0.29.0", True)):
        assert ("moe_backend" in parameters(release, "vllm/engine/arg_utils.py", "EngineArgs")) is known


@EACH_RELEASE
def test_every_affected_release_knows_the_variables(release: str) -> None:
    known = (release_root(release) / "vllm" / "envs.py").read_text()
    named = {name for case in CASES.values() for job in case.jobs(FOLDER) for name in job.environment}
    unknown = {name for name in named if name.startswith("VLLM_") and f'"{name}"' not in known}
    assert unknown == set(environment.names(BY_NAME))


@EACH_RELEASE
def test_methods_that_are_called_in_workers_exist(release: str) -> None:
    sampling = parameters(release, "vllm/sampling_params.py", "SamplingParams")
    assert {"temperature", "max_tokens", "ignore_eos", "detokenize", "logprobs", "prompt_logprobs"} <= sampling
    generate = parameters(release, "vllm/entrypoints/llm.py", "LLM.generate")
    assert {"prompts", "sampling_params", "use_tqdm", "lora_request"} <= generate
    request = parameters(release, "vllm/lora/request.py", "LoRARequest")
    assert {"lora_name", "lora_int_id", "lora_path"} <= request


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.adapters])
def test_a_batch_has_rows_of_every_adapter_and_of_none_and_its_graph_lacks_one(name: str) -> None:
    """vLLM has graphs for 1, 2, 4, … adapters, captured with as many, and one for more than there are."""
    case = CASES[name]
    assert len(case.adapters) == len(case.workload)
    adapters, none = set(case.adapters) - {None}, case.adapters.count(None)
    assert len(adapters) == case.arguments["max_loras"] in (1, 2, 4, 8)
    assert len({case.adapters.count(adapter) for adapter in adapters}) == 1, "any of them may be left out"
    assert 0 < none < len(case.workload) / 2
    assert sum(length for length, _ in case.workload) < 128, "in larger steps the kernels add up in more parts"


@FIXES
def test_jobs_name_the_folders_of_the_adapters_prompt_by_prompt(name: str) -> None:
    case = CASES[name]
    for job in case.jobs(FOLDER):
        assert job.adapters == tuple(adapter and str(FOLDER / adapter) for adapter in case.adapters)
    assert set(filter(None, case.adapters)) <= set(case.models)


def test_engines_that_may_hang_start_first_then_one_of_each_compiling_case() -> None:
    cases = [CASES[name] for name in ("capture-state", "indexer-padding", "mamba-padding")]
    jobs = [job for case in cases for job in case.jobs(Path("models"))]
    compiling = {case.name for case in cases if case.compiles}
    turns = sorted(jobs, key=lambda job: gpu_proof._start_order(job, compiling=job.name.split()[0] in compiling))
    assert [job.name for job in turns] == [
        "sparse-mtp stock",
        "sparse-mtp eager",
        "mamba2 eager",
        "mla eager",
        "sparse-mtp patched",
        "mamba2 stock",
        "mamba2 patched",
        "mla stock",
        "mla patched",
    ]


def test_where_a_model_is_not_compiled_nothing_else_is() -> None:
    for name in ("capture-state", "prompt-logprobs"):
        case = CASES[name]
        disabled = {job.environment.get("TORCHDYNAMO_DISABLE") for job in case.jobs(Path("models"))}
        assert disabled == {"1" if case.graphs["mode"] == 0 else None}


def test_with_the_fixes_an_engine_has_longer_until_it_passes_for_one_that_hangs() -> None:
    eager, stock, patched = CASES["indexer-padding"].jobs(Path("models"))
    assert eager.seconds is None
    assert stock.seconds is not None
    assert patched.seconds is not None
    assert patched.seconds >= 2 * stock.seconds
