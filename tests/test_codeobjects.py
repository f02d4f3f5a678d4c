"""ci.codeobjects: real code objects of the AMD compiler in every container, and hostile input."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ci import codeobjects
from ci.codeobjects import CodeObjectError, check_arches, scan_bytes, scan_file, scan_wheel

triton = pytest.importorskip("triton", reason="the AMD compiler comes with triton")
tl = triton.language

ARCHES = {"gfx1100": 32, "gfx1151": 32, "gfx1201": 32, "gfx942": 64}
# Processors of older compilers that LLVM has dropped; their numbers are not given away again.
DROPPED_BY_LLVM = {"gfx940", "gfx941"}


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < count), mask=index < count)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """One compiled kernel for each architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    result = {}
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        for arch, lanes in ARCHES.items():
            source = ASTSource(
                copy_kernel,
                {"source": "*fp32", "target": "*fp32", "count": "i32", "BLOCK": "constexpr"},
                {"BLOCK": 128},
            )
            compiled = triton.compile(source, target=GPUTarget("hip", arch, lanes))
            result[arch] = compiled.asm["hsaco"]
    return result


def bundle(entries: list[tuple[str, bytes]]) -> bytes:
    """Assemble a clang offload bundle; every code object is aligned to 4 KiB as clang does."""
    table = struct.pack("<24sQ", b"__CLANG_OFFLOAD_BUNDLE__", len(entries))
    offset = 4096
    body = b""
    for name, content in entries:
        body = body.ljust(offset - 4096, b"\0")
        table += struct.pack("<QQQ", offset, len(content), len(name)) + name.encode()
        body += content
        offset = 4096 + (len(body) + 4095) // 4096 * 4096
    return table.ljust(4096, b"\0") + body


def fat(code: dict[str, bytes], *arches: str) -> bytes:
    """A bundle for these architectures with the empty host entry that clang puts first."""
    device = [(f"hipv4-amdgcn-amd-amdhsa--{arch}", code[arch]) for arch in arches]
    return bundle([("host-x86_64-unknown-linux-gnu-", b""), *device])


def compress(plain: bytes, version: int, method: str) -> bytes:
    """Compress a bundle as clang does, with each header version."""
    if method == "zlib":
        payload = zlib.compress(plain)
    else:
        payload = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(plain)
    number = {"zlib": 0, "zstd": 1}[method]
    check = bytes(8)
    head = struct.pack("<4sHH", b"CCOB", version, number)
    if version == 1:
        return head + struct.pack("<I", len(plain)) + check + payload
    if version == 2:
        return head + struct.pack("<II", 24 + len(payload), len(plain)) + check + payload
    return head + struct.pack("<QQ", 32 + len(payload), len(plain)) + check + payload


def host_elf(sections: dict[str, bytes]) -> bytes:
    """A small x86-64 shared object with the given sections."""
    names = b"\0"
    body = b""
    headers = [bytes(64)]
    for name, content in [*sections.items(), (".shstrtab", b"")]:
        offset = 64 + len(body)
        start = len(names)
        names += name.encode() + b"\0"
        if name == ".shstrtab":
            content = names
        body += content
        kind = 3 if name == ".shstrtab" else 1
        headers.append(
            struct.pack("<IIQQQQIIQQ", start, kind, 2, 0, offset, len(content), 0, 0, 1, 0)
        )
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        3,
        62,
        1,
        0,
        0,
        64 + len(body),
        0,
        64,
        0,
        0,
        64,
        len(headers),
        len(headers) - 1,
    )
    return head + body + b"".join(headers)


def summary(found: list[codeobjects.CodeObject]) -> list[tuple[str, str]]:
    return [(item.kind, item.target) for item in found]


def test_processor_numbers_are_the_assembler_s() -> None:
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    for number, arch in codeobjects._MACH.items():
        flags = amd.assemble_amdgcn(".text\n", arch, "")[48:52]
        assert flags[0] == (0 if arch in DROPPED_BY_LLVM else number), arch


