"""Runs the scenario of one fix on the vLLM of this process, and prints a line of JSON.

The line has numbers, or what was raised, and the state of the fix.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import sys
import threading
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
        return words.sub(lambda match: self._renamed[match.group()], super().get_data(path).decode()).encode()


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, renamed: dict[str, str]) -> None:
        self._renamed = renamed

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith(SCENARIOS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None and spec.submodule_search_locations is None:
            spec.loader = InOtherWords(name, spec.origin, self._renamed)
        return spec


def with_its_own_init(scenario: Any) -> Any:
    """FlashMLA's metadata builder as its `__init__` makes it, without the `__init__` of its base.

    The scenario alone has a builder without its `__init__`.
    """
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
        inherited = {
            name: value for name, value in vars(base).items() if not name.startswith(("cg_buf", "is_fp8", "num_q"))
        }

        def common_init(self: Any, *_: Any) -> None:
            vars(self).update(inherited)

        with mock.patch.object(common, "__init__", common_init):
            return kind(None, [], config, scenario.CPU)

    return mock.patch.object(scenario, "_metadata_builder", builder)


def install_stand_ins() -> None:
    """Before any module takes what they stand for."""
    from vllm.utils import platform_utils

    from vllm_graphfix.verify.double.flashmla import SM_PARTS, install_flashmla_stand_ins

    install_flashmla_stand_ins()
    if hasattr(platform_utils, "num_compute_units"):
        platform_utils.num_compute_units = lambda *_: SM_PARTS


def measured(fix: str) -> dict[str, Any]:
    from vllm_graphfix.verify.double.flashmla import SM_PARTS
    from vllm_graphfix.verify.trial import scenario_place

    install_stand_ins()
    units = SimpleNamespace(multi_processor_count=SM_PARTS)
    with mock.patch("torch.cuda.get_device_properties", return_value=units):
        scenario = importlib.import_module(scenario_place(fix).partition(":")[0])
        if fix.startswith("flashmla"):
            with with_its_own_init(sys.modules[f"{SCENARIOS}scenarios.flashmla_fp8"]):
                result = scenario.run()
        else:
            result = scenario.run()
    return {"eager": result.eager, "graphed": result.graphed, "error": result.error}


class Calls:
    """A context manager that sees which functions of vLLM call which meanwhile, as (path, qualified name).

    It also sees which are called by nobody of vLLM's.
    """

    def __init__(self) -> None:
        import vllm

        self.seen: set[tuple[tuple[str, str] | None, tuple[str, str]]] = set()
        self._folder = str(vllm.__file__).removesuffix("vllm/__init__.py")
        self._known: dict[Any, tuple[str, str] | None] = {}

    def __enter__(self) -> Calls:  # noqa: PYI034 - nobody derives from it
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _named(self, code: Any) -> tuple[str, str] | None:
        if code not in self._known:
            path = code.co_filename.removeprefix(self._folder)
            name = code.co_qualname.partition(".<locals>")[0]
            ours = path != code.co_filename and not name.startswith("<")
            self._known[code] = (path, name) if ours else None
        return self._known[code]

    def _look(self, frame: Any, event: str, _: Any) -> None:
        called = self._named(frame.f_code) if event == "call" else None
        if called is not None:
            frame = frame.f_back
            while frame is not None and self._named(frame.f_code) in (None, called):
                frame = frame.f_back
            self.seen.add((self._named(frame.f_code) if frame else None, called))


def main(fix: str, renamed: dict[str, str], shape: str | None, traced: bool = False) -> None:
    """Runs the scenario of *fix*.

    With *shape* the fix is applied as if the diagnosis had named that one; *traced*: with the functions that call each
    other.
    """
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
    calls = Calls() if traced else None
    try:
        with calls or contextlib.nullcontext():
            result = measured(fix)
    except BaseException as error:
        result = {"raised": f"{type(error).__name__}: {error}"}
    if calls is not None:
        result["calls"] = sorted(calls.seen, key=repr)
    state = vllm_graphfix.states()[fix]
    fallback = vllm_graphfix._this_process().manager.activity(fix).error
    print(json.dumps(result | {"state": state.state.value, "reason": state.reason, "fallback": fallback}))  # noqa: T201 - the result


def main_both(fix: str, renamed: dict[str, str]) -> None:
    """A line without the fixes, and one with them: in two processes that share the imports of what the fix patches.

    Whether a module is imported before the plugin or after is the same to it.
    """
    from vllm_graphfix.fixes import BY_NAME

    install_stand_ins()
    for name in BY_NAME[fix].modules:
        with contextlib.suppress(Exception):  # the scenario says so
            importlib.import_module(name)
    for switch in ("off", "on"):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            signal.alarm(50)
            os.environ["VLLM_GRAPHFIX"] = switch
            main(fix, renamed, None)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
