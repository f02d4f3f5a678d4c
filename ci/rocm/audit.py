"""What the compiled libraries of a wheel need and hold, and whether that is what it may.

All of it works on files: ELF tables are read with pyelftools, device code is disassembled
with an llvm-objdump, the rules of manylinux and of Python's stable ABI are auditwheel's and
abi3audit's.
"""

import ast
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci import codeobjects
from ci.rocm import stubs

# What a wheel may ask for beyond the libraries that manylinux allows, and who brings it.
PROVIDERS = {
    "libtorch.so": "torch",
    "libtorch_cpu.so": "torch",
    "libtorch_hip.so": "torch",
    "libc10.so": "torch",
    "libc10_hip.so": "torch",
    "libamdhip64.so.7": "ROCm 7",
    "libhipblas.so.3": "ROCm 7",
}
SYSTEM = frozenset(
    ["libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0",
     "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"]
)  # fmt: skip
# Architectures with WMMA and what its instructions begin with: AMD's ISA documents of
# RDNA 3 and RDNA 4 (VOP3P, v_wmma_*).  CDNA has MFMA instead.
WMMA = re.compile(r"gfx1[12]\d\d$")
NAMESPACES = ("_C", "_rocm_C", "_moe_C", "_C_cache_ops", "_C_cuda_utils", "_C_custom_ar")


@dataclass(frozen=True)
class Library:
    """The dynamic section and symbols of one library.

    Attributes:
        name: Its file name.
        needed: Libraries that it asks for, in order.
        undefined: Symbols that it takes from elsewhere (weak ones left out).
        versions: Symbol versions that it asks for, such as "GLIBC_2.34".
        runpath: Its RPATH or RUNPATH, or "".
    """

    name: str
    needed: tuple[str, ...]
    undefined: frozenset[str]
    versions: frozenset[str]
    runpath: str


def read_library(path: Path) -> Library:
    """Read a library's tables."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        elf: Any = ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        needed, runpath = [], ""
        for tag in dynamic.iter_tags():
            if tag.entry.d_tag == "DT_NEEDED":
                needed.append(tag.needed)
            elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                runpath = tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath
        undefined = {
            symbol.name
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            if symbol.name
            and symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] != "STB_WEAK"
        }
        versions = set()
        if section := elf.get_section_by_name(".gnu.version_r"):
            for _, items in section.iter_versions():
                versions |= {item.name for item in items}
    return Library(path.name, tuple(needed), frozenset(undefined), frozenset(versions), runpath)


def exported(path: Path) -> set[str]:
    """Return the names that a library defines, by binutils' nm: torch has 200,000."""
    result = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=just-symbols", str(path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {line.split("@")[0] for line in result.stdout.split()}


def newest(versions: Iterable[str]) -> dict[str, str]:
    """Return the newest of each family of symbol versions, such as GLIBC to "2.34"."""
    result: dict[str, tuple[int, ...]] = {}
    for version in versions:
        if match := re.fullmatch(r"(GLIBC|GLIBCXX|CXXABI|hip)_(\d+(?:\.\d+)*)", version):
            numbers = tuple(int(n) for n in match[2].split("."))
            result[match[1]] = max(result.get(match[1], (0,)), numbers)
    return {name: ".".join(map(str, numbers)) for name, numbers in sorted(result.items())}


def needed_problems(library: Library, allowed: Mapping[str, str] = PROVIDERS) -> list[str]:
    """Name the libraries that a library asks for and that nobody brings."""
    problems = [
        f"{library.name} needs {name}, which neither the system nor torch nor ROCm brings"
        for name in library.needed
        if name not in SYSTEM and name not in allowed
    ]
    if library.runpath and not library.runpath.startswith("$ORIGIN"):
        problems.append(f"{library.name} looks for libraries in {library.runpath}")
    return problems


def symbol_problems(
    library: Library,
    provided: Mapping[str, Collection[str]],
    listed: Sequence[stubs.Library],
) -> tuple[dict[str, int], list[str]]:
    """Find who provides each undefined symbol of a library.

    Args:
        library: The library.
        provided: Provider to the names that it defines (torch's CPU libraries, the HIP
            runtime, the C and C++ libraries).
        listed: The tracked list of what only a ROCm torch and ROCm's libraries define.

    Returns:
        Provider to how many symbols it provides, and a sentence per symbol that no
        provider has or whose library is not among those that the library asks for.
    """
    counts: dict[str, int] = {}
    problems = []
    for symbol in sorted(library.undefined):
        owners = [n for n, names in provided.items() if symbol in names]
        owners += [x.soname for x in listed if symbol in x.symbols]
        if re.match(r"_?Py[A-Z_]", symbol):
            owner = "Python"
        elif not owners:
            problems.append(f"{library.name}: no declared library defines {symbol}")
            continue
        else:
            owner = next((name for name in owners if name in library.needed), owners[0])
            if owner not in library.needed:
                problems.append(f"{library.name} uses {symbol} but does not need {owner}")
        counts[owner] = counts.get(owner, 0) + 1
    return counts, problems


