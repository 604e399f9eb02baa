"""What the command line of a `vllm serve` says of a deployment, read without vLLM, and what follows for a fix.

A flag that is not there, a model that cannot be looked at and a value that vLLM takes from elsewhere are different things: each fact is
true, false or not known, with the reason. Nothing is concluded from what is not known.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix import hardware
from vllm_graphfix.settings import printable, shown

if TYPE_CHECKING:
    from vllm_graphfix.source import Source

_LONGEST_LINE = 16 * 1024
"""Characters; nobody types that many, and what follows takes more than linear time."""
_LARGEST_CONFIG = 1024 * 1024
_MOST_NODES = 100_000
"""Values of a model's config.json that are looked at."""


class FlagsError(Exception):
    """What was given is no command line; the message says what to do."""


class Concern(str, Enum):
    """Whether a defect can show in a deployment."""

    CONCERNS = "concerns you"
    DOES_NOT = "does not"
    UNKNOWN = "cannot tell without"


class Answer(NamedTuple):
    """Whether a fix concerns a deployment, and why in one sentence; for `Concern.UNKNOWN`, what is missing."""

    concern: Concern
    reason: str


class Fact(NamedTuple):
    """Something that holds for a deployment, or does not, or is not known."""

    holds: bool | None
    told: str
    """What says so; where it is not known, what would: the end of a sentence that begins with `cannot tell without`."""


Judge = Callable[["Deployment", str], Answer]
"""Takes the deployment and the shape of the code that the diagnosis named."""


def all_of(*facts: Fact) -> Answer:
    """The defect needs each of *facts*."""
    for fact in facts:
        if fact.holds is False:
            return Answer(Concern.DOES_NOT, fact.told)
    missing = list(dict.fromkeys(fact.told for fact in facts if fact.holds is None))
    if missing:
        return Answer(Concern.UNKNOWN, "; and ".join(missing))
    return Answer(Concern.CONCERNS, ", ".join(dict.fromkeys(fact.told for fact in facts)))


def any_of(*facts: Fact) -> Fact:
    """Holds where one of *facts* does."""
    for fact in facts:
        if fact.holds:
            return fact
    missing = [fact.told for fact in facts if fact.holds is None]
    if missing:
        return Fact(None, "; or ".join(dict.fromkeys(missing)))
    return Fact(False, ", ".join(dict.fromkeys(fact.told for fact in facts)))


# -- the command line --------------------------------------------------------------------------------------------

_NAMES: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-O": "--optimization-level",
}
"""Short names of vLLM's flags."""
_SWITCHES = frozenset(
    {"--enforce-eager", "--enable-expert-parallel", "--trust-remote-code", "--data-parallel-hybrid-lb"}
)
_VALUES = frozenset(
    """--model --config --kv-cache-dtype --attention-backend --attention-config --speculative-config --spec-method --spec-model --spec-tokens
    --compilation-config --optimization-level --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --data-parallel-rank
    --decode-context-parallel-size --block-size --runner --convert --task --hf-overrides --hf-config-path --kv-transfer-config
    --all2all-backend --max-cudagraph-capture-size --quantization --kv-offloading-size""".split()
)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_NO_VALUE = re.compile(
    r"--(no|enable|disable|allow|trust|use|skip|async|fully|calculate|ray|return|headless|enforce)\b.*"
)
"""Flags of vLLM that take no value, as far as their names tell; what follows one of them may be the model."""


class _Known(NamedTuple):
    """Flags that are read, by their long names. All others are skipped with their values."""

    switches: frozenset[str]
    values: frozenset[str]
    negated: dict[str, str]

    @classmethod
    def to_fixes(cls) -> _Known:
        """Those that the facts here need, and those that a fix asks for besides (`Fix.flags`)."""
        from vllm_graphfix.fixes import FIXES

        asked = {flag for fix in FIXES for flag in fix.flags}
        values = frozenset(flag.removesuffix("=") for flag in asked if flag.endswith("="))
        switches = _SWITCHES | {flag for flag in asked if not flag.endswith("=")}
        return cls(switches, _VALUES | values, {f"--no-{name[2:]}": name for name in switches})


