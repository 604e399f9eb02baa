"""A fix that is ``on:TREE``: code that is new to the plugin is run, and the fix is applied to that tree alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from edited import before, edited
from stock import release_root
from vllm_files import RUNNER
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source
from warm_python import executable

FIX, VARIABLE = BY_NAME["mamba-padding"], "VLLM_GRAPHFIX_MAMBA_PADDING"


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 0.21.0 that has the defect, and reads the marks once more before it makes its metadata."""
    return edited(
        release_root("0.21.0"),
        tmp_path_factory.mktemp("fork") / "vllm",
        {RUNNER: before(r"cm_base = CommonAttentionMetadata\(", "is_prefilling.sum()")},
    )


def run(*arguments: str, **settings: str) -> tuple[int, str]:
    """The command in a fork of a warm Python, as the processes that it starts are."""
    python = executable()
    command = f"import sys\nsys.executable = {python!r}\nfrom vllm_graphfix.commands.cli import main\nmain()"
    done = subprocess.run(
        [python, "-c", command, *arguments],
        env=os.environ | settings | {"COLUMNS": "250"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_fork_with_the_defect_is_run_and_patched_by_its_hash_alone(fork: Path) -> None:
    diagnosis = manifest.diagnose(FIX, open_source(fork))
    assert (diagnosis.verdict, diagnosis.defect_seen) == (Verdict.UNRECOGNISED, True)
    code, output = run("verify", "--vllm", str(fork), FIX.name)
    assert code == 1
    (tree,) = set(re.findall(rf"{VARIABLE}=on:(\w+)", output))
    assert tree == diagnosis.tree

    def would_be(value: str) -> str:
        _, output = run("status", "--vllm", str(fork), "--json", **{VARIABLE: value})
        (row,) = (each for each in json.loads(output)["fixes"] if each["name"] == FIX.name)
        state: str = row["would_be"]
        return state

    assert would_be(f"on:{tree}") == "active"
    assert would_be("on") == would_be("on:0123456789abcdef") == "incompatible"
    # Any other edit is another tree.
    (fork / RUNNER).write_text((fork / RUNNER).read_text() + "\n# another\n")
    assert would_be(f"on:{tree}") == "incompatible"


def test_a_fork_without_the_defect_gets_no_advice_to_patch(tmp_path: Path) -> None:
    cleared = "is_prefilling[num_reqs:] = False; is_prefilling.sum()"
    fork = edited(
        release_root("0.21.0"),
        tmp_path / "vllm",
        {RUNNER: before(r"if self\.use_async_spec_decode:\n +# GPU tensors", cleared)},
    )
    code, output = run("verify", "--vllm", str(fork), FIX.name)
    assert (code, "on:" in output) == (0, False), output
