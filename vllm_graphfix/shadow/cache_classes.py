"""vLLM's classes that define a layer's cache, and whether a step can write such a cache a second time.

A class that is not here is refused. docs/shadow.md has the table; a test reads the classes of each release.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Treatment(Enum):
    """The treatment of a cache by a check, as the table names it."""

    SLOT = "checked"
    RING = "checked; the ring is put back and compared"
    STATE = "checked; the state is put back and compared"
    REFUSED = "refused"


class CacheClass(NamedTuple):
    models: str
    treatment: Treatment
    why: str
    """A clause: the data that a step writes there, or the reason why no step is checked."""


_INSERT = "each token's own key and value, at its own slot"
_GROUPS = "an entry for each group of tokens, made of what is kept for its tokens, at the group's own slot"
_BY_NAME = {
    name: CacheClass("all", Treatment.SLOT, _INSERT)
    for name in (
        "Attention",
        "ChunkedLocalAttention",
        "CrossAttention",
        "EncoderOnlyAttention",
        "MLAAttention",
        "DeepseekV32IndexerCache",
        "PrefillPrefixLMAttention",
        "RSWAAttention",
        "StaticSinkAttention",
    )
}
"""By name alone: these classes moved between modules from release to release."""
RECURRENT = "MambaBase"
"""The class of vLLM whose cache is a state for each request: Mamba, GDN, KDA, linear attention, short convolutions.

A subclass may override the number of states; the metadata of a step name those that it uses all the same.
"""
OF_A_STATE = CacheClass("", Treatment.STATE, "a request's state, in the rows that the step's metadata name")

V4, V41, K3, M3, QWEN4 = "DeepSeek V4", "DeepSeek V4.1", "Kimi K3", "MiniMax M3", "Qwen4-exp"
_V4, _V41 = "models.deepseek_v4", "models.deepseek_v41"
_CLASSES = {
    "v1.attention.backends.mla.sparse_swa.DeepseekV4SWACache": CacheClass(f"{V4}, V4.1", Treatment.SLOT, _INSERT),
    f"{_V4}.attention.DeepseekV4Attention": CacheClass(V4, Treatment.SLOT, _GROUPS),
    f"{_V4}.attention.DeepseekV4IndexerCache": CacheClass(V4, Treatment.SLOT, _GROUPS),
    f"{_V4}.compressor.CompressorStateCache": CacheClass(
        V4, Treatment.SLOT, "each token's own state and score, at its own slot; groups are read from there"
    ),
    f"{_V41}.attention.DeepseekV4Attention": CacheClass(V41, Treatment.SLOT, _GROUPS),
    f"{_V41}.attention.DeepseekV4IndexerCache": CacheClass(V41, Treatment.SLOT, _GROUPS),
    f"{_V41}.compressor.CompressorStateCache": CacheClass(
        V41,
        Treatment.RING,
        "the last 8 or more tokens' states of a request, in a ring: a step of more tokens than that overwrites what "
        "it has read",
    ),
    "models.kimi_k3.nvidia.mla.MultiHeadLatentAttention": CacheClass(K3, Treatment.SLOT, _INSERT),
    "models.minimax_m3.nvidia.model.MiniMaxM3SparseAttention": CacheClass(M3, Treatment.SLOT, _INSERT),
    "models.minimax_m3.common.indexer.MiniMaxM3IndexerCache": CacheClass(M3, Treatment.SLOT, _INSERT),
    "models.qwen4_exp.nvidia.qsa.Qwen4ExpQSAAttention": CacheClass(QWEN4, Treatment.SLOT, _INSERT),
    "models.qwen4_exp.common.qsa_cache.QSACompressedKeyCache": CacheClass(QWEN4, Treatment.SLOT, _GROUPS),
    "models.qwen4_exp.common.qsa_cache.QSAKeyStateCache": CacheClass(
        QWEN4, Treatment.RING, "the keys of a request's open group and of its drafts, in a ring"
    ),
}
_POOLS = "an entry for each pool of tokens, made of what its tail keeps"
_TAIL = "raw keys and scores of a request's open pool and of its drafts, in a ring"
_REFUSED = {
    "models.inkling.nvidia.attention.InklingAttention": (
        "Inkling",
        "each token's own key and value, by the kernel that writes the short convolutions' inputs, too",
    ),
    "models.inkling.nvidia.sconv_swa_attn.InklingConvState": (
        "Inkling",
        "each token's inputs of four short convolutions, in pages of as many tokens as a convolution reads",
    ),
    "models.glm5next.nvidia.attention.Glm5NextIndexerCache": ("GLM-5.3 (0.30.0)", _POOLS),
    "models.glm5next.nvidia.attention.Glm5NextTailCache": ("GLM-5.3 (0.30.0)", _TAIL),
    "models.glm5next.common.attention.Glm5NextIndexerCache": ("GLM-5.3", _POOLS),
    "models.glm5next.common.attention.Glm5NextTailCache": ("GLM-5.3", _TAIL),
    "models.step5.nvidia.sparse_summary_cache.Step5SparseSummaryCacheLayer": (
        "Step 5",
        "a summary of each region of eight tokens, made of what its ring keeps",
    ),
    "models.step5.nvidia.csa_tail_ring.Step5CSATailRing": (
        "Step 5",
        "raw rows of a request's open region, in a ring",
    ),
    "models.dots3_note.nvidia.model.Dots3NotePaddedMLAAttention": (
        "dots.3 NOTE",
        "each token's own latent, in rows that a sparse backend of its own makes wider",
    ),
    "model_executor.models.whisper_causal.WhisperCausalAttentionWithBlockPooling": (
        "causal Whisper",
        "keys and values of several frames a token, at slots that its builder makes in buffers of its own",
    ),
    "model_executor.models.extract_hidden_states.CacheOnlyAttentionLayer": (
        "`extract_hidden_states`",
        "hidden states, which a KV connector saves while the step goes on",
    ),
}
"""Models, and the data that a step writes, as read in the sources."""
OTHER_DEVICES = ("amd", "rocm", "xpu", "cpu")
"""Packages and modules of a model's classes for devices other than NVIDIA's, which may write otherwise: refused."""
UNKNOWN = "it is not known whether a step can write its cache twice"


CLASSES = _CLASSES.keys() | _REFUSED.keys()
"""Every class known by ``module.Class``, without ``vllm.``."""


def known(kind: type) -> CacheClass | None:
    """Return the entry for *kind*, the class among a layer's bases that defines its cache."""
    return known_at(f"{kind.__module__}.{kind.__name__}".removeprefix("vllm.")) or known_by_name(kind.__name__)


def known_at(place: str) -> CacheClass | None:
    """Return the entry for ``module.Class``, without ``vllm.``."""
    if place in _REFUSED:
        models, written = _REFUSED[place]
        return CacheClass(models, Treatment.REFUSED, f"{written}; read, and never run twice")
    return _CLASSES.get(place)


def known_by_name(name: str) -> CacheClass | None:
    return _BY_NAME.get(name)
