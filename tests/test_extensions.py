"""The decision about compiled ops, with made-up machines and wheels."""

import json
import stat
import sys
import zipfile

import pytest

from ci import extensions
from ci.errors import StackError

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with nothing; returns a function that installs a ROCm and a torch."""
    monkeypatch.setattr(extensions.host, "rocm_root", lambda python: None)
    monkeypatch.setattr(extensions.debian, "machine_lacks", lambda mirror: ["not root"])
    monkeypatch.setattr(extensions, "SOURCES", tmp_path / "sources")
    monkeypatch.setenv("HIPSTACK_PYTHON", str(script(tmp_path / "nopython", "exit 1\n")))

    def install(torch="2.13.0+rocm7.2", hip="7.2.3", arches="gfx1201 gfx1100"):
        root = tmp_path / "rocm"
        script(root / "bin" / "hipcc", "echo HIP version: 7.2.1\n")
        script(root / "llvm" / "bin" / "clang", f"echo 'Available CPUs: {arches}' >&2\n")
        monkeypatch.setattr(extensions.host, "rocm_root", lambda python: root)
        facts = {"python": list(sys.version_info[:2]), "lacks": [], "torch": torch, "hip": hip}
        python = script(tmp_path / "python", f"echo '{json.dumps(facts)}'\n")
        monkeypatch.setenv("HIPSTACK_PYTHON", str(python))
        return root

    return install


def decide(text="auto", arches=("gfx1201",), toolchain="auto", mirror=None):
    return extensions.decide(text, "0.31.0", "2.13.0", arches, toolchain, mirror)


def test_a_bare_machine_builds_none_and_says_why(machine):
    found = decide()
    assert found.mode == "none"
    assert "host: no ROCm" in found.reason and "has no torch" in found.reason
    assert "debian: not root" in found.reason
    with pytest.raises(StackError, match="cannot compile: host: no ROCm"):
        decide("compile")


@pytest.mark.parametrize("text", ["auto", "compile"])
def test_a_machine_that_can_make_a_root_compiles_in_it_and_says_why(machine, monkeypatch, text):
    monkeypatch.setattr(extensions.debian, "machine_lacks", lambda mirror: [])
    found = decide(text, mirror="http://m.example/debian")
    assert (found.mode, found.toolchain) == ("compile", "debian")
    assert found.mirror == "http://m.example/debian"
    assert "from http://m.example/debian (host: no ROCm" in found.reason
    machine()
    assert decide(text).toolchain == "host"
    asked = decide(text, toolchain="debian")
    assert asked.toolchain == "debian" and "host" not in asked.reason


@pytest.mark.parametrize(
    ("toolchain", "reason"), [("host", "host: no ROCm"), ("debian", "debian: not root")]
)
@pytest.mark.parametrize("text", ["auto", "compile"])
def test_a_toolchain_that_is_asked_for_and_absent_is_an_error(machine, text, toolchain, reason):
    with pytest.raises(StackError, match=f"cannot compile: {reason}"):
        decide(text, toolchain=toolchain)
    with pytest.raises(StackError, match="has nothing to do with --extensions none"):
        decide("none", toolchain=toolchain)


def test_auto_takes_a_rocm_wheel_that_lies_beside_the_source(machine, tmp_path, monkeypatch):
    (tmp_path / "sources").mkdir()
    name = f"vllm-0.31.0+rocm723-{TAG}-{TAG}-linux_x86_64.whl"
    wheel = make_wheel(tmp_path / "sources", name, {"vllm/__init__.py": b""})
    found = decide()
    assert found.mode == "none" and "holds no AMD GPU code" in found.reason
    monkeypatch.setattr(extensions, "check_precompiled", lambda *args: "7.2.3")
    found = decide()
    assert (found.mode, found.wheel, found.hip) == ("precompiled", wheel, "7.2.3")
    assert "cannot compile (host: no ROCm" in found.reason


@pytest.mark.parametrize("text", ["auto", "compile"])
def test_a_machine_with_rocm_and_its_torch_compiles(machine, text):
    root = machine()
    found = decide(text)
    assert (found.mode, found.rocm, found.hip) == ("compile", root, "7.2.3")
    assert "2.13.0+rocm7.2" in found.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hip": ""}, "not a ROCm build"),
        ({"torch": "2.12.0+rocm7.2"}, "the pin wants 2.13.0"),
        ({"arches": "gfx942"}, "does not know gfx1201"),
    ],
)
def test_what_does_not_fit_is_named(machine, change, reason):
    machine(**change)
    found = decide()
    assert found.mode == "none" and reason in found.reason
    with pytest.raises(StackError, match=reason):
        decide("compile")


def test_none_is_taken_when_asked_for(machine):
    machine()
    assert decide("none").mode == "none"


@pytest.mark.parametrize("text", ["", "all", "none=x", "precompiled", "precompiled=", "auto=1"])
def test_an_unknown_mode_is_refused(machine, text):
    with pytest.raises(StackError, match="is none of"):
        decide(text)


def make_wheel(folder, name, members):
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return path


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (f"vllm-0.30.0+rocm723-{TAG}-{TAG}-linux_x86_64.whl", "the pin is vllm 0.31.0"),
        (f"torch-0.31.0-{TAG}-{TAG}-linux_x86_64.whl", "the pin is vllm 0.31.0"),
        ("vllm-0.31.0+rocm723-cp39-cp39-linux_x86_64.whl", "does not fit Python"),
        (f"vllm-0.31.0+rocm723-{TAG}-{TAG}-win_amd64.whl", "does not fit Python"),
        (f"vllm-0.31.0+rocm723-{TAG}-{TAG}-linux_x86_64.whl", "holds no AMD GPU code"),
        ("nonsense.whl", "Invalid wheel filename"),
    ],
)
def test_a_wheel_that_does_not_fit_is_refused(tmp_path, name, complaint):
    path = make_wheel(tmp_path, name, {"vllm/__init__.py": b""})
    with pytest.raises(StackError, match=complaint):
        decide(f"precompiled={path}")


def test_a_damaged_or_absent_wheel_is_refused(tmp_path):
    path = tmp_path / f"vllm-0.31.0-{TAG}-{TAG}-linux_x86_64.whl"
    with pytest.raises(StackError, match="no such file"):
        decide(f"precompiled={path}")
    path.write_bytes(b"no zip")
    with pytest.raises(StackError, match="precompiled"):
        decide(f"precompiled={path}")
