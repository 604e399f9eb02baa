"""Trials of prompt-logprobs: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.prompt_logprobs import _PROMPTS, _RUNNER

unpacked = r"^( {8})(self\.input_batch\.prev_sampled_token_ids = None\n)(?=\n {8}def propose_draft_token_ids)"
by_the_bookkeeping = r"prompt_logprobs_dict = self\._get_prompt_logprobs_dict\((\n.*){3}\)"
first = rf"\1\2\1scored = {_PROMPTS.removesuffix('(...)')}(hidden_states, scheduler_output.num_scheduled_tokens)\n"
now_and_then = r"^( {8})scored = self\._get_prompt_logprobs_dict\("
unknown, fixed = Verdict.UNRECOGNISED, Verdict.FIXED
affects, does_not = Concern.CONCERNS, Concern.DOES_NOT
eagle = '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'
copied = r"\1\2\1hidden_states = hidden_states.clone()\n"

EDITS = (
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
        "copied where the drafter comes first",
        "0.25.1",
        _RUNNER,
        r"^( {16})if input_fits_in_drafter:\n(?= *propose_draft_token_ids\(sampled_token_ids\)\n {16}else:)",
        (
            r"\1if input_fits_in_drafter:\n\1    if self.num_prompt_logprobs:\n"
            r"\1        hidden_states = hidden_states[:].clone()\n"
        ),
        fixed,
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
        unknown,
        also=(
            (_RUNNER, unpacked, first),
            (
                _RUNNER,
                now_and_then,
                r"\1if self.odd:\n\1    scored = self._get_prompt_logprobs_dict(",
            ),
        ),
    ),
    Edit(
        "copied now and then",
        "0.21.0",
        _RUNNER,
        unpacked,
        r"\1\2\1if self.odd:\n\1    hidden_states = hidden_states.clone()\n",
        unknown,
    ),
    Edit(
        "hidden states from elsewhere",
        "0.18.1",
        _RUNNER,
        r"hidden_states\[:num_scheduled_tokens\],(?=\n *scheduler_output\.num_scheduled_tokens)",
        "self.kept,",
        unknown,
    ),
    Edit(
        "kept by a function",
        "0.17.1",
        _RUNNER,
        unpacked,
        r"\1\2\1hidden_states = self.keep(hidden_states)\n",
        unknown,
    ),
    Edit(
        "another kind of drafter",
        "0.33.0",
        _RUNNER,
        r"or spec_config\.uses_extract_hidden_states\(\)",
        "or spec_config.uses_another()",
        unknown,
    ),
    Edit(
        "whose prompts are scored is asked elsewhere",
        "0.25.1",
        _RUNNER,
        r"num_prompt_logprobs_dict = self\.num_prompt_logprobs",
        "num_prompt_logprobs_dict = self.asked()",
        unknown,
    ),
    Edit(
        "a state with other fields",
        "0.14.1",
        _RUNNER,
        r"^( {4})hidden_states: torch\.Tensor\n( {4}sample_hidden_states)",
        r"\1states: torch.Tensor\n\2",
        unknown,
    ),
)

SERVED = (
    Served("0.21.0", f"./llama -sc '{eagle}'", affects, "eagle3"),
    Served("0.21.0", "./llama", does_not, "no speculator"),
)
