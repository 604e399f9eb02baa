"""One engine on a GPU, with a tiny random-weight model made on the spot: prints the tokens of a fixed workload as JSON.

    python engine_tokens.py MODEL MODE OUT        MODEL: mla, mla-fp8, mla-mtp, mamba2    MODE: eager, stock, patched

Run where vLLM and the plugin can be imported; `compare.py` runs and compares them.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

model, mode, out = sys.argv[1:4]
os.environ["VLLM_GRAPHFIX"] = "on" if mode == "patched" else "off"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MLA_MTP = MLA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 10,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "state_size": 64,
    "head_dim": 64,
    "num_heads": 16,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 256,
    "vocab_size": 1024,
    "layer_norm_epsilon": 1e-5,
    "rms_norm": True,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "residual_in_fp32": True,
    "time_step_limit": [0.0, 1e9],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def sensible_weights(module: torch.nn.Module) -> None:
    """Random weights of a scale at which outputs differ; the same in every process."""
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        with torch.no_grad():
            if parameter.dim() < 2:
                values = torch.ones(parameter.shape)
                if name.endswith("A"):
                    values = -torch.linspace(0.5, 4.0, parameter.numel()).view(parameter.shape)
                elif name.endswith(("bias", "dt_bias")):
                    values = torch.zeros(parameter.shape)
            else:
                fan_in = parameter[0].numel()
                values = torch.randn(parameter.shape, generator=generator) * fan_in**-0.5
                if "embed" in name:
                    values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values.to(parameter.dtype))


def main() -> None:
    import vllm.model_executor.model_loader.dummy_loader as loader
    from vllm import LLM, SamplingParams

    loader.DummyModelLoader.load_weights = lambda self, model, model_config: sensible_weights(model)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({"mamba2": MAMBA2, "mla-mtp": MLA_MTP}.get(model, MLA)))
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if model == "mamba2":
        # The long prompt is prefilled in chunks in the last slot, the first request finishes meanwhile, and the decode
        # batch that follows is padded over the slot left behind.
        arguments |= {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_chunked_prefill": True}
        workload = [(5, 4), (7, 160), (420, 160)]
        sizes = [4]
    else:
        arguments |= {"block_size": 64, "attention_config": {"backend": "FLASHMLA"}}
        arguments["kv_cache_dtype"] = "fp8" if model == "mla-fp8" else "auto"
        workload = [(length, 65) for length in (5, 33, 64, 65, 130, 257, 400, 511)]
        if os.environ.get("GRAPHFIX_UNEVEN"):
            workload = [(length, 20 + 9 * i) for i, (length, _) in enumerate(workload)]
        sizes = [1, 2, 4, 8]
        if model == "mla-mtp":
            arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
            sizes = [3, 6, 12, 24]
    if mode == "eager":
        arguments["enforce_eager"] = True
    else:
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    llm = LLM(**arguments)
    given = watch_padding() if model == "mla-fp8" else {}
    random = torch.Generator().manual_seed(7)
    prompts = [
        {"prompt_token_ids": torch.randint(1, 1023, (length,), generator=random).tolist()} for length, _ in workload
    ]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in workload
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    import vllm_graphfix

    states = {name: state.state.value for name, state in vllm_graphfix.states().items()}
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(out).write_text(json.dumps({"tokens": tokens, "states": states, "given": given}))


def watch_padding() -> dict[str, int]:
    """The lowest length and block id that dense fp8 FlashMLA is given, over all decode batches."""
    from vllm.v1.attention.backends.mla import flashmla

    lowest = {"length": 1 << 30, "block": 1 << 30}
    build = flashmla.FlashMLAMetadataBuilder._build_decode

    @functools.wraps(build)  # so that the plugin sees its own function below
    def watched(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        lowest["length"] = min(lowest["length"], int(metadata.seq_lens.min()))
        lowest["block"] = min(lowest["block"], int(metadata.block_table[:, 0].min()))
        return metadata

    flashmla.FlashMLAMetadataBuilder._build_decode = watched
    return lowest


if __name__ == "__main__":
    main()
