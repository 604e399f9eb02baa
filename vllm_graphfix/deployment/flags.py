"""Values of the flags and environment variables of a deployment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.hardware import first_bytes
from vllm_graphfix.deployment.known_flags import flags_of, nearest, unknown, wrong_value
from vllm_graphfix.deployment.line import FlagsError, FlagValue, json_or, parse
from vllm_graphfix.deployment.secrets import quoted_value

if TYPE_CHECKING:
    from typing_extensions import Self

    from vllm_graphfix.source.files import Source

CONFIG_FILE = "what the file of --config sets (write its flags on the line)"


class Flags:
    """The arguments of a `vllm serve`, its environment, its vLLM and its GPU."""

    def __init__(
        self,
        line: str,
        environment: Mapping[str, str],
        source: Source,
        gpu: str | None = None,
        flags: Collection[str] = (),
        read: Callable[[Path, int], bytes | None] = first_bytes,
    ) -> None:
        """Parse *line*; raise FlagsError for a flag or a value that the vLLM of *source* does not have.

        Assignments in front of the line overrule *environment*. *gpu* is the name of the GPU that serves; by default
        it is that of this machine. *flags* are read besides those that facts need. *read* returns the first bytes of a
        file of the process whose line this is.
        """
        parsed = parse(line, flags)
        known = flags_of(source)
        for name in parsed.named:
            if unknown(name, known):
                close = nearest(name, known)
                raise FlagsError(
                    f"{quoted_value(name)} is no flag of vLLM {source.version or 'as given'}"
                    + (f"; did you mean {close}?" if close else "; `vllm serve --help=all` lists its flags")
                )
        for name, flag in parsed.flags.items():
            instead = flag.value and flag.unsure is None and wrong_value(name, flag.value, source)
            if instead:
                raise FlagsError(
                    f"vLLM {source.version or 'as given'} takes no {name} {quoted_value(flag.value or '')}; {instead}"
                )
            value = flag.value or ""
            if value.startswith("{") and name.endswith("-config") and json_or(value, None) is None:
                raise FlagsError(
                    f"{name} {quoted_value(value)} is not JSON; did the shell remove its quotation marks? Put "
                    f"the flags in single quotes: --for 'MODEL … {name} {{\"…\": …}}'"
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
        self._read = read
        self._is_here = read is first_bytes
        """True if paths are those of this process."""

    def on(self, source: Source) -> Self:
        """Return the same deployment on the vLLM of *source*."""
        other = copy(self)
        other._source = source
        return other._without_caches()

    def changed(self, names: Sequence[str], value: object) -> Self:
        """Return the deployment with another *value* of the flags and variables *names*; None removes them.

        A dictionary is merged into the JSON object that is a flag's value.
        """
        other = copy(self)
        other._flags, other._environment = dict(self._flags), dict(self._environment)
        for name in names:
            values = other._flags if name.startswith("-") else other._environment
            values.pop(name, None)
            if isinstance(value, dict):
                other._flags[name] = FlagValue(json.dumps({**self._object(name)[0], **value}), self._object(name)[1])
            elif value is not None and name.startswith("-"):
                other._flags[name] = FlagValue(str(value) or None)
            elif value is not None:
                other._environment[name] = str(value)
        return other._without_caches()

    def _without_caches(self) -> Self:
        """Forget all facts except those of the model's config.json."""
        for name in [name for name in self.__dict__ if isinstance(getattr(type(self), name, None), cached_property)]:
            if name not in ("_config", "_architectures", "_place", "_folder"):
                del self.__dict__[name]
        return self

    def value(self, name: str) -> tuple[str | None, str | None]:
        """Return the value of a flag, None if it is not on the line, and what is missing to be sure of it."""
        flag = self._flags.get(name)
        if flag is None:
            return None, CONFIG_FILE if "--config" in self._flags else None
        return flag.value, flag.unsure

    def switched_on(self, name: str) -> Fact:
        """The switch *name*, a flag without a value, is on the line; vLLM's default does not count."""
        flag = self._flags.get(name)
        if flag is not None:
            return Fact(None, flag.unsure) if flag.unsure is not None else Fact(True, name)
        return Fact(None, CONFIG_FILE) if "--config" in self._flags else Fact(False, f"{name} is not given")

    def _has(self, name: str) -> bool:
        return name in self._flags

    def _object(self, name: str) -> tuple[dict[str, Any], str | None]:
        """Return the JSON object that is a flag's value, empty if it is not on the line, and what is missing."""
        value, missing = self.value(name)
        if value is None or missing is not None:
            return {}, missing
        parsed = json_or(value, None)
        return (parsed, None) if isinstance(parsed, dict) else ({}, f"a JSON object for {name}")

    def _number(self, name: str) -> tuple[int | None, str | None]:
        value, missing = self.value(name)
        if value is None or missing is not None:
            return None, missing
        return (int(value), None) if re.fullmatch(r"\d{1,9}", value) else (None, f"a number for {name}")

    def setting(self, name: str) -> bool | None:
        """Return the value of a variable of vLLM that is 0 or 1; None for anything else."""
        return {"0": False, "1": True, "": None}.get(self._environment.get(name, "").strip())
