"""`compare` from end to end on a real engine: PyPI's vLLM for CPUs, tiny models.

An engine on a CPU has no CUDA graphs, and `compare` has to say so. What a defect of graphs does is planted
(`planted_corruption`).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import planted_corruption
import planted_plugin
from engine import check_compare, report, write_llama
from table import affected_by, state_by_default
from vllm_graphfix.fixes import BY_NAME
from vllm_graphfix.verify.engine import models

Done = subprocess.CompletedProcess[str]
SMALL = ("-O0", "--max-model-len", "256")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 300], [3, 4, 5], [900, 800, 700, 600, 500]]
TOKENS = (16, 14, 12, 10)
"""The number of tokens of the answers to four prompts."""
FIRST = TOKENS[-1]
"""The token from which on three of the four are decoded together, which is what the planted corruption hits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, its draft head, and prompts; where `compare` is called."""
    made = tmp_path_factory.mktemp("compare")
    write_llama(made)
    models.write("eagle", made)
    (made / "ids.jsonl").write_text("".join(f"{json.dumps({'prompt_token_ids': ids})}\n" for ids in PROMPTS))
    (made / "texts.txt").write_text("w5 w6 w7 w8\n\nw900 w800 w3\nw77 w5 w77\n")
    return made


on_two_ranks = pytest.mark.xdist_group("compare on two ranks")
planted = pytest.mark.xdist_group("compare what is planted")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[str, Any]:
    """Text through a tokenizer, a draft model, two ranks, every process that vLLM has in production.

    It takes two minutes, for `make test-all`.
    """
    draft = json.dumps({"method": "eagle", "model": "./eagle", "num_speculative_tokens": 2})
    flags = (*SMALL, "-tp", "2", "--speculative-config", draft)
    every_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = ("./llama", "--prompts", "texts.txt", "--max-tokens", "16", "--json", *flags)
    return report(check_compare(folder, *command, env=every_process, code=3)) | {"flags given": list(flags)}


@pytest.mark.slow
@on_two_ranks
def test_equal_answers_are_equal(two_ranks: dict[str, Any]) -> None:
    assert not two_ranks["corrupt"]
    assert [(prompt["kind"], prompt["length"]) for prompt in two_ranks["prompts"]] == [
        ("equal", 16),
        ("equal", 13),
        ("equal", 11),
    ]
    assert two_ranks["tokens"] == two_ranks["compared"] == 40


@pytest.mark.slow
@on_two_ranks
def test_every_rank_tells_the_states_of_its_fixes(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["fixes"].keys() == {"0", "1"}
    for states in two_ranks["fixes"].values():
        assert states.keys() == BY_NAME.keys()
        for name, state in states.items():  # a CPU has no use for some modules
            assert state in {state_by_default(name, "0.27.0"), "waiting"}
            assert (state == "not-needed") == (name not in affected_by("0.27.0"))


@pytest.mark.slow
@on_two_ranks
def test_drafts_are_counted_in_both_engines(two_ranks: dict[str, Any]) -> None:
    """Twice as many where all was asked twice."""
    (_, eager), (_, graphs) = two_ranks["drafts"]["eager"], two_ranks["drafts"]["graphs"]
    assert eager > graphs >= 40
    assert not two_ranks["drafts"]["lost"]


@pytest.mark.slow
@on_two_ranks
def test_an_engine_without_graphs_is_no_proof(two_ranks: dict[str, Any]) -> None:
    """Its exit code was 3."""
    assert two_ranks["cudagraph_mode"] == "NONE"
    assert "no CUDA graphs were used" in two_ranks["inconclusive"]


@pytest.mark.slow
@on_two_ranks
def test_the_report_names_what_was_compared(two_ranks: dict[str, Any]) -> None:
    output = {
        name: two_ranks[name] for name in ("schema", "model", "flags", "vllm", "device", "switches", "error", "logs")
    }
    assert output == {
        "schema": 1,
        "model": "./llama",
        "flags": two_ranks["flags given"],
        "vllm": "0.27.0",
        "device": output["device"],
        "switches": "VLLM_GRAPHFIX=on",
        "error": None,
        "logs": None,
    }


def corrupted(folder: Path, modes: str, *arguments: str, code: int) -> Done:
    path = folder / "planted"
    if not path.exists():
        planted_plugin.install(path, "planted_corruption")
    command = ("./llama", "--max-tokens", str(TOKENS[0]), *SMALL, *arguments)
    return check_compare(folder, *command, env={planted_corruption.VARIABLE: modes}, path=(path,), code=code)


@planted
def test_corruption_with_graphs_alone_is_detected_where_it_begins(folder: Path) -> None:
    done = corrupted(folder, "graphs", "--prompts", "ids.jsonl", "--skip-tokenizer-init", code=1)
    *_, verdict = done.stdout.splitlines()
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("corrupt") and "token" in line]
    assert [row[:5] for row in rows] == [[str(i), "token", str(FIRST), "of", str(TOKENS[i])] for i in range(3)]
    assert all(
        int(actual) == (int(expected) + 1) % models.VOCABULARY for expected, actual in (row[5:7] for row in rows)
    )
    bars = [line.split() for line in done.stdout.splitlines() if "█" in line and "compiled" not in line]
    assert bars == [["10-11", "█" * 40, "3"]]
    assert "4 prompts: 1 equal, 0 diverge at a tie, 3 corrupt; 40 of 52 tokens compared" in done.stdout
    assert "also compared with the compiled engine without graphs" in done.stdout
    assert verdict == "corruption"
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["eager", "graphs", "no graphs", "scored"]


@planted
def test_a_batch_that_rounds_otherwise_in_the_size_of_its_graph_is_not_called_corruption(folder: Path) -> None:
    """Three requests run in a graph of four; without graphs, four requests get the same tokens.

    With each replay to be compared there is no verdict all the same: a CPU has no graphs.
    """
    path = folder / "planted"
    if not path.exists():
        planted_plugin.install(path, "planted_corruption")
    command = (
        "./llama",
        "--prompts",
        "ids.jsonl",
        "--max-tokens",
        "16",
        "--skip-tokenizer-init",
        "--exact",
        "--gap",
        *SMALL,
    )
    done = check_compare(folder, *command, env={planted_corruption.ROUNDING: "1"}, path=(path,), code=3)
    (counts,) = (line for line in done.stdout.splitlines() if line.startswith("4 prompts: "))
    assert "1 equal, 0 diverge at a tie, 3 equal to compiled and padded without graphs, 0 corrupt; 52 of 52" in counts
    assert "also in batches of the sizes that graphs have" in done.stdout
    (whose,) = (line for line in done.stdout.splitlines() if line.startswith("batch size and padding"))
    assert whose.split()[-2:] == ["3", "100%"]
    assert done.stdout.splitlines()[-1].startswith("inconclusive: no CUDA graphs were used")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        *("eager", "graphs", "exact", "no graphs", "padded")
    ]


@planted
@pytest.mark.slow
def test_what_is_there_without_graphs_too_is_not_called_corruption(folder: Path) -> None:
    """The prompts are made up.

    The user has a worker extension, so that the workers cannot be asked for their states.
    """
    extension = ("--worker-extension-cls", "planted_corruption.WorkerExtension")
    # How many log-probabilities a user may ask for, and of what, is not what is compared.
    limits = ("--max-logprobs", "0", "--logprobs-mode", "processed_logits")
    actual = report(corrupted(folder, "graphs,no graphs", "--num-prompts", "4", *extension, *limits, "--json", code=3))
    assert [prompt["kind"] for prompt in actual["prompts"]] == ["compiled"] * 3 + ["equal"]
    assert (actual["corrupt"], actual["fixes"], actual["cudagraph_mode"]) == (False, {}, "NONE")


WRONG = [
    (
        ("./llama", "--tensor-paralel-size", "2"),
        "vLLM rejects these flags: unrecognized arguments: --tensor-paralel-size",
    ),
    (
        ("./llama", "--runner", "pooling"),
        "the engine does not run even without graphs: ValueError: LLM.generate() is only",
    ),
]


@planted
@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_what_vllm_refuses_is_one_line_in_its_own_words(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = check_compare(folder, *arguments, code=2)
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"vllm-graphfix: {message}")
    assert done.stdout == ""
