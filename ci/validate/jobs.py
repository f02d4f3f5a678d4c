"""Run the jobs of a plan: on this machine's GPUs, or on a cluster with the same code.

A job is one model, variant and task, in a process of its own.  Its result is a file, written
whole; a job whose result is there and was made by the same software, model and settings is
not run again.
"""

import collections
import concurrent.futures
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.errors import StackError
from ci.paths import ROOT
from ci.validate import driver, engine, guidellm, store, variants
from ci.validate.variants import BASELINE, Model, Plan, Variant

_ORDER = ("generate", "embed", "spec", "gsm8k")


@dataclass(frozen=True)
class Options:
    """Settings of a run.

    Attributes:
        out: Folder of the results.
        workers: Engines at a time on each GPU; for speed there is only one pair.
        gpus: GPUs to use.
        timeout: Seconds that a job may take.
        budget: Seconds that all of it may take; what has not begun by then is not run.
        top: Tokens recorded at each position.
        repeats: Of each measurement of speed.
        again: Run what has a result, too.
        guidellm: Let GuideLLM drive conversations over HTTP where it is installed.
    """

    out: Path
    workers: int = 1
    gpus: int = 1
    timeout: float = 1800.0
    budget: float = float("inf")
    top: int = 10
    repeats: int = 5
    again: bool = False
    guidellm: bool = True


@dataclass(frozen=True)
class Job:
    """One model, variant and task."""

    model: Model
    variant: Variant
    task: str

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"{self.model.name} / {self.variant.name} / {self.task}"

    def result(self, folder: Path) -> Path:
        """Return where its result lies; positions are many, so that file is compressed."""
        suffix = ".json" if self.task in ("perf", "gsm8k", "spec") else ".json.gz"
        name = store.slug(self.variant.name) + suffix
        return folder / store.slug(self.model.name) / self.task / name

    def continuations(self, folder: Path) -> Path:
        """Return where the baseline's continuations lie."""
        return folder / store.slug(self.model.name) / self.task / "continuations.json.gz"


def arguments_of(model: Model, variant: Variant, task: str) -> dict[str, Any]:
    """Return the arguments of ``LLM`` of a job."""
    own = variants.neutral_norms(model.engine) if variant.served_by == "norms" else {}
    merged = variants.merge(model.engine, variant.engine, own)
    if task == "spec":
        spec = dict(model.spec or {})
        backend = (variant.engine.get("attention_config") or {}).get("backend")
        if backend and spec.get("method") not in (None, "ngram", "suffix"):
            # A drafter does not inherit the target's backend.
            spec.setdefault("attention_backend", backend)
        merged["speculative_config"] = spec
    return merged


def plan_jobs(plan: Plan) -> list[Job]:
    """Return all jobs but those for speed; baselines first, so that nothing waits long."""
    jobs = []
    for model in plan.models:
        for task in _ORDER:
            if task not in model.tasks:
                continue
            if task == "spec" and not model.spec:
                raise StackError(
                    f"model {model.name} has the task spec and no speculative configuration",
                    f"[models.{model.name}.spec] in --config",
                )
            for variant in plan.of(model):
                if task == "gsm8k" and variant.name == "neutral-batch":
                    continue
                jobs.append(Job(model, variant, task))
    return sorted(jobs, key=lambda job: job.variant.name != BASELINE)


def fingerprint(job: Job, options: Options, identity: Mapping[str, Any]) -> str:
    """Return what a result must carry to be taken instead of running the job."""
    base = arguments_of(job.model, variants.BUILTIN[BASELINE], job.task)
    folder = engine.model_folder(job.model.path)
    config = (folder / "config.json") if folder else None
    return store.digest(
        {
            "schema": store.SCHEMA,
            "code": identity["code"],
            "versions": identity["versions"],
            "set": identity["set_hash"],
            "arch": identity["machine"]["arch"],
            "device": identity["machine"]["device"],
            "engine": [arguments_of(job.model, job.variant, job.task), base],
            "env": [dict(job.model.env), dict(job.variant.env)],
            "model": [
                job.model.path,
                config.read_text() if config is not None and config.is_file() else "",
                engine.weight_bytes(folder) if folder else 0,
            ],
            "task": [job.task, job.model.prompts, job.model.new_tokens, job.model.longest],
            "spec": job.model.spec if job.task == "spec" else None,
            "perf": dict(job.model.perf) if job.task == "perf" else None,
            "top": options.top,
        }
    )


