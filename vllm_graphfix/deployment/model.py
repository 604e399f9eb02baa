"""Facts from a model's config.json: latent attention, recurrent layers, experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.flags import CONFIG_FILE, Flags
from vllm_graphfix.deployment.line import FlagsError, json_or
from vllm_graphfix.deployment.secrets import brief_value, quoted_value
from vllm_graphfix.text import printable

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
UNCACHED = "the config.json of "
"""Begins what is missing of a model that is named and whose config.json is not on this machine."""
_LARGEST_CONFIG = 1024 * 1024
_MOST_NODES = 100_000
"""Limit of values in a model's config.json."""

_MLA = re.compile(
    r"deepseek|kimi|longcat|pangu|glm_?4?_?moe_?(lite|dsa)|axk1|bailing|eagle|mistral_?(large|3)", re.IGNORECASE
)
"""Names of model types and architectures that may have latent attention (MLA), also where their config does not say
so."""
_MLA_TYPES = frozenset(
    """AXK1 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_mtp glm_moe_dsa glm4_moe_lite
    glm4_moe_lite_mtp kimi_k2 kimi_linear longcat_flash pangu_ultra_moe pangu_ultra_moe_mtp bailing_hybrid""".split()
)
MAMBA = frozenset(
    """BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM JambaForCausalLM
    JambaForSequenceClassification Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VLForConditionalGeneration
    Lfm2VlForConditionalGeneration Mamba2ForCausalLM MambaForCausalLM NemotronHForCausalLM
    NemotronHPuzzleForCausalLM NemotronH_Nano_VL_V2 Plamo2ForCausalLM Zamba2ForCausalLM""".split()
)
"""Architectures with Mamba, Mamba-2 or short-convolution layers."""
GATED_DELTA_NETS = frozenset(
    """Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForConditionalGeneration
    Qwen3_5MoeForConditionalGeneration""".split()
)
"""Architectures of Qwen with gated delta nets."""
OTHER_RECURRENT = GATED_DELTA_NETS.union(
    """BailingMoeV2_5ForCausalLM KimiLinearForCausalLM MiniMaxM1ForCausalLM MiniMaxText01ForCausalLM
    OlmoHybridForCausalLM""".split()
)
"""Architectures with gated delta nets or linear attention, which split batches into decodes and prefills otherwise."""
_RECURRENT_WORDS = re.compile(r"mamba|ssm|conv|recurrent|linear_|hybrid|delta|rwkv|retention", re.IGNORECASE)

_MODALITIES = re.compile(r"vision|visual|image|img|video|audio|speech", re.IGNORECASE)
"""Words in the keys of a multimodal model's config; its encoders have sections of their own."""


