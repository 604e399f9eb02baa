"""The rows that builders of recurrent layers take for prefills, in a step that has the shape of a decode.

A builder that sees a prefill does not refresh the buffers that a decode graph reads. Its criterion differs between
releases and layers: `builder_words` reads it from the builders' code, and `Builders` combines those of an engine's
layers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_graphfix.fix import Slice, Verdict

if TYPE_CHECKING:
    from vllm_graphfix.fix import Diagnosis
    from vllm_graphfix.source.files import Source
    from vllm_graphfix.source.functions import Function

_BACKENDS = "vllm/v1/attention/backends/"
MAMBA, MAMBA2 = f"{_BACKENDS}mamba_attn.py", f"{_BACKENDS}mamba2_attn.py"
GDN, LINEAR, SHORT_CONV = (f"{_BACKENDS}{name}_attn.py" for name in ("gdn", "linear", "short_conv"))
KDA = "vllm/models/kimi_k3/nvidia/kda_metadata.py"
UTILS = f"{_BACKENDS}utils.py"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_HYBRIDS_V2 = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
BUILDER_SLICES = (
    Slice(MAMBA, "", "BaseMambaAttentionMetadataBuilder", Verdict.FIXED),
    Slice(MAMBA2, "", "Mamba2AttentionMetadataBuilder", Verdict.FIXED),
    Slice(GDN, "", "GDNAttentionMetadataBuilder", Verdict.FIXED),
    Slice(LINEAR, "", "LinearAttentionMetadataBuilder", Verdict.FIXED),
    Slice(SHORT_CONV, "", "ShortConvAttentionMetadataBuilder", Verdict.FIXED),
    Slice(KDA, "", "KimiK3KDAMetadataBuilder", Verdict.FIXED),
    Slice(UTILS, "split_decodes_and_prefills", "is_prefill", Verdict.FIXED),
    Slice(_HYBRIDS_V2, "MambaHybridModelState.prepare_attn", "num_draft_tokens_per_req", Verdict.FIXED),
)
"""The files that `builder_words` reads. `affected` rests on none of them: for an unrecognised builder each row that may
be in its prompt counts as a prefill, which costs a graph but never an answer."""

_SPLIT = "split_decodes_and_prefills({}, decode_threshold={})"
_SPLIT_BY_PHASE = "split_decodes_and_prefills({}, decode_threshold={}, treat_short_extends_as_decodes=False)"


# -- diagnosis


def with_builders(source: Source, diagnosis: Diagnosis) -> Diagnosis:
    """Append the words of the builders to the shape of *diagnosis*, which is that of the model runners."""
    words, reason = builder_words(source, diagnosis.shape), diagnosis.reason
    if lacking := [name for name in ("mamba", "gdn", "linear") if f"{name}-" not in words]:
        reason += f"; the builders of {', '.join(lacking)} are not recognised, so that each prefill counts there"
    return diagnosis._replace(reason=reason, shape=f"{diagnosis.shape} {words}".rstrip())


def builder_words(source: Source, runners: str) -> str:
    """Return the criteria of this vLLM's builders as words for `patches`; a builder without a word is not recognised.

    ``mamba-…``, ``gdn-…``, ``kda-…`` and ``linear-…`` name the criterion of a decode: ``length``, ``phase`` (past the
    prompt), ``state`` (one token, and a state or past the prompt), ``tail`` (also the last token of a prompt with
    placeholders for drafts). *runners* are those that dispatch by shape and tell the builders which rows have drafts.
    """
    split = source.function(UTILS, "split_decodes_and_prefills")
    if not (split and split.find_unique("is_prefill = query_lens > decode_threshold")):
        return ""
    short = "treat_short_extends_as_decodes"
    if short in split.parameters and not split.find_unique(
        f"if not {short}: assert common_attn_metadata.is_prefilling is not None; "
        "is_prefill |= common_attn_metadata.is_prefilling"
    ):
        return ""
    words = (
        _mamba(source),
        _by_drafts("gdn", source.function(GDN, "GDNAttentionMetadataBuilder.build")),
        _by_drafts("kda", source.function(KDA, "KimiK3KDAMetadataBuilder.build")),
        _linear(source),
        _ple(source),
        *_words_on_drafts(source, runners),
    )
    return " ".join(filter(None, words))


def _mamba(source: Source) -> str:
    """Return the word of the common builder of Mamba-1, Mamba-2 and short convolutions."""
    common = source.function(MAMBA, "BaseMambaAttentionMetadataBuilder._compute_common_metadata")
    if common is None:
        return ""
    arguments = "common_attn_metadata", "..."
    if common.find_unique(_SPLIT.format(*arguments)) and not common.contains_name("is_prefilling"):
        return "mamba-length"
    if not common.find_unique(_SPLIT_BY_PHASE.format(*arguments)):
        return ""
    if not common.contains_name("is_prefilling"):
        return "mamba-phase"
    replaced = "common_attn_metadata = common_attn_metadata.replace(is_prefilling=is_prefilling)"
    decodes = "is_prefilling[prefill_to_decode] = False"
    if not (common.find_unique(replaced) and common.find_unique(decodes) and common.mentions(is_prefilling=7)):
        return ""
    one_token = common.find_each(
        "single_token_prefill_rows = is_prefilling & (query_lens_cpu == 1)",
        "has_prior_state = seq_lens_cpu > 1",
        "prefill_to_decode = single_token_prefill_rows & has_prior_state",
    )
    if one_token and common.mentions(prefill_to_decode=3, has_prior_state=2):
        return "mamba-state"
    tails = common.find_each(
        "has_prior_state = seq_lens_cpu > query_lens_cpu",
        "stateful_prefill_rows = is_prefilling & has_prior_state",
        "prefill_to_decode = stateful_prefill_rows & (query_lens_cpu == 1)",
        "padded_prompt_tail_rows = stateful_prefill_rows & (num_decode_draft_tokens_cpu >= 0) "
        "& (query_lens_cpu == num_decode_draft_tokens_cpu + 1)",
        "prefill_to_decode |= padded_prompt_tail_rows",
    )
    built = source.function(MAMBA2, "Mamba2AttentionMetadataBuilder.build")
    passed_on = built and built.call_has_keyword(
        "self._compute_common_metadata(...)", "num_decode_draft_tokens_cpu=kwargs.get('num_decode_draft_tokens_cpu')"
    )
    return "mamba-tail" if tails and passed_on and common.mentions(prefill_to_decode=4, has_prior_state=2) else ""


def _by_drafts(name: str, build: Function | None) -> str:
    """Return the word of gated delta nets: a row with drafts is a decode, or one of a single token in steps without."""
    if build is None or not (
        build.find("spec_sequence_masks_cpu = num_decode_draft_tokens_cpu >= 0")
        or build.find_unique("spec_sequence_masks = num_decode_draft_tokens_cpu >= 0")
    ):
        return ""
    if build.find_unique(_SPLIT.format("m", "1")):
        return f"{name}-length"
    by_state = build.find_each(
        "no_prior_state = (query_lens_cpu > 0) & (m.seq_lens_cpu_upper_bound <= query_lens_cpu)",
        "no_prior_state &= m.is_prefilling",
        _SPLIT_BY_PHASE.format("m.replace(is_prefilling=no_prior_state)", "1"),
    )
    return f"{name}-state" if by_state else ""


def _linear(source: Source) -> str:
    plain = source.function(LINEAR, "LinearAttentionMetadataBuilder.build")
    if not (plain and plain.find_unique(_SPLIT.format("common_attn_metadata", "self.reorder_batch_threshold"))):
        return ""
    drafted = source.function(LINEAR, "BailingLinearAttentionMetadataBuilder.build")
    if drafted and not drafted.find_each(
        "decode_threshold = self.reorder_batch_threshold if use_spec_decode else 1",
        _SPLIT.format("common_attn_metadata", "decode_threshold"),
    ):
        return ""
    return "linear-length"


def _ple(source: Source) -> str:
    """Return the word of layer embeddings' short convolution (Qwen4-exp): by drafts, without any as for Mamba."""
    build = source.function(SHORT_CONV, "PleShortConvAttentionMetadataBuilder.build")
    plain = source.function(SHORT_CONV, "PleShortConvAttentionMetadataBuilder._build_non_spec_metadata")
    by_drafts = build and build.find_each(
        "candidate_mask = num_decode_draft_tokens_cpu[: m.num_reqs] >= 0", "spec_sequence_masks_cpu = candidate_mask"
    )
    return (
        "ple"
        if by_drafts and plain and plain.call_has_keyword("super().build(...)", "num_accepted_tokens=None")
        else ""
    )


