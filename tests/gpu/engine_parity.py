#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold ROCM_SEGMENTED_ATTN against TRITON_ATTN in the whole engine, on a real GPU.

Models with random weights and the shapes of known ones run twice, once per backend,
through graphs, chunked prefill, prefix caching and speculation. Compared are the
greedy tokens of every sequence; where they part, the margin between the two best
tokens says whether it was a tie. Then the throughput of an 8B-shaped model, as a
ratio of the two backends in the same run.

    python3 engine_parity.py parity [--only NAME ...] [--workers 8] [--gpus 2]
    python3 engine_parity.py throughput [--only NAME ...]

The weights say nothing about quality, and the plain ops beside attention are slow, so
only comparisons within one run mean anything.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

BASE, TESTED = "TRITON_ATTN", "ROCM_SEGMENTED_ATTN"
MARK = "RESULT "
VOCAB = 8192
NEW_TOKENS = 32

_COMMON = dict(
    vocab_size=VOCAB,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
    attention_bias=False,
)


def _qwen3(hidden: int, layers: int, heads: int, kv_heads: int, head: int) -> dict:
    return _COMMON | dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        hidden_act="silu",
        rope_theta=1000000.0,
    )


_GEMMA = _COMMON | dict(
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=128,
)


def _rope(*layer_types: str) -> dict:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {name: dict(rope) for name in layer_types}


