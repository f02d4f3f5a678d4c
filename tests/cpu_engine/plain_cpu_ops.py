# SPDX-License-Identifier: Apache-2.0
"""vLLM's compiled CPU ops of a dense decoder in plain PyTorch.

With this folder on PYTHONPATH (it is a plugin of vLLM's, see the dist-info beside) and
VLLM_TARGET_DEVICE=cpu the engine runs from its Python tree alone, in float32, eager and
with ``custom_ops: ["none"]``. Right and slow: it shows that what drives the engine works.

HIPSTACK_TEST_GPU_BACKENDS=1 with TRITON_INTERPRET=1 admits Triton attention backends, and
HIPSTACK_TEST_HIPDNN=1 puts the stand-in hipDNN library of the patches' tests under HIPDNN
(the source tree's root must be on PYTHONPATH).
"""

import os

import torch

_library = torch.library.Library("_C", "FRAGMENT")


def _define(signature: str):
    def register(function):
        if not hasattr(torch.ops._C, signature.partition("(")[0]):
            _library.define(signature)
            _library.impl(signature.partition("(")[0], function, "CompositeExplicitAutograd")
        return function

    return register


@_define("init_cpu_memory_env(int[] nodes) -> ()")
def init_cpu_memory_env(nodes):
    return None


@_define("cpu_attn_has_isa(str isa) -> bool")
def cpu_attn_has_isa(isa):
    return False


@_define(
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, "
    "Tensor block_table, Tensor(a!) slot_mapping, int block_size) -> ()"
)
def compute_slot_mapping(query_start_loc, positions, block_table, slot_mapping, block_size):
    lengths = query_start_loc.diff().long()
    tokens = int(query_start_loc[-1])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    at = positions[:tokens].long()
    blocks = block_table[rows, at // block_size].long()
    slot_mapping[:tokens] = blocks * block_size + at % block_size


@_define(
    "get_scheduler_metadata(int num_reqs, int num_heads, int num_kv_heads, int head_dim, "
    "Tensor seq_lens, ScalarType dtype, Tensor query_start_loc, bool causal, int window, "
    "str isa, bool enable_kv_split, Tensor? dynamic_causal, str kv_cache_dtype) -> Tensor"
)
def get_scheduler_metadata(*arguments):
    return torch.empty(0, dtype=torch.int8)


@_define(
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor slot_mapping, str isa, float k_scale, float v_scale, "
    "str kv_cache_dtype) -> ()"
)
def reshape_and_cache(
    key, value, key_cache, value_cache, slot_mapping, isa, k_scale, v_scale, kv_cache_dtype
):
    """Caches are [blocks, heads, slots, head_dim]."""
    size = key_cache.shape[2]
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    tokens = key[: len(slot_mapping)][real], value[: len(slot_mapping)][real]
    key_cache[slots // size, :, slots % size] = tokens[0]
    value_cache[slots // size, :, slots % size] = tokens[1]


@_define(
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor(a!) output, Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, "
    "Tensor? alibi_slopes, int sliding_window, Tensor block_table, float softcap, "
    "Tensor scheduler_metadata, Tensor? s_aux, Tensor? dynamic_causal, float k_scale, "
    "float v_scale, str kv_cache_dtype) -> ()"
)
def attention(
    query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal,
    alibi_slopes, sliding_window, block_table, softcap, scheduler_metadata, s_aux,
    dynamic_causal, k_scale, v_scale, kv_cache_dtype,
):  # fmt: skip
    heads, size = query.shape[1], key_cache.shape[2]
    group = heads // key_cache.shape[1]
    for row in range(len(seq_lens)):
        begin, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        length = int(seq_lens[row])
        if begin == end or not length:
            continue
        blocks = block_table[row, : -(-length // size)].long()
        keys = key_cache[blocks].transpose(1, 2).flatten(0, 1)[:length].float()
        values = value_cache[blocks].transpose(1, 2).flatten(0, 1)[:length].float()
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - (end - begin), length)[:, None]
        past = at - torch.arange(length)[None]
        hidden = (past < 0) if causal else torch.zeros_like(past, dtype=torch.bool)
        if sliding_window > 0:
            hidden |= past >= sliding_window
        scores.masked_fill_(hidden, -torch.inf)
        if s_aux is not None:
            sink = s_aux.float()[:, None, None].expand(-1, end - begin, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        output[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(output.dtype)


def _allow_gpu_backends() -> None:
    """Let the selector take Triton backends here, whose kernels Triton interprets."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plain = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls, selected_backend, *args, **kwargs):
        names = ("TRITON_ATTN", "HIPDNN", "ROCM_SEGMENTED_ATTN")
        if selected_backend is not None and selected_backend.name in names:
            if selected_backend is AttentionBackendEnum.ROCM_SEGMENTED_ATTN:
                from vllm.v1.attention.backends import rocm_segmented_attn
                from vllm.v1.worker import workspace

                rocm_segmented_attn.current_arch = lambda: os.environ["FAKE_GFX"]
                if not workspace.is_workspace_manager_initialized():
                    workspace.init_workspace_manager(torch.device("cpu"))
            return selected_backend.get_path()
        return plain(cls, selected_backend, *args, **kwargs)

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    # Launchers ask it to choose tiles.
    torch.cuda.get_device_capability = lambda *_: (12, 0)


def _take_standin_hipdnn() -> None:
    """Put the hipDNN patches' stand-in library under the runtime, on host memory."""
    from tests.hipdnn.support import StandIn
    from vllm.hipdnn.routes import Routes
    from vllm.hipdnn.runtime import ALL_OPS, Runtime, set_runtime

    standin = StandIn()
    standin.configure()
    set_runtime(Runtime(standin.open(), Routes(), ALL_OPS, host_memory=True))


def register() -> None:
    """Do what the environment asks for; the ops are defined by now."""
    if os.environ.get("HIPSTACK_TEST_GPU_BACKENDS"):
        _allow_gpu_backends()
    if os.environ.get("HIPSTACK_TEST_HIPDNN"):
        _take_standin_hipdnn()
