#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ci.validate over vLLM's own engine, on a CPU: no GPU, no AMD code, some minutes.

    build/env-*/bin/python tests/cpu_engine/validate_cpu.py TREE WORK [--variants a,b]

TREE is a patched source tree. A small model is trained on the repository's text, then
TRITON_ATTN, ROCM_SEGMENTED_ATTN (both in Triton's interpreter) and HIPDNN (on the stand-in
library of its patches' tests) run it; damaged backends must fail and be named. CPU speed says
nothing, so none is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXPECTED = {
    "baseline": "pass",
    "repeat": "pass",
    "neutral-batch": "pass",
    "segmented": "pass",
    "hipdnn": "pass",
    "damaged-window": "fail",
    "damaged-sink": "fail",
    "damaged-head": "fail",
}


def environment(tree: Path) -> dict[str, str]:
    """Variables under which the tree's engine runs here."""
    path = [tree, HERE, ROOT / "tests" / "gpu" / "standins", ROOT]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HIPSTACK_TEST_GPU_BACKENDS": "1",
        "TRITON_INTERPRET": "1",
        # Empty but set: Triton then stays on without a driver.
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "FAKE_GFX": "gfx1201",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--variants", help="default: all")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    args = parser.parse_args()
    env = environment(args.tree.resolve())
    models, work = args.work.resolve() / "models", args.work.resolve()
    subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "tiny_models.py"), str(models), "--only",
         "bytes-tiny", "--text", str(ROOT), "--seconds", str(args.seconds), "--device", "cpu"],
        check=True,
    )  # fmt: skip
    text = (HERE / "validate.toml").read_text().replace("MODELS", str(models))
    if args.variants:
        names = json.dumps(args.variants.split(","))
        lines = [f"variants = {names}" if x.startswith("variants") else x for x in text.split("\n")]
        text = "\n".join(lines)
    config = work / "validate.toml"
    config.write_text(text)
    command = ["-m", "ci.validate", "run", "--config", str(config), "--out", str(work / "out")]
    subprocess.run(
        [sys.executable, *command, "--workers", str(args.workers)], env=env, cwd=ROOT, check=False
    )
    if not (work / "out" / "summary.json").is_file():
        return 1  # it said why
    summary = json.loads((work / "out" / "summary.json").read_text())
    fine = True
    for row in summary["rows"]:
        wanted, got = EXPECTED[row["variant"]], row["verdict"]["status"]
        fine &= wanted == got
        print(f"{got:<13} {row['variant']}" + ("" if wanted == got else f"  WANTED {wanted}"))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
