"""Scores of given token sequences: targets, phrases and label sets in one pass of the decoder, without generation.

start -> yes -> end         The sequences of a row form a tree from the start token. Shared prefixes are computed
      -> no -> end          once: a set of one-token labels costs 1 + labels positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivetune.model.decode.encoder import EncodedInputs
from fivetune.model.decode.logits import LogitsProcessor
from fivetune.model.decode.padded import PaddedDecoder
from fivetune.model.decode.records import Decoding
from fivetune.model.decode.steps import Decoder

CHUNK = 512  # positions per pass of the head


def score_given(
    decoder: Decoder | PaddedDecoder, memory: EncodedInputs, targets: Tensor, decoding: Decoding, rules: LogitsProcessor
) -> dict[str, Tensor]:
    """Score targets ([B, T], negative after their ends), phrase and labels, as requested by `decoding`.

    Args:
        memory: B encoded inputs.

    Returns: the requested scores by fields of GeneratedAnswer: target_loss, phrase_loss [B] fp32, target_correct,
        left_label_set [B] bool, label_logprobs [B, labels] fp32.
    """
    tree = LabelTree(len(targets), decoder.config.decoder_start_token_id)
    target = tree.add_rows(targets) if decoding.score_targets else []
    phrase = tree.add_sequence(decoding.phrase_ids)
    labels = [tree.add_sequence(ids) for ids in decoding.label_ids]
    scores: dict[str, Tensor] = {}
    if not (target or phrase or labels):
        return scores
    nats, is_best = tree.score_edges(decoder, memory, rules)
    if target:
        scores["target_loss"] = nats[:, target].sum(1)
        scores["target_correct"] = is_best[:, target].all(1)
    if phrase:
        scores["phrase_loss"] = nats[:, phrase].sum(1)
    if labels:
        scores["label_logprobs"] = torch.stack([-nats[:, edges].sum(1) for edges in labels], 1)
        is_written = torch.stack([is_best[:, edges].all(1) for edges in labels], 1)
        scores["left_label_set"] = ~is_written.any(1)
    return scores


class LabelTree:
    """Prefix tree of the sequences to be scored, shared by all rows or one per row.

    >>> tree = LabelTree(2, start=0)
    >>> tree.add_sequence((7, 1)), tree.add_sequence((8, 1)), tree.add_sequence((7, 9, 1))
    ([0, 1], [2, 3], [0, 4, 5])
    >>> tree.num_nodes
    4
    """

    def __init__(self, num_rows: int, start: int) -> None:
        self._num_rows = num_rows
        self._ids: list[Tensor] = [torch.full((num_rows,), start)]
        self._parents = [-1]
        self._edges: list[tuple[int, Tensor]] = []  # node, and the token of each row that is scored after it, or -1
        self._known: dict[tuple[int, int], int] = {}  # node and token -> edge
        self._child: dict[int, int] = {}  # edge -> node

    @property
    def num_nodes(self) -> int:
        return len(self._ids)

    def add_sequence(self, tokens: Sequence[int]) -> list[int]:
        """Add a sequence shared by all rows. Returns: its edges, columns of `score_edges`."""
        edges = []
        node = 0
        for token in tokens:
            if edges:
                node = self._get_child(edges[-1])
            edge = self._known.get((node, token))
            if edge is None:
                edge = self._known[node, token] = self._add_edge(node, torch.full((self._num_rows,), token))
            edges.append(edge)
        return edges

    def add_rows(self, tokens: Tensor) -> list[int]:
        """Add one sequence per row: [B, T], negative after its end. Returns: its edges."""
        edges = []
        node = 0
        for column in tokens.clamp_min(-1).unbind(1):
            if edges:
                node = self._get_child(edges[-1])
            edges.append(self._add_edge(node, column))
        return edges

    def _add_edge(self, node: int, tokens: Tensor) -> int:
        self._edges.append((node, tokens))
        return len(self._edges) - 1

    def _get_child(self, edge: int) -> int:
        if edge not in self._child:
            parent, tokens = self._edges[edge]
            self._child[edge] = len(self._ids)
            self._ids.append(tokens.clamp_min(0))
            self._parents.append(parent)
        return self._child[edge]

    def score_edges(
        self, decoder: Decoder | PaddedDecoder, memory: EncodedInputs, rules: LogitsProcessor
    ) -> tuple[Tensor, Tensor]:
        """Compute -log p of every edge, [B, E] fp32, and whether greedy search would choose it, [B, E] bool.

        Padding (-1) has loss 0 and counts as chosen.
        """
        device = decoder.device
        # A node attends to itself and to its ancestors, which were added before it.
        visible = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self._parents):
            if parent >= 0:
                visible[node] |= visible[parent]
        depth = visible.sum(1) - 1
        ids = torch.stack(self._ids, 1).to(device)
        hidden = decoder.run_tree(memory, ids, depth.to(device), visible.to(device))
        nodes = torch.tensor([node for node, _ in self._edges], device=device)
        tokens = torch.stack([tokens for _, tokens in self._edges], 1).to(device)
        real = tokens >= 0  # the tokens of rows have several lengths
        # The head skips nodes that are followed by padding only.
        used = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=device)
        rows, edges = real.nonzero(as_tuple=True)
        used[rows, nodes[edges]] = True
        # The head is the costliest layer: it runs once per node, whatever number of edges leave it.
        position = (used.flatten().cumsum(0) - 1).view_as(used)[:, nodes]  # [B, E], of the node among those used
        chosen = hidden[used]
        nats = torch.zeros(tokens.shape, device=device)
        is_best = torch.ones_like(real)
        for first in range(0, len(chosen), CHUNK):
            logits = decoder.compute_logits(chosen[first : first + CHUNK], rules.suppress)
            here = real & (position >= first) & (position < first + CHUNK)
            row = position[here] - first
            token = tokens[here]
            nats[here] = -logits.log_softmax(-1)[row, token]
            is_best[here] = rules.suppress(logits).argmax(-1)[row] == token
        return nats, is_best
