#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure starts and first requests: empty caches, prebuilt kernels, warm; static, tuned.

An engine with a draft model starts with none of the segmented kernels cached, with
those that the wheel's own machinery compiled before (here for this GPU), and with all
of them; each with and without tuning. Triton's compilation listener and vLLM's JIT
monitor tell what was compiled during the start, the first request, and a sweep of other
requests. Nothing of the segmented kernels may compile after the start.

    python3 start_up.py [--gpus 2] [--tuning-s 100] [--budget 330]
    python3 start_up.py --all-empty   # nothing cached: vLLM's other kernels compile, too
    python3 start_up.py --dry-run     # builds every configuration; needs no GPU

vLLM warms up some 190 variants of its own sampling and drafting kernels, which takes a
minute and more: without --all-empty that is off, and later starts find those that the
first one used, so that what differs is attention's. The libraries are read before, too.
Times are those of this machine and of plain ops beside attention: only comparisons within
one run mean anything.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fcntl
import importlib.util
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import children
import engine_parity as parity

HERE = Path(__file__).resolve()
TESTED, BASE = parity.TESTED, parity.BASE
OURS = "vllm.v1.attention.ops.segmented_attention"
OUR_KERNELS = (
    "_schedule_items_kernel",
    "_schedule_segments_kernel",
    "_segmented_attention_kernel",
    "_combine_kernel",
)
# Attention of Qwen3-8B and Qwen3-0.6B, which the wheel's list of models has.
LISTED = ("qwen3-8b", "qwen3-1.7b")
TARGET = parity._qwen3(2048, 2, 32, 8, 128)
DRAFT = parity._qwen3(1024, 1, 16, 8, 128)
# Lengths of prompts that are sent together.
SWEEP = [[1], [2], [5], [17], [130], [3000], [9000], [31000], [3, 700, 40], [9] * 16]
PROMPT, NEW_TOKENS, REPEATS = 700, 16, 8
# What to show of a log.
FOLLOWED = re.compile(
    r"\] ((?:Prebuilt kernels|ROCM_SEGMENTED_ATTN: (?!\d+ layer)|Segmented attention is|"
    r"Segmented attention was|Tuning had|The record|JIT kernel warmup finished).*)"
    r"|(\S.* during inference: \w+)"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One start.

    Attributes:
        name: Shown in the table, and its key.
        backend: Attention backend of target and draft.
        tuned: Whether tuning is on.
        caches: Name of the folder that holds its caches; two of one name share it.
        prebuilt: Whether the wheel's kernels are there.
        records: Whether tuning records of another machine are imported before.
        others: Name of the folder whose entries of vLLM's other kernels it begins with.

    """

    name: str
    backend: str
    tuned: bool
    caches: str
    prebuilt: bool = False
    records: bool = False
    others: str | None = None


STATIC = [
    Case("static, empty", TESTED, False, "static"),
    Case("static, prebuilt", TESTED, False, "static-prebuilt", prebuilt=True, others="static"),
    Case("static, warm", TESTED, False, "static"),
    Case("TRITON_ATTN, empty", BASE, False, "base", others="static"),
]
TUNED = [
    Case("tuned, empty", TESTED, True, "tuned"),
    Case("tuned, warm", TESTED, True, "tuned"),
    Case("tuned, prebuilt + records", TESTED, True, "tuned-prebuilt", True, True, "tuned"),
]


# ------------------------------------------------------------ inside a child


def write_model(config: dict, folder: Path, name: str) -> str:
    """Write a model's config; its weights are made by the engine."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def engine_args(
    case: Case, folder: Path, *, draft: bool, tuning_s: float, jit_warmup: bool
) -> dict[str, Any]:
    """Arguments of ``LLM``."""
    args: dict[str, Any] = dict(
        model=write_model(TARGET, folder, "target"),
        skip_tokenizer_init=True,
        load_format="dummy",
        seed=0,
        max_model_len=32768,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        # Children share the GPU, which the usual profiling does not expect.
        gpu_memory_utilization=0.02,
        # What is prebuilt is for caches within 2 GiB a layer.
        kv_cache_memory_bytes=3 << 29,
        disable_log_stats=False,
        attention_config={"backend": case.backend},
        compilation_config={
            "mode": 0,
            "custom_ops": ["none"],
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
        },
        kernel_config={
            "enable_jit_warmup": jit_warmup,
            "enable_rocm_segmented_attn_autotune": case.tuned,
            "rocm_segmented_attn_autotune_budget_s": tuning_s,
        },
    )
    if draft:
        args["speculative_config"] = dict(
            method="draft_model",
            model=write_model(DRAFT, folder, "draft"),
            num_speculative_tokens=3,
            attention_backend=case.backend,
        )
    return args