def _words_on_drafts(source: Source, runners: str) -> list[str]:
    """Return words for the numbers of drafts that model runners pass to builders.

    ``drafted-tails``: the last token of a prompt with placeholders counts as a row with drafts. ``always-told``: model
    runner V1 passes them in steps without drafts, too. ``told-short-conv``: it passes them to short convolutions, too.
    """
    prepared = source.function(_RUNNER, "GPUModelRunner._prepare_inputs")
    built = source.function(_RUNNER, "GPUModelRunner._build_attention_metadata")
    execute = source.function(_RUNNER, "GPUModelRunner.execute_model")
    tails = bool(
        prepared
        and prepared.find_unique(
            "if num_scheduled_tokens[req_idx] == draft_len + 1: num_decode_draft_tokens[req_idx] = draft_len"
        )
    )
    if "v2" in runners:
        state = source.function(_HYBRIDS_V2, "MambaHybridModelState.prepare_attn")
        tails = tails and bool(
            state and state.find_unique("input_batch.num_scheduled_tokens == num_draft_tokens_per_req + 1")
        )
    always = execute and execute.find_unique("use_spec_decode = self.speculative_config is not None")
    short = built and built.contains_name("ShortConvAttentionMetadataBuilder")
    words = {"drafted-tails": tails, "always-told": always, "told-short-conv": short}
    return [word for word, applies in words.items() if applies]


