"""`status` for a deployment: lines as people paste them, the way out and its price, stock releases, running servers."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from served_models import HOPPER
from stock import release_root
from vllm_graphfix import manifest
from vllm_graphfix.commands import running
from vllm_graphfix.commands.cli import app
from vllm_graphfix.commands.look_alikes import LOOK_ALIKES
from vllm_graphfix.commands.status import status as judge
from vllm_graphfix.commands.status_table import show
from vllm_graphfix.deployment import Deployment, known_flags, read_deployment
from vllm_graphfix.deployment.line import FlagsError, parse
from vllm_graphfix.deployment.runner import default_runner
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source, stock_release

pytestmark = pytest.mark.usefixtures("among_models")
FP8 = "./v3 --kv-cache-dtype fp8"
DRAFTS = "--speculative-config.num_speculative_tokens=4 --speculative-config.method"
EIGHT = {"--tensor-parallel-size": "8"}
FULL = {"--compilation-config": '{"cudagraph_mode": "FULL"}'}


def status(*arguments: str, code: int = 0, vllm: str = "0.18.1") -> str:
    done = CliRunner().invoke(app, ["status", "--vllm", vllm, *arguments])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout or done.stderr


@pytest.mark.parametrize(
    ("pasted", "values"),
    [
        ("/usr/bin/python3 /usr/local/bin/vllm serve m -tp 8", {"--tensor-parallel-size": "8"}),
        ("root 7 0.0 1.2 pts/0 Sl 10:02 0:07 /usr/bin/python3 -u /opt/bin/vllm serve m -tp 8", {}),
        ("python -m vllm.entrypoints.openai.api_server --model m -tp 8", {"--tensor-parallel-size": "8"}),
        ('vllm serve m --compilation-config {"cudagraph_mode": "FULL"} -tp 8', FULL),
        ('vllm serve m -cc \'{"cudagraph_mode": "FULL"}\'', FULL),
        ('vllm serve m --compilation-config={"cudagraph_mode": "FULL"}', FULL),
        ("vllm serve m \\\n  -tp 8 \\\n", {"--tensor-parallel-size": "8"}),
        ("vllm serve m \\ -tp 8 \\", {"--tensor-parallel-size": "8"}),
        ("'vllm serve m -tp 8'", {"--tensor-parallel-size": "8"}),
        ("cd /x && vllm serve m -tp 8; echo", {"--tensor-parallel-size": "8"}),
        ("nohup vllm serve m -tp 8 > log 2>&1 &", {"--tensor-parallel-size": "8"}),
        ("# it's ours\nvllm serve m \\\n  # -tp 4 \\\n  -tp 8  # -tp 2", {"--tensor-parallel-size": "8"}),
        ("vllm serve m --chat-template 'a # b' -tp 8", {"--tensor-parallel-size": "8"}),
        ('args: ["--model", "m", "-tp", "8", "-cc", "{\\"cudagraph_mode\\": \\"FULL\\"}"]', {**FULL, **EIGHT}),
        ("command: [vllm, serve]\nargs: [m, '-tp', \"8\",\n  --enforce-eager]  # eight", EIGHT),
        ("  args:\n  - --model=m\n  # - -tp=4\n  - --tensor-parallel-size\n  - '8'\n", EIGHT),
        ('- m\n- --tensor-parallel-size 8\n- -cc={"cudagraph_mode": "FULL"}', {**FULL, **EIGHT}),
        ('command: ["/bin/sh", "-c"]\nargs: ["exec vllm serve m -tp 8"]', EIGHT),
        ("ExecStart=/bin/bash -c 'source /x/activate && exec vllm serve m -tp 8'", EIGHT),
        ("sudo docker run -d --gpus all vllm/vllm-openai:v0.18.1 m -tp 8", EIGHT),
        ("docker run --name vllm --entrypoint vllm vllm/vllm-openai:v0.18.1 serve m -tp 8", EIGHT),
        (
            "docker run --gpus all -e HF_TOKEN=x vllm/vllm-openai:v0.18.1 --model m -tp 8",
            {"--tensor-parallel-size": "8"},
        ),
    ],
)
def test_a_line_is_read_as_it_was_pasted(pasted: str, values: dict[str, str]) -> None:
    line = parse(pasted, ())
    assert [*line.models, *(line.flags[name].value for name in ("--model",) if name in line.flags)] == ["m"]
    assert {name: line.flags[name].value for name in values} == values


def test_a_flag_in_a_comment_does_not_count() -> None:
    assert status("--for", f"{FP8}  # --enforce-eager", "--gpu", HOPPER, "--exit-hit", code=1).startswith("YOU ARE HIT")


VERL = """\
(vLLMHttpServer pid=4711, ip=10.0.0.2) ['serve',
(vLLMHttpServer pid=4711, ip=10.0.0.2)  'm',
(vLLMHttpServer pid=4711, ip=10.0.0.2)  '--tensor_parallel_size',
(vLLMHttpServer pid=4711, ip=10.0.0.2)  '8',
(vLLMHttpServer pid=4711, ip=10.0.0.2)  '--compilation_config',
\x1b[36m(vLLMHttpServer pid=4711)\x1b[0m  '{"cudagraph_mode": '
(vLLMHttpServer pid=4711, ip=10.0.0.2)  '"FULL"}']
"""
"""What verl 0.9.1 prints when it starts an engine, by its code, through Ray."""


@pytest.mark.parametrize("pasted", [VERL, "['serve', 'm', '-tp', '8', '-cc', '{\"cudagraph_mode\": \"FULL\"}']"])
def test_a_list_that_python_has_printed_is_a_command_line(pasted: str) -> None:
    line = parse(pasted, ())
    assert line.models == ["m"]
    assert {name: value.value for name, value in line.flags.items()} == FULL | {"--tensor-parallel-size": "8"}


def test_variables_of_docker_are_those_of_the_engine() -> None:
    line = parse("docker run -e VLLM_USE_V2_MODEL_RUNNER=1 -v /a:/b vllm/vllm-openai m", ())
    assert (line.environment, line.models) == ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, ["m"])


def test_a_title_in_place_of_a_command_line_is_an_error() -> None:
    with pytest.raises(FlagsError, match="a title that vLLM gives its processes"):
        parse("VLLM::EngineCore", ())


def test_a_setting_of_another_program_is_an_error_that_names_it() -> None:
    assert "'rollout.enforce_eager=False' is no argument" in status("--for", "./v3 rollout.enforce_eager=False", code=2)


def test_a_folder_that_does_not_exist_is_exit_code_2() -> None:
    assert "'./nowhere' does not exist" in status("--for", "./nowhere", code=2)


def test_a_path_of_a_config_json_names_its_folder() -> None:
    assert "(DeepseekV3ForCausalLM, NVIDIA H100" in status("--for", "./v3/config.json", "--gpu", HOPPER).splitlines()[0]


def test_a_deployment_that_is_hit_gets_each_way_out_with_its_price() -> None:
    out = status("--for", FP8, "--gpu", HOPPER, "--exit-hit", code=1)
    assert out.startswith("YOU ARE HIT by 2 defects of vLLM 0.18.1 (DeepseekV3ForCausalLM, NVIDIA H100 80GB HBM3).\n")
    assert "FIXED BY THE PLUGIN  WITHOUT IT" in out
    assert (
        "Do one:  plugin    pip install vllm-graphfix there, in a container into its image; restart (decodes at most "
        "7 % slower, where measured; the first start recompiles once)\n"
        "         upgrade   any of 0.20.0 to 0.21.0, unless VLLM_USE_V2_MODEL_RUNNER=1 is set; 0.22.0 is not judged "
        "free of all known defects under these flags\n"
        "         flags     --kv-cache-dtype auto (the KV cache holds half as many tokens), unless "
        "VLLM_USE_V2_MODEL_RUNNER=1 is set\n"
        "Then:    empty the stores that outlive the engine, such as LMCache's (flashmla-fp8)\n"
        "Back:    VLLM_GRAPHFIX=off, restart: without the plugin again\n"
    ) in out


def test_a_deployment_that_may_be_hit_gets_ways_out_that_help_in_each_case() -> None:
    out = status("--for", "some/model --kv-cache-dtype fp8", "--gpu", HOPPER, "--exit-hit", code=4)
    assert (
        "\n\nIf so:   plugin    pip install vllm-graphfix there, in a container into its image; restart (decodes at "
        "most 7 % slower, where measured; the first start recompiles once)\n"
        "         flags     --enforce-eager (decodes at an eighth to a fifth of the speed of full graphs, as "
        "measured)\n"
        "Back:    VLLM_GRAPHFIX=off, restart: without the plugin again\n"
    ) in out


def test_a_single_fix_reads_as_one() -> None:
    out = status("--for", FP8, "--gpu", "H100", vllm="0.19.1")
    assert "\nThe fix that may concern you has run in an engine on this GPU, H100.\n" in out


def test_the_releases_to_upgrade_to_are_judged_free_of_all_defects() -> None:
    for release, concerned in (("0.19.1", True), ("0.20.0", False), ("0.21.0", False), ("0.22.0", True)):
        source = open_source(release_root(release))
        judged = judge(source, {}, read_deployment(FP8, source, HOPPER, {}))
        stock = stock_release(release)
        of_manifest = judge(stock, {}, read_deployment(FP8, stock, HOPPER, {}))
        assert bool(of_manifest.hit or of_manifest.undecided) is concerned
        assert {row.fix.name for row in judged.hit} == {row.fix.name for row in of_manifest.hit}


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("./mamba2", "0.32.0 or later (judged to 0.33.0), unless VLLM_USE_V2_MODEL_RUNNER=0 is set"),
        ("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve ./qwen3-next", "0.30.0 or later (judged to 0.33.0)\n"),
        ("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ./mamba2", "no later release to 0.33.0 is judged free of all known"),
    ],
)
def test_a_release_that_is_free_by_its_model_runner_alone_is_advised_with_that_condition(
    line: str, advice: str
) -> None:
    assert f"upgrade   {advice}" in status("--for", line, "--gpu", HOPPER, vllm="0.25.1")


def test_no_advice_leads_to_what_no_fix_corrects() -> None:
    """Neither other flags nor another release: each would be free of the defects that fixes correct."""
    drafts = f"./qwen3-next {DRAFTS}"
    assert "flags     --enforce-eager (" in status("--for", f"{drafts}=mtp", "--gpu", HOPPER, vllm="0.25.1")
    assert "upgrade   0.32.0 or later" in status("--for", f"{drafts}=ngram", "--gpu", HOPPER, vllm="0.17.1")


@pytest.mark.parametrize(
    ("flags", "length"),
    [
        ("", "one token"),
        ("--speculative-config.method=mtp", "one token more than are drafted"),
        ("--speculative-config.method=mtp --speculative-config.num_speculative_tokens=4", "5 tokens"),
    ],
)
def test_a_decode_is_as_long_as_its_drafts_make_it(flags: str, length: str) -> None:
    source, report = stock_release("0.21.0"), StringIO()
    judged = judge(source, {}, read_deployment(f"./qwen3-next {flags}", source, HOPPER, {}))
    show(judged, Console(file=report, width=79))
    seen = f"prefill-dispatch: garbage for prompts of {length}, or whose last chunk is {length}, different"
    assert seen in " ".join(report.getvalue().split())


def test_flags_are_proposed_only_where_no_defect_remains() -> None:
    out = status("--for", "./mamba2", "--gpu", HOPPER, "--exit-hit", code=1)
    assert "flags     -cc.cudagraph_mode=PIECEWISE (decodes at a sixth to two fifths of the speed of full graphs" in out


def test_a_deployment_that_is_not_hit_learns_what_would_matter() -> None:
    out = status("--for", "./llama", "--gpu", HOPPER, "--exit-hit")
    assert out.startswith(
        "NOT HIT by a known defect of vLLM 0.18.1 (LlamaForCausalLM, NVIDIA H100 80GB HBM3). You do not "
    )
    assert "\nIt would matter with: recurrent layers; speculative decoding other than n-grams; " in out
    compared = "\nWrong all the same? First one pod with --enforce-eager: still wrong is no matter of graphs "
    assert compared in out
    assert compared not in status("--for", "./llama --enforce-eager", "--gpu", HOPPER)


def test_what_is_one_flag_away_comes_first() -> None:
    out = status("--for", "./llama --enable-lora", "--gpu", HOPPER)
    others = "recurrent layers; speculative decoding other than n-grams; "
    assert f"\nIt would matter with: --specialize-active-lora; {others}" in out.replace(" (not the default here)", "")


def test_drafts_that_are_not_hit_leave_other_methods() -> None:
    drafts = "--speculative-config.method=ngram --speculative-config.num_speculative_tokens=4"
    out = status("--for", f"./llama {drafts}", "--gpu", HOPPER, vllm="0.31.0")
    assert "; speculative decoding other than n-grams; " in out


def test_a_single_fix_has_run_on_this_gpu() -> None:
    out = status("--for", "./llama -cc.cudagraph_mode=FULL", "--gpu", "H200", vllm="0.33.0")
    assert "\nThe fix that may concern you has run in an engine on this GPU, H200.\n" in out


def test_what_is_undecided_is_likely_under_a_condition() -> None:
    out = status("--for", "./v3 --kv-cache-dtype fp8", "--exit-hit", code=4)
    assert out.startswith("MAYBE HIT by ")
    assert "\nLIKELY IF attention runs on FlashMLA:\n  flashmla-fp8: garbage" in out
    assert "\nDecided by:\n  the name of the GPU that serves (--gpu NAME)" in out


def test_what_needs_the_other_model_runner_is_not_likely() -> None:
    out = status("--for", "./llama --config flags.yaml", vllm="0.33.0")
    assert "\nONLY IF the model runner is V1 (V2 here)" in out
    assert "LIKELY IF the model runner is V1" not in out


def test_conditions_read_as_one_clause_of_this_vllm() -> None:
    out = status("--for", "./new-hybrid --config flags.yaml -dp 2", vllm="0.25.1")
    assert "\nLIKELY IF the model runner is V1, speculative decoding is on and prompts run in graphs:\n" in out
    assert "\nLIKELY IF the model has recurrent layers or speculative decoding is on:\n  idle-rank" in out
    assert "\n  whether NobodyKnowsForCausalLM has recurrent layers (this plugin" in out


@functools.cache
def unknown_deployment() -> Deployment:
    source = open_source(release_root("0.33.0"))
    return read_deployment("somebody/unknown --config unknown.yaml", source, None, {})


@pytest.mark.parametrize("name", BY_NAME)
def test_each_precondition_that_a_deployment_may_leave_open_has_a_clause(name: str) -> None:
    for need in BY_NAME[name].needs():
        fact = need.fact(unknown_deployment(), "")
        assert fact is None or re.search(r"\b(is|are|has|come|run|runs|bring|takes?|use)\b", need.if_so("")), need.text


def test_exit_hit_needs_a_deployment() -> None:
    assert "--exit-hit only goes with --for or --running" in status("--exit-hit", code=2)
    assert "--for 'MODEL …' --gpu NAME" in status("--gpu", HOPPER, code=2)


def test_a_stock_release_is_judged_by_the_manifest_and_named_as_one() -> None:
    assert "the stock wheel as it was recorded: your copy was not read" in status()
    assert "0.18.9 is neither a folder nor a recorded stock release" in status(vllm="0.18.9", code=2)


@pytest.mark.parametrize("release", ["0.14.1", "0.21.0", "0.22.0", "0.28.0", "0.29.0", "0.33.0"])
def test_a_stock_release_without_its_files_is_judged_as_with_them(release: str) -> None:
    source, stock = open_source(release_root(release)), stock_release(release)
    assert default_runner(stock) == default_runner(source)
    judged = [
        {row.fix.name: row.diagnosis._replace(tree="") for row in judge(each, {}).rows} for each in (source, stock)
    ]
    assert judged[0] == judged[1]


def test_the_manifest_lists_its_releases_from_old_to_new() -> None:
    releases = manifest.releases()
    assert releases[0] == "0.14.1"
    assert releases.index("0.18.1") < releases.index("0.33.0")


@pytest.fixture
def server(tmp_path: Path, served_models: Path) -> Iterator[int]:
    """A process that looks like `vllm serve`, with a secret on its line."""
    program = tmp_path / "vllm"
    program.write_text("import sys, time\nprint(flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, program, "serve", *FP8.split(), "--api-key", "sk-a-very-secret-key"],
        cwd=served_models,
        env={"VLLM_GRAPHFIX": "observe", "SECRET_TOKEN": "hf_ofsomebody"},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_running_server_is_judged_by_its_own_flags_environment_and_model(server: int) -> None:
    done = CliRunner().invoke(app, ["status", "--vllm", "0.18.1", "--running", "--gpu", HOPPER, "--json"])
    (report,) = [each for each in json.loads(done.stdout)["servers"] if each["process"]["pid"] == server]
    assert report["process"]["command"].endswith("--api-key (hidden)")
    row = next(row for row in report["fixes"] if row["name"] == "flashmla-fp8")
    assert (row["concern"]["answer"], row["mode"]) == ("concerns you", "observe")
    out = CliRunner().invoke(app, ["status", "--vllm", "0.18.1", "--running", "--gpu", HOPPER]).output
    assert f"{server}: " in out
    assert "secret" not in out + done.output
    assert "hf_" not in out + done.output


def test_a_process_that_titled_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    titled = type(
        "Process", (), {"pid": 7, "info": {"ppid": 1, "cmdline": ["VLLM::EngineCore", ""], "uids": (0, 0, 0)}}
    )
    monkeypatch.setattr("psutil.process_iter", lambda attributes: [titled])
    _, notes = running.servers()
    assert " ".join(notes) == (
        "process 7 has given itself the title 'VLLM::EngineCore' in place of its command line, and no `vllm serve` "
        "has started it: give its flags with --for"
    )


def test_servers_beyond_the_limit_are_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of one user's many servers none takes the place of another user's."""
    of_processes(monkeypatch, *(({"uids": (uid,) * 3}, {}) for uid in (7, 7, 7, 8)))
    monkeypatch.setattr(running, "_MOST_SERVERS", 2)
    servers, notes = running.servers()
    assert [each.pid - FIRST for each in servers] == [0, 3]
    assert notes == [f"only 2 servers are examined, of each user a share; not 2 others, such as process {FIRST + 1}"]


FIRST = 1 << 30


def of_processes(monkeypatch: pytest.MonkeyPatch, *doubles: tuple[dict[str, Any], dict[str, str]]) -> None:
    """Let this machine have a server for each of *doubles*, with fields of psutil and an environment."""
    infos = [{"ppid": 1, "cmdline": ["vllm", "serve", "m"], "uids": (0, 0, 0)} | fields for fields, _ in doubles]
    processes = [SimpleNamespace(pid=pid, info=info) for pid, info in enumerate(infos, FIRST)]
    monkeypatch.setattr("psutil.process_iter", lambda attributes: processes)
    monkeypatch.setattr("psutil.Process", lambda pid: SimpleNamespace(environ=lambda: doubles[pid - FIRST][1]))


def test_a_server_whose_line_or_environment_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    line, variables = ["vllm", "serve", *("x" * 99_999)], {"A": "x" * 2**21}
    of_processes(monkeypatch, ({"cmdline": line}, {}), ({}, variables), ({}, {"A": "x"}))
    servers, notes = running.servers()
    assert [each.pid - FIRST for each in servers] == [2]
    assert notes == [
        f"process {pid} has a command line or an environment that is too large to be examined"
        for pid in (FIRST, FIRST + 1)
    ]


def test_a_server_that_cannot_be_judged_is_no_all_clear(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (judged,) = (each for each in running.servers()[0] if each.pid == server)
    right = judged._replace(line=f"{FP8} --enforce-eager")
    arguments = ["status", "--vllm", "0.18.1", "--running", "--gpu", HOPPER, "--exit-hit"]
    for notes, code in (([], 0), (["process 7 belongs to another user"], 4)):
        monkeypatch.setattr(running, "servers", lambda notes=notes: ([right], [*notes]))
        assert CliRunner().invoke(app, arguments).exit_code == code


def test_a_server_that_runs_another_vllm_is_not_judged_by_this_one(server: int, tmp_path: Path) -> None:
    maps = "7f00-7f01 r-xp 0 00:01 7   /opt/my env/site-packages/vllm/_C.abi3.so\n7f02-7f03 rw-p 0 00:00 0   [heap]\n"
    assert running.loaded_vllm(maps) == Path("/opt/my env/site-packages")
    assert running.why_another_vllm(server, tmp_path) is None
    assert running.why_another_vllm(1 << 30, tmp_path) is None


def test_mapped_files_with_long_names_do_not_hold_the_command_up() -> None:
    maps = f"7f00-7f01 r--p 0 00:01 7   {'/ /vllm' * 570}/x\n" * 40
    started = time.process_time()
    assert running.loaded_vllm(maps) is None
    assert time.process_time() - started < 0.5


def test_no_link_leads_out_of_the_root_of_a_process(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text("inside")
    (tmp_path / "config.json").write_text("outside")
    (root / "absolute").symlink_to("/model")
    (root / "out").symlink_to(tmp_path)
    (root / "up").symlink_to("../..")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "fifo")
    for path in ("/model/config.json", "/absolute/config.json", "/../../model/config.json", "/up/model/config.json"):
        with os.fdopen(running.open_beneath(root, Path(path))) as file:
            assert file.read() == "inside", path
    for path in ("/out/config.json", "/up/config.json", "/loop/config.json", "/fifo", "/model", "/"):
        with pytest.raises(OSError, match=r"."):
            running.open_beneath(root, Path(path))


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("./v3 --kv-cache-dtypes fp8", "--kv-cache-dtype written out in full, instead of '--kv-cache-dtypes'"),
        ("./v3 -kv-cache-dtype fp8", "--kv-cache-dtype written out in full, instead of '-kv-cache-dtype'"),
        ("./v3 \u2014kv_cache_dtype=fp8", "--kv-cache-dtype written out in full, instead of '\u2014kv_cache_dtype'"),
        ("./v3 \u2013\u2013kv-cache-dtype fp8", "--kv-cache-dtype written out in full, instead of"),
        ("m -tp 8 -enforce-eager", "--enforce-eager written out in full, instead of '-enforce-eager'"),
        ("./v3 --kv-cache-dtype fp9", "a --kv-cache-dtype that vLLM takes (fp9 is unknown)"),
    ],
)
def test_a_typing_mistake_is_no_all_clear_where_the_flags_of_a_vllm_are_not_known(
    line: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.json").write_text("{}")
    monkeypatch.setattr(known_flags, "RECORDED", tmp_path / "none.json")
    assert f"\n  {missing}" in status("--for", line, "--gpu", HOPPER, "--exit-hit", code=4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("$MODEL -tp 8", "'$MODEL' is no model"),
        ('{"model": "m"}', "is no model"),
        ("non-default args: {'model': 'm', 'tensor_parallel_size': 8}", "'{model:' is no argument"),
        ("['serve', 'm', '-tp',", "'[serve,' is no argument"),
        ("rollout.model.path=m", "-tp 8 for tensor_model_parallel_size=8"),
    ],
)
def test_what_names_no_model_is_refused(line: str, message: str) -> None:
    assert message in status("--for", line, code=2)


@pytest.mark.parametrize(
    "line",
    [
        "https://u:hunter2hunter2@host/m",
        "./v3 hf_token=hunter2hunter2",
        "s3://k:hunter2@b/m",
        "s3://k:hunter2@hunter2@b/m",
        # Where values are printed they are cut.
        f"https://u:{'hunter2' * 20}@host/m",
        f"./v3 model.path=https://u:{'hunter2' * 20}@host/m",
        f"$https://u:{'hunter2' * 20}@host/m",
        f"/https://u:{'hunter2' * 20}@host/m",
        f"./v3 --kv-cache-dtype https://u:{'hunter2' * 20}@host/m",
    ],
)
@pytest.mark.parametrize("options", [(), ("--json",), ("--all", "--verbose")])
def test_no_secret_of_a_line_is_printed(line: str, options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["status", "--vllm", "0.18.1", "--gpu", HOPPER, *options, "--for", line])
    assert "(hidden)" in done.output
    assert "hunter2" not in done.output


def test_a_flag_that_a_stock_release_lacks_is_refused_also_without_its_files() -> None:
    out = status("--for", "m --kv-dtype fp8", "--gpu", HOPPER, vllm="0.18.1", code=2)
    assert "'--kv-dtype' is no flag of vLLM 0.18.1; did you mean" in out


@pytest.mark.release
def test_the_recorded_flags_are_those_of_each_stock_release(release: str) -> None:
    assert known_flags.flags_of(stock_release(release)) == known_flags.flags_of(open_source(release_root(release)))


@pytest.mark.parametrize(
    ("line", "release", "beginning"),
    [
        (f"./qwen3-next {DRAFTS}=ngram", "0.21.0", "Not corrected by this plugin: answers corrupted by n-gram drafts"),
        (f"org/unknown {DRAFTS}=ngram", "0.21.0", "Not corrected by this plugin if the model has gated delta nets: "),
        (f"./qwen3-next {DRAFTS}=ngram --enforce-eager", "0.31.0", "Not corrected by this plugin: answers corrupted"),
        (f"./qwen3-next {DRAFTS}=ngram", "0.17.1", ""),
        (f"./qwen3-next {DRAFTS}=ngram", "0.32.0", ""),
        (f"./qwen3-next {DRAFTS}=mtp", "0.21.0", ""),
        (f"./llama {DRAFTS}=ngram", "0.21.0", ""),
        ("org/unknown", "0.21.0", ""),
        ("./llama --kv-transfer-config.kv_connector=SimpleCPUOffloadConnector", "0.33.0", "Not corrected by this plug"),
        ("./llama --kv-transfer-config.kv_connector=OffloadingConnector", "0.33.0", ""),
        (
            "./llama --kv-cache-dtype fp8 --enable-sleep-mode",
            "0.21.0",
            "Not corrected by this plugin: answers less acc",
        ),
        ("./llama --enable-sleep-mode", "0.21.0", ""),
        (
            f"./qwen3-next {DRAFTS}=mtp -cc.cudagraph_mode=PIECEWISE",
            "0.21.0",
            "Not corrected by this plugin: an illegal memory access of gated delta nets with drafts",
        ),
        (f"./llama {DRAFTS}=mtp -cc.cudagraph_mode=PIECEWISE", "0.21.0", ""),
        ("./qwen3-next -cc.cudagraph_mode=PIECEWISE", "0.21.0", ""),
        ("./llama --kv-cache-dtype fp8 --enable-sleep-mode", "0.29.0", ""),
    ],
)
def test_defects_that_no_fix_corrects_are_named(line: str, release: str, beginning: str) -> None:
    """Under the verdict, whatever it is, and in the JSON: installing the plugin leaves these as they are."""
    lines = status("--for", line, "--gpu", HOPPER, vllm=release).splitlines()
    under = lines[1 + lines[1].startswith("First get the config.json of org/unknown: ")]
    assert under.startswith(beginning or "vLLM "), under
    listed = json.loads(status("--for", line, "--gpu", HOPPER, "--json", vllm=release))["not_corrected"]
    assert len(listed) == bool(beginning)


def test_each_look_alike_is_a_section_of_the_page_with_its_releases() -> None:
    docs = Path(__file__).resolve().parents[1] / "docs"
    verdicts = json.loads((docs / "looked-at.json").read_text())["verdicts"]
    for each in LOOK_ALIKES:
        assert f"\n### {each.title}\n" in (docs / "looked-at.md").read_text()
        anchor = f"(#{each.page.partition('#')[2]})"
        at = next(at for at, row in enumerate(verdicts) if anchor in row["candidate"])
        rows = [verdicts[at], *(row for row in verdicts[at + 1 : at + 2] if row["candidate"].startswith("the same"))]
        assert all(row["verdict"].startswith(("established", "by report, with a run")) for row in rows)
        ends = {end for pair in each.releases for end in pair}
        assert any(ends <= set(re.findall(r"\d+\.\d+\.\d+", row["releases"])) for row in rows), each.title