@pytest.mark.parametrize("arch", ARCHES)
def test_single_code_object(code: dict[str, bytes], arch: str) -> None:
    (item,) = scan_bytes("k.hsaco", code[arch])
    assert (item.file, item.kind, item.target, item.arch) == ("k.hsaco", "elf", arch, arch)
    assert (item.size, item.kernels, item.offset) == (len(code[arch]), 1, 0)


def test_target_features_come_from_the_flags(code: dict[str, bytes]) -> None:
    data = bytearray(code["gfx942"])
    assert data[49] == 0x05  # both features "any"
    data[49] = 0x0A  # both off
    assert scan_bytes("k", bytes(data))[0].target == "gfx942:sramecc-:xnack-"
    data[49] = 0x0F  # both on
    assert scan_bytes("k", bytes(data))[0].target == "gfx942:sramecc+:xnack+"
    assert scan_bytes("k", bytes(data))[0].arch == "gfx942"


def test_bundle(code: dict[str, bytes]) -> None:
    found = scan_bytes("k.co", fat(code, *ARCHES))
    assert summary(found) == [("bundle", arch) for arch in ARCHES]
    assert [item.size for item in found] == [len(code[arch]) for arch in ARCHES]


@pytest.mark.parametrize(
    "entry",
    [
        "hip-amdgcn-amd-amdhsa-gfx1201",
        "hip-amdgcn-amd-amdhsa--gfx1201",
        "hipv4-amdgcn-amd-amdhsa-unknown-gfx1201",
    ],
)
def test_all_spellings_of_an_entry_s_name(code: dict[str, bytes], entry: str) -> None:
    assert summary(scan_bytes("k", bundle([(entry, code["gfx1201"])]))) == [("bundle", "gfx1201")]


def test_entry_names_with_features(code: dict[str, bytes]) -> None:
    data = bytearray(code["gfx942"])
    data[49] = 0x0E  # xnack off, sramecc on
    entry = "hipv4-amdgcn-amd-amdhsa--gfx942:xnack-:sramecc+"
    assert scan_bytes("k", bundle([(entry, bytes(data))]))[0].target == "gfx942:sramecc+:xnack-"
    with pytest.raises(CodeObjectError, match=r"holds code for gfx942$"):
        scan_bytes("k", bundle([(entry, code["gfx942"])]))


def test_spirv_is_listed(code: dict[str, bytes]) -> None:
    found = scan_bytes("k", bundle([("hip-spirv64-amd-amdhsa--amdgcnspirv", b"\x03\x02\x23\x07")]))
    assert summary(found) == [("bundle", "amdgcnspirv")]
    assert check_arches(found, ["gfx1201"])