# -- rows


class Prefills(NamedTuple):
    """The rows that a builder takes for prefills: a higher number means more rows. Several builders: the highest."""

    one_token: int
    """In batches of one token a row. 0: no row; 1: rows without a state; 2: rows in their prompt; 3: rows that compute
    any known token."""
    in_prompt: int
    """In batches with drafts. 0: no row; 1: rows in their prompt without state and placeholders; 2: all in a prompt."""
    undrafted: int
    """Of rows without drafts, in decodes with drafts. 0: no row; 1: all of them if no row has drafts; 2: each."""

    def rows(self, length: int, computed: Any, prompt: Any, known: Any) -> Any:
        """Return the rows, (rows,) bool, of a step of *length* tokens each that a builder takes for prefills, or None.

        *computed*, *prompt* (the tokens up to which a row counts as prefilling) and *known* are (rows,) int32 of NumPy.
        """
        if length == 1:
            if not self.one_token:
                return None
            rows = computed < prompt
            if self.one_token == _ANY.one_token:
                return rows | (computed + 1 < known)
            if self.one_token == 1 and 1 in rows.tobytes():  # most steps have no such row
                rows &= computed == 0
            return rows
        undrafted = computed + 1 < known
        if self.in_prompt:
            rows = computed < prompt
            if self.in_prompt == 1:
                rows &= undrafted | (computed == 0)
            if self.undrafted == 2:
                rows |= undrafted
        else:
            rows = undrafted
        if self.undrafted == 1 and undrafted.all():
            return undrafted
        return rows if self.in_prompt or self.undrafted == 2 else None


_ANY = Prefills(3, 2, 2)
"""The assumption for an unrecognised builder: it takes each row that is not past its known tokens for a prefill."""
_NONE = Prefills(0, 0, 0)
_BY = {"length": (0, 0), "phase": (2, 2), "state": (1, 2), "tail": (1, 1)}


