"""Shell completion, as typer makes it: scripts for three shells, and names of fixes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_graphfix.commands.cli import app
from vllm_graphfix.fixes import BY_NAME

INSTRUCTION = "_VLLM_GRAPHFIX_COMPLETE"
"""The variable that the scripts of the shells set."""


def answered(**environment: str) -> str:
    done = CliRunner().invoke(app, [], prog_name="vllm-graphfix", env=environment)
    assert done.exit_code == 0
    return done.output


def offered(line: str, shell: str) -> str:
    """Return the completions that a shell's script gets for *line*, whose last word is being typed."""
    if shell == "bash":
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    else:
        words = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return answered(**{INSTRUCTION: f"complete_{shell}"}, **words)


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o default -F _vllm_graphfix_completion vllm-graphfix"),
        ("zsh", "#compdef vllm-graphfix"),
        ("fish", "complete --command vllm-graphfix"),
    ],
)
def test_each_shell_has_a_script(shell: str, registers: str) -> None:
    script = answered(**{INSTRUCTION: f"source_{shell}"})
    assert registers in script
    assert f"{INSTRUCTION}=complete_{shell}" in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("command", ["explain", "verify"])
def test_names_of_fixes_are_offered(command: str, shell: str) -> None:
    completions = offered(f"vllm-graphfix {command} ", shell)
    assert [name for name in BY_NAME if name not in completions] == []


@pytest.mark.parametrize(("typed", "prefix"), [("flash", "flash"), ("flashmla", "flashmla-"), ("xyzzy", "")])
def test_only_names_that_begin_so_are_offered(typed: str, prefix: str) -> None:
    completions = offered(f"vllm-graphfix explain {typed}", "bash").split()
    assert completions == [name for name in BY_NAME if prefix and name.startswith(prefix)]


def test_a_second_fix_to_verify_is_offered_too() -> None:
    assert "capture-state" in offered("vllm-graphfix verify mamba-padding ca", "bash")


def test_commands_and_options_are_offered() -> None:
    assert "fleet" in offered("vllm-graphfix fl", "bash")
    assert {"--check", "--json", "--vllm"} <= set(offered("vllm-graphfix status --", "bash").split())


def test_vllm_flags_of_compare_are_for_the_shell_to_complete() -> None:
    assert offered("vllm-graphfix compare some/model --kv-cache-dtype f", "bash").split() == []


def test_bash_completes_once_it_is_installed(tmp_path: Path) -> None:
    """--install-completion asks which shell started it, and writes to that one's start-up file."""
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    install = "vllm-graphfix --install-completion; true"  # without a second command bash would not be its parent
    complete = """. ~/.bashrc; COMP_WORDS=(vllm-graphfix explain draft-d) COMP_CWORD=2
        "$(complete -p vllm-graphfix | sed 's/.* -F \\([^ ]*\\) .*/\\1/')" vllm-graphfix; echo "${COMPREPLY[@]}" """
    for script in (install, complete):
        done = subprocess.run(
            ["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "draft-decode-mode\n"


def test_a_home_that_nothing_can_be_written_to_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_graphfix", "--install-completion", "bash"],
        env={**os.environ, "HOME": "/proc/nobody", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "vllm-graphfix: cannot write the output: /proc/nobody: No such file or directory"
    ]
