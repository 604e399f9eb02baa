"""Trials of capture-state: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, SHAPE, Edit, Served, Wording, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes._capture_source import MANAGER, MLA_BUILDERS, MODEL_STATES
from vllm_graphfix.fixes.capture_state import _EAGLE, _FLASHMLA, _RUNNER

v2, hopper, ampere = "VLLM_USE_V2_MODEL_RUNNER=1 ", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
dense, sparse = "./v3 --attention-backend FLASHMLA", "./v32 --attention-backend FLASHMLA_SPARSE"

GRAPH = r"graph = torch\.cuda\.CUDAGraph\(\)\n"
WARM_UP = r"( +)forward_fn\(CUDAGraphMode\.NONE\)\n\n( +# Capture\n)"
CREATED_AGAIN = "forward_fn, attn_state = create_forward_fn(desc)"
built = r"^( {8}attn_metadata, slot_mappings = prepare_inputs_to_capture\(\n(?:.*\n)*? {8}\)\n)"
again, inline = r"((?:.*\n)*?)(?= {8}capture_fn\()", r"((?:.*\n)*?)(?= {8}# Capture the graph)"

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
        rf"^( {{24}})({GRAPH})",
        rf"\1{CREATED_AGAIN}\n\1\2",
        Verdict.FIXED,
    ),
    Edit(
        "a forward function for the recorded pass",
        "0.18.1",
        MANAGER,
        rf"^( *)({GRAPH})",
        r"\1forward_fn = create_forward_fn(desc)\n\1\2",
        Verdict.FIXED,
    ),
    Edit(
        "metadata built again",
        "0.17.1",
        MANAGER,
        built + again,
        r"\1\2\1",
        also=((_EAGLE["capture-graph-split"], built + inline, r"\1\2\1"),),
        remedy=True,
    ),
    Edit(
        "metadata built again, in the first release",
        "0.15.0",
        MANAGER,
        built + inline,
        r"\1\2\1",
        also=((_EAGLE["capture-graph-inline"], built + inline, r"\1\2\1"),),
        remedy=True,
    ),
    Edit("a third pass", "0.26.0", MANAGER, rf"^( {{24}})({GRAPH})", r"\1forward_fn(CUDAGraphMode.NONE)\n\1\2"),
    Edit(
        "states of models from elsewhere",
        "0.29.0",
        MODEL_STATES,
        r"return DefaultModelState$",
        "return memoised(DefaultModelState)",
    ),
    Edit(
        "a forward function from elsewhere",
        "0.18.1",
        MANAGER,
        r"forward_fn = create_forward_fn\(desc\)",
        "forward_fn = self.forward_of(create_forward_fn, desc)",
    ),
    Edit("inputs from elsewhere", "0.17.1", MANAGER, r"= prepare_inputs_to_capture\(", "= self.prepare("),
    Edit(
        "two warm-ups",
        "0.18.1",
        MANAGER,
        r"^( {20})forward_fn\(CUDAGraphMode\.NONE\)\n",
        r"\1for _ in range(2):\n\1    forward_fn(CUDAGraphMode.NONE)\n",
    ),
    Edit(
        "one of two states",
        "0.21.0",
        MANAGER,
        r"^( {20})(forward_fn, attn_state = create_forward_fn\(desc\))\n",
        r"\1if self.pool:\n\1    \2\n\1else:\n\1    \2\n",
    ),
    Edit(
        "two warm-ups of a draft",
        "0.16.0",
        _EAGLE["capture-graph-inline"],
        r"^( {8})generate_fn\((.*)\)\n",
        r"\1generate_fn(\2)\n\1generate_fn(\2)\n",
    ),
    Edit(
        "a model state that keeps metadata",
        "0.26.0",
        MODEL_STATES,
        r"return DefaultModelState\(",
        "return CachedModelState(",
    ),
    Edit(
        "a model state for latent attention",
        "0.22.0",
        MODEL_STATES,
        r"^    if vllm_config\.model_config\.is_hybrid:$",
        r"    if vllm_config.model_config.use_mla:\n        return MLAModelState(vllm_config, model)\n\g<0>",
    ),
    Edit(
        "a plan kept for captures",
        "0.22.0",
        MLA_BUILDERS,
        r"return self\.build\(0, m\)$",
        "return self.plans.setdefault(m.num_reqs, self.build(0, m))",
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

WORDINGS = (
    Wording(
        REMEDY,
        "0.21.0",
        MANAGER,
        {
            "plans are made by the builder": {
                _FLASHMLA: before(r"return FlashMLADecodeMetadata\(", "plan_at_once(scheduler_metadata)")
            },
            "each call of the forward function renews its metadata": before(
                r"with set_forward_context\(\n +attn_metadata,", "attn_metadata = untouched(attn_metadata)"
            ),
            "the metadata of each group are planned where they are built": {
                "vllm/v1/worker/gpu/attn_utils.py": before(
                    r"for layer_name in attn_group\.layer_names:\n +attn_metadata\[", "metadata = planned(metadata)"
                )
            },
            "no full graphs with lazy plans": {
                _RUNNER: before(
                    r"self\.cudagraph_manager = ModelCudaGraphManager\(",
                    "cudagraph_mode = without_lazy_plans(cudagraph_mode, self.attn_groups)",
                )
            },
            "states that plan anew for each pass": {
                "vllm/v1/worker/gpu/model_states/default.py": swap(
                    r"^( +)return attn_metadata\n",
                    r"\1return planned_anew(attn_metadata) if for_capture else attn_metadata\n",
                )
            },
            "before the branch": before(
                r"if desc\.cg_mode == CUDAGraphMode\.PIECEWISE",
                "if desc.cg_mode == CUDAGraphMode.FULL:",
                "    forward_fn, attn_state = create_forward_fn(desc)",
            ),
            "under the assertion": before(r"assert desc not in self\.graphs", CREATED_AGAIN),
            "after the offloader": before(r"with torch\.cuda\.graph\(graph", CREATED_AGAIN),
            "by index": before(GRAPH, "forward_fn = create_forward_fn(desc)[0]"),
            "another name": both(
                before(GRAPH, "recorded_fn, attn_state = create_forward_fn(desc)"),
                swap(r"(with torch\.cuda\.graph\(graph, self\.pool\):\n +)forward_fn", r"\1recorded_fn"),
            ),
            "the warm up on its own": swap(WARM_UP, r"\1create_forward_fn(desc)[0](CUDAGraphMode.NONE)\n\n\2"),
            "the warm up first": swap(
                r"^( +)forward_fn, attn_state = create_forward_fn\(desc\)\n",
                (
                    r"\1warm_up, _ = create_forward_fn(desc)\n\1warm_up(CUDAGraphMode.NONE)\n"
                    r"\1forward_fn, attn_state = create_forward_fn(desc)\n"
                ),
            ),
            "through a method": both(
                before(GRAPH, "forward_fn, attn_state = self._asked_again(create_forward_fn, desc)"),
                before(
                    r"def needs_capture",
                    "def _asked_again(self, create_forward_fn, desc):",
                    "    return create_forward_fn(desc)",
                    "",
                ),
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.21.0",
        MANAGER,
        {
            "the new pass is not used": before(GRAPH, "_, attn_state = create_forward_fn(desc)"),
            "the new pass has another name": before(GRAPH, "recorded_fn, attn_state = create_forward_fn(desc)"),
            "asked before the warm up": swap(
                r"^( +)(forward_fn, attn_state = create_forward_fn\(desc\)\n)", r"\1\2\1\2"
            ),
            "asked for no full graph": before(
                r"if desc\.cg_mode == CUDAGraphMode\.PIECEWISE",
                "if desc.cg_mode == CUDAGraphMode.PIECEWISE:",
                "    forward_fn, attn_state = create_forward_fn(desc)",
            ),
            "asked if debugging": before(
                GRAPH, "if not __debug__:", "    forward_fn, attn_state = create_forward_fn(desc)"
            ),
            "asked for large ones": before(
                GRAPH, "if desc.num_tokens > 2:", "    forward_fn, attn_state = create_forward_fn(desc)"
            ),
            "asked after the graph": before(r"self\.graphs\[desc\] = graph", CREATED_AGAIN),
            "asked inside the graph": after(
                r"with torch\.cuda\.graph\(graph", "    forward_fn, attn_state = create_forward_fn(desc)"
            ),
            "asked for another": before(
                GRAPH, "_first = next(iter(descs))", "forward_fn, attn_state = create_forward_fn(_first)"
            ),
            "the old pass comes back": before(GRAPH, "kept_fn = forward_fn", CREATED_AGAIN, "forward_fn = kept_fn"),
            "asked and warmed up again": before(GRAPH, CREATED_AGAIN, "forward_fn(cg_mode=CUDAGraphMode.NONE)"),
            "asked and warmed up again by a helper": before(GRAPH, CREATED_AGAIN, "self._run(forward_fn)"),
            "the same made by a cache": both(
                before(GRAPH, CREATED_AGAIN),
                before(
                    r"with graph_capture\(device",
                    "import functools",
                    "create_forward_fn = functools.cache(create_forward_fn)",
                ),
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.22.1",
        MANAGER,
        {
            "the warm-up's state comes back": before(
                r"captured_attn_states\[desc\] = attn_state\n +assert", "forward_fn, attn_state = made"
            ),
            "the factory returns what it made first": before(
                r"return super\(\)\.capture\(create_forward_fn, progress_bar_desc\)",
                "create_forward_fn = made_once(create_forward_fn)",
            ),
            "metadata kept by their size": swap(
                r"attn_metadata = model_state\.prepare_attn\(((?:\n {12}.*)+)\n {8}\)",
                (
                    r"if num_tokens not in _KEPT:\n            _KEPT[num_tokens] = model_state.prepare_attn(\1\n"
                    r"            )\n        attn_metadata = _KEPT[num_tokens]"
                ),
            ),
            "metadata of a group kept": {
                "vllm/v1/worker/gpu/attn_utils.py": before(
                    r"for layer_name in attn_group\.layer_names:\n +attn_metadata\[",
                    "metadata = _KEPT.setdefault((i, num_tokens), metadata)",
                )
            },
            "one plan for all batches": {
                _FLASHMLA: before(
                    r"return FlashMLADecodeMetadata\(",
                    "self.plan = scheduler_metadata = getattr(self, 'plan', scheduler_metadata)",
                )
            },
        },
    ),
    Wording(
        SHAPE,
        "0.21.0",
        MANAGER,
        {
            "two warm ups in a loop": swap(
                WARM_UP, r"\1for _ in range(2):\n\1    forward_fn(CUDAGraphMode.NONE)\n\n\2"
            ),
            "warm up by keyword": swap(WARM_UP, r"\1forward_fn(cg_mode=CUDAGraphMode.NONE)\n\n\2"),
            "no warm up": swap(WARM_UP, r"\2"),
            "the mode through a local": swap(WARM_UP, r"\1none = CUDAGraphMode.NONE\n\1forward_fn(none)\n\n\2"),
            "passes by partial": swap(
                WARM_UP,
                r"\1import functools\n\1once = functools.partial(forward_fn, CUDAGraphMode.NONE)\n\1once()\n\n\2",
            ),
            "the factory asked for all first": both(
                swap(
                    r"^( +)for desc in descs:\n",
                    (
                        r"\1made = {desc: create_forward_fn(desc) for desc in self._capture_descs[mode]}\n"
                        r"\1for desc in descs:\n"
                    ),
                ),
                swap(
                    r"forward_fn(?:, attn_state)? = create_forward_fn\(desc\)\n",
                    "forward_fn, attn_state = made[desc]\n",
                ),
            ),
            "the warm up of all first": swap(
                r"^( +)for desc in descs:\n",
                (
                    r"\1for desc in self._capture_descs[mode]:\n"
                    r"\1    create_forward_fn(desc)[0](CUDAGraphMode.NONE)\n\1for desc in descs:\n"
                ),
            ),
            "in an exit stack": swap(
                r"with torch\.cuda\.graph\(graph, self\.pool\):",
                (
                    "import contextlib\n                        with contextlib.ExitStack() as stack:\n"
                    "                            stack.enter_context(torch.cuda.graph(graph, self.pool))"
                ),
            ),
            "pool by keyword": swap(
                r"torch\.cuda\.graph\(graph, self\.pool\)", "torch.cuda.graph(graph, pool=self.pool)"
            ),
            "graph by keyword": swap(
                r"torch\.cuda\.graph\(graph, self\.pool\)", "torch.cuda.graph(cuda_graph=graph, pool=self.pool)"
            ),
            "tried twice": swap(
                r"^( +)(for desc in descs:\n)((?:\1 .*\n|\n)+)",
                lambda match: (
                    f"{match[1]}{match[2]}{match[1]}    for attempt in range(1):\n"
                    + "".join(f"    {line}\n" if line else "\n" for line in match[3].splitlines())
                ),
            ),
            "modes one after the other": swap(
                r"for mode in \[CUDAGraphMode\.PIECEWISE, CUDAGraphMode\.FULL\]:", "for mode in (CUDAGraphMode.FULL,):"
            ),
        },
    ),
)
