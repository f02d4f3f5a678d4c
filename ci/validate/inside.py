"""What works inside of vLLM's processes, through its official extension points.

`ForcedTokens` (``logits_processors``) makes a sequence go on with given tokens after the raw
logits were recorded, and watches those logits.  `Extension` (``worker_extension_cls``) gives
each worker a method that says what ran where.
"""

import sys
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from ci.validate.engine import FORCED

_watchers: "list[ForcedTokens]" = []


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]
    """Force the tokens in ``extra_args`` of a request, one a step; watch all logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._forced: dict[int, tuple[list[int], list[int]]] = {}
        self._device = device
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.largest = torch.zeros((), dtype=torch.float64, device=device)
        self.rows = 0
        _watchers.append(self)

    def is_argmax_invariant(self) -> bool:
        """Tell that greedy sampling depends on it."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests through the batch."""
        process_dict_updates(self._forced, batch_update, self._add)

    @staticmethod
    def _add(
        params: Any, _: list[int] | None, output_ids: list[int]
    ) -> tuple[list[int], list[int]] | None:
        forced = (params.extra_args or {}).get(FORCED)
        return (forced, output_ids) if forced else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Watch the logits, [requests, vocabulary]; leave only the forced tokens."""
        self.bad += (~torch.isfinite(logits)).any(dim=-1).sum()
        self.largest += logits.abs().amax(dim=-1).nan_to_num(0.0, 0.0, 0.0).double().sum()
        self.rows += logits.shape[0]
        rows, tokens = [], []
        for row, (forced, done) in self._forced.items():
            if row < logits.shape[0] and len(done) < len(forced):
                rows.append(row)
                tokens.append(forced[len(done)])
        if rows:
            at = torch.tensor(rows, device=self._device)
            logits[at] = -torch.inf
            logits[at, torch.tensor(tokens, device=self._device)] = 0.0
        return logits


class Extension:
    """Methods that ``collective_rpc`` reaches in each worker."""

    def hipstack_validate_report(self) -> dict[str, Any]:
        """Return what this worker's layers run on, what was declined, and what it saw.

        Returns:
            ``layers`` (name, kind, backend, description), ``paths`` of ROCM_SEGMENTED_ATTN,
            ``hipdnn`` (its coverage report), ``norms`` (provider priorities), ``bad_rows``,
            ``largest_logit``, ``logit_rows``, ``memory`` (peak bytes).
        """
        config = self.vllm_config  # type: ignore[attr-defined]
        layers = []
        for name, layer in config.compilation_config.static_forward_context.items():
            backend = getattr(layer, "attn_backend", None)
            if backend is None:
                continue
            impl = getattr(layer, "impl", None)
            # Hybrid models have state-space layers beside attention, on backends of their own.
            entry = {
                "name": name,
                "kind": "attention" if isinstance(layer, Attention) else type(layer).__name__,
                "backend": backend.get_name(),
                "impl": type(impl).__name__,
            }
            describe = getattr(impl, "describe", None)
            if describe is not None:
                entry["description"] = describe(config.cache_config.block_size)
            layers.append(entry)
        report: dict[str, Any] = {
            "layers": layers,
            "norms": {
                name: list(value)
                for name, value in vars(config.kernel_config.ir_op_priority).items()
                if isinstance(value, list)
            },
            "graphs": str(config.compilation_config.cudagraph_mode),
            "bad_rows": sum(int(w.bad) for w in _watchers),
            "largest_logit": sum(float(w.largest) for w in _watchers),
            "logit_rows": sum(w.rows for w in _watchers),
            "paths": None,
            "hipdnn": None,
        }
        if torch.cuda.is_available():
            report["memory"] = int(torch.cuda.max_memory_reserved())
        segmented = sys.modules.get("vllm.v1.attention.backends.rocm_segmented_attn")
        if segmented is not None:
            report["paths"] = segmented.path_counts()
        coverage = sys.modules.get("vllm.hipdnn.coverage")
        runtime = sys.modules.get("vllm.hipdnn.runtime")
        if coverage is not None and runtime is not None and runtime._runtime is not None:
            report["hipdnn"] = coverage.report(runtime._runtime)
        return report
