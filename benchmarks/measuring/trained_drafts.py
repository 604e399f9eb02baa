"""A draft layer for a trained model: DeepSeek's multi-token prediction, in transformers' modules, as vLLM computes it.

Row i is given the target's hidden state of token i, which is that after its last norm, and the embedding of token
i + 1, and predicts token i + 2. A further draft token is made of the layer's own output in place of the target's.
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
        # A further draft token begins with what is before this norm up to 0.21.0, and after it from 0.25.1 on. Where
        # the norm's weights are equal, `hnorm` makes the same of both.
        self.norm.weight.requires_grad_(False)
        # Not a submodule: a target is trained before, and not with it.
        self._target = [target]

    def forward(self, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits of *steps* draft tokens after each token; row i of draft token s, from 0, is of token i + 2 + s.

        The draft tokens before are given right. Each tensor is (rows, length - 1 - steps, vocabulary).
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
        """Its tensors in a checkpoint, which holds the embeddings and the output matrix once more."""
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
    """What each row of *steps* times *count* rows may look at, as the cache of an engine has it.

    The rows of the first draft token up to its own, whose hidden states are the target's, and of further draft tokens
    those of its own draft.
    """
    seen = torch.zeros(steps, count, steps, count, dtype=torch.bool, device=device)
    seen[:, :, 0] = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    for step in range(1, steps):
        seen[step:, :, step] = torch.eye(count, dtype=torch.bool, device=device)
    return seen.view(1, 1, steps * count, steps * count)
