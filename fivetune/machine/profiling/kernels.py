"""Classify kernels, memory operations and operators by their names.

In: a name from CUPTI (mangled templates included) or of a PyTorch operator (`aten::mm`). Out: a class.
"""

from __future__ import annotations

import re
from fnmatch import translate
from functools import cache

CLASSES = ("GEMM", "attention", "pointwise", "reduce", "copy", "communication", "memory set", "other")
"""Matrix products; fused attention; element-wise work; reductions over rows (sums, norms, softmax); moved data (casts,
gathers and concatenations included); transfers between devices; constants written to memory; all others."""

KERNELS = (
    ("communication", r"nccl|rccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter"),
    ("memory set", r"memset|FillFunctor"),
    ("copy", r"memcpy|direct_copy|BatchedCopy|copy_kernel|index_elementwise|index_?select|gather|(?<!_)transpose"),
    ("attention", r"flash|fmha|attention|attn|sdpa|^(forward|grad_q|grad_kv|sum_parts)$"),
    ("reduce", r"LpNorm|triton_(red|per)_"),
    ("pointwise", r"elementwise|triton_poi_"),
    ("GEMM", r"gemm|gemv|cutlass|cublas|xmma|nvjet|wgmma|splitK|[hs]884|[hs]1688|16816|matmul|triton_(tem|mm|bmm)"),
    ("GEMM", r"(^|_)(mm|bmm|addmm)(_|$)|convol|winograd"),
    ("reduce", r"reduce|softmax|norm|logsumexp|argmax|topk|sort|scan|cumsum|nll_loss|cross_entropy|square_sums|dot_"),
    ("reduce", r"embedding_backward|scatter|index_put|index_add|^_(forward|backward)$"),
    ("pointwise", r"multi_tensor_apply|dropout|gelu|relu|activated|dropped|distribution|adam|adafactor|^_update$"),
    ("pointwise", r"FunctorList|BinaryFunctor|UnaryFunctor|where|masked"),
)
"""Class and pattern of kernels: the pattern is searched anywhere in the name, ignoring case; the first match counts.
Patterns with ^ and $ are names of FiveTune's own Triton kernels (model/cuda)."""

OPERATORS = {
    "communication": "c10d::* nccl* gloo* record_param_comms",
    "attention": "*attention* *flash* *sdp*",
    "GEMM": "mm addmm bmm baddbmm addbmm mv addmv dot vdot matmul linear einsum *conv* mkldnn_linear* scaled_mm",
    "memory set": "zero zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill",
    "copy": """copy to_copy to clone contiguous cat stack gather index index_select embedding pad constant_pad_nd repeat
        roll flip tril triu masked_select take take_along_dim index_copy pin_memory split_with_sizes_copy""",
    "reduce": """sum mean max min amax amin aminmax argmax argmin any all prod var std var_mean norm linalg_vector_norm
        *softmax* logsumexp *layer_norm* *rms_norm* *group_norm* *batch_norm* nll_loss* cross_entropy* cumsum cumprod
        sort argsort topk unique* bincount searchsorted bucketize embedding_dense_backward index_add index_put
        index_put_impl scatter scatter_add scatter_reduce segment_reduce index_reduce equal nonzero histc""",
    "pointwise": """add sub rsub mul div neg abs exp log log1p log2 sqrt rsqrt reciprocal pow square sign erf sin cos
        addcmul addcdiv lerp clamp* maximum minimum where masked_fill ceil floor round trunc remainder fmod floor_divide
        *relu* *gelu* *silu* *tanh* *sigmoid* *dropout* threshold* hardtanh* eq ne lt le gt ge logical_* bitwise_*
        isfinite isnan isinf *adam* sgd arange normal uniform bernoulli random rand randn randint randperm""",
}
"""Names of operators by class, without `aten::`, `_foreach_` and surrounding underscores; * matches anything. The first
match counts."""

_KERNELS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KERNELS)
_OPERATORS = {kind: re.compile("|".join(map(translate, names.split()))) for kind, names in OPERATORS.items()}


@cache
def classify_kernel(name: str) -> str:
    """One of CLASSES for a device kernel or memory operation.

    >>> classify_kernel("ampere_sgemm_128x64_tn"), classify_kernel("Memcpy HtoD (Pageable -> Device)")
    ('GEMM', 'copy')
    """
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), "other")


@cache
def classify_operator(name: str) -> str:
    """One of CLASSES for an operator of PyTorch; views, allocations and the autograd engine's own work are "other".

    >>> classify_operator("aten::_foreach_addcdiv_"), classify_operator("aten::addmm"), classify_operator("aten::view")
    ('pointwise', 'GEMM', 'other')
    """
    bare = name.removeprefix("aten::").strip("_").removeprefix("foreach_").removeprefix("fused_").strip("_")
    return next((kind for kind, pattern in _OPERATORS.items() if pattern.match(bare)), "other")
