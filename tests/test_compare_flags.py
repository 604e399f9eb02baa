"""vLLM's flags on the command line of `compare`.

What is vLLM's reaches vLLM as it was given, and what is ours is ours.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from stock import ALL_RELEASES, release_root
from table import slow_but_for
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare import run as compare_run
from vllm_graphfix.source.files import Source
from vllm_graphfix.verify.engine.exact import ENVIRONMENT
from vllm_graphfix.verify.engine.job import Job
from warm_release import run_in_fork

DRAFT = '{"method": "eagle", "model": "./draft", "num_speculative_tokens": 3}'


class NotStartedError(CompareError):
    """Raised in place of running engines."""


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of the run: model, flags, prompts, number of generated ones, tokens, seconds."""
    calls: list[tuple[Any, ...]] = []

    def run(model: str, flags: list[str], options: compare_run.Options, console: Any, *, as_twin: bool) -> None:
        calls.append((model, flags, *options[:4]))
        raise NotStartedError("engines are not started here")

    monkeypatch.setattr(compare_run, "run", run)
    return calls


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert done.exit_code == 2, (done.stdout, done.exception)
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("arguments", [("-h",), ("model", "-tp", "2", "-h")])
def test_a_short_flag_asks_for_help_wherever_it_stands(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert (done.exit_code, "--num-prompts" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    ("build", "hidden", "missing"),
    [("2.11.0+cu130", "", True), ("2.11.0", "-1", True), ("2.11.0+cpu", "", False), ("2.11.0+rocm7", "", False)],
)
def test_without_a_gpu_no_engine_is_started(
    build: str, hidden: str, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: build)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert compare_run._is_without_gpu({"CUDA_VISIBLE_DEVICES": hidden}) is missing
    if missing:
        assert "vLLM would find no GPU here" in call("model")


VLLMS = [
    ["-tp", "2"],
    ["-tp=2"],
    ["-O3"],
    ["-O", "3"],
    ["-O.cudagraph_mode=FULL"],
    ["-cc.cudagraph_mode=FULL"],
    ["-cc.cudagraph_capture_sizes+=1,2"],
    ["-cc", '{"mode": 3, "cudagraph_mode": "FULL"}'],
    ["--speculative-config", DRAFT],
    ["--speculative-config.method", "ngram"],
    ["--kv-cache-dtype", "fp8"],
    ["--kv-cache-dtype=fp8"],
    ["--max_model_len", "1k"],
    ["--hf-overrides", "{}"],
    ["-ph"],
    ["--no-enable-prefix-caching"],
    ["--max-num-seqs", "-1"],
    ["--max-num-seqs", "4", "-pp", "2", "--trust-remote-code", "-q", "awq", "--dtype=half"],
    ["--json-tip", "--prompt", "--num-prompt", "--max-token", "--time"],
    ["-", "a word", ""],
]


@pytest.mark.parametrize("flags", VLLMS, ids=[" ".join(flags) for flags in VLLMS])
def test_vllms_flags_are_passed_on_unchanged_and_in_order(caught: list[tuple[Any, ...]], flags: list[str]) -> None:
    call("the/model", *flags)
    assert caught == [("the/model", flags, (), 16, 128, 3600.0)]


def test_our_options_may_stand_anywhere_among_vllms(caught: list[tuple[Any, ...]], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    ours = ["--num-prompts", "3", "--max-tokens=9", "--timeout", "60", "--prompts", str(prompts), "--json"]
    expected = [("the/model", ["-tp", "2", "-O3", "--dtype", "half"], ("one",), 3, 9, 60.0)]
    call("the/model", "-tp", "2", *ours, "-O3", "--dtype", "half")
    call(*ours, "the/model", "-tp", "2", "-O3", "--dtype", "half")
    call("the/model", "-tp", "2", "-O3", *ours, "--dtype", "half")
    assert caught == expected * 3


def test_after_two_dashes_all_is_vllms(caught: list[tuple[Any, ...]]) -> None:
    call("the/model", "-tp", "2", "--", "--json", "--timeout", "5")
    assert caught[0][:2] == ("the/model", ["-tp", "2", "--json", "--timeout", "5"])


@pytest.mark.parametrize("flags", [["-tp", "2", "the/model"], ["--dtype", "half", "the/model"], ["-O3"]])
def test_flags_before_the_model_are_one_clear_error(caught: list[tuple[Any, ...]], flags: list[str]) -> None:
    assert call(*flags) == f"vllm-graphfix: name the model first: vllm-graphfix compare MODEL {flags[0]} …\n"
    assert not caught


def test_a_model_is_needed(caught: list[tuple[Any, ...]]) -> None:
    assert "Missing argument 'MODEL'" in call()
    assert "Missing argument 'MODEL'" in call("--json")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--num-prompts", "0"), ("--max-tokens", "1"), ("--timeout", "0"), ("--num-prompts", "many")],
)
def test_our_options_refuse_what_makes_no_sense(caught: list[tuple[Any, ...]], option: str, value: str) -> None:
    assert f"Invalid value for '{option}'" in call("the/model", option, value)
    assert not caught


def test_the_help_is_ours() -> None:
    done = CliRunner().invoke(app, ["compare", "--help"])
    assert done.exit_code == 0
    assert "--num-prompts" in done.stdout


def refused(*flags: str) -> str:
    done = CliRunner().invoke(app, ["compare", "the/model", *flags])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), (done.stderr, done.exception)
    return done.stderr


