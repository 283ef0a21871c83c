"""The decoder of any family with transformers' cache; `Decoder` is the one for T5's blocks.

In: a model and flat inputs. Out: hidden states and logits. The inputs are padded to the longest of the batch; every
hypothesis has a row of its own, which transformers' cache moves when hypotheses change places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fivetune.model.decode.cache import RowCompactor
from fivetune.model.decode.encoder import EncodedInputs
from fivetune.model.decode.steps import Rank
from fivetune.model.family import compute_output_scale
from fivetune.model.forward import compute_logits
from fivetune.model.modules import T5Model
from fivetune.model.virtual_tokens import build_cache_argument, build_prefix_cache

MAX_TREE_POSITIONS = 8_192  # decoder positions of a pass over several branches of a tree


class PaddedDecoder:
    """The decoder of a model with its cache, with the methods of `Decoder`.

    All slots are at the same step: they are filled when all have finished.
    """

    can_refill = False

    def __init__(self, model: T5Model, *, num_beams: int) -> None:
        self.config = model.config
        self.device: torch.device = model.get_output_embeddings().weight.device
        self.num_steps = 0
        self._model = model
        self._decoder = model.get_decoder()
        self._num_beams = num_beams
        self._scale = compute_output_scale(model.config)
        self._encoded = self._mask = torch.empty(0)  # [B * K, S, d] and [B * K, S]
        self._cache: Any = None

    def encode(self, ids: Tensor, lengths: list[int]) -> EncodedInputs:
        """Encode flat inputs: [N]; B lengths."""
        ends = torch.tensor(lengths, device=self.device)[:, None]
        mask = torch.arange(max(lengths), device=self.device) < ends
        padded = torch.full(mask.shape, self.config.pad_token_id, device=self.device)
        padded[mask] = ids
        encoder = self._model.get_encoder()
        return EncodedInputs(encoder(input_ids=padded, attention_mask=mask.long()).last_hidden_state, lengths)

    def start(self, memory: EncodedInputs) -> None:
        """Let the slots be the rows of `memory`, all at their begin."""
        from transformers import DynamicCache, EncoderDecoderCache

        self._encoded = memory.states.repeat_interleave(self._num_beams, 0)
        self._mask = memory.build_mask().long().repeat_interleave(self._num_beams, 0)
        self._cache = build_prefix_cache(self._model, len(self._mask))
        self.num_steps = 0
        if self._cache is None:
            decoder: Any = self.config.get_text_config(decoder=True)
            # Only self-attention may have windows.
            self._cache = EncoderDecoderCache(DynamicCache(config=decoder), DynamicCache())

    def drop_finished(self, move: RowCompactor) -> None:
        """Remove finished rows from the batch."""
        beams = self._num_beams
        stays = move(torch.arange(len(self._mask) // beams, device=self.device))
        rows = (stays[:, None] * beams + torch.arange(beams, device=self.device)).flatten()
        self._encoded = self._encoded[rows]
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(rows)

    def step(self, ids: Tensor, ages: Sequence[int], places: Tensor | None = None) -> Tensor:
        """Run the decoder for one more token of every hypothesis: ids [B, K], places [B, K, t] -> [B, K, d]."""
        del ages  # all slots have the age of the cache
        if places is not None and self.num_steps:
            # A hypothesis continues the row in which its last token was written.
            first = torch.arange(len(ids), device=self.device)[:, None] * self._num_beams
            rows = first + places[:, :, self.num_steps - 1]
            self._cache.self_attention_cache.reorder_cache(rows.flatten())
        hidden = self._run(ids.reshape(-1, 1), self._encoded, self._mask, self._cache)
        self.num_steps += 1
        return hidden.view(*ids.shape, -1)

    def run_tree(self, memory: EncodedInputs, ids: Tensor, depth: Tensor, visible: Tensor) -> Tensor:
        """Compute the hidden states of tokens that form the same tree in every row: [B, N] -> [B, N, d].

        Each branch, from the root to a leaf, is a sequence of its own: not every decoder takes the mask of a tree.
        """
        num_rows = len(ids)
        encoded = memory.states
        mask = memory.build_mask().long()
        found: Tensor | None = None
        size = max(1, MAX_TREE_POSITIONS // (num_rows * int(depth.max() + 1)))
        for branches, real in _iter_branch_groups(visible, size):
            count = len(branches)
            tokens = ids[:, branches].flatten(0, 1)
            prefix = build_prefix_cache(self._model, len(tokens))
            hidden = self._run(tokens, encoded.repeat_interleave(count, 0), mask.repeat_interleave(count, 0), prefix)
            if found is None:
                found = hidden.new_empty(*ids.shape, hidden.shape[-1])
            # Branches share nodes: each of them writes the same states.
            found[:, branches[real]] = hidden.view(num_rows, *branches.shape, -1)[:, real]
        assert found is not None, "a tree has at least its root"
        return found

    def _run(self, ids: Tensor, encoded: Tensor, mask: Tensor, cache: Any) -> Tensor:
        output = self._decoder(
            input_ids=ids,
            attention_mask=torch.ones_like(ids) if cache is None else None,  # a pad id may be a token of the answer
            encoder_hidden_states=encoded,
            encoder_attention_mask=mask,
            use_cache=cache is not None,
            **build_cache_argument(cache),
        )
        return output.last_hidden_state * self._scale

    def compute_logits(self, hidden: Tensor, rank: Rank) -> Tensor:
        """Scores of all tokens, [..., V] fp32; none is computed again."""
        del rank
        return compute_logits(self._model, hidden)


def _iter_branch_groups(visible: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the nodes of the branches of a tree, `size` branches at a time: numbers and mask, [branches, longest].

    >>> tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()  # 0 -> 1 -> 3, 0 -> 2
    >>> [branches.tolist() for branches, _ in _iter_branch_groups(tree, 2)]
    [[[0, 2, 0], [0, 1, 3]]]
    """
    leaves = (visible.sum(0) == 1).nonzero().flatten().tolist()
    for first in range(0, len(leaves), size):
        branches = [visible[leaf].nonzero().flatten() for leaf in leaves[first : first + size]]
        real = [torch.ones_like(branch, dtype=torch.bool) for branch in branches]
        yield pad_sequence(branches, batch_first=True), pad_sequence(real, batch_first=True)
