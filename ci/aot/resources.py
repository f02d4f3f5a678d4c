"""Read a kernel's resource use and main loop out of the compiler's assembly text."""

from __future__ import annotations

import re

from ci.aot.model import AotError, Resources

_METADATA = {
    "vgprs": ".vgpr_count",
    "sgprs": ".sgpr_count",
    "vgpr_spills": ".vgpr_spill_count",
    "sgpr_spills": ".sgpr_spill_count",
    "scratch_bytes": ".private_segment_fixed_size",
}
_MATRIX = re.compile(r"v_(?:wmma|swmmac|mfma|smfmac)_")
_INSTRUCTION = re.compile(r"\s+([a-z][a-z0-9_]*)(?:\s+(.*))?$")
_LABEL = re.compile(r"(\.L[A-Za-z0-9_$.]+):")
_BRANCH = re.compile(r"s_c?branch(?:_|$)")


def read_resources(amdgcn: str, *, lds_bytes: int, num_warps: int, kv_tokens: int) -> Resources:
    """Read what one kernel takes.

    Args:
        amdgcn: The assembly text of one kernel.
        lds_bytes: Shared memory of a workgroup; the text does not know it, as Triton asks for
            it at launch.
        num_warps: Waves of a workgroup.
        kv_tokens: KV tokens of one pass of the main loop, 0 if unknown.

    Returns:
        The resources.

    Raises:
        AotError: The text lacks what every AMD kernel has.
    """
    counts = {
        name: _number(amdgcn, rf"{re.escape(key)}:\s+(\d+)") for name, key in _METADATA.items()
    }
    arch = re.search(r'\.amdgcn_target\s+"amdgcn-amd-amdhsa-[^"]*(gfx[0-9a-f]+)', amdgcn)
    if arch is None:
        raise AotError("the assembly text names no target")
    occupancy = _number(amdgcn, r";\s*Occupancy:\s*(\d+)")
    code = _number(amdgcn, r";\s*codeLenInByte\s*=\s*(\d+)")
    loop, loop_matrix = _main_loop(amdgcn)
    return Resources(
        **counts,
        lds_bytes=lds_bytes,
        occupancy=min(occupancy, lds_occupancy(arch[1], lds_bytes, num_warps)),
        matrix_instructions=len(re.findall(r"^\s+v_(?:wmma|swmmac|mfma|smfmac)_", amdgcn, re.M)),
        code_bytes=code,
        loop_instructions=loop,
        loop_matrix_instructions=loop_matrix,
        loop_kv_tokens=kv_tokens,
    )


def lds_occupancy(arch: str, lds_bytes: int, num_warps: int) -> int:
    """Waves of a SIMD that shared memory leaves room for.

    Args:
        arch: The architecture.
        lds_bytes: Shared memory of a workgroup.
        num_warps: Waves of a workgroup.

    Returns:
        At least 1; a large number if no shared memory is used.
    """
    if lds_bytes <= 0:
        return 1 << 10
    pool, simds = _lds_pool(arch)
    return max(1, pool // lds_bytes * num_warps // simds)


def _lds_pool(arch: str) -> tuple[int, int]:
    """Bytes of shared memory and the number of SIMDs that share it.

    RDNA: two compute units form a processor of four SIMDs with 128 KiB (the compiler's default
    mode). CDNA: four SIMDs of a compute unit share 64 KiB, 160 KiB on gfx950. From AMD's ISA
    documents.
    """
    if arch == "gfx950":
        return 160 << 10, 4
    if arch.startswith("gfx9"):
        return 64 << 10, 4
    return 128 << 10, 4


def _main_loop(amdgcn: str) -> tuple[int, int]:
    """Instructions and matrix instructions of the main loop, (0, 0) without a loop.

    The main loop is the span of a backward branch that holds the most matrix instructions; of
    equals the shortest, which leaves loops around it out. Without matrix instructions there is
    no telling which loop is the main one, so the longest innermost one is taken.
    """
    labels: dict[str, int] = {}
    matrix_before = [0]
    spans: list[tuple[int, int]] = []
    for line in amdgcn.splitlines():
        text = line.split(";", 1)[0].rstrip()
        if label := _LABEL.match(text):
            labels[label[1]] = len(matrix_before) - 1
            continue
        match = _INSTRUCTION.match(text)
        if match is None:
            continue
        matrix_before.append(matrix_before[-1] + bool(_MATRIX.match(match[1])))
        if _BRANCH.match(match[1]) and (match[2] or "").strip() in labels:
            spans.append((labels[(match[2] or "").strip()], len(matrix_before) - 1))
    if not spans:
        return 0, 0

    def matrix(span: tuple[int, int]) -> int:
        return matrix_before[span[1]] - matrix_before[span[0]]

    def length(span: tuple[int, int]) -> int:
        return span[1] - span[0]

    most = max(map(matrix, spans))
    if most:
        best = min((span for span in spans if matrix(span) == most), key=length)
    else:
        inner = [
            span
            for span in spans
            if not any(
                other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans
            )
        ]
        best = max(inner, key=length)
    return length(best), most


def _number(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise AotError(f"the assembly text lacks {pattern.split(chr(92))[0] or pattern}")
    return int(match[1])
