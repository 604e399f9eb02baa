"""Trials of draft-graph-support: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import before
from trial_rows import LOOKALIKE, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fixes.draft_graph_support import _ATTENTION, _GRAPHS, _RUNNER, _TRITON_MLA

v2, hopper, ampere = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
mtp = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
triton = "./v3 --attention-backend TRITON_MLA"

KNOWN = r"^( +)check_attention_cp_compatibility\(self\.vllm_config\)\n"
RESOLVED = (
    r"\1cudagraph_mode = self.compilation_config.resolve_cudagraph_mode_and_sizes("
    r"attn_cg_support.min_cg_support, attn_cg_support.min_cg_attn_backend, self.decode_query_len)\n"
    r"\1self.cudagraph_manager = ModelCudaGraphManager("
    r"self.vllm_config, self.device, {}, decode_query_len=self.decode_query_len)\n\g<0>"
)
BACKENDS = r"self\.attn_backends, self\.attn_groups = init_attn_backend\("
INFO = 'type("Support", (), {"min_cg_support": min_cg_support, "min_cg_attn_backend": min_cg_attn_backend})'
BUILT = r"^( +)builder = group\.get_metadata_builder\(0\)\n"
QUERIED = (
    r"\g<0>\1cg_support = builder.get_cudagraph_support(vllm_config, group.kv_cache_spec)\n"
    r"\1if cg_support.value < min_cg_support.value:\n"
    r"\1    min_cg_support = cg_support\n\1    min_cg_attn_backend = group.backend.__name__\n"
)
FIRST = r"^( +)attn_backends: dict\[str, type\[AttentionBackend\]\] = \{\}\n"
MOST = r"\g<0>\1min_cg_support, min_cg_attn_backend = type('Most', (), {'value': 3}), None\n"
CHOOSES = (
    r"\1def resolve_cudagraph_mode_and_sizes(self, support, backend, tokens):\n"
    r"\1    return CUDAGraphMode.NONE if tokens > 1 and support.value < 2 else self.cudagraph_mode\n\n\g<0>"
)
handed_on = (
    (_RUNNER, BACKENDS, "self.attn_backends, self.attn_groups, attn_cg_support = init_attn_backend("),
    (_ATTENTION, r"^    return attn_backends, attn_groups\n", f"    return attn_backends, attn_groups, {INFO}\n"),
    (_ATTENTION, FIRST, MOST),
    ("vllm/config/compilation.py", r"^( +)def splitting_ops_contain_attention\(", CHOOSES),
)
passed_on = ((_ATTENTION, BUILT, QUERIED), *handed_on)

EDITS = (
    Edit(
        "the mode resolved once the backends are known",
        "0.19.1",
        _RUNNER,
        KNOWN,
        RESOLVED.format("cudagraph_mode"),
        also=passed_on,
        remedy=True,
    ),
    Edit(
        "the same in 0.18.0", "0.18.0", _RUNNER, KNOWN, RESOLVED.format("cudagraph_mode"), also=passed_on, remedy=True
    ),
    Edit(
        "a mode resolved that the manager does not get",
        "0.19.1",
        _RUNNER,
        KNOWN,
        RESOLVED.format("self.compilation_config.cudagraph_mode"),
        also=passed_on,
    ),
    Edit(
        "a mode resolved of what nobody was asked",
        "0.19.1",
        _RUNNER,
        KNOWN,
        RESOLVED.format("cudagraph_mode"),
        also=handed_on,
    ),
    Edit(
        "a mode chosen by another rule",
        "0.17.1",
        _RUNNER,
        KNOWN,
        r"\1self.cudagraph_manager.cudagraph_mode = self.allowed(self.attn_groups)\n\g<0>",
    ),
    Edit(
        "backends asked when graphs are captured",
        "0.18.1",
        _GRAPHS,
        r"^( +)def create_forward_fn\(\n",
        r"\1self.keep_supported(attn_groups)\n\n\g<0>",
    ),
    Edit(
        "backends asked by the manager",
        "0.17.0",
        _GRAPHS,
        r"^( +)common_kwargs = dict\(\n",
        r"\1self.cudagraph_mode = attn_groups[0][0].get_metadata_builder(0).get_cudagraph_support(self)\n\g<0>",
    ),
    Edit(
        "Triton MLA claims what no capture refuses",
        "0.20.0",
        _TRITON_MLA,
        r"^class TritonMLAImpl\(",
        "class TritonMLAMetadataBuilder(MLACommonMetadataBuilder):\n"
        "    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH\n\n\n\\g<0>",
    ),
    Edit(
        "Cutlass MLA claims graphs of drafts",
        "0.33.0",
        "vllm/v1/attention/backends/mla/cutlass_mla.py",
        r"AttentionCGSupport\.UNIFORM_SINGLE_TOKEN_DECODE",
        "AttentionCGSupport.UNIFORM_BATCH",
    ),
)

SERVED = (
    Served("0.18.1", f"{v2}{triton} {mtp}", affects, "TRITON_MLA", hopper),
    Served("0.17.1", f"{v2}./v3 --attention-backend FLASHMLA -tp 8 -dcp 8 {mtp}", affects, "context-parallel", hopper),
    Served("0.19.1", f"{v2}./v3 --attention-backend FLASHMLA -tp 8 {mtp}", does_not, "is not given", hopper),
    Served("0.19.1", f"{v2}./v3 --attention-backend FLASH_ATTN_MLA {mtp}", does_not, "several tokens", hopper),
    Served("0.19.1", f"{v2}./v3 {mtp}", unknown, "attention backend", hopper),
    Served("0.19.1", f"{v2}./llama --attention-backend FLASHINFER {mtp}", affects, "FLASHINFER", ampere),
    Served("0.19.1", f"{v2}./llama --attention-backend FLASHINFER {mtp}", unknown, "TRT-LLM", "NVIDIA B200"),
    Served("0.19.1", f"{v2}./llama --attention-backend FLASHINFER -tp 16 -dcp 2 {mtp}", affects, "2", "NVIDIA B200"),
    Served("0.19.1", f"{v2}./llama --attention-backend FLASH_ATTN {mtp}", does_not, "several tokens", hopper),
    Served(
        "0.19.1",
        f"{v2}./model --attention-backend FLASH_ATTN {mtp}",
        unknown,
        "attention_chunk_size",
        hopper,
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"attention_chunk_size": 8192}},
    ),
    Served(
        "0.19.1",
        f"{v2}./v3 --attention-backend FLASHMLA -cc.cudagraph_mode=FULL {mtp}",
        unknown,
        "graphs of prompts",
        hopper,
    ),
    Served("0.20.0", f"{v2}./llama --attention-backend FLASHINFER -tp 16 -dcp 2 {mtp}", unknown, "open", "NVIDIA B200"),
    Served("0.29.0", f"{v2}./llama --attention-backend FLASHINFER -tp 16 -dcp 2 {mtp}", unknown, "open", "NVIDIA B200"),
    Served("0.30.0", f"{v2}./llama --attention-backend FLASHINFER -tp 16 -dcp 2 {mtp}", does_not, "", "NVIDIA B200"),
    Served("0.29.0", f"{v2}./llama --attention-backend FLASHINFER -tp 16 {mtp}", does_not, "not given", "NVIDIA B200"),
    Served("0.29.0", f"{v2}./llama --attention-backend FLASHINFER -tp 16 -dcp 2 {mtp}", does_not, "asked", hopper),
    Served("0.20.2", f"{v2}./v3 --attention-backend FLASHMLA -tp 8 -dcp 8 {mtp}", unknown, "open", hopper),
    Served("0.22.1", f"{v2}{triton} {mtp}", unknown, "claims.md", hopper),
    Served("0.28.0", f"{v2}./v3 --attention-backend FLASHINFER_MLA -tp 8 -dcp 8 {mtp}", unknown, "claims.md", hopper),
    Served("0.28.0", f"{v2}./v3 --attention-backend FLASHINFER_MLA -tp 8 {mtp}", does_not, "not given", hopper),
    Served("0.20.2", f"{v2}./v3 --attention-backend FLASH_ATTN_MLA -tp 8 -dcp 8 {mtp}", does_not, "asked", hopper),
    Served("0.19.1", f"{v2}{triton}", does_not, "no speculator", hopper),
    Served("0.19.1", f"{v2}{triton} {mtp} --enforce-eager", does_not, "--enforce-eager", hopper),
    Served("0.19.1", f"{triton} {mtp}", does_not, "VLLM_USE_V2_MODEL_RUNNER", hopper),
)

WORDINGS = (
    Wording(
        LOOKALIKE,
        "0.20.0",
        _RUNNER,
        {
            "the configured mode after all": before(
                r"self\.cudagraph_manager = ModelCudaGraphManager\(",
                "cudagraph_mode = self.compilation_config.cudagraph_mode",
            )
        },
    ),
)
