"""Multi-turn conversations over HTTP, driven by GuideLLM where it is installed.

The built-in driver steps the engine itself; GuideLLM sees what a client of ``vllm serve``
sees.  Both results are kept, under their own names.
"""

import http.client
import importlib.util
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.errors import StackError
from ci.validate import store
from ci.validate.stats import quantile

NAME = "multi-turn (GuideLLM)"


def find() -> list[str] | None:
    """Return GuideLLM's command; None if it is not installed."""
    if importlib.util.find_spec("guidellm") is not None:
        return [sys.executable, "-m", "guidellm"]
    found = shutil.which("guidellm")
    return [found] if found else None


def serve_command(path: str, arguments: Mapping[str, Any], port: int) -> list[str]:
    """Return the command of ``vllm serve`` with the arguments of ``LLM``."""
    out = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", path]
    out += ["--host", "127.0.0.1", "--port", str(port)]
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (Mapping, list, tuple)):
            out += [f"--{flag}", json.dumps(value)]
        elif value is not None:
            out += [f"--{flag}", str(value)]
    return out


def run_command(
    guidellm: Sequence[str], port: int, path: str, settings: Mapping[str, Any], seed: int, out: Path
) -> list[str]:
    """Return GuideLLM's command for one repeat.

    Args:
        guidellm: From `find`.
        port: The server's.
        path: The model as it was served; its tokenizer makes the texts.
        settings: ``sessions`` and ``turns`` as in ``driver.DEFAULTS``.
        seed: Other texts for each repeat.
        out: File for the JSON.
    """
    count, first, further, answer = settings["turns"]
    texts = f"prompt_tokens={further},output_tokens={answer},turns={count}"
    prefix = f"prefix_tokens={max(1, first - further)},prefix_count=1"
    target = f"target=http://127.0.0.1:{port},model={path},request_format=/v1/completions"
    return [
        *guidellm, "run",
        "--backend", f"kind=openai_http,{target}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={count * settings['sessions']}",
        "--data", f"kind=synthetic_text,{texts},{prefix}",
        "--tokenizer", f"kind=huggingface_auto,model={path}",
        "--seed", f"kind=static,value={seed}",
        "--output", f"kind=json,path={out}",
        "--disable-console",
    ]  # fmt: skip


def parse(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return GuideLLM's report in the form of ``driver.summarize``.

    Raises:
        StackError: It has no request that succeeded, or another form.
    """
    try:
        (benchmark, *_) = report["benchmarks"]
        requests = benchmark["requests"]["successful"]
        failed = len(benchmark["requests"]["errored"])
        rows = [
            (
                int(r["info"]["turn_index"]),
                float(r["time_to_first_token_ms"]),
                r.get("inter_token_latency_ms"),
                int(r.get("output_tokens") or 0),
            )
            for r in requests
        ]
        seconds = float(benchmark["duration"])
    except (KeyError, TypeError, ValueError) as error:
        raise StackError(f"GuideLLM's report has an unknown form: {error!r}") from None
    if not rows:
        raise StackError(f"GuideLLM had no answer ({failed} requests failed)")
    ttft = [row[1] for row in rows]
    itl = [float(row[2]) for row in rows if row[2] is not None]
    return {
        "requests": len(rows),
        "failed": failed,
        "seconds": seconds,
        "output_rate": sum(row[3] for row in rows) / seconds if seconds else None,
        "ttft": quantile(ttft, 0.5),
        "ttft_p90": quantile(ttft, 0.9),
        "itl": quantile(itl, 0.5) if itl else None,
        "itl_p90": quantile(itl, 0.9) if itl else None,
        "turns": [
            quantile([row[1] for row in rows if row[0] == turn], 0.5)
            for turn in range(1 + max(row[0] for row in rows))
        ],
        "by": "GuideLLM",
    }


def read(path: Path) -> dict[str, Any]:
    """Return `parse` of a report's file."""
    return parse(store.read_json(path))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until_up(port: int, seconds: float, alive: Callable[[], bool], pause: float = 0.5) -> None:
    """Wait for a server's /health.

    Raises:
        StackError: It ended, or was not up in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not alive():
            raise StackError("the server ended before it was up")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not yet
        finally:
            connection.close()
        time.sleep(pause)
    raise StackError(f"the server was not up within {seconds:.0f} s")
