"""A draft of an issue for vLLM about a known defect, with a test that fails on stock, from what the plugin knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graphfix.commands.explain import references
from vllm_graphfix.deployment import needs
from vllm_graphfix.fixes import about

if TYPE_CHECKING:
    from vllm_graphfix.fix import Diagnosis, Fix

_ISSUE = """# [Bug]: {seen}

vLLM {vllm}.

**What happens.** {symptom}

**When.** {needs}

**Why.** {cause} In this release: `{where}`.

**How to see it.** {detect}

**A remedy.** {remedy}

**Until then.** {workaround}

Related: {references}.
"""
_TEST = '''
## A test that fails on it

It needs `pip install pytest vllm-graphfix` and no GPU. vLLM's own classes run twice: without graphs, and on a CPU
double of CUDA graphs, which records operations in a capture and runs them, on the recorded addresses, in a replay.
Nothing of vLLM is patched.

```python
"""{name}: with CUDA graphs the numbers are those without."""

import pytest
from vllm_graphfix.verify.double.worker import run_on_stock
from vllm_graphfix.verify.proof import differing


@pytest.mark.parametrize("trigger", [False, True], ids=["without its condition", "with it"])
def test_{function}(trigger: bool) -> None:
    measured = run_on_stock("{name}", trigger=trigger)
    assert measured.error is None
    assert differing(measured.eager, measured.graphed) == 0, measured.numbers
```
'''


def markdown(fix: Fix, vllm: str | None, diagnosis: Diagnosis) -> str:
    """Return the draft for *fix*, which this *vllm* needs by its *diagnosis*."""
    known = about(fix)
    fields = {
        "seen": known.seen.replace("`", ""),
        "vllm": vllm or "of unknown version",
        "needs": needs.described(fix.needs()),
        "where": diagnosis.where or diagnosis.reason,
        "references": references(known) or "none known",
        **{name: getattr(known, name) for name in ("symptom", "cause", "detect", "remedy", "workaround")},
    }
    return _ISSUE.format(**fields) + _TEST.format(name=fix.name, function=fix.name.replace("-", "_"))
