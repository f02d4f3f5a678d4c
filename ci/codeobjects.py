"""List the AMD GPU code objects inside a file or a wheel.

What is recognised:

* an AMDGPU ELF file (``.hsaco``, ``.co``), also when it is embedded in another file;
* a clang offload bundle (``__CLANG_OFFLOAD_BUNDLE__``), alone or in the ``.hip_fatbin`` section
  of a host ELF file, where the bundles of several translation units follow each other with
  zero padding between them;
* a compressed offload bundle (``CCOB``, header versions 1 to 3, zlib or zstd).

The architecture is read twice, from the bundle's entry name and from the ELF header's flags, and
both must say the same. Input is never trusted: whatever the bytes are, the functions return or
raise :class:`CodeObjectError`.

Command line::

    python -m ci.codeobjects [--json] [--arch gfx1201,gfx1100] FILE...
"""

from __future__ import annotations

import argparse
import bisect
import io
import json
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "KNOWN_ARCHES",
    "CodeObject",
    "CodeObjectError",
    "arches_by_file",
    "check_arches",
    "images",
    "scan_bytes",
    "scan_file",
    "scan_wheel",
]

BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED_MAGIC = b"CCOB"
ELF_MAGIC = b"\x7fELF"
# ELF64, little endian, version 1, OS ABI "AMDGPU - HSA".
AMDGPU_IDENT = b"\x7fELF\x02\x01\x01\x40"
EM_AMDGPU = 224

# A fat binary of one wheel is well below this; more is taken for a decompression bomb.
MAX_UNCOMPRESSED = 2 << 30
MAX_BUNDLE_ENTRIES = 1024
# AMD's portable device code; compiled for the card when it is loaded.
SPIRV_TARGET = "amdgcnspirv"

# EF_AMDGPU_MACH_* of LLVM's AMDGPU user guide ("ELF header e_flags"); the tests compare every
# entry that the assembler in the Triton wheel knows with what that assembler writes.
_MACH = {
    0x20: "gfx600",
    0x21: "gfx601",
    0x22: "gfx700",
    0x23: "gfx701",
    0x24: "gfx702",
    0x25: "gfx703",
    0x26: "gfx704",
    0x28: "gfx801",
    0x29: "gfx802",
    0x2A: "gfx803",
    0x2B: "gfx810",
    0x2C: "gfx900",
    0x2D: "gfx902",
    0x2E: "gfx904",
    0x2F: "gfx906",
    0x30: "gfx908",
    0x31: "gfx909",
    0x32: "gfx90c",
    0x33: "gfx1010",
    0x34: "gfx1011",
    0x35: "gfx1012",
    0x36: "gfx1030",
    0x37: "gfx1031",
    0x38: "gfx1032",
    0x39: "gfx1033",
    0x3A: "gfx602",
    0x3B: "gfx705",
    0x3C: "gfx805",
    0x3D: "gfx1035",
    0x3E: "gfx1034",
    0x3F: "gfx90a",
    0x40: "gfx940",
    0x41: "gfx1100",
    0x42: "gfx1013",
    0x43: "gfx1150",
    0x44: "gfx1103",
    0x45: "gfx1036",
    0x46: "gfx1101",
    0x47: "gfx1102",
    0x48: "gfx1200",
    0x49: "gfx1250",
    0x4A: "gfx1151",
    0x4B: "gfx941",
    0x4C: "gfx942",
    0x4E: "gfx1201",
    0x4F: "gfx950",
    0x51: "gfx9-generic",
    0x52: "gfx10-1-generic",
    0x53: "gfx10-3-generic",
    0x54: "gfx11-generic",
    0x55: "gfx1152",
    0x58: "gfx1153",
    0x59: "gfx12-generic",
    0x5A: "gfx1251",
    0x5F: "gfx9-4-generic",
}

KNOWN_ARCHES = frozenset(_MACH.values())

# Two-bit fields since code object version 4: 0 unsupported, 1 any, 2 off, 3 on.
_FEATURE_TEXT = {0: "", 1: "", 2: "-", 3: "+"}
_XNACK_SHIFT = 8
_SRAMECC_SHIFT = 10
# EI_ABIVERSION 2 is code object version 4, the first with these feature fields.
_OLDEST_ABI = 2

