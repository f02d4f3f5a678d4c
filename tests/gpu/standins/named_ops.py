# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM's compiled ops that are looked up when modules are imported.

vLLM's compile passes, which a draft model's loader imports, name the ops that they
would fuse. None of them runs where nothing is compiled, so they are declared as
vLLM declares them and have no body: a call fails.
"""

import torch

SIGNATURES = (
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, "
    "int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, "
    "Tensor! scale, Tensor? scale_ub) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, "
    "Tensor scale, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, "
    "Tensor! residual, Tensor weight, Tensor scale, float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, "
    "Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, "
    "int group_size, Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, "
    "int num_heads_v, int head_dim, float eps, Tensor q_weight, Tensor k_weight, "
    "Tensor cos_sin_cache, bool is_neox, Tensor position_ids, "
    "int forced_token_heads_per_warp=-1) -> ()",
)

_library = torch.library.Library("_C", "FRAGMENT")
for _signature in SIGNATURES:
    if not hasattr(torch.ops._C, _signature.partition("(")[0]):
        _library.define(_signature)
