"""vLLM's Triton attention (``TRITON_ATTN``) for common head sizes.

Arguments are shaped as ``TritonAttentionImpl.forward`` passes them: query slices of a fused QKV
projection, a cache in which K and V of a head lie side by side, 0 as an *integer* for no softcap,
scales expanded from one element. What is not varied is a value that the engine nearly always has:
a block table width divisible by 16, a cache tensor within 2 GiB a layer, and a batch that is
neither 1 nor divisible by 16 (Triton specialises all of these). The kernel also takes the number
of query heads as a constant, so its code serves models with just these head counts; the resources
that it needs hardly depend on them.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

from ci.aot.model import KernelList, Variant

HEAD_SIZES = (64, 128, 256)
DTYPES = ("bf16", "fp16")
KV_HEADS = 8
GROUPS = (8, 4)  # query heads of a KV head
WINDOWS = (None, 128)
PAGE = 16

BATCH = 3
QUERY_TOKENS = 5  # of each request, where there is more than one
SEGMENTS = 16  # NUM_PAR_SOFTMAX_SEGMENTS of the backend
THRESHOLD_3D = 16  # MIN_LAUNCH_GRID_SIZE_2D // KV_HEADS
BLOCKS_PER_REQUEST = 512

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


def variants(arch: str) -> list[Variant]:
    """All variants for an architecture; an fp8 cache where the hardware converts it (gfx12)."""
    caches = (None, "fp8") if arch.startswith("gfx12") else (None,)
    result = []
    for mode, dtype, cache, size, group, window in itertools.product(
        ("decode", "multi"), DTYPES, caches, HEAD_SIZES, GROUPS, WINDOWS
    ):
        name = f"{mode}-{dtype}{f'-kv{cache}' if cache else ''}-d{size}-g{group}"
        name += f"-w{window}" if window else ""
        kernels = ["kernel_unified_attention"]
        if mode == "decode":
            kernels.append("reduce_segments")
        params = {
            "decode": mode == "decode",
            "dtype": dtype,
            "cache": cache or dtype,
            "head_size": size,
            "group": group,
            "window": window,
        }
        result.append(Variant(name, tuple(kernels), params))
    return result


def launch(module: Any, variant: Variant, arch: str) -> None:
    """Call ``unified_attention`` with meta tensors."""
    torch = importlib.import_module("torch")
    params = variant.params
    size, heads = params["head_size"], params["group"] * KV_HEADS
    dtype = getattr(torch, _DTYPES[params["dtype"]])
    cache_dtype = getattr(torch, _DTYPES[params["cache"]])
    query_tokens = 1 if params["decode"] else QUERY_TOKENS
    tokens = BATCH * query_tokens

    def empty(*shape: int, kind: Any) -> Any:
        return torch.empty(shape, dtype=kind, device="meta")

    qkv = empty(tokens, (heads + 2 * KV_HEADS) * size, kind=dtype)
    query = qkv[:, : heads * size].view(tokens, heads, size)
    pool = empty(64, KV_HEADS, PAGE, 2 * size, kind=cache_dtype).transpose(1, 2)
    key, value = pool.split(size, dim=-1)
    scale = empty(1, kind=torch.float32)
    window = params["window"]
    module.unified_attention(
        q=query,
        k=key,
        v=value,
        out=empty(tokens, heads, size, kind=dtype),
        cu_seqlens_q=empty(BATCH + 1, kind=torch.int32),
        max_seqlen_q=query_tokens,
        seqused_k=empty(BATCH, kind=torch.int32),
        max_seqlen_k=BLOCKS_PER_REQUEST * PAGE,
        softmax_scale=size**-0.5,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=empty(BATCH, BLOCKS_PER_REQUEST, kind=torch.int32),
        softcap=0,
        q_descale=None,
        k_descale=scale.expand(BATCH, KV_HEADS),
        v_descale=scale.expand(BATCH, KV_HEADS),
        seq_threshold_3D=THRESHOLD_3D,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=empty(THRESHOLD_3D, heads, SEGMENTS, size, kind=torch.float32),
        softmax_segm_max=empty(THRESHOLD_3D, heads, SEGMENTS, kind=torch.float32),
        softmax_segm_expsum=empty(THRESHOLD_3D, heads, SEGMENTS, kind=torch.float32),
        kv_quant_mode=module.KVQuantMode(1 if params["cache"] == "fp8" else 0),
    )


LIST = KernelList(
    name="unified_attention",
    module="vllm.v1.attention.ops.triton_unified_attention",
    variants=variants,
    launch=launch,
    kv_tile={"kernel_unified_attention": "TILE_SIZE"},
)
