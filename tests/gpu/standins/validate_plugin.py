# SPDX-License-Identifier: Apache-2.0
"""For tests of ci.validate: attention sinks in dense models, and damaged attention.

A plugin of vLLM's (see the dist-info beside), inert unless asked:

* a model whose config.json has ``attention_sinks`` (for each layer one value a head) gets
  them in its attention layers; vLLM's own models with sinks have experts, which would need
  compiled ops
* HIPSTACK_TEST_DAMAGE makes ROCM_SEGMENTED_ATTN wrong: ``window`` (one key less),
  ``sink`` (dropped), ``head`` (the second head gives the first one's output)
"""

import functools
import inspect
import os

DAMAGES = ("window", "sink", "head")


def _damaged_init(plain, kind: str):
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def init(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        window = bound.arguments.get("sliding_window")
        if kind == "window" and window is not None:
            bound.arguments["sliding_window"] = window - 1
        if kind == "sink":
            bound.arguments["sinks"] = None
        plain(*bound.args, **bound.kwargs)

    return init


def _damaged_forward(plain):
    @functools.wraps(plain)
    def forward(self, layer, query, key, value, cache, metadata, output, *args, **kwargs):
        result = plain(self, layer, query, key, value, cache, metadata, output, *args, **kwargs)
        heads = output.view(output.shape[0], self.num_heads, self.head_size)
        heads[:, 1].copy_(heads[:, 0])
        return result

    return forward


@functools.cache
def damage(kind: str) -> None:
    """Make the segmented backend wrong in one way."""
    if kind not in DAMAGES:
        raise ValueError(f"HIPSTACK_TEST_DAMAGE={kind}: known are {', '.join(DAMAGES)}")
    from vllm.v1.attention.backends.rocm_segmented_attn import RocmSegmentedAttentionImpl

    if kind == "head":
        RocmSegmentedAttentionImpl.forward = _damaged_forward(RocmSegmentedAttentionImpl.forward)
    else:
        plain = RocmSegmentedAttentionImpl.__init__
        RocmSegmentedAttentionImpl.__init__ = _damaged_init(plain, kind)


def register() -> None:
    """Hook into attention layers, which are made after all plugins are loaded."""
    from vllm.model_executor.layers.attention import attention

    plain = attention.Attention.__init__
    if getattr(plain, "hipstack_test", False):
        return

    @functools.wraps(plain)
    def init(self, num_heads, *args, prefix="", **kwargs):
        import torch
        from vllm.config import get_current_vllm_config

        if kind := os.environ.get("HIPSTACK_TEST_DAMAGE"):
            damage(kind)
        model = get_current_vllm_config().model_config
        sinks = getattr(getattr(model, "hf_config", None), "attention_sinks", None)
        if sinks:
            layer = int(prefix.split("layers.")[1].split(".")[0])
            kwargs["sinks"] = torch.tensor(sinks[layer])
        plain(self, num_heads, *args, prefix=prefix, **kwargs)

    init.hipstack_test = True
    attention.Attention.__init__ = init