@pytest.mark.parametrize("method", ["zlib", "zstd"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_compressed_bundle(code: dict[str, bytes], version: int, method: str) -> None:
    data = compress(fat(code, "gfx1100", "gfx1201"), version, method)
    assert summary(scan_bytes("k", data)) == [
        ("compressed-bundle", "gfx1100"),
        ("compressed-bundle", "gfx1201"),
    ]


@pytest.mark.parametrize("level", [1, 9, 19])
def test_zstd_frame_without_recorded_size(code: dict[str, bytes], level: int) -> None:
    plain = fat(code, "gfx1201")
    engine = zstandard.ZstdCompressor(level=level, write_content_size=False).compressobj()
    payload = engine.compress(plain) + engine.flush()
    data = struct.pack("<4sHHIQ", b"CCOB", 1, 1, len(plain), 0) + payload
    # In a section with a second one behind it: the frame's end must be found exactly.
    data += bytes(7) + compress(fat(code, "gfx1100"), 1, "zlib")
    found = scan_bytes("lib.so", host_elf({".hip_fatbin": data}))
    assert [item.arch for item in found] == ["gfx1201", "gfx1100"]


def test_concatenated_bundles_of_all_kinds(code: dict[str, bytes]) -> None:
    parts = [fat(code, "gfx1201")]
    for version, method in itertools.product((1, 2, 3), ("zlib", "zstd")):
        parts.append(compress(fat(code, "gfx1100"), version, method))
    section = b"".join(part + bytes(index * 5 + 3) for index, part in enumerate(parts))
    found = scan_bytes("lib.so", host_elf({".text": b"\x90" * 99, ".hip_fatbin": section}))
    assert [item.arch for item in found] == ["gfx1201"] + ["gfx1100"] * 6
    assert len({item.offset for item in found}) == 7


def test_linked_shared_object(code: dict[str, bytes], tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler to link a shared object with")
    (tmp_path / "fat.bin").write_bytes(fat(code, "gfx1201", "gfx1100"))
    (tmp_path / "lib.c").write_text(
        '__asm__(".section .hip_fatbin,\\"a\\",@progbits\\n.p2align 12\\n'
        '.incbin \\"fat.bin\\"\\n.p2align 12\\n.incbin \\"fat.bin\\"\\n.text\\n");\n'
        "int answer(void) { return 42; }\n"
    )
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", "lib.so", "lib.c"], cwd=tmp_path, check=True
    )
    found = scan_file(tmp_path / "lib.so", "lib.so")
    assert [item.arch for item in found] == ["gfx1201", "gfx1100"] * 2
    assert check_arches(found, ["gfx1201", "gfx1100"]) == []


def test_code_outside_the_usual_places_is_found(code: dict[str, bytes]) -> None:
    hidden = host_elf({".rodata": bytes(13) + code["gfx1100"] + bytes(5) + code["gfx1151"]})
    assert summary(scan_bytes("a.so", hidden)) == [
        ("embedded-elf", "gfx1100"),
        ("embedded-elf", "gfx1151"),
    ]
    blob = b"data" + fat(code, "gfx1201") + compress(fat(code, "gfx942"), 2, "zstd")
    assert summary(scan_bytes("b.bin", blob)) == [
        ("bundle", "gfx1201"),
        ("compressed-bundle", "gfx942"),
    ]


def test_text_about_code_objects_is_none() -> None:
    assert scan_file(codeobjects.__file__) == []
    assert scan_bytes("notes.txt", b"See CCOB " + b"__CLANG_OFFLOAD_BUNDLE__" * 3) == []


def test_host_files_without_device_code() -> None:
    assert scan_bytes("lib.so", host_elf({".text": b"\x90" * 64})) == []
    assert scan_bytes("empty", b"") == []


def test_a_bundle_that_names_another_architecture(code: dict[str, bytes]) -> None:
    wrong = bundle([("hipv4-amdgcn-amd-amdhsa--gfx1100", code["gfx1201"])])
    with pytest.raises(CodeObjectError, match=r"k: bundle entry .*gfx1100 holds code for gfx1201"):
        scan_bytes("k", wrong)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-1000], "truncated"),
        (lambda data: data[:40], "truncated"),
        (lambda data: data[:24] + struct.pack("<Q", 1 << 60) + data[32:], "entries"),
        (lambda data: data.replace(b"gfx1201", b"gfx12zz", 1), "names no AMD GPU"),
        (lambda data: data + b"rest", "unknown bytes"),
    ],
)
def test_damaged_bundle(code: dict[str, bytes], change: object, text: str) -> None:
    assert callable(change)
    with pytest.raises(CodeObjectError, match=text):
        scan_bytes("k", change(fat(code, "gfx1201")))