class Children:
    """All processes that this run started; they end with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[Any]] = set()
        self.stopping = False

    def start(self, command: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Start a process in a group of its own."""
        with self._lock:
            if self.stopping:
                raise StackError("the run was stopped")
            child = subprocess.Popen(command, start_new_session=True, **kwargs)
            self._running.add(child)
        return child

    def end(self, child: subprocess.Popen[Any]) -> None:
        """End a process and all that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, number)
            except (ProcessLookupError, PermissionError):
                break
            try:
                child.wait(5 if number == signal.SIGTERM else 30)
            except subprocess.TimeoutExpired:
                continue
        with self._lock:
            self._running.discard(child)

    def end_all(self) -> None:
        """End everything, and let nothing start any more."""
        with self._lock:
            self.stopping = True
            running = list(self._running)
        for child in running:
            self.end(child)


class Runner:
    """Runs jobs on this machine.

    Args:
        options: Settings.
        identity: See `store.identity`, with ``machine`` from `probe`.
        say: Called with a line for each job that ends.
    """

    def __init__(
        self, options: Options, identity: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self.options = options
        self.identity = identity
        self.say = say
        self.children = Children()
        self.end = time.monotonic() + options.budget
        self.folder = options.out / store.slug(identity["machine"]["arch"])
        self._lock = threading.Lock()
        self._load = [0] * options.gpus
        self.seen: collections.Counter[str] = collections.Counter()

    # ---- one job

    def left(self) -> float:
        """Seconds that a job may take from now."""
        return min(self.options.timeout, self.end - time.monotonic())

    def _head(self, job: Job, mark: str) -> dict[str, Any]:
        return {
            "schema": store.SCHEMA,
            "created": store.now(),
            "fingerprint": mark,
            "identity": self.identity,
            "model": {"name": job.model.name, "path": job.model.path},
            "variant": job.variant.name,
            "role": job.variant.role,
            "about": job.variant.about,
            "served_by": job.variant.served_by,
            "task": job.task,
            "engine": arguments_of(job.model, job.variant, job.task),
            "env": {**job.model.env, **job.variant.env},
        }

    def kept(self, job: Job, mark: str) -> bool:
        """Say whether a job's result is there already."""
        path = job.result(self.folder)
        if self.options.again or not path.is_file():
            return False
        try:
            found = store.read_json(path)
        except StackError:
            return False
        return (
            found.get("fingerprint") == mark
            and not found.get("error")
            and (job.task != "generate" or job.continuations(self.folder).is_file())
        )

    def too_large(self, model: Model) -> str | None:
        """Say why a model cannot run here; None if nothing speaks against it."""
        folder = engine.model_folder(model.path)
        if folder is not None and not (folder / "config.json").is_file():
            return f"{folder} has no config.json"
        if folder is None and os.environ.get("HF_HUB_OFFLINE") == "1":
            return f"{model.path} is no directory and not in the cache, and this is offline"
        memory = int(self.identity["machine"].get("memory") or 0)
        needed = engine.weight_bytes(folder) if folder else engine.hub_bytes(model.path)
        if not memory or needed is None:
            return None
        across = int(model.engine.get("tensor_parallel_size", 1))
        fixed = model.engine.get("kv_cache_memory_bytes")
        return variants.fits(
            needed,
            int(fixed or 2**30) * across,
            memory * across,
            # A cache of fixed size does not heed the share that vLLM may use.
            0.98 if fixed else float(model.engine.get("gpu_memory_utilization", 0.92)),
        )

    def run(self, job: Job) -> str:
        """Run a job; return "done", "kept", "failed" or "not run"."""
        try:
            state, note = self._run(job)
        except StackError as error:
            state, note = "failed", str(error)
        if state in ("failed", "not run") and job.variant.name == BASELINE:
            # Others may be waiting for it.
            store.write_bytes(job.continuations(self.folder).with_name("failed"), note.encode())
        with self._lock:
            self.seen[state] += 1
        self.say(f"{state:<8} {job.label}{': ' + note if note else ''}")
        return state

    def _run(self, job: Job) -> tuple[str, str]:
        path = job.result(self.folder)
        mark = fingerprint(job, self.options, self.identity)
        head = self._head(job, mark)
        if self.kept(job, mark):
            return "kept", ""
        if job.task == "gsm8k" and importlib.util.find_spec("lm_eval") is None:
            missing = "lm-eval is not installed (pip install lm-eval)"
            store.write_json(path, head | {"not_run": missing})
            return "not run", missing
        if why := self.too_large(job.model):
            store.write_json(path, head | {"not_run": why})
            return "not run", why
        if self.children.stopping:
            return "not run", "stopped"
        if self.left() < 10:
            return "not run", "the time given is used up"
        path.unlink(missing_ok=True)
        if job.variant.name == BASELINE:
            # What follows the old ones is of no use.
            job.continuations(self.folder).unlink(missing_ok=True)
            job.continuations(self.folder).with_name("failed").unlink(missing_ok=True)
        with self._gpu() as env:
            result = self._child(job, env)
        if self.children.stopping and "error" in result:
            return "not run", "stopped"
        store.write_json(path, head | result)
        if "error" in result:
            return "failed", str(result["error"])
        return "done", f"{result['seconds']:.0f} s"

    def _gpu(self) -> "_Gpu":
        return _Gpu(self._load, self._lock)

    def _files(self, job: Job) -> tuple[Path, Path, Path]:
        base = self.options.out / "logs" / store.slug(job.label)
        base.parent.mkdir(parents=True, exist_ok=True)
        return (
            base.with_suffix(base.suffix + ".job.json"),
            base.with_suffix(base.suffix + ".raw.json.gz"),
            base.with_suffix(base.suffix + ".log"),
        )

    def _environment(self, job: Job, env: Mapping[str, str]) -> dict[str, str]:
        path = os.environ.get("PYTHONPATH", "")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)])),
            **env,
            **job.model.env,
            **job.variant.env,
        }

    def _job_data(self, job: Job, **more: Any) -> dict[str, Any]:
        return {
            "task": job.task,
            "role": job.variant.role,
            "path": job.model.path,
            "engine": arguments_of(job.model, job.variant, job.task),
            "prompts": job.model.prompts,
            "new_tokens": job.model.new_tokens,
            "longest": job.model.longest,
            "prompt_positions": 32,
            "perf": dict(job.model.perf),
            "top": self.options.top,
            "continuations": str(job.continuations(self.folder)),
            "wait": max(self.left() - 5, 1),
            **more,
        }

    def _child(self, job: Job, env: Mapping[str, str]) -> dict[str, Any]:
        described, raw, log = self._files(job)
        raw.unlink(missing_ok=True)
        store.write_json(described, self._job_data(job, result=str(raw)))
        left = self.left()
        with log.open("wb") as output:
            child = self.children.start(
                [sys.executable, "-m", "ci.validate.engine", str(described)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=ROOT, env=self._environment(job, env),
            )  # fmt: skip
            late = False
            try:
                child.wait(left)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                self.children.end(child)
        if raw.is_file():
            result: dict[str, Any] = store.read_json(raw)
            raw.unlink()
            described.unlink()
        elif late:
            result = {"error": f"no result after {left:.0f} s"}
        else:
            result = {"error": f"exit code {child.returncode} without a result"}
        if "error" in result:
            result["log"] = _end_of(log)
        return result

    # ---- many

    def run_all(self, jobs: Sequence[Job], plan: Plan) -> None:
        """Run all jobs, then (or beside them on a GPU of its own) the speed jobs."""
        speed = [m for m in plan.models if "perf" in m.tasks]
        beside = bool(speed) and bool(jobs) and self.options.gpus > 1
        accuracy_gpus = self.options.gpus - 1 if beside else self.options.gpus
        self._load = [0] * accuracy_gpus
        thread = threading.Thread(target=self._speed, args=(speed, plan, accuracy_gpus))
        if beside:
            thread.start()
        with concurrent.futures.ThreadPoolExecutor(self.options.workers * accuracy_gpus) as pool:
            list(pool.map(self.run, jobs))
        if beside:
            thread.join()
        elif speed:
            self._speed(speed, plan, 0)

    def _speed(self, models: Sequence[Model], plan: Plan, gpu: int) -> None:
        for model in models:
            candidates = [v for v in plan.of(model) if v.role == "candidate"]
            # The baseline against itself says what the clock's own noise is.
            repeat = plan.variants[variants.REPEAT]
            self.speed(model, plan.variants[BASELINE], [repeat, *candidates], gpu)

    def speed(self, model: Model, base: Variant, others: Sequence[Variant], gpu: int = 0) -> None:
        """Measure variants against the baseline: all loaded, one measuring at a time.

        Results are written after each round, so that a run that is stopped has some.
        """
        jobs = [Job(model, v, "perf") for v in (base, *others)]
        marks = {j.variant.name: fingerprint(j, self.options, self.identity) for j in jobs}
        jobs = jobs[:1] + [j for j in jobs[1:] if not self._complete(j, marks[j.variant.name])]
        if len(jobs) == 1:
            self.say(f"kept     {model.name} / perf")
            return
        why = self.too_large(model)
        if why or self.left() < 30:
            for job in jobs[1:]:
                why = why or "the time given is used up"
                store.write_json(
                    job.result(self.folder),
                    self._head(job, marks[job.variant.name]) | {"not_run": why},
                )
                self.say(f"not run  {job.label}: {why}")
            return
        for group in self._groups(jobs):
            try:
                self._speed_group(group, marks, gpu)
            except StackError as error:
                self.say(f"failed   {model.name} / perf: {error}")

    def _complete(self, job: Job, mark: str) -> bool:
        path = job.result(self.folder)
        if self.options.again or not path.is_file():
            return False
        found = store.read_json(path)
        return bool(found.get("complete")) and found.get("fingerprint") == mark

    def _groups(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Return which engines are loaded together: as many as the card holds."""
        model = jobs[0].model
        memory = int(self.identity["machine"].get("memory") or 0)
        folder = engine.model_folder(model.path)
        each = (engine.weight_bytes(folder) if folder else 0) * 1.1 + int(
            model.engine.get("kv_cache_memory_bytes") or 2**30
        ) + 2**30  # fmt: skip
        room = int(0.9 * memory // each) if memory else len(jobs)
        size = max(1, min(room - 1, len(jobs) - 1))
        if room < 2:
            self.say(
                f"note     {model.name} / perf: two engines do not fit; each is loaded anew "
                "for every round"
            )
        others = jobs[1:]
        return [[jobs[0], *others[i : i + size]] for i in range(0, len(others), size)]

    def _speed_group(self, jobs: Sequence[Job], marks: Mapping[str, str], gpu: int) -> None:
        model = jobs[0].model
        memory = int(self.identity["machine"].get("memory") or 0)
        resident = not memory or len(jobs) * self._footprint(model) <= 0.9 * memory
        state = _Speed(self, jobs, marks)
        env = visible(gpu) if self.options.gpus > 1 else {}
        if resident:
            share = 0.9 / len(jobs)
            engines = [state.start(job, env, share) for job in jobs]
            try:
                state.measure(engines, range(self.options.repeats + 1))
            finally:
                for child in engines:
                    child.stop()
        else:
            for repeat in range(1, self.options.repeats + 1):
                for job in jobs if repeat % 2 else list(jobs)[::-1]:
                    child = state.start(job, env, None)
                    try:
                        state.measure([child], [0, repeat], last=job is jobs[-1])
                    finally:
                        child.stop()
        if self.options.guidellm and (command := guidellm.find()):
            state.converse(command, env, 0.9 / len(jobs) if resident else None)
        state.write(complete=True)
        self.say(f"done     {model.name} / perf: {state.summary()}")

    def _footprint(self, model: Model) -> float:
        folder = engine.model_folder(model.path)
        cache = int(model.engine.get("kv_cache_memory_bytes") or 2**30)
        return (engine.weight_bytes(folder) if folder else 0) * 1.1 + cache + 2**30


class _Gpu:
    """The GPU with the fewest jobs, while one runs."""

    def __init__(self, load: list[int], lock: threading.Lock) -> None:
        self._load, self._lock = load, lock

    def __enter__(self) -> dict[str, str]:
        with self._lock:
            self._mine = self._load.index(min(self._load))
            self._load[self._mine] += 1
        return visible(self._mine) if len(self._load) > 1 else {}

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._load[self._mine] -= 1


def visible(gpu: int) -> dict[str, str]:
    """Return the environment in which only the n-th of the visible GPUs is left."""
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if listed := [x for x in os.environ.get(name, "").split(",") if x.strip()]:
            return {name: listed[gpu % len(listed)]}
    return {"CUDA_VISIBLE_DEVICES": str(gpu)}


class _Resident:
    """An engine that measures on command."""

    def __init__(
        self, runner: Runner, job: Job, env: Mapping[str, str], share: float | None
    ) -> None:
        self.runner, self.job = runner, job
        read, write = os.pipe()
        described, _, log = runner._files(job)
        data = runner._job_data(job, reply_fd=write)
        fixed = "kv_cache_memory_bytes" in data["engine"]
        if share is not None and not fixed:
            data["engine"]["gpu_memory_utilization"] = round(share, 3)
        store.write_json(described, data)
        self._log = log.open("wb")
        self.log = log
        try:
            self.child = runner.children.start(
                [sys.executable, "-m", "ci.validate.engine", str(described)],
                stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT,
                cwd=ROOT, env=runner._environment(job, env), pass_fds=[write],
            )  # fmt: skip
        finally:
            os.close(write)
        self._replies = os.fdopen(read, "rb", buffering=0)
        self._rest = b""
        self.ready: dict[str, Any] | None = None
        # Engines that size their cache by what is free must start one after another.
        if not fixed:
            self.wait_ready()

    def wait_ready(self) -> dict[str, Any]:
        if self.ready is None:
            self.ready = self._read()
        return self.ready

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.child.stdin is not None
        try:
            self.child.stdin.write((json.dumps(command) + "\n").encode())
            self.child.stdin.flush()
        except OSError:
            raise StackError(f"{self.job.label} ended: {_reason(self.log)}") from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + self.runner.left()
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                raise StackError(f"{self.job.label} gave no answer in the time it had")
            found = self._replies.read(1 << 16)
            if not found:
                raise StackError(f"{self.job.label} ended: {_reason(self.log)}")
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        try:
            if self.child.stdin is not None:
                self.child.stdin.close()
        except OSError:
            pass  # it is gone
        self.runner.children.end(self.child)
        self._replies.close()
        self._log.close()


class _Server:
    """``vllm serve`` for one variant, up when the constructor returns."""

    def __init__(
        self, runner: Runner, job: Job, env: Mapping[str, str], share: float | None
    ) -> None:
        self.runner, self.job, self.port = runner, job, guidellm.free_port()
        arguments = arguments_of(job.model, job.variant, job.task)
        if share is not None and "kv_cache_memory_bytes" not in arguments:
            arguments["gpu_memory_utilization"] = round(share, 3)
        self._described, _, log = runner._files(job)
        self._log = log.with_suffix(".serve.log").open("wb")
        self._env = runner._environment(job, env)
        self.child = runner.children.start(
            guidellm.serve_command(job.model.path, arguments, self.port),
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            cwd=ROOT, env=self._env,
        )  # fmt: skip
        try:
            guidellm.wait_until_up(self.port, runner.left(), lambda: self.child.poll() is None)
        except StackError:
            self.stop()
            raise

    def converse(self, command: Sequence[str], repeat: int) -> dict[str, Any]:
        """Run one repeat; return its summary."""
        report = self._described.with_suffix(".guidellm.json")
        report.unlink(missing_ok=True)
        settings = {**driver.DEFAULTS, **self.job.model.perf}
        words = guidellm.run_command(
            command, self.port, self.job.model.path, settings, repeat, report
        )
        child = self.runner.children.start(
            words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            cwd=ROOT, env=self._env,
        )  # fmt: skip
        try:
            child.wait(self.runner.left())
        except subprocess.TimeoutExpired:
            raise StackError("GuideLLM did not end in the time it had") from None
        finally:
            self.runner.children.end(child)
        if child.returncode != 0 or not report.is_file():
            raise StackError(f"GuideLLM ended with code {child.returncode}: see {self._log.name}")
        return guidellm.read(report)

    def stop(self) -> None:
        self.runner.children.end(self.child)
        self._log.close()


@dataclass
class _Speed:
    """The measurements of one model, and their files."""

    runner: Runner
    jobs: Sequence[Job]
    marks: Mapping[str, str]
    found: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    loads: list[driver.Workload] = field(default_factory=list)

    def start(self, job: Job, env: Mapping[str, str], share: float | None) -> _Resident:
        return _Resident(self.runner, job, env, share)

    def measure(
        self, engines: Sequence[_Resident], repeats: Sequence[int] | range, last: bool = True
    ) -> None:
        """Run all workloads on all engines in turn; repeat 0 warms up and is not kept."""
        usable = []
        for one in engines:
            name = one.job.variant.name
            try:
                self.ready[name] = one.wait_ready()
                usable.append(one)
            except StackError as error:
                self.failed[name] = str(error)
        if not usable or (len(engines) > 1 and usable[0].job.variant.name != BASELINE):
            raise StackError("; ".join(self.failed.values()))
        limit = min(self.ready[one.job.variant.name]["limit"] for one in usable)
        self.loads, _ = driver.workloads(usable[0].job.model.perf, limit, range(100), 0)
        for repeat in repeats:
            for load in self.loads:
                for one in usable if repeat % 2 else usable[::-1]:
                    name = one.job.variant.name
                    if name in self.failed:
                        continue
                    try:
                        answer = one.ask(workload=load.name, repeat=repeat)
                    except StackError as error:
                        self.failed[name] = str(error)
                        if name == BASELINE:
                            raise
                        continue
                    if answer.get("error"):
                        self.failed[name] = answer["error"]
                    elif repeat:
                        self.found.setdefault(load.name, {}).setdefault(name, []).append(
                            answer["summary"]
                        )
                        self.ready[name]["report"] = answer["report"]
            if repeat and last:
                self.write(complete=False)
            if self.runner.left() < 5:
                break

    def converse(self, command: Sequence[str], env: Mapping[str, str], share: float | None) -> None:
        """Let GuideLLM converse with a server of each variant, in turn.

        Args:
            command: GuideLLM's.
            env: Which GPU.
            share: Of the GPU's memory for each of the servers, all up at once; None has
                each started anew for every round.
        """
        runner, path = self.runner, self.jobs[0].model.path
        folder = engine.model_folder(path)
        if folder and not any((folder / f).exists() for f in engine.TOKENIZER_FILES):
            runner.say(f"note     {path}: GuideLLM needs a tokenizer; the built-in driver did it")
            return
        jobs = [j for j in self.jobs if j.variant.name not in self.failed]
        servers: dict[str, _Server] = {}
        try:
            for repeat in range(self.runner.options.repeats + 1):
                for job in jobs if repeat % 2 else jobs[::-1]:
                    name = job.variant.name
                    if runner.left() < 20:
                        return
                    if name not in servers:
                        servers[name] = _Server(runner, job, env, share)
                    summary = servers[name].converse(command, repeat)
                    if repeat:
                        by_name = self.found.setdefault(guidellm.NAME, {})
                        by_name.setdefault(name, []).append(summary)
                    if share is None:
                        servers.pop(name).stop()
        except StackError as error:
            runner.say(f"note     {path}: GuideLLM: {error}; the built-in driver's curve stands")
        finally:
            for server in servers.values():
                server.stop()

    def write(self, complete: bool) -> None:
        """Write what there is, a file for each variant, the baseline's repeats beside."""
        kinds = {load.name: load.kind for load in self.loads}
        for job in self.jobs[1:]:
            name = job.variant.name
            head = self.runner._head(job, self.marks[name])
            result: dict[str, Any] = {
                "complete": complete and name not in self.failed,
                "workloads": {
                    load: {
                        "kind": kinds.get(load, "turns"),
                        "base": by_name.get(BASELINE, []),
                        "candidate": by_name.get(name, []),
                    }
                    for load, by_name in self.found.items()
                },
                "left": self.ready.get(name, {}).get("left", []),
                "report": self.ready.get(name, {}).get("report"),
                "base_report": self.ready.get(BASELINE, {}).get("report"),
                "load_seconds": self.ready.get(name, {}).get("load_seconds"),
            }
            if name in self.failed:
                result["error"] = self.failed[name]
            store.write_json(job.result(self.runner.folder), head | result)

    def summary(self) -> str:
        rounds = {
            name: max((len(by.get(name, [])) for by in self.found.values()), default=0)
            for name in (j.variant.name for j in self.jobs)
        }
        text = ", ".join(f"{name} {count} rounds" for name, count in rounds.items())
        return text + "".join(f"; {name}: {why}" for name, why in self.failed.items())


def _end_of(log: Path, size: int = 3000) -> str:
    try:
        return log.read_bytes()[-size:].decode("utf-8", "replace")
    except OSError:
        return ""


def _reason(log: Path) -> str:
    lines = [x.strip() for x in _end_of(log).splitlines() if x.strip()]
    errors = [x for x in lines if "Error" in x]
    return (errors or lines or ["no output"])[-1][:300]


def probe_machine(env: Mapping[str, str] | None = None, timeout: float = 300) -> dict[str, Any]:
    """Ask a child what the GPU is: this process keeps clear of it.

    Raises:
        StackError: vLLM cannot be imported, or there is no GPU that it knows.
    """
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        described, result = Path(folder) / "job.json", Path(folder) / "result.json"
        store.write_json(described, {"task": "probe", "result": str(result)})
        try:
            done = subprocess.run(
                [sys.executable, "-m", "ci.validate.engine", str(described)],
                cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise StackError(f"vLLM did not name the GPU within {timeout:.0f} s") from None
        found: dict[str, Any] = store.read_json(result) if result.is_file() else {}
    if "arch" not in found:
        lines = [x for x in (done.stdout + done.stderr).splitlines() if x.strip()]
        why = found.get("error") or (lines or ["no output"])[-1]
        raise StackError(f"vLLM cannot name this machine's GPU: {why}")
    return found


# ---------------------------------------------------------------- clusters


def run_variant(
    plan: Plan, model: Model, variant: Variant, options: Options, wanted: str | None = None
) -> dict[str, int]:
    """Run all tasks of one model and variant: the body of one job of a cluster.

    Args:
        plan: Models and variants.
        model: The model.
        variant: The variant.
        options: Settings.
        wanted: The architecture that the job was sent for.

    Raises:
        StackError: The machine has another architecture.
    """
    machine = probe_machine()
    if wanted and machine["arch"] != wanted:
        raise StackError(f"this machine is {machine['arch']}, the job is for {wanted}")
    runner = Runner(options, {**store.identity(), "machine": machine}, print)
    for job in plan_jobs(plan):
        if job.model == model and job.variant == variant:
            runner.run(job)
    if "perf" in model.tasks and variant.role != "baseline":
        runner.speed(model, plan.variants[BASELINE], [variant])
    return dict(runner.seen)


def submit(
    plan: Plan, options: Options, settings: Mapping[str, Mapping[str, Any]], executor: Any = None
) -> list[tuple[str, Any]]:
    """Send one job for each model, architecture and variant to Slurm.

    Variants wait for their model's baseline.  Results lie in ``options.out``, which all
    nodes must see; sent again, jobs keep what is there.

    Args:
        plan: Models and variants.
        options: Settings.
        settings: For each architecture submitit's parameters (``slurm_partition``, ...);
            the name "" stands for whatever the nodes have.
        executor: submitit's, made here by default.

    Returns:
        Labels and submitit's jobs.

    Raises:
        StackError: submitit is not installed.
    """
    if executor is None:
        try:
            import submitit
        except ImportError:
            raise StackError("submitit is not installed", "pip install submitit") from None
        executor = submitit.AutoExecutor(folder=options.out / "slurm" / "%j")
    sent = []
    for arch, parameters in settings.items():
        for model in plan.models:
            first = None
            for variant in plan.of(model):
                extra = dict(parameters.get("slurm_additional_parameters", {}))
                if first is not None:
                    extra["dependency"] = f"afterany:{first.job_id}"
                executor.update_parameters(
                    **{
                        "timeout_min": max(1, round(options.timeout / 60) * 4),
                        "gpus_per_node": int(model.engine.get("tensor_parallel_size", 1)),
                        "name": store.slug(f"validate-{model.name}-{variant.name}"),
                        **parameters,
                        "slurm_additional_parameters": extra,
                    }
                )
                job = executor.submit(run_variant, plan, model, variant, options, arch or None)
                first = first or job
                label = " / ".join(filter(None, (arch, model.name, variant.name)))
                sent.append((label, job))
    return sent


def states(sent: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each cluster job's label and how it ended, as they end."""
    open_jobs = dict(enumerate(sent))
    while open_jobs:
        for number, (label, job) in list(open_jobs.items()):
            if not job.done():
                continue
            del open_jobs[number]
            problem = job.exception()
            yield label, "done" if problem is None else f"failed: {problem}".splitlines()[0]
        if open_jobs:
            time.sleep(5)