def wmma(library: Path, objdump: Sequence[str]) -> dict[str, str]:
    """Find a matrix instruction in the device code for each architecture that has them.

    Args:
        library: A host library with fat binaries.
        objdump: The command of an llvm-objdump that knows these architectures; it reads
            the code object from its standard input.

    Returns:
        Architecture to the first such instruction, or to "" where there is none.
    """
    found: dict[str, str] = {}
    for arch, image in codeobjects.images(library.read_bytes()):
        if not WMMA.match(arch):
            continue
        found.setdefault(arch, "")
        if not found[arch]:
            found[arch] = first_match(objdump, arch, image, re.compile(rb"\bv_s?wmmac?_\w+"))
    return found


def first_match(
    objdump: Sequence[str], arch: str, image: bytes, pattern: "re.Pattern[bytes]"
) -> str:
    """Disassemble until a pattern occurs; return it, or ""."""
    with tempfile.NamedTemporaryFile(suffix=".co") as file:
        file.write(image)
        file.flush()
        file.seek(0)
        process = subprocess.Popen(
            [*objdump, "-d", "--no-show-raw-insn", f"--mcpu={arch}", "-"],
            stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := pattern.search(line):
                    return match.group().decode()
        finally:
            process.kill()
            process.stdout.close()
            process.wait()
    return ""


def named_ops(sources: Iterable[str], namespaces: Collection[str] = NAMESPACES) -> set[str]:
    """Return the ops that Python code names, as ``namespace::name``.

    Args:
        sources: Python source texts.
        namespaces: The namespaces to look for.
    """
    result = set()
    for text in sources:
        if "torch.ops." not in text and "ops." not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                space, owner = node.value, node.value.value
                if (
                    space.attr in namespaces
                    and isinstance(owner, ast.Attribute)
                    and owner.attr == "ops"
                    and isinstance(owner.value, ast.Name)
                    and owner.value.id == "torch"
                ):
                    result.add(f"{space.attr}::{node.attr}")
    return result


# The sources that define ops in a build for ROCm, and the modules that they are in.
BINDINGS = {
    "csrc/torch_bindings.cpp": "_C",
    "csrc/rocm/torch_bindings.cpp": "_rocm_C",
    "csrc/libtorch_stable/torch_bindings.cpp": "_C_stable_libtorch",
    "csrc/libtorch_stable/custom_all_gather_reduce_scatter_ops.cpp": "_C_stable_libtorch",
    "csrc/libtorch_stable/moe/torch_bindings.cpp": "_moe_C_stable_libtorch",
}
# Macros that vLLM's CMakeLists.txt sets when one of these architectures is built for.
ARCH_MACROS = {
    "VLLM_ROCM_GFX1100": ("gfx1100",),
    "VLLM_ENABLE_FUSED_KDA_DECODE": ("gfx942", "gfx950"),
    "VLLM_ENABLE_FUSED_KDA_CHUNK": ("gfx950",),
}
_SPACE = re.compile(
    r"(?:LIBRARY|LIBRARY_FRAGMENT|LIBRARY_EXPAND|LIBRARY_IMPL)\(\s*"
    r"(?:CONCAT\(\s*TORCH_EXTENSION_NAME\s*,\s*(?P<tail>\w+)\s*\)|(?P<name>\w+))"
    r'|\b\w+\.def\(\s*"\s*(?P<op>\w+)'
)


def macros_for(arches: Collection[str]) -> set[str]:
    """Return the macros under which ops are defined in a build for some architectures."""
    chosen = {name for name, of in ARCH_MACROS.items() if set(of) & set(arches)}
    if set(arches) == {"gfx1250"}:
        chosen.add("VLLM_SKIP_SKINNY_GEMMS")
    return chosen | {"USE_ROCM"}


def defined_ops(text: str, module: str, macros: Collection[str]) -> set[str]:
    """Return the ops that a C++ binding file defines.

    Args:
        text: The source; its conditions are ``#ifdef`` and ``#ifndef``.
        module: What TORCH_EXTENSION_NAME is.
        macros: The macros that are defined; all others are not.

    Returns:
        ``namespace::name`` each.

    Raises:
        ValueError: It has another kind of condition.
    """
    result, space = set(), module
    for match in _SPACE.finditer(active(text, macros)):
        if match["op"]:
            result.add(f"{space}::{match['op']}")
        elif match["tail"]:
            space = module + match["tail"]
        else:
            space = module if match["name"] == "TORCH_EXTENSION_NAME" else match["name"]
    return result


def active(text: str, macros: Collection[str]) -> str:
    """Return the lines that a preprocessor keeps.

    Raises:
        ValueError: A condition is none of ifdef, ifndef, else, endif.
    """
    stack: list[bool] = []
    kept = []
    for line in text.splitlines():
        match = re.match(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif)\b\s*(\w*)", line)
        if not match:
            if all(stack):
                kept.append(line)
        elif match[1] in ("ifdef", "ifndef"):
            stack.append((match[2] in macros) == (match[1] == "ifdef"))
        elif match[1] == "else" and stack:
            stack[-1] = not stack[-1]
        elif match[1] == "endif" and stack:
            stack.pop()
        else:
            raise ValueError(f"cannot judge {line.strip()!r}")
    return "\n".join(kept)


def op_problems(
    named: Collection[str], defined: Collection[str], registered: Collection[str]
) -> list[str]:
    """Compare what Python names with what the sources define and the libraries register.

    An op that Python names and that the sources define for ROCm must be registered; one
    that they define for CUDA alone is not missed.
    """
    return [
        f"op {name} is named by vLLM's Python and defined for ROCm, but not registered"
        for name in sorted((set(named) & set(defined)) - set(registered))
    ]