# <kind>-<triple>-<target id>. The triple has four parts, the last one empty or "unknown" (old
# compilers: three parts); the target id may hold hyphens itself.
_ENTRY_NAME = re.compile(
    r"(?:hip|hipv4|openmp)-"
    r"(?:amdgcn-amd-amdhsa-(?:(?:unknown)?-)?"
    r"(?P<arch>gfx[0-9a-f]+(?:-[0-9]+)*(?:-generic)?)(?P<features>(?::[a-z]+[+-])*)"
    r"|spirv64-amd-amdhsa-(?:(?:unknown)?-)?(?P<spirv>amdgcnspirv))\Z"
)


class CodeObjectError(ValueError):
    """A file holds device code that cannot be read, or that contradicts itself."""


@dataclass(frozen=True, order=True)
class CodeObject:
    """One AMD GPU code object.

    Attributes:
        file: The file that holds it (inside a wheel: the member's name).
        offset: Where its container (bundle or ELF) begins in that file, in bytes.
        kind: ``elf``, ``bundle``, ``compressed-bundle`` or ``embedded-elf``.
        target: The target id, features included, such as ``gfx942:sramecc+:xnack-``.
        arch: The target id without its features.
        size: The code object's own size in bytes (uncompressed).
        kernels: How many kernels it defines (kernel descriptor symbols).
    """

    file: str
    offset: int
    kind: str
    target: str
    arch: str
    size: int
    kernels: int


@dataclass(frozen=True)
class _Section:
    name: str
    kind: str
    offset: int
    size: int
    link: int

    def content(self, data: bytes) -> bytes:
        if self.kind == "SHT_NOBITS":
            return b""
        return data[self.offset : self.offset + self.size]


@dataclass(frozen=True)
class _Elf:
    target: str
    arch: str
    kernels: int