class _Given(NamedTuple):
    """What the command line says of one flag."""

    value: str | None
    """None for a switch."""
    unsure: str | None = None
    """Why the value may be another one."""


class _Line(NamedTuple):
    environment: dict[str, str]
    flags: dict[str, _Given]
    models: list[str]


def _parse(line: str) -> _Line:
    """Raises FlagsError for what no shell takes for a line."""
    if len(line) > _LONGEST_LINE:
        raise FlagsError(
            f"the flags of --for have more than {_LONGEST_LINE:,} characters; give the line of `vllm serve` alone"
        )
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise FlagsError(
            f"the flags of --for are no line of a shell ({error}); quote JSON once more, as in --for \"… -cc '{{…}}'\""
        ) from error
    environment: dict[str, str] = {}
    while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] in ("env", "exec")):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return _Line(environment, *_flags(_without_program(words), _Known.to_fixes()))


def _without_program(words: list[str]) -> list[str]:
    name = words[0].rpartition("/")[2] if words else ""
    if name == "vllm" and words[1:2] == ["serve"]:
        return words[2:]
    if name == "serve":
        return words[1:]
    if re.fullmatch(r"python[0-9.]*", name) and words[1:2] == ["-m"] and words[2:3]:
        return _without_program(["vllm", *words[3:]]) if words[2].startswith("vllm.entrypoints.cli") else words[3:]
    return words


def _flags(words: Sequence[str], known: _Known) -> tuple[dict[str, _Given], list[str]]:
    flags: dict[str, _Given] = {}
    nested: dict[str, dict[str, Any]] = {}
    models: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word):
            models.append(word)
            continue
        name, equals, value = word.partition("=")
        given: str | None = value if equals else None
        if name.startswith("-O") and not name.startswith("-O."):
            # -O3, -O=3, -O 3
            given = name[2:] if len(name) > 2 else given
            name = "-O"
        name, dot, path = name.partition(".")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        name = _NAMES.get(name, name)
        follows = at < len(words) and not _is_flag(words[at])
        if dot:
            if given is None and at < len(words):
                given, at = words[at], at + 1
            _nest(nested.setdefault(name, {}), path, given or "")
        elif name in known.switches or name in known.negated:
            wrong = equals or (follows and words[at].lower() in ("true", "false", "0", "1"))
            at += not equals and bool(wrong)
            positive = known.negated.get(name, name)
            flags.pop(positive, None)
            if wrong:
                flags[positive] = _Given(None, f"{positive} as vLLM takes it, without a value")
            elif positive == name:
                flags[positive] = _Given(None)
        elif name in known.values:
            if given is None and follows:
                given, at = words[at], at + 1
            flags[name] = _Given(given or "", None if given else f"a value for {name}")
        elif name.startswith("--"):
            for long in (*known.switches, *known.values, *known.negated) if len(name) > 2 else ():
                if long.startswith(name):  # argparse takes any beginning that is one flag's alone
                    flags[known.negated.get(long, long)] = _Given(
                        "", f"{long} written out in full, in place of {shown(name)}"
                    )
            while given is None and not _NO_VALUE.fullmatch(name) and at < len(words) and not _is_flag(words[at]):
                at += 1
        else:
            at += given is None and follows
    for name, inner in nested.items():
        # vLLM puts these behind all others, where they replace what was given as JSON.
        unsure = f"{name} given in one way, as JSON or with dots" if name in flags else None
        flags[name] = _Given(json.dumps(inner), unsure)
    return flags, models


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _nest(into: dict[str, Any], path: str, value: str) -> None:
    *outer, last = path.removesuffix("+").split(".")[:20]
    for key in outer:
        inner = into.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = into[key] = {}
        into = inner
    into[last] = _json(value, value)


