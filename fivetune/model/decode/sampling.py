"""Sampling of tokens: temperature, top-k and top-p in the order of transformers, drawn by given uniform numbers.

In: scores of all tokens, one uniform number per row. Out: a token per row. No generator has a state: the numbers of an
answer depend on the seed and its input alone, not on the batch, the order of the rows or the process that draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fivetune.model.decode.records import Sampling

BLOCK = 128  # shares that are added up before the sums are: divides the vocabularies of T5, mT5 and umT5
SMALL_BLOCK = 32  # shares of which the largest is found first
FIRST_TOKENS = 64  # most probable tokens that top-p looks at first: more are seldom needed


def draw_uniforms(
    seed: int | None, inputs: Sequence[NDArray[Any]], num_answers: int, num_steps: int
) -> NDArray[np.float32]:
    """Draw the uniform numbers of answers, [inputs * num_answers, num_steps] in [0, 1).

    The bits are Philox's (Salmon et al. 2011) with a hash of seed and token ids as key, and the number of the answer
    in the counter. Without a seed the key is random.

    >>> ids = np.array([7, 8, 1])
    >>> np.array_equal(draw_uniforms(0, [ids[:1], ids], 1, 4)[1:], draw_uniforms(0, [ids], 2, 4)[:1])
    True
    """
    found = np.empty((len(inputs) * num_answers, num_steps), np.float32)
    for row, ids in enumerate(inputs):
        digest = token_bytes(16)
        if seed is not None:
            hashed = blake2b(ids.astype("<i8").tobytes(), digest_size=16, key=seed.to_bytes(8, "little"))
            digest = hashed.digest()
        key = int.from_bytes(digest, "little")
        for answer in range(num_answers):
            bits = np.random.Philox(key=key, counter=answer << 192).random_raw(num_steps)
            # 23 bits: a product with the whole stays below it after rounding to fp32.
            found[row * num_answers + answer] = (bits >> np.uint64(41)) / np.float32(2**23)
    return found


def choose_tokens(scores: Tensor, sampling: Sampling | None, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw a token of every row by `draw_tokens`, or without `sampling` take the best: ids and -log p, [B] each."""
    if sampling is not None:
        assert uniforms is not None
        ids, logprobs = draw_tokens(scores, sampling, uniforms)
        return ids, -logprobs
    best, ids = scores.max(-1)
    # -log p of the best token is log of the sum of exp(score - best); the scores are not needed any more.
    return ids, scores.sub_(best[:, None]).exp_().sum(-1).log_()


def draw_tokens(scores: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token of every row.

    Args:
        scores: [B, V] fp32, overwritten.
        uniforms: [B] in [0, 1).

    Returns: ids [B], and their log p before temperature, top-k and top-p, [B].
    """
    heat = sampling.temperature
    best, best_ids = scores.max(-1, keepdim=True)
    scores.sub_(best)
    whole: Tensor | None = None  # sum of exp(score - best)
    if heat != 1:
        whole = scores.exp().sum(-1, keepdim=True)
        scores.div_(heat)
    shares = scores.exp_()
    if whole is None:
        whole = shares.sum(-1, keepdim=True)
    if sampling.top_k or sampling.top_p < 1:
        chosen = _draw_probable(shares, sampling, uniforms)
    else:
        chosen = find_places(shares, uniforms)
    # Rounding may end at a token with a share of 0, which a rule forbids.
    share = shares.gather(-1, chosen)
    chosen = torch.where(share > 0, chosen, best_ids)
    share = torch.where(share > 0, share, 1.0)
    logprobs = heat * share.log() - whole.log()
    return chosen[:, 0], logprobs[:, 0]


def _draw_probable(shares: Tensor, sampling: Sampling, uniforms: Tensor, first: int = FIRST_TOKENS) -> Tensor:
    """Draw among the most probable tokens that top-k and top-p leave: [B, V], [B] -> [B, 1].

    Args:
        first: number of tokens that top-p looks at before it looks at more.
    """
    vocabulary = shares.shape[-1]
    number = min(sampling.top_k or first, vocabulary)
    found, ids = _list_probable(shares, number)
    whole = (found if sampling.top_k else shares).sum(-1, keepdim=True)
    # A token stays if the more probable ones have less than top_p together: the first one always does.
    is_kept = found.cumsum(-1) - found < sampling.top_p * whole
    # In the order of the vocabulary: the order of two equally probable tokens would depend on the last bit.
    ids, order = ids.sort(-1)
    kept = (found * is_kept).gather(-1, order)
    chosen = ids.gather(-1, find_places(kept, uniforms)).clamp_max_(vocabulary - 1)  # not the filler of a block
    if not sampling.top_k and number < vocabulary:
        rows = is_kept[:, -1].nonzero()[:, 0]
        if len(rows):
            chosen[rows] = _draw_probable(shares[rows], sampling, uniforms[rows], 64 * first)
    return chosen


def _list_probable(shares: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The largest shares of every row, largest first, in fp64, and their ids: [B, V] -> [B, number], [B, number].

    >>> _list_probable(torch.arange(4096).float()[None], 2)
    (tensor([[4095., 4094.]], dtype=torch.float64), tensor([[4095, 4094]]))
    """
    blocks = _divide(shares, SMALL_BLOCK)
    if number >= blocks.shape[1]:
        found, ids = shares.topk(number)
        return found.double(), ids
    # They are in the blocks with the largest shares: topk over a vocabulary takes longer than all else here.
    block = blocks.amax(-1).topk(number).indices
    near = blocks.gather(1, block[..., None].expand(-1, -1, SMALL_BLOCK)).flatten(1)
    found, place = near.topk(number)
    return found.double(), block.gather(-1, place // SMALL_BLOCK) * SMALL_BLOCK + place % SMALL_BLOCK


def _divide(shares: Tensor, size: int) -> Tensor:
    """Divide rows into blocks, [B, N] -> [B, blocks, size]."""
    if filler := -shares.shape[-1] % size:  # padding by nothing would copy too
        shares = F.pad(shares, (0, filler))
    return shares.unflatten(-1, (-1, size))


def find_places(shares: Tensor, uniforms: Tensor) -> Tensor:
    """The place of every row at which the sum of its shares exceeds a part of the whole: [B, N], [B] -> [B, 1].

    Shares are added up in blocks: one running sum over a vocabulary would lose small ones beside large ones.

    >>> find_places(torch.tensor([[1.0, 0.0, 2.0, 1.0]]).expand(4, -1), torch.tensor([0.0, 0.2, 0.25, 0.9]))[:, 0]
    tensor([0, 0, 2, 3])
    """
    blocks = _divide(shares, BLOCK)
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    wanted = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, wanted, right=True).clamp_max_(ends.shape[-1] - 1)
    wanted -= ends.gather(-1, block) - sums.gather(-1, block)
    inside = blocks[torch.arange(len(shares), device=shares.device), block[:, 0]].double().cumsum(-1)
    place = torch.searchsorted(inside, wanted, right=True).clamp_max_(BLOCK - 1)
    return (block * BLOCK + place).clamp_max_(shares.shape[-1] - 1)
