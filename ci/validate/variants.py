"""What is run: models, variants, and how each variant shows that it served."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci import toml
from ci.errors import StackError
from ci.paths import CWD

BASELINE = "baseline"
REPEAT = "repeat"


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Attributes:
        name: Its name in results.
        role: "baseline", "noise" (judged, and measures the band) or "candidate".
        engine: Arguments of ``LLM`` on top of the model's.
        env: Environment variables.
        served_by: How it shows that it served, see `served`.
        about: One line for the report.
    """

    name: str
    role: str = "candidate"
    engine: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    served_by: str = ""
    about: str = ""


def _attention(backend: str) -> dict[str, Any]:
    return {"attention_config": {"backend": backend}}


def _norms(provider: str) -> dict[str, Any]:
    names = ("rms_norm", "fused_add_rms_norm")
    order = list(dict.fromkeys((provider, "native")))
    return {"kernel_config": {"ir_op_priority": {name: order for name in names}}}


BUILTIN: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant(
            BASELINE, "baseline", _attention("TRITON_ATTN"), served_by="backend:TRITON_ATTN",
            about="vLLM's own Triton attention",
        ),
        Variant(
            REPEAT, "noise", _attention("TRITON_ATTN"), served_by="backend:TRITON_ATTN",
            about="the baseline once more",
        ),
        # Its provider depends on what the baseline uses: see `neutral_norms`.
        Variant(
            "neutral-norm", "noise", _attention("TRITON_ATTN"), served_by="norms",
            about="another norm provider",
        ),
        Variant(
            "neutral-batch", "noise",
            _attention("TRITON_ATTN") | {"max_num_seqs": 5, "max_num_batched_tokens": 128},
            served_by="backend:TRITON_ATTN", about="other batch sizes and prefill chunks",
        ),
        Variant(
            "segmented", engine=_attention("ROCM_SEGMENTED_ATTN"), served_by="segmented",
            about="ROCM_SEGMENTED_ATTN, static tiles",
        ),
        Variant(
            "segmented-tuned",
            engine=_attention("ROCM_SEGMENTED_ATTN")
            | {"kernel_config": {"enable_rocm_segmented_attn_autotune": True}},
            served_by="segmented", about="ROCM_SEGMENTED_ATTN, tiles measured at start-up",
        ),
        Variant(
            "hipdnn", engine=_attention("HIPDNN") | _norms("hipdnn"), served_by="hipdnn",
            about="HIPDNN attention and norms, default ops",
        ),
        Variant("rocm", engine=_attention("ROCM_ATTN"), served_by="backend:ROCM_ATTN",
                about="vLLM's ROCM_ATTN"),
    )
}  # fmt: skip
NOISE = tuple(v.name for v in BUILTIN.values() if v.role == "noise")
DEFAULT_CANDIDATES = ("segmented", "segmented-tuned", "hipdnn")


