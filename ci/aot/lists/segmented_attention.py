"""The segmented attention kernels (``ROCM_SEGMENTED_ATTN``) for common models.

A variant is one kind of attention layer. It is warmed up by the tree's own start-up code
(``rocm_segmented_attn_warmup``) on the tree's own layer class, so that what is compiled is what
an engine reaches: every query length, batch and context. The serving limits (sequences, tokens,
context) change grids and scratch, but no code; tensor parallelism, KV dtype and page size do.

The cache is a view of one large allocation, as vLLM 0.31.0 makes it for all layers, within 2 GiB
for a layer. Queries are taken both as a slice of a fused projection and on their own, unless the
model normalises them, which always gives the latter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from ci.aot.model import KernelList, Variant
from ci.aot.models import MODELS, Model

# Where the backend is offered, with the work-group processors that HIP reports for the card
# (AMD's product pages): they decide about grids and scratch, not about code.
COMPUTE_UNITS = {"gfx1100": 48, "gfx1151": 20, "gfx1201": 32}
KERNELS = (
    "_schedule_items_kernel",
    "_schedule_segments_kernel",
    "_segmented_attention_kernel",
    "_combine_kernel",
)
POOL_BYTES = 8 << 30
LAYER_BYTES = 1 << 30


def variants_of(models: Iterable[Model], arch: str) -> list[Variant]:
    """All variants of models for an architecture; none where the backend is not offered."""
    result: dict[str, Variant] = {}
    for model in models if arch in COMPUTE_UNITS else ():
        for parallel in model.tensor_parallel:
            for window in model.windows:
                for page in model.pages:
                    for kv_dtype in model.kv_dtypes:
                        if kv_dtype == "fp8" and not arch.startswith("gfx120"):
                            continue
                        name = model.name + (f"-tp{parallel}" if parallel > 1 else "")
                        name += f"-w{window}" if window else ""
                        name += f"-p{page}" if page != 16 else ""
                        name += f"-kv{kv_dtype}" if kv_dtype != "auto" else ""
                        result[name] = Variant(
                            name,
                            KERNELS,
                            {
                                "heads": model.heads // parallel,
                                # KV heads are replicated where there are fewer than GPUs.
                                "kv_heads": max(1, model.kv_heads // parallel),
                                "head_size": model.head_size,
                                "window": window or None,
                                "sinks": model.sinks,
                                "softcap": model.softcap,
                                "normed": model.normed,
                                "page": page,
                                "kv_dtype": kv_dtype,
                            },
                        )
    return list(result.values())


def launch(module: Any, variant: Variant, arch: str) -> None:
    """Make a layer with meta tensors and let the tree's start-up code warm it up."""
    torch = importlib.import_module("torch")
    warmup = importlib.import_module("vllm.model_executor.warmup.rocm_segmented_attn_warmup")
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    module._compute_units = lambda: COMPUTE_UNITS[arch]
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("meta"))
    params: Mapping[str, Any] = variant.params
    heads, kv_heads, size = params["heads"], params["kv_heads"], params["head_size"]
    torch.set_default_dtype(torch.bfloat16)

    def empty(*shape: int, kind: Any) -> Any:
        return torch.empty(shape, dtype=kind, device="meta")

    impl = module.RocmSegmentedAttentionImpl(
        num_heads=heads,
        head_size=size,
        scale=size**-0.5,
        num_kv_heads=kv_heads,
        alibi_slopes=None,
        sliding_window=params["window"],
        kv_cache_dtype=params["kv_dtype"],
        logits_soft_cap=params["softcap"] or None,
        sinks=empty(heads, kind=torch.bfloat16) if params["sinks"] else None,
    )
    dense = (heads * size, size, 1)
    impl.query_layouts = {module.QueryLayout(dense, dense)}
    if not params["normed"]:
        fused = ((heads + 2 * kv_heads) * size, size, 1)
        impl.query_layouts.add(module.QueryLayout(fused, dense))
    kind = torch.uint8 if params["kv_dtype"] == "fp8" else torch.bfloat16
    block = params["page"] * kv_heads * 2 * size
    cache = empty(POOL_BYTES // kind.itemsize, kind=kind).as_strided(
        (LAYER_BYTES // kind.itemsize // block, kv_heads, params["page"], 2 * size),
        (block, 2 * size, kv_heads * 2 * size, 1),
        0,
    )
    scale = empty(kind=torch.float32)
    layer = SimpleNamespace(
        impl=impl, kv_cache=cache, layer_name=variant.name, _k_scale=scale, _v_scale=scale
    )
    if warmup.warm_up_layers([layer]) != 1:
        raise ValueError(f"the backend does not run {variant.name}: {impl.layer_reason}")


def kernel_list(name: str, models: Iterable[Model]) -> KernelList:
    """Make the list of some models.

    Args:
        name: The list's name.
        models: The models.

    Returns:
        The list.
    """
    chosen = tuple(models)
    return KernelList(
        name=name,
        module="vllm.v1.attention.backends.rocm_segmented_attn",
        variants=lambda arch: variants_of(chosen, arch),
        launch=launch,
        kv_tile={"_segmented_attention_kernel": "TILE_N"},
    )


LIST = kernel_list("segmented_attention", MODELS)
