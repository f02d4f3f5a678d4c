"""Start one attention layer as an engine's worker does, on a machine without a GPU, and serve.

Run with the installed package first on the path, and a stand-in device library. Prints as JSON
how many kernels Triton compiled, and how many it found in its cache. The layer is Llama-3.2-1B's.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from ci.aot import driver

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 64, 16


def start(arch: str, config_dir: str) -> None:
    """Build the layer, profile, warm up, and serve a few batches."""
    from vllm import config as vllm_config
    from vllm.hipstack.prebuilt import install_prebuilt_kernels
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.warmup import rocm_segmented_attn_warmup as warmup
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker import workspace

    cpu = torch.device("cpu")
    Path(config_dir, "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": HEADS * SIZE,
                "num_hidden_layers": 1,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "max_position_embeddings": 32768,
                "torch_dtype": "bfloat16",
            }
        )
    )
    config = vllm_config.VllmConfig(
        model_config=vllm_config.ModelConfig(
            model=config_dir, skip_tokenizer_init=True, max_model_len=16384
        ),
        cache_config=vllm_config.CacheConfig(block_size=PAGE),
        scheduler_config=vllm_config.SchedulerConfig.default_factory(
            max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=16384
        ),
        attention_config=vllm_config.AttentionConfig(
            backend=AttentionBackendEnum.ROCM_SEGMENTED_ATTN
        ),
        compilation_config=vllm_config.CompilationConfig(mode=0, cudagraph_mode="NONE"),
    )
    workspace.init_workspace_manager(cpu)
    torch.set_default_dtype(torch.bfloat16)
    with vllm_config.set_current_vllm_config(config):
        layer = Attention(
            HEADS, SIZE, SIZE**-0.5, KV_HEADS, cache_config=config.cache_config, prefix="0.attn"
        )
        builder = layer.attn_backend.get_builder_cls()(
            layer.get_kv_cache_spec(config), ["0.attn"], config, cpu
        )
    block = PAGE * KV_HEADS * 2 * SIZE
    pool = torch.empty(1 << 32, dtype=torch.bfloat16, device="meta")
    layer.kv_cache = pool.as_strided(
        (5000, KV_HEADS, PAGE, 2 * SIZE), (block, 2 * SIZE, KV_HEADS * 2 * SIZE, 1), 7 * block
    )
    qkv = torch.empty(2048, (HEADS + 2 * KV_HEADS) * SIZE)
    ints = torch.zeros(256, dtype=torch.int32)

    def forward(tokens: int, metadata: object) -> None:
        query = qkv[:tokens].split([HEADS * SIZE, 2 * KV_HEADS * SIZE], dim=-1)[0]
        layer.impl.forward(
            layer, query.view(-1, HEADS, SIZE), None, None, layer.kv_cache, metadata,
            torch.empty(tokens, HEADS, SIZE),
        )  # fmt: skip

    forward(2048, None)
    install_prebuilt_kernels()
    warmup.rocm_segmented_attn_warmup(SimpleNamespace(vllm_config=config))
    for batch, length in ((1, 1), (3, 1), (64, 1), (2, 5), (1, 9), (1, 40), (1, 2048), (7, 33)):
        common = CommonAttentionMetadata(
            query_start_loc=ints[: batch + 1],
            query_start_loc_cpu=ints[: batch + 1],
            seq_lens=ints[:batch],
            seq_lens_cpu_upper_bound=ints[:batch],
            num_reqs=batch,
            num_actual_tokens=batch * length,
            max_query_len=length,
            max_seq_len=length + 100,
            block_table_tensor=ints.view(64, 4)[:batch],
            slot_mapping=torch.zeros(0, dtype=torch.int64),
        )
        forward(batch * length, builder.build(0, common))


def main() -> None:
    """Start for the architecture on the command line."""
    arch = sys.argv[1]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    driver.activate(driver.target_of(arch))
    import triton

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **report: hits.append(report["cache_hit"])
    with tempfile.TemporaryDirectory() as folder:
        start(arch, folder)
    print(json.dumps({"compiled": hits.count(False), "found": hits.count(True)}))


if __name__ == "__main__":
    main()