MODELS: dict[str, dict] = {
    "qwen3": _qwen3(1024, 4, 16, 8, 128),
    "qwen3-gqa7-d96": _qwen3(1024, 4, 14, 2, 96),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 128),
    "gemma3": _GEMMA
    | dict(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        rope_parameters=_rope("sliding_attention", "full_attention"),
    ),
    # A cap this low bends most logits.
    "gemma2-softcap": _GEMMA
    | dict(
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=None,
        rope_theta=10000.0,
    ),
    "rnj1-lookback": _GEMMA
    | dict(
        architectures=["Rnj1ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=4,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        rope_parameters=_rope("chunked_attention", "full_attention"),
    ),
    # Sinks, D64, 8 query heads per KV head, a window in every other layer, experts. The
    # weights are not quantised: MXFP4 kernels are not there for such a machine.
    "gpt-oss": _COMMON
    | dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        tie_word_embeddings=False,
        hidden_size=1024,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    # Gated DeltaNet of a size whose fp32 state makes attention pages of 1056 tokens.
    "qwen3-next": _qwen3(1024, 4, 16, 2, 256)
    | dict(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        partial_rotary_factor=0.25,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    ),
}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One way to run one model; ``mode`` is a CUDA graph mode or "eager"."""

    name: str
    model: str
    mode: str
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    spec: dict[str, Any] | None = None


# Without the warm-up of everybody's kernels, which takes minutes for linear attention.
_HYBRID = {
    "mamba_ssm_cache_dtype": "float32",
    "enable_prefix_caching": False,
    "kernel_config": {"enable_jit_warmup": False},
}

SCENARIOS = [
    Scenario("eager, chunks of 512", "qwen3", "eager", {"max_num_batched_tokens": 512}),
    Scenario("FULL", "qwen3", "FULL"),
    Scenario("FULL_AND_PIECEWISE", "qwen3", "FULL_AND_PIECEWISE"),
    Scenario("fp8 KV", "qwen3", "FULL", {"kv_cache_dtype": "fp8"}),
    Scenario("page 1056", "qwen3", "FULL", {"block_size": 1056}),
    Scenario(
        "ngram",
        "qwen3",
        "FULL",
        spec=dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3),
    ),
    Scenario(
        "draft model",
        "qwen3",
        "FULL_AND_PIECEWISE",
        spec=dict(method="draft_model", model="qwen3", num_speculative_tokens=3),
    ),
    Scenario("GQA 7, D96", "qwen3-gqa7-d96", "FULL"),
    Scenario("Gemma-3 window", "gemma3", "FULL"),
    Scenario("Gemma-3 window, graphs+chunks", "gemma3", "FULL_AND_PIECEWISE"),
    Scenario("Gemma-2 softcap", "gemma2-softcap", "FULL"),
    Scenario("gpt-oss sinks, experts", "gpt-oss", "FULL_AND_PIECEWISE"),
    Scenario("gpt-oss eager, chunks of 512", "gpt-oss", "eager", {"max_num_batched_tokens": 512}),
    Scenario("Qwen3-Next eager", "qwen3-next", "eager", _HYBRID),
    Scenario("Qwen3-Next graphs", "qwen3-next", "FULL_AND_PIECEWISE", _HYBRID),
    Scenario("Rnj-1 lookback", "rnj1-lookback", "FULL"),
]

# name: (lengths of the sequences' contexts, least ratio to reach)
WORKLOADS: dict[str, tuple[list[int], float]] = {
    "1 x 2k": ([2048], 0.98),
    "1 x 8k": ([8192], 0.98),
    "1 x 32k": ([32768], 1.3),
    "1 x 64k + 31 x 512": ([65536] + [512] * 31, 5.0),
}


# ------------------------------------------------------------ inside a child


def write_model(name: str, folder: Path) -> str:
    """Write the config of a model; weights are made by the engine."""
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    return str(path)


def engine_args(scenario: Scenario, backend: str, folder: Path) -> dict[str, Any]:
    """Arguments of ``LLM`` for one side of a scenario."""
    args: dict[str, Any] = dict(
        model=write_model(scenario.model, folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        seed=0,
        max_model_len=8192,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        # Children share the GPU, which the usual profiling does not expect.
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=2 << 30,
        disable_log_stats=False,
        attention_config={"backend": backend},
    )
    if scenario.mode == "eager":
        args["enforce_eager"] = True
    compilation = {"mode": 0, "custom_ops": ["none"]}
    if scenario.mode != "eager":
        compilation |= {
            "cudagraph_mode": scenario.mode,
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
        }
    args["compilation_config"] = compilation
    if scenario.spec is not None:
        spec = dict(scenario.spec)
        if "model" in spec:
            spec["model"] = write_model(spec["model"], folder)
            spec["attention_backend"] = backend
        args["speculative_config"] = spec
    return args | scenario.engine


def draw_weights(model) -> None:
    """Weights that make attention matter, equal for equal names and shapes."""
    import torch

    for name, module in model.named_modules():
        kind = type(module).__name__
        if "RMSNorm" in kind and getattr(module, "weight", None) is not None:
            # Twice the queries: attention that picks some keys, not a plain mean.
            gain = 2.0 if name.endswith("q_norm") else 1.0
            module.weight.data.fill_(gain - 1.0 if "Gemma" in kind else gain)
        if hasattr(module, "normalizer"):
            # Gemma scales embeddings up. Drawn ones would outweigh all layers, and a
            # model with tied embeddings would repeat its last token, whatever it sees.
            module.normalizer.fill_(1.0)
        if kind == "Attention" and str(module.kv_cache_dtype).startswith("fp8"):
            module._k_scale.fill_(0.5)
            module._v_scale.fill_(2.0)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.copy_(torch.linspace(-2, 3, len(parameter)))
        if parameter.dim() < 2:
            continue
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        generator = torch.Generator(device=parameter.device).manual_seed(seed)
        spread = 3.0 if "embed" in name else 1.0
        parameter.data.normal_(0.0, spread * parameter.shape[-1] ** -0.5, generator=generator)


def prepare_worker(worker) -> None:
    """Draw the weights of target and draft, and count NaN among the logits."""
    import torch

    runner = worker.model_runner
    model = runner.get_model()
    draw_weights(model)
    draft = runner.get_draft_model()
    if draft is not None:
        draw_weights(draft)
    plain = model.compute_logits
    runner.nan_count = torch.zeros((), dtype=torch.int64, device=runner.device)

    def compute_logits(*args, **kwargs):
        logits = plain(*args, **kwargs)
        runner.nan_count += torch.isnan(logits).sum()
        return logits

    model.compute_logits = compute_logits


def prompts() -> list[dict[str, list[int]]]:
    """Short, long, with a shared prefix, and one that repeats itself."""

    def tokens(length: int, seed: int) -> list[int]:
        state, out = seed * 7919 + 17, []
        for _ in range(length):
            state = (state * 1103515245 + 12345) % 2**31
            out.append(10 + state % (VOCAB - 20))
        return out

    shared = tokens(1500, 99)
    lists = [tokens(n, n) for n in (5, 100, 700, 3000)]
    lists += [shared + tokens(40, 1), shared + tokens(61, 2), tokens(9, 3) * 30]
    return [{"prompt_token_ids": ids} for ids in lists]


def path_counts() -> dict[str, int]:
    """How many attention calls took which path, if the tested backend ran."""
    from vllm.v1.attention.backends import rocm_segmented_attn

    return rocm_segmented_attn.path_counts()


def greedy(llm: Any, params: Any, rounds: int) -> list[dict[str, Any]]:
    """Generate from the prompts, several times: tokens, margins of the best, their logprobs."""
    sequences = []
    for _ in range(rounds):
        for request in llm.generate(prompts(), params, use_tqdm=False):
            best = request.outputs[0]
            margins, chosen = [], []
            for token, top in zip(best.token_ids, best.logprobs, strict=False):
                values = sorted((x.logprob for x in top.values()), reverse=True)
                margins.append(values[0] - values[1])
                chosen.append(top[token].logprob)
            sequences.append(dict(tokens=list(best.token_ids), margins=margins, chosen=chosen))
    return sequences


def run_parity(scenario: Scenario, backend: str, folder: Path) -> dict[str, Any]:
    """Generate twice, the second time from cached prefixes."""
    if scenario.mode == "FULL_AND_PIECEWISE":
        # Pieces without torch.compile, which would want more than the plain ops.
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_args(scenario, backend, folder))
    llm.collective_rpc(prepare_worker)
    params = SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=0,
        detokenize=False,
        ignore_eos=True,
        logprobs=3,
    )
    sequences = greedy(llm, params, 2)
    accepted = (
        {}
        if scenario.spec is None
        else {
            m.name: m.value
            for m in llm.get_metrics()
            if "spec_decode" in m.name and hasattr(m, "value")
        }
    )
    nans = llm.collective_rpc(lambda worker: int(worker.model_runner.nan_count))
    return dict(
        sequences=sequences,
        nan=sum(nans),
        paths=path_counts(),
        accepted=accepted,
        # What the engine made of it: a hybrid model decides its own.
        page=llm.llm_engine.vllm_config.cache_config.block_size,
    )


def skip_long_prefill(backend: str) -> None:
    """Leave attention out of prefill: only its cache matters for what follows."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    impl = AttentionBackendEnum[backend].get_class().get_impl_cls()
    plain = impl.forward

    def forward(self, layer, q, k, v, cache, metadata, output, *args, **kwargs):
        if metadata is not None and metadata.max_query_len > 256:
            return output.zero_()
        return plain(self, layer, q, k, v, cache, metadata, output, *args, **kwargs)

    impl.forward = forward


