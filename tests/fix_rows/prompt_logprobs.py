"""Trials of prompt-logprobs: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.prompt_logprobs import _PROMPTS, _RUNNER

unpacked = r"^( {8})(self\.input_batch\.prev_sampled_token_ids = None\n)(?=\n {8}def propose_draft_token_ids)"
by_the_bookkeeping = r"prompt_logprobs_dict = self\._get_prompt_logprobs_dict\((\n.*){3}\)"
first = rf"\1\2\1scored = {_PROMPTS.removesuffix('(...)')}(hidden_states, scheduler_output.num_scheduled_tokens)\n"
now_and_then = r"^( {8})scored = self\._get_prompt_logprobs_dict\("
fixed = Verdict.FIXED
itself = '{"method": "draft_model", "model": "draft", "num_speculative_tokens": 3}'
eagle = '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'
copied = r"\1\2\1hidden_states = hidden_states.clone()\n"

EDITS = (
    Edit(
        "drafted later if a prompt is scored",
        "0.25.0",
        _RUNNER,
        r"^( *)if use_gpu_toks:$",
        r"\1use_gpu_toks = use_gpu_toks and not self.num_prompt_logprobs\n\g<0>",
    ),
    Edit("copied always", "0.14.1", _RUNNER, unpacked, copied, fixed),
    Edit("copied always, 0.33.0", "0.33.0", _RUNNER, unpacked, copied, fixed),
    Edit(
        "copied if a prompt is scored",
        "0.21.0",
        _RUNNER,
        unpacked,
        r"\1\2\1scored = hidden_states\n\1if self.num_prompt_logprobs:\n\1    scored = torch.clone(hidden_states)\n",
        fixed,
        also=(
            (
                _RUNNER,
                r"^( *logits,\n *)hidden_states(,\n *scheduler_output\.total_num_scheduled_tokens,\n)",
                r"\1scored\2",
            ),
        ),
    ),
    Edit(
        "copied before a draft, and not before a dummy run",
        "0.25.1",
        _RUNNER,
        r"^( {16})if input_fits_in_drafter:\n(?= *propose_draft_token_ids\(sampled_token_ids\)\n {16}else:)",
        (
            r"\1if input_fits_in_drafter:\n\1    if self.num_prompt_logprobs:\n"
            r"\1        hidden_states = hidden_states[:].clone()\n"
        ),
    ),
    Edit(
        "copied by the target",
        "0.18.1",
        _RUNNER,
        r"^( {8})(self\.execute_model_state = ExecuteModelState\()",
        r"\1hidden_states = hidden_states.clone() if self.num_prompt_logprobs else hidden_states\n\1\2",
        fixed,
    ),
    Edit(
        "scored before the draft",
        "0.20.0",
        _RUNNER,
        by_the_bookkeeping,
        "prompt_logprobs_dict = scored",
        fixed,
        also=((_RUNNER, unpacked, first),),
    ),
    Edit(
        "scored before the draft, now and then",
        "0.20.0",
        _RUNNER,
        by_the_bookkeeping,
        "prompt_logprobs_dict = scored",
        also=(
            (_RUNNER, unpacked, first),
            (_RUNNER, now_and_then, r"\1if self.odd:\n\1    scored = self._get_prompt_logprobs_dict("),
        ),
    ),
    Edit(
        "copied now and then",
        "0.21.0",
        _RUNNER,
        unpacked,
        r"\1\2\1if self.odd:\n\1    hidden_states = hidden_states.clone()\n",
    ),
    Edit(
        "hidden states from elsewhere",
        "0.18.1",
        _RUNNER,
        r"hidden_states\[:num_scheduled_tokens\],(?=\n *scheduler_output\.num_scheduled_tokens)",
        "self.kept,",
    ),
    Edit("kept by a function", "0.17.1", _RUNNER, unpacked, r"\1\2\1hidden_states = self.keep(hidden_states)\n"),
    Edit(
        "another kind of drafter",
        "0.33.0",
        _RUNNER,
        r"or spec_config\.uses_extract_hidden_states\(\)",
        "or spec_config.uses_another()",
    ),
    Edit(
        "whose prompts are scored is asked elsewhere",
        "0.25.1",
        _RUNNER,
        r"num_prompt_logprobs_dict = self\.num_prompt_logprobs",
        "num_prompt_logprobs_dict = self.asked()",
    ),
    Edit(
        "a state with other fields",
        "0.14.1",
        _RUNNER,
        r"^( {4})hidden_states: torch\.Tensor\n( {4}sample_hidden_states)",
        r"\1states: torch.Tensor\n\2",
    ),
    # Right elsewhere.
    Edit(
        "drafted afterwards if a prompt is scored",
        "0.21.0",
        _RUNNER,
        r"^( {12})if use_gpu_toks:\n",
        r"\1if use_gpu_toks and not self.num_prompt_logprobs:\n",
    ),
    Edit(
        "copied by the target if a prompt is scored",
        "0.33.0",
        _RUNNER,
        r"^( {8})(self\.execute_model_state = ExecuteModelState\()",
        r"\1if self.num_prompt_logprobs:\n\1    hidden_states = hidden_states.clone()\n\1\2",
    ),
    Edit(
        "copied to a buffer",
        "0.29.0",
        _RUNNER,
        unpacked,
        r"\1\2\1hidden_states = self.scored_states[: len(hidden_states)].copy_(hidden_states)\n",
    ),
    Edit(
        "copied by a function if a prompt is scored",
        "0.24.0",
        _RUNNER,
        unpacked,
        r"\1\2\1hidden_states = self._own_memory(hidden_states)\n",
        also=(
            (
                _RUNNER,
                r"^    def _bookkeeping_sync\(",
                (
                    "    def _own_memory(self, hidden_states: torch.Tensor) -> torch.Tensor:\n"
                    "        return hidden_states.clone() if self.num_prompt_logprobs else hidden_states\n\n"
                    "    def _bookkeeping_sync("
                ),
            ),
        ),
    ),
    Edit(
        "copied in one of several ways",
        "0.30.0",
        _RUNNER,
        unpacked,
        r"\1\2\1if len(self.num_prompt_logprobs) > 0:\n\1    hidden_states = torch.clone(hidden_states)\n",
        fixed,
    ),
    # Wrong.
    Edit(
        "copied if the drafter is one of Eagle's",
        "0.33.0",
        _RUNNER,
        unpacked,
        (
            r"\1\2\1spec = self.speculative_config\n\1if spec and spec.use_eagle() and self.num_prompt_logprobs:\n"
            r"\1    hidden_states = hidden_states.clone()\n"
        ),
    ),
    Edit("copied, and nobody reads it", "0.31.0", _RUNNER, unpacked, r"\1\2\1scored = hidden_states.clone()\n"),
    Edit(
        "copied and taken back",
        "0.22.0",
        _RUNNER,
        unpacked,
        r"\1\2\1graphs_own = hidden_states\n\1hidden_states = hidden_states.clone()\n\1hidden_states = graphs_own\n",
    ),
    Edit(
        "copied behind the draft",
        "0.32.0",
        _RUNNER,
        r'^( {8})(with record_function_or_nullcontext\("gpu_model_runner: bookkeep"\):\n)',
        r"\1if self.num_prompt_logprobs:\n\1    hidden_states = hidden_states.clone()\n\1\2",
    ),
    Edit(
        "the drafter has the copy",
        "0.27.0",
        _RUNNER,
        r"^( {20}self\.input_batch\.sampling_metadata,\n {20})hidden_states,\n",
        r"\1hidden_states.clone(),\n",
    ),
    Edit(
        "copied if no prompt is scored",
        "0.26.0",
        _RUNNER,
        unpacked,
        r"\1\2\1if not self.num_prompt_logprobs:\n\1    hidden_states = hidden_states.clone()\n",
    ),
)

SERVED = (
    Served("0.21.0", f"./llama -sc '{eagle}'", affects, "eagle3"),
    Served("0.21.0", "./llama", does_not, "no speculator"),
    Served("0.25.1", f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ./llama -sc '{itself}'", does_not, "without graphs"),
    Served("0.26.0", f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ./llama -sc '{itself}'", affects, "draft_model"),
)
