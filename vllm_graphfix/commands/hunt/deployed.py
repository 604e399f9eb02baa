"""Reads the model and the flags of `hunt --for`: an architecture whose cases vary around them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence

from vllm_graphfix.commands.compare import CompareError
from vllm_graphfix.commands.compare.run import refuse_flags
from vllm_graphfix.commands.compare.twin import config_of, ranks_of
from vllm_graphfix.commands.hunt import twins
from vllm_graphfix.commands.hunt.design import DIMENSIONS, Architecture, Deployed, Setting
from vllm_graphfix.deployment.flags import Flags
from vllm_graphfix.deployment.line import FlagsError, Line, is_flag, json_or, long_name, parse
from vllm_graphfix.source.files import Source

_COMPILATION = "--compilation-config"
_OF_COMPILATION = {"cudagraph_mode": "graphs", "mode": "compile"}
_OVERRIDES = "--hf-overrides"
_OF_MEMORY = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
"""Left out: several engines share a GPU."""


def _dimensions() -> dict[str, str]:
    """Return the dimension of each flag, its opposite (``--no-…``) and each variable that sets one."""
    by_name = {"--attention-config": "attention"}
    for key, settings in DIMENSIONS.items():
        names = [name for each in settings.values() for name in (*each.flags, *each.environment)]
        by_name |= {long_name(name): key for name in names if is_flag(name) or name.startswith("VLLM_")}
    by_name |= {name.replace("--no-", "--"): key for name, key in by_name.items()}
    return {name: key for name, key in by_name.items() if name.partition(".")[0] not in (_COMPILATION, _OVERRIDES)}


def read(text: str, source: Source) -> Architecture:
    """Return the architecture of the model in *text*, a model and flags of vLLM. Raises CompareError."""
    try:
        Flags(text, {}, source)  # raises FlagsError for flags that this vLLM does not know
        parsed = parse(text, [f"{name}=" for name in _OF_MEMORY])
    except FlagsError as error:
        raise CompareError(str(error)) from error
    model, *words = parsed.words or [""]
    if not model or is_flag(model) or "--config" in parsed.flags:
        raise CompareError("--for takes the model first, then all flags themselves: --for 'MODEL -tp 2'")
    refuse_flags(words, "hunt")
    revision = parsed.flags.get("--revision")
    config = config_of(model, revision.value if revision else None)
    name = re.sub(r"[^\w.-]+", "-", model).strip("-.")
    file = twins.architectures_of(source).get(str(config["architectures"][0]))
    takes = twins.takes(source, file) if file else (True, True)
    return Architecture(name, twins.with_few_tokens(config), *takes, _deployed(parsed, words))


def _deployed(parsed: Line, words: Sequence[str]) -> Deployed:
    dimensions, settings = _dimensions(), dict[str, Setting]()

    def add(key: str, *flags: str, **environment: str) -> None:
        before = settings.get(key, Setting())
        settings[key] = Setting((*before.flags, *flags), {**before.environment, **environment})

    groups = [group for group in _groups(words) if long_name(group[0]) not in _OF_MEMORY]
    for group in groups:
        if (name := long_name(group[0])) != _COMPILATION:
            add(dimensions.get(name, ""), *group)
    compilation = parsed.flags.get(_COMPILATION)
    for inner, value in (json_or(compilation.value or "", {}) if compilation else {}).items():
        # With dots, since these would replace a JSON object.
        add(_OF_COMPILATION.get(inner, ""), f"-cc.{inner}={value if isinstance(value, str) else json.dumps(value)}")
    for variable, value in parsed.environment.items():
        add(dimensions.get(variable, ""), **{variable: value})
    ranks = [ranks_of(parsed.flags, name) for name in ("--tensor-parallel-size", "--pipeline-parallel-size")]
    return Deployed(tuple(word for group in groups for word in group), settings, math.prod(ranks))


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with its values."""
    group: list[str] = []
    for word in words:
        if group and is_flag(word):
            yield group
            group = []
        group.append(word)
    if group:
        yield group
