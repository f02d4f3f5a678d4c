"""One engine in a process of its own: ``python -m ci.validate.engine JOB``.

A job is a JSON file; its result is written beside it, whole, when it is done.  For speed the
process stays and measures what it is told on its standard input, one line a command.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.errors import StackError
from ci.validate import data, driver, store

READY, DONE = "ready", "done"
FORCED = "hipstack_forced_tokens"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")


def model_folder(path: str) -> Path | None:
    """Return where a model's files lie, if they are on this machine."""
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except Exception:  # not in the cache, or no hub library
        return None


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a model's weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        total = store.read_json(index).get("metadata", {}).get("total_size")
        if total:
            return int(total)
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        if found := sum(p.stat().st_size for p in folder.glob(pattern)):
            return found
    return 0


def hub_bytes(path: str) -> int | None:
    """Ask the hub for the bytes of a model's weights; None where it does not answer."""
    try:
        from huggingface_hub import model_info

        files = model_info(path, files_metadata=True, timeout=10).siblings or []
    except Exception:  # offline, unknown, gated: vLLM will say what is wrong
        return None
    sizes = [f.size or 0 for f in files if f.rfilename.endswith(".safetensors")]
    return sum(sizes) or None


class Engine:
    """vLLM's ``LLM`` as far as validation needs it.

    Args:
        path: The model.
        arguments: Arguments of ``LLM``.
        task: "generate", "embed", "spec" or "perf".
        top: Tokens recorded at each position.
    """

    def __init__(self, path: str, arguments: Mapping[str, Any], task: str, top: int) -> None:
        from vllm import LLM

        folder = model_folder(path)
        self.has_tokenizer = folder is None or any(
            (folder / name).exists() for name in TOKENIZER_FILES
        )
        self.top = top
        options: dict[str, Any] = {
            "model": path,
            "seed": 0,
            "skip_tokenizer_init": not self.has_tokenizer,
            "disable_log_stats": task not in ("spec", "perf"),
            "worker_extension_cls": "ci.validate.inside.Extension",
        }
        if task == "embed":
            options |= {"runner": "pooling"}
        elif task == "generate":
            options |= {
                "logits_processors": ["ci.validate.inside:ForcedTokens"],
                "logprobs_mode": "raw_logprobs",
                "max_logprobs": top,
            }
        self.llm = LLM(**(options | dict(arguments)))
        config = self.llm.llm_engine.vllm_config.model_config
        self.limit = int(config.max_model_len)
        self.vocabulary = int(config.get_vocab_size())
        self.dtype = str(config.dtype).removeprefix("torch.")

    def encode(self, text: str) -> list[int]:
        """Turn text into ids: the model's own, or bytes if it has no tokenizer."""
        if not self.has_tokenizer:
            return data.bytes_encoder(self.vocabulary)(text)
        return list(self.llm.get_tokenizer().encode(text, add_special_tokens=False))

    def _params(self, tokens: int, **more: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, **more
        )

    def generate(
        self, prompts: Sequence[list[int]], tokens: int, forced: Sequence[list[int]] | None
    ) -> list[dict[str, Any]]:
        """Decode, greedily or along given tokens; return what `stats.compare` takes."""
        params = [
            self._params(
                tokens, logprobs=self.top, extra_args={FORCED: forced[i]} if forced else None
            )
            for i in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        out = []
        for request in self.llm.generate(inputs, params, use_tqdm=False):
            best = request.outputs[0]
            out.append({"tokens": list(best.token_ids)} | self._tops(best.logprobs))
        return out

    def score(self, sequences: Sequence[list[int]], begin: Sequence[int]) -> list[dict[str, Any]]:
        """Score whole sequences by prefill; return the positions from ``begin`` on."""
        inputs = [{"prompt_token_ids": ids} for ids in sequences]
        params = self._params(1, prompt_logprobs=self.top)
        out = []
        for number, request in enumerate(self.llm.generate(inputs, params, use_tqdm=False)):
            first = max(1, begin[number])
            tokens = list(request.prompt_token_ids[first:])
            out.append({"tokens": tokens} | self._tops(request.prompt_logprobs[first:]))
        return out

    def _tops(self, rows: Any) -> dict[str, Any]:
        """Return the best tokens of each position, best first."""
        ids, values = [], []
        for row in rows:
            # Beside the best ones a row holds the token that was taken, whatever its rank;
            # equal ones are put in the order of their ids, as greedy sampling takes them.
            best = sorted(row.items(), key=lambda item: (-item[1].logprob, item[0]))[: self.top]
            ids.append([int(token) for token, _ in best])
            values.append([round(float(entry.logprob), 6) for _, entry in best])
        return {"ids": ids, "logprobs": values}

    def embed(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Return one vector a prompt."""
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.embed(inputs, use_tqdm=False)
        return [[float(x) for x in output.outputs.embedding] for output in outputs]

    def speculate(self, groups: Sequence[list[list[int]]], tokens: int) -> list[dict[str, Any]]:
        """Decode each group and return its drafts, accepted tokens and tokens."""
        out = []
        before = self._drafts()
        for group in groups:
            inputs = [{"prompt_token_ids": ids} for ids in group]
            requests = self.llm.generate(inputs, self._params(tokens), use_tqdm=False)
            after = self._drafts()
            counts = {key: after[key] - before[key] for key in after}
            out.append({**counts, "tokens": [list(r.outputs[0].token_ids) for r in requests]})
            before = after
        return out

    def _drafts(self) -> dict[str, float]:
        names = {
            "vllm:spec_decode_num_drafts": "drafts",
            "vllm:spec_decode_num_draft_tokens": "drafted",
            "vllm:spec_decode_num_accepted_tokens": "accepted",
        }
        out = dict.fromkeys(names.values(), 0.0)
        for metric in self.llm.get_metrics():
            if metric.name in names:
                out[names[metric.name]] += float(getattr(metric, "value", 0))
        return out

    def report(self) -> dict[str, Any]:
        """Return what the first worker says; the others run the same layers."""
        reports = self.llm.collective_rpc("hipstack_validate_report")
        first: dict[str, Any] = reports[0]
        first["workers"] = len(reports)
        first["bad_rows"] = max(r["bad_rows"] for r in reports)
        return first

    # ---- what `driver.Stepper` asks for

    def add(self, request: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self.llm.llm_engine.add_request(
            request, {"prompt_token_ids": prompt}, self._delta_params(max_tokens)
        )

    def _delta_params(self, tokens: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        return self._params(tokens, output_kind=RequestOutputKind.DELTA)

    def step(self) -> list[driver.Step]:
        """Run one step of the engine."""
        out = []
        for output in self.llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
            out.append(
                driver.Step(output.request_id, tokens, output.finished, output.num_cached_tokens)
            )
        return out


def probe() -> dict[str, Any]:
    """Return what this machine's first GPU is, as vLLM and torch see it."""
    import torch
    from vllm.platforms import current_platform

    found: dict[str, Any] = {"platform": type(current_platform).__name__, "gpus": 0}
    if current_platform.is_rocm():
        from vllm.platforms import rocm

        found["arch"] = rocm._GCN_ARCH
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpus": torch.cuda.device_count(),
            "device": properties.name,
            "memory": int(properties.total_memory),
            "units": int(properties.multi_processor_count),
        }
        name = getattr(properties, "gcnArchName", "").partition(":")[0]
        found.setdefault("arch", name or "sm{}{}".format(*torch.cuda.get_device_capability(0)))
    else:
        found |= {"device": "CPU", "memory": 0, "units": 0}
    found.setdefault("arch", current_platform.device_type or "unknown")
    found["hip"] = torch.version.hip
    found["cuda"] = torch.version.cuda
    return found


def _continuations(job: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for the baseline's continuations: this engine may be up before they are."""
    path = Path(job["continuations"])
    end = time.monotonic() + float(job.get("wait", 600))
    while not path.is_file():
        failed = path.with_name("failed")
        if failed.exists() or time.monotonic() > end:
            raise StackError("the baseline gave no continuations to follow")
        time.sleep(0.5)
    found: dict[str, Any] = store.read_json(path)
    return found


def _generate(engine: Engine, job: Mapping[str, Any]) -> dict[str, Any]:
    """Decode along the baseline and score the same by prefill."""
    tokens = int(job["new_tokens"])
    if job["role"] == "baseline":
        longest = min(int(job["longest"]), engine.limit - tokens - 1)
        prompts = data.prompts(engine.encode, int(job["prompts"]), longest)
        decode = engine.generate(prompts, tokens, None)
        follow = [row["tokens"] for row in decode]
        store.write_json(Path(job["continuations"]), {"prompts": prompts, "tokens": follow})
    else:
        known = _continuations(job)
        prompts, follow = known["prompts"], known["tokens"]
        decode = engine.generate(prompts, tokens, follow)
    whole = [p + f for p, f in zip(prompts, follow, strict=True)]
    # The end of the prompt counts, too: it saw the longest contexts by prefill.
    begin = [max(1, len(p) - int(job["prompt_positions"])) for p in prompts]
    prefill = engine.score(whole, begin)
    return {"decode": decode, "prefill": prefill}


def _embed(engine: Engine, job: Mapping[str, Any]) -> dict[str, Any]:
    longest = min(int(job["longest"]), engine.limit)
    prompts = data.prompts(engine.encode, int(job["prompts"]), longest)
    return {"vectors": engine.embed(prompts)}


def _spec(engine: Engine, job: Mapping[str, Any]) -> dict[str, Any]:
    tokens = int(job["new_tokens"])
    longest = min(int(job["longest"]), engine.limit - tokens - 8)
    prompts = data.prompts(engine.encode, int(job["prompts"]), longest)
    groups = [prompts[i : i + 3] for i in range(0, len(prompts), 3)]
    return {"groups": engine.speculate(groups, tokens)}


def _gsm8k(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run GSM8K through lm-eval on this variant's engine."""
    from lm_eval import simple_evaluate

    arguments = {**job["engine"], "pretrained": job["path"]}
    results = simple_evaluate(
        model="vllm", model_args=arguments, tasks=["gsm8k"], limit=job.get("gsm8k_limit", 250),
        num_fewshot=5, batch_size="auto",
    )  # fmt: skip
    found = results["results"]["gsm8k"]
    scores = {key: value for key, value in found.items() if isinstance(value, (int, float))}
    return {"gsm8k": scores}


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one job to its end; the result is plain data."""
    begin = time.monotonic()
    if job["task"] == "gsm8k":
        return _gsm8k(job) | {"seconds": time.monotonic() - begin}
    engine = Engine(job["path"], job["engine"], job["task"], int(job["top"]))
    loaded = time.monotonic()
    work = {"generate": _generate, "embed": _embed, "spec": _spec}[job["task"]]
    result = work(engine, job)
    return result | {
        "report": engine.report(),
        "dtype": engine.dtype,
        "limit": engine.limit,
        "load_seconds": loaded - begin,
        "seconds": time.monotonic() - begin,
    }


def _serve(job: Mapping[str, Any], replies: Any) -> None:
    """Measure workloads on command until standard input ends."""

    def reply(**what: Any) -> None:
        replies.write(json.dumps(store._plain(what)) + "\n")
        replies.flush()

    begin = time.monotonic()
    engine = Engine(job["path"], job["engine"], "perf", 1)
    pool = sorted(set(engine.encode("\n".join(data.texts()))))
    _, left = driver.workloads(job["perf"], engine.limit, pool, 0)
    reply(
        state=READY, limit=engine.limit, left=left,
        load_seconds=time.monotonic() - begin, report=engine.report(),
    )  # fmt: skip
    for line in sys.stdin:
        command = json.loads(line)
        loads, _ = driver.workloads(job["perf"], engine.limit, pool, command["repeat"])
        found = [w for w in loads if w.name == command["workload"]]
        try:
            records = driver.drive(
                engine, found[0].sessions, found[0].concurrency, mark=f"{command['repeat']}-"
            )
            reply(state=DONE, summary=driver.summarize(records), report=engine.report())
        except Exception as error:
            reply(state="error", error=f"{type(error).__name__}: {error}"[:400])


def _die_with_parent() -> None:
    """Ask Linux to end this process when its parent is gone."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    except (OSError, AttributeError):
        return  # not Linux: the parent ends its children when it can


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of a file; the result goes where it says."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _die_with_parent()
    job = store.read_json(Path(arguments[0]))
    result: dict[str, Any]
    try:
        if job["task"] == "perf":
            with os.fdopen(int(job["reply_fd"]), "w") as replies:
                _serve(job, replies)
            result = {}
        elif job["task"] == "probe":
            result = probe()
        else:
            result = run_job(job)
    except StackError as error:
        result = {"error": str(error)}
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        result = {"error": f"{type(error).__name__}: {text[0]}"[:600]}
    if job.get("result"):
        store.write_json(Path(job["result"]), result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Engines may hang in their exit handlers; hipDNN's report is already in the result.
    os._exit(1 if "error" in result else 0)


if __name__ == "__main__":
    main()