def scan_file(path: Path | str, name: str | None = None) -> list[CodeObject]:
    """List the code objects of one file; a ``.whl`` or ``.zip`` file is opened.

    Args:
        path: The file.
        name: The name to report, by default ``path`` as given.

    Returns:
        The code objects in file order; an empty list if there are none.

    Raises:
        CodeObjectError: The file cannot be read, or its device code cannot.
    """
    path = Path(path)
    if path.suffix in {".whl", ".zip"}:
        return scan_wheel(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CodeObjectError(f"{path}: {error.strerror or error}") from error
    return scan_bytes(name or str(path), data)


def scan_wheel(path: Path | str) -> list[CodeObject]:
    """List the code objects of every file in a wheel.

    Args:
        path: The wheel.

    Returns:
        The code objects, members in the archive's order.

    Raises:
        CodeObjectError: The archive or a member cannot be read.
    """
    found: list[CodeObject] = []
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.is_dir():
                    continue
                if info.file_size > MAX_UNCOMPRESSED:
                    raise CodeObjectError(f"{info.filename}: {info.file_size} bytes is too much")
                found += scan_bytes(info.filename, archive.read(info))
    except CodeObjectError:
        raise
    except OSError as error:
        raise CodeObjectError(f"{path}: {error.strerror or error}") from error
    # zipfile answers damaged archives with many kinds of exception.
    except Exception as error:
        raise CodeObjectError(f"{path}: not a readable wheel: {error}") from error
    return found


def scan_bytes(name: str, data: bytes) -> list[CodeObject]:
    """List the code objects in a file's bytes.

    Args:
        name: The file's name, for the result and for errors.
        data: The whole file.

    Returns:
        The code objects in file order; an empty list if there are none.

    Raises:
        CodeObjectError: The device code cannot be read, or contradicts itself.
    """
    try:
        found, covered = _scan_known(name, data)
        found += _scan_embedded(name, data, covered)
    except CodeObjectError as error:
        raise CodeObjectError(f"{name}: {error}") from error
    return sorted(found, key=lambda item: item.offset)


def images(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the code objects of a host library's fat binaries.

    Args:
        data: The whole library.

    Yields:
        (architecture, AMDGPU ELF image) each.

    Raises:
        CodeObjectError: The device code cannot be read.
    """
    view = memoryview(data)
    for start, size in _fat_sections(data):
        position, end = start, start + size
        while (position := _skip_zeros(data, position, end)) < end:
            bundle = view[position:end]
            used = 0
            if bundle[: len(COMPRESSED_MAGIC)] == COMPRESSED_MAGIC:
                plain, used = _decompress(bundle)
                bundle = memoryview(plain)
            entries, length = _bundle_entries(bundle)
            for entry, offset, count in entries:
                if not entry.startswith("host-") and count:
                    yield (
                        _entry_target(entry).split(":")[0],
                        bytes(bundle[offset : offset + count]),
                    )
            position += used or length


def arches_by_file(found: Iterable[CodeObject]) -> dict[str, list[str]]:
    """Group what was found: file name to its sorted, distinct architectures."""
    result: dict[str, set[str]] = {}
    for item in found:
        result.setdefault(item.file, set()).add(item.arch)
    return {file: sorted(arches) for file, arches in sorted(result.items())}


def check_arches(found: Sequence[CodeObject], requested: Iterable[str]) -> list[str]:
    """Compare the code objects of a wheel with the architectures it was built for.

    A fat binary must hold every requested architecture. A file that is a single code object
    holds one by nature; of those, each architecture must occur somewhere.

    Args:
        found: What a scan returned.
        requested: Architectures, such as ``gfx1201``.

    Returns:
        One sentence per problem; empty if exactly the requested architectures are there.
    """
    wanted = sorted(set(requested))
    if not wanted:
        return ["no architecture was asked for"]
    if not found:
        return [f"no AMD GPU code object at all, asked for {', '.join(wanted)}"]
    problems = []
    fat = {item.file for item in found if item.kind in {"bundle", "compressed-bundle"}}
    for file, arches in arches_by_file(found).items():
        if foreign := [arch for arch in arches if arch not in wanted]:
            problems.append(f"{file}: holds {', '.join(foreign)}, asked for {', '.join(wanted)}")
        if file in fat and (missing := [arch for arch in wanted if arch not in arches]):
            problems.append(f"{file}: lacks {', '.join(missing)}, holds {', '.join(arches)}")
    everywhere = {item.arch for item in found}
    if nowhere := [arch for arch in wanted if arch not in everywhere]:
        problems.append(f"no file holds code for {', '.join(nowhere)}")
    return problems


def _scan_known(name: str, data: bytes) -> tuple[list[CodeObject], list[tuple[int, int]]]:
    """Read the containers at their regular places; return the byte ranges they cover too."""
    if data.startswith(ELF_MAGIC):
        if _machine(data) == EM_AMDGPU:
            elf = _read_code_object(data)
            found = [CodeObject(name, 0, "elf", elf.target, elf.arch, len(data), elf.kernels)]
            return found, [(0, len(data))]
        found, covered = [], []
        for start, size in _fat_sections(data):
            found += _read_fat(name, data, start, start + size)
            covered.append((start, start + size))
        return found, covered
    if data.startswith((BUNDLE_MAGIC, COMPRESSED_MAGIC)):
        return _read_fat(name, data, 0, len(data)), [(0, len(data))]
    return [], []


def _scan_embedded(name: str, data: bytes, covered: list[tuple[int, int]]) -> list[CodeObject]:
    """Find code objects outside the regular places, such as byte arrays in ``.rodata``.

    Text that merely contains a magic (this module does) is no code object: here, what does not
    parse is passed over.
    """
    found: list[CodeObject] = []
    covered = sorted(covered)
    view = memoryview(data)
    for magic in (BUNDLE_MAGIC, COMPRESSED_MAGIC, AMDGPU_IDENT):
        position = data.find(magic)
        while position >= 0:
            following = _end_of_cover(covered, position)
            if following is None:
                try:
                    if magic == AMDGPU_IDENT:
                        items, used = _read_embedded_elf(name, data, position)
                    else:
                        items, used = _read_container(name, view[position:], position)
                except CodeObjectError:
                    following = position + 1
                else:
                    found += items
                    following = position + used
                    bisect.insort(covered, (position, following))
            position = data.find(magic, following)
    return found


def _end_of_cover(covered: list[tuple[int, int]], position: int) -> int | None:
    """The end of the range that holds the position; the ranges are sorted and disjoint."""
    index = bisect.bisect_right(covered, (position, sys.maxsize)) - 1
    if index >= 0 and position < covered[index][1]:
        return covered[index][1]
    return None


def _read_embedded_elf(name: str, data: bytes, offset: int) -> tuple[list[CodeObject], int]:
    size = _elf_size(data, offset)
    elf = _read_code_object(data[offset : offset + size])
    item = CodeObject(name, offset, "embedded-elf", elf.target, elf.arch, size, elf.kernels)
    return [item], size


def _read_fat(name: str, data: bytes, start: int, end: int) -> list[CodeObject]:
    """Read bundles that follow each other, with zero padding, in ``data[start:end]``."""
    found: list[CodeObject] = []
    view = memoryview(data)
    position = start
    while (position := _skip_zeros(data, position, end)) < end:
        items, used = _read_container(name, view[position:end], position)
        found += items
        position += used
    return found


def _read_container(name: str, view: memoryview, offset: int) -> tuple[list[CodeObject], int]:
    """Read the bundle at the start of ``view``; return its code objects and its length."""
    if view[: len(BUNDLE_MAGIC)] == BUNDLE_MAGIC:
        return _read_bundle(name, view, offset, "bundle")
    if view[: len(COMPRESSED_MAGIC)] == COMPRESSED_MAGIC:
        plain, used = _decompress(view)
        items, _ = _read_bundle(name, memoryview(plain), offset, "compressed-bundle")
        return items, used
    raise CodeObjectError(f"unknown bytes at offset {offset} where a bundle should be")


def _skip_zeros(data: bytes, position: int, end: int) -> int:
    while position < end:
        block = data[position : min(position + 4096, end)]
        stripped = block.lstrip(b"\0")
        if stripped:
            return position + len(block) - len(stripped)
        position += len(block)
    return end


def _bundle_entries(view: memoryview) -> tuple[list[tuple[str, int, int]], int]:
    """Parse a bundle's table: (entry name, offset, size) each, and the bundle's length."""
    if view[: len(BUNDLE_MAGIC)] != BUNDLE_MAGIC:
        raise CodeObjectError("not an offload bundle")
    position = len(BUNDLE_MAGIC)
    (count,) = _unpack("<Q", view, position)
    position += 8
    if not 0 < count <= MAX_BUNDLE_ENTRIES:
        raise CodeObjectError(f"an offload bundle with {count} entries")
    entries = []
    end = 0
    for _ in range(count):
        offset, size, length = _unpack("<QQQ", view, position)
        position += 24
        raw = bytes(view[position : position + min(length, 4096)])
        if len(raw) != length:
            raise CodeObjectError("an offload bundle's table is truncated")
        position += length
        try:
            entries.append((raw.decode("ascii"), offset, size))
        except UnicodeDecodeError as error:
            raise CodeObjectError("an offload bundle's entry name is not text") from error
        if offset + size > len(view):
            raise CodeObjectError(f"bundle entry {entries[-1][0]} is truncated")
        end = max(end, offset + size)
    return entries, max(end, position)


def _read_bundle(
    name: str, view: memoryview, offset: int, kind: str
) -> tuple[list[CodeObject], int]:
    """Read one uncompressed bundle at the start of ``view``; return it and its length."""
    entries, used = _bundle_entries(view)
    found = []
    for entry, start, size in entries:
        if entry.startswith("host-"):
            continue
        target = _entry_target(entry)
        if target == SPIRV_TARGET:
            found.append(CodeObject(name, offset, kind, target, target, size, 0))
            continue
        elf = _read_code_object(bytes(view[start : start + size]))
        if target != elf.target:
            raise CodeObjectError(f"bundle entry {entry} holds code for {elf.target}")
        found.append(CodeObject(name, offset, kind, elf.target, elf.arch, size, elf.kernels))
    return found, used


def _entry_target(entry: str) -> str:
    """The normalised target id in a bundle entry's name."""
    match = _ENTRY_NAME.match(entry)
    if match is None:
        raise CodeObjectError(f"bundle entry {entry!r} names no AMD GPU target")
    if match["spirv"]:
        return SPIRV_TARGET
    return ":".join([match["arch"], *sorted(filter(None, match["features"].split(":")))])


def _decompress(view: memoryview) -> tuple[bytes, int]:
    """Decompress the bundle at the start of ``view``; return it and the bytes it took."""
    version, method = _unpack("<HH", view, 4)
    if version == 1:
        total, (size,), header = None, _unpack("<I", view, 8), 20
    elif version == 2:
        (total, size), header = _unpack("<II", view, 8), 24
    elif version == 3:
        (total, size), header = _unpack("<QQ", view, 8), 32
    else:
        raise CodeObjectError(f"compressed bundle version {version} is not known")
    if size > MAX_UNCOMPRESSED:
        raise CodeObjectError(f"a compressed bundle of {size} bytes is too much")
    if total is not None and not header < total <= len(view):
        raise CodeObjectError("a compressed bundle is truncated")
    payload = view[header:total]
    if method == 0:
        plain, used = _inflate(payload, size)
    elif method == 1:
        plain, used = _unzstd(payload, size)
    else:
        raise CodeObjectError(f"compression method {method} is not known")
    if len(plain) != size:
        raise CodeObjectError(
            f"a compressed bundle gave {len(plain)} bytes, its header says {size}"
        )
    return plain, header + used if total is None else total


def _inflate(payload: memoryview, size: int) -> tuple[bytes, int]:
    engine = zlib.decompressobj()
    try:
        plain = engine.decompress(payload, size + 1)
    except zlib.error as error:
        raise CodeObjectError(f"a compressed bundle is damaged: {error}") from error
    if not engine.eof:
        raise CodeObjectError("a compressed bundle is truncated or longer than its header says")
    return plain, len(payload) - len(engine.unused_data)


def _unzstd(payload: memoryview, size: int) -> tuple[bytes, int]:
    try:
        import zstandard
    except ImportError as error:
        raise CodeObjectError(
            "a zstd-compressed bundle needs the Python package zstandard"
        ) from error
    used = _zstd_frame_length(payload)
    plain = bytearray()
    try:
        with zstandard.ZstdDecompressor().stream_reader(bytes(payload[:used])) as reader:
            while len(plain) <= size and (chunk := reader.read(1 << 20)):
                plain += chunk
    except (zstandard.ZstdError, MemoryError) as error:
        raise CodeObjectError(f"a compressed bundle is damaged: {error}") from error
    return bytes(plain), used


def _zstd_frame_length(payload: memoryview) -> int:
    """The length of the zstd frame at the start (RFC 8878, section 3.1.1).

    Version 1 headers do not record it, and the next bundle cannot be found by its magic, which
    compressed data may contain.
    """
    (magic,) = _unpack("<I", payload, 0)
    (descriptor,) = _unpack("<B", payload, 4)
    if magic != 0xFD2FB528:
        raise CodeObjectError("a compressed bundle is no zstd frame")
    single_segment = descriptor >> 5 & 1
    size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    position: int = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
    last = False
    while not last:
        low, high = _unpack("<HB", payload, position)
        block = low | high << 16
        last = bool(block & 1)
        position += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
    position += 4 * (descriptor >> 2 & 1)
    if position > len(payload):
        raise CodeObjectError("a compressed bundle is truncated")
    return position


def _unpack(layout: str, view: memoryview, offset: int) -> tuple[Any, ...]:
    try:
        return struct.unpack_from(layout, view, offset)
    except struct.error as error:
        raise CodeObjectError("a container's header is truncated") from error


def _machine(data: bytes) -> int:
    if len(data) < 20:
        raise CodeObjectError("an ELF header is truncated")
    return int.from_bytes(data[18:20], "big" if data[5] == 2 else "little")


def _elf_size(data: bytes, offset: int) -> int:
    """The length of the ELF64 image at ``offset``: linkers write the section headers last."""
    if offset + 64 > len(data):
        return 0
    (shoff,) = struct.unpack_from("<Q", data, offset + 40)
    entry, count = struct.unpack_from("<HH", data, offset + 58)
    size = int(shoff + entry * count)
    return size if size <= len(data) - offset else 0


def _read_code_object(data: bytes) -> _Elf:
    if len(data) < 64 or not data.startswith(ELF_MAGIC):
        raise CodeObjectError("a code object is not an ELF file")
    if _machine(data) != EM_AMDGPU:
        raise CodeObjectError(f"a code object is for the machine {_machine(data)}")
    sections = _sections(data)
    flags, abi = struct.unpack_from("<I", data, 48)[0], data[8]
    if abi < _OLDEST_ABI:
        raise CodeObjectError(f"code object ABI version {abi} is too old to tell its features")
    arch = _MACH.get(flags & 0xFF)
    if arch is None:
        raise CodeObjectError(f"a code object has the unknown processor 0x{flags & 0xFF:x}")
    target = arch
    for feature, shift in (("sramecc", _SRAMECC_SHIFT), ("xnack", _XNACK_SHIFT)):
        if sign := _FEATURE_TEXT[flags >> shift & 3]:
            target += f":{feature}{sign}"
    return _Elf(target, arch, _count_kernels(data, sections))


def _sections(data: bytes) -> list[_Section]:
    """The section table of an ELF64 file, every section checked to lie inside the file."""
    if data[4:6] != b"\x02\x01":
        raise CodeObjectError("an ELF file is not 64-bit little-endian")
    try:
        from elftools.elf.elffile import ELFFile

        elf = ELFFile(io.BytesIO(data))
        # Extended numbering lets a few bytes claim 2**64 sections.
        if elf["e_shoff"] + elf.num_sections() * 64 > len(data) or (
            elf.num_sections() and elf["e_shentsize"] != 64
        ):
            raise CodeObjectError("an ELF file's section table is truncated")
        result = [
            _Section(
                section.name,
                str(section["sh_type"]),
                section["sh_offset"],
                section["sh_size"],
                section["sh_link"],
            )
            for section in elf.iter_sections()
        ]
    except CodeObjectError:
        raise
    # pyelftools answers damaged files with many kinds of exception.
    except Exception as error:
        raise CodeObjectError(f"an ELF file is damaged: {type(error).__name__}") from error
    for section in result:
        if section.kind != "SHT_NOBITS" and section.offset + section.size > len(data):
            raise CodeObjectError(f"section {section.name} is truncated")
    return result


def _count_kernels(data: bytes, sections: list[_Section]) -> int:
    """Count kernel descriptors: the symbols named ``<kernel>.kd``."""
    kinds = {section.kind for section in sections}
    wanted = "SHT_DYNSYM" if "SHT_DYNSYM" in kinds else "SHT_SYMTAB"
    total = 0
    for section in sections:
        if section.kind != wanted or section.link >= len(sections):
            continue
        strings = sections[section.link].content(data)
        # Names are only looked at from their end, so that overlapping ones cost nothing.
        ends = [match.start() for match in re.finditer(b"\0", strings)]
        table = section.content(data)
        starts = {start for (start,) in struct.iter_unpack("<I20x", table[: len(table) // 24 * 24])}
        for start in starts:
            index = bisect.bisect_left(ends, start)
            if index < len(ends):
                total += strings[max(start, ends[index] - 3) : ends[index]] == b".kd"
    return total


def _fat_sections(data: bytes) -> list[tuple[int, int]]:
    """The (offset, size) of a host ELF file's sections with offload bundles."""
    if b".hip_fatbin" not in data and b".llvm.offloading" not in data:
        return []
    result = set()
    for section in _sections(data):
        if section.name == ".llvm.offloading":
            raise CodeObjectError("device code is not linked (section .llvm.offloading)")
        if section.name == ".hip_fatbin" and section.kind != "SHT_NOBITS":
            result.add((section.offset, section.size))
    return sorted(result)


def _table(found: Sequence[CodeObject]) -> str:
    rows = [("FILE", "OFFSET", "KIND", "TARGET", "BYTES", "KERNELS")]
    rows += [
        (item.file, f"{item.offset}", item.kind, item.target, f"{item.size}", f"{item.kernels}")
        for item in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in (1, 4, 5) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 for unreadable input or wrong architectures."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.codeobjects", description="List AMD GPU code objects."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a wheel, .so, .hsaco or bundle")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--arch", metavar="LIST", help="also check for exactly these architectures, by commas"
    )
    options = parser.parse_args(argv)
    from ci import envs

    envs.reexec_in_tools("ci.codeobjects", sys.argv[1:] if argv is None else argv)
    found: list[CodeObject] = []
    try:
        for file in options.files:
            found += scan_file(file)
    except CodeObjectError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(item) for item in found], indent=2))
    elif found:
        print(_table(found))
    else:
        print("no AMD GPU code objects")
    problems = check_arches(found, options.arch.split(",")) if options.arch else []
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
