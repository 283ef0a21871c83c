"""Classes of kernels and operators, on names as profilers print them."""

from __future__ import annotations

import pytest

from fivetune.machine.profiling.kernels import CLASSES, classify_kernel, classify_operator

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, {}, std::array<char*, 3ul> >(int, {}, std::array<char*"
KERNELS = {
    "GEMM": (
        "ampere_sgemm_128x64_tn",
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_tn",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nt_align1>(Params)",
        "void cutlass::Kernel<cutlass_80_tensorop_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x6_nn>(Params)",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(cublasSplitKParams<float>)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(cublasGemvParamsEx)",
        "triton_tem_fused_mm_0",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 64>>(Flash_fwd_params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_7_64x64x64_4x1x1_kernel0_0",
        "grad_kv",
    ),
    "pointwise": (
        ELEMENTWISE.replace("{}", "at::native::CUDAFunctor_add<float>"),
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::BinaryFunctor<float>>>()",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(int)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamFunctor>()",
        "triton_poi_fused_add_relu_3",
        "_activated_backward",
    ),
    "reduce": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(int)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*, float const*)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor>()",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long const*)",
        "triton_red_fused_sum_2",
        "_square_sums",
    ),
    "copy": (
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy DtoD (Device -> Device)",
        "[CUDA memcpy Host-to-Device]",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIterator&)>()",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 4, 64, 64>(float*)",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>()",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_impl>>()",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
    ),
    "memory set": ("Memset (Device)", ELEMENTWISE.replace("{}", "at::native::FillFunctor<float>")),
    "other": ("void my_own_thing<int>(int*)",),
}
OPERATORS = {
    "GEMM": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::mkldnn_convolution"),
    "attention": ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    "pointwise": ("aten::add_", "aten::_foreach_addcdiv_", "aten::native_dropout", "aten::_fused_adamw_", "aten::mul"),
    "reduce": ("aten::sum", "aten::_softmax", "aten::_log_softmax_backward_data", "aten::_foreach_norm",
               "aten::embedding_dense_backward", "aten::index_add_"),
    "copy": ("aten::copy_", "aten::_to_copy", "aten::index_select", "aten::cat", "aten::clone"),
    "communication": ("c10d::allreduce_", "nccl:all_reduce", "gloo:all_reduce"),
    "memory set": ("aten::zero_", "aten::fill_", "aten::zeros_like"),
    "other": ("aten::view", "aten::empty", "autograd::engine::evaluate_function: MmBackward0", "RmsNorm", "aten::t"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kernels_by_name(kind, name):
    assert classify_kernel(name) == kind


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OPERATORS.items() for name in names])
def test_operators_by_name(kind, name):
    assert classify_operator(name) == kind


def test_every_class_has_names_of_both_kinds():
    assert set(KERNELS) == set(OPERATORS) == set(CLASSES)
