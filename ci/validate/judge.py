"""From the files of a run to verdicts: one table cell for each model, variant and task."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.errors import StackError
from ci.validate import driver, stats, store, variants
from ci.validate.variants import BASELINE, Variant

PATHS = ("decode", "prefill")
_RANK = {"pass": 0, "measured": 0, "not run": 1, "inconclusive": 2, "did not serve": 3, "fail": 4,
         "error": 5}  # fmt: skip


def worst(states: Sequence[str]) -> str:
    """Return the worst of some verdicts; "not run" if there is none."""
    return max(states, key=lambda s: _RANK.get(s, 5), default="not run")


def load(out: Path) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Read all results below a folder: by architecture/model, task and variant.

    Files that are not whole are told of and left out.
    """
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for path in sorted(out.glob("*/*/*/*.json*")):
        arch, model, task = path.parts[-4:-1]
        if path.name.startswith((".", "continuations")) or task not in variants.TASKS:
            continue
        try:
            data = store.read_json(path)
        except StackError as error:
            print(f"left out: {error}")
            continue
        if data.get("schema") != store.SCHEMA:
            continue
        found.setdefault(f"{arch}/{model}", {}).setdefault(task, {})[data["variant"]] = data
    return found


def _problem(data: Mapping[str, Any]) -> tuple[str, str] | None:
    if why := data.get("not_run"):
        return "not run", why
    if why := data.get("error"):
        return "error", why
    return None


def _routing(data: Mapping[str, Any], base: Mapping[str, Any] | None) -> dict[str, Any]:
    variant = Variant(data["variant"], data["role"], served_by=data["served_by"])
    return variants.served(
        variant, data.get("report") or {}, (base or {}).get("report") if base else None
    )


def _with_routing(verdict: dict[str, Any], routing: Mapping[str, Any]) -> dict[str, Any]:
    verdict["routing"] = routing
    if not routing["ok"]:
        verdict["reasons"] = [f"it did not serve: {routing['text']}", *verdict["reasons"]]
        if verdict["status"] != "fail":
            verdict["status"] = "did not serve"
    return verdict


def _bare(status: str, why: str) -> dict[str, Any]:
    return {"status": status, "reasons": [why], "notes": []}


