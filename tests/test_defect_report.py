"""`report --defect`: an issue for vLLM, and a test that fails on its stock code."""

from __future__ import annotations

import re
from functools import cache

import pytest
from typer.testing import CliRunner

from stock import release_root
from table import affected_by
from vllm_graphfix.commands.cli import app
from vllm_graphfix.fixes import BY_NAME, about
from vllm_graphfix.fixes._about import NEWEST
from warm_release import run_in_fork

pytestmark = pytest.mark.release
FAST = "triton-mla-padding"


def drafted(name: str, release: str = NEWEST, *, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["report", "--defect", name, "--vllm", str(release_root(release))])
    assert done.exit_code == code, done.output
    return done.output


def test_the_draft_names_release_place_and_threads() -> None:
    text = drafted("triton-mla-padding")
    assert text.startswith("# [Bug]: NaN in all answers of a batch")
    assert f"vLLM {NEWEST}." in text
    assert re.search(r"In this release: `vllm/v1/attention/ops/triton_decode_attention.py:\d+`", text)
    assert "issue 57017" in text
    assert about(BY_NAME[FAST]).symptom in text


RUN_DRAFTS = """
import traceback
for name, code in codes.items():
    made, outcome = {}, "passed on stock"
    try:
        exec(code, made)
        test = made[f"test_{name.replace('-', '_')}"]
        test(False)
        try:
            test(True)
        except AssertionError:
            outcome = "failed on stock"
    except Exception:
        outcome = traceback.format_exc()
    print(f"{name}: {outcome}")
"""


@cache
def drafts_run() -> str:
    """Run the tests of all drafts one after the other in one fork, which imports vLLM's runners once."""
    codes = {}
    for name in affected_by(NEWEST):
        (codes[name],) = re.findall(r"^```python\n(.*?)^```$", drafted(name), re.DOTALL | re.MULTILINE)
    return run_in_fork(NEWEST, f"codes = {codes!r}\n{RUN_DRAFTS}").stdout


@pytest.mark.xdist_group(NEWEST)
@pytest.mark.parametrize("name", affected_by(NEWEST))
def test_the_test_of_the_draft_fails_on_stock_and_only_by_the_defect(name: str) -> None:
    """It passes without the defect's condition: what fails is no misfit of the test."""
    assert f"{name}: failed on stock" in drafts_run().splitlines(), drafts_run()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--defect", "flashmla-fp8"), 3, f"vLLM {NEWEST}: fixed: "),
        (("--defect", "flashmla-fp"), 2, "flashmla-fp8"),
        (("--defect", FAST, "--dir", "/"), 2, "name one of them"),
        ((), 2, "--vllm only goes with --defect"),
    ],
)
def test_what_has_no_draft_is_an_error_that_says_why(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = CliRunner().invoke(app, ["report", *arguments, "--vllm", str(release_root(NEWEST))])
    assert done.exit_code == code
    assert message in done.output