def neutral_norms(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that take the norm provider which the baseline does not.

    At the pin, vLLM on ROCm takes ``native`` where Inductor compiles and ``vllm_c``
    elsewhere.

    Args:
        engine: The model's arguments of ``LLM``.
    """
    compilation = engine.get("compilation_config") or {}
    mode = compilation.get("mode") if isinstance(compilation, Mapping) else compilation
    eager = bool(engine.get("enforce_eager")) or mode in (0, "0", "NONE")
    return _norms("native" if eager else "vllm_c")


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries merged, the later ones winning."""
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = out.get(key)
            nested = isinstance(old, Mapping) and isinstance(value, Mapping)
            out[key] = merge(old, value) if nested else value  # type: ignore[arg-type]
    return out


@dataclass(frozen=True)
class Model:
    """A model to validate.

    Attributes:
        name: Its name in results.
        path: A directory, or a name on the hub.
        tasks: Of "generate", "embed", "spec", "perf" and "gsm8k".
        engine: Arguments of ``LLM``.
        spec: ``speculative_config`` for the task "spec".
        env: Environment variables.
        variants: Which ones to run; empty for the run's own list.
        noise: Which noise runs; empty for all.
        prompts: How many.
        new_tokens: Continuation of each.
        longest: Tokens of the longest prompt.
        perf: Settings of the workloads, see ``driver.workloads``.
    """

    name: str
    path: str
    tasks: tuple[str, ...] = ("generate",)
    engine: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    prompts: int = 24
    new_tokens: int = 64
    longest: int = 3000
    perf: Mapping[str, Any] = field(default_factory=dict)


TASKS = ("generate", "embed", "spec", "perf", "gsm8k")


@dataclass(frozen=True)
class Plan:
    """Models and variants of one run."""

    models: tuple[Model, ...]
    variants: Mapping[str, Variant]
    chosen: tuple[str, ...]

    def of(self, model: Model) -> list[Variant]:
        """Return a model's variants: baseline, noise runs, candidates."""
        names = model.variants or self.chosen
        noise = model.noise or NOISE
        return [self.variants[name] for name in dict.fromkeys((BASELINE, *noise, *names))]


def _fields(kind: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    values = {key.replace("-", "_"): value for key, value in table.items()}
    if unknown := sorted(set(values) - set(known)):
        names = ", ".join(sorted(set(known) - {"name"}))
        raise StackError(f"{where}: unknown key {unknown[0]!r}; known: {names}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def load(
    config: Path | None,
    models: Sequence[str] = (),
    candidates: Sequence[str] = (),
    tasks: Sequence[str] = (),
    engine: Mapping[str, Any] | None = None,
) -> Plan:
    """Read what to run from a file and the command line.

    Args:
        config: TOML with ``[engine]``, ``[env]`` (for all), ``[models.NAME]`` and
            ``[variants.NAME]``, whose keys are the attributes of `Model` and `Variant`.
        models: Paths or hub names on top of the file's; with a file they may also be names
            of its models, which are then the only ones.
        candidates: Names of variants; the default ones or the file's otherwise.
        tasks: Override every model's.
        engine: Arguments of ``LLM`` for all models.

    Raises:
        StackError: A name is unknown, or there is no model.
    """
    data = toml.read(config) if config else {}
    if unknown := sorted(set(data) - {"engine", "env", "models", "variants"}):
        raise StackError(f"{config}: unknown table [{unknown[0]}]")
    common = merge(data.get("engine", {}), engine or {})
    variants = dict(BUILTIN)
    for name, table in data.get("variants", {}).items():
        values = _fields(Variant, table, f"[variants.{name}]")
        variants[name] = Variant(name, **values)
    found = []
    for name, table in data.get("models", {}).items():
        values = _fields(Model, table, f"[models.{name}]")
        values.setdefault("path", name)
        found.append(Model(name, **values))
    if named := [m for m in found if m.name in models]:
        found = named
    known = {m.name for m in found}
    found += [Model(Path(m).name, m) for m in models if m not in known]
    if not found:
        raise StackError("no model to validate", "--model DIRECTORY-OR-HUB-NAME")
    out = []
    for model in found:
        chosen = tuple(tasks) or model.tasks
        for task in chosen:
            if task not in TASKS:
                raise StackError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
        values = dict(vars(model))
        values["tasks"] = chosen
        # Children work in another folder.
        local = CWD / model.path
        values["path"] = str(local.resolve()) if local.is_dir() else model.path
        values["engine"] = merge(common, model.engine)
        values["env"] = {**data.get("env", {}), **model.env}
        out.append(Model(**values))
    names = tuple(candidates) or tuple(data.get("variants", {})) or DEFAULT_CANDIDATES
    for name in [*names, *(v for m in out for v in (*m.variants, *m.noise))]:
        if name not in variants:
            raise StackError(f"unknown variant {name!r}; known: {', '.join(variants)}")
    return Plan(tuple(out), variants, names)


def parse_engine(text: str | None) -> dict[str, Any]:
    """Read ``--engine``: a JSON object of arguments of ``LLM``."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StackError(f"--engine is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise StackError("--engine must be a JSON object")
    return value


def served(
    variant: Variant, report: Mapping[str, Any], base: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Say from a worker's report whether a variant served, and what it declined.

    Args:
        variant: The variant; its ``served_by`` is "backend:NAME" (every attention layer is
            on that backend), "segmented" (calls of ROCM_SEGMENTED_ATTN on its kernels),
            "hipdnn" (calls that an engine took), "norms" (other norm providers than the
            baseline's) or empty (nothing to show).
        report: See ``inside.Extension``.
        base: The baseline's report, where it is needed.

    Returns:
        ``ok``, ``text`` (one line), ``layers`` (layers by backend), ``served`` (calls by
        path or engine), ``declined`` (calls by reason).
    """
    layers: dict[str, int] = {}
    beside = 0
    for layer in report.get("layers", ()):
        if layer.get("kind", "attention") == "attention":
            layers[layer["backend"]] = layers.get(layer["backend"], 0) + 1
        else:
            beside += 1
    on = ", ".join(f"{n} layers on {b}" for b, n in sorted(layers.items())) or "no attention layer"
    if beside:
        on += f", {beside} layers that are no attention"
    ran: dict[str, int] = {}
    declined: dict[str, int] = {}
    how, _, backend = variant.served_by.partition(":")
    ok, text = True, on
    if how == "backend":
        ok = set(layers) == {backend}
        text = on if ok else f"{on}; wanted {backend}"
    elif how == "segmented":
        for path, calls in (report.get("paths") or {}).items():
            (ran if path == "segmented" else declined)[path] = calls
        ok = bool(ran) and "ROCM_SEGMENTED_ATTN" in layers
        text = f"{on}; {sum(ran.values())} calls on the segmented kernels"
    elif how == "hipdnn":
        coverage = report.get("hipdnn") or {}
        for kind, entry in coverage.get("kinds", {}).items():
            for engine, count in entry["served"].items():
                ran[f"{kind}: {engine}"] = count["calls"]
            for reason, count in entry["declined"].items():
                declined[f"{kind}: {reason}"] = count["calls"]
        library = coverage.get("library", {})
        if library.get("unavailable"):
            declined.setdefault(
                f"library: {library['unavailable']} {library.get('detail') or ''}".strip(), 0
            )
        ok = bool(ran)
        text = f"{on}; {sum(ran.values())} calls on hipDNN"
    elif how == "norms":
        ok = base is not None and report.get("norms") != base.get("norms")
        first = (report.get("norms") or {}).get("rms_norm", ["?"])[0]
        text = f"{on}; rms_norm by {first}"
        if not ok:
            text += ", as in the baseline: nothing was swapped"
    if declined:
        calls = sum(declined.values())
        text += f"; {calls} calls declined: " + "; ".join(sorted(declined))
    return {"ok": ok, "text": text, "layers": layers, "served": ran, "declined": declined}


def fits(needed: int, cache: int, memory: int, utilization: float = 0.92) -> str | None:
    """Say why a model is too large for the card; None if it fits.

    Args:
        needed: Bytes of the weights.
        cache: Least bytes wanted for the KV cache.
        memory: Bytes of the card.
        utilization: Share of it that vLLM may use.
    """
    gib = 2.0**30
    usable = memory * utilization
    # Activations and graphs take their share: a tenth of the weights, at least half a GiB.
    wanted = needed + cache + max(0.1 * needed, gib / 2)
    if wanted <= usable:
        return None
    return (
        f"needs about {wanted / gib:.1f} GiB ({needed / gib:.1f} GiB of weights), "
        f"the card has {memory / gib:.1f} GiB, of which {math.floor(100 * utilization)}% "
        "may be used"
    )
