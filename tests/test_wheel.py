"""The wheel's proof: each kind of fault in a made-up wheel is found and named."""

import json
import os
import subprocess
import sys
import zipfile

import pytest
from conftest import make_patch, make_series

from ci import extensions, wheel
from ci.errors import StackError
from ci.rocm.toolchain import Ready

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
VERSION = "0.31.0+hipstack1.gfx1201"
NONE = extensions.Extensions("none", "asked for")


@pytest.fixture
def setup(tmp_path, monkeypatch, the_pin):
    """A tree, a series and the members of a good wheel; code objects are made up."""
    diff = make_patch("core/x").data.decode().split("\n\n")[-1]
    diff = diff.replace("tests/x.py", "vllm/x.py").replace("x = 'core/x'", "marker_of_core_x = 1")
    series = make_series(make_patch("core/x", diff=diff), make_patch("core/only-tests"))
    tree = tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "x.py").write_text("marker_of_core_x = 1\n")
    record = wheel.stack_record(the_pin, "1", series, ["gfx1201"], "none")
    info = f"vllm-{VERSION}.dist-info"
    members = {
        "vllm/x.py": "marker_of_core_x = 1\n",
        wheel.STACK_JSON: wheel.to_json(record),
        "vllm/hipstack/aot/gfx1201/k.hsaco": "code for gfx1201",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: {TAG}-{TAG}-linux_x86_64\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n"
        "Requires-Dist: numpy==2.1\nRequires-Dist: regex\n"
        "Requires-Dist: zentorch; extra == 'zen'\n",
    }

    kernel_problems = []

    class CodeObject:
        def __init__(self, file, arch):
            self.file, self.arch, self.target, self.kind = file, arch, arch, "bundle"

    def scan(path):
        with zipfile.ZipFile(path) as archive:
            return [
                CodeObject(n, word)
                for n in archive.namelist()
                for word in archive.read(n).decode("utf-8", "replace").split()
                if n.endswith((".hsaco", ".so")) and word.startswith("gfx")
            ]

    monkeypatch.setattr(wheel.codeobjects, "scan_wheel", scan)
    monkeypatch.setattr(wheel.aot, "verify_wheel", lambda path, arches: kernel_problems)

    def prove(changes=(), name=f"vllm-{VERSION}-{TAG}-{TAG}-linux_x86_64.whl", how=NONE):
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in {**members, **dict(changes)}.items():
                if data is not None:
                    archive.writestr(member, data)
        paths = [tmp_path / "build"]
        return path, wheel.prove(path, VERSION, series, tree, ["gfx1201"], how, paths)

    prove.series, prove.info, prove.kernel_problems = series, info, kernel_problems
    return prove


def test_a_good_wheel_has_no_problems(setup):
    _, proof = setup()
    assert proof.problems == ()
    assert proof.markers == {"core/x": 1, "core/only-tests": None}
    assert proof.code_objects == {"vllm/hipstack/aot/gfx1201/k.hsaco": ["gfx1201"]}
    assert proof.tag == f"{TAG}-{TAG}-linux_x86_64"


LIBRARY = "vllm/_rocm_C.abi3.so"
KERNEL = "vllm/hipstack/aot/gfx1201/k.hsaco"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vllm/x.py": "something = 2\n"}, "patch core/x: vllm/x.py lacks 1 of its lines"),
        ({"vllm/x.py": None}, "patch core/x: vllm/x.py is not in the wheel"),
        ({"vllm/__pycache__/x.pyc": "x"}, "must not be in a wheel"),
        ({"vllm/x.py.orig": "x"}, "must not be in a wheel"),
        ({"amdsmi/__init__.py": "x"}, "must not be in a wheel"),
        ({"vllm/lib/libhipdnn_backend.so": "x"}, "must not be in a wheel"),
        ({"vllm/test_it.py": "x"}, "must not be in a wheel"),
        ({"vllm/y.py": "{build}/x"}, "names a folder of the build"),
        ({wheel.STACK_JSON: None}, "stack.json is missing"),
        ({wheel.STACK_JSON: "{"}, "stack.json is missing or damaged"),
        ({wheel.STACK_JSON: '{"set_hash": "0", "arches": []}'}, "stack.json names another set"),
        ({KERNEL: None}, "no ahead-of-time compiled kernel"),
        ({KERNEL: "code for gfx1100"}, "kernels are for gfx1100, not gfx1201"),
        ({"vllm/hipstack/aot/gfx942/k.hsaco": "gfx942"}, "kernels are for gfx1201, gfx942"),
        ({LIBRARY: "gfx1201"}, "although extensions are none"),
    ],
)
def test_each_fault_is_named(setup, tmp_path, changes, complaint):
    filled = {k: v and v.replace("{build}", str(tmp_path / "build")) for k, v in changes.items()}
    _, proof = setup(filled)
    assert any(complaint in problem for problem in proof.problems), proof.problems


@pytest.mark.parametrize(
    ("mode", "code", "good"),
    [
        ("compile", "gfx1201", True),
        ("compile", "gfx1201 gfx1100", False),
        ("compile", "gfx1100", False),
        ("compile", None, False),
        ("precompiled", "gfx1201 gfx942", True),
        ("precompiled", "gfx942", False),
    ],
)
def test_libraries_hold_the_architectures_that_were_asked_for(setup, mode, code, good):
    _, proof = setup({LIBRARY: code}, how=extensions.Extensions(mode, "x"))
    assert (proof.problems == ()) == good, proof.problems