ATTENTION_KERNELS = (
    "unified_attention",
    "reduce_segments",
    "segment",
    "schedule",
    "combine",
)


def attention_share(llm, requests, params) -> float | None:
    """Attention's part of the GPU time of a few decode steps, 0 to 1."""
    import torch

    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            llm.generate(requests, params, use_tqdm=False)
        events = [(event.key, event.self_device_time_total) for event in profile.key_averages()]
        total = sum(spent for _, spent in events)
        mine = sum(spent for key, spent in events if any(part in key for part in ATTENTION_KERNELS))
        return mine / total if total else None
    except Exception as error:  # the profiler is optional on such machines
        print("no profile:", error, file=sys.stderr)
        return None


def run_throughput(names: list[str], backend: str, folder: Path) -> dict[str, Any]:
    """Time decode steps of each workload, FULL graphs."""
    skip_long_prefill(backend)
    from vllm import LLM, SamplingParams

    chosen = {name: WORKLOADS[name] for name in names or WORKLOADS}
    sizes = sorted({len(lengths) for lengths, _ in chosen.values()})
    llm = LLM(
        model=write_model("qwen3-8b", folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        seed=0,
        max_model_len=66560,
        max_num_seqs=32,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=20 << 30,
        attention_config={"backend": backend},
        compilation_config={
            "mode": 0,
            "custom_ops": ["none"],
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": sizes,
        },
    )

    def params(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0, detokenize=False, ignore_eos=True)

    results: dict[str, Any] = {}
    for number, (name, (lengths, _)) in enumerate(chosen.items()):
        requests = [
            {"prompt_token_ids": [10 + (i * 31 + j * 7 + number) % 8000 for j in range(length)]}
            for i, length in enumerate(lengths)
        ]
        # Fills the prefix cache; later calls decode from it.
        llm.generate(requests, params(1), use_tqdm=False)
        rates = []
        for _ in range(2):
            spent = []
            for count in (8, 72):
                start = time.perf_counter()
                llm.generate(requests, params(count), use_tqdm=False)
                spent.append(time.perf_counter() - start)
            rates.append(64 * len(lengths) / (spent[1] - spent[0]))
        results[name] = dict(rate=max(rates), share=attention_share(llm, requests, params(16)))
    return dict(workloads=results, paths=path_counts())


def child(job: dict[str, Any]) -> None:
    """Run one job and print its result on a line of its own."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            if job["part"] == "parity":
                scenario = Scenario(**job["scenario"])
                result = run_parity(scenario, job["backend"], Path(folder))
            else:
                result = run_throughput(job["only"], job["backend"], Path(folder))
        except Exception as error:
            import traceback

            traceback.print_exc()
            result = dict(error=f"{type(error).__name__}: {error}"[:300])
    result["seconds"] = time.perf_counter() - start
    sys.stderr.flush()
    print(MARK + json.dumps(result), flush=True)
    # Engines may hang in their exit handlers on a machine like this.
    os._exit(0)


# ---------------------------------------------------------------- the parent


class Pool:
    """Runs children, each on the GPU that has the fewest of them."""

    def __init__(self, gpus: int, limit: float, budget: float) -> None:
        self.load = [0] * gpus
        self.lock = threading.Lock()
        self.limit = limit
        self.end = time.perf_counter() + budget

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a child; the end of its log goes to ``$OUT`` or to nowhere."""
        left = self.end - time.perf_counter()
        if left < 30:
            return dict(error="not run: the time given is used up")
        with self.lock:
            gpu = self.load.index(min(self.load))
            self.load[gpu] += 1
        try:
            return self._run(job, gpu, min(left, self.limit))
        finally:
            with self.lock:
                self.load[gpu] -= 1

    def _run(self, job: dict[str, Any], gpu: int, limit: float) -> dict[str, Any]:
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": str(gpu),
            # AMD's library counts all of the host's, as does its stand-in.
            "FAKE_GPU_COUNT": str(len(self.load)),
            "OMP_NUM_THREADS": "2",
            # In one process, so that the models can be reached and changed.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Small helpers would be compiled for longer than they run.
            "TORCHDYNAMO_DISABLE": "1",
            # Linear attention's autotuners would compile for minutes, and two engines
            # that choose differently would not compute the same.
            "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",
        }
        command = [sys.executable, os.path.abspath(__file__), "--job", json.dumps(job)]
        name = job.get("scenario", {}).get("name", "throughput")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=env)
            output, errors, code = done.stdout, done.stderr, str(done.returncode)
        except subprocess.TimeoutExpired as late:
            output, errors = (
                (text or b"").decode(errors="replace") if isinstance(text, bytes) else text or ""
                for text in (late.stdout, late.stderr)
            )
            code = f"none after {limit:.0f} s"
        if out := os.environ.get("OUT"):
            with self.lock, open(Path(out) / "engine.log", "a") as log:
                tail = (output + errors)[-4000:]
                log.write(f"\n===== {name} {job['backend']}\n{tail}\n")
        for line in reversed(output.splitlines()):
            if line.startswith(MARK):
                result: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return result
        return dict(error=f"exit code {code}: {errors[-200:].strip()}")