class Builders:
    """The rows that the builders of one engine take for prefills, computed once per `KVCacheConfig`."""

    __slots__ = ("_by_class", "_config", "_prefills")

    def __init__(self, words: str, *, v2: bool) -> None:
        self._by_class = _by_class(frozenset(words.split()), v2=v2)
        self._config: Any = None
        self._prefills: Prefills | None = None

    def of(self, runner: Any) -> Prefills | None:
        """Return the rows that some layer of *runner* takes for prefills; None if no layer has a state or takes any."""
        config = runner.kv_cache_config
        if self._config is not config:
            parallel = getattr(runner, "parallel_config", None)
            kinds = self._kinds(config, getattr(runner, "attn_groups", ()))
            if getattr(parallel, "pipeline_parallel_size", 1) > 1 and _recurrent_groups(config):
                # Pipeline stages have different layers but must agree on the number of tokens: go by the groups alone,
                # which are the same on all stages.
                kinds = [_ANY]
            highest = Prefills(*map(max, zip(_NONE, *kinds, strict=True)))
            self._prefills = None if highest == _NONE else highest
            self._config = config
        return self._prefills

    def _kinds(self, config: Any, attention_groups: Any) -> list[Prefills]:
        expected = {name for group in _recurrent_groups(config) for name in group.layer_names}
        kinds = []
        for group in (group for groups in attention_groups for group in groups):
            if expected.intersection(group.layer_names):
                expected.difference_update(group.layer_names)
                kinds.append(self._of_class(group.backend.get_builder_cls()))
        return [*kinds, _ANY] if expected else kinds

    def _of_class(self, builder: type) -> Prefills:
        """Return the prefills of *builder*, which may be a subclass that does not override the decision."""
        for cls in builder.__mro__:
            if (known := self._by_class.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
                return known
            if not vars(cls).keys().isdisjoint(("build", "_compute_common_metadata")):
                break
        return _ANY


def _recurrent_groups(config: Any) -> list[Any]:
    """Return the groups of a `KVCacheConfig` whose layers keep a state."""
    recurrent = sys.modules["vllm.v1.kv_cache_interface"].MambaSpec
    return [group for group in config.kv_cache_groups if isinstance(_layer_spec(group.kv_cache_spec), recurrent)]


def _layer_spec(spec: Any) -> Any:
    """Return the specification of a group's layers; of several sizes, that of one layer."""
    together = getattr(spec, "kv_cache_specs", None)
    return next(iter(together.values())) if together else spec


def _by_class(words: frozenset[str], *, v2: bool) -> dict[str, Prefills]:
    """Return the prefills of each recognised builder, by the name of its class."""
    by = dict(word.split("-") for word in words if word.startswith(("mamba-", "gdn-", "kda-", "linear-")))
    # Without the numbers of drafts, a builder takes every row of more than one token for a prefill.
    undrafted = 0 if v2 or "always-told" in words else 1
    in_prompt = 0 if "drafted-tails" in words else 2
    by_builder: dict[str, Prefills] = {}
    if mamba := by.get("mamba"):
        one_token, with_drafts = _BY[mamba]
        if mamba == "tail":  # by the numbers of drafts that the runner passes
            with_drafts = max(with_drafts, in_prompt)
        with_drafts_known = Prefills(one_token, with_drafts, undrafted)
        with_drafts_unknown = with_drafts_known if v2 else Prefills(one_token, 2, 2)
        by_builder["mamba1_attn.Mamba1AttentionMetadataBuilder"] = with_drafts_unknown
        by_builder["mamba2_attn.Mamba2AttentionMetadataBuilder"] = with_drafts_known
        short_conv = with_drafts_known if "told-short-conv" in words else with_drafts_unknown
        by_builder["short_conv_attn.ShortConvAttentionMetadataBuilder"] = short_conv
        if "ple" in words:
            by_builder["short_conv_attn.PleShortConvAttentionMetadataBuilder"] = Prefills(one_token, in_prompt, 2)
    if gdn := by.get("gdn"):
        by_builder["gdn_attn.GDNAttentionMetadataBuilder"] = Prefills(_BY[gdn][0], in_prompt, 2)
    if "linear" in by:
        for name in ("LinearAttentionMetadataBuilder", "BailingLinearAttentionMetadataBuilder"):
            by_builder[f"linear_attn.{name}"] = Prefills(0, 0, undrafted)
    classes = {f"vllm.v1.attention.backends.{name}": prefills for name, prefills in by_builder.items()}
    if kda := by.get("kda"):
        classes["vllm.models.kimi_k3.nvidia.kda_metadata.KimiK3KDAMetadataBuilder"] = Prefills(
            _BY[kda][0], in_prompt, 2
        )
    return classes
