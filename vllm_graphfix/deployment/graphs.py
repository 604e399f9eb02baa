"""The CUDA graphs of a deployment."""

from __future__ import annotations

from functools import cached_property

from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.flags import CONFIG_FILE, Flags

FULL_MODES = frozenset({"FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"})
_MODES = ("NONE", "PIECEWISE", "FULL")
"""By their numbers."""
_LEVELS = {"0": "NONE", "1": "PIECEWISE", "2": "FULL_AND_PIECEWISE", "3": "FULL_AND_PIECEWISE"}
_OTHER_MODE = (
    "mode",
    "level",
    "backend",
    "splitting_ops",
    "pass_config",
    "use_cudagraph",
    "full_cuda_graph",
    "use_inductor_graph_partition",
)
"""Keys of --compilation-config that may change the configured graph mode."""


class Graphs(Flags):
    @cached_property
    def _graph_mode(self) -> tuple[str | None, str]:
        """Return the cudagraph_mode and its source, or None and the information that is missing."""
        eager = self._flags.get("--enforce-eager")
        if eager is not None and eager.unsure is None:
            return "NONE", "--enforce-eager switches CUDA graphs off"
        if eager is not None:
            return None, str(eager.unsure)
        config, missing = self._object("--compilation-config")
        if missing is not None:
            return None, missing
        mode, source = _mode(config.get("cudagraph_mode")), "--compilation-config"
        if mode is None and config.get("cudagraph_mode") is not None:
            return None, "a cudagraph_mode that vLLM knows in --compilation-config"
        if mode == "NONE":
            return mode, "cudagraph_mode is NONE"
        if mode is None:
            level, missing = self.value("--optimization-level")
            if missing is not None:
                return None, missing
            if level is not None and level not in _LEVELS:
                return None, "an -O of 0 to 3"
            mode, source = _LEVELS[level or "2"], f"-O{level}" if level else "the default"
            if mode == "NONE":
                return mode, "-O0 switches CUDA graphs off"
        changed = [
            key for key in _OTHER_MODE if key in config and not (key == "mode" and config[key] in (3, "VLLM_COMPILE"))
        ]
        if changed:
            return (
                None,
                (
                    "the cudagraph_mode that vLLM logs when it starts "
                    f"({changed[0]} in --compilation-config may change it)"
                ),
            )
        for name in ("TORCH_COMPILE_DISABLE", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
            if self._environment.get(name, "") not in ("", "0"):
                return None, f"the cudagraph_mode that vLLM logs when it starts ({name} may change it)"
        for name in (
            "--kv-transfer-config",
            "--kv-offloading-size",
            "--max-cudagraph-capture-size",
            "--runner",
            "--convert",
            "--task",
        ):
            if self._has(name) and self.value(name)[0] not in ("generate", "none", "auto"):
                return None, f"the cudagraph_mode that vLLM logs when it starts ({name} may change it)"
        if self.value("--all2all-backend")[0] == "deepep_high_throughput":
            return None, "the cudagraph_mode that vLLM logs when it starts (--all2all-backend may change it)"
        if "--config" in self._flags and mode in FULL_MODES:
            return None, CONFIG_FILE
        return mode, f"cudagraph_mode is {mode} ({source})"

    def full_graphs(self) -> Fact:
        """Decodes run in full CUDA graphs."""
        mode, source = self._graph_mode
        return Fact(None if mode is None else mode in FULL_MODES, source)

    def graphs(self) -> Fact:
        """There are CUDA graphs, full or piecewise."""
        mode, source = self._graph_mode
        return Fact(None if mode is None else mode != "NONE", source)

    def piecewise_decodes(self) -> Fact:
        """Decodes run in piecewise CUDA graphs."""
        mode, source = self._graph_mode
        return Fact(None if mode is None else mode == "PIECEWISE", source)

    def prompts_in_full_graphs(self) -> Fact:
        """Steps with prefills run in full CUDA graphs, the same as decodes."""
        mode, source = self._graph_mode
        return Fact(None if mode is None else mode == "FULL", source)

    def prompts_in_graphs(self) -> Fact:
        """Steps with prefills run in CUDA graphs, full or piecewise."""
        mode, source = self._graph_mode
        return Fact(None if mode is None else mode in ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE"), source)

    def compiles(self) -> Fact:
        """torch.compile compiles the model."""
        eager = self.switched_on("--enforce-eager")
        if eager.holds is not False:
            return Fact(False, "--enforce-eager switches torch.compile off") if eager.holds else eager
        config, missing = self._object("--compilation-config")
        level, unknown = self.value("--optimization-level")
        if missing is not None or unknown is not None:
            return Fact(None, str(missing or unknown))
        if config.get("mode") in (0, "NONE"):
            return Fact(False, "the mode of --compilation-config switches torch.compile off")
        if level == "0" and "mode" not in config:
            return Fact(False, "-O0 switches torch.compile off")
        return Fact(True, "torch.compile is on")

    def encoder_graphs(self) -> Fact:
        """Encoders of images have CUDA graphs of their own."""
        eager = self.switched_on("--enforce-eager")
        if eager.holds is not False:
            return Fact(False, "--enforce-eager switches CUDA graphs off") if eager.holds else eager
        config, missing = self._object("--compilation-config")
        enabled = config.get("cudagraph_mm_encoder", False)
        if missing is not None or not isinstance(enabled, bool):
            return Fact(None, missing or "a cudagraph_mm_encoder that vLLM knows in --compilation-config")
        return Fact(enabled, f"cudagraph_mm_encoder is {'on' if enabled else 'off'}")


def _mode(value: object) -> str | None:
    if type(value) is int and 0 <= value < len(_MODES):
        return _MODES[value]
    if isinstance(value, str) and value.upper() in (*_MODES, *FULL_MODES):
        return value.upper()
    return None
