"""`turboquant-drafts`: with drafts, TurboQuant claims no full graphs of several tokens a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graphfix.authoring import fix
from vllm_graphfix.fix import Diagnosis, Event, Slice, Verdict
from vllm_graphfix.fixes._claims import claim_single_tokens

if TYPE_CHECKING:
    from vllm_graphfix.deployment import Deployment, Fact
    from vllm_graphfix.deployment.needs import Need
    from vllm_graphfix.source.files import Source

_BACKEND = "vllm/v1/attention/backends/turboquant_attn.py"
_BACKEND_MODULE = "vllm.v1.attention.backends.turboquant_attn"
_BUILDER = "TurboQuantMetadataBuilder"
_RUNNER = "vllm/v1/worker/gpu_model_runner.py"
_ATTENTION = "vllm/v1/worker/gpu/attn_utils.py"
_MODE = "vllm/config/compilation.py"
_BASE = "vllm/v1/attention/backend.py"

_CLAIM = "_cudagraph_support: ... = ..."
_OF_DRAFTS = "_cudagraph_support: ... = AttentionCGSupport.UNIFORM_BATCH"
_OF_SINGLE_TOKENS = tuple(
    f"_cudagraph_support: ... = AttentionCGSupport.{level}" for level in ("UNIFORM_SINGLE_TOKEN_DECODE", "NEVER")
)
_AS_PROMPTS = "self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)"
_SPLIT = "split_decodes_and_prefills(cam, decode_threshold=self.reorder_batch_threshold)"
_LENGTHS_ON_HOST = (
    "seq_lens_list = attn_metadata.seq_lens_cpu.tolist()",
    "seq_lens_list = attn_metadata.seq_lens.tolist()",
)
_FIRST_CHUNK = "q_len == seq_len"
_QUESTION_OF_V1 = "cg_support = builder_cls.get_cudagraph_support(*...)"
_QUESTION_OF_V2 = "cg_support = builder.get_cudagraph_support(*...)"
_DECIDES = "min_cg_support.value < AttentionCGSupport.UNIFORM_BATCH.value"

FALSE_CLAIM = Event(
    "false-claim",
    "With drafts configured, TurboQuant claimed full graphs of decodes of several tokens, which it takes for prompts: "
    "on stock they are captured and replayed.",
)


def diagnose(source: Source) -> Diagnosis:
    """Find the builder's claim, and the tokens of a request up to which it takes one for a decode."""
    if source.read(_BACKEND) is None:
        return Diagnosis.absent("there is no TurboQuant")
    builder, init = (source.function(_BACKEND, name) for name in (_BUILDER, f"{_BUILDER}.__init__"))
    claim = builder and builder.find_unique(_CLAIM)
    if builder is None or claim is None or source.function(_BACKEND, f"{_BUILDER}.get_cudagraph_support"):
        return Diagnosis.unrecognised("TurboQuant claims its graphs in a way", builder or _BACKEND)
    if claim in builder.find(*_OF_SINGLE_TOKENS):
        return Diagnosis.fixed("TurboQuant claims graphs of one token a request at most", builder.at(claim))
    if (
        claim in builder.find(_OF_DRAFTS)
        and init is not None
        and init.find_unique(_AS_PROMPTS)
        and _attends_by_host_lengths(source)
        and _claim_decides(source)
    ):
        return Diagnosis.affected(
            "TurboQuant claims full graphs of decodes with drafts, and takes these for prompts, whose lengths it "
            "reads on the host",
            builder.at(claim),
            "threshold-of-one",
        )
    return Diagnosis.unrecognised("TurboQuant supports graphs of decodes with drafts in a way", builder)


def _attends_by_host_lengths(source: Source) -> bool:
    """Tell if prompts are those longer than the threshold, and are served by lengths that a graph does not read."""
    build = source.function(_BACKEND, f"{_BUILDER}.build")
    attend = source.function(_BACKEND, "TurboQuantAttentionImpl._prefill_attention")
    return bool(
        build and build.find_unique(_SPLIT) and attend and attend.find(*_LENGTHS_ON_HOST) and attend.find(_FIRST_CHUNK)
    )


