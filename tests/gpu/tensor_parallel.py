#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The backends under tensor parallel, on two GPUs.

Models with random weights run on one GPU and on two, with ROCM_SEGMENTED_ATTN and
TRITON_ATTN: KV heads that are split and one that is replicated, eager and in graphs,
from cached prefixes, with a draft model on a backend of its own. Greedy tokens on two
GPUs are held against those on one; where they part, the margin between the two best
tokens says whether it was a tie. Then ranks tune with empty caches, start again from
the record, and lose a rank while they tune. Last, the throughput of an 8B-shaped model.

    python3 tensor_parallel.py parity tuning throughput [--budget 430]
    python3 tensor_parallel.py --dry-run    # builds every configuration; needs no GPU
    python3 tensor_parallel.py --list       # names for --only

Below two GPUs there is nothing to run, and it says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import engine_parity as parity

HERE = Path(__file__).resolve()
TESTED, BASE = parity.TESTED, parity.BASE
BACKENDS = (BASE, TESTED)
PARTS = ("parity", "tuning", "throughput")
NEW_TOKENS = 32

MODELS: dict[str, dict] = {
    "split": parity._qwen3(1024, 4, 16, 8, 128),
    # One KV head: both GPUs hold it.
    "replicated": parity._qwen3(1024, 4, 16, 1, 128),
    "draft": parity._qwen3(512, 2, 8, 4, 128),
    "8b": parity._qwen3(4096, 36, 32, 8, 128),
}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One way to run one model.

    Attributes:
        name: Shown in the table.
        model: Key of ``MODELS``.
        eager: Whether graphs are off.
        draft: Whether a draft model runs, on the backend that the target does not use.

    """

    name: str
    model: str
    eager: bool = False
    draft: bool = False


SCENARIOS = [
    Scenario("8 KV heads, eager", "split", eager=True),
    Scenario("8 KV heads, FULL", "split"),
    Scenario("1 KV head, eager", "replicated", eager=True),
    Scenario("1 KV head, FULL", "replicated"),
    Scenario("draft on the other backend", "split", draft=True),
]

# name: (context of each sequence, new tokens)
DECODE: dict[str, list[int]] = {
    "1 x 2k": [2048],
    "1 x 32k": [32768],
    "1 x 64k + 31 x 512": [65536] + [512] * 31,
}
MIXED = "mixed: 24 prompts of 4k, 128 new tokens each"


# ------------------------------------------------------------ inside a child


def tensors(config: dict, seed: int) -> Iterator[tuple[str, Any]]:
    """Draw the weights of a Qwen3 model, by the names of its checkpoints."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, size = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def drawn(rows: int, columns: int, spread: float = 1.0) -> Any:
        values = torch.randn(rows, columns, generator=generator)
        return (values * spread * columns**-0.5).to(torch.bfloat16)

    def ones(count: int, value: float = 1.0) -> Any:
        return torch.full((count,), value, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", drawn(config["vocab_size"], hidden, 3.0)
    yield "model.norm.weight", ones(hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", ones(hidden)
        yield f"{layer}.post_attention_layernorm.weight", ones(hidden)
        yield f"{layer}.self_attn.q_proj.weight", drawn(heads * size, hidden)
        yield f"{layer}.self_attn.k_proj.weight", drawn(kv_heads * size, hidden)
        yield f"{layer}.self_attn.v_proj.weight", drawn(kv_heads * size, hidden)
        yield f"{layer}.self_attn.o_proj.weight", drawn(hidden, heads * size)
        # Twice the queries: attention that picks some keys, not a plain mean.
        yield f"{layer}.self_attn.q_norm.weight", ones(size, 2.0)
        yield f"{layer}.self_attn.k_norm.weight", ones(size)
        yield f"{layer}.mlp.gate_proj.weight", drawn(inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", drawn(inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", drawn(hidden, inner)


def write_models(folder: Path, *, weights: bool) -> None:
    """Write all models, as one GPU and two are to load the same weights."""
    for seed, (name, config) in enumerate(MODELS.items()):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        if weights and name != "8b":
            from safetensors.torch import save_file

            named = dict(tensors(config, seed))
            save_file(named, path / "model.safetensors", metadata={"format": "pt"})


def engine_args(job: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``LLM`` for a job."""
    models, backend = Path(job["models"]), job["backend"]
    big = job["part"] == "throughput"
    args: dict[str, Any] = dict(
        model=str(models / job["model"]),
        skip_tokenizer_init=True,
        load_format="dummy" if big else "safetensors",
        seed=0,
        max_model_len=66560 if big else 8192,
        max_num_seqs=32 if big else 16,
        max_num_batched_tokens=2048,
        # Children share the GPUs, which the usual profiling does not expect.
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=(12 if big else 2) << 30,
        tensor_parallel_size=job["tp"],
        # It needs compiled ops, and RDNA has none of it.
        disable_custom_all_reduce=True,
        attention_config={"backend": backend},
        compilation_config={"mode": 0, "custom_ops": ["none"]},
        kernel_config={
            # vLLM's other kernels: they compile when they are used, which are few.
            "enable_jit_warmup": False,
            "enable_rocm_segmented_attn_autotune": job.get("tuning_s") is not None,
            "rocm_segmented_attn_autotune_budget_s": job.get("tuning_s") or 1.0,
        },
    )
    if job["tp"] > 1:
        args["distributed_executor_backend"] = "mp"
    if job.get("eager"):
        args["enforce_eager"] = True
    else:
        args["compilation_config"] |= {
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
        }
    if job.get("draft"):
        args["speculative_config"] = dict(
            method="draft_model",
            model=str(models / "draft"),
            num_speculative_tokens=3,
            attention_backend=job["draft"],
        )
    return args


def count_nans(worker: Any) -> None:
    """Count NaN among the logits of a worker."""
    import torch

    runner = worker.model_runner
    model = runner.get_model()
    plain = model.compute_logits
    runner.nan_count = torch.zeros((), dtype=torch.int64, device=runner.device)

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = plain(*args, **kwargs)
        if logits is not None:
            runner.nan_count += torch.isnan(logits).sum()
        return logits

    model.compute_logits = compute_logits


def state(worker: Any) -> dict[str, Any]:
    """What a rank saw: NaN, paths of its attention calls, its measured tiles."""
    import sys

    found: dict[str, Any] = {"nan": int(getattr(worker.model_runner, "nan_count", 0))}
    if backend := sys.modules.get("vllm.v1.attention.backends.rocm_segmented_attn"):
        found["paths"] = backend.path_counts()
    if tuning := sys.modules.get("vllm.v1.attention.ops.segmented_attention_tuning"):
        found["tiles"] = sorted(map(repr, tuning._tuned.items()))
    return found


def skip_long_prefill(worker: Any) -> None:
    """Leave attention out of long prefills from now on: only their cache matters."""
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        implementation = type(layer.impl)
        if getattr(implementation, "skips", False):
            return
        plain = implementation.forward

        def forward(
            self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any,
            output: Any, *rest: Any, plain: Any = plain, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if metadata is not None and metadata.max_query_len > 256:
                return output.zero_()
            return plain(self, layer, q, k, v, cache, metadata, output, *rest, **kwargs)

        implementation.forward, implementation.skips = forward, True


def close(llm: Any) -> dict[str, Any]:
    """End an engine, and say how long it took and what was left."""
    import psutil

    before = psutil.Process().children(recursive=True)
    begin = time.perf_counter()
    llm.llm_engine.engine_core.shutdown()
    _, left = psutil.wait_procs(
        [p for p in before if "resource_tracker" not in " ".join(command(p))], timeout=20
    )
    return dict(exit_s=time.perf_counter() - begin, left=[" ".join(command(p)) for p in left])


def command(process: Any) -> list[str]:
    """Return a process' command line, or nothing if it has ended."""
    import psutil

    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.Error:
        return []


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Generate twice, the second time from cached prefixes."""
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(**engine_args(job))
    ready = time.perf_counter()
    llm.collective_rpc(count_nans)
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, detokenize=False, ignore_eos=True, logprobs=3
    )
    sequences = parity.greedy(llm, params, job.get("rounds", 2))
    ranks = llm.collective_rpc(state)
    from vllm.model_executor.warmup import rocm_segmented_attn_autotune_warmup as tuner
    from vllm.v1.attention.ops import segmented_attention_tuning as tuning

    records = [
        tuner.describe(record) if isinstance(record, dict) else f"BAD {record}"
        for _, record in tuning.all_records()
    ]
    return dict(
        sequences=sequences,
        ranks=ranks,
        records=records,
        start_s=ready - start,
        **close(llm),
    )


def kill_a_rank(job: dict[str, Any]) -> dict[str, Any]:
    """Start, and kill the last rank once tuning has begun; the start must fail."""
    import psutil

    done: dict[str, Any] = {}

    def watch() -> None:
        locks = Path(os.environ["VLLM_CACHE_ROOT"], "rocm_segmented_attn_autotune")
        while not any(locks.glob("*/*.lock")):
            time.sleep(0.05)
        time.sleep(2.0)
        workers = [
            process
            for process in psutil.Process().children(recursive=True)
            if "spawn_main" in " ".join(command(process)) or "Worker" in " ".join(command(process))
        ]
        last = max(workers, key=lambda process: process.create_time())
        done.update(killed=" ".join(command(last))[:80], at=time.perf_counter())
        os.kill(last.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    from vllm import LLM

    try:
        LLM(**engine_args(job))
    except Exception as error:
        if not done:
            raise
        return dict(
            killed=done["killed"],
            gave_up_after_s=time.perf_counter() - done["at"],
            failure=f"{type(error).__name__}: {error}"[:200],
        )
    raise RuntimeError(f"the engine started without a rank ({done})")


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time a mixed load, then decode steps."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_args(job))

    def params(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0, detokenize=False, ignore_eos=True)

    def prompts(lengths: list[int], seed: int) -> list[dict[str, list[int]]]:
        return [
            {"prompt_token_ids": [10 + (i * 31 + j * 7 + seed * 613) % 8000 for j in range(n)]}
            for i, n in enumerate(lengths)
        ]

    rates: dict[str, float] = {}
    llm.generate(prompts([4096] * 4, 1), params(8), use_tqdm=False)
    start = time.perf_counter()
    llm.generate(prompts([4096] * 24, 2), params(128), use_tqdm=False)
    rates[MIXED] = 24 * 128 / (time.perf_counter() - start)
    llm.collective_rpc(skip_long_prefill)
    for seed, (name, lengths) in enumerate(DECODE.items()):
        requests = prompts(lengths, 10 + seed)
        # Fills the prefix cache; later calls decode from it.
        llm.generate(requests, params(1), use_tqdm=False)
        best = 0.0
        for _ in range(2):
            spent = []
            for count in (8, 72):
                start = time.perf_counter()
                llm.generate(requests, params(count), use_tqdm=False)
                spent.append(time.perf_counter() - start)
            best = max(best, 64 * len(lengths) / (spent[1] - spent[0]))
        rates[name] = best
        # What is there so far counts if the rest takes too long.
        print(children.MARK + json.dumps(dict(rates=rates, partial=True)), flush=True)
    ranks = llm.collective_rpc(state)
    return dict(rates=rates, ranks=ranks, **close(llm))


JOBS = {"parity": generate, "tuning": generate, "kill": kill_a_rank, "throughput": measure}


# ---------------------------------------------------------------- the parent

_TUNED = re.compile(
    r"(\d+) record\(s\) loaded, (\d+) measured, of (\d+) kind\(s\) of layer, in ([0-9.]+) s"
    r"(?:; longest wait for another rank ([0-9.]+) s, longest step ([0-9.]+) s)?"
)


def tuning_lines(log: str) -> list[dict[str, float]]:
    """Read from a log what each rank says on its tuning."""
    names = ("loaded", "measured", "kinds", "seconds", "wait", "step")
    return [
        {name: float(value or 0) for name, value in zip(names, found.groups(), strict=True)}
        for found in _TUNED.finditer(log)
    ]


def wrong_with(result: dict[str, Any], tp: int, backend: str) -> list[str]:
    """Say what is wrong with one engine, whatever it was for."""
    if "error" in result:
        return [result["error"]]
    wrong = []
    if len(result["ranks"]) != tp:
        wrong.append(f"{len(result['ranks'])} ranks answered")
    if nans := sum(rank["nan"] for rank in result["ranks"]):
        wrong.append(f"{nans} NaN among the logits")
    for number, rank in enumerate(result["ranks"]):
        paths = rank.get("paths", {})
        if backend == TESTED and not paths.get("segmented"):
            wrong.append(f"rank {number} took no segmented kernel")
        if other := [path for path in paths if path != "segmented"]:
            wrong.append(f"rank {number}: {', '.join(other)}")
    if result["left"]:
        wrong.append(f"left behind: {'; '.join(result['left'])}")
    return wrong


def wrong_tuning(result: dict[str, Any], tp: int, kinds: int, *, again: bool) -> list[str]:
    """Say what is wrong with a start with tuning."""
    wrong = wrong_with(result, tp, TESTED)
    if "error" in result:
        return wrong
    tiles = {json.dumps(rank.get("tiles")) for rank in result["ranks"]}
    if len(tiles) != 1:
        wrong.append("ranks chose different configurations")
    if len(result["records"]) != kinds:
        wrong.append(f"{len(result['records'])} records for {kinds} kinds of layer")
    wrong += [record for record in result["records"] if record.startswith("BAD")]
    lines = result["tuning"]
    if len(lines) != tp:
        wrong.append(f"{len(lines)} ranks said how they tuned")
    for line in lines:
        if line["measured"] != (0 if again else kinds):
            wrong.append(f"{line['measured']:.0f} kinds measured")
        # Half a second for what the machine does besides.
        if line["wait"] > line["step"] + 0.5:
            wrong.append(f"waited {line['wait']} s, the longest step took {line['step']} s")
    return wrong


def parity_row(name: str, backend: str, one: dict, two: dict, tie: float) -> tuple[str, bool]:
    """Compare two GPUs with one; the row for the table, and whether all is well."""
    head = f"{name:27} {backend:20}"
    wrong = [f"TP1: {text}" for text in wrong_with(one, 1, backend)]
    wrong += [f"TP2: {text}" for text in wrong_with(two, 2, backend)]
    if "error" in one or "error" in two:
        return f"{head} ERROR {'; '.join(wrong)}", False
    seen = parity.compare(one, two, tie)
    wrong += ["tokens differ"] * bool(seen.differ)
    row = (
        f"{head} {seen.equal:2}/{len(one['sequences']):2} {seen.tokens:6} {len(seen.ties):5} "
        f"{len(seen.differ):7} {seen.logprob_error:10.3f}   start {two['start_s']:.0f} s, "
        f"exit {two['exit_s']:.1f} s"
    )
    for what, margins in (("tie", seen.ties), ("DIFFERENCE", seen.differ)):
        if margins:
            shown = ", ".join(f"{m:.3f}" for m in margins)
            row += f"\n    {what}, margin of log probabilities: {shown}"
    if wrong:
        row += f"\n    <-- LOOK: {'; '.join(wrong)}"
    return row, not wrong


class Run:
    """All parts of a run, what they said, and whether all was well."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.deadline = children.Deadline(options.budget)
        self.lines: list[str] = []
        self.record: dict[str, Any] = {}
        self.fine = True
        self.lock = threading.Lock()
        self.running: list[threading.Thread] = []

    def say(self, text: str, *, good: bool = True) -> None:
        """Print a line and keep it."""
        with self.lock:
            self.fine &= good
            self.lines.append(text)
            print(text, flush=True)
            children.keep("tensor_parallel.txt", "\n".join(self.lines) + "\n")

    def child(self, name: str, *, caches: str, **job: Any) -> dict[str, Any]:
        """Run one engine; the second GPU stands idle or is used by another one."""
        tp = job["tp"]
        gpus = "0,1" if tp == 2 else str(job.pop("gpu", 0))
        root = self.folder / "caches" / caches
        result = children.run_child(
            HERE,
            dict(models=str(self.folder / "models"), **job),
            name=name,
            gpus=gpus,
            limit_s=self.options.limit,
            deadline=self.deadline,
            env={
                "TRITON_CACHE_DIR": str(root / "triton"),
                "VLLM_CACHE_ROOT": str(root / "vllm"),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                # Whatever the parent process has done to the device.
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
                "FAKE_GPU_COUNT": "2",
                # Small shared memory will do.
                "VLLM_MQ_MAX_CHUNK_BYTES_MB": "4",
            },
        )
        result["tuning"] = tuning_lines(result.pop("log", ""))
        with self.lock:
            self.record[name] = result
            children.keep("tensor_parallel.json", json.dumps(self.record))
        return result

    def parity(self) -> None:
        """Compare tokens; beside it, as nothing is timed, a rank is lost while tuning."""
        chosen = [s for s in SCENARIOS if not self.options.only or s.name in self.options.only]
        self.say(f"{'TP2 against TP1':27} {'backend':20} equal tokens  ties  differ  max dlogp")
        with concurrent.futures.ThreadPoolExecutor(self.options.workers) as threads:
            pairs = []
            if "tuning" in self.options.parts:
                # Two starts one after the other: the longest, so the first.
                threads.submit(self.guarded, self.lose_a_rank)
            for number, scenario in enumerate(chosen):
                for backend in BACKENDS:
                    other = BASE if backend == TESTED else TESTED
                    futures = [
                        threads.submit(
                            self.child,
                            f"{scenario.name}, {backend}, TP{tp}",
                            caches="shared",
                            part="parity",
                            model=scenario.model,
                            backend=backend,
                            eager=scenario.eager,
                            draft=other if scenario.draft else None,
                            tp=tp,
                            **({"gpu": number % 2} if tp == 1 else {}),
                        )
                        for tp in (2, 1)
                    ]
                    pairs.append((scenario, backend, futures))
            for scenario, backend, futures in pairs:
                two, one = (future.result() for future in futures)
                row, good = parity_row(scenario.name, backend, one, two, self.options.tie)
                self.say(row, good=good)

    @staticmethod
    def tuning_job(tuning_s: float) -> dict[str, Any]:
        """The engine that tunes: two kinds of layer, target and draft."""
        return dict(
            part="tuning",
            model="split",
            backend=TESTED,
            draft=TESTED,
            tp=2,
            tuning_s=tuning_s,
            rounds=1,
        )

    def lose_a_rank(self) -> None:
        """Kill a rank while it tunes; the next start must find nothing amiss."""
        job = self.tuning_job(20.0)
        first = self.child("a rank is killed", caches="killed", **job | {"part": "kill"})
        if "error" in first:
            self.say(f"a rank is killed while it tunes: {first['error']}", good=False)
            return
        result = self.child("start after that", caches="killed", **job)
        wrong = wrong_tuning(result, 2, 2, again=False)
        self.say(
            f"a rank is killed while it tunes: the engine gave up after "
            f"{first['gave_up_after_s']:.1f} s ({first['failure']}); the next start: "
            f"{'; '.join(wrong) or 'tunes, one valid record for each kind'}",
            good=not wrong,
        )

    def tuning(self) -> None:
        """Tune with empty caches, and start again."""
        if "parity" not in self.options.parts:
            self.lose_a_rank()
        self.tune("tuning, empty caches", again=False)
        # It measures nothing: the next part can begin to load its model.
        second = threading.Thread(
            target=self.guarded, args=(lambda: self.tune("tuning, second start", again=True),)
        )
        second.start()
        self.running.append(second)

    def tune(self, name: str, *, again: bool) -> None:
        """Start once with tuning, and say what the ranks say."""
        result = self.child(name, caches="tuning", **self.tuning_job(self.options.tuning_s))
        wrong = wrong_tuning(result, 2, 2, again=again)
        text = f"{name}: {'; '.join(wrong) or 'ok'}"
        for number, line in enumerate(result["tuning"]):
            text += (
                f"\n    rank {number}: {line['loaded']:.0f} loaded, {line['measured']:.0f} "
                f"measured in {line['seconds']:.2f} s, longest wait for the other "
                f"{line['wait']:.2f} s, longest step {line['step']:.2f} s"
            )
        if not again:
            text += "".join(f"\n    {line}" for line in result.get("records", []))
        self.say(text, good=not wrong)

    def throughput(self) -> None:
        """Measure both backends, one after the other on the same two GPUs."""
        rates = {}
        for backend in BACKENDS:
            result = self.child(
                f"throughput, {backend}",
                caches="shared",
                part="throughput",
                model="8b",
                backend=backend,
                tp=2,
            )
            rates[backend] = result.get("rates", {})
            wrong = [] if result.get("partial") else wrong_with(result, 2, backend)
            if wrong or result.get("partial"):
                said = "; ".join(wrong) or "ended early"
                self.say(f"throughput, {backend}: {said}", good=False)
        rows = [["output tokens/s, TP2, 8B-shaped, FULL", *BACKENDS, "ratio"]]
        for name in (MIXED, *DECODE):
            base, tested = (rates[backend].get(name) for backend in BACKENDS)
            ratio = f"{tested / base:.2f}" if base and tested else "-"
            shown = [f"{rate:.1f}" if rate else "-" for rate in (base, tested)]
            rows.append([name, *shown, ratio])
        self.say(children.columns(rows))

    def guarded(self, part: Any) -> None:
        """Run a part; whatever happens to it, the next one runs."""
        try:
            part()
        except Exception as error:
            self.say(f"{getattr(part, '__name__', part)}: {error!r}", good=False)

    def all(self) -> bool:
        """Run the parts that were asked for."""
        write = subprocess.run(
            [sys.executable, str(HERE), "--write-models", str(self.folder / "models")],
            timeout=max(1.0, self.deadline.left()),
            check=False,
        )
        if write.returncode:
            self.say("the models cannot be written", good=False)
            return False
        for part in PARTS:
            if part in self.options.parts:
                self.guarded(getattr(self, part))
        for thread in self.running:
            thread.join()
        return self.fine


def number_of_gpus() -> int:
    """Count the GPUs without a CUDA context in this process."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return int(words[-1]) if words and words[-1].isdigit() else 0


def dry_run() -> None:
    """Build every configuration, as the engine would."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), weights=False)
        jobs = [
            dict(
                part="parity",
                model=s.model,
                backend=TESTED,
                eager=s.eager,
                draft=BASE if s.draft else None,
                tp=tp,
            )
            for s in SCENARIOS
            for tp in (1, 2)
        ]
        jobs.append(Run.tuning_job(20.0))
        jobs.append(dict(part="throughput", model="8b", backend=BASE, tp=2))
        for job in jobs:
            config = EngineArgs(**engine_args({**job, "models": folder})).create_engine_config()
            parallel, spec = config.parallel_config, config.speculative_config
            print(
                f"{job['part']} {job['model']} TP{parallel.tensor_parallel_size} "
                f"{parallel.distributed_executor_backend} "
                f"{config.attention_config.backend.name} "
                f"{config.compilation_config.cudagraph_mode.name} "
                f"draft {spec and (spec.attention_backend, spec.draft_tensor_parallel_size)} "
                f"tuning {config.kernel_config.enable_rocm_segmented_attn_autotune}"
            )


def main() -> int:
    """Parse arguments, run, and print the tables; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="scenarios")
    parser.add_argument("--workers", type=int, default=9, help="engines at a time")
    parser.add_argument("--tie", type=float, default=0.15, help="margin of a tie")
    parser.add_argument("--tuning-s", type=float, default=80.0, help="budget of tuning")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds an engine")
    parser.add_argument("--budget", type=float, default=430.0, help="seconds in all")
    parser.add_argument("--dry-run", action="store_true", help="only build configurations")
    parser.add_argument("--list", action="store_true", help="names of the scenarios")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--write-models", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        children.answer(lambda: JOBS[job["part"]](job))
    if options.write_models:
        write_models(options.write_models, weights=True)
        return 0
    if options.list:
        print("\n".join(s.name for s in SCENARIOS))
        return 0
    if options.dry_run:
        dry_run()
        return 0
    options.parts = options.parts or list(PARTS)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"{', '.join(unknown)}: parts are {', '.join(PARTS)}")
    if (count := number_of_gpus()) < 2:
        print(f"skipped: tensor parallel needs two GPUs, {count} found")
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tensor-parallel-") as folder:
        fine = Run(options, Path(folder)).all()
    print(f"{'OK' if fine else 'NOT OK'} in {time.monotonic() - begin:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
