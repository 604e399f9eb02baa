"""Paths in a vLLM of the code that the fixes concern."""

from __future__ import annotations

CUDAGRAPHS = "vllm/v1/worker/gpu/cudagraph_utils.py"
EAGLE_CUDAGRAPHS = "vllm/v1/worker/gpu/spec_decode/eagle/cudagraph.py"
EAGLE_FIRST = "vllm/v1/worker/gpu/spec_decode/eagle_cudagraph.py"
EAGLE = "vllm/v1/worker/gpu/spec_decode/eagle/speculator.py"
PREFILL = "vllm/v1/worker/gpu/spec_decode/autoregressive/cudagraph_utils.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
MAMBA = "vllm/v1/attention/backends/mamba_attn.py"
FLASHMLA = "vllm/v1/attention/backends/mla/flashmla.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
UTILS = "vllm/v1/worker/utils.py"
TRITON_MLA = "vllm/v1/attention/backends/mla/triton_mla.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
CUTLASS_MLA = "vllm/v1/attention/backends/mla/cutlass_mla.py"
