"""``python3 -m ci.validate COMMAND``; run it with the Python that vLLM is installed in.

run       run models and variants, write results and the report
report    write the report of results that are there
compare   two result folders, or two summaries, side by side
history   all runs below a folder, by architecture
list      the variants
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.errors import StackError
from ci.paths import CWD
from ci.validate import jobs, judge, report, store, variants


def _say(line: str) -> None:
    try:
        from tqdm import tqdm

        tqdm.write(line)
    except ImportError:
        print(line, flush=True)


class _Progress:
    """A bar on a terminal, lines elsewhere."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self._bar = tqdm(total=total, unit="job", dynamic_ncols=True)
            except ImportError:
                self._bar = None
        self._done, self._total = 0, total

    def __call__(self, line: str) -> None:
        if line.startswith("note"):
            _say(line)
            return
        self._done += 1
        if self._bar is not None:
            self._bar.update(1)
            _say(line)
        else:
            print(f"[{self._done}/{self._total}] {line}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _pairs(text: str) -> dict[str, Any]:
    """Read ``partition=gpu,constraint=gfx1201`` as submitit's Slurm parameters."""
    out: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        if not separator:
            raise StackError(f"--slurm: {part!r} is not key=value")
        out[f"slurm_{key.strip()}"] = int(value) if value.isdigit() else value
    return out


def _slurm(values: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read ``ARCH:key=value,...`` or ``key=value,...``, once for each architecture."""
    out: dict[str, dict[str, Any]] = {}
    for value in values:
        head, separator, rest = value.partition(":")
        known = bool(separator) and "=" not in head
        out[head if known else ""] = _pairs(rest if known else value)
    return out


def _run(args: argparse.Namespace) -> int:
    plan = variants.load(
        CWD / args.config if args.config else None,
        args.model, args.variants.split(",") if args.variants else (),
        args.tasks.split(",") if args.tasks else (), variants.parse_engine(args.engine),
    )  # fmt: skip
    out = (CWD / args.out).resolve()
    options = jobs.Options(
        out, args.workers, args.gpus, args.timeout, args.budget or float("inf"), args.top,
        args.repeats, args.again, not args.no_guidellm,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    if args.slurm:
        return _cluster(plan, options, _slurm(args.slurm))
    software = store.identity()
    machine = jobs.probe_machine()
    identity = {**software, "machine": machine}
    store.write_json(
        out / "run.json",
        {
            "schema": store.SCHEMA, "created": store.now(), "identity": identity,
            "models": [vars(m) for m in plan.models], "variants": list(plan.chosen),
            "command": sys.argv,
        },
    )  # fmt: skip
    wanted = jobs.plan_jobs(plan)
    speed = sum("perf" in m.tasks for m in plan.models)
    print(
        f"{machine['arch']} ({machine['device']}): {len(wanted)} jobs"
        + (f", then the speed of {speed} models" if speed else ""),
        flush=True,
    )
    progress = _Progress(len(wanted) + speed)
    runner = jobs.Runner(options, identity, progress)

    def stop(number: int, _: Any) -> None:
        # Those who wait for an engine go on when it is gone.
        threading.Thread(target=runner.children.end_all).start()
        raise KeyboardInterrupt(signal.Signals(number).name)

    former = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    stopped = False
    try:
        runner.run_all(wanted, plan)
    except KeyboardInterrupt:
        stopped = True
    finally:
        runner.children.end_all()
        for number, handler in former.items():
            signal.signal(number, handler)
        progress.close()
    if stopped:
        print("stopped; what was finished is kept, the same command goes on", file=sys.stderr)
    return _report(out, not args.no_page) or (1 if stopped else 0)


def _cluster(
    plan: variants.Plan, options: jobs.Options, settings: Mapping[str, Mapping[str, Any]]
) -> int:
    sent = jobs.submit(plan, options, settings)
    print(f"{len(sent)} jobs sent; results go to {options.out}", flush=True)
    progress = _Progress(len(sent))
    try:
        for label, state in jobs.states(sent):
            progress(f"{state:<8} {label}")
    except KeyboardInterrupt:
        print("the jobs go on; later: python3 -m ci.validate report", file=sys.stderr)
        return 1
    finally:
        progress.close()
    return _report(options.out)


def _report(out: Path, with_page: bool = True) -> int:
    summary = judge.summarize(out)
    for path in report.write(summary, out, with_page):
        print(path)
    print(report.table(summary))
    return 0 if report.all_well(summary) else 1


def _summary(path: str) -> dict[str, Any]:
    place = CWD / path
    if place.is_dir():
        if (place / "summary.json").is_file() and not any(place.glob("*/*/*/*.json*")):
            place = place / "summary.json"
        else:
            return judge.summarize(place)
    found: dict[str, Any] = store.read_json(place)
    if "rows" not in found:
        raise StackError(f"{place} is no summary of ci.validate")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if every candidate passes, 1 if not, 2 for an error."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.validate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run models and variants, write results and report")
    run.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="DIR-OR-NAME",
        help="a model; again for more; with --config also the name of one of its",
    )
    run.add_argument("--config", help="TOML with [engine], [env], [models.*], [variants.*]")
    run.add_argument("--variants", help=f"default: {','.join(variants.DEFAULT_CANDIDATES)}")
    run.add_argument("--tasks", help=f"of {','.join(variants.TASKS)}; default: generate")
    run.add_argument("--engine", metavar="JSON", help="arguments of LLM for all models")
    run.add_argument("--out", required=True, help="folder of the results; used again, it resumes")
    run.add_argument("--workers", type=int, default=1, help="engines at a time on a GPU (1)")
    run.add_argument("--gpus", type=int, default=1, help="GPUs to use (1)")
    run.add_argument("--timeout", type=float, default=1800, help="seconds a job (1800)")
    run.add_argument("--budget", type=float, help="seconds in all; what is left is not run")
    run.add_argument("--top", type=int, default=10, help="tokens recorded a position (10)")
    run.add_argument("--repeats", type=int, default=5, help="of each measurement of speed (5)")
    run.add_argument("--again", action="store_true", help="run what has a result, too")
    run.add_argument("--no-guidellm", action="store_true", help="no conversations over HTTP")
    run.add_argument("--no-page", action="store_true", help="no HTML, only JSON and Markdown")
    run.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="[ARCH:]KEY=VALUE,...",
        help="send jobs to Slurm, e.g. gfx1201:partition=gpu,constraint=r9700",
    )
    for name, text in (
        ("report", "write the report of a result folder"),
        ("history", "all runs below a folder, by architecture"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder")
    compare = commands.add_parser("compare", help="two results side by side")
    compare.add_argument("before")
    compare.add_argument("after")
    commands.add_parser("list", help="the variants")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        if args.command == "run":
            return _run(args)
        if args.command == "report":
            return _report((CWD / args.folder).resolve())
        if args.command == "compare":
            text, worse = report.compare(_summary(args.before), _summary(args.after))
            print(text)
            return 1 if worse else 0
        if args.command == "history":
            for path in report.write_history((CWD / args.folder).resolve()):
                print(path)
            return 0
        for variant in variants.BUILTIN.values():
            print(f"{variant.name:<16} {variant.role:<10} {variant.about}")
        return 0
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
