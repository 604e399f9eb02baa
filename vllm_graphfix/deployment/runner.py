"""The model runner of a deployment: vLLM has two, V1 and V2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Literal

from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.model import MAMBA, OTHER_RECURRENT, Model
from vllm_graphfix.source.files import Source

_V2 = "VLLM_USE_V2_MODEL_RUNNER"
_CONFIG_MODULE = "vllm/config/vllm.py"
_ENVS = "vllm/envs.py"
_SPECULATOR = "--speculative-config"


Default = Literal["V1", "V1, V2 for some models", "V2", ""]
"""The model runner of engines for which nobody chooses one; empty if the code of a vLLM does not show it."""


_SINCE: tuple[tuple[tuple[int, ...], Default], ...] = (((0, 29), "V2"), ((0, 22), "V1, V2 for some models"))
"""The first stock release with each default, newest first; V1 before."""
_FIRST = frozenset({"Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"})
_MIXTURES = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})
SERVED_BY_V2: Mapping[tuple[int, ...], frozenset[str]] = {
    (0, 22): frozenset({"Qwen3ForCausalLM"}),
    (0, 23): _FIRST,
    (0, 24): _FIRST | _MIXTURES,
}
"""The architectures that V2 serves by default in stock releases that choose by name alone."""
CHOOSERS: Mapping[str, tuple[str, ...]] = {
    "0.32.0": ("13ccfc114d7da3f6a6a435e2", "e7d0fe9ac6f363bed07a341d"),
    "0.33.0": ("352c8bda123ea6896a82b560", "b72a5e9351efd0eca762848f"),
}
"""Fingerprints of the functions that choose the model runner, in stock releases whose V2 refuses `_REFUSED` alone."""
_CHOOSERS = ("use_v2_model_runner", "_get_v2_model_runner_unsupported_features")
_REFUSED = (
    *("suffix", "medusa", "mlp_speculator", "custom_class", "parallel_drafting", "heterogeneous_vocab"),
    *("dbo", "ubatch", "external_launcher"),
)
"""Words of a line without which V2 serves it."""


@lru_cache(maxsize=1)
def default_runner(source: Source) -> Default:
    """Return the default model runner of *source*. Where it is V2, V1 still serves the features that V2 lacks."""
    if source.release is not None:
        release = tuple(map(int, source.release.split(".")))
        return next((default for since, default in _SINCE if release >= since), "V1")
    if not source.contains_word(_CONFIG_MODULE, "use_v2_model_runner"):
        by_variable = re.search(rf'getenv\("{_V2}", "0"\)'.encode(), source.read(_ENVS) or b"")
        return "V1" if by_variable or not source.contains_word(_ENVS, _V2) else ""
    if source.contains_word(_CONFIG_MODULE, "_is_default_v2_model_runner_model"):
        return "V1, V2 for some models"
    return "V2" if source.contains_word(_CONFIG_MODULE, "_get_v2_model_runner_unsupported_features") else ""


class Runner(Model):
    def runner(self, wanted: str) -> Fact:
        """The model runner is *wanted*, ``V1`` or ``V2``."""
        name, reason = self._runner
        return Fact(None if name is None else name == wanted, reason)

    @cached_property
    def _runner(self) -> tuple[str | None, str]:
        # Features of later releases that need V2 and say so only when vLLM starts.
        if any(word in self._line for word in ("hisparse", "watermark")):
            return None, "the model runner that vLLM logs when it starts"
        value = self._environment.get(_V2)
        if value is not None:
            chosen = self.setting(_V2)
            if chosen is None:
                return None, f"{_V2} being 0 or 1"
            return ("V2" if chosen else "V1"), f"{_V2}={int(chosen)} chooses model runner {'V2' if chosen else 'V1'}"
        default = self._runner_by_default()
        if default in ("V1", "V2"):
            return default, f"{_V2} is not set here, and this vLLM then uses model runner {default}"
        if default == "V1 for this model":
            return "V1", f"{_V2} is not set here, and this vLLM then uses model runner V1 for this model"
        return None, default

    def _runner_by_default(self) -> str:
        """Return ``V1``, ``V1 for this model``, ``V2``, or the information that is missing."""
        missing_runner = f"{_V2} set to 0 or 1, or the model runner that vLLM logs when it starts"
        if self._is_served_by_v2():
            return "V2"
        if self._source.release is not None:
            return self._of_release(self._source.release, missing_runner)
        if not self._source.contains_word(_CONFIG_MODULE, "use_v2_model_runner"):
            return default_runner(self._source) or missing_runner
        listed = self._source.function(_CONFIG_MODULE, "VllmConfig._is_default_v2_model_runner_model")
        first = self._source.function(_CONFIG_MODULE, "VllmConfig.use_v2_model_runner")
        known = first is not None and first.find("if not self._is_default_v2_model_runner_model(): return False")
        if listed is None or not known or self._has_drafts:
            return missing_runner
        architectures, missing = self._architectures
        if missing is not None:
            return missing
        by_name = any(
            listed.find(pattern)
            for pattern in (
                "if not any(arch in DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES for arch in architectures): return False",
                "return any(arch in DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES for arch in architectures)",
            )
        )
        text = self._source.read(_CONFIG_MODULE) or b""
        if by_name and not any(name.encode("utf-8", "replace") in text for name in architectures):
            return "V1 for this model"
        hybrid = listed.find("if getattr(model_config, 'is_hybrid', False): return False")
        if hybrid and architectures & (MAMBA | OTHER_RECURRENT):
            return "V1 for this model"
        return missing_runner

    def _of_release(self, release: str, missing_runner: str) -> str:
        """Return what `_runner_by_default` does, for a stock *release* whose code is not here."""
        if default_runner(self._source) == "V1":
            return "V1"
        served = SERVED_BY_V2.get(tuple(map(int, release.split(".")))[:2])
        if default_runner(self._source) == "V2" or self._has_drafts:
            return missing_runner
        architectures, missing = self._architectures
        # Without a list of names, V2 serves what is not recurrent, save for mixtures of experts.
        is_v1 = architectures & (MAMBA | OTHER_RECURRENT) if served is None else not architectures & served
        return missing or ("V1 for this model" if is_v1 else missing_runner)

    def _is_served_by_v2(self) -> bool:
        """Tell if V2 serves the line for certain, on a vLLM whose V2 refuses little."""
        if self._source.release is not None:
            known = self._source.release in CHOOSERS
        else:
            choosers = (self._source.function(_CONFIG_MODULE, f"VllmConfig.{name}") for name in _CHOOSERS)
            known = tuple(each.fingerprint() for each in choosers if each is not None) in CHOOSERS.values()
        method_known = not self._has_drafts or self._has("--spec-method") or "method" in self._object(_SPECULATOR)[0]
        line = self._line.replace("-", "_")
        return known and method_known and "--config" not in self._flags and not any(word in line for word in _REFUSED)

    @property
    def _has_drafts(self) -> bool:
        return self._has(_SPECULATOR) or self._has("--spec-method")