def _claim_decides(source: Source) -> bool:
    """Tell if both model runners choose their graphs by what the backends claim."""
    ask = source.function(_RUNNER, "GPUModelRunner._check_and_update_cudagraph_mode")
    resolve = source.function(_MODE, "CompilationConfig.resolve_cudagraph_mode_and_sizes")
    asks_builders = any(
        function is not None and function.find_unique(_QUESTION_OF_V2) is not None
        for function in (source.function(_ATTENTION, name) for name in ("get_attn_cg_support", "init_attn_backend"))
    )
    return bool(
        asks_builders and ask and ask.find_unique(_QUESTION_OF_V1) and resolve and resolve.find_unique(_DECIDES)
    )


def needs() -> tuple[Need, ...]:
    from vllm_graphfix.deployment import needs
    from vllm_graphfix.deployment.needs import Need

    return (
        Need(
            "a TurboQuant cache",
            _has_turboquant_cache,
            "--kv-cache-dtype turboquant_…",
            usual=False,
            clause="the KV cache is TurboQuant",
        ),
        needs.DRAFTS,
        needs.FULL_GRAPHS,
    )


def _has_turboquant_cache(deployment: Deployment, _: str) -> Fact:
    from vllm_graphfix.deployment import Fact
    from vllm_graphfix.text import printable

    value, missing = deployment.value("--kv-cache-dtype")
    if missing is not None:
        return Fact(None, missing)
    # ultraquant_4bit, of 0.33.0 on ROCm, has the same builder.
    quantised = value is not None and value.startswith(("turboquant_", "ultraquant_"))
    text = f"--kv-cache-dtype {printable((value or 'auto')[:20])}"
    return Fact(quantised, text if quantised else f"{text} is not TurboQuant's")


FIX = fix(
    "turboquant-drafts",
    diagnose=diagnose,
    surroundings=(
        # The claim, and the rows that it is about
        Slice(_BACKEND, "", "_cudagraph_support get_cudagraph_support get_builder_cls AttentionCGSupport"),
        Slice(_BACKEND, _BUILDER, "reorder_batch_threshold _init_reorder_batch_threshold is_prefill num_decodes"),
        Slice(
            _BACKEND,
            "TurboQuantAttentionImpl.forward",
            "is_prefill num_decodes num_decode_tokens _prefill_attention _decode_attention",
            Verdict.AFFECTED,
        ),
        Slice(
            _BACKEND,
            "TurboQuantAttentionImpl._prefill_attention",
            "seq_lens_list",
            Verdict.AFFECTED,
        ),
        Slice(_BASE, "AttentionMetadataBuilder.get_cudagraph_support", "_cudagraph_support"),
        Slice(
            _BASE,
            "AttentionMetadataBuilder._init_reorder_batch_threshold",
            "supports_spec_as_decode",
            Verdict.AFFECTED,
        ),
        # The question, and the choice
        Slice(_RUNNER, "GPUModelRunner._check_and_update_cudagraph_mode", "cg_support min_cg_support"),
        Slice(_RUNNER, "GPUModelRunner.initialize_attn_backend", "attention_backend_list"),
        *(
            Slice(_ATTENTION, function, "cg_support min_cg_support")
            for function in ("get_attn_cg_support", "init_attn_backend")
        ),
        Slice(
            _MODE,
            "CompilationConfig.resolve_cudagraph_mode_and_sizes",
            "min_cg_support uniform_decode_query_len",
        ),
    ),
    recognised=(_OF_DRAFTS, *_OF_SINGLE_TOKENS, _QUESTION_OF_V1, _QUESTION_OF_V2),
    corrections=claim_single_tokens(FALSE_CLAIM, (_BACKEND_MODULE, _BUILDER)),
    events=(FALSE_CLAIM,),
    needs=needs,
    default_rationale="answers",
)
