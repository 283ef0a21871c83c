"""A stand-in for the attention kernel of CUDA, which Triton's interpreter runs slowly."""

from __future__ import annotations

from itertools import pairwise

import torch


def attend(q, k, v, cu_q, cu_k, max_q, max_k, bias=None, causal=False, dropout=0.0, overwrite=False):
    """The kernel's function, one sequence after the other."""
    outs = []
    for (start_q, end_q), (start_k, end_k) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        scores = torch.einsum("ihd,jhd->hij", q[start_q:end_q], k[start_k:end_k])
        rows, cols = torch.arange(end_q - start_q)[:, None], torch.arange(end_k - start_k)
        if bias is not None:
            scores = scores + bias[:, cols - rows + bias.shape[1] // 2]
        shares = scores.masked_fill(cols > rows, -torch.inf).softmax(-1) if causal else scores.softmax(-1)
        outs.append(torch.einsum("hij,jhd->ihd", torch.dropout(shares, dropout, True), v[start_k:end_k]))
    return torch.cat(outs)
