"""A fix that is ``on:TREE``: code that is new to the plugin is run, and the fix is applied to that tree alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from edited import after, before, edited
from fix_rows.flashmla_fp8 import COPIED, POINTED_AT, SPLITS
from stock import release_root
from vllm_files import FLASHMLA
from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.source.files import open_source
from warm_python import executable

FIX, VARIABLE = BY_NAME["flashmla-fp8"], "VLLM_GRAPHFIX_FLASHMLA_FP8"


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 0.18.1 that has the defect, and holds the latest plan."""
    return edited(
        release_root("0.18.1"),
        tmp_path_factory.mktemp("fork") / "vllm",
        {FLASHMLA: after(SPLITS, "self.latest = scheduler_metadata")},
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
    assert output.startswith("Of unrecognised code: 1 affected (CPU double).")
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
    (fork / FLASHMLA).write_text((fork / FLASHMLA).read_text() + "\n# another\n")
    assert would_be(f"on:{tree}") == "incompatible"


def test_a_fork_without_the_defect_gets_no_advice_to_patch(tmp_path: Path) -> None:
    """Its plan is in the buffers, in other words than upstream's."""
    by_len = [re.sub(r"(\w+)\.size\(0\)", r"len(\1)", line) for line in COPIED]
    fork = edited(release_root("0.18.1"), tmp_path / "vllm", {FLASHMLA: before(POINTED_AT, *by_len)})
    code, output = run("verify", "--vllm", str(fork), FIX.name)
    assert (code, "on:" in output) == (0, False), output
