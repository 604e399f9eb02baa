"""A module is patched only if it runs the source that was diagnosed.

Overlays, bytecode of another source, and files exchanged while vLLM starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edited import edited
from engaged import LOAD, REPORT, reported
from stock import release_root, run_in_release
from vllm_files import FLASHMLA

FIND = """
import importlib.util, pathlib, py_compile, sys, tempfile
import vllm.v1.attention.backends.mla as package
stock = pathlib.Path(package.__path__[0], "flashmla.py")
text = stock.read_text()
there = pathlib.Path(tempfile.mkdtemp())
"""
IMPORT = "import vllm.v1.attention.backends.mla.flashmla\n"
OTHERWISE = {
    "an overlay that is another text": (
        FIND
        + "(there / 'flashmla.py').write_text(text + '\\nTHEIRS = 1\\n')\npackage.__path__.insert(0, str(there))\n"
        + LOAD,
        "runs instead of",
    ),
    "an overlay that is the same text": (
        FIND + "(there / 'flashmla.py').write_text(text)\npackage.__path__.insert(0, str(there))\n" + LOAD,
        "runs instead of",
    ),
    "bytecode of another source": (
        FIND
        + "sys.pycache_prefix = str(there)\n(there / 'theirs.py').write_text(text + '\\nTHEIRS = 1\\n')\n"
        + "py_compile.compile(str(there / 'theirs.py'), importlib.util.cache_from_source(str(stock)), str(stock),"
        + " invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
        + LOAD,
        "does not run the code that was diagnosed",
    ),
    "a file that is exchanged between the diagnosis and the import": (
        LOAD + "import vllm.v1.worker.gpu.cudagraph_utils\n" + FIND + "stock.write_text(text + '\\nTHEIRS = 1\\n')\n",
        "does not run the code that was diagnosed",
    ),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] if "same" in how else []) for how in OTHERWISE]
)
def test_what_does_not_run_what_was_diagnosed_is_not_touched(tmp_path: Path, how: str) -> None:
    before, reason = OTHERWISE[how]
    root = edited(release_root("0.18.1"), tmp_path / "site", {FLASHMLA: lambda text: text + "\n"}, anonymous=False)
    states = reported(run_in_release(root, before + IMPORT + REPORT, libraries_loaded=True).stdout)
    for name in ("flashmla-fp8", "flashmla-padding"):
        assert states[name][1] == "conflict"
        assert reason in states[name][2]


@pytest.mark.slow
def test_bytecode_of_the_same_source_in_any_folder_is_what_was_diagnosed() -> None:
    code = FIND + "sys.pycache_prefix = str(there)\npy_compile.compile(str(stock))\n" + LOAD + IMPORT + REPORT
    states = reported(run_in_release("0.18.1", code).stdout)
    assert (states["flashmla-fp8"][1], states["flashmla-padding"][1]) == ("active", "active")
