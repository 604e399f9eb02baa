"""Records which stock releases each fix patches, for the next version: `make release` runs it.

    python tools/record_verdicts.py

A test compares the manifest with what is recorded here, so that no release loses a fix without a line in the changelog.
"""

from __future__ import annotations

from pathlib import Path

from vllm_graphfix import manifest
from vllm_graphfix.fix import Verdict

RECORDED = Path(__file__).parent.parent / "tests" / "patched_by_the_last_version.json"


def patched() -> dict[str, list[str]]:
    """Return the stock releases with the defect of each fix, by the manifest."""
    return {
        name: [
            version for entry in entries if entry["verdict"] == Verdict.AFFECTED.value for version in entry["releases"]
        ]
        for name, entries in manifest.load()["fixes"].items()
    }


if __name__ == "__main__":
    lines = (f' "{name}": "{" ".join(releases)}"' for name, releases in patched().items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"wrote {RECORDED.name}")
