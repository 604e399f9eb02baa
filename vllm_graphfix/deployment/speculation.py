"""The speculator of a deployment, if it has one."""

from __future__ import annotations

from functools import cached_property

from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.line import json_or
from vllm_graphfix.deployment.model import Model
from vllm_graphfix.deployment.secrets import brief_value

_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_NO_SPECULATOR = "there is no speculator (--speculative-config)"


class Speculation(Model):
    @cached_property
    def _speculator(self) -> tuple[str | None, int | None, str | None]:
        """Return method (empty for none), number of draft tokens, and the information that is missing."""
        config, missing = self._object("--speculative-config")
        if missing is not None:
            return None, None, missing
        for flag, key in (
            ("--spec-method", "method"),
            ("--spec-model", "model"),
            ("--spec-tokens", "num_speculative_tokens"),
        ):
            value, missing = self.value(flag)
            if missing is not None:
                return None, None, missing
            if value is not None:
                config = {**config, key: json_or(value, value)}
        if not config:
            model, missing = self._config
            if missing is not None:
                return None, None, f"{missing} (a model may bring its own speculator)"
            if "speculators_config" in model:
                return None, None, "--speculative-config (the model brings its own speculator)"
            return "", 0, None
        method, tokens = config.get("method"), config.get("num_speculative_tokens")
        if not isinstance(method, str):
            return None, None, "`method` in --speculative-config"
        return method.lower(), tokens if type(tokens) is int else None, None

    def speculator(self, *methods: str, several: bool = False) -> Fact:
        """Drafts come from one of *methods*; ``mtp`` also stands for its older names.

        *several*: more than one token of each draft.
        """
        method, tokens, missing = self._speculator
        if missing is not None or method is None:
            return Fact(None, missing or "`method` in --speculative-config")
        if not method:
            return Fact(False, _NO_SPECULATOR)
        source = f"the speculator is {brief_value(method, 40)}"
        if method not in methods and not ("mtp" in methods and method.endswith("_mtp")):
            return Fact(False, source)
        if several and tokens is None:
            return Fact(None, "`num_speculative_tokens` in --speculative-config")
        if several and tokens == 1:
            return Fact(False, "drafts have one token (num_speculative_tokens)")
        return Fact(True, source)

    def decode_length(self) -> str:
        """Return the number of tokens of a decode, as part of a sentence: one, and those that are drafted."""
        method, tokens, _ = self._speculator
        if not method:
            return "one token"
        return "one token more than are drafted" if tokens is None else f"{1 + tokens} tokens"

    def draft_model_lacks_graphs(self) -> bool:
        """Model runner V1 initialises no graphs of a draft model, as up to 0.25.1; False if that is not known."""
        function = self._source.function(_RUNNER, "GPUModelRunner._check_and_update_cudagraph_mode")
        return function is not None and not function.contains_name("uses_draft_model")

    def drafts(self) -> Fact:
        """There is a speculator, of whatever kind."""
        method, _, missing = self._speculator
        if missing is not None:
            return Fact(None, missing)
        return Fact(bool(method), f"the speculator is {brief_value(method or '', 40)}" if method else _NO_SPECULATOR)