@pytest.mark.parametrize("flag", ["--enforce-eager", "--enforce_eager", "--enforce-eager=True"])
def test_without_graphs_there_is_nothing_to_compare(flag: str) -> None:
    assert "with --enforce-eager there are no graphs to compare; leave that flag out" in refused("-tp", "2", flag)


@pytest.mark.parametrize("flags", [["--model", "another"], ["--model=another"]])
def test_a_second_model_is_refused(flags: list[str]) -> None:
    assert "name the model once" in refused(*flags)


def jobs_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Sequence[Job]:
    """Return the jobs of the engines."""
    made: list[Sequence[Job]] = []

    def run_engines(model: str, flags: Sequence[str], options: object, console: object, jobs: Sequence[Job]) -> None:
        made.append(jobs)
        raise NotStartedError("engines are not started here")

    monkeypatch.setattr(compare_run, "_run_engines", run_engines)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    call(*arguments)
    return made[0]


def test_every_engine_gets_the_same_and_relative_paths_begin_where_the_user_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    eager, graphs, compiled = jobs_of(monkeypatch, "./model", "-tp", "2", "--num-prompts", "4", "--max-tokens", "16")
    assert {job.flags for job in (eager, graphs, compiled)} == {("--model", "./model", "-tp", "2")}
    assert {job.folder for job in (eager, graphs, compiled)} == {str(tmp_path)}
    assert [job.mode for job in (eager, graphs, compiled)] == ["eager", "graphs", "no graphs"]
    assert [job.extra_passes for job in (eager, graphs, compiled)] == [True, False, False]
    assert {job.max_tokens for job in (eager, graphs, compiled)} == {(16, 14, 12, 10)}


def test_a_twin_has_one_engine_with_graphs_that_does_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fitted: list[Sequence[str]] = []

    def fit(model: str, flags: Sequence[str], folder: Path) -> Any:
        fitted.append(flags)
        return SimpleNamespace(folder=folder, flags=("-tp=1",), adapters=())

    kernels = {"vllm/config/kernel.py": b"enable_jit_warmup: bool = True"}
    monkeypatch.setattr(compare_run, "open_source", lambda: Source("a vLLM", kernels.get, lambda: "0.1.0"))
    monkeypatch.setattr(compare_run, "fit", fit)
    eager, graphs, compiled = jobs_of(monkeypatch, "m", "--twin", "--exact", "--poison", "-tp", "8")
    assert fitted == [("--kernel-config.enable_jit_warmup=false", "-tp", "8")]
    jobs_of(monkeypatch, "m", "--twin", "--kernel_config", "{}")
    assert fitted[1] == ("--kernel_config", "{}"), "with a flag for one of its keys vLLM would drop the others"
    assert (graphs.exact, graphs.poison_last) == (True, True)
    assert not any(job.exact or job.poison_last for job in (eager, compiled))
    assert all(job.untuned and job.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" for job in (eager, compiled))
    assert graphs.environment == eager.environment | ENVIRONMENT


def test_answers_differ_in_length_and_every_one_has_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *_) = jobs_of(monkeypatch, "m", "--num-prompts", "100", "--max-tokens", "2")
    assert first.max_tokens == (2,) * 100
    (first, *_) = jobs_of(monkeypatch, "m", "--num-prompts", "1", "--max-tokens", "7")
    assert first.max_tokens == (7,)


def test_a_model_whose_name_begins_with_a_dash_is_no_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "-odd").mkdir()
    monkeypatch.chdir(tmp_path)
    (job, *_) = jobs_of(monkeypatch, "--", "-odd", "-tp", "2")
    assert job.flags == ("--model", "./-odd", "-tp", "2")


