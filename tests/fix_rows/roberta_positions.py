"""Trials of roberta-positions: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served, affects, does_not, unknown
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.roberta_positions import _MODELS, _RUNNER

looked_up = r"self\.position_embeddings\(position_ids\)"
out_of_place = "self.position_embeddings(position_ids + self.padding_idx + 1)"
calls = r"^( +)(replace_roberta_positions\(\n.*\n +\))\n"
in_place = r"^( +)position_ids \+= padding_idx \+ 1\n"
cut = r"^( +)(positions = self\.positions\.gpu\[:num_input_tokens\])\n"
padded_rows = "self.positions.gpu[num_scheduled_tokens:num_input_tokens]"
zeroed = f"{padded_rows}.zero_()"
refreshed = r"^( +)(self\.positions\.copy_to_gpu\(total_num_scheduled_tokens\))\n"
bge_m3 = {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "pad_token_id": 1,
    "max_position_embeddings": 8194,
}
reranker = bge_m3 | {"architectures": ["XLMRobertaForSequenceClassification"]}
bert = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}

EDITS = (
    Edit(
        "offset added in the embedding",
        "0.18.1",
        _MODELS,
        looked_up,
        out_of_place,
        Verdict.FIXED,
        also=((_MODELS, calls, ""), (_MODELS, r"^def replace_roberta_positions\((?:.*\n)+", "")),
    ),
    Edit(
        "padded rows zeroed",
        "0.14.1",
        _RUNNER,
        cut,
        rf"\1\2\n\1if num_input_tokens > num_scheduled_tokens:\n\1    {zeroed}\n",
        Verdict.FIXED,
    ),
    Edit("padded rows zeroed in any case", "0.17.1", _RUNNER, cut, rf"\1\2\n\1{zeroed}\n", Verdict.FIXED),
    Edit("padded rows zeroed now and then", "0.17.1", _RUNNER, cut, rf"\1\2\n\1if self.odd:\n\1    {zeroed}\n"),
    Edit("one of two remedies cut out", "0.19.0", _MODELS, r" \+ self\.padding_idx \+ 1\n", "\n", Verdict.FIXED),
    Edit(
        "the other remedy cut out",
        "0.25.0",
        _RUNNER,
        r"^ +self\.positions\[num_scheduled_tokens:num_input_tokens\]\.zero_\(\)\n",
        "                pass\n",
        Verdict.FIXED,
    ),
    Edit(
        "both remedies cut out",
        "0.19.0",
        _MODELS,
        r" \+ self\.padding_idx \+ 1\n",
        "\n",
        also=(
            (_RUNNER, r"^ +self\.positions\[num_scheduled_tokens:num_input_tokens\]\.zero_\(\)\n", " " * 16 + "pass\n"),
        ),
    ),
    Edit("added by another operation", "0.15.0", _MODELS, in_place, r"\1position_ids.add_(padding_idx + 1)\n"),
    Edit("added now and then", "0.16.0", _MODELS, calls, r"\1if self.shifted:\n\1    \2\n"),
    Edit("a copy is added to", "0.18.1", _MODELS, calls, r"\1positions = positions.clone()\n\1\2\n"),
    Edit(
        "a further model adds",
        "0.18.0",
        _MODELS,
        r"^def replace_roberta_positions",
        "def shift(positions: torch.Tensor) -> None:\n    replace_roberta_positions(positions, positions, 1)\n\n\n"
        "def replace_roberta_positions",
    ),
    Edit(
        "all positions refreshed",
        "0.18.1",
        _RUNNER,
        r"self\.positions\.copy_to_gpu\(total_num_scheduled_tokens\)",
        "self.positions.copy_to_gpu()",
    ),
    # Right elsewhere.
    Edit("padded rows set to 0", "0.16.0", _RUNNER, cut, rf"\1\2\n\1{padded_rows} = 0\n", Verdict.FIXED),
    Edit(
        "rows behind the tokens zeroed as they are prepared",
        "0.18.1",
        _RUNNER,
        refreshed,
        r"\1\2\n\1self.positions.gpu[total_num_scheduled_tokens:].zero_()\n",
    ),
    Edit("the runner hands over a copy", "0.17.0", _RUNNER, cut, r"\1\2.clone()\n"),
    Edit("models add to a new tensor", "0.18.1", _MODELS, calls, r"\1positions = positions + self.padding_idx + 1\n"),
    Edit(
        "models take the offset off again",
        "0.18.0",
        _MODELS,
        r"^( +)return (self\.(?:model|roberta)\(\n(?: {12}.*\n)+ {8}\))\n",
        r"\1hidden_states = \2\n\1positions -= self.padding_idx + 1\n\1return hidden_states\n",
    ),
    Edit(
        "the runner takes the offset off again",
        "0.18.1",
        _RUNNER,
        r"^( +)return (self\.model\(\n(?: {12}.*\n)+ {8}\))\n(?=\n    @staticmethod)",
        r"\1output = \2\n\1positions.sub_(self.model.padding_idx + 1)\n\1return output\n",
    ),
    # Wrong.
    Edit("zeroed on a copy", "0.18.0", _RUNNER, cut, rf"\1\2\n\1{padded_rows}.clone().zero_()\n"),
    Edit(
        "zeroed behind the padding", "0.17.1", _RUNNER, cut, r"\1\2\n\1self.positions.gpu[num_input_tokens:].zero_()\n"
    ),
    Edit(
        "zeroed on the host, of which tokens alone are copied",
        "0.18.1",
        _RUNNER,
        refreshed,
        r"\1self.positions.np[total_num_scheduled_tokens:] = 0\n\1\2\n",
    ),
    Edit(
        "zeroed for drafters alone",
        "0.15.1",
        _RUNNER,
        cut,
        rf"\1\2\n\1if self.speculative_config is not None:\n\1    {zeroed}\n",
    ),
    Edit(
        "one of two models adds to a copy",
        "0.18.1",
        _MODELS,
        rf"{calls}(?= +if token_type_ids)",
        r"\1positions = positions.clone()\n\1\2\n",
    ),
    Edit("also added in the embedding", "0.18.1", _MODELS, looked_up, out_of_place),
)

SERVED = (
    Served("0.18.1", "./model", affects, "XLMRobertaModel is a RoBERTa model", model=bge_m3),
    Served("0.14.1", "./model", affects, "XLMRobertaForSequenceClassification", model=reranker),
    Served("0.18.1", "./model --model-impl vllm", affects, "XLMRobertaModel", model=bge_m3),
    Served("0.18.1", "./model --model-impl transformers", does_not, "transformers", model=bge_m3),
    Served("0.18.1", "./model --enforce-eager", does_not, "--enforce-eager", model=bge_m3),
    Served("0.18.1", "VLLM_USE_V2_MODEL_RUNNER=1 ./model", does_not, "V2", model=bge_m3),
    Served("0.18.1", "./model", does_not, "BertModel is no RoBERTa model", model=bert),
    Served("0.18.1", "./llama", does_not, "LlamaForCausalLM is no RoBERTa model"),
    Served("0.18.1", "./model --runner pooling", unknown, "--runner may change it", model=bge_m3),
    Served("0.18.1", "BAAI/bge-m3", unknown, "config.json of BAAI/bge-m3"),
)
