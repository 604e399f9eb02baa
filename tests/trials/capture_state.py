"""Trials of capture-state: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes._capture_passes import MANAGER
from vllm_graphfix.fixes.capture_state import _EAGLE

affects, does_not, unknown = Concern.CONCERNS, Concern.DOES_NOT, Concern.UNKNOWN
v2, hopper, ampere = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
dense, sparse = "./v3 --attention-backend FLASHMLA", "./v32 --attention-backend FLASHMLA_SPARSE"

EDITS = (
    Edit(
        "second state cut out",
        "0.22.0",
        MANAGER,
        r"^ {24}forward_fn, attn_state = create_forward_fn\(desc\)\n",
        "",
        Verdict.AFFECTED,
        runs=True,
    ),
    Edit(
        "a state for the recorded pass",
        "0.21.0",
        MANAGER,
        r"^( {24})(graph = torch\.cuda\.CUDAGraph\(\)\n)",
        r"\1forward_fn, attn_state = create_forward_fn(desc)\n\1\2",
        Verdict.FIXED,
    ),
    Edit(
        "a forward function from elsewhere",
        "0.18.1",
        MANAGER,
        r"forward_fn = create_forward_fn\(desc\)",
        "forward_fn = self.forward_of(create_forward_fn, desc)",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "inputs from elsewhere",
        "0.17.1",
        MANAGER,
        r"= prepare_inputs_to_capture\(",
        "= self.prepare(",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "two warm-ups",
        "0.18.1",
        MANAGER,
        r"^( {20})forward_fn\(CUDAGraphMode\.NONE\)\n",
        r"\1for _ in range(2):\n\1    forward_fn(CUDAGraphMode.NONE)\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "one of two states",
        "0.21.0",
        MANAGER,
        r"^( {20})(forward_fn, attn_state = create_forward_fn\(desc\))\n",
        r"\1if self.pool:\n\1    \2\n\1else:\n\1    \2\n",
        Verdict.UNRECOGNISED,
    ),
    Edit(
        "two warm-ups of a draft",
        "0.16.0",
        _EAGLE["capture-graph-inline"],
        r"^( {8})generate_fn\((.*)\)\n",
        r"\1generate_fn(\2)\n\1generate_fn(\2)\n",
        Verdict.UNRECOGNISED,
    ),
)

SERVED = (
    Served("0.18.1", f"{v2}vllm serve {dense}", affects, "V2", hopper),
    Served("0.18.1", dense, does_not, "is not set here", hopper),
    Served("0.18.1", f"{v2}./v3", unknown, "attention backend that vLLM logs", hopper),
    Served("0.21.0", f"{v2}./v4", affects, "GPU is NVIDIA H100", hopper),
    Served("0.21.0", f"{v2}./v4", affects, "B200", "NVIDIA B200"),
    Served("0.21.0", f"{v2}./v4", does_not, "A100", ampere),
    Served("0.18.1", f"{v2}{sparse} --kv-cache-dtype fp8", affects, "SPARSE", hopper),
    Served("0.18.1", f"{v2}{sparse} --kv-cache-dtype bfloat16", does_not, "bfloat16", hopper),
    Served("0.18.1", f"{v2}./v32", unknown, "dtype that vLLM logs", hopper),
    Served("0.18.1", f"{v2}./v32", does_not, "A100", ampere),
)
