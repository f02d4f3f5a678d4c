# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled ops of a decoder, dense or of experts, in plain PyTorch.

They let a python tree without compiled extensions run on a GPU. They are right and
slow: good for comparing attention backends with each other, and for nothing else.
"""

import torch
import torch.nn.functional as F

_libraries = {name: torch.library.Library(name, "FRAGMENT") for name in ("_C", "_moe_C")}


def _define(signature: str, library: str = "_C"):
    """Register the function below unless something else has already done so."""

    def register(function):
        name = signature.partition("(")[0]
        if not hasattr(getattr(torch.ops, library), name):
            _libraries[library].define(signature)
            if function is not None:
                _libraries[library].impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def _gated(activation):
    def op(out, x):
        gate, up = x.chunk(2, dim=-1)
        out.copy_(activation(gate) * up)

    return op


_define("silu_and_mul(Tensor! out, Tensor input) -> ()")(_gated(F.silu))
_define("gelu_and_mul(Tensor! out, Tensor input) -> ()")(_gated(F.gelu))
_define("gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()")(
    _gated(lambda x: F.gelu(x, approximate="tanh"))
)


def _normalized(x, weight, epsilon):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    narrow = wide.to(x.dtype)
    return narrow if weight is None else narrow * weight


@_define("rms_norm(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()")
def rms_norm(out, x, weight, epsilon):
    """Out = norm(x) * weight."""
    out.copy_(_normalized(x, weight, epsilon))


@_define("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()")
def fused_add_rms_norm(x, residual, weight, epsilon):
    """Residual += x; x = norm(residual) * weight."""
    residual.add_(x)
    x.copy_(_normalized(residual, weight, epsilon))


@_define(
    "rotary_embedding(Tensor positions, Tensor! query, Tensor(a!)? key, "
    "int head_size, Tensor cos_sin_cache, bool is_neox) -> ()"
)
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Rotate the leading channels of each head in place."""
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, dim=-1)
    cos, sin = cos[:, None].to(query.dtype), sin[:, None].to(query.dtype)
    half = cos.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        if is_neox:
            first, second = heads[..., :half], heads[..., half : 2 * half]
        else:
            first, second = heads[..., : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        rotated = first * cos - second * sin, second * cos + first * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])


@_define("weak_ref_tensor(Tensor(a) input) -> Tensor(a)")
def weak_ref_tensor(x):
    """A view; it keeps the memory, which a test can afford."""
    return x.view_as(x)


# vllm.compilation looks these up when it is imported, as it is for a draft model. With
# compilation off nothing calls them.
for _signature in (
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, "
    "int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, "
    "Tensor? scale_ub) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, "
    "int group_size, Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, "
    "Tensor weight, Tensor scale, float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, "
    "Tensor! scale, float epsilon, Tensor? scale_ub, Tensor!? residual) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, "
    "int head_dim, float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, "
    "bool is_neox, Tensor position_ids, int forced_token_heads_per_warp=-1) -> ()",
):
    _define(_signature)(None)


@_define("swigluoai_and_mul(Tensor! out, Tensor input, float alpha=1.702, float limit=7.0) -> ()")
def swigluoai_and_mul(out, x, alpha=1.702, limit=7.0):
    """Gate and up alternate along the last dimension."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    out.copy_((up + 1) * gate * torch.sigmoid(gate * alpha))


@_define(
    "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
    "Tensor gating_output, bool renormalize, Tensor? bias, Tensor? is_padding) -> ()",
    "_moe_C",
)
def topk_softmax(weights, indices, rows, gating, renormalize, bias, is_padding):
    """The experts with the largest probabilities, `bias` added for the choice alone."""
    probability = gating.float().softmax(-1)
    choice = probability if bias is None else probability + bias
    best = choice.topk(weights.shape[-1], dim=-1).indices
    chosen = probability.gather(-1, best)
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    weights.copy_(chosen)
    indices.copy_(best)


@_define(
    "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, "
    "Tensor! sorted_token_ids, Tensor! experts_ids, Tensor! num_tokens_post_pad, "
    "Tensor? maybe_expert_map, Tensor(a!)? scatter_idx=None) -> ()",
    "_moe_C",
)
def moe_align_block_size(
    topk_ids, num_experts, block_size, sorted_ids, expert_ids, total, expert_map, scatter=None
):
    """Group the routed rows by expert, each group padded to whole blocks; no host sync."""
    if expert_map is not None or scatter is not None:
        raise NotImplementedError("stand-in for one rank and the plain layout only")
    expert = topk_ids.flatten().long()
    order = expert.argsort(stable=True)
    count = torch.zeros(num_experts, dtype=torch.long, device=expert.device)
    count.scatter_add_(0, expert, torch.ones_like(expert))
    padded = (count + block_size - 1) // block_size * block_size
    end, padded_end = count.cumsum(0), padded.cumsum(0)
    by_expert = expert[order]
    rank = torch.arange(expert.numel(), device=expert.device) - (end - count)[by_expert]
    sorted_ids.fill_(expert.numel())
    sorted_ids[(padded_end - padded)[by_expert] + rank] = order.to(sorted_ids.dtype)
    first = torch.arange(expert_ids.numel(), device=expert.device) * block_size
    owner = torch.searchsorted(padded_end, first, right=True)
    expert_ids.copy_(owner.clamp(max=num_experts - 1))
    total.copy_(padded_end[-1:])


@_define(
    "moe_sum(Tensor input, Tensor! output, Tensor? topk_ids=None, Tensor? expert_map=None) -> ()",
    "_moe_C",
)
def moe_sum(x, out, topk_ids=None, expert_map=None):
    """Add up what the experts of a token gave."""
    out.copy_(x.sum(dim=1))
