"""Trials of prefill-dispatch: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes._dispatch_source import GRAPHS_V2, RUNNER, RUNNER_V2, UTILS
from vllm_graphfix.fixes._recurrent_builders import GDN, MAMBA
from vllm_graphfix.fixes._recurrent_builders import UTILS as SPLIT

signature_end = r"^( *)force_uniform_decode: bool \| None = None,\n( *)\) -> bool:"
asks = r"\1force_uniform_decode: bool | None = None,\n\1past_prompt: bool = True,\n\2) -> bool:"
phases = (
    r"\1force_uniform_decode=force_uniform_decode,\n"
    r"\1past_prompt=bool((self.input_batch.num_computed_tokens_cpu[:num_reqs] "
    r">= self.input_batch.num_prompt_tokens[:num_reqs]).all()),\n"
)
remedy = (
    (RUNNER, r"\(max_num_scheduled_tokens == uniform_decode_query_len\)\n", "past_prompt\n"),
    (RUNNER, r"^( *)force_uniform_decode=force_uniform_decode,\n", phases),
)
prefilling = (
    "(self.input_batch.num_computed_tokens_cpu[:num_reqs] < self.input_batch.num_prompt_tokens[:num_reqs]).any()"
)
encoders = r"^( *)num_encoder_reqs=len\("

EDITS = (
    Edit("the phase in the predicate", "0.20.0", RUNNER, signature_end, asks, Verdict.FIXED, remedy),
    Edit("the phase in the predicate, 0.33.0", "0.33.0", RUNNER, signature_end, asks, Verdict.FIXED, remedy),
    Edit("in one runner of two", "0.27.1", RUNNER, signature_end, asks, also=remedy),
    Edit(
        "another test of a state",
        "0.25.1",
        MAMBA,
        r"has_prior_state = seq_lens_cpu > 1",
        "has_prior_state = seq_lens_cpu > 2",
        Verdict.AFFECTED,
        shape="shape-only-v1-v2 gdn-length linear-length drafted-tails",
    ),
    Edit(
        "Mamba's decodes changed afterwards",
        "0.33.0",
        MAMBA,
        r"^( *)if torch\.any\(prefill_to_decode\)",
        r"\1prefill_to_decode &= self.may(query_lens_cpu)\n\1if torch.any(prefill_to_decode)",
        Verdict.AFFECTED,
        shape="shape-only-v1 gdn-state kda-state linear-length ple drafted-tails always-told told-short-conv",
    ),
    Edit(
        "another threshold of gated delta nets",
        "0.20.0",
        GDN,
        r"split_decodes_and_prefills\(m, decode_threshold=1\)",
        "split_decodes_and_prefills(m, decode_threshold=self.most)",
        Verdict.AFFECTED,
        shape="shape-only-v1 mamba-phase linear-length",
    ),
    Edit(
        "another split",
        "0.18.1",
        SPLIT,
        r"is_prefill = query_lens > decode_threshold",
        "is_prefill = query_lens >= decode_threshold",
        Verdict.AFFECTED,
        shape="shape-only-v1",
    ),
    Edit(
        "drafts of rows past their prompts alone",
        "0.25.1",
        RUNNER,
        r"if num_scheduled_tokens\[req_idx\] == draft_len \+ 1:",
        "if self.decodes(req_idx):",
        Verdict.AFFECTED,
        shape="shape-only-v1-v2 mamba-state gdn-length linear-length",
    ),
    Edit(
        "the phase where it is asked",
        "0.29.0",
        RUNNER,
        encoders,
        rf"\1force_uniform_decode=False if {prefilling} else None,\n\1num_encoder_reqs=len(",
        Verdict.FIXED,
    ),
    Edit(
        "counted in a debug line, and forced for encoders",
        "0.33.0",
        RUNNER,
        encoders,
        r"\1force_uniform_decode=False if scheduler_output.scheduled_encoder_inputs else None,\n"
        r"\1num_encoder_reqs=len(",
        also=(
            (
                RUNNER,
                r"^( *)(\(\n *cudagraph_mode,\n *batch_desc,\n *should_ubatch,)",
                rf"\1logger.debug('%s rows are prefilling', {prefilling})\n\1\2",
            ),
        ),
    ),
    Edit(
        "counted in a debug line",
        "0.33.0",
        RUNNER,
        r"^( *)(\(\n *cudagraph_mode,\n *batch_desc,\n *should_ubatch,)",
        rf"\1logger.debug('%s rows are prefilling', {prefilling})\n\1\2",
        Verdict.AFFECTED,
    ),
    Edit(
        "the phase of the first row",
        "0.33.0",
        RUNNER,
        encoders,
        rf"\1force_uniform_decode=False if {prefilling.replace('[:num_reqs]', '[:1]')} else None,\n"
        r"\1num_encoder_reqs=len(",
    ),
    Edit(
        "all rows in their prompts",
        "0.33.0",
        RUNNER,
        encoders,
        rf"\1force_uniform_decode=False if {prefilling.replace('any()', 'all()')} else None,\n\1num_encoder_reqs=len(",
    ),
    Edit(
        "forced for a decode as well",
        "0.33.0",
        RUNNER,
        encoders,
        rf"\1force_uniform_decode=not {prefilling},\n\1num_encoder_reqs=len(",
    ),
    Edit("the phase that nobody asks for", "0.33.0", RUNNER, signature_end, asks, also=remedy[:1]),
    Edit(
        "the phase in the predicate, overruled",
        "0.33.0",
        RUNNER,
        signature_end,
        asks,
        also=(
            *remedy,
            (RUNNER, r"^( *)(has_encoder_output = \(\n)", r"\1uniform_decode = num_tokens == num_reqs\n\1\2"),
        ),
    ),
    Edit(
        "right elsewhere: behind the predicate",
        "0.33.0",
        RUNNER,
        r"^( *)(has_encoder_output = \(\n)",
        rf"\1if force_uniform_decode is None:\n\1    uniform_decode = uniform_decode and not {prefilling}\n\1\2",
    ),
    Edit(
        "right elsewhere: such a step is eager",
        "0.33.0",
        RUNNER,
        encoders,
        rf"\1force_eager=bool({prefilling}),\n\1num_encoder_reqs=len(",
    ),
    Edit(
        "the phase where it is asked, as a truth value",
        "0.29.0",
        RUNNER,
        encoders,
        rf"\1force_uniform_decode=False if bool({prefilling}) else None,\n\1num_encoder_reqs=len(",
        Verdict.FIXED,
    ),
    Edit(
        "V2: the phase of no row",
        "0.33.0",
        RUNNER_V2,
        r"num_reqs, num_toks, max_query_len, decode_graph_eligible\n",
        "num_reqs, num_toks, max_query_len, True\n",
    ),
    Edit(
        "V2: right elsewhere",
        "0.25.1",
        RUNNER_V2,
        r"^( *)(uniform_tok_count = get_uniform.*)\n",
        r"\1\2\n\1if self.req_states.any_prefilling(scheduler_output):\n\1    uniform_tok_count = None\n",
    ),
    Edit("another predicate", "0.20.0", RUNNER, r"= self\._is_uniform_decode\(", "= self.tells("),
    Edit(
        "no count of tokens", "0.33.0", RUNNER, r"num_tokens == max_num_scheduled_tokens \* num_reqs", "not self.mixed"
    ),
    Edit(
        "a further condition",
        "0.20.0",
        RUNNER,
        r"(num_tokens == max_num_scheduled_tokens \* num_reqs)",
        r"\1 and not num_reqs.mixed",
    ),
    Edit(
        "changed afterwards",
        "0.20.0",
        RUNNER,
        r"^( *)(has_encoder_output = \(\n)",
        r"\1uniform_decode = uniform_decode and self.decoding\n\1\2",
    ),
    Edit(
        "forced by another",
        "0.27.1",
        RUNNER,
        encoders,
        r"\1force_uniform_decode=self.phase(num_reqs),\n\1num_encoder_reqs=len(",
    ),
    Edit(
        "not forced for a capture",
        "0.19.0",
        RUNNER,
        r"force_uniform_decode=uniform_decode",
        "force_uniform_decode=None",
    ),
    Edit(
        "V2: a further condition",
        "0.26.0",
        GRAPHS_V2,
        r"^( {4}if )(\(max_query_len == num_tokens)",
        r"\1not num_reqs.prefilling and \2",
    ),
    Edit(
        "V2: changed afterwards",
        "0.25.1",
        RUNNER_V2,
        r"^( *)(uniform_tok_count = get_uniform.*)\n",
        r"\1\2\n\1uniform_tok_count = self.one(0)\n",
    ),
    Edit(
        "V2: states of another name",
        "0.23.0",
        RUNNER_V2,
        r"out=self\.req_states\.num_computed_prefill",
        "out=self.req_states.num",
    ),
    Edit("V2: remedy cut out", "0.28.0", UTILS, r"if not has_prefill and is_uniform", "if is_uniform"),
    Edit(
        "V2: phases from elsewhere",
        "0.33.0",
        RUNNER_V2,
        r"is_prefilling_np = num_computed.* < .*",
        "is_prefilling_np = self.x",
    ),
)

SERVED = (
    Served("0.20.0", "./mamba2", affects, "Mamba2ForCausalLM"),
    Served("0.20.0", "./llama", does_not, "no recurrent layers"),
)
