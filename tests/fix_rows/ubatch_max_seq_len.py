"""Trials of ubatch-max-seq-len: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from served_models import BLACKWELL, HOPPER
from trial_rows import Edit, Served, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.ubatch_max_seq_len import _FLASH, _PLACES, _RUNNER

earlier, now = _PLACES["backend-utils"], _PLACES["ubatch-utils"]
own = r"^( +)max_seq_len = int\((seq_lens_cpu(?:_upper_bound)?)\.max\(\)\)\n"
longest = r"\1max_seq_len = max(int(\2.max()), attn_metadata.max_seq_len)" + "\n"
remedy = r"max\(int\((seq_lens_cpu_upper_bound)\.max\(\)\), attn_metadata\.max_seq_len\)"
gpt_oss = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 128}
unused = {"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
dbo = "./model --enable-dbo"
appended = r"^( +)results\.append\(_make_metadata_with_slice\(ubatch_slice, common_attn_metadata\)\)\n"
taken = "max_seq_len = attn_metadata.max_seq_len\n"
MATCH = r"\g<0>"
fixed, affected = Verdict.FIXED, Verdict.AFFECTED

EDITS = (
    Edit("the batch's longest length counts too", "0.20.2", now, own, longest, fixed),
    Edit("the same in the first release", "0.14.1", earlier, own + r"(?= +num_computed)", longest, fixed),
    Edit("the batch's longest length is taken", "0.17.0", now, own, rf"\1{taken}", fixed),
    Edit("remedy cut out", "0.21.0", now, remedy, r"int(\1.max())", affected, runs=True),
    # Right elsewhere.
    Edit(
        "micro-batches are told by their caller",
        "0.16.0",
        now,
        appended,
        r"\1made = _make_metadata_with_slice(ubatch_slice, common_attn_metadata)" + "\n"
        r"\1made.max_seq_len = common_attn_metadata.max_seq_len" + "\n"
        r"\1results.append(made)" + "\n",
        remedy=True,
    ),
    Edit(
        "micro-batches are told once all are made",
        "0.18.1",
        now,
        r"^( +)return results\n",
        r"\1for made in results:" + "\n" + r"\1    made.max_seq_len = common_attn_metadata.max_seq_len" + f"\n{MATCH}",
        remedy=True,
    ),
    Edit(
        "micro-batches are told by the runner",
        "0.19.1",
        _RUNNER,
        r"^( +)for ubid, _cm in enumerate\(split_attn_metadata\(ubatch_slices, cm\)\):\n",
        rf"{MATCH}\1    _cm.max_seq_len = cm.max_seq_len" + "\n",
        remedy=True,
    ),
    Edit(
        "the length is raised where the metadata are made",
        "0.20.1",
        now,
        r"^( +)max_seq_len=max_seq_len,\n",
        r"\1max_seq_len=max(max_seq_len, attn_metadata.max_seq_len)," + "\n",
        remedy=True,
    ),
    Edit(
        "dummy requests are as long as they may be",
        "0.20.2",
        _RUNNER,
        r"seq_lens = max_query_len( *#.*)?\n",
        "seq_lens = self.max_model_len\n",
    ),
    Edit(
        "kernels are chosen for the longest length possible",
        "0.20.0",
        _FLASH,
        r"max_seq_len = common_attn_metadata\.max_seq_len\n",
        "max_seq_len = self.model_config.max_model_len\n",
    ),
    # Not right, though it looks so.
    Edit("raised now and then", "0.19.1", now, own, rf"{MATCH}\1if attn_metadata.causal:" + "\n" + rf"\1    {taken}"),
    Edit(
        "raised for padding alone", "0.20.2", now, own, rf"{MATCH}\1if len(results := []):" + "\n" + rf"\1    {taken}"
    ),
    Edit("taken, and its own after it", "0.18.0", now, own, rf"\1{taken}{MATCH}"),
    Edit("raised on a copy", "0.20.2", now, own, rf"{MATCH}\1replace(attn_metadata).max_seq_len = max_seq_len" + "\n"),
    Edit(
        "another's longest length is taken",
        "0.20.2",
        now,
        own,
        r"\1attn_metadata = batch_of(attn_metadata)" + "\n" + rf"\1{taken}",
    ),
    Edit(
        "taken behind a return",
        "0.17.1",
        now,
        own,
        r"\1if attn_metadata.num_reqs:"
        "\n"
        rf"\1    {taken}\1else:"
        "\n"
        r"\1    max_seq_len = int(\2.max())"
        "\n",
    ),
    Edit(
        "a helper that nobody calls takes it",
        "0.20.2",
        now,
        own,
        rf"{MATCH}\1def raised():" + "\n" + r"\1    return max(max_seq_len, attn_metadata.max_seq_len)" + "\n",
    ),
    Edit(
        "micro-batches are told before they are made",
        "0.19.0",
        now,
        appended,
        r"\1ubatch_slice.max_seq_len = common_attn_metadata.max_seq_len" + "\n" + MATCH,
    ),
    Edit(
        "told by the caller while debugging",
        "0.20.2",
        now,
        appended,
        MATCH
        + r"\1if envs.VLLM_DEBUG:"
        + "\n"
        + r"\1    results[-1].max_seq_len = common_attn_metadata.max_seq_len"
        + "\n",
    ),
    Edit(
        "captures are told of their own length",
        "0.20.0",
        _RUNNER,
        r"max_seq_len = self\.max_model_len\n",
        "max_seq_len = max_query_len\n",
    ),
    Edit(
        "FlashAttention finds a tighter one",
        "0.21.0",
        _FLASH,
        r"max_seq_len = common_attn_metadata\.max_seq_len$",
        "max_seq_len = int(common_attn_metadata.seq_lens_cpu_upper_bound.max())",
    ),
)

SERVED = (
    Served("0.20.2", dbo, affects, "a sliding_window of 128", gpu=HOPPER, model=gpt_oss),
    Served("0.14.1", f"{dbo} --attention-backend FLASH_ATTN", affects, "FLASH_ATTN", model=gpt_oss),
    Served("0.18.1", "./model", does_not, "--enable-dbo is not given", gpu=HOPPER, model=gpt_oss),
    Served("0.18.1", f"{dbo} -cc.cudagraph_mode=PIECEWISE", does_not, "PIECEWISE", gpu=HOPPER, model=gpt_oss),
    Served("0.18.1", f"{dbo} --attention-backend FLASHINFER", does_not, "FLASHINFER", model=gpt_oss),
    Served("0.18.1", dbo, does_not, "does not use its sliding_window", gpu=HOPPER, model=unused),
    Served("0.18.1", "./llama --enable-dbo", does_not, "has no sliding_window", gpu=HOPPER),
    Served("0.18.1", f"VLLM_USE_V2_MODEL_RUNNER=1 {dbo}", does_not, "V2", gpu=HOPPER, model=gpt_oss),
    Served("0.18.1", dbo, unknown, "--attention-backend", gpu=BLACKWELL, model=gpt_oss),
    Served("0.18.1", "openai/gpt-oss-20b --enable-dbo", unknown, "config.json", gpu=HOPPER),
)
