"""Trials of turboquant-drafts: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.turboquant_drafts import _ATTENTION, _BACKEND, _BASE, _MODE, _RUNNER

fixed = Verdict.FIXED
hopper = "NVIDIA H100 80GB HBM3"
quantised = "./llama --kv-cache-dtype turboquant_k8v4"
ngram = '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}\''
mtp = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\''

claim = r"_cudagraph_support: ClassVar\[AttentionCGSupport\] = AttentionCGSupport\.UNIFORM_BATCH"
single = "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE"
CLAIMED = f"_cudagraph_support: ClassVar[AttentionCGSupport] = {single}"
end_of_class = r"^class TurboQuantAttentionImpl\("
init = r"^( +)def __init__\(self, kv_cache_spec, layer_names, vllm_config, device\):\n"
threshold = r"self\._init_reorder_batch_threshold\(1, supports_spec_as_decode=False\)"
question_of_v1 = r"cg_support = builder_cls\.get_cudagraph_support\(\n.+\n +\)"
question_of_v2 = r"cg_support = builder\.get_cudagraph_support\(\n(?:.+\n)+? +\)"
decides = r"uniform_decode_query_len > 1\n +and min_cg_support\.value < AttentionCGSupport\.UNIFORM_BATCH\.value"


def claims_less_where(condition: str) -> str:
    """Write a method of the builder that claims less where *condition* holds."""
    return (
        r"\1@classmethod\n\1def get_cudagraph_support(cls, vllm_config, kv_cache_spec):\n"
        rf"\1    if {condition}:\n\1        return {single}\n"
        r"\1    return cls._cudagraph_support\n\n\g<0>"
    )


def claims_afterwards(support: str) -> str:
    """Write an assignment behind the builder."""
    return rf"TurboQuantMetadataBuilder._cudagraph_support = AttentionCGSupport.{support}\n\n\n\g<0>"


def lowered(backend: str) -> tuple[str, ...]:
    return (f'if {backend}.get_name() == "TURBOQUANT":', f"    cg_support = {single}")


by_v1 = swap(rf"^( +)({question_of_v1})\n", r"\1\2\n" + "".join(rf"\1{line}\n" for line in lowered("attn_backend")))
by_v2 = swap(rf"^( +)({question_of_v2})\n", r"\1\2\n" + "".join(rf"\1{line}\n" for line in lowered("group.backend")))

EDITS = (
    Edit("graphs of one token a request", "0.33.0", _BACKEND, claim, CLAIMED, fixed),
    Edit("the same in 0.20.0", "0.20.0", _BACKEND, claim, CLAIMED, fixed),
    Edit("no full graphs", "0.25.1", _BACKEND, claim, CLAIMED.replace(single, "AttentionCGSupport.NEVER"), fixed),
    Edit(
        "less with drafts",
        "0.21.0",
        _BACKEND,
        init,
        claims_less_where("vllm_config.speculative_config is not None"),
        remedy=True,
    ),
    Edit(
        "less, said behind the class",
        "0.28.0",
        _BACKEND,
        end_of_class,
        claims_afterwards("UNIFORM_SINGLE_TOKEN_DECODE"),
        remedy=True,
    ),
    Edit(
        "less, and more behind the class",
        "0.33.0",
        _BACKEND,
        claim,
        CLAIMED,
        also=((_BACKEND, end_of_class, claims_afterwards("UNIFORM_BATCH")),),
    ),
    Edit(
        "less for the class, more where it is asked",
        "0.33.0",
        _BACKEND,
        claim,
        CLAIMED,
        also=(
            (
                _BACKEND,
                init,
                claims_less_where("False").replace("cls._cudagraph_support", "AttentionCGSupport.UNIFORM_BATCH"),
            ),
        ),
    ),
    Edit(
        "drafts within the threshold",
        "0.33.0",
        _BACKEND,
        threshold,
        "self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)",
    ),
    Edit("a builder by another name", "0.22.1", _BACKEND, "TurboQuantMetadataBuilder", "TQBuilder"),
    Edit(
        "lengths that are read elsewhere",
        "0.27.1",
        _BACKEND,
        r"seq_lens_list = attn_metadata\.(seq_lens(?:_cpu)?)\.tolist\(\)",
        r"seq_lens_list = self.lengths(attn_metadata.\1)",
    ),
    Edit(
        "all builders claim less",
        "0.30.0",
        _BASE,
        r"return cls\._cudagraph_support",
        f"return min(cls._cudagraph_support, {single}, key=lambda each: each.value)",
    ),
    Edit("drafts in no full graph", "0.24.0", _MODE, decides, "uniform_decode_query_len > 1"),
    Edit(
        "model runner V1 asks otherwise",
        "0.33.0",
        _RUNNER,
        question_of_v1,
        "cg_support = self.supported_by(builder_cls)",
    ),
    Edit("model runner V2 asks otherwise", "0.20.2", _ATTENTION, question_of_v2, "cg_support = supported_by(builder)"),
)

WORDINGS = (
    Wording(
        REMEDY,
        "0.33.0",
        _BACKEND,
        {
            "without the type": swap(claim, f"_cudagraph_support = {single}"),
            "less with drafts": swap(init, claims_less_where("vllm_config.speculative_config")),
            "less at any time": swap(init, claims_less_where("True")),
            "said behind the class": swap(end_of_class, claims_afterwards("UNIFORM_SINGLE_TOKEN_DECODE")),
            "left out by both runners": {_RUNNER: by_v1, _ATTENTION: by_v2},
            "drafts need all graphs": {
                _MODE: swap(
                    decides,
                    "uniform_decode_query_len > 1\n"
                    "            and min_cg_support.value < AttentionCGSupport.ALWAYS.value",
                )
            },
        },
    ),
    Wording(
        LOOKALIKE,
        "0.33.0",
        _BACKEND,
        {
            "less with large blocks": swap(init, claims_less_where("kv_cache_spec.block_size > 64")),
            "less, and more behind the class": both(
                swap(claim, CLAIMED), swap(end_of_class, claims_afterwards("UNIFORM_BATCH"))
            ),
            "less for the builder, not for its class": after(threshold, f"self._cudagraph_support = {single}"),
            "left out by V1 alone": {_RUNNER: by_v1},
            "left out by V2 alone": {_ATTENTION: by_v2},
            "drafts within the threshold": swap(
                threshold, "self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)"
            ),
            "drafts of more than eight tokens": {
                _MODE: swap(
                    r"and uniform_decode_query_len > 1\n( +)and min_cg",
                    r"and uniform_decode_query_len > 8\n\1and min_cg",
                )
            },
        },
    ),
)

SERVED = (
    Served("0.33.0", f"{quantised} {ngram}", affects, "turboquant_k8v4", hopper),
    Served("0.21.0", f"{quantised} {mtp}", affects, "turboquant_k8v4", hopper),
    Served("0.20.0", f"{quantised} {ngram} -cc.cudagraph_mode=FULL_DECODE_ONLY", affects, "ngram", hopper),
    Served("0.33.0", f"./llama --kv-cache-dtype ultraquant_4bit {ngram}", affects, "ultraquant_4bit"),
    Served("0.33.0", quantised, does_not, "no speculator", hopper),
    Served("0.33.0", f"./llama {ngram}", does_not, "is not TurboQuant's", hopper),
    Served("0.33.0", f"./llama --kv-cache-dtype fp8 {ngram}", does_not, "fp8 is not TurboQuant's", hopper),
    Served("0.33.0", f"{quantised} {ngram} --enforce-eager", does_not, "--enforce-eager", hopper),
    Served("0.33.0", f"{quantised} {ngram} -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE", hopper),
    Served("0.33.0", f"{quantised} --config more.yaml", unknown, "--config", hopper),
)
