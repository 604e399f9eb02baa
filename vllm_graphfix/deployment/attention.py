"""The KV cache and the attention kernels of a deployment, by its flags, model and GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from vllm_graphfix.deployment import hardware
from vllm_graphfix.deployment.answers import Fact
from vllm_graphfix.deployment.model import Model
from vllm_graphfix.deployment.secrets import brief_value, quoted_value
from vllm_graphfix.text import printable

_FLASH_ATTENTION_FIRST = (8, 9, 12)
"""Compute capabilities on which vLLM tries FlashAttention first."""
_CONTEXT_PARALLEL = "--decode-context-parallel-size"
_NOT_FP8 = re.compile(r"(b?float(16|32)|int\d|nvfp4|turboquant|ultraquant|octave)\w*")
"""Values of --kv-cache-dtype in the releases, other than auto and those that begin with fp8."""
_LOGGED = "the attention backend that vLLM logs when it starts, or --attention-backend"


class Attention(Model):
    def fp8_cache(self) -> Fact:
        """The KV cache holds 8-bit floating-point numbers."""
        value, missing = self.value("--kv-cache-dtype")
        if missing is not None:
            return Fact(None, missing)
        if value is not None and value != "auto":
            if value in ("fp8", "fp8_e4m3"):
                return Fact(True, f"--kv-cache-dtype {value}")
            if value.startswith("fp8"):
                return Fact(False, f"FlashMLA takes no --kv-cache-dtype {brief_value(value, 20)} for dense attention")
            if not _NOT_FP8.fullmatch(value):
                return Fact(None, f"a --kv-cache-dtype that vLLM takes ({brief_value(value, 20)} is unknown)")
            return Fact(False, f"--kv-cache-dtype {brief_value(value, 20)} is not fp8")
        config, missing = self._config
        if missing is not None:
            # A quantised checkpoint brings its own.
            return Fact(None, f"--kv-cache-dtype, or {missing}")
        quantised = [key for key in ("quantization_config", "compression_config") if config.get(key)]
        if quantised and any("kv" in key and value for key, value in self._pairs() if not key.startswith("kv_lora")):
            return Fact(None, "--kv-cache-dtype (the model's quantization config sets one)")
        if quantised and config[quantised[0]] and not isinstance(config[quantised[0]], dict):
            return Fact(None, "--kv-cache-dtype (the model's quantization config cannot be read)")
        if not quantised and self._has_file("hf_quant_config.json"):
            return Fact(None, "--kv-cache-dtype (the model's hf_quant_config.json may set one)")
        if self.sparse_mla().holds is not False and self.mla().holds is not False:
            return Fact(None, "--kv-cache-dtype (models with sparse attention use fp8 by default)")
        return Fact(False, "the KV cache is not fp8 (--kv-cache-dtype auto)")

    def _has_file(self, name: str) -> bool:
        folder, _ = self._folder
        return folder is not None and self._read(folder / name, 1) is not None

    def _backend(self) -> tuple[str | None, str | None]:
        """Return the attention backend on the line (None where vLLM chooses), and the information that is missing."""
        value, missing = self.value("--attention-backend")
        config, wrong = self._object("--attention-config")
        missing = missing or wrong
        if missing is not None:
            return None, missing
        backend = config.get("backend", value)
        if backend is not None and not isinstance(backend, str):
            return None, "an attention backend that vLLM knows"
        return (None, None) if backend is None or backend.lower() == "auto" else (backend.upper(), None)

    @cached_property
    def gpu(self) -> tuple[str | None, int | None]:
        """The GPU's name and major compute capability, each None if it is not known."""
        names = (self._gpu_named,) if self._gpu_named else tuple(dict.fromkeys(hardware.gpus()))
        majors = {hardware.capability(name) for name in names}
        return (names[0] if len(names) == 1 else None, majors.pop() if len(majors) == 1 else None)

    def _capability(self, wanted: Sequence[int], what: str) -> Fact:
        name, major = self.gpu
        if major is None:
            return Fact(None, f"the name of the GPU that serves (--gpu NAME): {what}")
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
            return Fact(False, f"--attention-backend {brief_value(backend, 40)} is not FlashMLA")
        hopper = self._capability((9,), "FlashMLA's dense kernels need Hopper")
        for needed in (self.mla(), hopper):
            if needed.holds is False:
                return needed
        sparse = self.sparse_mla()
        if sparse.holds:
            return Fact(False, f"{sparse.source}, which dense FlashMLA does not serve")
        if self.mla().holds is None:
            return self.mla()
        if hopper.holds is None:
            return hopper
        # On Hopper vLLM prefers FlashAttention, which has no fp8 for latent attention; FlashMLA takes blocks of 64.
        if self.fp8_cache().holds and self.value("--block-size")[0] in (None, "64"):
            return Fact(True, "vLLM chooses FlashMLA for latent attention with an fp8 cache on Hopper")
        return Fact(None, _LOGGED)

    def flashmla(self) -> Fact:
        """Latent attention runs on FlashMLA kernels that plan in their first call.

        These are the dense ones, and the sparse ones with an fp8 cache.
        """
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
                return Fact(True, f"--attention-backend FLASHMLA_SPARSE, --kv-cache-dtype {brief_value(value, 20)}")
            if sparse.holds is None:
                return dense if dense.holds is None else sparse
            fitting = self._capability((9, 10), "FlashMLA needs Hopper or Blackwell")
            if fitting.holds is False:
                return fitting
            return Fact(
                None,
                "the attention backend and the KV cache dtype that vLLM logs when it starts, or the flags for them",
            )
        return dense

    def flash_attention(self) -> Fact:
        """Attention that is not latent runs on FlashAttention."""
        mla = self.mla()
        if mla.holds is not False:
            return Fact(mla.holds and False, mla.source)
        backend, missing = self.value("--attention-backend")
        config, unsure = self.value("--attention-config")
        if missing or unsure or config is not None:
            return Fact(None, missing or unsure or _LOGGED)
        if backend is not None and backend.lower() != "auto":
            return Fact(backend.upper() == "FLASH_ATTN", f"--attention-backend is {quoted_value(backend.upper())}")
        _, capability = self.gpu
        # On datacenter Blackwell FlashInfer comes first, and FlashAttention 2 has no fp8.
        if capability not in _FLASH_ATTENTION_FIRST or self.fp8_cache().holds is not False:
            return Fact(None, _LOGGED)
        return Fact(True, "vLLM chooses FlashAttention for it on this GPU")

    def flash_attention_3(self) -> Fact:
        """Attention that is not latent runs on FlashAttention, on a GPU for which that is FlashAttention 3."""
        attention = self.flash_attention()
        hopper = self._capability((9,), "FlashAttention 3 needs Hopper")
        if attention.holds is False or hopper.holds is not True:
            return attention if attention.holds is False else hopper
        if self._environment.get("VLLM_FLASH_ATTN_VERSION", "3") != "3":
            return Fact(None, "the version of FlashAttention that vLLM logs when it starts (VLLM_FLASH_ATTN_VERSION)")
        return Fact(attention.holds, attention.source if attention.holds is None else f"{attention.source}: version 3")

    def triton_mla(self) -> Fact:
        """Latent attention runs on Triton."""
        return self._latent_attention_on("TRITON_MLA")

    def cutlass_mla(self) -> Fact:
        """Latent attention runs on Cutlass."""
        blackwell = self._capability((10,), "Cutlass MLA needs a Blackwell of compute capability 10")
        return blackwell if blackwell.holds is False else self._latent_attention_on("CUTLASS_MLA")

    def _latent_attention_on(self, wanted: str) -> Fact:
        backend, missing = self._backend()
        if missing is not None:
            return Fact(None, missing)
        if backend is not None:
            return Fact(
                backend == wanted,
                f"--attention-backend {brief_value(backend, 40)}" + ("" if backend == wanted else f" is not {wanted}"),
            )
        mla = self.mla()
        if mla.holds is False:
            return mla
        return Fact(None, _LOGGED)

    def shares_the_context(self) -> Fact:
        """There are several ranks of decode context parallelism."""
        value, missing = self.value(_CONTEXT_PARALLEL)
        if missing is not None:
            return Fact(None, missing)
        if value is None or not value.isdecimal():
            text = f"a number for {_CONTEXT_PARALLEL}" if value else f"{_CONTEXT_PARALLEL} is not given"
            return Fact(None if value else False, text)
        return Fact(int(value) > 1, f"{_CONTEXT_PARALLEL} {int(value)}")

    def drafts_as_prompts(self) -> Fact:
        """The attention backend takes decodes of several tokens, as with drafts, for prompts."""
        backend, missing = self._backend()
        chunked, unread = self.configured("attention_chunk_size")
        if missing is not None:
            return Fact(None, missing)
        if backend in ("TRITON_MLA", "CUTLASS_MLA", "FLEX_ATTENTION"):
            return Fact(True, f"--attention-backend {backend}")
        if backend == "FLASHMLA":
            return self.shares_the_context()
        if backend in ("FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA_SPARSE"):
            return Fact(False, f"--attention-backend {backend} takes decodes of several tokens")
        if backend == "FLASHINFER":
            return self._flashinfer_without_trtllm()
        dense = self.flash_attention() if backend is None else Fact(backend in ("FLASH_ATTN", "TRITON_ATTN"), "")
        if not dense.holds:
            return Fact(None, _LOGGED if backend is None else f"what {brief_value(backend, 40)} supports")
        if unread is not None or any(chunked):
            return Fact(None, unread or "whether layers with chunked local attention (attention_chunk_size) are used")
        return Fact(False, dense.source or f"--attention-backend {backend} takes decodes of several tokens")

    def _flashinfer_without_trtllm(self) -> Fact:
        """FlashInfer runs decodes without TRT-LLM's kernels, or under decode context parallelism."""
        text = "--attention-backend FLASHINFER"
        shared = self.shares_the_context()
        blackwell = self._capability((10,), "TRT-LLM's kernels need a Blackwell of compute capability 10")
        if shared.holds or blackwell.holds is False:
            return Fact(True, f"{text}, {shared.source}" if shared.holds else text)
        return blackwell if blackwell.holds is None else Fact(None, "whether FlashInfer takes TRT-LLM's kernels")