@dataclasses.dataclass
class Comparison:
    """What the two sides of a scenario have in common."""

    equal: int = 0
    tokens: int = 0
    ties: list[float] = dataclasses.field(default_factory=list)
    differ: list[float] = dataclasses.field(default_factory=list)
    logprob_error: float = 0.0


def compare(base: dict, tested: dict, tie: float) -> Comparison:
    """Compare token by token, each sequence up to its first difference.

    Args:
        base: Result of the trusted backend.
        tested: Result of the other.
        tie: Largest margin in log probability that counts as a tie.

    Returns:
        Equal sequences, tokens compared, margins of ties and of real differences,
        and the largest difference in the log probability of an equal token.

    """
    seen = Comparison()
    for one, two in zip(base["sequences"], tested["sequences"], strict=False):
        for at, (a, b) in enumerate(zip(one["tokens"], two["tokens"], strict=False)):
            if a != b:
                margin = min(one["margins"][at], two["margins"][at])
                (seen.ties if margin <= tie else seen.differ).append(margin)
                break
            seen.tokens += 1
            error = abs(one["chosen"][at] - two["chosen"][at])
            seen.logprob_error = max(seen.logprob_error, error)
        else:
            seen.equal += 1
    return seen


def parity_row(scenario: Scenario, base: dict, tested: dict, tie: float) -> tuple[str, bool]:
    """Format the comparison of one scenario, and say whether all is well."""
    head = f"{scenario.name:31} {scenario.mode:19}"
    if errors := [r["error"] for r in (base, tested) if "error" in r]:
        return f"{head} ERROR {' | '.join(errors)}", False
    seen = compare(base, tested, tie)
    paths = tested["paths"]
    unified = sum(n for path, n in paths.items() if path != "segmented")
    nans = base["nan"] + tested["nan"]
    good = not seen.differ and not nans and bool(paths.get("segmented")) and not unified
    row = (
        f"{head} {seen.equal:2}/{len(base['sequences']):2} {seen.tokens:6} "
        f"{len(seen.ties):5} {len(seen.differ):7} {seen.logprob_error:10.3f} "
        f"{nans:4}  {paths.get('segmented', 0)}/{unified}  {tested['seconds']:.0f} s"
        f"  page {tested['page']}"
    )
    if drafted := tested["accepted"].get("vllm:spec_decode_num_draft_tokens"):
        taken = tested["accepted"]["vllm:spec_decode_num_accepted_tokens"]
        row += f"  accepted {taken}/{drafted}"
    if not good:
        row += "  <-- LOOK"
    for what, margins in (("tie", seen.ties), ("DIFFERENCE", seen.differ)):
        if margins:
            shown = ", ".join(f"{m:.3f}" for m in margins)
            row += f"\n    {what}, margin of log probabilities: {shown}"
    return row, good


