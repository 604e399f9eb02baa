"""Trials of ubatch-max-seq-len: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from served_models import BLACKWELL, HOPPER
from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.ubatch_max_seq_len import _PLACES, _RUNNER

earlier, now = _PLACES["backend-utils"], _PLACES["ubatch-utils"]
own = r"^( +)max_seq_len = int\((seq_lens_cpu(?:_upper_bound)?)\.max\(\)\)\n"
longest = r"\1max_seq_len = max(int(\2.max()), attn_metadata.max_seq_len)" + "\n"
remedy = r"max\(int\((seq_lens_cpu_upper_bound)\.max\(\)\), attn_metadata\.max_seq_len\)"
affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN
gpt_oss = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 128}
unused = {"architectures": ["Qwen3MoeForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
dbo = "./model --enable-dbo"

EDITS = (
    Edit("the batch's longest length counts too", "0.20.2", now, own, longest, Verdict.FIXED),
    Edit("the same in the first release", "0.14.1", earlier, own, longest, Verdict.FIXED),
    Edit(
        "the batch's longest length is taken",
        "0.17.0",
        now,
        own,
        r"\1max_seq_len = attn_metadata.max_seq_len" + "\n",
        Verdict.FIXED,
    ),
    Edit("remedy cut out", "0.21.0", now, remedy, r"int(\1.max())", Verdict.AFFECTED, runs=True),
    Edit(
        "raised now and then",
        "0.19.1",
        now,
        own,
        r"\1max_seq_len = int(\2.max())" + "\n" + r"\1if attn_metadata.causal:" + "\n"
        r"\1    max_seq_len = attn_metadata.max_seq_len" + "\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "captures are told of their own length",
        "0.20.0",
        _RUNNER,
        r"max_seq_len = self\.max_model_len\n",
        "max_seq_len = max_query_len\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "micro-batches are told by their caller",
        "0.16.0",
        now,
        r"^( +)results\.append\(_make_metadata_with_slice\(ubatch_slice, common_attn_metadata\)\)\n",
        r"\1made = _make_metadata_with_slice(ubatch_slice, common_attn_metadata)" + "\n"
        r"\1made.max_seq_len = common_attn_metadata.max_seq_len" + "\n"
        r"\1results.append(made)" + "\n",
        Verdict.UNRECOGNISED,
        remedy=True,
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
