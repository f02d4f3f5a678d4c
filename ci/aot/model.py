"""The nouns of ahead-of-time compilation: variants, kernel lists, objects, the manifest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ci.errors import StackError

# Version 2: attributes are complete, so that a loader can compute Triton's hash.
SCHEMA = 2
MANIFEST_NAME = "manifest.json"
# Triton's backend to the ending of its code files.
CODE_SUFFIX = {"hip": "hsaco", "cuda": "cubin"}
_ID = re.compile(r"[0-9a-f]{32}\Z")
_ARCH = re.compile(r"gfx[0-9]{1,2}[0-9a-f]{2}\Z")
_CAPABILITY = re.compile(r"[1-9][0-9]{1,2}\Z")


class AotError(StackError):
    """Kernels could not be compiled, or a manifest cannot be trusted; the text says why."""


@dataclass(frozen=True)
class Variant:
    """One launch of a list.

    Attributes:
        name: Unique in its list; shown in tables and kept in the manifest.
        kernels: Names of the kernels that the launch runs, no more and no fewer.
        params: What the list's ``launch`` needs to build the arguments.
    """

    name: str
    kernels: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelList:
    """A set of launches to compile.

    Attributes:
        name: The list's name.
        module: The module of the tree that ``launch`` calls into.
        variants: Gives the variants for an architecture, always in the same order.
        launch: Called as ``launch(module, variant, arch)``; launches with meta tensors, through
            the same host function that the engine calls.
        kv_tile: Kernel name to the constexpr argument that holds how many KV tokens one pass
            of its main loop handles.
    """

    name: str
    module: str
    variants: Callable[[str], Sequence[Variant]]
    launch: Callable[[Any, Variant, str], None]
    kv_tile: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, as the compiler reports it.

    Attributes:
        vgprs: Vector registers of a lane (accumulation registers included).
        sgprs: Scalar registers of a wave.
        vgpr_spills: Spilled vector registers.
        sgpr_spills: Spilled scalar registers.
        scratch_bytes: Private memory of a lane.
        lds_bytes: Shared memory of a workgroup.
        occupancy: Waves of a SIMD, limited by registers and by shared memory.
        matrix_instructions: WMMA, SWMMAC and MFMA instructions in the code.
        code_bytes: Length of the kernel's code.
        loop_instructions: Instructions in the main loop, 0 if there is none.
        loop_matrix_instructions: Matrix instructions among them.
        loop_kv_tokens: KV tokens of one pass of the loop, 0 if the list does not declare it.
    """

    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    occupancy: int
    matrix_instructions: int
    code_bytes: int
    loop_instructions: int
    loop_matrix_instructions: int
    loop_kv_tokens: int

    @property
    def instructions_per_kv_token(self) -> float | None:
        """Instructions of a wave per KV token in the main loop."""
        if not self.loop_instructions or not self.loop_kv_tokens:
            return None
        return self.loop_instructions / self.loop_kv_tokens


@dataclass(frozen=True)
class KernelObject:
    """One code object and everything that decides whether it may stand in for a compilation.

    Attributes:
        id: Hash of all that determines the code (see :meth:`identity`).
        kernel: The kernel function's name.
        module: The module that defines it.
        source_hash: Triton's hash of source, callees, signature, constants and attributes.
        target: Triton's target: backend, arch, warp_size.
        options: Compile options; library paths are replaced by the libraries' sha256.
        signature: Argument name to type.
        constexprs: Argument name to compile-time value.
        attrs: Argument name to attributes (divisibility, pointer range), without those that
            Triton was told not to look at.
        metadata: What a launcher needs besides: symbol name, shared memory and such.
        sha256: Of the file.
        size: Of the file, in bytes.
        resources: What it takes; None if it is no AMD code.
        variants: ``list/variant`` names whose launch uses it.
    """

    id: str
    kernel: str
    module: str
    source_hash: str
    target: Mapping[str, Any]
    options: Mapping[str, Any]
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    attrs: Mapping[str, Any]
    metadata: Mapping[str, Any]
    sha256: str
    size: int
    resources: Resources | None
    variants: tuple[str, ...]

    @property
    def arch(self) -> str:
        """The architecture, such as ``gfx1201``, or another GPU's compute capability."""
        return str(self.target["arch"])

    @property
    def file(self) -> str:
        """The file's path below the manifest's folder."""
        return f"{self.arch}/{self.id}.{CODE_SUFFIX[self.target['backend']]}"

    def identity(self, triton: Mapping[str, str], environment: Mapping[str, str]) -> str:
        """Hash what determines the code; equals :attr:`id` in an honest manifest."""
        parts = [
            triton,
            environment,
            *(
                getattr(self, name)
                for name in (
                    "kernel",
                    "module",
                    "source_hash",
                    "target",
                    "options",
                    "signature",
                    "constexprs",
                    "attrs",
                )
            ),
        ]
        return digest(parts)[:32]

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {**asdict(self), "variants": list(self.variants)}

    @classmethod
    def from_json(cls, data: Any) -> KernelObject:
        """Read the JSON form.

        Raises:
            AotError: A field is missing, unknown or of another type.
        """
        values = _checked(cls, data, "object")
        backend = values["target"].get("backend")
        if backend not in CODE_SUFFIX:
            raise AotError("an object's target names no backend")
        if backend == "hip" or values["resources"] is not None:
            values["resources"] = Resources(**_checked(Resources, values["resources"], "resources"))
        values["variants"] = tuple(_strings(values["variants"], "variants"))
        form = _ARCH if backend == "hip" else _CAPABILITY
        if not form.match(str(values["target"].get("arch"))):
            raise AotError("an object's target names no architecture")
        if not _ID.match(values["id"]):
            raise AotError("an object's id is not a hash")
        return cls(**values)


