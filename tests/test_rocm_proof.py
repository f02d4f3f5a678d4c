"""The proof of compiled wheels: each kind of fault is found and named."""

import re
import zipfile

import pytest

from ci import codeobjects
from ci.rocm import audit, proof


def test_versions_are_compared_as_numbers():
    versions = {"GLIBC_2.9", "GLIBC_2.34", "GLIBCXX_3.4.30", "GLIBCXX_3.4.4", "hip_4.2", "X"}
    assert audit.newest(versions) == {"GLIBC": "2.34", "GLIBCXX": "3.4.30", "hip": "4.2"}


def library(**change):
    facts = {
        "name": "_C.abi3.so", "needed": ("libtorch_hip.so", "libc.so.6"),
        "undefined": frozenset(), "versions": frozenset(), "runpath": "",
    }  # fmt: skip
    return audit.Library(**{**facts, **change})


def test_what_nobody_brings_is_named():
    assert audit.needed_problems(library()) == []
    (problem,) = audit.needed_problems(library(needed=("libmagma.so",)))
    assert "needs libmagma.so" in problem
    (problem,) = audit.needed_problems(library(runpath="/opt/env/lib"))
    assert "/opt/env/lib" in problem
    assert audit.needed_problems(library(runpath="$ORIGIN/libs")) == []


def test_symbols_of_python_are_pythons():
    found = audit.symbol_problems(
        library(undefined=frozenset({"PyList_New", "_Py_Dealloc"})), {}, []
    )
    assert found == ({"Python": 2}, [])


SOURCE = """
#ifdef USE_ROCM
TORCH_LIBRARY_FRAGMENT(CONCAT(TORCH_EXTENSION_NAME, _custom_ar), custom_ar) {
  custom_ar.def(
      "qr_all_reduce(int fa) -> ()");
  custom_ar.impl("qr_all_reduce", torch::kCUDA, &qr_all_reduce);
}
#endif
TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor! x) -> ()");
#ifndef USE_ROCM
  ops.def("cutlass_mm(Tensor x) -> ()");
#else
  ops.def("hip_only", &hip_only);
#endif
}
STABLE_TORCH_LIBRARY_FRAGMENT(_C_cache_ops, m) { m.def("swap_blocks(Tensor x) -> ()"); }
"""


def test_ops_are_those_that_the_sources_define_for_rocm():
    assert audit.defined_ops(SOURCE, "_C", {"USE_ROCM"}) == {
        "_C_custom_ar::qr_all_reduce", "_C::rms_norm", "_C::hip_only", "_C_cache_ops::swap_blocks",
    }  # fmt: skip
    assert "_C::cutlass_mm" in audit.defined_ops(SOURCE, "_C", set())
    with pytest.raises(ValueError, match="cannot judge '#if X > 1'"):
        audit.active("#if X > 1\n#endif", set())


def test_ops_are_those_that_python_names():
    text = "import torch\ny = torch.ops._C.rms_norm(x)\nz = torch.ops.aten.add\nt = a.ops._C.no\n"
    assert audit.named_ops([text, "x = 1"]) == {"_C::rms_norm"}


def test_an_op_that_is_lost_is_named_and_one_of_cuda_is_not():
    named, defined = {"_C::a", "_C::b", "_C::cutlass"}, {"_C::a", "_C::b", "_C::unused"}
    assert audit.op_problems(named, defined, {"_C::a", "_C::b"}) == []
    (problem,) = audit.op_problems(named, defined, {"_C::a"})
    assert "_C::b" in problem and "not registered" in problem


@pytest.mark.parametrize(
    ("arches", "macros"),
    [
        (["gfx1201"], {"USE_ROCM"}),
        (["gfx1100", "gfx1151"], {"USE_ROCM", "VLLM_ROCM_GFX1100"}),
        (["gfx942"], {"USE_ROCM", "VLLM_ENABLE_FUSED_KDA_DECODE"}),
        (["gfx1250"], {"USE_ROCM", "VLLM_SKIP_SKINNY_GEMMS"}),
    ],
)
def test_architectures_decide_which_ops_are_built(arches, macros):
    assert audit.macros_for(arches) == macros


