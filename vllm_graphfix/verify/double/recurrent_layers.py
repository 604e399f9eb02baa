"""Stand-ins for recurrent layers and their kernels, in small states that every token changes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend

REQUESTS, MAX_TOKENS, STATE_SIZE = 4, 32, 2


class _StatesStandIn:
    """A state for each request and each token of a decode, shared by both layers."""

    length: int

    def __init__(self) -> None:
        self.hidden = torch.zeros(MAX_TOKENS, STATE_SIZE)
        self._states = torch.zeros(1 + REQUESTS * self.length, STATE_SIZE)
        self._decay = torch.tensor([0.5, 0.8])


class GatedDeltaStandIn(_StatesStandIn):
    """Stands in for a GDN layer and its kernels: a state for each token of a decode.

    A decode goes on from the state of the last accepted token.
    """

    backend, length = GDNAttentionBackend, 2

    def decode(self, metadata: Any) -> torch.Tensor:
        """Decode `length` tokens of each row, as recorded, whatever number of them the batch really has.

        Row r's block of token t is [r, t].
        """
        return self._decode(metadata, self.hidden[: len(metadata.spec_state_indices_tensor) * self.length])

    def _decode(self, metadata: Any, hidden: torch.Tensor) -> torch.Tensor:
        blocks = metadata.spec_state_indices_tensor.clamp(min=0).long()
        accepted = (metadata.num_accepted_tokens - 1).clamp(min=0).long()
        state = self._states[blocks.gather(1, accepted.unsqueeze(1)).squeeze(1)]
        tokens = hidden.view(-1, self.length, STATE_SIZE)
        outputs = []
        for token in range(self.length):
            state = state * self._decay + tokens[:, token]
            self._states.index_copy_(0, blocks[:, token], state)
            outputs.append(state)
        return torch.stack(outputs, dim=1).view(-1, STATE_SIZE)

    def eager(self, metadata: Any, tokens: int) -> torch.Tensor:
        """Run rows with drafts as decodes, and the others token by token, according to the metadata."""
        if not metadata.num_prefills:
            return self.decode(metadata)
        outputs = torch.zeros(tokens, STATE_SIZE)
        others = torch.arange(tokens)
        if metadata.num_spec_decodes:
            drafted, others = metadata.spec_token_indx.long(), metadata.non_spec_token_indx.long()
            outputs[drafted] = self._decode(metadata, self.hidden[drafted])
        starts = metadata.non_spec_query_start_loc.tolist()
        for row, (start, end) in enumerate(itertools.pairwise(starts)):
            block = metadata.non_spec_state_indices_tensor[row]
            state = self._states[block] * metadata.has_initial_state[row]
            for token in others[start:end]:
                state = state * self._decay + self.hidden[token]
                outputs[token] = state
            self._states[block] = state
        return outputs


class SelectiveStateStandIn(_StatesStandIn):
    """Stands in for a Mamba-2 layer and its kernels, with one state for each request."""

    backend, length = Mamba2AttentionBackend, 1

    def decode(self, metadata: Any, rows: int | None = None) -> torch.Tensor:
        """Decode a token for each row, or the first *rows*; -1 (up to 0.19) and 0 mean that a row has no state."""
        blocks = metadata.state_indices_tensor_d[:rows, 0].clamp(min=0).long()
        state = self._states[blocks] * self._decay + self.hidden[: len(blocks)]
        self._states.index_copy_(0, blocks, state)
        return state

    def eager(self, metadata: Any, tokens: int) -> torch.Tensor:
        """Run decodes, then each prefill token by token, according to the metadata."""
        outputs, decodes = torch.zeros(tokens, STATE_SIZE), metadata.num_decodes
        if decodes:
            outputs[:decodes] = self.decode(metadata, decodes)
        for row in range(metadata.num_prefills):
            block = metadata.state_indices_tensor_p[row]
            start, end = (decodes + metadata.query_start_loc_p[row : row + 2]).tolist()
            state = self._states[block] * metadata.has_initial_states_p[row]
            for token in range(start, end):
                state = state * self._decay + self.hidden[token]
                outputs[token] = state
            self._states[block] = state
        return outputs