def in_the_hub_cache(
    name: str, revision: str, environment: Mapping[str, str], read: Callable[[Path, int], bytes | None]
) -> Path | None:
    """Return the folder of the model *name* in Hugging Face's cache; None where it has none. Fetches nothing."""
    if not _HUB_NAME.fullmatch(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", revision):
        return None
    home = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or str(Path(home, "hub"))
    cache = re.sub(r"^~(?=/|$)", environment.get("HOME") or "~", cache)
    cache = re.sub(r"\$\{?(\w+)\}?", lambda match: environment.get(match[1], match[0]), cache)
    folder = Path(cache, f"models--{name.replace('/', '--')}")
    commit = (read(folder / "refs" / revision, 100) or b"").decode("ascii", "replace").strip() or revision
    snapshot = folder / "snapshots" / commit
    return snapshot if read(snapshot / "config.json", 1) else None


def _values(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of *config* at any depth; the key of a value in a list is empty."""
    nodes: list[Any] = [config]
    while nodes:
        node = nodes.pop()
        for key, value in node.items() if isinstance(node, dict) else (("", each) for each in node):
            yield key, value
            if isinstance(value, (dict, list)):
                nodes.append(value)


class Model(Flags):
    @cached_property
    def _place(self) -> tuple[str | None, str]:
        """The model as the line names it, and the information that is missing where it does not."""
        place = None
        for flag in ("--hf-config-path", "--model"):
            value, missing = self.value(flag)
            if missing is not None and not (flag == "--hf-config-path" and missing == CONFIG_FILE):
                if flag == "--model" and self._models:
                    continue
                return None, missing
            place = place or value
        if len(self._models) + self._has("--model") > 1:
            return None, "exactly one model: either the first word or --model"
        return place or next(iter(self._models), None), "the model: put it before the flags"

    @cached_property
    def _folder(self) -> tuple[Path | None, str]:
        """The folder with the model's config.json, and the information that is missing where there is none.

        Raises FlagsError for the path of a folder that does not exist.
        """
        place, missing = self._place
        if place is None:
            return None, missing
        try:
            folder = Path(place).expanduser()
            folder = folder.parent if folder.name == "config.json" else folder
            if self._read(folder / "config.json", 1) is not None or (self._is_here and folder.is_dir()):
                return folder, ""
        except (OSError, ValueError, RuntimeError):
            return None, "the model's config.json: name the folder that contains it"
        if self._is_here and re.match(r"[{[]|.*\$\{?\w", place):
            raise FlagsError(
                f"{quoted_value(place)} is no model: write the arguments of `vllm serve`, without variables"
            )
        if self._is_here and place.startswith(("/", "./", "../", "~/")):
            raise FlagsError(f"{quoted_value(place)} does not exist; name a model, its folder or its config.json")
        cached = in_the_hub_cache(place, self.value("--revision")[0] or "main", self._environment, self._read)
        name = brief_value(place, 80)
        fetch = f"`hf download {name} config.json` and ask again, or " if _HUB_NAME.fullmatch(name) else ""
        how = f"{fetch}name a folder that contains it (not in the cache of Hugging Face, HF_HOME)"
        return cached, "" if cached else f"{UNCACHED}{name}: {how}"

    @cached_property
    def _config(self) -> tuple[dict[str, Any], str | None]:
        """The model's config.json, and the information that is missing where it cannot be read."""
        if self._has("--hf-overrides"):
            return {}, "a config.json that --hf-overrides does not change"
        folder, missing = self._folder
        if folder is None:
            return {}, missing
        place = str(self._place[0])
        data = self._read(folder / "config.json", _LARGEST_CONFIG + 1)
        if data is None:
            return {}, f"a readable config.json in {brief_value(place, 80)}"
        if len(data) > _LARGEST_CONFIG:
            return {}, f"a config.json of at most 1 MiB in {brief_value(place, 80)} (this one is too large)"
        config = json_or(data.decode("utf-8", "replace"), None)
        if not isinstance(config, dict):
            return {}, f"a config.json that is a JSON object in {brief_value(place, 80)}"
        if next(islice(_values(config), _MOST_NODES, None), None) is not None:
            most = f"{_MOST_NODES:,} values"
            return {}, f"a config.json of at most {most} in {brief_value(place, 80)} (this one is too large)"
        return config, None

    @cached_property
    def _architectures(self) -> tuple[frozenset[str], str | None]:
        config, missing = self._config
        if missing is not None:
            return frozenset(), missing
        names = config.get("architectures")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            return frozenset(), "`architectures` in the model's config.json"
        return frozenset(names), None

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        """Yield keys and values of the model's config at any depth."""
        return _values(self._config[0])

    def configured(self, key: str) -> tuple[tuple[Any, ...], str | None]:
        """Return the values of *key* in the model's config.json, at any depth.

        The second value names what is missing if there is no config.json to read.
        """
        return tuple(value for name, value in self._pairs() if name == key), self._architectures[1]

    def has_architecture(self, architectures: Collection[str], if_so: str, if_not: str) -> Fact:
        """Tell if the model is of one of *architectures*, at any depth; the texts are what it then is, or is not."""
        lists, missing = self.configured("architectures")
        if missing is not None:
            return Fact(None, missing)
        holds = any(name in architectures for names in lists if isinstance(names, list) for name in names)
        return Fact(holds, f"{self.model} is {if_so if holds else if_not}")

    @property
    def model(self) -> str:
        """The model's architectures, as part of a sentence."""
        return printable(", ".join(sorted(self._architectures[0])))[:100]

    def multimodal(self) -> Fact:
        """The model takes images, videos or audio: its config.json has a section on them."""
        _, missing = self._architectures
        if missing is not None:
            return Fact(None, missing)
        named = [value for key, value in self._pairs() if _MODALITIES.search(key)]
        if any(isinstance(value, dict) and value for value in named):
            return Fact(True, f"{self.model} takes images, videos or audio")
        if named:
            return Fact(None, f"knowing whether {self.model} takes images, videos or audio")
        return Fact(False, f"{self.model} takes no images, videos or audio")

    def mla(self) -> Fact:
        """The model has latent attention, which FlashMLA and Triton MLA serve."""
        if self.setting("VLLM_MLA_DISABLE"):
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

    def compressed_by(self, ratio: int) -> Fact:
        """Some layers of the model attend to entries that stand for *ratio* tokens each."""
        values, missing = self.configured("compress_ratios")
        if missing is not None:
            return Fact(None, missing)
        if not any(isinstance(ratios, list) and ratio in ratios for ratios in values):
            return Fact(False, f"no layer of {self.model} has a compress_ratio of {ratio}")
        return Fact(True, f"layers of {self.model} have a compress_ratio of {ratio}")

    def mamba(self) -> Fact:
        """The model has Mamba, Mamba-2 or short-convolution layers."""
        return self.with_layers(MAMBA, OTHER_RECURRENT, "Mamba or short-convolution layers")

    def recurrent(self) -> Fact:
        """The model has layers with a state: Mamba, short convolutions, gated delta nets, linear attention."""
        return self.with_layers(MAMBA | OTHER_RECURRENT, frozenset(), "recurrent layers")

    def with_layers(self, having: frozenset[str], other: frozenset[str], layers: str) -> Fact:
        """The model has such *layers*: it is one of the architectures *having*.

        It has none if it is one of *other*, or if its config has no sign of a recurrent architecture.
        """
        architectures, missing = self._architectures
        if missing is not None:
            return Fact(None, missing)
        if architectures & having:
            return Fact(True, f"{self.model} has {layers}")
        if architectures <= other:
            return Fact(False, f"{self.model} has no {layers}")
        for key, value in self._pairs():
            if _RECURRENT_WORDS.search(key) or (isinstance(value, str) and _RECURRENT_WORDS.search(value[:200])):
                return Fact(None, f"knowing whether {self.model} has {layers} (this plugin does not know the model)")
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