def test_version_and_tag_are_checked(setup):
    _, proof = setup(name=f"vllm-0.31.0+cpu-{TAG}-{TAG}-linux_x86_64.whl")
    assert any("version is 0.31.0+cpu" in p for p in proof.problems)
    _, proof = setup(name=f"vllm-{VERSION}-cp39-cp39-linux_x86_64.whl")
    assert any("does not fit" in p for p in proof.problems)
    _, proof = setup({f"{setup.info}/METADATA": "Name: vllm\nVersion: 1\n"})
    assert "METADATA says version 1" in proof.problems
    _, proof = setup({f"{setup.info}/WHEEL": "Tag: py3-none-any\n"})
    assert any("WHEEL says tags py3-none-any" in p for p in proof.problems)


def test_a_damaged_kernel_manifest_is_a_problem(setup):
    setup.kernel_problems.append("k.hsaco: sha256 differs")
    _, proof = setup()
    assert proof.problems == ("k.hsaco: sha256 differs",)


def test_a_patch_of_which_nothing_is_left_is_a_problem(setup, tmp_path):
    (tmp_path / "tree" / "vllm" / "x.py").write_text("other = 1\n")
    _, proof = setup()
    assert any("none of its lines is left" in p for p in proof.problems)


def test_the_local_version_never_says_cpu(the_pin):
    assert wheel.local_version(the_pin, "1", ["gfx1100", "gfx1201"]) == (
        "0.31.0+hipstack1.gfx1100.gfx1201"
    )


def test_compiled_ops_name_the_torch_and_rocm_that_they_fit(setup, the_pin):
    def record(*hip):
        return wheel.stack_record(the_pin, "1", setup.series, ["gfx1201"], "compile", *hip)

    assert record("7.2.53211")["fits"] == {"torch": "2.13", "rocm": "7"}
    assert "fits" not in record()


SETUP = """\
import json, os, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--dist-dir") + 1])
out.mkdir()
(out / "vllm-1-cp311-abi3-linux_x86_64.whl").write_text(json.dumps({
    "argv": sys.argv[1:], "env": dict(os.environ),
    "requirements": pathlib.Path("requirements/rocm.txt").read_text(),
}))
print("[1/1] Building HIP object x/attention.hip.o")
"""


def test_compiling_calls_setup_once_with_arches_jobs_and_an_honest_tag(
    tmp_path, monkeypatch, the_pin
):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    monkeypatch.setenv("CMAKE_ARGS", "-DX=1")
    tree = tmp_path / "tree"
    (tree / "requirements").mkdir(parents=True)
    (tree / "requirements" / "rocm.txt").write_text("regex\n")
    (tree / "setup.py").write_text(SETUP)
    record = wheel.stack_record(
        the_pin, "1", make_series(), ["gfx1100", "gfx1151"], "compile", "7.2.4"
    )
    ready = Ready(sys.executable, "/opt/rocm", {"ROCM_PATH": "/opt/rocm"})
    (tmp_path / "work").mkdir()
    told = []
    made = wheel.build(
        tree, tmp_path / "python", VERSION, record, extensions.Extensions("compile", "x"),
        None, 3, tmp_path / "log", tmp_path / "work", ready, told.append,
    )  # fmt: skip
    said = json.loads(made.read_text())
    assert said["argv"][-2:] == ["--py-limited-api", TAG] and "bdist_wheel" in said["argv"]
    env = said["env"]
    assert env["PYTORCH_ROCM_ARCH"] == "gfx1100;gfx1151" and env["MAX_JOBS"] == "3"
    assert env["CMAKE_ARGS"] == "-DROCM_PATH=/opt/rocm" and env["CMAKE_BUILD_TYPE"] == "Release"
    assert env["VLLM_TARGET_DEVICE"] == "rocm" and env["ROCM_PATH"] == "/opt/rocm"
    assert said["requirements"] == "regex\n\ntorch == 2.13.*\n"
    assert (tree / "requirements" / "rocm.txt").read_text() == "regex\n"
    assert told == ["1/1 attention.hip"]


def test_record_and_sbom_are_deterministic_and_complete(setup, the_pin):
    path, proof = setup()
    stack = wheel.stack_record(the_pin, "1", setup.series, ["gfx1201"], "none")
    record = wheel.build_record(
        path, VERSION, the_pin, stack, NONE, proof, {"torch": "2.13.0"}, None, "inputs"
    )
    assert record["extensions"]["note"].startswith("vLLM's compiled ops")
    assert json.loads(wheel.to_json(record)) == record
    text = wheel.sbom(path, record, setup.series)
    assert text == wheel.sbom(path, record, setup.series)
    bom = json.loads(text)
    assert bom["bomFormat"] == "CycloneDX"
    main = bom["metadata"]["component"]
    assert main["version"] == VERSION and len(main["pedigree"]["patches"]) == 2
    assert {c["name"] for c in bom["components"]} == {"numpy", "regex"}


def test_publish_sums_up_and_leaves_no_partial_file(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "a").write_bytes(b"wheel")
    wheel.publish({"a.whl": tmp_path / "a", "a.build.json": "{}"}, out)
    assert sorted(p.name for p in out.iterdir()) == ["SHA256SUMS", "a.build.json", "a.whl"]
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, check=False).returncode == 0


def test_an_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StackError, match="cannot write to"):
        wheel.publish({"a.json": "{}"}, tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_clear_line_and_keeps_what_was_there(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this machine does not allow mounts")
    try:
        wheel.publish({"old.build.json": "{}"}, small)
        (tmp_path / "big").write_bytes(b"x" * 200_000)
        with pytest.raises(StackError, match=r"No space left.*free some space"):
            wheel.publish({"a.whl": tmp_path / "big"}, small)
        assert sorted(p.name for p in small.iterdir()) == ["SHA256SUMS", "old.build.json"]
    finally:
        subprocess.run(["umount", str(small)], check=True)