def test_matrix_instructions_are_looked_for_where_they_exist(tmp_path, monkeypatch):
    objdump = tmp_path / "objdump"
    objdump.write_text(
        "#!/bin/sh\ncase \"$*\" in *gfx1201*) echo ' v_wmma_f32_16x16x16_f16 v[0:7]';;\n"
        "*) echo ' v_add_f32 v0, v1, v2';; esac\n"
    )
    objdump.chmod(0o755)
    images = [("gfx1201", b"a"), ("gfx1100", b"b"), ("gfx942", b"c"), ("gfx1201", b"d")]
    monkeypatch.setattr(codeobjects, "images", lambda data: iter(images))
    (tmp_path / "x.so").write_bytes(b"")
    found = audit.wmma(tmp_path / "x.so", [str(objdump)])
    assert found == {"gfx1201": "v_wmma_f32_16x16x16_f16", "gfx1100": ""}
    assert proof.wmma_problems(found, ["gfx1201", "gfx942"]) == []
    assert proof.wmma_problems(found, ["gfx1100"]) == [
        "vllm/_rocm_C has no WMMA instruction for gfx1100"
    ]
    assert proof.wmma_problems({}, ["gfx1151"]) != []


def test_each_module_must_be_there():
    names = [f"vllm/{n}.abi3.so" for n in (*proof.DEVICE, *proof.HOST, *proof.SINCE_311)]
    assert proof.modules(names, (3, 11), True) == []
    assert proof.modules(names[:-2], (3, 10), True) == []
    assert proof.modules(names[:-2], (3, 11), True) == [
        "vllm/spinloop is not in the wheel",
        "vllm/fs_io_C is not in the wheel",
    ]
    without = [n for n in names if "hipdnn" not in n]
    assert proof.modules(without, (3, 11), False) == []
    assert proof.modules(without, (3, 11), True) == ["vllm/_hipdnn_C is not in the wheel"]


def test_each_device_library_must_hold_exactly_the_architectures(tmp_path, monkeypatch):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x", "")
    code = {name: ["gfx1100", "gfx1151"] for name in proof.DEVICE}

    def scan(path):
        return [
            codeobjects.CodeObject(f"vllm/{name}.abi3.so", 0, "bundle", arch, arch, 1, 1)
            for name, arches in code.items()
            for arch in arches
        ]

    monkeypatch.setattr(codeobjects, "scan_wheel", scan)
    found, problems = proof.device_problems(wheel, ["gfx1100", "gfx1151"])
    assert problems == [] and found["vllm/_C.abi3.so"] == ["gfx1100", "gfx1151"]
    code["_C"] = ["gfx1100"]
    del code["_rocm_C"]
    assert proof.device_problems(wheel, ["gfx1100", "gfx1151"])[1] == [
        "vllm/_C.abi3.so holds gfx1100, not gfx1100, gfx1151",
        "vllm/_rocm_C holds no AMD GPU code",
    ]


NAME = "vllm-0.31.0+x-cp311-abi3-manylinux_2_35_x86_64.whl"


@pytest.mark.parametrize(
    ("platform", "abi3", "portable", "problem"),
    [
        ("manylinux_2_34_x86_64", {}, True, ""),
        ("manylinux_2_35_x86_64", {}, True, ""),
        ("manylinux_2_38_x86_64", {}, True, "auditwheel says manylinux_2_38_x86_64"),
        ("linux_x86_64", {}, True, "auditwheel says linux_x86_64"),
        ("linux_x86_64", {}, False, ""),
        (
            "manylinux_2_34_x86_64",
            {"_C.so": "PyX"},
            True,
            "_C.so is no abi3 library of Python cp311",
        ),
    ],
)
def test_a_tag_must_be_true(platform, abi3, portable, problem):
    found = proof.tag_problems(NAME, {"platform": platform, "abi3": abi3}, portable)
    assert (found == []) if not problem else re.search(re.escape(problem), found[0])