def parity(only: list[str], workers: int, tie: float, pool: Pool) -> tuple[bool, Any]:
    """Run all scenarios on both backends and print a row for each as it ends."""
    chosen = [s for s in SCENARIOS if not only or s.name in only]
    print(
        f"{'scenario':31} {'mode':19} equal tokens  ties  differ  "
        "max dlogp  NaN  segmented/unified calls",
        flush=True,
    )
    fine, record = True, []
    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        pairs = []
        for scenario in chosen:
            jobs = [
                dict(part="parity", backend=b, scenario=dataclasses.asdict(scenario))
                for b in (BASE, TESTED)
            ]
            pairs.append((scenario, [threads.submit(pool.run, job) for job in jobs]))
        for scenario, futures in pairs:
            base, tested = (future.result() for future in futures)
            row, good = parity_row(scenario, base, tested, tie)
            print(row, flush=True)
            fine &= good
            record.append(dict(scenario=scenario.name, base=base, tested=tested))
    return fine, record


def throughput(only: list[str], pool: Pool) -> tuple[bool, Any]:
    """Run the 8B-shaped model on both backends, at once if there are two GPUs."""
    jobs = [dict(part="throughput", backend=b, only=only) for b in (BASE, TESTED)]
    with concurrent.futures.ThreadPoolExecutor(min(2, len(pool.load))) as threads:
        results = list(threads.map(pool.run, jobs))
    fine = True
    for job, result in zip(jobs, results, strict=False):
        if "error" in result:
            print(f"{job['backend']}: ERROR {result['error']}")
            fine = False
    if not fine:
        return False, results
    print(f"{'workload':20} {BASE:>14} {TESTED:>20}  ratio  least  attention's share")
    for name, base in results[0]["workloads"].items():
        tested = results[1]["workloads"][name]
        ratio, least = tested["rate"] / base["rate"], WORKLOADS[name][1]
        fine &= ratio >= least
        shares = [
            "-" if side["share"] is None else f"{side['share']:.0%}" for side in (base, tested)
        ]
        print(
            f"{name:20} {base['rate']:9.1f} tok/s {tested['rate']:14.1f} tok/s "
            f"{ratio:6.2f} {least:6.2f}  {shares[0]} -> {shares[1]}"
            f"{'' if ratio >= least else '  <-- LOOK'}"
        )
    print("calls by path:", results[1]["paths"])
    return fine, results


def main() -> int:
    """Parse arguments, run, and print the tables; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=["parity", "throughput", "list"])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--workers", type=int, default=8, help="children at a time")
    parser.add_argument("--tie", type=float, default=0.25, help="margin of a tie")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds a child")
    parser.add_argument("--budget", type=float, default=390.0, help="seconds in all")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to spread over")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        child(json.loads(args.job))
    if args.part is None:
        parser.error("say parity, throughput or list")
    if args.part == "list":
        print("\n".join(s.name for s in SCENARIOS))
        print("\n".join(WORKLOADS))
        return 0
    known = [s.name for s in SCENARIOS] if args.part == "parity" else list(WORKLOADS)
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"no such name: {', '.join(unknown)}; `list` prints them")
    start = time.perf_counter()
    pool = Pool(args.gpus, args.limit, args.budget)
    if args.part == "parity":
        fine, record = parity(args.only, args.workers, args.tie, pool)
    else:
        fine, record = throughput(args.only, pool)
    print(f"{'OK' if fine else 'NOT OK'} in {time.perf_counter() - start:.0f} s")
    if out := os.environ.get("OUT"):
        (Path(out) / f"{args.part}.json").write_text(json.dumps(record))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