@pytest.mark.parametrize("method", ["zlib", "zstd"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_damaged_compressed_bundle(code: dict[str, bytes], version: int, method: str) -> None:
    data = compress(fat(code, "gfx1201"), version, method)
    with pytest.raises(CodeObjectError, match=r"truncated|damaged"):
        scan_bytes("k", data[:-200])
    middle = len(data) // 2
    with pytest.raises(CodeObjectError):
        scan_bytes("k", data[:middle] + bytes(64) + data[middle + 64 :])


def test_a_decompression_bomb_is_refused() -> None:
    payload = zlib.compress(bytes(1 << 20))
    small = struct.pack("<4sHHII8x", b"CCOB", 2, 0, 24 + len(payload), 4096) + payload
    with pytest.raises(CodeObjectError, match="longer than its header says"):
        scan_bytes("k", small)
    with pytest.raises(CodeObjectError, match="too much"):
        scan_bytes("k", struct.pack("<4sHHQQ8x", b"CCOB", 3, 0, 64, 1 << 62) + bytes(32))


def test_unlinked_and_old_device_code(code: dict[str, bytes]) -> None:
    with pytest.raises(CodeObjectError, match="not linked"):
        scan_bytes("k.o", host_elf({".llvm.offloading": b"\x10\xff\x10\xad"}))
    old = bytearray(code["gfx1201"])
    old[8] = 0
    with pytest.raises(CodeObjectError, match="too old"):
        scan_bytes("k", bytes(old))
    odd = bytearray(code["gfx1201"])
    odd[48] = 0xFE
    with pytest.raises(CodeObjectError, match="unknown processor 0xfe"):
        scan_bytes("k", bytes(odd))


def test_extended_section_numbers_do_not_hang(code: dict[str, bytes]) -> None:
    data = bytearray(code["gfx1201"])
    data[60:62] = bytes(2)  # e_shnum 0: the count is in section 0
    (offset,) = struct.unpack_from("<Q", data, 40)
    struct.pack_into("<Q", data, offset + 32, 1 << 62)
    with pytest.raises(CodeObjectError, match="section table"):
        scan_bytes("k", bytes(data))


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_wheel_and_arch_check(code: dict[str, bytes], tmp_path: Path) -> None:
    members = {
        "vllm/__init__.py": b"",
        "vllm/_C.abi3.so": host_elf({".hip_fatbin": fat(code, "gfx1100", "gfx1201")}),
        "vllm/hipstack/aot/gfx1100/a.hsaco": code["gfx1100"],
        "vllm/hipstack/aot/gfx1201/b.hsaco": code["gfx1201"],
    }
    path = wheel(tmp_path / "vllm-1-py3-none-any.whl", members)
    found = scan_wheel(path)
    assert codeobjects.arches_by_file(found) == {
        "vllm/_C.abi3.so": ["gfx1100", "gfx1201"],
        "vllm/hipstack/aot/gfx1100/a.hsaco": ["gfx1100"],
        "vllm/hipstack/aot/gfx1201/b.hsaco": ["gfx1201"],
    }
    assert scan_file(path) == found
    assert check_arches(found, ["gfx1201", "gfx1100"]) == []
    assert check_arches(found, ["gfx1201"]) == [
        "vllm/_C.abi3.so: holds gfx1100, asked for gfx1201",
        "vllm/hipstack/aot/gfx1100/a.hsaco: holds gfx1100, asked for gfx1201",
    ]
    assert check_arches(found, ["gfx1201", "gfx1100", "gfx942"]) == [
        "vllm/_C.abi3.so: lacks gfx942, holds gfx1100, gfx1201",
        "no file holds code for gfx942",
    ]
    assert check_arches([], ["gfx1201"]) == ["no AMD GPU code object at all, asked for gfx1201"]
    assert check_arches(found, []) == ["no architecture was asked for"]


def test_the_error_names_the_wheel_s_member(code: dict[str, bytes], tmp_path: Path) -> None:
    path = wheel(tmp_path / "a.whl", {"vllm/x.so": code["gfx1201"][:-100]})
    with pytest.raises(CodeObjectError, match=r"^vllm/x\.so: "):
        scan_wheel(path)
    (tmp_path / "b.whl").write_bytes(b"no archive")
    with pytest.raises(CodeObjectError, match="not a readable wheel"):
        scan_wheel(tmp_path / "b.whl")
    with pytest.raises(CodeObjectError, match="No such file"):
        scan_file(tmp_path / "c.so")


def test_command_line(
    code: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "k.co"
    path.write_bytes(fat(code, "gfx1201"))
    assert codeobjects.main([str(path), "--arch", "gfx1201"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["FILE", "OFFSET", "KIND", "TARGET", "BYTES", "KERNELS"]
    assert row.split()[2:] == ["bundle", "gfx1201", str(len(code["gfx1201"])), "1"]
    assert codeobjects.main(["--json", str(path)]) == 0
    (item,) = json.loads(capsys.readouterr().out)
    assert (item["arch"], item["kernels"]) == ("gfx1201", 1)
    assert codeobjects.main([str(path), "--arch", "gfx1100"]) == 1
    assert "lacks gfx1100" in capsys.readouterr().err
    path.write_bytes(fat(code, "gfx1201")[:-1])
    assert codeobjects.main([str(path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


HOSTILE = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MAGICS = [
    b"",
    codeobjects.BUNDLE_MAGIC,
    codeobjects.COMPRESSED_MAGIC + b"\x01\0\0\0",
    codeobjects.COMPRESSED_MAGIC + b"\x02\0\x01\0",
    codeobjects.COMPRESSED_MAGIC + b"\x03\0\0\0",
    codeobjects.AMDGPU_IDENT,
    codeobjects.ELF_MAGIC,
    b"\x7fELF\x02\x01\x01.hip_fatbin",
]


def scan_safely(data: bytes) -> None:
    """Whatever the bytes are: a list or the module's own error, nothing else."""
    with contextlib.suppress(CodeObjectError):
        assert all(item.file == "x" for item in scan_bytes("x", data))


@HOSTILE
@given(st.sampled_from(MAGICS), st.binary(max_size=400), st.binary(max_size=20))
def test_hostile_bytes(magic: bytes, tail: bytes, front: bytes) -> None:
    scan_safely(magic + tail)
    scan_safely(front + magic + tail)


@HOSTILE
@given(st.data())
def test_hostile_changes_of_real_files(code: dict[str, bytes], data: st.DataObject) -> None:
    plain = fat(code, "gfx1201")
    base = data.draw(
        st.sampled_from(
            [
                code["gfx942"],
                plain,
                compress(plain, 2, "zstd"),
                compress(plain, 3, "zlib"),
                host_elf({".hip_fatbin": plain}),
            ]
        )
    )
    changed = bytearray(base)
    for _ in range(data.draw(st.integers(1, 6))):
        # Headers and tables lie at both ends; that is where a change matters.
        place = data.draw(st.integers(0, 511))
        index = place if data.draw(st.booleans()) else len(changed) - 1 - place
        changed[index] = data.draw(st.sampled_from([0, 1, 0x3F, 0x40, 0x7F, 0x80, 0xFE, 0xFF]))
    scan_safely(bytes(changed[: data.draw(st.integers(0, len(changed)))]))
    scan_safely(bytes(changed))


@HOSTILE
@given(st.data())
def test_hostile_wheels(tmp_path: Path, data: st.DataObject) -> None:
    path = wheel(tmp_path / "a.whl", {"a.py": b"x = 1\n" * 9, "b.so": host_elf({".text": b"a"})})
    changed = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    other = tmp_path / "b.whl"
    other.write_bytes(changed)
    with contextlib.suppress(CodeObjectError):
        assert scan_wheel(other) == []


def test_images_are_the_code_objects_of_a_library(code: dict[str, bytes]) -> None:
    plain, packed = fat(code, "gfx1201", "gfx1100"), compress(fat(code, "gfx942"), 3, "zstd")
    library = host_elf({".hip_fatbin": plain.ljust(65536, b"\0") + packed})
    assert list(codeobjects.images(library)) == [
        (arch, code[arch]) for arch in ("gfx1201", "gfx1100", "gfx942")
    ]
    assert list(codeobjects.images(b"no library")) == []
