"""Doctor's report on a machine without nvidia-smi, engines and records, for tests of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from stock import release_root
from vllm_graphfix.commands import doctor

PARTS = ["versions", "gpu", "platform", "plugin", "environment", "status", "fleet", "errors"]
TITLES = {
    "gpu": "GPU",
    "environment": "Environment of this process",
    "status": "What an engine started in this environment would do",
    "fleet": "What the records of engines say, each with the settings that it was started with",
}
HEAD = """\
<details>
<summary>The output of <code>vllm-graphfix doctor</code></summary>

```text
==============================
        vllm-graphfix
==============================
"""
FOOT = "```\n\n</details>\n"


@pytest.fixture
def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No nvidia-smi on the path, no processes of vLLM, and a folder of records that is empty."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("VLLM_GRAPHFIX_STATUS_DIR", str(tmp_path / "records"))
    (tmp_path / "records").mkdir()
    monkeypatch.setattr("vllm_graphfix.commands.fleet.survey.without_record", lambda *args: ((), ()))


def examined(release: str = "0.18.1", **environment: str) -> dict[str, Any]:
    report = doctor.examine(release_root(release), dict(os.environ) | environment)
    return json.loads(json.dumps(report.as_json()))  # type: ignore[no-any-return]


def pasted(release: str = "0.18.1", **environment: str) -> str:
    return doctor.markdown(doctor.examine(release_root(release), dict(os.environ) | environment))


def whole(text: str) -> bool:
    """Return True if *text* is a line of verdict and one fenced block of all parts, which nothing in it closes."""
    verdict, empty, folded = text.split("\n", 2)
    titles = [line for line in folded.splitlines() if re.fullmatch(r"[A-Z][^:]*:", line)]
    return (
        verdict.startswith("**vllm-graphfix ")
        and not empty
        and folded.startswith(HEAD)
        and folded.endswith(FOOT)
        and folded.count("```") == 2
        and folded.count("\n</details>") == 1
        and titles == [f"{TITLES.get(part, part.capitalize())}:" for part in PARTS]
    )
