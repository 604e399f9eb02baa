"""Code that loads the plugin in a process of a release, and the states of the fixes that it prints."""

from __future__ import annotations

import json

from table import affected_by, state_by_default
from vllm_graphfix.fixes import BY_NAME, FIXES
from warm_release import run_in_fork

REPORT = """
import json, vllm_graphfix
print("REPORT " + json.dumps({
    name: [each.mode.value, each.state.value, each.reason, each.diagnosis and each.diagnosis.verdict.value]
    for name, each in vllm_graphfix.states().items()
}))
"""


LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins()\n"


def imports(release: str) -> str:
    """Code that imports every target that *release* has."""
    modules = sorted({module for name in affected_by(release) for module in BY_NAME[name].modules})
    return f"""
import importlib, importlib.util, sys, types
if importlib.util.find_spec("torchvision") is None:  # which models of images import
    for name in ("image_processing_qwen2_vl", "video_processing_qwen2_vl"):
        stand_in = sys.modules.setdefault(f"transformers.models.qwen2_vl.{{name}}", types.ModuleType(name))
        vars(stand_in).update(smart_resize=None, Qwen2VLVideoProcessor=None)
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(error.name + "."):
            raise
"""


def states(release: str, code: str, env: dict[str, str] | None = None) -> dict[str, list[str]]:
    return reported(run_in_fork(release, code, env).stdout)


def reported(output: str) -> dict[str, list[str]]:
    line = next(line for line in reversed(output.splitlines()) if line.startswith("REPORT "))
    report: dict[str, list[str]] = json.loads(line.removeprefix("REPORT "))
    return report


def expected(release: str) -> dict[str, str]:
    return {fix.name: state_by_default(fix.name, release) for fix in FIXES}