def _spare_swap(verdict: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Make a neutral swap's failure a measurement: it is what measures the band."""
    swap = data["role"] == "noise" and data["variant"] != variants.REPEAT
    if swap and verdict["status"] in ("fail", "inconclusive"):
        verdict["notes"] = [f"beside the others: {r}" for r in verdict["reasons"]]
        verdict |= {"status": "measured", "reasons": []}


def _generate(by: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Judge the task "generate": decode and prefill of each variant."""
    out: dict[str, dict[str, Any]] = {}
    base = by.get(BASELINE)
    problem = _problem(base) if base else ("not run", "there is no baseline")
    if base is None or problem:
        assert problem
        return {name: _bare(*(_problem(data) or problem)) for name, data in by.items()}
    report = base["report"]
    largest = report["largest_logit"] / max(1, report["logit_rows"])
    usable = {name: data for name, data in by.items() if name != BASELINE and not _problem(data)}
    routes = {name: _routing(data, base) for name, data in by.items() if not _problem(data)}
    compared = {
        path: {name: stats.compare(base[path], data[path]) for name, data in usable.items()}
        for path in PATHS
    }
    for name, data in by.items():
        if found := _problem(data):
            out[name] = _bare(*found)
            continue
        if name == BASELINE:
            bad = report["bad_rows"]
            verdict: dict[str, Any] = {
                "status": "fail" if bad else "pass", "notes": [], "paths": {},
                "reasons": [f"{bad} rows of logits with NaN or infinity"] if bad else [],
                "positions": {p: sum(len(s["tokens"]) for s in base[p]) for p in PATHS},
                "largest_logit": largest,
            }  # fmt: skip
            out[name] = _with_routing(verdict, routes[name])
            continue
        others = [
            other
            for other in usable
            if by[other]["role"] == "noise" and other != name and routes[other]["ok"]
        ]
        noise = stats.measure_noise(
            {other: [compared[p][other] for p in PATHS] for other in others}, largest, base["dtype"]
        )
        paths = {
            path: stats.judge(compared[path][name], {o: compared[path][o] for o in others}, noise)
            for path in PATHS
        }
        reasons = [f"{p}: {r}" for p in PATHS for r in paths[p]["reasons"]]
        status = worst([paths[p]["status"] for p in PATHS])
        if bad := data["report"]["bad_rows"]:
            reasons.insert(0, f"{bad} rows of logits with NaN or infinity")
            status = "fail"
        notes = list(dict.fromkeys(n for p in PATHS for n in paths[p]["notes"]))
        verdict = {"status": status, "reasons": reasons, "notes": notes, "paths": paths}
        if not bad and not any(compared[p][name].bad or compared[p][name].unforced for p in PATHS):
            _spare_swap(verdict, data)
        out[name] = _with_routing(verdict, routes[name])
    return out


def _simple(by: Mapping[str, Mapping[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    """Judge the tasks "embed", "spec" and "gsm8k"."""
    base = by.get(BASELINE)
    problem = _problem(base) if base else ("not run", "there is no baseline")
    if base is None or problem:
        assert problem
        return {name: _bare(*(_problem(data) or problem)) for name, data in by.items()}
    key = {"embed": "vectors", "spec": "groups", "gsm8k": "gsm8k"}[task]
    out: dict[str, dict[str, Any]] = {}
    for name, data in by.items():
        if found := _problem(data):
            out[name] = _bare(*found)
            continue
        noise = {
            other: by[other][key]
            for other in by
            if by[other]["role"] == "noise" and other != name and not _problem(by[other])
        }
        if name == BASELINE:
            verdict: dict[str, Any] = {"status": "pass", "reasons": [], "notes": []}
            if task == "spec":
                verdict = stats.judge_acceptance(base[key], base[key], noise)
        elif task == "embed":
            verdict = stats.judge_embeddings(base[key], data[key], noise, base["dtype"])
            if math.isfinite(verdict["cosine_min"]):
                _spare_swap(verdict, data)
        elif task == "spec":
            verdict = stats.judge_acceptance(base[key], data[key], noise)
            _spare_swap(verdict, data)
        else:
            verdict = _judge_gsm8k(base[key], data[key])
        if task != "gsm8k":
            verdict = _with_routing(verdict, _routing(data, base))
        out[name] = verdict
    return out


def _judge_gsm8k(base: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any]:
    """Judge GSM8K: a loss of more than two standard errors of the difference fails."""
    name = next((k for k in sorted(base) if k.startswith("exact_match")), None)
    if name is None or name not in other:
        return _bare("inconclusive", "lm-eval gave no exact_match")
    error = name.replace("exact_match", "exact_match_stderr", 1)
    allowed = 2.0 * (base.get(error, 0.0) ** 2 + other.get(error, 0.0) ** 2) ** 0.5
    loss = base[name] - other[name]
    reasons = [f"{other[name]:.3f} is {loss:.3f} below the baseline, {allowed:.3f} allowed"]
    return {
        "status": "fail" if loss > allowed else "pass",
        "reasons": reasons if loss > allowed else [],
        "notes": [],
        "score": other[name],
        "baseline": base[name],
        "allowed": allowed,
    }


def _turns(repeats: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the median and the range of each turn's time to first token over repeats."""
    return [
        {"median": stats.median(values), "low": min(values), "high": max(values)}
        for values in zip(*(r["turns"] for r in repeats if r.get("turns")), strict=False)
    ]


def _perf(data: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the speed of a variant with its baseline's: figures, no pass or fail."""
    found = _problem(data)
    if found and not data.get("workloads"):
        return _bare(*found)
    rows = []
    for load, entry in data["workloads"].items():
        for key, lower, label in driver.FIGURES[entry["kind"]]:
            base = [s.get(key) for s in entry["base"]]
            other = [s.get(key) for s in entry["candidate"]]
            found_ratio = stats.ratio_of(base, other, lower)
            if found_ratio:
                rows.append(
                    {"workload": load, "kind": entry["kind"], "figure": label, "key": key}
                    | found_ratio
                )
    turns = {
        load: {side: _turns(entry[side]) for side in ("base", "candidate")}
        for load, entry in data["workloads"].items()
        if entry["kind"] == "turns"
    }
    routing = _routing(data, {"report": data.get("base_report")})
    verdict: dict[str, Any] = {
        "status": "measured" if data.get("complete") else "inconclusive",
        "reasons": [] if data.get("complete") else [data.get("error") or "it was stopped early"],
        "notes": list(data.get("left") or []),
        "rows": rows,
        "turns": turns,
    }
    return _with_routing(verdict, routing)


def summarize(out: Path) -> dict[str, Any]:
    """Judge everything below a folder.

    Returns:
        ``rows``: one for each architecture, model, task and variant, with its verdict;
        ``identities``: what identifies the software, by architecture.

    Raises:
        StackError: There is no result.
    """
    found = load(out)
    if not found:
        raise StackError(f"{out} holds no results of ci.validate")
    rows: list[dict[str, Any]] = []
    identities: dict[str, list[dict[str, Any]]] = {}
    order = list(variants.BUILTIN)
    for place, tasks in found.items():
        arch, _ = place.split("/", 1)
        for task in variants.TASKS:
            by = tasks.get(task, {})
            if not by:
                continue
            if task == "perf":
                verdicts = {name: _perf(data) for name, data in by.items()}
            elif task == "generate":
                verdicts = _generate(by)
            else:
                verdicts = _simple(by, task)
            names = sorted(by, key=lambda n: (order.index(n) if n in order else 99, n))
            for name in names:
                data = by[name]
                known = identities.setdefault(arch, [])
                if data["identity"] not in known:
                    known.append(data["identity"])
                rows.append(
                    {
                        "arch": arch,
                        "model": data["model"]["name"],
                        "task": task,
                        "variant": name,
                        "role": data["role"],
                        "about": data.get("about", ""),
                        "created": data["created"],
                        "engine": data["engine"],
                        "verdict": verdicts[name],
                    }
                )
    return {
        "schema": store.SCHEMA,
        "created": store.now(),
        "newest": max(row["created"] for row in rows),
        "identities": identities,
        "rows": rows,
    }
