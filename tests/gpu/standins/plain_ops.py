# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled ops of a dense decoder in plain PyTorch.

They let a python tree without compiled extensions run on a GPU. They are right and
slow: good for comparing attention backends with each other, and for nothing else.
"""

import torch
import torch.nn.functional as F

_library = torch.library.Library("_C", "FRAGMENT")


def _define(signature: str):
    """Register the function below unless something else has already done so."""

    def register(function):
        name = signature.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            _library.define(signature)
            _library.impl(name, function, "CompositeExplicitAutograd")
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


# Last, so that what has a body keeps it.
import named_ops  # noqa: E402, F401
