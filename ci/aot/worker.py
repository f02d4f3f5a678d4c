"""Compile a share of the variants for one architecture; runs in a process of its own.

Started by :mod:`ci.aot.build` with the tree, this package and the stand-in device library on the
Python path. Takes a job as JSON on standard input; answers in JSON lines on standard output:
``{"done": variant}`` for each variant and at the end ``{"result": ...}`` or ``{"error": text}``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ci.aot import driver, lists
from ci.aot.model import CODE_SUFFIX, AotError, KernelList, KernelObject, Variant
from ci.aot.resources import read_resources

# What Triton writes into a kernel's metadata besides its options and the environment.
_SKIPPED_METADATA = {"hash", "target", "triton_version"}


def compile_share(job: dict[str, Any], answer: TextIO) -> dict[str, Any]:
    """Compile the job's share of variants.

    Args:
        job: ``arch``, ``target`` (another than the architecture's own, or None), ``lists``
            (names), ``share`` and ``shares`` (which part of the variants),
            ``environment`` (the variables that may be set of those that Triton's key covers)
            and ``out`` (a folder for the code).
        answer: Where progress is written.

    Returns:
        The Triton version and key, and the objects in JSON form.

    Raises:
        AotError: A variant does not compile, or not to what its list says.
    """
    arch, out = job["arch"], Path(job["out"])
    recorder = driver.activate(driver.target_of(arch, job["target"]))
    environment = importlib.import_module("triton._C.libtriton").get_cache_invalidating_env_vars()
    if environment != job["environment"]:
        raise AotError(f"environment variables change what Triton compiles: {environment}")
    triton = describe_triton()
    objects: dict[str, KernelObject] = {}
    variants = [pair for name in job["lists"] for pair in _load(name, arch)]
    for kernels, variant in variants[job["share"] :: job["shares"]]:
        module = _module(kernels)
        label = f"{kernels.name}/{variant.name}"
        try:
            kernels.launch(module, variant, arch)
        except Exception as error:
            raise AotError(f"{label} on {arch}: {_brief(error)}") from error
        used = [recorder.compiled[key] for key in recorder.take_launched()]
        names = {str(item.source.fn.__name__) for item in used}
        if names != set(variant.kernels):
            raise AotError(
                f"{label} on {arch}: launched {', '.join(sorted(names)) or 'nothing'}, "
                f"the list says {', '.join(variant.kernels)}"
            )
        for compiled in used:
            item, code = _describe(compiled, kernels, environment, triton, label)
            if known := objects.get(item.id):
                names_so_far = dict.fromkeys((*known.variants, label))
                item = replace(item, variants=tuple(names_so_far))
            objects[item.id] = item
            (out / Path(item.file).name).write_bytes(code)
        print(json.dumps({"done": f"{arch} {label}"}), file=answer, flush=True)
    return {"triton": triton, "objects": [item.to_json() for item in objects.values()]}


def describe_triton() -> dict[str, str]:
    """Triton's version and the sha256 of its key.

    The key covers the version, the compiler's and the backends' sources and the compiler library.
    """
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler.compiler")
    cache = importlib.import_module("triton.runtime.cache")
    # Moved between releases.
    key = getattr(cache, "triton_key", None) or compiler.triton_key
    return {
        "version": str(triton.__version__),
        "key": hashlib.sha256(key().encode()).hexdigest(),
    }


def _load(name: str, arch: str) -> list[tuple[KernelList, Variant]]:
    kernels, _ = lists.load(name)
    return [(kernels, variant) for variant in kernels.variants(arch)]


def _module(kernels: KernelList) -> Any:
    try:
        return importlib.import_module(kernels.module)
    except Exception as error:
        raise AotError(
            f"list {kernels.name}: cannot import {kernels.module}: {_brief(error)}"
        ) from error


def _describe(
    compiled: driver.Compiled,
    kernels: KernelList,
    environment: dict[str, str],
    triton: dict[str, str],
    label: str,
) -> tuple[KernelObject, bytes]:
    source = compiled.source
    arguments = list(source.fn.arg_names)
    metadata = _plain(compiled.metadata)
    options = _options(metadata)
    # A file's name in Triton's cache may be cut short; there is one of each kind.
    files = {path.suffix: path for path in compiled.files.values()}
    code = files[f".{CODE_SUFFIX[metadata['target']['backend']]}"].read_bytes()
    constexprs = {
        _argument(path, arguments): _constant(value) for path, value in source.constants.items()
    }
    item = KernelObject(
        id="",
        kernel=source.fn.__name__,
        module=source.fn.__module__,
        source_hash=source.hash(),
        target=metadata["target"],
        options=options,
        signature=_plain(source.signature),
        constexprs=constexprs,
        attrs={_argument(path, arguments): _plain(value) for path, value in source.attrs.items()},
        metadata={
            key: value
            for key, value in metadata.items()
            if key not in options and key not in environment and key not in _SKIPPED_METADATA
        },
        sha256=hashlib.sha256(code).hexdigest(),
        size=len(code),
        resources=(
            read_resources(
                files[".amdgcn"].read_text(),
                lds_bytes=metadata["shared"],
                num_warps=metadata["num_warps"],
                kv_tokens=constexprs.get(kernels.kv_tile.get(source.fn.__name__, ""), 0),
            )
            if ".amdgcn" in files
            else None
        ),
        variants=(label,),
    )
    item = replace(item, id=item.identity(triton, environment))
    _require_loadable(item, environment, metadata["hash"], label)
    return item, code


def _require_loadable(
    item: KernelObject, environment: dict[str, str], key: str, label: str
) -> None:
    """Check that the tree's own loader takes the object for what it is, if it has one."""
    if importlib.util.find_spec("vllm.hipstack") is None:
        return
    try:
        loader = importlib.import_module("vllm.hipstack.prebuilt")
    except ModuleNotFoundError:
        return
    compiler = importlib.import_module("triton.compiler.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget(**item.target)
    backend = compiler.make_backend(target)
    entry = json.loads(json.dumps(item.to_json()))
    source, options = loader.source_of(entry), loader.options_of(entry, backend)
    if loader.cache_key(source, options, backend, environment) != key:
        raise AotError(f"{label}: the tree's loader computes another hash than Triton")


def _plain(value: Any) -> Any:
    """The value as JSON gives it back: tuples become lists, objects their fields."""
    return json.loads(json.dumps(value, default=vars, allow_nan=False))


def _options(metadata: dict[str, Any]) -> dict[str, Any]:
    """The compile options in the metadata, with library paths replaced by contents' hashes."""
    compiler = importlib.import_module("triton.compiler.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    target = backends.GPUTarget(**metadata["target"])
    names = set(vars(compiler.make_backend(target).parse_options({})))
    options = {name: metadata[name] for name in sorted(names)}
    if isinstance(options.get("extern_libs"), list):
        options["extern_libs"] = {
            name: hashlib.sha256(Path(path).read_bytes()).hexdigest()
            for name, path in options["extern_libs"]
        }
    return options


def _argument(path: tuple[int, ...], arguments: list[str]) -> str:
    return ".".join([arguments[path[0]], *map(str, path[1:])])


def _constant(value: Any) -> Any:
    """The JSON form of a compile-time value."""
    kind = type(value).__name__
    if kind == "constexpr":
        return _constant(value.value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (tuple, list)):
        return {"tuple": [_constant(item) for item in value]}
    if hasattr(value, "cache_key"):
        return {"function": f"{value.__module__}:{value.__qualname__}", "hash": value.cache_key}
    if kind == "dtype":
        return {"dtype": str(value)}
    raise AotError(f"a compile-time value of type {kind} has no form in a manifest")


def _brief(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[-1] if text else 'no message'}"


def main() -> int:
    """Run the job on standard input."""
    # Imports may print; the answers get standard output for themselves.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        final: dict[str, Any] = {"result": compile_share(json.load(sys.stdin), answer)}
    except AotError as error:
        final = {"error": str(error)}
    print(json.dumps(final), file=answer, flush=True)
    return "error" in final


if __name__ == "__main__":
    sys.exit(main())
