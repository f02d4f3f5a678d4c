#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make small models on the spot: trained on bytes of text, or random in known shapes.

    python3 tiny_models.py DIR [--only NAME ...] [--seconds 50] [--text FOLDER]

The trained ones know enough of Python files for margins like those of real models, and
what a test damages (windows, sinks, heads) matters to them. Their ids are bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file


@dataclasses.dataclass(frozen=True)
class Shape:
    """A dense decoder; ``windows`` and ``sinks`` repeat over the layers."""

    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False
    trained: bool = False
    rope: float = 10000.0
    tokenizer: bool = True

    def window(self, layer: int) -> int | None:
        return self.windows[layer % len(self.windows)]


SHAPES = {
    "bytes-window": Shape("llama", 384, 4, 6, 2, 64, 256, (16, None), trained=True),
    "bytes-sinks": Shape("llama", 384, 4, 6, 2, 64, 256, (128, None), True, trained=True),
    # Small enough for Triton's interpreter; windows and sinks at once.
    "bytes-tiny": Shape("llama", 128, 2, 2, 1, 64, 256, (16, None), True, trained=True),
    "qwen3-like": Shape("qwen3", 1024, 4, 16, 8, 128, 8192, rope=1e6),
    # This one without a tokenizer: the harness takes bytes then.
    "gptoss-like": Shape(
        "llama", 1024, 4, 16, 2, 64, 8192, (128, None), True, rope=150000.0, tokenizer=False
    ),
    "gemma3-like": Shape("gemma3", 1024, 6, 4, 2, 256, 8192, (128,) * 5 + (None,)),
}


def config(shape: Shape, sinks: list[list[float]] | None) -> dict:
    """Return a config.json."""
    types = [
        "full_attention" if shape.window(i) is None else "sliding_attention"
        for i in range(shape.layers)
    ]
    out: dict = dict(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        attention_bias=False,
        rope_theta=shape.rope,
        hidden_act="silu",
    )
    if shape.kind == "llama":
        out |= dict(architectures=["LlamaForCausalLM"], model_type="llama")
    elif shape.kind == "qwen3":
        out |= dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    else:
        rope = {"rope_type": "default", "rope_theta": shape.rope}
        out |= dict(
            architectures=["Gemma3ForCausalLM"],
            model_type="gemma3_text",
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=shape.head,
            rope_parameters={"sliding_attention": rope, "full_attention": rope},
        )
    if "sliding_attention" in types:
        out |= dict(layer_types=types, sliding_window=min(w for w in shape.windows if w))
    if sinks:
        out["attention_sinks"] = sinks
    return out