@dataclass(frozen=True)
class Manifest:
    """All objects of a folder and what they were compiled with.

    Attributes:
        triton: ``version`` and ``key`` (sha256 of Triton's own key, which covers its sources,
            backends and compiler library).
        environment: The environment variables that were set for the compilation and that
            Triton counts as part of its cache key.
        lists: List name to the sha256 of its definition.
        arches: The architectures, sorted.
        objects: Sorted by architecture, kernel and id.
    """

    triton: Mapping[str, str]
    environment: Mapping[str, str]
    lists: Mapping[str, str]
    arches: tuple[str, ...]
    objects: tuple[KernelObject, ...]

    def to_json(self) -> dict[str, Any]:
        """The JSON form, with the digest that covers all the rest of it."""
        body: dict[str, Any] = {
            "schema": SCHEMA,
            "triton": dict(self.triton),
            "environment": dict(self.environment),
            "lists": dict(self.lists),
            "arches": list(self.arches),
            "objects": [item.to_json() for item in self.objects],
        }
        return {**body, "digest": digest(body)}

    def dumps(self) -> str:
        """The text of ``manifest.json``: the same manifest always gives the same text."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Read the JSON form.

        Raises:
            AotError: Another schema, a wrong digest, or a malformed field.
        """
        if not isinstance(data, dict):
            raise AotError("the manifest is not a JSON object")
        if data.get("schema") != SCHEMA:
            raise AotError(f"manifest schema {data.get('schema')!r}, this code reads {SCHEMA}")
        body = {key: value for key, value in data.items() if key != "digest"}
        try:
            fits = data.get("digest") == digest(body)
        except (ValueError, TypeError, RecursionError) as error:
            raise AotError(f"the manifest holds what JSON does not: {error}") from error
        if not fits:
            raise AotError("the manifest was changed: its digest does not fit")
        del body["schema"]
        values = _checked(cls, body, "manifest")
        if not isinstance(values["objects"], list):
            raise AotError("manifest field objects is not a list")
        values["objects"] = tuple(KernelObject.from_json(item) for item in values["objects"])
        values["arches"] = tuple(_strings(values["arches"], "arches"))
        return cls(**values)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read ``manifest.json`` of a folder; the objects' files are not looked at.

        Raises:
            AotError: It is missing, not readable or not valid.
        """
        path = folder / MANIFEST_NAME
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise AotError(f"{path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise AotError(f"{path}: not JSON: {error}") from error
        try:
            return cls.from_json(data)
        except AotError as error:
            raise AotError(f"{path}: {error}") from error


def valid_arch(name: str) -> bool:
    """Whether the text has the form of an architecture's name (no features)."""
    return _ARCH.match(name) is not None


def digest(value: Any) -> str:
    """Sha256 over the canonical JSON of a value, as hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


_JSON_TYPES: dict[str, type] = {
    "str": str,
    "int": int,
    "Mapping[str, Any]": dict,
    "Mapping[str, str]": dict,
}


def _checked(kind: Any, data: Any, what: str) -> dict[str, Any]:
    """Return ``data`` as keyword arguments for a dataclass, its simple fields checked."""
    if not isinstance(data, dict):
        raise AotError(f"{what} is not a JSON object")
    wanted = {item.name: str(item.type) for item in fields(kind)}
    if set(data) != set(wanted):
        raise AotError(f"{what} has unfit fields: {', '.join(sorted(set(data) ^ set(wanted)))}")
    for name, type_name in wanted.items():
        expected = _JSON_TYPES.get(type_name)
        value = data[name]
        if expected and (not isinstance(value, expected) or isinstance(value, bool)):
            raise AotError(f"{what} field {name} is not of type {expected.__name__}")
        if type_name == "Mapping[str, str]":
            _strings(list(value.values()), name)
    return dict(data)


def _strings(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise AotError(f"{what} is not a list of texts")
    return value
