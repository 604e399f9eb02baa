"""Runs the scenario of one fix on the vLLM of this process, and prints a line of JSON: numbers, or what was raised, and the fix's state."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

SCENARIOS = "vllm_graphfix.verify.double."


class InOtherWords(importlib.machinery.SourceFileLoader):
    """Loads a module of the scenarios with words of vLLM's replaced by what they are called in this one."""

    def __init__(self, name: str, path: str, renamed: dict[str, str]) -> None:
        super().__init__(name, path)
        self._renamed = renamed

    def path_stats(self, path: str) -> Any:
        raise OSError(path)  # no bytecode

    def get_data(self, path: str) -> bytes:
        words = re.compile(rf"\b({'|'.join(map(re.escape, self._renamed))})\b")
        return words.sub(lambda found: self._renamed[found.group()], super().get_data(path).decode()).encode()


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, renamed: dict[str, str]) -> None:
        self._renamed = renamed

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith(SCENARIOS):
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None and found.origin is not None and found.submodule_search_locations is None:
            found.loader = InOtherWords(name, found.origin, self._renamed)
        return found


def with_its_own_init(scenario: Any) -> Any:
    """FlashMLA's metadata builder as its `__init__` makes it, its base's `__init__` left out; the scenario alone goes without."""
    made = scenario._metadata_builder

    def builder(full_graphs: bool) -> Any:
        base: Any = made(full_graphs)
        kind: Any = type(base)
        common = sys.modules[kind.__module__].MLACommonMetadataBuilder
        config = SimpleNamespace(
            model_config=SimpleNamespace(get_num_attention_heads=lambda _: scenario.HEADS),
            parallel_config=None,
            cache_config=SimpleNamespace(cache_dtype="fp8"),
            scheduler_config=SimpleNamespace(max_num_seqs=scenario.MAX_REQUESTS),
        )
        left = {name: value for name, value in vars(base).items() if not name.startswith(("cg_buf", "is_fp8", "num_q"))}

        def common_init(self: Any, *_: Any) -> None:
            vars(self).update(left)

        with mock.patch.object(common, "__init__", common_init):
            return kind(None, [], config, scenario.CPU)

    return mock.patch.object(scenario, "_metadata_builder", builder)


def measured(fix: str) -> dict[str, Any]:
    from vllm_graphfix.verify.double.flashmla import SM_PARTS, install_flashmla_stand_ins

    install_flashmla_stand_ins()
    units = SimpleNamespace(multi_processor_count=SM_PARTS)
    with mock.patch("torch.cuda.get_device_properties", return_value=units):
        from vllm.utils import platform_utils

        if hasattr(platform_utils, "num_compute_units"):
            platform_utils.num_compute_units = lambda *_: SM_PARTS
        scenario = importlib.import_module(f"{SCENARIOS}scenarios.{fix.replace('-', '_')}")
        if fix.startswith("flashmla"):
            with with_its_own_init(sys.modules[f"{SCENARIOS}scenarios.flashmla_fp8"]):
                found = scenario.run()
        else:
            found = scenario.run()
    return {"eager": found.eager, "graphed": found.graphed, "error": found.error}


def main(fix: str, renamed: dict[str, str], shape: str | None) -> None:
    """With *shape* the fix is applied as if the diagnosis had named that one."""
    import vllm_graphfix
    from vllm_graphfix import fixes
    from vllm_graphfix.fix import Diagnosis, Verdict

    if shape is not None:
        forced = Diagnosis(Verdict.AFFECTED, "forced", None, shape)
        fixes.FIXES = tuple(
            each._replace(diagnose=lambda _: forced) if each.name == fix else each for each in fixes.FIXES
        )
    vllm_graphfix.register()
    if renamed:
        sys.meta_path.insert(0, Finder(renamed))
    try:
        result = measured(fix)
    except BaseException as error:
        result = {"raised": f"{type(error).__name__}: {error}"}
    state = vllm_graphfix.states()[fix]
    fallback = next(each.fallback.reason for each in fixes.FIXES if each.name == fix)
    print(json.dumps(result | {"state": state.state.value, "reason": state.reason, "fallback": fallback}))  # noqa: T201 - the result