def random_weights(shape: Shape, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Weights that make attention matter and leave the next token open."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        out = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        return out.normal_(0.0, gain * columns**-0.5, generator=generator)

    gemma = shape.kind == "gemma3"
    one = torch.zeros if gemma else torch.ones  # Gemma's gain is 1 + weight
    h, out = shape.hidden, {}

    def norm(width: int) -> torch.Tensor:
        return one(width, device=device, dtype=torch.bfloat16)

    # Gemma multiplies embeddings by sqrt(hidden).
    out["model.embed_tokens.weight"] = draw(shape.vocabulary, h, 1.0 if gemma else h**0.5)
    out["lm_head.weight"] = draw(shape.vocabulary, h, 2.0)
    out["model.norm.weight"] = norm(h)
    # A norm of queries and keys takes their gain away, so there it is the norm's.
    normed = shape.kind != "llama"
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        out[at + "self_attn.q_proj.weight"] = draw(shape.heads * shape.head, h, 2.0)
        out[at + "self_attn.k_proj.weight"] = draw(shape.kv_heads * shape.head, h)
        out[at + "self_attn.v_proj.weight"] = draw(shape.kv_heads * shape.head, h)
        out[at + "self_attn.o_proj.weight"] = draw(h, shape.heads * shape.head)
        if normed:
            out[at + "self_attn.q_norm.weight"] = norm(shape.head) + 1.0
            out[at + "self_attn.k_norm.weight"] = norm(shape.head)
        out[at + "mlp.gate_proj.weight"] = draw(3 * h, h)
        out[at + "mlp.up_proj.weight"] = draw(3 * h, h)
        out[at + "mlp.down_proj.weight"] = draw(h, 3 * h)
        out[at + "input_layernorm.weight"] = norm(h)
        out[at + "post_attention_layernorm.weight"] = norm(h)
        if gemma:
            out[at + "pre_feedforward_layernorm.weight"] = norm(h)
            out[at + "post_feedforward_layernorm.weight"] = norm(h)
    return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def forward(shape: Shape, w: dict, sinks: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a llama-shaped model, ids [batch, length]; sinks [layers, heads]."""
    batch, length = ids.shape
    half = shape.head // 2
    frequencies = shape.rope ** -(torch.arange(half, device=ids.device) / half)
    angles = torch.arange(length, device=ids.device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    past = torch.arange(length, device=ids.device)
    past = past[:, None] - past[None]
    x = w["model.embed_tokens.weight"][ids]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], 1e-6)

    for i in range(shape.layers):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm.weight")

        def heads(name: str, y=y, at=at) -> torch.Tensor:
            z = F.linear(y, w[at + f"self_attn.{name}_proj.weight"])
            return z.view(batch, length, -1, shape.head).transpose(1, 2)

        q, k, v = heads("q"), heads("k"), heads("v")
        q, k = _rotate(q, cos, sin).to(v.dtype), _rotate(k, cos, sin).to(v.dtype)
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        hidden = past < 0
        window = shape.window(i)
        if window is not None:
            hidden = hidden | (past >= window)
        scores = (q @ k.transpose(-1, -2)).float() * shape.head**-0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks[i].float()[None, :, None, None].expand(batch, -1, length, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        y = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + F.linear(y, w[at + "self_attn.o_proj.weight"])
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = F.silu(F.linear(y, w[at + "mlp.gate_proj.weight"]))
        y = gate * F.linear(y, w[at + "mlp.up_proj.weight"])
        x = x + F.linear(y, w[at + "mlp.down_proj.weight"])
    return F.linear(norm(x, "model.norm.weight"), w["lm_head.weight"])


def corpus(folder: Path, most: int = 32 << 20) -> torch.Tensor:
    """Bytes of text files below a folder, in a fixed order."""
    found = bytearray()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.md")]):
        found += path.read_bytes() + b"\n\n"
        if len(found) > most:
            break
    if len(found) < 1 << 16:
        raise SystemExit(f"{folder} has too little text")
    return torch.frombuffer(found, dtype=torch.uint8)


def train(shape: Shape, text: torch.Tensor, seconds: float, device: str, log) -> tuple:
    """Train for some seconds; return weights, sinks and the last loss in nats a byte."""
    torch.manual_seed(0)
    length, batch = (1024, 16) if device == "cuda" else (160, 8)
    w = {k: v.float() for k, v in random_weights(shape, 0, device).items()}
    for name in w:
        if name.endswith("proj.weight") or "embed" in name or "lm_head" in name:
            w[name].normal_(0.0, 0.02)
    sinks = torch.zeros(shape.layers, shape.heads, device=device) if shape.sinks else None
    parameters = [*w.values(), *([] if sinks is None else [sinks])]
    for p in parameters:
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, 1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    text = text.to(device)
    begin, step, loss = time.monotonic(), 0, math.inf
    while (spent := time.monotonic() - begin) < seconds:
        share = spent / seconds
        rate = 2e-3 * min(1.0, (step + 1) / 100) * (1.0 - 0.95 * share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(text) - length - 1, (batch, 1), device=device)
        rows = text[starts + torch.arange(length + 1, device=device)].long()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = forward(shape, w, sinks, rows[:, :-1])
        value = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            loss = float(value.detach())
            log(f"step {step}, {loss:.3f} nats a byte, {spent:.0f} s")
    weights = {k: v.detach().to(torch.bfloat16) for k, v in w.items()}
    return weights, None if sinks is None else sinks.detach().tolist(), float(value.detach())


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose ids are the bytes of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel's alphabet: printable bytes stand for themselves, others are moved up.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(moved)}
    tokenizer = Tokenizer(models.BPE(vocab={names[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def make(name: str, folder: Path, seconds: float, text: Path | None, device: str) -> None:
    """Write one model; nothing is there until it is whole."""
    shape = SHAPES[name]
    begin = time.monotonic()

    def log(line: str) -> None:
        print(f"{name}: {line}", flush=True)

    loss = None
    if shape.trained:
        assert text is not None
        weights, sinks, loss = train(shape, corpus(text), seconds, device, log)
    else:
        weights = random_weights(shape, 1, device)
        span = torch.linspace(-2, 3, shape.heads).tolist()
        sinks = [span] * shape.layers if shape.sinks else None
    work = folder / f".{name}.{os.getpid()}"
    work.mkdir(parents=True)
    tensors = {k: v.cpu().contiguous() for k, v in weights.items()}
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    (work / "config.json").write_text(json.dumps(config(shape, sinks), indent=1))
    if shape.tokenizer:
        write_tokenizer(work)
    (work / "loss.json").write_text(json.dumps({"nats_per_byte": loss}))
    os.rename(work, folder / name)
    log(f"made in {time.monotonic() - begin:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--seconds", type=float, default=50.0, help="of training, each")
    parser.add_argument("--text", type=Path, help="folder of Python files to train on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        if SHAPES[name].trained and args.text is None:
            parser.error(f"{name} is trained: say --text FOLDER")
        if not (args.folder / name).exists():
            make(name, args.folder, args.seconds, args.text, args.device)


if __name__ == "__main__":
    main()
