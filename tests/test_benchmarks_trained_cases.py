"""The cases of the benchmark of trained models, as far as they need no engine: what is run, and its figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarked import GPU
from stock import release_root

# isort: split
import trained
from measuring import trained_figures, trained_recipes
from measuring.trained_cases import CASES, EXACT, SCORED, TEXT, Trained
from measuring.trained_questions import Question
from measuring.trained_tasks import BEGUN, song
from vllm_graphfix.verify.comparison import Answer
from vllm_graphfix.verify.engine.device import Device
from vllm_graphfix.verify.engine.job import EAGER, GRAPHS, EngineResult, Job
from vllm_graphfix.verify.engine.probes import probe_of
from vllm_graphfix.verify.engine.processes import JobResult

# -- what is run


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, device: Device = GPU) -> int:
    monkeypatch.setattr("vllm_graphfix.verify.engine.device.find", lambda: device)
    monkeypatch.setattr(sys, "argv", ["trained.py", *arguments])
    return trained.main()


def test_a_case_that_does_not_exist_is_an_error_that_names_those_that_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--out", "x", "--only", "chatt@0.33.0")
    assert "no case is named chatt; there are chat, " in capsys.readouterr().err


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nothing = Device(None, "torch sees no GPU", (0, 0), 0.0, 0.0, "unknown", "0", "none", "0")
    site = f"0.33.0={release_root('0.33.0')}"
    assert run(monkeypatch, "--out", str(tmp_path), "--site", site, device=nothing) == 2
    assert capsys.readouterr().err.startswith("not run: no GPU (torch sees no GPU)")


@pytest.mark.parametrize(
    ("release", "case", "why"),
    [
        ("0.33.0", "mamba2-walk", "this vLLM is not affected"),
        ("0.18.1", "mamba2-song", "on this vLLM Mamba layers treat every one-token row as a decode"),
        ("0.33.0", "chat", "needs --smollm2"),
    ],
)
def test_what_cannot_be_run_is_listed_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, case: str, why: str
) -> None:
    site = f"{release}={release_root(release)}"
    assert run(monkeypatch, "--out", str(tmp_path), "--site", site, "--only", f"{case}@{release}") == 2
    (result,) = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert (result["case"], result["release"]) == (case, release)
    assert result["not_run"].startswith(why)


def test_another_release_of_a_case_than_was_chosen_is_not_mentioned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = [part for release in ("0.21.0", "0.33.0") for part in ("--site", f"{release}={release_root(release)}")]
    run(monkeypatch, "--out", str(tmp_path), *options, "--only", "chat@0.21.0")
    runs = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert [each["release"] for each in runs] == ["0.21.0"]


def test_only_the_second_pass_is_sent_in_waves() -> None:
    from measuring.in_waves import ThenInWaves

    class Engine:
        def __init__(self) -> None:
            self.batches: list[list[int]] = []

        def generate(self, prompts: list[int], sampling: list[int], **_: Any) -> list[int]:
            self.batches.append(prompts)
            return [prompt * 10 for prompt in prompts]

    engine: Any = Engine()
    ThenInWaves({}, lambda: None).in_the_engine(engine)
    answers = [engine.generate([1, 2, 3, 4], [0] * 4) for _ in range(2)]
    assert answers == [[10, 20, 30, 40]] * 2
    assert engine.batches == [[1, 2, 3, 4], [1, 2, 3], [4]]


@pytest.mark.parametrize(("name", "sizes"), [("InWaves", [3, 3, 3]), ("InFours", [4, 4, 1]), ("InEights", [8, 1])])
def test_a_wave_is_sent_with_its_own_adapters(name: str, sizes: list[int]) -> None:
    class Engine:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def generate(self, prompts: list[int], sampling: list[int], *, lora_request: list[int], **_: Any) -> list[int]:
            assert lora_request == prompts == sampling
            self.sizes.append(len(prompts))
            return prompts

    engine: Any = Engine()
    probe_of(f"measuring.in_waves:{name}")({}, lambda: None).in_the_engine(engine)
    nine = list(range(9))
    assert engine.generate(nine, nine, lora_request=nine, use_tqdm=False) == nine
    assert engine.sizes == sizes


def case_of(name: str) -> Trained:
    return next(each for each in CASES if each.name == name)


def test_engines_with_trained_models_differ_in_graphs_and_fixes_alone(tmp_path: Path) -> None:
    (tmp_path / "mamba2").mkdir()
    (tmp_path / "mamba2" / "trained.json").write_text('{"symbols": 40}')
    eager, stock, patched = case_of("mamba2-walk").jobs(tmp_path, "/site")
    assert (eager.mode, stock.mode, patched.mode) == (EAGER, GRAPHS, GRAPHS)
    assert (stock.environment["VLLM_GRAPHFIX"], patched.environment["VLLM_GRAPHFIX"]) == ("off", "on")
    assert eager.prompts == stock.prompts == patched.prompts
    assert stock.arguments == patched.arguments
    assert stock.arguments["max_num_batched_tokens"] * 4 < max(map(len, stock.prompts)), "prefilled in chunks"


def in_models(folder: Path, name: str, symbols: int) -> Path:
    """The folder of models, with what a training writes last of the model *name*."""
    (folder / name).mkdir()
    (folder / name / "trained.json").write_text(json.dumps({"symbols": symbols}))
    return folder


@pytest.mark.parametrize("symbols", [20, 12])
def test_requests_of_each_adapter_and_of_none_are_in_every_batch_and_end_together(tmp_path: Path, symbols: int) -> None:
    case, models = case_of("llama-lora-sort"), in_models(tmp_path, "llama", symbols)
    eager, stock, patched = case.jobs(models, "/site")
    assert eager.adapters == stock.adapters == patched.adapters
    assert len(stock.adapters) == len(stock.prompts)
    folders = {None, str(models / "llama" / "sort_down"), str(models / "llama" / "repeat")}
    for at in range(0, len(stock.prompts), 8):
        assert set(stock.adapters[at : at + 8]) == folders
    assert len(set(stock.max_tokens)) == 1
    assert stock.arguments["specialize_active_lora"]
    tasks: dict[str | None, Callable[[list[str]], list[str]]] = {
        None: sorted,
        "llama/sort_down": lambda letters: sorted(letters, reverse=True),
        "llama/repeat": list,
    }
    for question in case.questions(models):
        assert question.right is not None
        letters = question.prompt[:-1].split(",")
        assert question.right.rstrip(".") == "".join(tasks[question.adapter](letters))
        assert len(letters) > 1, "an adapter's answer is another one than the model's"
    rehearsed = case.jobs(models, "/site", rehearse=True)[0]
    assert set(rehearsed.adapters) == folders
    assert len(rehearsed.prompts) == 3


def test_prompts_of_passages_show_their_defects(tmp_path: Path) -> None:
    llama, mamba, scored = (case_of(name) for name in ("llama-docs", "mamba2-docs", "llama-docs-scored"))
    _, stock, _ = llama.jobs(tmp_path, "/site")
    largest = max(llama.case.graphs["cudagraph_capture_sizes"])
    assert stock.arguments["max_num_seqs"] * len(stock.prompts[0]) > largest, "the first prompts are in no graph"
    assert stock.arguments["attention_config"] == {"backend": "FLASH_ATTN"}
    assert {len(question.ids) for question in mamba.questions(tmp_path)} == {1}
    questions, (_, stock, _) = scored.questions(tmp_path), scored.jobs(tmp_path, "/site")
    sizes = scored.case.graphs["cudagraph_capture_sizes"]
    assert stock.prompt_logprobs
    assert stock.arguments["speculative_config"]["model"] == stock.arguments["model"]
    assert {len(question.ids) for question in questions} <= set(sizes)
    assert max(len(question.ids) for question in questions) < max(sizes), "a draft model is given one token more"
    assert all(question.unscored < len(question.ids) for question in questions)
    drafted = case_of("mla-mtp-docs-scored")
    assert drafted.questions(tmp_path) == questions
    assert {len(question.ids) for question in questions} <= set(drafted.case.graphs["cudagraph_capture_sizes"])
    mtp = case_of("mla-mtp-docs").jobs(tmp_path, "/site")[1]
    assert mtp.prompts == tuple(tuple(prompt.encode()) for prompt, _ in BEGUN)
    assert mtp.arguments["speculative_config"]["method"] == "mtp"


@pytest.mark.parametrize("symbols", [40, 12])
def test_walks_beside_steps_of_an_idle_rank_are_no_longer_than_those_of_the_training(
    tmp_path: Path, symbols: int
) -> None:
    models = in_models(tmp_path, "mamba2", symbols)
    questions = case_of("mamba2-idle").questions(models)
    recipe = trained_recipes.RECIPES["mamba2"]
    length = recipe.width * symbols + 2 + symbols
    assert all(len(question.ids) + question.tokens <= length for question in questions)
    for at in range(0, len(questions), 4):
        singer, *walks = questions[at : at + 4]
        assert singer.prompt + (singer.right or "") == singer.prompt[0] + song(singer.prompt[0])
        assert len(singer.ids) > 1, "no prompt of one token"
        # The last one of those that go on takes the first row.
        assert [each.tokens for each in walks] == sorted((each.tokens for each in walks), reverse=True)


def test_steps_of_an_idle_rank_come_between_those_of_walks_as_in_verify(tmp_path: Path) -> None:
    for job in case_of("mamba2-idle").jobs(in_models(tmp_path, "mamba2", 40), "/site"):
        assert "blocks-changed-by-an-idle-step" in job.probes
        assert not job.poison_last


@pytest.mark.parametrize("name", ["mla-mtp-drawn-sort", "mla-fp8-padded-sort"])
def test_of_each_eight_one_after_the_other_ends(tmp_path: Path, name: str) -> None:
    case = case_of(name)
    models = in_models(tmp_path, case.case.model, 62)
    jobs = case.jobs(models, "/site")
    for job in jobs:
        assert "measuring.in_waves:InEights" in job.probes
        assert job.sampled == (name == "mla-mtp-drawn-sort")
        for at in range(0, len(job.max_tokens), 8):
            assert len(set(job.max_tokens[at : at + 8])) == 8
    assert max(jobs[0].max_tokens) == 62


def test_prompts_of_a_state_for_each_block_go_on_in_a_second_one_and_end_there(tmp_path: Path) -> None:
    models = in_models(tmp_path, "granite", trained_recipes.RECIPES["granite"].symbols)
    case = case_of("granite-walk")
    for question in case.questions(models):
        assert 128 + 8 < len(question.ids) < 256 - question.tokens
        pairs = {pair[0]: pair[1] for pair in question.prompt.split(" ")[:-1]}
        assert set(question.right or "") == set(pairs.values()), "each pair is met"
    for job in case.jobs(models, "/site"):
        assert job.arguments["enable_prefix_caching"]
        assert job.supported_arguments["mamba_cache_mode"] == "all"
        assert len(set(map(len, job.prompts))) == 1
        assert len(job.prompts) % 8 == 0, "no batch is padded"


@pytest.mark.parametrize("name", ["deepseek-v4-chorus", "deepseek-v4-stride-chorus", "deepseek-v4-docs"])
def test_singers_of_one_batch_have_prompts_and_answers_of_one_length(tmp_path: Path, name: str) -> None:
    models = in_models(tmp_path, case_of(name).case.model, 40)
    questions = case_of(name).questions(models)
    assert len({question.prompt[0] for question in questions}) == len(questions) == 24
    for at in range(0, len(questions), 8):
        assert len({(len(question.ids), question.tokens) for question in questions[at : at + 8]}) == 1
    assert all(len(question.ids) < 128 < len(question.ids) + question.tokens for question in questions)


def test_what_a_cpu_engine_cannot_run_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = (
        "--out",
        str(tmp_path),
        "--rehearse",
        "--site",
        f"0.16.0={release_root('0.16.0')}",
        "--only",
        "granite-walk",
    )
    monkeypatch.setattr(trained.Benchmark, "_training", lambda *_: nullcontext({}))
    assert run(monkeypatch, *options) == 2
    (result,) = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert result["not_run"] == "a CPU engine cannot run it"
    ranks = case_of("llama-dcp-sort").jobs(in_models(tmp_path, "llama-one-head", 12), "/site", rehearse=True)
    assert not any("parallel" in name for job in ranks for name in job.arguments)


def test_a_case_of_two_gpus_is_not_run_on_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = f"0.19.1={release_root('0.19.1')}"
    options = ("--out", str(tmp_path), "--site", site, "--only", "llama-dcp-sort")
    monkeypatch.setattr(trained.Benchmark, "_training", lambda *_: nullcontext({}))
    assert run(monkeypatch, *options) == 2
    (result,) = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert result["not_run"] == "needs 2 GPUs"
    assert run(monkeypatch, *options, device=replace(GPU, count=2)) == 2
    (result,) = json.loads((tmp_path / trained.RESULT).read_text())["runs"]
    assert result["not_run"].startswith("the model could not be trained")


def test_scored_prompts_that_end_in_their_answer_are_as_long_as_graphs_are_large(tmp_path: Path) -> None:
    (tmp_path / "mla-mtp").mkdir()
    (tmp_path / "mla-mtp" / "trained.json").write_text('{"symbols": 62}')
    scored = case_of("mla-mtp-scored")
    questions = scored.questions(tmp_path)
    assert {len(question.ids) for question in questions} <= set(scored.case.graphs["cudagraph_capture_sizes"])
    for question in questions:
        prompt, answer = question.prompt[: question.unscored], question.prompt[question.unscored :]
        assert prompt.endswith(":")
        assert answer.rstrip(".") == "".join(sorted(prompt[:-1].split(",")))


def test_mtp_is_run_on_a_vllm_without_its_defect_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = f"0.33.0={release_root('0.33.0')}"
    options = ("--out", str(tmp_path), "--site", site, "--only", "mla-mtp-sort", "--only", "mla-mtp-fp8-sort")
    monkeypatch.setattr(trained.Benchmark, "_training", lambda *_: nullcontext({}))
    assert run(monkeypatch, *options) == 2
    runs = {each["case"]: each for each in json.loads((tmp_path / trained.RESULT).read_text())["runs"]}
    assert runs["mla-mtp-fp8-sort"]["not_run"] == "this vLLM is not affected"
    assert runs["mla-mtp-sort"]["not_run"].startswith("the model could not be trained")
    assert runs["mla-mtp-sort"]["affected"] is False


# -- figures


def ended(
    mode: str,
    texts: tuple[str, ...],
    error: str | None = None,
    logprob: float = -0.5,
    drafts: tuple[int, int] | None = (3, 4),
) -> JobResult:
    answers = tuple(
        Answer(tuple(text.encode()), tuple({token: logprob, 0: -9.0} for token in text.encode())) for text in texts
    )
    states = {"0": {"mamba-padding": "active" if mode == "patched" else "off"}}
    output = EngineResult((answers,), states, {}, drafts, {}, 1.0, cudagraph_mode="FULL")
    return JobResult(Job(mode, EAGER), None if error else output, error, Path("log"), 2.0)


def figures_of(stock: JobResult, kind: str = EXACT, patched: JobResult | None = None) -> dict[str, Any]:
    case = Trained("mamba-padding", case_of("mamba2-walk").case, "walks", lambda folder: (), kind)
    questions = [Question((1,), "p", 3, "abc"), Question((2,), "q", 3, "bca")]
    ends: Mapping[str, JobResult] = {
        "eager": ended("eager", ("abc", "bca")),
        "stock": stock,
        "patched": patched or ended("patched", ("abc", "bca")),
    }
    about = {"case": "mamba2-walk", "fix": case.fix, "release": "0.21.0", "title": case.title, "not_run": None}
    return about | trained_figures.figures(case, questions, ends, lambda ids: bytes(ids).decode())


def test_answers_are_counted_whole_and_in_characters() -> None:
    stock = figures_of(ended("stock", ("abc", "bxa")))["modes"]["stock"]
    assert (stock["right"], stock["characters"], stock["corrupt"]) == ([1, 2], [5, 6], [1])


def test_the_pair_of_texts_is_that_of_the_first_corrupt_prompt() -> None:
    texts = trained_figures.pair(figures_of(ended("stock", ("abc", "bxa"))))
    assert texts is not None
    assert (texts["prompt"], texts["eager"], texts["stock"], texts["patched"]) == ("q", "bca", "bxa", "bca")
    assert trained_figures.pair(figures_of(ended("stock", ("abc", "bca")))) is None


def test_a_crash_on_stock_is_a_result_and_one_with_the_fixes_is_a_failure() -> None:
    figures = figures_of(ended("stock", (), error="CUDA error: an illegal memory access"))
    assert trained_figures.is_good(figures)
    assert "CUDA error: an illegal memory access" in trained_figures.markdown({"runs": [figures], "models": {}})
    figures["modes"]["patched"] = {"error": "out of memory", "seconds": 1.0}
    assert not trained_figures.is_good(figures)


def test_an_engine_without_its_fix_at_work_is_a_failure() -> None:
    figures = figures_of(ended("stock", ("abc", "bca")))
    figures["modes"]["patched"]["state"] = "off"
    assert not trained_figures.is_good(figures)


def test_on_a_vllm_without_the_defect_no_fix_has_to_be_at_work() -> None:
    figures = figures_of(ended("stock", ("abc", "bca"))) | {"affected": False}
    figures["modes"]["patched"]["state"] = "fixed"
    assert trained_figures.is_good(figures)
    figures["modes"]["patched"]["corrupt"] = [0]
    assert not trained_figures.is_good(figures)


def test_drafts_that_are_accepted_less_often_than_without_graphs_are_a_failure() -> None:
    stock = ended("stock", ("abc", "bca"), drafts=(1, 4))
    figures = figures_of(stock)
    assert [figures["modes"][mode]["acceptance"] for mode in ("eager", "stock", "patched")] == [0.75, 0.25, 0.75]
    assert trained_figures.is_good(figures)
    lines = trained_figures.markdown({"runs": [figures], "models": {}}).splitlines()
    assert "| `mamba-padding` | 0.21.0 | walks | share of them | 0.75 | 0.25 | 0.75 |" in lines
    assert not trained_figures.is_good(figures_of(stock, patched=ended("patched", ("abc", "bca"), drafts=(1, 4))))
    without = figures_of(ended("stock", ("abc", "bca"), drafts=None))
    assert without["modes"]["stock"]["acceptance"] is None


def test_of_a_scored_prompt_only_what_can_be_known_has_a_perplexity() -> None:
    case = Trained("prompt-logprobs", case_of("scored").case, "scored", lambda folder: (), SCORED)
    end = ended("eager", ("bcd",))
    assert end.result is not None
    answer = Answer(tuple(b"bcd"), ({ord("b"): -9.0}, {ord("c"): -0.7}, {ord("d"): -0.1}))
    scored_result = replace(end.result, passes=((answer,),))
    ends = {mode: replace(end, result=scored_result) for mode in ("eager", "stock", "patched")}
    questions = [Question((97, 98, 99), "abc", 1, unscored=2)]
    figures = trained_figures.figures(case, questions, ends, lambda ids: bytes(ids).decode())
    assert figures["modes"]["eager"]["perplexity"] == 2.01


def test_a_scored_prompt_has_a_perplexity() -> None:
    case = Trained("prompt-logprobs", case_of("scored").case, "scored", lambda folder: (), SCORED)
    ends = {mode: ended(mode, ("bcd",), logprob=-0.7) for mode in ("eager", "stock", "patched")}
    figures = trained_figures.figures(case, [Question((97, 98, 99), "abc", 1)], ends, lambda ids: bytes(ids).decode())
    assert figures["modes"]["eager"]["perplexity"] == 2.01
    assert figures["answers"][0]["eager"] == "d"


def test_the_table_has_a_line_for_each_thing_that_is_counted_and_the_pair_of_texts() -> None:
    not_run = figures_of(ended("stock", ("abc", "bca"))) | {"not_run": "needs --smollm2"}
    result = {"runs": [figures_of(ended("stock", ("abc", "bxa"))), not_run], "models": {}}
    lines = trained_figures.markdown(result).splitlines()
    assert "| `mamba-padding` | 0.21.0 | walks | answers right | 2 of 2 | 1 of 2 | 2 of 2 |" in lines
    assert "| `mamba-padding` | 0.21.0 | walks | not run: needs --smollm2 | | | |" in lines
    assert "| stock | bxa |" in lines


def test_text_is_compared_with_eagers_alone() -> None:
    assert "right" not in figures_of(ended("stock", ("abc", "bca")), TEXT)["modes"]["stock"]