class Compilations:
    """Notes what Triton compiles or finds in its cache, by phase."""

    def __init__(self) -> None:
        self.phase = "start"
        self.seen: dict[str, dict[str, Counter[str]]] = {}

    def __call__(self, **report: Any) -> None:
        """Take a report of Triton's compilation listener."""
        function = getattr(report.get("src"), "fn", None)
        name = getattr(function, "__name__", "?")
        whose = "ours" if getattr(function, "__module__", "") == OURS else "others"
        how = "found" if report.get("cache_hit") else "compiled"
        phase = self.seen.setdefault(self.phase, {})
        phase.setdefault(f"{whose} {how}", Counter())[name] += 1


def note_loads(seen: Compilations) -> None:
    """Note when compiled kernels reach the device, which Triton does at first launch."""
    import triton

    kind = triton.compiler.CompiledKernel
    plain = kind._init_handles

    def load(kernel: Any) -> None:
        name = str(getattr(kernel, "name", "?"))
        if getattr(kernel, "module", None) is None:
            whose = "ours" if name in OUR_KERNELS else "others"
            phase = seen.seen.setdefault(seen.phase, {})
            phase.setdefault(f"{whose} loaded", Counter())[name] += 1
        plain(kernel)

    kind._init_handles = load


class Sampler:
    """Tells where the main thread spends its time, by looking every few milliseconds."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._end = threading.Event()

    def __enter__(self) -> Sampler:
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _look(self) -> None:
        last = time.perf_counter()
        while not self._end.wait(0.005):
            frame = sys._current_frames().get(self._thread)
            now = time.perf_counter()
            names = []
            while frame is not None and len(names) < 3:
                code = frame.f_code
                names.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
                frame = frame.f_back
            self.places[" < ".join(names)] += round(1e6 * (now - last))
            last = now

    def worst(self) -> dict[str, int]:
        """Return the places with most time, in milliseconds."""
        return {place: us // 1000 for place, us in self.places.most_common(8)}


def start(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine and serve requests; returns times and what was compiled."""
    case = Case(**job["case"])
    began = time.perf_counter()
    import triton
    from vllm import LLM, SamplingParams

    seen = Compilations()
    triton.knobs.compilation.listener = seen
    note_loads(seen)
    from vllm.model_executor.warmup import rocm_segmented_attn_autotune_warmup as tuner

    if case.prebuilt:
        from vllm.hipstack import prebuilt

        prebuilt.FOLDER = Path(job["prebuilt"])
    records = job["records"]
    if case.records and tuner.main(["import", records]):
        raise RuntimeError("the records of the other start cannot be imported")
    imported = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = {name: job[name] for name in ("draft", "tuning_s", "jit_warmup")}
        llm = LLM(**engine_args(case, Path(folder), **options))
    started = time.perf_counter()

    def ask(lengths: list[int], seed: int, count: int = NEW_TOKENS) -> tuple[float, float]:
        """Return the seconds to the end, and to the first token."""
        requests = [
            {"prompt_token_ids": [10 + (seed * 977 + i * 31 + j * 7) % 8000 for j in range(n)]}
            for i, n in enumerate(lengths)
        ]
        params = SamplingParams(max_tokens=count, temperature=0, detokenize=False, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        spent = time.perf_counter() - begin
        metrics = outputs[0].metrics
        return spent, float(getattr(metrics, "first_token_latency", 0.0) or 0.0)

    # Other engines may be starting on this GPU; requests have it for themselves.
    with open(job["turn"], "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        seen.phase = "first request"
        with Sampler() as sampler:
            first, first_token = ask([PROMPT], 1)
        seen.phase = "later"
        again = [ask([PROMPT], 2 + i) for i in range(REPEATS)]
        seen.phase = "sweep"
        for seed, lengths in enumerate(SWEEP, 100):
            ask(lengths, seed, 4)
            ask(lengths, seed, 4)  # its prefix is cached now
    if case.tuned and not case.records:
        tuner.main(["export", records])
    from vllm.v1.attention.ops import segmented_attention_tuning as tuning

    kept = [
        tuner.describe(record) if isinstance(record, dict) else f"bad: {record}"
        for _, record in tuning.all_records()
    ]
    return dict(
        import_s=imported - began,
        start_s=started - imported,
        first_s=first,
        first_token_s=first_token,
        again_s=statistics.median(total for total, _ in again[2:]),
        again_token_s=statistics.median(token for _, token in again[2:]),
        kernels=seen.seen,
        worst=sampler.worst(),
        paths=parity.path_counts() if case.backend == TESTED else {},
        records=kept,
    )


def prebuild(job: dict[str, Any]) -> dict[str, Any]:
    """Compile what the wheel would carry for the two models, for this GPU."""
    root = HERE.parent if (HERE.parent / "ci").is_dir() else HERE.parents[2]
    sys.path.insert(0, str(root))
    from ci.aot import compile_list

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    tree = Path(spec.origin).parents[1]
    folder = Path(job["prebuilt"]).parent
    listed = folder / "start_up_list.py"
    listed.write_text(
        "from dataclasses import replace\n\n"
        "from ci.aot.lists import segmented_attention as full\n\n"
        f"MODELS = [m for m in full.MODELS if m.name in {LISTED!r}]\n"
        "MODELS = [replace(m, kv_dtypes=('auto',)) for m in MODELS]\n"
        "LIST = full.kernel_list('start_up', MODELS)\n"
    )
    # The interpreter with what vLLM imports: compilations keep nothing of PYTHONPATH.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [path for path in given if path and Path(path) != tree]
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{os.pathsep.join(rest)}"\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    manifest = compile_list(
        tree,
        [str(listed)],
        [os.environ.get("FAKE_GFX", "gfx1201")],
        Path(job["prebuilt"]),
        jobs=job["jobs"],
        python=str(python),
        target=job["target"],
    )
    return dict(
        objects=len(manifest.objects),
        bytes=sum(item.size for item in manifest.objects),
        triton=manifest.triton["version"],
    )


# ---------------------------------------------------------------- the parent


def copy_others(source: Path, target: Path) -> int:
    """Copy a Triton cache without the segmented kernels.

    Returns:
        Number of entries that were copied; none if there is no source.

    """
    copied = 0
    for entry in source.iterdir() if source.is_dir() else ():
        names = {path.stem.removeprefix("__grp__") for path in entry.iterdir()}
        if names & set(OUR_KERNELS):
            continue
        shutil.copytree(entry, target / entry.name)
        # Entries list their files by absolute path.
        for group in (target / entry.name).glob("__grp__*.json"):
            group.write_text(group.read_text().replace(f"{source}/", f"{target}/"))
        copied += 1
    return copied


def read_libraries() -> None:
    """Bring the libraries of torch and Triton into memory.

    The first process to use a kernel of theirs would wait for the disk.
    """
    begin, read = time.monotonic(), 0
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    site = Path(spec.origin).parents[1]
    for folder in (site / "torch" / "lib", site / "nvidia", site / "triton"):
        for path in folder.rglob("*.so*"):
            with suppress(OSError), path.open("rb") as stream:
                while block := stream.read(1 << 24):
                    read += len(block)
    print(f"{read / 1e9:.1f} GB of libraries in {time.monotonic() - begin:.0f} s", flush=True)


def count(result: dict[str, Any], what: str, *phases: str) -> int:
    """Add up the kernels of some phases."""
    return sum(
        sum(kernels.get(what, {}).values())
        for phase, kernels in result["kernels"].items()
        if phase in phases
    )


AFTER = ("first request", "later", "sweep")


def judge(case: Case, result: dict[str, Any]) -> list[str]:
    """Say what is wrong with a start; nothing if all is well."""
    if "error" in result:
        return [result["error"]]
    if case.backend != TESTED:
        return []
    wrong = []
    for how in ("compiled", "found", "loaded"):
        if late := count(result, f"ours {how}", *AFTER):
            wrong.append(f"{late} of our kernels {how} after the start")
    compiled, found = (count(result, f"ours {how}", "start") for how in ("compiled", "found"))
    if not compiled + found:
        wrong.append("no segmented kernel was loaded: the start was not measured")
    cached = (case.prebuilt and not case.tuned) or case.name.endswith("warm")
    if cached and compiled:
        wrong.append(f"{compiled} of our kernels compiled in spite of the cache")
    if (case.records or case.name == "tuned, warm") and not any(
        " 0 measured" in line for line in result["lines"]
    ):
        wrong.append("something was measured again")
    if not result["paths"].get("segmented"):
        wrong.append("no call took the segmented kernels")
    return wrong


def table(results: dict[str, dict[str, Any]]) -> str:
    """Lay out all starts."""
    rows = [
        [
            "",
            "start s",
            "ours compiled/found",
            "others",
            "first request ms",
            "(token)",
            "later ms",
            "(token)",
            "first/later",
            "ours after start",
            "others",
        ]
    ]
    for name, result in results.items():
        if "error" in result:
            rows.append([name, "ERROR", *[""] * 9])
            continue
        pairs = {
            (whose, phase): "/".join(
                str(count(result, f"{whose} {how}", *phases)) for how in ("compiled", "found")
            )
            for whose in ("ours", "others")
            for phase, phases in (("start", ("start",)), ("after", AFTER))
        }
        rows.append(
            [
                name,
                f"{result['start_s']:.1f}",
                pairs["ours", "start"],
                pairs["others", "start"],
                f"{1e3 * result['first_s']:.0f}",
                f"{1e3 * result['first_token_s']:.0f}",
                f"{1e3 * result['again_s']:.0f}",
                f"{1e3 * result['again_token_s']:.0f}",
                f"{result['first_s'] / result['again_s']:.2f}",
                pairs["ours", "after"],
                pairs["others", "after"],
            ]
        )
    return children.columns(rows)


class Run:
    """All starts, as two tracks that wait for what they need."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.deadline = children.Deadline(options.budget)
        self.results: dict[str, dict[str, Any]] = {}
        self.prebuilt: dict[str, Any] = {}
        self.prebuilt_done = threading.Event()
        self.tuning_done = threading.Event()
        self.draft = True
        self.lock = threading.Lock()

    def child(self, part: str, name: str, gpu: int, **job: Any) -> dict[str, Any]:
        """Run one child with caches of its own."""
        caches = self.folder / "caches" / job.get("case", {}).get("caches", name)
        result = children.run_child(
            HERE,
            dict(
                part=part,
                prebuilt=str(self.folder / "aot"),
                records=str(self.folder / "records.json"),
                target=self.options.target,
                jobs=self.options.jobs,
                tuning_s=self.options.tuning_s,
                draft=self.draft,
                jit_warmup=self.options.all_empty,
                turn=str(self.folder / f"gpu{gpu}"),
                **job,
            ),
            name=name,
            gpus=str(gpu) if part == "start" else "",
            limit_s=self.options.limit + (self.options.tuning_s if part == "start" else 0),
            deadline=self.deadline,
            env={
                "TRITON_CACHE_DIR": str(caches / "triton"),
                "VLLM_CACHE_ROOT": str(caches / "vllm"),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "FAKE_GPU_COUNT": str(self.options.gpus),
            },
        )
        found = FOLLOWED.findall(result.pop("log", ""))
        result["lines"] = list(dict.fromkeys(one or other for one, other in found))
        return result

    def seed(self, case: Case) -> None:
        """Let a case begin with vLLM's other kernels."""
        folder = self.folder / "caches"
        if self.options.all_empty or case.others is None:
            return
        copy_others(folder / case.others / "triton", folder / case.caches / "triton")

    def start(self, case: Case, gpu: int) -> None:
        """Run one case; without a draft model if it fails with one."""
        result = self.child("start", case.name, gpu, case=dataclasses.asdict(case))
        good = any("error" not in other for other in self.results.values())
        if "error" in result and not good:
            print(f"{case.name}: {result['error']}\nNow without a draft model.", flush=True)
            self.draft = False
            result = self.child("start", case.name, gpu, case=dataclasses.asdict(case))
        with self.lock:
            self.results[case.name] = result
            wrong = judge(case, result)
            print(f"{case.name}: {'; '.join(wrong) if wrong else 'ok'}", flush=True)
            self.save()

    def save(self) -> None:
        """Write what is there so far."""
        content = dict(draft=self.draft, prebuilt=self.prebuilt, starts=self.results)
        children.keep("start_up.json", json.dumps(content, indent=1))

    def tuned(self) -> None:
        """Measure, start again, and start with the records elsewhere."""
        gpu = self.options.gpus - 1
        self.start(TUNED[0], gpu)
        self.tuning_done.set()
        self.together(TUNED[1:], gpu)

    def static(self) -> None:
        """Start with the static choices; not while the only GPU is being measured on."""
        compiling = threading.Thread(target=self.compile)
        compiling.start()
        if self.options.gpus == 1:
            self.tuning_done.wait(self.deadline.left())
        self.start(STATIC[0], 0)
        self.together(STATIC[1:], 0)

    def together(self, cases: list[Case], gpu: int) -> None:
        """Run what depends on the first start only; requests take turns."""
        self.prebuilt_done.wait(self.deadline.left())
        for case in cases:
            self.seed(case)
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as threads:
            list(threads.map(lambda case: self.start(case, gpu), cases))

    def compile(self) -> None:
        """Make what the wheel would carry."""
        self.prebuilt = self.child("prebuild", "prebuild", 0)
        self.prebuilt_done.set()
        print(f"prebuilt for {self.options.target}: {self.prebuilt}", flush=True)

    def all(self) -> bool:
        """Run everything; whether all was as it should be."""

        def guarded(track: Callable[[], None]) -> None:
            try:
                track()
            except Exception as error:
                print(f"{track.__name__}: {error!r}", flush=True)
            finally:
                self.tuning_done.set()
                self.prebuilt_done.set()

        threading.Thread(target=read_libraries, daemon=True).start()
        tracks = [
            threading.Thread(target=guarded, args=(track,)) for track in (self.tuned, self.static)
        ]
        for thread in tracks:
            thread.start()
        for thread in tracks:
            thread.join()
        order = [*STATIC, *TUNED]
        missing = {"error": "not run"}
        self.results = {c.name: self.results.get(c.name, missing) for c in order}
        self.save()
        text = [
            f"target 32/8 heads of 128, 2 layers, draft 16/8: {'yes' if self.draft else 'NO'}; "
            f"prompt of {PROMPT} tokens, {NEW_TOKENS} new ones",
            table(self.results),
        ]
        wrong = {c.name: judge(c, self.results[c.name]) for c in order}
        text += [f"WRONG {name}: {'; '.join(why)}" for name, why in wrong.items() if why]
        for name, result in self.results.items():
            late = {
                phase: what
                for phase, what in result.get("kernels", {}).items()
                if phase != "start" and what
            }
            if late:
                text.append(f"{name}, after the start: {json.dumps(late)}")
        for name, result in self.results.items():
            text += [f"{name}: {line}" for line in result.get("lines", [])]
            for place, spent in result.get("worst", {}).items():
                text.append(f"{name}, first request: {spent} ms in {place}")
        text += self.results["tuned, empty"].get("records", [])
        print("\n".join(text), flush=True)
        children.keep("start_up.txt", "\n".join(text) + "\n")
        return self.draft and not any(wrong.values()) and "error" not in self.prebuilt


def dry_run() -> None:
    """Build every configuration, as the engine would."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        for case in (*STATIC, *TUNED):
            args = engine_args(case, Path(folder), draft=True, tuning_s=60.0, jit_warmup=True)
            config = EngineArgs(**args).create_engine_config()
            kernel = config.kernel_config
            print(
                f"{case.name}: {config.attention_config.backend}, tuning "
                f"{kernel.enable_rocm_segmented_attn_autotune}, warm-up "
                f"{kernel.enable_jit_warmup}, draft on "
                f"{config.speculative_config.attention_backend}, graphs "
                f"{config.compilation_config.cudagraph_mode} of "
                f"{config.compilation_config.cudagraph_capture_sizes}"
            )


def main() -> int:
    """Parse arguments, run, and print the table; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=1, help="tuning gets one of two")
    parser.add_argument("--tuning-s", type=float, default=100.0, help="budget of tuning")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds in all")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a child")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument("--target", default="cuda:90", help="Triton's name of this GPU")
    parser.add_argument("--all-empty", action="store_true", help="no other kernels cached")
    parser.add_argument("--dry-run", action="store_true", help="only build configurations")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        children.answer(lambda: {"start": start, "prebuild": prebuild}[job["part"]](job))
    if options.dry_run:
        dry_run()
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        fine = Run(options, Path(folder)).all()
    print(f"{'OK' if fine else 'NOT OK'} in {time.monotonic() - begin:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
