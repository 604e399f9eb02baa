"""Reduces a model's config.json to that of its twin: same architecture and kinds of layers, few layers and experts.

A twin is one rank's share of the model, where that is possible: heads, states and the widths of experts are divided by
the tensor parallelism of the deployment, so that kernels see the shapes that they see in production. Sizes stay
multiples of the same power of two, and no further: what is unaligned stays unaligned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

VOCABULARY = 2048
_HIDDEN, _WIDTH, _MLA_HEADS, _ALIGNMENT = 512, 256, 128, 256
_MOST_KINDS = 6
"""Values of a list with an entry per layer; one with more of them has indices of layers."""

Section = dict[str, Any]


class Change(NamedTuple):
    """One difference of a twin from its model."""

    key: str
    before: Any
    after: Any
    hides: tuple[str, ...]
    """Names of the fixes whose defects the twin may hide because of it."""
    why: str
    """The way in which it hides them, or the reason why it hides none."""


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "swa_num_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "swa_num_key_value_heads")
_HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model")
_AS_WIDE = ("conv_dim", "block_dim")
"""LFM2's names of the hidden size in blocks of its own."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_GROUPS = ("n_group", "num_expert_group")
_STATE_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
_STATE_HEAD_SIZES = ("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
_STATE_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_EXPANSIONS = ("expand", "mamba_expand")
_WIDTHS = (
    "intermediate_size moe_intermediate_size intermediate_size_mlp shared_expert_intermediate_size n_inner ffn_dim "
    "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size expert_hidden_dim"
).split()
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

_FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "max_window_layers")
"""Numbers of layers in front that are of another kind than those behind them."""
_PERIODS = (
    "attn_layer_period expert_layer_period decoder_sparse_step interleave_moe_layer_step sliding_window_pattern "
    "_sliding_window_pattern full_attention_interval no_rope_layer_interval moe_layer_freq"
).split()
"""Every so many layers one is of another kind."""
_INDICES = dict.fromkeys(("full_attn_layers", "kda_layers"), 1) | dict.fromkeys(
    "mlp_only_layers moe_layers attn_layer_indices full_attn_idxs hybrid_layer_ids global_attn_idx".split(), 0
)
"""Lists of the layers of a kind, and the number of the first layer in them."""
_OF_ENCODERS = ("deepstack_visual_indexes", "fullatt_block_indexes")


