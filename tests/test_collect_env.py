"""vLLM's own report of an environment, `vllm collect-env`, with the plugin's part at its end."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

import fetch_cpu_engine
from engine import environment, forking_python
from records import leave, of, record
from stock import ALL_RELEASES, release_root
from table import affected_by, state_by_default
from vllm_graphfix.records import Decided, FixReport, identity
from warm_release import run_in_fork

DISTINCT = {
    hashlib.sha256((release_root(release) / "vllm/collect_env.py").read_bytes()).hexdigest(): release
    for release in ALL_RELEASES
}
"""The last release of each text of `collect_env.py`."""

REPORT = """
import sys, vllm_graphfix
assert "vllm.collect_env" not in sys.modules
{before}
vllm_graphfix.register()
from vllm import collect_env
collect_env.get_pip_packages = lambda *given: ("pip3", "")  # seconds, and not what is looked at
collect_env.main()
"""


IMPORTED_BEFORE = "import vllm.collect_env"


@pytest.mark.parametrize(
    ("before", "release"),
    [
        *(pytest.param("", release, id=f"imported after-{release}") for release in DISTINCT.values()),
        *(
            pytest.param(
                *(IMPORTED_BEFORE, release),
                marks=() if release == ALL_RELEASES[-1] else pytest.mark.slow,
                id=f"imported before-{release}",
            )
            for release in DISTINCT.values()
        ),
    ],
)
def test_every_releases_own_report_ends_with_what_the_plugin_would_do(release: str, before: str) -> None:
    """The command line of vLLM has imported the report when it loads plugins; another program may not have."""
    output = run_in_fork(release, REPORT.format(before=before), {"VLLM_GRAPHFIX": "observe"}).stdout
    stocks, ours = _parts(output)
    assert "vLLM Version" in stocks
    assert re.search(rf"^Verdict +: vLLM {re.escape(release)}: \d+ of \d+ known defects", ours, re.MULTILINE)
    assert "VLLM_GRAPHFIX=observe" in ours
    assert "would be observing" in ours


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_each_command_line_loads_plugins_and_the_wrapped_function_makes_the_report(release: str) -> None:
    """The chain in the source: every command builds the parser of `serve`, which loads the plugins."""
    vllm = release_root(release) / "vllm"
    main = (vllm / "entrypoints/cli/main.py").read_text()
    assert "vllm.entrypoints.cli.serve,\n" in main
    assert "cmd.subparser_init(subparsers)" in main
    assert "make_arg_parser" in _function(vllm / "entrypoints/cli/serve.py", "ServeSubcommand.subparser_init")
    assert "load_general_plugins" in _function(vllm / "engine/arg_utils.py", "AsyncEngineArgs.add_cli_args")
    assert "get_pretty_env_info" in _function(vllm / "collect_env.py", "main")


@pytest.mark.xdist_group("0.21.0")
def test_vllms_own_variables_stay_and_ours_are_printed_masked_or_not_at_all() -> None:
    variables = {
        "VLLM_GRAPHFIX_ROLLOUT_KEY": "tenant-of-ours\nand-a-second-line",
        "VLLM_GRAPHFIX_ROLLOUT": "5",
        "VLLM_NO_USAGE_STATS": "1",
    }
    output = run_in_fork("0.21.0", REPORT.format(before=""), variables).stdout
    stocks, ours = _parts(output)
    assert "VLLM_NO_USAGE_STATS=1" in stocks
    assert "VLLM_GRAPHFIX" not in stocks
    assert "VLLM_GRAPHFIX_ROLLOUT=5 %" in ours
    assert "VLLM_GRAPHFIX_DECISION" not in ours  # of this process, which starts no engine
    assert not re.search("tenant-of-ours|second-line", output)


@pytest.mark.xdist_group("0.21.0")
def test_nothing_of_the_doctor_is_imported_where_no_report_is_made() -> None:
    run_in_fork(
        "0.21.0",
        """
        import sys, vllm_graphfix
        assert "vllm.collect_env" not in sys.modules
        vllm_graphfix.register()
        import vllm.collect_env
        assert not [name for name in sys.modules if name.startswith("vllm_graphfix.commands")]
        """,
    )


BROKEN = {
    "an error": "raise RuntimeError('the doctor is ill')",
    "no text": "return None",
    "an error that has no text": "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})",
}


@pytest.mark.xdist_group("0.21.0")
@pytest.mark.parametrize("how", BROKEN)
def test_vllms_own_report_is_printed_whatever_goes_wrong_in_ours(how: str) -> None:
    before = f"def ill():\n    {BROKEN[how]}\nvllm_graphfix._report = ill"
    done = run_in_fork("0.21.0", REPORT.format(before=before), {"VLLM_GRAPHFIX_ROLLOUT_KEY": "tenant-of-ours"})
    assert "vLLM Version                 : 0.21.0" in done.stdout
    assert "Verdict" not in done.stdout
    assert "tenant-of-ours" not in done.stdout


@pytest.mark.xdist_group("0.21.0")
def test_what_standard_output_cannot_print_is_escaped(tmp_path: Path) -> None:
    """One letter too much, and vLLM would print nothing of its report."""
    reason = "naïve – \N{GREEK SMALL LETTER ALPHA}"
    leave(tmp_path, record(fixes={"capture-state": FixReport("auto", "failed", reason)}))
    as_python_starts = 'sys.stdout.reconfigure(encoding="ascii", errors="strict")'  # with PYTHONIOENCODING=ascii:strict
    code = REPORT.format(before=as_python_starts)
    output = run_in_fork("0.21.0", code, {"VLLM_GRAPHFIX_STATUS_DIR": str(tmp_path)}).stdout
    assert r"na\xefve \u2013 \u03b1" in output


@pytest.mark.parametrize(
    "version",
    [  # where the same engine runs
        pytest.param(fetch_cpu_engine.AFFECTED, marks=pytest.mark.xdist_group("examples")),
        pytest.param(fetch_cpu_engine.VERSION, marks=[pytest.mark.xdist_group("decision"), pytest.mark.slow]),
    ],
)
def test_the_real_command_reports_running_engines_with_the_settings_of_their_start(
    version: str, tmp_path: Path
) -> None:
    """`vllm collect-env` of builds that run here, in a shell whose settings are not those of the engine."""
    around = environment(tmp_path, fetch_cpu_engine.engine(version=version))
    around["TORCHDYNAMO_DISABLE"] = "1"  # as in the engines of test_examples.py: one warm Python forks both
    around["VLLM_GRAPHFIX_STATUS_DIR"] = str(tmp_path / "records")
    python, _ = forking_python(around)  # before the records, whose heartbeats grow old while it starts
    decided = Decided(canary=True, bucket=None, percentage=None, master="observe", inherited=False)
    observing = {"prefill-dispatch": FixReport("observe", "observing", "counts and changes nothing")}
    (tmp_path / "records").mkdir()
    for process, role in ((identity(), "front-end"), (of(os.getppid()), "worker")):  # both live while the test does
        engine_record = record(
            process, decision=decided, role=role, fixes=observing, events={"prefill-dispatch": {"mixed-up": 7}}
        )
        leave(tmp_path / "records", engine_record)
    done = subprocess.run(
        [python, "-m", "vllm.entrypoints.cli.main", "collect-env"],
        cwd=tmp_path,
        env=around,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stocks, ours = _parts(done.stdout)
    assert "Versions of relevant libraries" in stocks
    assert "settings                     : VLLM_GRAPHFIX observe; rollout in; observe prefill-dispatch" in ours
    assert "events: mixed-up 14: prefill-dispatch" in ours
    affected = re.findall(r"^  ([a-z0-9-]+): affected; mode auto, would be active", ours, re.MULTILINE)
    assert affected == [name for name in affected_by(version) if state_by_default(name, version) == "active"]
    assert "Traceback" not in done.stderr


def _parts(output: str) -> tuple[str, str]:
    stocks, title, ours = output.partition(f"{'=' * 30}\n        vllm-graphfix\n{'=' * 30}\n")
    assert title, output[-4000:]
    return stocks, ours


def _function(path: Path, name: str) -> str:
    """The source of the function *name*, ``Class.method`` or ``function``."""
    text = path.read_text()
    nodes: list[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        (node,) = (node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part)
        nodes = node.body
    return ast.get_source_segment(text, node) or ""
