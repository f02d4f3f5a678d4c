#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prove ci.validate on a GPU: TRITON_ATTN against itself and ROCM_SEGMENTED_ATTN must pass,
damaged backends must fail and be named.

    . ./lay_out.sh && python3 validate_gpu.py [--gpus 2] [--workers 12] [--budget 350]
    python3 validate_gpu.py --models bytes-window --no-speed     # a smaller one

Random models run while the others are being trained. With OUT set, the results go there:
one archive, the summary, the report and the ends of the logs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAINED = ("bytes-window", "bytes-sinks")
RANDOM = ("qwen3-like", "gptoss-like", "gemma3-like")
# The same weights for other tasks, with fewer variants.
ALSO = {"bytes-window": ("bytes-embed", "bytes-spec")}
SPEED = ("qwen3-speed",)

# What must come out: (model, task, variant) to status. Everything else is shown only.
EXPECTED = {
    (model, "generate", variant): "pass"
    for model in (*TRAINED, *RANDOM)
    for variant in ("baseline", "repeat", "segmented")
} | {
    ("bytes-window", "generate", "segmented-tuned"): "pass",
    # There is no hipDNN: every call is declined, and that is no pass.
    ("bytes-window", "generate", "hipdnn"): "did not serve",
    ("bytes-window", "generate", "damaged-window"): "fail",
    ("bytes-window", "generate", "damaged-head"): "fail",
    ("bytes-sinks", "generate", "damaged-sink"): "fail",
    ("bytes-sinks", "generate", "damaged-head"): "fail",
    ("qwen3-like", "generate", "damaged-head"): "fail",
    ("gptoss-like", "generate", "damaged-sink"): "fail",
    ("gemma3-like", "generate", "damaged-window"): "fail",
    ("bytes-embed", "embed", "segmented"): "pass",
    ("bytes-embed", "embed", "damaged-head"): "fail",
    ("bytes-spec", "spec", "repeat"): "pass",
    ("bytes-spec", "spec", "segmented"): "pass",
}

SPEED_CONFIG = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=8192,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=20,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    hidden_act="silu",
    rope_theta=1000000.0,
    attention_bias=False,
    bos_token_id=1,
    eos_token_id=2,
)