def engine_flags(release: str) -> set[str]:
    """Every flag of a release's engine and server: those added by name, and one for each field."""
    root = release_root(release) / "vllm"
    files = [root / "engine/arg_utils.py", *root.glob("entrypoints/*/cli_args.py")]
    assert len(files) >= 2, release
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    classes = [node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    calls = [node for each in classes for node in ast.walk(each) if isinstance(node, ast.Call)]
    added = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"]
    named = [word.value for node in added for word in node.args if isinstance(word, ast.Constant)]
    fields = [
        node.target.id
        for each in classes
        for node in each.body
        if each.name.endswith("Args")
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    flags = {f"--{name.replace('_', '-')}" for name in fields} | {name for name in named if isinstance(name, str)}
    return flags | {f"--no-{flag[2:]}" for flag in flags if flag.startswith("--")}


def test_none_of_our_options_is_a_flag_of_an_engine() -> None:
    """An option of ours that is a flag of any of the releases would never reach vLLM."""
    group: Any = typer.main.get_command(app)
    ours = {name for option in group.commands["compare"].params for name in option.opts if name.startswith("-")}
    own = ("prompts", "num-prompts", "max-tokens", "timeout", "exact", "gap", "poison", "twin", "json")
    assert ours == {f"--{name}" for name in own}
    for release in ALL_RELEASES:
        flags = engine_flags(release)
        assert {
            "--tensor-parallel-size",
            "-tp",
            "--enforce-eager",
            "--model",
            "--api-key",
            "--tool-call-parser",
        } <= flags, release
        assert not flags & (ours | {"--help"}), release


PARSED = """
    import json
    import huggingface_hub.constants
    huggingface_hub.constants.HF_HUB_OFFLINE = False  # else the model has to be there
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    vllm.platforms._current_platform = CpuPlatform()  # there is none where neither a GPU nor vLLM's CPU kernels are
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm_graphfix.verify.engine import llm
    from vllm_graphfix.verify.engine.job import COMPILED, EAGER, GRAPHS, Job

    class Reached(Exception):
        pass

    def reached(engine_args, **rest):
        raise Reached(engine_args)

    LLMEngine.from_engine_args = reached
    flags = ["--model", "some/model", *{flags!r}]
    for stray in (["a stray word"], ["--tensor-paralel-size", "2"]):
        try:
            llm.parsed_flags(("--model", "some/model", *stray))
        except llm.FlagError as error:
            print(error)
    for mode in (EAGER, GRAPHS, COMPILED):
        try:
            llm.start_engine(Job("", mode, flags=tuple(flags)))
        except Reached as found:
            (args,) = found.args
            print(json.dumps({{
                "mode": mode, "model": args.model, "tp": args.tensor_parallel_size, "level": int(args.optimization_level), "eager": args.enforce_eager,
                "graphs": args.compilation_config.cudagraph_mode.name, "sizes": [*map(int, args.compilation_config.cudagraph_capture_sizes)],
                "speculative": args.speculative_config, "dtype": args.kv_cache_dtype, "length": args.max_model_len,
                "overrides": args.hf_overrides, "transfer": type(args.kv_transfer_config).__name__,
                "caching": args.enable_prefix_caching, "best": args.max_logprobs, "of": args.logprobs_mode,
                "quiet": args.disable_log_stats, "extension": args.worker_extension_cls,
            }}))
"""  # noqa: E501
FLAGS = [
    *("-tp", "2", "-O3", "-cc.cudagraph_mode=FULL", "-cc.cudagraph_capture_sizes+=1,2", "--speculative-config", DRAFT),
    *("--kv-cache-dtype", "fp8", "--max_model_len", "1k", "--hf-overrides", '{"a": 1}', "--no-enable-prefix-caching"),
    *("--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}', "--enable-log-requests"),
    *("--max-logprobs", "0", "--logprobs-mode", "processed_logits", "--disable-log-stats"),
    # What `vllm serve` takes for its server.
    *("--port", "8000", "--api-key", "key", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--served-model-name", "one", "two", "--chat-template", "./none.jinja", "--allowed-origins", '["*"]'),
]
REACHED = {
    "model": "some/model",
    "tp": 2,
    "level": 3,
    "graphs": "FULL",
    "eager": False,
    "sizes": [1, 2],
    "speculative": json.loads(DRAFT),
    "dtype": "fp8",
    "length": 1000,
    "overrides": {"a": 1},
    "transfer": "KVTransferConfig",
    "caching": False,
    "extension": "vllm_graphfix.verify.engine.extension.GraphfixStates",
    # What is asked of every answer, and counted.
    "best": 5,
    "of": "raw_logprobs",
    "quiet": False,
}
"""The arguments of vLLM's engine."""


@pytest.mark.parametrize("release", slow_but_for(("0.15.0", "0.33.0"), ("0.15.0", "0.18.1", "0.29.0", "0.33.0")))
def test_stock_vllm_takes_a_command_line_of_its_server_as_it_is(release: str) -> None:
    """Runs on the oldest release affected, the last without `LLM.from_engine_args`, one between, and the newest."""
    done = run_in_fork(release, PARSED.format(flags=FLAGS))
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("unrecognized")] == [
        "unrecognized arguments: a stray word",
        "unrecognized arguments: --tensor-paralel-size",
    ]
    eager, graphs, compiled = (json.loads(line) for line in lines if line.startswith("{"))
    assert graphs == REACHED | {"mode": "graphs"}
    assert compiled == graphs | {"mode": "no graphs", "graphs": "NONE"}
    assert eager == graphs | {"mode": "eager", "eager": True}


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "~/nowhere/model"])
def test_a_missing_folder_is_reported_before_an_engine_starts(model: str) -> None:
    done = CliRunner().invoke(app, ["compare", model])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"vllm-graphfix: {model} does not exist; name a folder with a model, or one of the Hugging Face Hub\n"
    )