def _json(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


# -- the deployment ----------------------------------------------------------------------------------------------

_FULL_MODES = frozenset({"FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"})
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
"""Keys of --compilation-config that may make another graph mode of the one that is configured."""
_CONFIG_FILE = "what the file of --config sets (write its flags on the line)"
_NO_SPECULATOR = "there is no speculator (--speculative-config)"
_V2 = "VLLM_USE_V2_MODEL_RUNNER"

_MLA = re.compile(
    r"deepseek|kimi|longcat|pangu|glm_?4?_?moe_?(lite|dsa)|axk1|bailing|eagle|mistral_?(large|3)", re.IGNORECASE
)
"""Names of model types and architectures that may have latent attention (MLA), also where their config does not say so."""
_MLA_TYPES = frozenset(
    """AXK1 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_mtp glm_moe_dsa glm4_moe_lite glm4_moe_lite_mtp kimi_k2 kimi_linear
    longcat_flash pangu_ultra_moe pangu_ultra_moe_mtp bailing_hybrid""".split()
)
_MAMBA = frozenset(
    """BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM JambaForCausalLM
    JambaForSequenceClassification Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VLForConditionalGeneration Lfm2VlForConditionalGeneration
    Mamba2ForCausalLM MambaForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_VL_V2 Plamo2ForCausalLM
    Zamba2ForCausalLM""".split()
)
"""Architectures with Mamba, Mamba-2 or short-convolution layers."""
_OTHER_RECURRENT = frozenset(
    """BailingMoeV2_5ForCausalLM KimiLinearForCausalLM MiniMaxM1ForCausalLM MiniMaxText01ForCausalLM OlmoHybridForCausalLM
    Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration""".split()
)
"""With gated delta nets or linear attention, whose batches are split in another way."""
_RECURRENT_WORDS = re.compile(r"mamba|ssm|conv|recurrent|linear_|hybrid|delta|rwkv|retention", re.IGNORECASE)
_CONFIG_MODULE = "vllm/config/vllm.py"
_ENVS = "vllm/envs.py"


class Deployment:
    """What is known of an engine from its command line, its environment, the vLLM that it runs and the GPU that it runs on.

    The facts are methods, each with its reason. *environment* is that of this process, under the assignments in front of the line.
    """

    def __init__(self, line: str, environment: Mapping[str, str], source: Source, gpu: str | None = None) -> None:
        """Raises FlagsError. *gpu*: the name of the GPU that serves; without it this machine's."""
        parsed = _parse(line)
        self._line = line.lower()
        self._flags = parsed.flags
        self._models = parsed.models
        self._environment = {**environment, **parsed.environment}
        self._source = source
        self._gpu_named = gpu

    # -- what is given --

    def value(self, name: str) -> tuple[str | None, str | None]:
        """The value of a flag (None where it is not given) and, if that may be another one, what is missing."""
        given = self._flags.get(name)
        if given is None:
            return None, _CONFIG_FILE if "--config" in self._flags else None
        return given.value, given.unsure

    def switched_on(self, name: str) -> Fact:
        """The switch *name*, one without a value, is on the line; not on it, whatever vLLM takes then."""
        given = self._flags.get(name)
        if given is not None:
            return Fact(None, given.unsure) if given.unsure is not None else Fact(True, name)
        return Fact(None, _CONFIG_FILE) if "--config" in self._flags else Fact(False, f"{name} is not given")

    def _given(self, name: str) -> bool:
        return name in self._flags

    def _object(self, name: str) -> tuple[dict[str, Any], str | None]:
        """The JSON object that a flag has for a value, empty where it is not given."""
        value, missing = self.value(name)
        if value is None or missing is not None:
            return {}, missing
        found = _json(value, None)
        return (found, None) if isinstance(found, dict) else ({}, f"a JSON object for {name}")

    def _number(self, name: str) -> tuple[int | None, str | None]:
        value, missing = self.value(name)
        if value is None or missing is not None:
            return None, missing
        return (int(value), None) if re.fullmatch(r"\d{1,9}", value) else (None, f"a number for {name}")

    def _setting(self, name: str) -> bool | None:
        """A variable of vLLM's that is 0 or 1; None for anything else."""
        return {"0": False, "1": True, "": None}.get(self._environment.get(name, "").strip())

    # -- graphs --

    @cached_property
    def _graph_mode(self) -> tuple[str | None, str]:
        """The mode that is configured for CUDA graphs and what says so, or None and what is missing."""
        eager = self._flags.get("--enforce-eager")
        if eager is not None and eager.unsure is None:
            return "NONE", "--enforce-eager is given, and there are no CUDA graphs"
        if eager is not None:
            return None, str(eager.unsure)
        config, missing = self._object("--compilation-config")
        if missing is not None:
            return None, missing
        mode, told = _mode(config.get("cudagraph_mode")), "--compilation-config"
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
            mode, told = _LEVELS[level or "2"], f"-O{level}" if level else "the default"
            if mode == "NONE":
                return mode, "-O0 has no CUDA graphs"
        changed = [
            key for key in _OTHER_MODE if key in config and not (key == "mode" and config[key] in (3, "VLLM_COMPILE"))
        ]
        if changed:
            return (
                None,
                f"the cudagraph_mode that vLLM logs when it starts ({changed[0]} in --compilation-config may change it)",
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
            if self._given(name) and self.value(name)[0] not in ("generate", "none", "auto"):
                return None, f"the cudagraph_mode that vLLM logs when it starts ({name} may change it)"
        if self.value("--all2all-backend")[0] == "deepep_high_throughput":
            return None, "the cudagraph_mode that vLLM logs when it starts (--all2all-backend may change it)"
        if "--config" in self._flags and mode in _FULL_MODES:
            return None, _CONFIG_FILE
        return mode, f"cudagraph_mode is {mode} ({told})"

    def full_graphs(self) -> Fact:
        """Decodes run in full CUDA graphs."""
        mode, told = self._graph_mode
        return Fact(None if mode is None else mode in _FULL_MODES, told)

    def graphs(self) -> Fact:
        """There are CUDA graphs, full or piecewise."""
        mode, told = self._graph_mode
        return Fact(None if mode is None else mode != "NONE", told)

    def piecewise_decodes(self) -> Fact:
        """Decodes run in piecewise CUDA graphs."""
        mode, told = self._graph_mode
        return Fact(None if mode is None else mode == "PIECEWISE", told)

    def prompts_in_graphs(self) -> Fact:
        """Steps with prefills run in CUDA graphs, full or piecewise."""
        mode, told = self._graph_mode
        return Fact(None if mode is None else mode in ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE"), told)

    # -- the model runner --

    def runner(self, wanted: str) -> Fact:
        """The model runner is *wanted*, ``V1`` or ``V2``."""
        found, told = self._runner
        return Fact(None if found is None else found == wanted, told)

    @cached_property
    def _runner(self) -> tuple[str | None, str]:
        # Features of later releases that need V2 and say so only when vLLM starts.
        if any(word in self._line for word in ("hisparse", "watermark")):
            return None, "the model runner that vLLM logs when it starts"
        value = self._environment.get(_V2)
        if value is not None:
            chosen = self._setting(_V2)
            if chosen is None:
                return None, f"{_V2} being 0 or 1"
            return ("V2" if chosen else "V1"), f"{_V2}={int(chosen)} chooses model runner {'V2' if chosen else 'V1'}"
        default = self._runner_by_default()
        if default == "V1":
            return "V1", f"{_V2} is not set here, and this vLLM then takes model runner V1"
        if default == "V1 for this model":
            return "V1", f"{_V2} is not set here, and this vLLM then takes model runner V1 for this model"
        return None, default

    def _runner_by_default(self) -> str:
        """``V1``, ``V1 for this model``, or what is missing."""
        if not self._source.says(_CONFIG_MODULE, "use_v2_model_runner"):
            if re.search(rf'getenv\("{_V2}", "0"\)'.encode(), self._source.read(_ENVS) or b""):
                return "V1"
            if not self._source.says(_ENVS, _V2):
                return "V1"
            return f"{_V2} set to 0 or 1, or the model runner that vLLM logs when it starts"
        listed = self._source.function(_CONFIG_MODULE, "VllmConfig._is_default_v2_model_runner_model")
        first = self._source.function(_CONFIG_MODULE, "VllmConfig.use_v2_model_runner")
        known = first is not None and first.find("if not self._is_default_v2_model_runner_model(): return False")
        asked = f"{_V2} set to 0 or 1, or the model runner that vLLM logs when it starts"
        if listed is None or not known or self._given("--speculative-config") or self._given("--spec-method"):
            return asked
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
        if hybrid and architectures & (_MAMBA | _OTHER_RECURRENT):
            return "V1 for this model"
        return asked

    # -- the model --

    @cached_property
    def _config(self) -> tuple[dict[str, Any], str | None]:
        """The model's config.json, or what is missing."""
        if self._given("--hf-overrides"):
            return {}, "a config.json that --hf-overrides does not change"
        place = None
        for flag in ("--hf-config-path", "--model"):
            value, missing = self.value(flag)
            if missing is not None and not (flag == "--hf-config-path" and missing == _CONFIG_FILE):
                if flag == "--model" and self._models:
                    continue
                return {}, missing
            place = place or value
        if len(self._models) + self._given("--model") > 1:
            return {}, "one model on the line: the first word, or --model"
        place = place or next(iter(self._models), None)
        if place is None:
            return {}, "the model: give it in front of the flags"
        try:
            folder = Path(place).expanduser()
            found = folder.is_dir()
        except (OSError, ValueError, RuntimeError):
            return {}, "the model's config.json: name a folder that holds it"
        if not found:
            return {}, f"the config.json of {printable(place[:80])}: name a local folder that holds it"
        text = hardware.small_text(folder / "config.json", _LARGEST_CONFIG + 1)
        if text is None or len(text) > _LARGEST_CONFIG:
            return {}, f"a config.json that can be read in {printable(place[:80])}"
        config = _json(text, None)
        if not isinstance(config, dict):
            return {}, f"a config.json that is a JSON object in {printable(place[:80])}"
        return config, None

    @cached_property
    def _architectures(self) -> tuple[frozenset[str], str | None]:
        config, missing = self._config
        if missing is not None:
            return frozenset(), missing
        found = config.get("architectures")
        if not isinstance(found, list) or not found or not all(isinstance(name, str) and name for name in found):
            return frozenset(), "`architectures` in the model's config.json"
        return frozenset(found), None

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        """Keys and values of the model's config, at any depth; as many as a model has."""
        left: list[Any] = [self._config[0]]
        seen = 0
        while left and seen < _MOST_NODES:
            node = left.pop()
            for key, value in node.items() if isinstance(node, dict) else (("", each) for each in node):
                seen += 1
                yield key, value
                if isinstance(value, (dict, list)):
                    left.append(value)

    def configured(self, key: str) -> tuple[tuple[Any, ...], str | None]:
        """What stands under *key* in the model's config.json, at any depth; and what is missing, if there is none to read."""
        return tuple(value for name, value in self._pairs() if name == key), self._architectures[1]

    @property
    def model(self) -> str:
        """Its architectures, for a reason."""
        return printable(", ".join(sorted(self._architectures[0])))[:100]

    def mla(self) -> Fact:
        """The model has latent attention, which FlashMLA and Triton MLA serve."""
        if self._setting("VLLM_MLA_DISABLE"):
            return Fact(False, "VLLM_MLA_DISABLE=1 switches latent attention off")
        _, missing = self._architectures
        if missing is not None:
            return Fact(None, missing)
        pairs = [(key, value) for key, value in self._pairs()]
        types = {value for key, value in pairs if key == "model_type" and isinstance(value, str)}
        if types & _MLA_TYPES and any(
            key in ("kv_lora_rank", "compress_ratios") and value is not None for key, value in pairs
        ):
            return Fact(True, f"{self.model} has latent attention (MLA)")
        named = types | {value for key, value in pairs if isinstance(value, str) and key in ("", "_name_or_path")}
        if any(key in ("kv_lora_rank", "compress_ratios") for key, _ in pairs) or any(map(_MLA.search, named)):
            return Fact(
                None, "the attention backend that vLLM logs when it starts (this model may have latent attention)"
            )
        return Fact(False, f"{self.model} has no latent attention (MLA)")

    def sparse_mla(self) -> Fact:
        """The model picks the tokens that its latent attention reads, with an indexer."""
        mla = self.mla()
        if not mla.holds:
            return mla
        if any(key in ("index_topk", "compress_ratios") and value for key, value in self._pairs()):
            return Fact(True, f"{self.model} has sparse attention")
        return Fact(False, f"{self.model} has no sparse attention")

    def mamba(self) -> Fact:
        """The model has Mamba, Mamba-2 or short-convolution layers."""
        return self.with_layers(_MAMBA, _OTHER_RECURRENT, "Mamba or short-convolution layers")

    def recurrent(self) -> Fact:
        """The model has layers with a state: Mamba, short convolutions, gated delta nets, linear attention."""
        return self.with_layers(_MAMBA | _OTHER_RECURRENT, frozenset(), "recurrent layers")

    def with_layers(self, having: frozenset[str], other: frozenset[str], layers: str) -> Fact:
        """The model is one of the architectures *having*, and so has such *layers*; not if it is of *other*, or without a sign of a recurrent one."""
        architectures, missing = self._architectures
        if missing is not None:
            return Fact(None, missing)
        if architectures & having:
            return Fact(True, f"{self.model} has {layers}")
        if architectures <= other:
            return Fact(False, f"{self.model} has no {layers}")
        for key, value in self._pairs():
            if _RECURRENT_WORDS.search(key) or (isinstance(value, str) and _RECURRENT_WORDS.search(value[:200])):
                return Fact(None, f"knowing whether {self.model} has {layers} (it is not a model that is known here)")
        return Fact(False, f"{self.model} has no {layers}")

    def experts(self) -> Fact:
        """The model is a mixture of experts."""
        _, missing = self._architectures
        if missing is not None:
            return Fact(None, missing)
        if any("expert" in key and isinstance(value, int) and value > 1 for key, value in self._pairs()):
            return Fact(True, f"{self.model} has experts")
        if any("expert" in key or "moe" in key for key, _ in self._pairs()) or any(
            "oe" in name for name in self._architectures[0]
        ):
            return Fact(None, f"knowing whether {self.model} has experts")
        return Fact(False, f"{self.model} has no experts")

    # -- cache and attention --

    def fp8_cache(self) -> Fact:
        """The KV cache holds 8-bit floating-point numbers."""
        value, missing = self.value("--kv-cache-dtype")
        if missing is not None:
            return Fact(None, missing)
        if value is not None and value != "auto":
            if value.startswith("fp8"):
                return Fact(True, f"--kv-cache-dtype {printable(value[:20])}")
            return Fact(False, f"--kv-cache-dtype {printable(value[:20])} is not fp8")
        config, missing = self._config
        if missing is not None:
            # A quantised checkpoint brings its own.
            return Fact(None, f"--kv-cache-dtype, or {missing}")
        quantised = [key for key in ("quantization_config", "compression_config") if config.get(key)]
        if quantised and any("kv" in key and value for key, value in self._pairs() if not key.startswith("kv_lora")):
            return Fact(None, "--kv-cache-dtype (the model's quantization config names one of its own)")
        if quantised and config[quantised[0]] and not isinstance(config[quantised[0]], dict):
            return Fact(None, "--kv-cache-dtype (the model's quantization config cannot be read)")
        if not quantised and self._has_file("hf_quant_config.json"):
            return Fact(None, "--kv-cache-dtype (the model's hf_quant_config.json may name one of its own)")
        if self.sparse_mla().holds is not False and self.mla().holds is not False:
            return Fact(None, "--kv-cache-dtype (models with sparse attention have fp8 by default)")
        return Fact(False, "the KV cache is not fp8 (--kv-cache-dtype auto)")

    def _has_file(self, name: str) -> bool:
        place = next(iter(self._models), None) or self.value("--model")[0] or ""
        try:
            return Path(place).expanduser().joinpath(name).exists()
        except (OSError, ValueError, RuntimeError):
            return False

    def _backend(self) -> tuple[str | None, str | None]:
        """The attention backend that is asked for (None where vLLM chooses), or what is missing."""
        value, missing = self.value("--attention-backend")
        config, wrong = self._object("--attention-config")
        missing = missing or wrong
        if missing is not None:
            return None, missing
        asked = config.get("backend", value)
        if asked is not None and not isinstance(asked, str):
            return None, "an attention backend that vLLM knows"
        return (None, None) if asked is None or asked.lower() == "auto" else (asked.upper(), None)

    @cached_property
    def gpu(self) -> tuple[str | None, int | None]:
        """The GPU's name and its major compute capability; None what is not known."""
        names = (self._gpu_named,) if self._gpu_named else tuple(dict.fromkeys(hardware.gpus()))
        majors = {hardware.capability(name) for name in names}
        return (names[0] if len(names) == 1 else None, majors.pop() if len(majors) == 1 else None)

    def _capability(self, wanted: Sequence[int], what: str) -> Fact:
        name, major = self.gpu
        if major is None:
            return Fact(None, f"the GPU that serves, which is not known here (--gpu NAME): {what}")
        own = "" if self._gpu_named else " of this machine"
        return Fact(
            major in wanted,
            f"the GPU{own} is {printable((name or '')[:60])}" + ("" if major in wanted else f", and {what}"),
        )

    def dense_flashmla(self) -> Fact:
        """Latent attention that is not sparse runs on FlashMLA."""
        backend, missing = self._backend()
        if missing is not None:
            return Fact(None, missing)
        if backend == "FLASHMLA":
            return Fact(True, "--attention-backend FLASHMLA")
        if backend is not None:
            return Fact(False, f"--attention-backend {printable(backend[:40])} is not FlashMLA")
        hopper = self._capability((9,), "FlashMLA's dense kernels need Hopper")
        for needed in (self.mla(), hopper):
            if needed.holds is False:
                return needed
        sparse = self.sparse_mla()
        if sparse.holds:
            return Fact(False, f"{sparse.told}, which dense FlashMLA does not serve")
        if self.mla().holds is None:
            return self.mla()
        if hopper.holds is None:
            return hopper
        # On Hopper vLLM prefers FlashAttention, which has no fp8 for latent attention; FlashMLA takes blocks of 64.
        if self.fp8_cache().holds and self.value("--block-size")[0] in (None, "64"):
            return Fact(True, "vLLM takes FlashMLA for latent attention with an fp8 cache on Hopper")
        return Fact(None, "the attention backend that vLLM logs when it starts, or --attention-backend")

    def flashmla(self) -> Fact:
        """Latent attention runs on FlashMLA kernels that plan in their first call: dense ones, or sparse ones with an fp8 cache."""
        dense = self.dense_flashmla()
        if dense.holds:
            return dense
        backend, missing = self._backend()
        sparse = self.sparse_mla()
        if missing is not None:
            return Fact(None, missing)
        if sparse.holds and any(key == "compress_ratios" for key, _ in self._pairs()):
            # DeepSeek V4 calls FlashMLA by itself, whatever the backend.
            return self._capability((9, 10), "FlashMLA needs Hopper or Blackwell")
        if backend == "FLASHMLA_SPARSE" or (backend is None and sparse.holds is not False):
            if sparse.holds is False:
                return sparse
            value, missing = self.value("--kv-cache-dtype")
            if missing is not None:
                return Fact(None, missing)
            if value == "bfloat16":
                return (
                    Fact(False, "--kv-cache-dtype bfloat16: sparse FlashMLA plans ahead with an fp8 cache only")
                    if sparse.holds
                    else dense
                )
            if backend is not None and value is not None and value.startswith("fp8"):
                return Fact(True, f"--attention-backend FLASHMLA_SPARSE, --kv-cache-dtype {printable(value[:20])}")
            if sparse.holds is None:
                return dense if dense.holds is None else sparse
            fitting = self._capability((9, 10), "FlashMLA needs Hopper or Blackwell")
            if fitting.holds is False:
                return fitting
            return Fact(
                None,
                "the attention backend and the KV cache's dtype that vLLM logs when it starts, or the flags for them",
            )
        return dense

    def triton_mla(self) -> Fact:
        """Latent attention runs on Triton."""
        backend, missing = self._backend()
        if missing is not None:
            return Fact(None, missing)
        if backend is not None:
            return Fact(
                backend == "TRITON_MLA",
                f"--attention-backend {printable(backend[:40])}"
                + ("" if backend == "TRITON_MLA" else " is not TRITON_MLA"),
            )
        mla = self.mla()
        if mla.holds is False:
            return mla
        return Fact(None, "the attention backend that vLLM logs when it starts, or --attention-backend")

    # -- speculators and parallelism --

    @cached_property
    def _speculator(self) -> tuple[str | None, int | None, str | None]:
        """Method (empty for none), tokens, or what is missing."""
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
                config = {**config, key: _json(value, value)}
        if not config:
            model, missing = self._config
            if missing is not None:
                return None, None, f"{missing} (a model may bring a speculator)"
            if "speculators_config" in model:
                return None, None, "--speculative-config (the model brings a speculator of its own)"
            return "", 0, None
        method, tokens = config.get("method"), config.get("num_speculative_tokens")
        if not isinstance(method, str):
            return None, None, "`method` in --speculative-config"
        return method.lower(), tokens if type(tokens) is int else None, None

    def speculator(self, *methods: str, several: bool = False) -> Fact:
        """Drafts come from one of *methods*; *several*: more than one token of each draft. ``mtp`` also stands for its older names."""
        method, tokens, missing = self._speculator
        if missing is not None or method is None:
            return Fact(None, missing or "`method` in --speculative-config")
        if not method:
            return Fact(False, _NO_SPECULATOR)
        told = f"the speculator is {printable(method[:40])}"
        if method not in methods and not ("mtp" in methods and method.endswith("_mtp")):
            return Fact(False, told)
        if several and tokens is None:
            return Fact(None, "`num_speculative_tokens` in --speculative-config")
        if several and tokens == 1:
            return Fact(False, "drafts have one token (num_speculative_tokens)")
        return Fact(True, told)

    def drafts(self) -> Fact:
        """There is a speculator, of whatever kind."""
        method, _, missing = self._speculator
        if missing is not None:
            return Fact(None, missing)
        return Fact(bool(method), f"the speculator is {printable((method or '')[:40])}" if method else _NO_SPECULATOR)

    def data_parallel(self) -> Fact:
        """There are several data-parallel ranks."""
        number, missing = self._number("--data-parallel-size")
        if missing is not None:
            return Fact(None, missing)
        if number is not None and number > 1:
            return Fact(True, f"--data-parallel-size {number}")
        if number is None and self._given("--data-parallel-rank"):
            return Fact(None, "--data-parallel-size")
        return Fact(False, "there is one data-parallel rank (--data-parallel-size)")


def _mode(value: object) -> str | None:
    if type(value) is int and 0 <= value < len(_MODES):
        return _MODES[value]
    if isinstance(value, str) and value.upper() in (*_MODES, *_FULL_MODES):
        return value.upper()
    return None


def read_deployment(
    line: str, source: Source, gpu: str | None = None, environment: Mapping[str, str] = os.environ
) -> Deployment:
    """Raises FlagsError."""
    return Deployment(line, environment, source, gpu)