@dataclass
class Plan:
    """One section of a config, and the deployment: all that the sizes of its twin depend on."""

    section: Section
    """The section with the defaults of its class."""
    ranks: tuple[int, int] = (1, 1)
    """Tensor parallelism of the deployment, and of the twin."""
    whole_experts: bool = False
    """Ranks have experts of their own, not parts of all (expert parallelism)."""
    more_layers: int = 0
    alignment: int = 1
    """Widths are multiples of this, as a quantisation with blocks needs them."""

    def first(self, keys: Iterable[str], otherwise: int = 0) -> int:
        values = (self.section.get(key) for key in keys)
        return next((value for value in values if isinstance(value, int) and value), otherwise)

    @cached_property
    def layers_before(self) -> int:
        patterns = (self.section.get(key) for key in ("layers_block_type", "hybrid_override_pattern", "layer_types"))
        return self.first(_LAYERS) or next((len(pattern) for pattern in patterns if pattern), 0)

    @cached_property
    def layers(self) -> int:
        """The smallest number of layers, from the first one on, among which each kind of layer is."""
        needed, before = 2, self.layers_before
        for key, value in _nested(self.section):
            if key in _FIRST_LAYERS and isinstance(value, int) and value:
                needed = max(needed, 2)
            elif key in _PERIODS and isinstance(value, int):
                needed = max(needed, value)
            elif key in _INDICES and value:
                numbers = {number - _INDICES[key] for number in value}
                others = set(range(before)) - numbers
                needed = max(needed, min(numbers) + 1, min(others, default=0) + 1)
            elif _is_per_layer(value, before):
                needed = max(needed, *(value.index(kind) + 1 for kind in set(value)))
        return min(needed + self.more_layers, before)

    @cached_property
    def head_counts(self) -> tuple[int, int]:
        """Query heads and key-value heads; as many of the first for one of the second as in the model."""
        (before, after), heads = self.ranks, self.first(_HEADS, 1)
        kv_heads = self.first(_KV_HEADS, heads)
        of_rank, kv_of_rank = max(1, heads // before), max(1, kv_heads // before)
        ratio = max(1, of_rank // kv_of_rank)
        least = max(2, math.ceil(_HIDDEN / (ratio * self.head_size)))
        shared = min(kv_of_rank, _MLA_HEADS if self.section.get("kv_lora_rank") else least)
        # Ranks share key-value heads that are fewer than they.
        return ratio * shared * after, shared * after if kv_heads >= after else math.gcd(kv_heads, after)

    def kv_heads(self, before: int) -> int:
        """Return the key-value heads of layers that have *before*: those with windows may have more than others."""
        return max(1, before * self.head_counts[1] // self.first(_KV_HEADS, before))

    @cached_property
    def head_size(self) -> int:
        derived = self.first(_HIDDEN_SIZES) // self.first(_HEADS, 1)
        return self.first(("head_dim", "attention_head_dim"), derived) or 1

    @cached_property
    def hidden(self) -> int:
        before = self.first(_HIDDEN_SIZES)
        if self.first(_HEADS) and not self.first(("head_dim", "attention_head_dim")):
            return min(before, self.head_counts[0] * self.head_size)
        hidden = narrowed(before, _HIDDEN)
        if self.section.get("kv_lora_rank") and before % self.head_counts[0] == 0:
            return min(before, math.lcm(hidden, self.head_counts[0]))  # MiniCPM3's class needs a multiple of heads
        return hidden

    def first_layers(self, before: int) -> int:
        """Return 1, or, where a list has the kind of each layer, too, as many as it has: the two must agree."""
        return before if self.section.get("mlp_layer_types") else min(before, 1)

    def falcon_width(self, before: int) -> int:
        """Return 4 times the hidden size where the model has that: vLLM's Falcon reads no width."""
        return 4 * self.hidden if before == 4 * self.first(_HIDDEN_SIZES) else self.width(before)

    def width(self, before: int) -> int:
        expansion = self.first(_EXPANSIONS)
        if "state_size" in self.section and before == expansion * self.first(_HIDDEN_SIZES):
            return expansion * self.hidden
        whole, ranks = (1, 1) if self.whole_experts else self.ranks
        width = narrowed(before // whole, _WIDTH) * ranks
        return max(1, width // self.alignment) * self.alignment

    def experts(self, before: int) -> int:
        groups = self.first(_GROUPS, 1)
        least = max(2 * self.first(_CHOSEN, 1), 2 * groups, 8)
        return min(before, math.ceil(least / groups) * groups)

    def state_heads(self, before: int) -> int:
        """Return as many heads of states as the expansion of the hidden size has, or in proportion to it."""
        size, expansion, hidden = self.first(_STATE_HEAD_SIZES, 1), self.first(_EXPANSIONS), self.first(_HIDDEN_SIZES)
        if before * size == expansion * hidden:
            return expansion * self.hidden // size
        groups = self.first(_STATE_GROUPS, 1)
        return max(1, before * self.hidden // hidden // groups) * groups

    @property
    def has_states(self) -> bool:
        return bool(self.first(("ssm_state_size", "mamba_d_state", "state_size")))


class Reduction(NamedTuple):
    """A rule for the values of *keys*, and what it may hide."""

    keys: tuple[str, ...]
    after: Callable[[Plan, int], int]
    hides: tuple[str, ...]
    why: str


_SCHEDULES = ("flash-mixed-schedule", "adaptive-schedule")
_AT_OTHER_LENGTHS = "the number of heads decides where FlashAttention 3 splits: these may show at other lengths"
REDUCTIONS = (
    Reduction(_LAYERS, lambda plan, _: plan.layers, (), "each kind of layer is there, in the model's order"),
    Reduction(_FIRST_LAYERS, Plan.first_layers, (), "a layer of the kind in front is there"),
    Reduction(_MTP_LAYERS, lambda _, before: min(before, 1), (), "one draft layer is asked for each draft token"),
    Reduction(_HEADS, lambda plan, _: plan.head_counts[0], _SCHEDULES, _AT_OTHER_LENGTHS),
    Reduction(_KV_HEADS, Plan.kv_heads, _SCHEDULES, _AT_OTHER_LENGTHS),
    Reduction(
        (*_HIDDEN_SIZES, *_AS_WIDE), lambda plan, _: plan.hidden, (), "no fix depends on the width of a token's state"
    ),
    Reduction(tuple(_WIDTHS), Plan.width, (), "no fix depends on it, and its alignment is the same"),
    Reduction(("ffn_hidden_size",), Plan.falcon_width, (), "no fix depends on it"),
    Reduction(EXPERTS, Plan.experts, (), "no fix depends on their number; a token has as many, of as many groups"),
    Reduction(_STATE_HEADS, Plan.state_heads, (), "a head's state has the model's size, so blocks are as large a head"),
    Reduction(
        ("mamba_d_ssm",),
        lambda plan, _: plan.state_heads(plan.first(_STATE_HEADS)) * plan.first(_STATE_HEAD_SIZES),
        (),
        "a head's state has the model's size",
    ),
    Reduction(("vocab_size",), lambda _, before: min(before, VOCABULARY), (), "no fix depends on the size of logits"),
)
_RECURRENT = frozenset(_STATE_HEADS) | {"mamba_d_ssm"}
_ENCODER = Reduction(
    _LAYERS,
    lambda plan, _: max([2, *(len(plan.section.get(key) or ()) for key in _OF_ENCODERS)]),
    ("encoder-adapters", "encoder-input-norm", "encoder-padding", "deepstack-features", "image-embeddings"),
    "images are not asked for: the model's processor is not part of its config.json",
)


def reduced(config: Section, defaults: Section, plan: Callable[[Section], Plan]) -> tuple[Section, list[Change]]:
    """Return the *config* of a twin, and how it differs.

    *defaults* are all values of the model's class: sizes that *config* leaves to it are written out where they change.
    *plan* makes the plan of a section.
    """
    made, changes = {**config}, list[Change]()
    for key, value in config.items():
        section = {**(defaults.get(key) or {}), **value} if isinstance(value, dict) else {}
        if key.startswith(("vision_", "audio_")) and section:
            made[key] = _reduce(value, Plan(section), (_ENCODER,), f"{key}.", changes)
        elif key.endswith("_config") and any(name in section for name in _LAYERS):
            made[key] = _reduce(value, plan(section), REDUCTIONS, f"{key}.", changes)
    if "text_config" not in config:
        made = _reduce(made, plan({**defaults, **config}), REDUCTIONS, "", changes)
    _renumber(made)
    return made, changes


def _reduce(config: Section, plan: Plan, reductions: Iterable[Reduction], path: str, changes: list[Change]) -> Section:
    made = {key: _cut(key, value, plan) for key, value in config.items()}
    for reduction in reductions:
        for key in reduction.keys:
            before = plan.section.get(key)
            if not isinstance(before, int) or isinstance(before, bool) or before < 1:
                continue
            if key in _RECURRENT and not plan.has_states:
                continue
            after = reduction.after(plan, before)
            made[key] = after
            if after != before:
                changes.append(Change(path + key, before, after, reduction.hides, reduction.why))
    if plan.first(("head_dim",)):
        made["head_dim"] = plan.first(("head_dim",))  # the class would derive it from the new sizes
    for key in _OF_ENCODERS:
        if made.get(key):
            made[key] = list(range(len(made[key])))
    return made


def _cut(key: str, value: Any, plan: Plan) -> Any:
    """Return *value* without the layers that the twin lacks."""
    if isinstance(value, dict):
        kept = {name: inner for name, inner in value.items() if key != "per_layer_config" or int(name) < plan.layers}
        return {name: _cut(name, inner, plan) for name, inner in kept.items()}
    if key in _INDICES and isinstance(value, list):
        return [number for number in value if number - _INDICES[key] < plan.layers]
    return value[: plan.layers] if _is_per_layer(value, plan.layers_before) else value


def _is_per_layer(value: Any, layers: int) -> bool:
    fits = isinstance(value, (list, str)) and len(value) == layers > 0
    return fits and all(isinstance(each, (str, int, float)) for each in value) and len(set(value)) <= _MOST_KINDS


def _nested(section: Section) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        yield key, value
        if isinstance(value, dict):
            yield from _nested(value)


def _renumber(config: Section) -> None:
    """Give tokens with a meaning numbers at the end of the smaller vocabulary."""
    numbers: dict[int, int] = {}
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in section.items():
            if key.endswith(("_token_id", "_token_index")):
                ids = [
                    token if token < VOCABULARY else numbers.setdefault(token, VOCABULARY - 1 - len(numbers))
                    for token in (value if isinstance(value, list) else [value])
                    if isinstance(token, int)
                ]
                section[key] = ids if isinstance(value, list) else next(iter(ids), value)


def narrowed(size: int, most: int) -> int:
    """Return at most *most*, with the power of two that *size* is a multiple of, up to `_ALIGNMENT`."""
    unit = min(_ALIGNMENT, size & -size)
    times = max(1, min(size, most) // unit)
    if unit < _ALIGNMENT and times % 2 == 0:
        times -= 1
    return times * unit
