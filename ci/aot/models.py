"""The models whose attention kernels a wheel carries, and how to add one's own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ci.aot.model import AotError


@dataclass(frozen=True)
class Model:
    """What of a model decides about its attention kernels.

    Attributes:
        name: Shown in tables, with the window and so on appended.
        heads: Query heads before sharding.
        kv_heads: KV heads before sharding.
        head_size: Elements of a head.
        windows: Sliding windows of its kinds of layer, 0 for none.
        sinks: Whether it has attention sinks.
        softcap: Softcap of the logits, 0 for none.
        normed: Whether queries are normalised by head, and so lie on their own.
        tensor_parallel: Numbers of GPUs that it is spread over.
        pages: Page sizes.
        kv_dtypes: Cache dtypes; fp8 is left out where the hardware lacks it.
    """

    name: str
    heads: int
    kv_heads: int
    head_size: int
    windows: tuple[int, ...] = (0,)
    sinks: bool = False
    softcap: float = 0.0
    normed: bool = False
    tensor_parallel: tuple[int, ...] = (1,)
    pages: tuple[int, ...] = (16,)
    kv_dtypes: tuple[str, ...] = ("auto",)

    def describe(self) -> str:
        """Return one line on the model."""
        windows = "/".join(str(window) if window else "all" for window in self.windows)
        return (
            f"{self.name}: {self.heads}/{self.kv_heads} heads of {self.head_size}, "
            f"window {windows}, tp {_join(self.tensor_parallel)}, "
            f"page {_join(self.pages)}, kv {_join(self.kv_dtypes)}"
        )


def _join(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))


# From the models' published config.json. A model that equals another in all of this is served
# by the same code.  Pages of hybrid models: what vLLM chooses so that a page holds a state.
MODELS = (
    Model("qwen3-8b", 32, 8, 128, normed=True, kv_dtypes=("auto", "fp8")),  # and 4B
    Model("qwen3-14b", 40, 8, 128, normed=True, tensor_parallel=(1, 2)),
    Model("qwen3-32b", 64, 8, 128, normed=True, tensor_parallel=(1, 2)),
    Model("qwen3-30b-a3b", 32, 4, 128, normed=True),
    Model("qwen3-1.7b", 16, 8, 128, normed=True),  # and 0.6B
    Model("qwen3.5-27b", 24, 4, 256, normed=True, tensor_parallel=(1, 2), pages=(784, 1056)),
    Model("qwen3.5-35b-a3b", 16, 2, 256, normed=True, pages=(1056,)),  # and 3.6
    Model("llama-3.1-8b", 32, 8, 128),
    Model("llama-3.2-3b", 24, 8, 128),  # and Phi-4-mini
    Model("llama-3.2-1b", 32, 8, 64),
    Model("gemma-3-4b", 8, 4, 256, windows=(0, 1024), normed=True),
    Model("gemma-3-12b", 16, 8, 256, windows=(0, 1024), normed=True),
    Model("gemma-3-27b", 32, 16, 128, windows=(0, 1024), normed=True),
    Model("gpt-oss", 64, 8, 64, windows=(0, 128), sinks=True, tensor_parallel=(1, 2)),
    Model("phi-4", 40, 10, 128),
)

# Model types whose layers normalise queries by head.
_NORMED = re.compile(r"qwen3|gemma3|gemma4|olmo2|olmo3")
_KV_DTYPES = ("auto", "fp8")


def from_argument(text: str, base: Path = Path()) -> Model:
    """Read a model from the command line.

    Args:
        text: The path of a ``config.json``, then options by colons, each with values by commas:
            ``tp=1,2`` (tensor parallel sizes), ``kv=auto,fp8`` (cache dtypes) and
            ``page=16,1056`` (page sizes; of a hybrid model the one that vLLM's log names).
            Other serving limits change no code.
        base: The folder that a relative path starts from.

    Returns:
        The model, named after the folder of its config.

    Raises:
        AotError: The file or an option cannot be understood; the text says which.
    """
    path, *options = text.split(":")
    changes: dict[str, Any] = {}
    for option in options:
        name, _, value = option.partition("=")
        values = value.split(",")
        if name == "kv" and all(item in _KV_DTYPES for item in values):
            changes["kv_dtypes"] = tuple(values)
        elif name == "tp" and all(re.fullmatch("[1-9][0-9]*", item) for item in values):
            changes["tensor_parallel"] = tuple(map(int, values))
        elif name == "page" and all(
            re.fullmatch("[1-9][0-9]*", item) and int(item) % 16 == 0 for item in values
        ):
            changes["pages"] = tuple(map(int, values))
        else:
            raise AotError(
                f"{option!r}: options of a model are tp=1,2 kv=auto,fp8 page=16,1056 "
                "(pages are multiples of 16)"
            )
    model = replace(from_config(base / path), **changes)
    for parallel in model.tensor_parallel:
        if model.heads % parallel:
            raise AotError(f"{path}: {model.heads} heads cannot be spread over {parallel} GPUs")
    return model


def from_config(path: Path) -> Model:
    """Read what decides about attention from a model's ``config.json``.

    Args:
        path: The file, as it comes with the model.

    Returns:
        The model.

    Raises:
        AotError: It is not a decoder's configuration.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        heads = int(text["num_attention_heads"])
        size = int(text.get("head_dim") or text["hidden_size"] // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        kind = str(text.get("model_type") or config.get("model_type") or "")
        window = text.get("sliding_window") or 0
        if text.get("use_sliding_window") is False:
            window = 0
        layers = text.get("layer_types") or ()
        softcap = float(text.get("attn_logit_softcapping") or 0.0)
        window = int(window)
    except OSError as error:
        raise AotError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise AotError(f"{path}: not the configuration of a decoder: {error!r}") from error
    if min(heads, kv_heads, size) < 1 or heads % kv_heads:
        raise AotError(f"{path}: {heads} query heads do not divide over {kv_heads} KV heads")
    windows: tuple[int, ...] = (0,)
    if window:
        # Without a list of layers all of them have the window, or a pattern that is the
        # model code's own: both kinds then.
        windows = (0, window) if not layers or "full_attention" in layers else (window,)
    name = re.sub(r"[^a-z0-9.]+", "-", path.resolve().parent.name.lower()).strip("-") or "model"
    return Model(
        name=name,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        windows=windows,
        sinks=kind == "gpt_oss",
        softcap=softcap,
        normed=_NORMED.match(kind) is not None,
    )