class Run:
    """Processes of this run, all ended with it."""

    def __init__(self, work: Path, end: float) -> None:
        self.work, self.end = work, end
        self.open: list[subprocess.Popen] = []

    def left(self) -> float:
        return self.end - time.monotonic()

    def start(self, name: str, *command: str, gpu: int | None = None) -> subprocess.Popen:
        env = dict(os.environ)
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = str(gpu)
        with (self.work / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                cwd=HERE,
            )
        self.open.append(child)
        return child

    def wait(self, child: subprocess.Popen, limit: float) -> int | None:
        try:
            return child.wait(max(1.0, min(limit, self.left())))
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        # First politely: ci.validate then writes the report of what it has.
        for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            for child in self.open:
                if child.poll() is None:
                    os.killpg(child.pid, number)
            end = time.monotonic() + seconds
            for child in self.open:
                try:
                    child.wait(max(0.1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue


def validate(run: Run, name: str, config: Path, models: list[str], args, **more) -> None:
    """Run ci.validate over some models, into the common folder."""
    if not models or run.left() < 20:
        return
    command = ["-m", "ci.validate", "run", "--config", str(config), "--out", str(more["out"])]
    for model in models:
        command += ["--model", model]
    command += ["--workers", str(more["workers"]), "--gpus", str(more.get("gpus", 1))]
    command += ["--repeats", str(args.repeats), "--timeout", str(args.timeout)]
    command += ["--budget", f"{run.left() - 12:.0f}"]
    print(f"{name}: begins, {run.left():.0f} s left", flush=True)
    code = run.wait(run.start(name, *command, gpu=more.get("gpu")), run.left() - 4)
    print(f"{name}: exit code {code}, {run.left():.0f} s left", flush=True)


def judge(out: Path, models: list[str]) -> tuple[list[str], bool]:
    """Hold the summary against what is expected."""
    lines, fine = [], True
    try:
        summary = json.loads((out / "summary.json").read_text())
    except (OSError, ValueError) as error:
        return [f"no summary: {error}"], False
    found = {(r["model"], r["task"], r["variant"]): r["verdict"] for r in summary["rows"]}
    models = [*models, *(also for m in models for also in ALSO.get(m, ()))]
    for key, wanted in EXPECTED.items():
        if key[0] not in models:
            continue
        got = found.get(key, {"status": "missing", "reasons": []})
        good = got["status"] == wanted
        fine &= good
        mark = "as expected" if good else f"WANTED {wanted}"
        lines.append(f"{got['status']:<13} {' / '.join(key)}  ({mark})")
        if not good or wanted == "fail":
            lines += [f"{'':<13}   {reason}" for reason in got["reasons"][:4]]
    return lines, fine


def deliver(work: Path, results: Path, lines: list[str]) -> None:
    """Put everything into $OUT: few files, none large."""
    out = os.environ.get("OUT")
    if not out:
        return
    target = Path(out)
    (target / "verdict.txt").write_text("\n".join(lines) + "\n")
    for name in ("summary.json", "report.md", "report.html"):
        if (results / name).is_file():
            shutil.copy(results / name, target / name)
    with (target / "logs.txt").open("w") as file:
        for log in sorted([*work.glob("*.log"), *(results / "logs").glob("*.log")]):
            tail = log.read_bytes()[-6000:].decode(errors="replace")
            file.write(f"===== {log.name}\n{tail}\n")
    with tarfile.open(target / "results.tar.gz", "w:gz") as archive:
        archive.add(results, "results", filter=lambda e: None if "/logs" in e.name else e)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--workers", type=int, default=12, help="engines at a time")
    parser.add_argument("--budget", type=float, default=350.0, help="seconds in all")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds an engine")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement of speed")
    parser.add_argument("--models", nargs="*", choices=[*TRAINED, *RANDOM])
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder to fill")
    args = parser.parse_args()
    chosen = args.models if args.models is not None else [*TRAINED, *RANDOM]
    random_ones = [m for m in RANDOM if m in chosen]
    trained = [m for m in TRAINED if m in chosen]
    work = args.work.resolve()
    models, results = work / "models", work / "results"
    models.mkdir(parents=True, exist_ok=True)
    config = work / "validate.toml"
    config.write_text((HERE / "validate.toml").read_text().replace("MODELS", str(models)))
    speed = [] if args.no_speed else list(SPEED)
    for name in speed:
        (models / name).mkdir(exist_ok=True)
        (models / name / "config.json").write_text(json.dumps(SPEED_CONFIG))
    run = Run(work, time.monotonic() + args.budget)
    found = importlib.util.find_spec("vllm")  # where it lies; it is not imported
    text = Path(found.origin).parent if found and found.origin else HERE
    lines, fine = ["nothing was judged"], False
    try:
        making = [
            run.start(
                f"make-{name}", "tiny_models.py", str(models), "--only", name,
                "--seconds", str(args.seconds), "--text", str(text),
            )
            for name in (*trained, *random_ones)
        ]  # fmt: skip
        beside = None
        if speed and args.gpus > 1:
            # On the other GPU from the beginning.
            beside = threading.Thread(
                target=validate, args=(run, "speed", config, speed, args),
                kwargs=dict(out=work / "speed", workers=1, gpu=1),
            )  # fmt: skip
            beside.start()
        for child in making[len(trained) :]:
            run.wait(child, 90)
        first = threading.Thread(
            target=validate, args=(run, "random", config, random_ones, args),
            kwargs=dict(out=results, workers=max(1, args.workers - 3), gpu=0),
        )  # fmt: skip
        first.start()
        for child in making[: len(trained)]:
            run.wait(child, args.seconds + 90)
        made = [m for m in trained if (models / m / "config.json").is_file()]
        made += [also for m in made for also in ALSO.get(m, ())]
        validate(
            run, "trained", config, made, args, out=work / "trained", workers=args.workers, gpu=0
        )
        first.join()
        if beside is not None:
            beside.join()
        elif speed:
            validate(run, "speed", config, speed, args, out=work / "speed", workers=1, gpu=0)
    finally:
        run.close()
        # One folder for one report; the parts ran beside each other.
        for part in ("trained", "speed"):
            if (work / part).is_dir():
                shutil.copytree(work / part, results, dirs_exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "ci.validate", "report", str(results)],
            cwd=HERE, stdout=subprocess.DEVNULL, timeout=60, check=False,
        )  # fmt: skip
        lines, fine = judge(results, chosen)
        print("\n".join(lines), flush=True)
        deliver(work, results, lines)
        print(f"{'OK' if fine else 'NOT OK'}, {run.left():.0f} s left", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
