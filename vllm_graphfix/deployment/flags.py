"""What the flags and variables of a deployment say."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.known_flags import flags_of, nearest, unknown, wrong_value
from vllm_graphfix.deployment.line import FlagsError, json_or, parse
from vllm_graphfix.text import brief_repr

if TYPE_CHECKING:
    from vllm_graphfix.source.files import Source

CONFIG_FILE = "what the file of --config sets (write its flags on the line)"


class Flags:
    """What is given: the line, the environment under its assignments, the vLLM and the GPU."""

    def __init__(
        self,
        line: str,
        environment: Mapping[str, str],
        source: Source,
        gpu: str | None = None,
        asked: Collection[str] = (),
    ) -> None:
        """Raises FlagsError. *gpu*: the name of the GPU that serves; without it this machine's."""
        parsed = parse(line, asked)
        known = flags_of(source)
        for name in parsed.named:
            if unknown(name, known):
                close = nearest(name, known)
                raise FlagsError(
                    f"{brief_repr(name)} is no flag of vLLM {source.version or 'as given'}"
                    + (f"; did you mean {close}?" if close else "; `vllm serve --help=all` lists its flags")
                )
        for name, given in parsed.flags.items():
            instead = given.value and given.unsure is None and wrong_value(name, given.value, source)
            if instead:
                raise FlagsError(
                    f"vLLM {source.version or 'as given'} takes no {name} {brief_repr(given.value or '')}; {instead}"
                )
        if not line.split():
            raise FlagsError("--for is empty: give it the arguments of your `vllm serve`, the model first")
        self._line = line.lower()
        self._flags = parsed.flags
        self._models = parsed.models
        self.assigned = parsed.environment
        """Variables that are set in front of the line."""
        self._environment = {**environment, **parsed.environment}
        self._source = source
        self._gpu_named = gpu

    def value(self, name: str) -> tuple[str | None, str | None]:
        """The value of a flag (None where it is not given) and, if that may be another one, what is missing."""
        given = self._flags.get(name)
        if given is None:
            return None, CONFIG_FILE if "--config" in self._flags else None
        return given.value, given.unsure

    def switched_on(self, name: str) -> Fact:
        """The switch *name*, one without a value, is on the line; not on it, whatever vLLM takes then."""
        given = self._flags.get(name)
        if given is not None:
            return Fact(None, given.unsure) if given.unsure is not None else Fact(True, name)
        return Fact(None, CONFIG_FILE) if "--config" in self._flags else Fact(False, f"{name} is not given")

    def _given(self, name: str) -> bool:
        return name in self._flags

    def _object(self, name: str) -> tuple[dict[str, Any], str | None]:
        """The JSON object that a flag has for a value, empty where it is not given."""
        value, missing = self.value(name)
        if value is None or missing is not None:
            return {}, missing
        found = json_or(value, None)
        return (found, None) if isinstance(found, dict) else ({}, f"a JSON object for {name}")

    def _number(self, name: str) -> tuple[int | None, str | None]:
        value, missing = self.value(name)
        if value is None or missing is not None:
            return None, missing
        return (int(value), None) if re.fullmatch(r"\d{1,9}", value) else (None, f"a number for {name}")

    def setting(self, name: str) -> bool | None:
        """A variable of vLLM's that is 0 or 1; None for anything else."""
        return {"0": False, "1": True, "": None}.get(self._environment.get(name, "").strip())
