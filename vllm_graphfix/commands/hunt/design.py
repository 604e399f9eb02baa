"""Cases of a hunt: an architecture under one set of flags, so that soon each pair of values has been tried together."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from vllm_graphfix.verify.engine.reduction import EXPERTS, Section

Environment = dict[str, str | None]


MODEL = "<config.json>"
"""Stands in flags for the config.json of the case's model: it drafts for itself, or its sizes are an Eagle head's."""


class Setting(NamedTuple):
    """One value of a dimension: flags of vLLM, and variables of the engine's environment."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


def _attention(backend: str) -> Setting:
    return Setting(("--attention-backend", backend))


def _drafts(method: str, tokens: int, **others: Any) -> Setting:
    config = {"method": method, "num_speculative_tokens": tokens, **others}
    return Setting(("--speculative-config", json.dumps(config)))


_LATENT = ("FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA")
_GROUPED = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
DIMENSIONS: dict[str, dict[str, Setting]] = {
    "runner": {
        "V2": Setting(environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
        "V1": Setting(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    },
    "graphs": {
        mode: Setting((f"-cc.cudagraph_mode={mode}",))
        for mode in ("FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE")
    },
    "compile": {"compiled": Setting(), "uncompiled": Setting(("-cc.mode=0",))},
    "breaks": {"unbroken": Setting(), "breakable": Setting(environment={"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"})},
    "attention": {"chosen": Setting()} | {name: _attention(name) for name in (*_GROUPED, *_LATENT)},
    "cache": {"auto": Setting()} | {kind: Setting(("--kv-cache-dtype", kind)) for kind in ("fp8", "turboquant_k8v4")},
    "prefixes": {
        "prefixes": Setting(("--enable-prefix-caching",)),
        "no-prefixes": Setting(("--no-enable-prefix-caching",)),
    },
    "chunks": {size: Setting(("--max-num-batched-tokens", size)) for size in ("128", "2048")},
    "drafts": {
        "no-drafts": Setting(),
        "ngram": _drafts("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3),
        "mtp": _drafts("mtp", 2),
        "eagle": _drafts("eagle", 3, model=MODEL),
        "draft-model": _drafts("draft_model", 2, model=MODEL),
    },
    "adapters": {
        "no-adapters": Setting(),
        "adapters": Setting(("--enable-lora", "--max-lora-rank", "8")),
        "adapters-by-number": Setting(
            ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--specialize-active-lora")
        ),
    },
    "states": {"states-chosen": Setting(), "states-aligned": Setting(("--mamba-cache-mode", "align"))},
    "scheduling": {"async": Setting(), "sync": Setting(("--no-async-scheduling",))},
    "ranks": {
        "one-rank": Setting(),
        "tp2": Setting(("-tp", "2")),
        "tp2-experts": Setting(("-tp", "2", "--enable-expert-parallel")),
        "pp2": Setting(("-pp", "2")),
        "dcp2": Setting(("-tp", "2", "-dcp", "2")),
        "dcp2-one-head": Setting(("-tp", "2", "-dcp", "2", "--hf-overrides", '{"num_key_value_heads": 1}')),
    },
}
"""Values of each dimension by name; names are unique among all dimensions."""
YOURS = "yours"
"""Value of a dimension in a case around a user's flags: what these say of it."""
NAMES = tuple(name for values in DIMENSIONS.values() for name in values)
ON_TWO_GPUS = tuple(DIMENSIONS["ranks"])[1:]
_OF_STATES = ("mamba", "ssm", "state_size", "linear_num_value_heads", "linear_attn_config", "conv_L_cache")
_WITH_SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2")
"""Beginnings of model types whose attention has sinks, which no key of a config says."""
_DRAFTS_BY_MTP = ("deepseek_v4", "ernie4_5_moe", "exaone_moe", "glm4_moe", "hy_v3", "mimo")
"""Beginnings of model types of which vLLM takes a draft model for the target's own layers of drafts (MTP).

Those with states or latent attention, which have no draft model here, are left out.
"""
_WITHOUT_DCP = ("TRITON_ATTN", "FLEX_ATTENTION")
_FLASHINFER_SIZES = (64, 128, 256, 512)
_ATTEMPTS = 20
"""Random completions of a pair: of those, the one with most new pairs becomes a case; none: the pair cannot be."""


class Deployed(NamedTuple):
    """A user's flags, and those of each dimension that they fix; under "" those of no dimension."""

    flags: tuple[str, ...]
    settings: Mapping[str, Setting]
    gpus: int


class Architecture(NamedTuple):
    """An architecture with the config of which twins are made, and what its flags depend on."""

    name: str
    config: Section
    takes_adapters: bool = True
    takes_stages: bool = True
    """Pipeline parallelism."""
    deployed: Deployed | None = None
    """The flags around which cases vary."""

    @property
    def _text(self) -> Section:
        return {**self.config, **(self.config.get("text_config") or {})}

    @property
    def _is_latent(self) -> bool:
        return bool(self._text.get("kv_lora_rank")) and self._text.get("model_type") != "minicpm3"  # there in full

    @property
    def _has_states(self) -> bool:
        kinds = self._text.get("layer_types") or ()
        return any(key.startswith(_OF_STATES) for key in self._text) or any(
            "attention" not in str(kind) or "linear" in str(kind) for kind in kinds
        )

    @property
    def _has_windows(self) -> bool:
        kinds = str(self._text.get("layer_types"))
        sizes = (self._text.get(key) for key in ("sliding_window", "attention_chunk_size"))
        return any(sizes) or "sliding" in kinds or "chunked" in kinds

    @property
    def _has_alibi(self) -> bool:
        return bool(self._text.get("alibi")) or self._text.get("model_type") == "bloom"

    @property
    def _is_mixture(self) -> bool:
        return any(self._text.get(key) for key in EXPERTS)

    @property
    def _has_attention(self) -> bool:
        heads = any(self._text.get(key) for key in ("num_attention_heads", "n_head", "n_heads"))
        return heads and not str(self._text.get("model_type", "")).endswith(("mamba", "mamba2"))

    @property
    def _head_size(self) -> int:
        size, heads = self._text.get("head_dim"), self._text.get("num_attention_heads") or self._text.get("n_head")
        return int(size or (self._text.get("hidden_size") or self._text.get("n_embd") or 0) // (heads or 1))

    def allows(self, chosen: Mapping[str, str]) -> bool:
        """Return False if vLLM is sure to refuse *chosen*, values of some dimensions, or if they make no difference."""
        chosen = {key: name for key, name in chosen.items() if name != YOURS}
        attention, cache = chosen.get("attention", "chosen"), chosen.get("cache", "auto")
        runner, ranks, scheduling = (str(chosen.get(key)) for key in ("runner", "ranks", "scheduling"))
        drafts, states, breaks = (str(chosen.get(key)) for key in ("drafts", "states", "breaks"))
        has_sinks = str(self._text.get("model_type")).startswith(_WITH_SINKS)
        is_turboquant = cache.startswith("turboquant")
        refused = {
            "a backend of other attention": attention not in ("chosen", *(_LATENT if self._is_latent else _GROUPED)),
            "no attention": (attention, cache) != ("chosen", "auto") and not self._has_attention,
            "sparse attention has a backend of its own": attention != "chosen" and bool(self._text.get("index_topk")),
            "pages as large as a state are no power of 2": attention == "FLEX_ATTENTION" and self._has_states,
            "no sinks": attention in ("FLEX_ATTENTION", "FLASHINFER") and has_sinks,
            "no kernel for the head": attention == "FLASHINFER" and self._head_size not in _FLASHINFER_SIZES,
            "no ALiBi": attention == "FLEX_ATTENTION" and self._has_alibi,
            "no fp8 cache": cache == "fp8" and attention in ("FLEX_ATTENTION", "FLASH_ATTN_MLA"),
            "TurboQuant is a backend": is_turboquant and attention != "chosen",
            "TurboQuant needs keys and values": is_turboquant and (self._is_latent or self._has_states),
            "no pieces without torch.compile or breaks": chosen.get("compile") == "uncompiled"
            and "PIECEWISE" in chosen.get("graphs", "")
            and breaks == "unbroken",
            "breaks switch torch.compile off": breaks == "breakable" and chosen.get("compile") == "compiled",
            "no breaks in V1": (breaks, runner) == ("breakable", "V1"),
            "no draft layers": drafts == "mtp" and not self._has_draft_layers,
            "no Eagle head is made": drafts == "eagle" and self._text.get("model_type") != "llama",
            "no states in a draft model": drafts == "draft-model" and (self._has_states or self._is_latent),
            "no draft model but MTP": drafts == "draft-model"
            and str(self._text.get("model_type")).startswith(_DRAFTS_BY_MTP),
            "V1 drafts with one kind of attention": (drafts, runner) == ("draft-model", "V1")
            and self._has_windows
            and len(set(self._text.get("layer_types") or ())) > 1,
            "V1 schedules in step with n-grams": (drafts, runner, scheduling) == ("ngram", "V1", "async"),
            "no adapters": chosen.get("adapters", "no-adapters") != "no-adapters" and not self.takes_adapters,
            "no states": states == "states-aligned" and not self._has_states,
            "no prefixes to align to": (states, chosen.get("prefixes")) == ("states-aligned", "no-prefixes"),
            "no experts": ranks == "tp2-experts" and not self._is_mixture,
            "no stages": ranks == "pp2" and not self.takes_stages,
            "V1 schedules in step with stages": (ranks, runner, scheduling) == ("pp2", "V1", "async"),
            "states and windows have no DCP": ranks.startswith("dcp2") and (self._has_states or self._has_windows),
            # But for latent attention DCP needs fewer key-value heads than ranks.
            "as many heads as ranks": ranks == "dcp2" and not self._is_latent,
            "no heads to reduce": ranks == "dcp2-one-head"
            and (self._is_latent or not self._text.get("num_key_value_heads")),
            "no DCP of the backend": ranks == "dcp2-one-head" and (attention in _WITHOUT_DCP or is_turboquant),
        }
        return not any(refused.values())

    @property
    def _has_draft_layers(self) -> bool:
        """True if the twin has them: see `twin._draft_layers`."""
        return bool(self._text.get("num_nextn_predict_layers")) or self._text.get("model_type") == "qwen3_next"


class HuntCase(NamedTuple):
    """One architecture under one set of flags."""

    architecture: str
    settings: Mapping[str, str]
    """Name of the value, by dimension."""
    deployed: Deployed | None = None

    @property
    def name(self) -> str:
        if self.deployed is None:
            return f"{self.architecture} {' '.join(self.settings.values())}"
        settings = self.deployed.settings.values()
        assigned = (f"{name}={value}" for each in settings for name, value in each.environment.items())
        others = (name for name in self.settings.values() if name != YOURS)
        return " ".join([*assigned, self.architecture, *self.deployed.flags, *others])

    @property
    def stem(self) -> str:
        """Name of the case's files."""
        return f"{self.architecture}-{zlib.crc32(self.name.encode()):08x}"

    @property
    def flags(self) -> tuple[str, ...]:
        if self.deployed is not None and set(self.settings.values()) == {YOURS}:
            return self.deployed.flags
        return tuple(flag for each in self.all_settings for flag in each.flags)

    @property
    def all_settings(self) -> Iterator[Setting]:
        yours = self.deployed.settings if self.deployed is not None else {}
        yield yours.get("", Setting())
        for key, name in self.settings.items():
            yield yours.get(key, Setting()) if name == YOURS else DIMENSIONS[key][name]

    @property
    def gpus(self) -> int:
        if self.deployed is not None and self.settings["ranks"] == YOURS:
            return self.deployed.gpus
        return 2 if self.settings["ranks"] in ON_TWO_GPUS else 1

    @property
    def environment(self) -> Environment:
        return {name: value for each in self.all_settings for name, value in each.environment.items()}

    @property
    def has_drafts(self) -> bool:
        fixed = self.deployed.settings if self.deployed is not None else ()
        drafts = self.settings["drafts"]
        return drafts not in ("no-drafts", YOURS) or (drafts == YOURS and "drafts" in fixed)

    @property
    def drafts_ngrams(self) -> bool:
        """True if drafts come from earlier tokens."""
        of_drafts = self.deployed.settings.get("drafts") if self.deployed and self.settings["drafts"] == YOURS else None
        return self.settings["drafts"] == "ngram" or any("ngram" in flag for flag in (of_drafts or Setting()).flags)


Pair = tuple[tuple[str, str], tuple[str, str]]


def around(architecture: Architecture, seed: int = 0, leave_out: Sequence[str] = ()) -> Iterator[HuntCase]:
    """Yield the case of the user's flags, those with one dimension changed, then all that the flags do not fix."""
    fixed = architecture.deployed.settings if architecture.deployed is not None else {}
    whole = HuntCase(architecture.name, dict.fromkeys(DIMENSIONS, YOURS), architecture.deployed)
    yield whole
    for key, names in DIMENSIONS.items():
        for name in names:
            other = whole._replace(settings={**whole.settings, key: name})
            differs = list(other.all_settings) != list(whole.all_settings)
            if differs and name not in leave_out and architecture.allows({key: name}):
                yield other
    yield from design([architecture], seed, leave_out, fixed)


def design(
    architectures: Sequence[Architecture], seed: int = 0, leave_out: Sequence[str] = (), fixed: Collection[str] = ()
) -> Iterator[HuntCase]:
    """Yield cases until each pair of values that can be together, and each value of each architecture, was in one.

    Architectures take turns, so that the first cases have all of them. Values in *leave_out* are in none, and
    dimensions in *fixed* are `YOURS` in all.
    """
    values = {
        key: [YOURS] if key in fixed else [name for name in names if name not in leave_out]
        for key, names in DIMENSIONS.items()
    }
    chance = random.Random(seed)  # noqa: S311 - the same cases for the same seed
    turns = list(architectures)
    chance.shuffle(turns)
    flat = [(key, name) for key, names in values.items() for name in names]
    open_pairs = {pair for pair in combinations(flat, 2) if pair[0][0] != pair[1][0]}
    open_singles = {each.name: set(flat) for each in turns}
    while turns:
        for architecture in list(turns):
            case = _next_case(architecture, values, open_pairs, open_singles[architecture.name], chance)
            if case is None:
                turns.remove(architecture)
                continue
            chosen = sorted(case.settings.items(), key=flat.index)
            open_pairs.difference_update(combinations(chosen, 2))
            open_singles[architecture.name].difference_update(chosen)
            yield case


def _next_case(
    architecture: Architecture,
    values: Mapping[str, Sequence[str]],
    open_pairs: set[Pair],
    open_singles: set[tuple[str, str]],
    chance: random.Random,
) -> HuntCase | None:
    """Return the case with the most new pairs among random ones around something new, or None."""
    for _ in range(len(open_singles) + len(open_pairs)):
        # Sorted: the order of a set of strings differs from one process to the next.
        starts: list[dict[str, str]] = [dict([single]) for single in sorted(open_singles)]
        starts = starts or [dict(pair) for pair in sorted(open_pairs) if architecture.allows(dict(pair))]
        if not starts:
            return None
        start = chance.choice(starts)
        made = [done for _ in range(_ATTEMPTS) if (done := _completed(architecture, values, start, chance))]
        if made:
            best = max(made, key=lambda each: _new(each, open_pairs, open_singles))
            return HuntCase(architecture.name, {key: best[key] for key in values}, architecture.deployed)
        if len(start) > 1:  # next to nothing is open by then, and other architectures try the pair, too
            return None
        open_singles.difference_update(start.items())
    return None


def _completed(
    architecture: Architecture, values: Mapping[str, Sequence[str]], start: Mapping[str, str], chance: random.Random
) -> dict[str, str] | None:
    chosen = dict(start)
    if not architecture.allows(chosen):
        return None
    for key in chance.sample(list(values), len(values)):
        if key in chosen:
            continue
        fitting = [name for name in values[key] if architecture.allows({**chosen, key: name})]
        if not fitting:
            return None
        chosen[key] = chance.choice(fitting + ["uncompiled"] * fitting.count("uncompiled"))  # starts in half the time
    return chosen


def _new(chosen: Mapping[str, str], open_pairs: set[Pair], open_singles: set[tuple[str, str]]) -> int:
    ordered = [(key, chosen[key]) for key in DIMENSIONS]
    return sum(pair in open_pairs for pair in combinations(ordered, 2)) + 2 * sum(
        each in open_singles for each in ordered
    )
