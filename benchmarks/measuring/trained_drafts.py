"""A draft layer for a trained model: DeepSeek's multi-token prediction, in transformers' modules, as vLLM computes it.

Row i combines the target's hidden state of token i, after its last norm, with the embedding of token i + 1, and
predicts token i + 2. Further draft tokens use the layer's own output in place of the target's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

Tensors = dict[str, torch.Tensor]


class DraftLayer(nn.Module):
    """The draft layer of *target*, a DeepseekV3ForCausalLM, whose embeddings, output matrix and rotation it shares."""

    def __init__(self, target: Any) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        super().__init__()
        config = target.config
        hidden = config.hidden_size
        self.enorm = deepseek.DeepseekV3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.hnorm = deepseek.DeepseekV3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = deepseek.DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = deepseek.DeepseekV3RMSNorm(hidden, eps=config.rms_norm_eps)
        # vLLM computes further draft tokens from the state before this norm up to 0.21.0, and after it from 0.25.1 on.
        # With equal weights in the norm, `hnorm` makes the two the same.
        self.norm.weight.requires_grad_(False)
        # In a list, so that it is no submodule: the target is not trained with this layer.
        self._target = [target]

    def forward(self, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Return the logits of *steps* draft tokens after each token: (rows, length - 1 - steps, vocabulary) each.

        Position i of draft token s, from 0, predicts token i + 2 + s, by teacher forcing.
        """
        (target,) = self._target
        count = ids.shape[1] - 1 - steps
        with torch.no_grad():
            embedded = target.get_input_embeddings()(ids)
            hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state[:, :count]
        rows, positions, logits = [], [], []
        for step in range(steps):
            position = torch.arange(step, step + count, device=ids.device)
            token = embedded[:, 1 + step :][:, :count].masked_fill((position == 0)[:, None], 0.0)
            rows.append(self.eh_proj(torch.cat([self.enorm(token), self.hnorm(hidden)], -1)))
            positions.append(position)
            together, places = torch.cat(rows, 1), torch.cat(positions)[None]
            computed = self.block(
                together,
                attention_mask=_seen(count, step + 1, ids.device),
                position_ids=places,
                position_embeddings=target.model.rotary_emb(together, places),
                use_cache=False,
            )
            hidden = self.norm(computed[:, -count:])
            logits.append(functional.linear(hidden, target.lm_head.weight.detach()))
        return logits

    def tensors(self, prefix: str) -> Tensors:
        """Return its tensors in a checkpoint, which repeats the embeddings and the output matrix."""
        (target,) = self._target
        named = {name: value for name, value in self.state_dict().items() if not name.startswith(("block.", "norm."))}
        named |= self.block.state_dict()
        named |= {f"shared_head.{name}": value for name, value in self.state_dict().items() if name == "norm.weight"}
        named |= {
            "embed_tokens.weight": target.get_input_embeddings().weight,
            "shared_head.head.weight": target.lm_head.weight,
        }
        return {f"{prefix}.{name}": value for name, value in named.items()}


def _seen(count: int, steps: int, device: torch.device) -> torch.Tensor:
    """Return the attention mask of *steps* times *count* rows, as an engine's cache has it.

    A row sees rows of the first draft token up to its own, whose hidden states are the target's, and rows of further
    draft tokens that belong to its own draft.
    """
    seen = torch.zeros(steps, count, steps, count, dtype=torch.bool, device=device)
    seen[:, :, 0] = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    for step in range(1, steps):
        seen[step:, :, step] = torch.eye(count, dtype=torch.bool, device=device)
    return seen.view(1, 1, steps * count, steps * count)
