"""Toolchains for compiled ops: what is decided, made and refused, without compiling vLLM."""

import dataclasses
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ci import build, toml
from ci.errors import StackError
from ci.extensions import Extensions
from ci.rocm import build as rocm_build
from ci.rocm import debian, host, machine, python, stubs, toolchain, torchhip

GB = 10**9
HERE = tuple(sys.version_info[:2])
GOOD = host.Host(
    rocm=Path("/opt/rocm"), python="/usr/bin/python3", version=HERE,
    torch="2.13.0+rocm7.2", hip="7.2.53211", compiler_hip="7.2.53211",
    arches=frozenset({"gfx1100", "gfx1201"}), memory=16 * GB, disk=50 * GB,
)  # fmt: skip


def refused(wanted=("gfx1201",), **change):
    return host.problems(dataclasses.replace(GOOD, **change), "2.13.0", wanted, HERE)


def test_a_machine_that_has_all_is_taken():
    assert refused() == []
    assert refused(wanted=("gfx1100", "gfx1201")) == []
    assert refused(arches=frozenset()) == []
    assert refused(torch="2.13.1", hip="7.0.0", compiler_hip="7.2.1") == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rocm": None}, "no ROCm with hipcc"),
        ({"torch": ""}, "python3 has no torch"),
        ({"hip": ""}, "is not a ROCm build"),
        ({"torch": "2.12.0+rocm7.2"}, "the pin wants 2.13.0"),
        ({"compiler_hip": "6.4.3"}, "is 6.4.3, torch was built with 7.2.53211"),
        ({"version": (2, 7)}, "python3 is Python 2.7"),
        ({"lacks": ("jinja2", "setuptools_scm")}, "lacks 'jinja2' 'setuptools-scm>=8,<10'"),
        ({"memory": 4 * GB}, "4.0 GB of memory"),
        ({"disk": 1 * GB}, "1.0 GB free, 2 GB are needed"),
        ({"arches": frozenset({"gfx942"})}, "does not know gfx1201"),
    ],
)
def test_what_a_host_lacks_is_named(change, reason):
    (problem,) = refused(**change)
    assert reason in problem


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_rocm_of_python_packages_is_found_beside_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.delenv("ROCM_HOME", raising=False)
    root = tmp_path / "site" / "_rocm_sdk_devel"
    script(root / "bin" / "hipcc", "echo 'HIP version: 7.14.60850-abc'\n")
    interpreter = script(tmp_path / "venv" / "bin" / "python", "exit 1\n")
    script(interpreter.with_name("rocm-sdk"), f'[ "$*" = "path --root" ] && echo {root}\n')
    assert host.rocm_root(str(interpreter)) == root
    assert host.compiler_hip(root) == "7.14.60850"
    script(interpreter.with_name("rocm-sdk"), "echo nowhere; exit 3\n")
    assert host.sdk_root(str(interpreter)) is None
    monkeypatch.setenv("ROCM_PATH", str(root))
    assert host.rocm_root(str(interpreter)) == root


def test_an_interpreter_is_asked_for_torch_and_what_setup_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("HIPSTACK_PYTHON", sys.executable)
    found = host.look(tmp_path / "build" / "not-there")
    assert found.version == HERE and found.name == "HIPSTACK_PYTHON" and found.disk > 0
    assert "packaging" not in found.lacks
    monkeypatch.setenv("HIPSTACK_PYTHON", str(tmp_path / "absent"))
    with pytest.raises(StackError, match=r"HIPSTACK_PYTHON .* cannot be run"):
        host.look(tmp_path)


DEB822 = """\
Types: deb
URIs: http://deb.debian.org/debian-security
Suites: bookworm-security

Types: deb
URIs: https://mirror.example/debian/ # ours
Suites: bookworm
"""


@pytest.mark.parametrize(
    ("texts", "mirror"),
    [
        (["deb [signed-by=/k] http://a.example/debian bookworm main\n"], "http://a.example/debian"),
        (["# deb http://no.example/debian x\n", DEB822], "https://mirror.example/debian"),
        (["deb http://archive.ubuntu.com/ubuntu noble main\n"], None),
        (["deb cdrom:[Debian]/debian bookworm main\n", ""], None),
        ([], None),
    ],
)
def test_the_mirror_is_the_machines_own(texts, mirror):
    assert machine.machine_mirror(texts) == mirror


def test_a_mirror_that_is_asked_for_is_taken_and_nonsense_refused():
    assert machine.find_mirror("http://x.example/debian/") == "http://x.example/debian"
    with pytest.raises(StackError, match=r"--mirror 'x\.example' is no address"):
        machine.find_mirror("x.example")


def test_proxies_and_checks_of_the_machines_apt_are_kept():
    dump = (
        'Acquire "";\nAcquire::http::Proxy "http://p:3128";\nAcquire::Check-Date "false";\n'
        'Acquire::IndexTargets::deb::X::MetaKey "x";\nAcquire::Languages:: "none";\n'
        'Acquire::cdrom::mount "";\n'
    )
    assert machine.acquire_options(dump) == [
        'Acquire::http::Proxy "http://p:3128"',
        'Acquire::Check-Date "false"',
    ]


TOOLS = {"mmdebstrap": "/m", "apt-get": "/a", "chroot": "/c"}


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"uid": 1000}, ["not root"]),
        ({"machine": "aarch64"}, ["not x86_64"]),
        ({"tools": {"apt-get": "/a", "chroot": "/c"}}, []),
        ({"tools": {"chroot": "/c"}}, ["no mmdebstrap and no apt-get"]),
        ({"tools": {"apt-get": "/a"}}, ["no chroot"]),
        ({"free": GB}, ["1.0 GB free, 5 GB are needed"]),
        ({"free": GB, "exists": True}, []),
        ({"memory": GB, "uid": 1}, ["not root", "1.0 GB of memory"]),
    ],
)
def test_what_a_machine_lacks_for_a_root_is_named(change, reasons):
    facts = {
        "machine": "x86_64", "uid": 0, "tools": TOOLS, "memory": 16 * GB, "free": 50 * GB,
        "exists": False,
    }  # fmt: skip
    found = machine.lacking(**{**facts, **change})
    assert len(found) == len(reasons)
    assert all(part in text for part, text in zip(reasons, found, strict=True))


def test_a_root_is_asked_for_with_all_its_packages(tmp_path):
    spec = toml.read(debian.SPEC)
    command, env = debian.mmdebstrap_command(spec["rocm"], "http://m/debian", tmp_path / "r")
    assert command[-4:] == [
        "sid", str(tmp_path / "r"), "deb http://m/debian sid main",
        "deb http://m/debian experimental main",
    ]  # fmt: skip
    assert "--variant=extract" in command and str(debian.HOOK) in " ".join(command)
    include = next(word for word in command if word.startswith("--include="))
    assert {"hipcc", "libamdhip64-dev", "ccache"} <= set(include[10:].split(","))
    assert "libhipblas-dev" in env["HEADERS"] and "libc6-dev_*.deb" in env["WITHOUT"]
    setup = next(word for word in command if word.startswith("--setup-hook="))
    folder = tmp_path / "root"
    subprocess.run(["sh", "-c", setup[len("--setup-hook=") :], "x", str(folder)], check=True)
    text = (folder / "etc/apt/preferences.d/newest").read_text()
    assert text.startswith("Package: hipcc ") and "release a=experimental" in text
    old, env = debian.mmdebstrap_command(spec["sysroot"], "http://m/debian", tmp_path / "s")
    assert env == {"HEADERS": "", "WITHOUT": ""} and "bookworm" in old


def test_a_missing_package_is_one_clear_error():
    text = debian.explain("unpacking failed (100): E: Unable to locate package hipcc")
    assert text == "the mirror has no package hipcc; Debian may have moved on"
    assert debian.explain("network is down") == "network is down"


def test_a_root_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(debian.paths, "BUILD", tmp_path)
    monkeypatch.setattr(debian, "machine_lacks", lambda mirror: [])
    monkeypatch.setattr(debian, "_ensure_mmdebstrap", lambda: None)

    def fail(command, **kwargs):
        if command[0] == "apt-config":
            return ""
        Path(command[-2]).mkdir(parents=True, exist_ok=True)
        raise StackError("unpacking failed (1): E: Unable to locate package libhipcub-dev")

    monkeypatch.setattr(debian, "run", fail)
    with pytest.raises(StackError, match="no package libhipcub-dev"):
        debian.ensure("http://m/debian")
    assert list(tmp_path.iterdir()) == []


def test_a_root_is_reused_and_an_older_one_gives_up_its_compiler_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(debian.paths, "BUILD", tmp_path)
    monkeypatch.setattr(debian, "machine_lacks", lambda mirror: [])
    monkeypatch.setattr(debian, "_ensure_mmdebstrap", lambda: None)
    old = tmp_path / "rocm-root-old"
    (old / "hipstack/ccache").mkdir(parents=True)
    (old / "hipstack/ccache/object").write_text("x")
    made = []

    def make(folder, mirror):
        made.append(mirror)
        folder.mkdir()
        (folder / "hipstack").mkdir()
        (folder / debian.RECORD).write_text(
            '{"mirror": "http://m/debian", "llvm": "22", "packages": '
            '[{"name": "libamdhip64-dev", "version": "1:7.2.4+dfsg-1", "sha256": "", "part": ""}]}'
        )

    monkeypatch.setattr(debian, "_make", make)
    root = debian.ensure("http://m/debian")
    assert debian.ensure("http://m/debian") == root and made == ["http://m/debian"]
    assert root.version("libamdhip64-dev") == "7.2.4" and root.version("absent") == ""
    assert (root.path / "hipstack/ccache/object").is_file() and not old.exists()
    assert debian.root_folder("http://other/debian") != root.path


def test_packages_are_recorded_with_their_hashes():
    text = f"{'a' * 64}  libc6_2.36-9%2bdeb12u1_amd64.deb\n{'b' * 64}  x_1%3a2_all.deb\n"
    first, second = debian.package_list(text, "sysroot")
    assert first["name"] == "libc6" and first["sha256"] == "a" * 64
    assert second == {"name": "x", "version": "1:2", "sha256": "b" * 64, "part": "sysroot"}


def test_absolute_links_of_an_unpacked_system_stay_inside(tmp_path):
    (tmp_path / "lib/x").mkdir(parents=True)
    (tmp_path / "lib/x/libc.so.6").write_text("old")
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/ld.so").symlink_to("/lib/x/libc.so.6")
    debian.make_links_relative(tmp_path)
    assert os.readlink(tmp_path / "lib64/ld.so") == "../lib/x/libc.so.6"
    assert (tmp_path / "lib64/ld.so").read_text() == "old"


def test_a_library_of_which_only_headers_are_here_has_a_cmake_package(tmp_path):
    debian.write_cmake_package(tmp_path, "rocm_smi", {"librocm-smi-dev": "7.2.4"})
    assert "rocm_smi_INCLUDE_DIR" in (tmp_path / "rocm_smi/rocm_smi-config.cmake").read_text()
    assert '"7.2.4"' in (tmp_path / "rocm_smi/rocm_smi-config-version.cmake").read_text()


def test_a_command_in_the_root_gets_no_variable_of_this_machine(tmp_path, monkeypatch):
    for may in (True, False):
        monkeypatch.setattr(debian, "_may_mount", lambda may=may: may)
        words = debian.inside(tmp_path, "/inside", ["cmake", "-B", "b"], {"PATH": "/bin"})
        assert words[0] == ("unshare" if may else "chroot")
        at = words.index("-i")
        assert words[at - 1] == "/usr/bin/env" and words[at + 1] == "PATH=/bin"
        assert words[-4:] == ["/inside", "cmake", "-B", "b"]


# torch, made ROCm-compatible


def test_torchs_cmake_files_are_switched_on_once():
    text = f"a\n{torchhip.SWITCH}\nendif()\n{torchhip.AFTER}b\n"
    switched = torchhip.switch_on(text)
    assert 'if (ON)\n  include("${CMAKE_CURRENT_LIST_DIR}/public/LoadHIP.cmake")' in switched
    assert "add_library(${_name} SHARED IMPORTED)" in switched
    for other in (switched, "", text + text):
        with pytest.raises(ValueError, match=r"Caffe2Config\.cmake has no"):
            torchhip.switch_on(other)


def test_torchs_version_names_hip_and_rocm():
    text = "cuda: Optional[str] = None\nhip: Optional[str] = None\nrocm: Optional[str] = None\n"
    changed = torchhip.set_versions(text, "7.2.53211", "7.2.4")
    assert "hip: Optional[str] = '7.2.53211'\nrocm: Optional[str] = '7.2.4'\n" in changed
    with pytest.raises(ValueError, match="no line for hip"):
        torchhip.set_versions("cuda = None\n", "7", "7")


def test_a_linked_tree_shares_files_but_what_will_change(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    for name in ("torch/include/x.h", "torch/lib/x.so", "torch/version.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("old")
    python.link_tree(source, target, python.CHANGED)
    assert (target / "torch/lib/x.so").samefile(source / "torch/lib/x.so")
    for name in ("torch/include/x.h", "torch/version.py"):
        (target / name).write_text("new")
        assert (source / name).read_text() == "old"


def test_an_interpreter_says_where_its_headers_are():
    found = python.ask(Path(sys.executable))
    assert found["version"] == ".".join(map(str, HERE))
    assert Path(found["program"]).is_file()


# Stand-in libraries


def test_the_tracked_list_is_read_and_a_name_listed_twice_refused(tmp_path):
    libraries = stubs.load()
    assert [x.soname for x in libraries] == ["libc10_hip.so", "libtorch_hip.so", "libhipblas.so.3"]
    assert all("/" in header for x in libraries for header in x.symbols.values())
    path = tmp_path / "s.toml"
    path.write_text('["a.so"]\nsoname = "a.so"\n"x.h" = ["f"]\n"y.h" = ["f"]\n')
    with pytest.raises(StackError, match="f is there twice"):
        stubs.load(path)
    path.write_text('["a.so"]\nsoname = "a.so"\n')
    with pytest.raises(StackError, match=r"a\.so has no soname or no symbols"):
        stubs.load(path)


@pytest.fixture(scope="module")
def standins(tmp_path_factory):
    """The stand-ins, and two libraries linked against them as vLLM's are."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("standins")

    def compile_(words):
        subprocess.run(["cc", *words], cwd=folder, check=True)

    stubs.make(stubs.load(), folder, compile_)
    for name, call in (("used", "_ZN3c104cuda12device_countEv"), ("strange", "nobody_has_this")):
        (folder / f"{name}.c").write_text(f"void {call}(void); void go(void) {{ {call}(); }}\n")
        compile_(
            ["-shared", "-fPIC", "-o", f"{name}.so", f"{name}.c", "-Wl,--as-needed", "-L.",
             "-lhipblas", "-ltorch_hip", "-lc10_hip"]
        )  # fmt: skip
    return folder


def test_a_library_needs_the_stand_in_that_it_uses_and_no_other(standins):
    from ci.rocm import audit

    used = audit.read_library(standins / "used.so")
    assert "libc10_hip.so" in used.needed
    assert not {"libtorch_hip.so", "libhipblas.so.3"} & set(used.needed)
    assert (standins / "libhipblas.so.3").resolve() == standins / "libhipblas.so"
    assert audit.read_library(standins / "libtorch_hip.so").needed[0] == "libc10_hip.so"
    assert not list(standins.glob("lib*.c"))


def test_every_undefined_symbol_has_an_owner_that_is_needed(standins):
    from ci.rocm import audit

    listed = stubs.load()
    used = audit.read_library(standins / "used.so")
    counts, problems = audit.symbol_problems(used, {"libx.so": {"f"}}, listed)
    assert counts == {"libc10_hip.so": 1} and problems == []
    strange = audit.read_library(standins / "strange.so")
    assert audit.symbol_problems(strange, {}, listed)[1] == [
        "strange.so: no declared library defines nobody_has_this"
    ]
    strange = dataclasses.replace(strange, needed=("liby.so",))
    both = {"libx.so": {"nobody_has_this"}, "liby.so": {"nobody_has_this"}}
    assert audit.symbol_problems(strange, both, listed) == ({"liby.so": 1}, [])
    without = dataclasses.replace(used, needed=("libc.so.6",))
    assert audit.symbol_problems(without, {}, listed)[1] == [
        "used.so uses _ZN3c104cuda12device_countEv but does not need libc10_hip.so"
    ]
    assert audit.exported(standins / "libhipblas.so") >= {"hipblasHgemm"}


def test_a_call_into_a_stand_in_ends_with_its_name(standins):
    code = f"import ctypes; ctypes.CDLL({str(standins / 'libhipblas.so')!r}).hipblasHgemm()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode < 0
    assert "hipblasHgemm: stand-in for libhipblas.so.3 was called" in ran.stderr


# Running setup.py


def test_the_time_left_follows_what_the_files_cost():
    now = [0.0]
    costs = {"attention.hip": 400.0, "gemm.hip": 100.0}
    follow = rocm_build.Progress(costs, 10.0, 2, lambda: now[0])
    line = "[{}/5] Building HIP object CMakeFiles/_rocm_C.dir/csrc/{}.o"
    assert follow.line("-- Configuring done") is None
    # 490 CPU seconds are left for two jobs; nothing has been seen yet.
    assert follow.line(line.format(1, "x.hip")) == "1/5 x.hip, about 4 min left"
    now[0] = 100.0
    assert follow.line(line.format(2, "gemm.hip")) == "2/5 gemm.hip, about 5 min left"
    now[0] = 300.0
    assert follow.line(line.format(3, "attention.hip")).startswith("3/5 attention.hip, about 1")
    assert (
        follow.line("[5/5] Linking HIP shared module x.so") == "5/5 Linking HIP shared module x.so"
    )


def test_more_architectures_cost_more():
    (one, default), (two, more) = rocm_build.costs(1), rocm_build.costs(2)
    assert two["attention.hip"] > 1.5 * one["attention.hip"] and more > default


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("a.hip:3:1: error: no\\n1 error generated", 1, r"failed \(1\): a.hip:3:1: error: no"),
        ("CMake Error at x:1 (find_package):\\n  Could not find hip", 1, "Could not find hip"),
        ("ld: No space left on device\\nninja: stopped", 2, "No space left"),
        ("-- The HIP compiler identification is unknown\\nmore", 0, "identification is unknown"),
        ("", 3, "no output"),
    ],
)
def test_a_failed_build_says_why(tmp_path, output, code, message):
    program = script(tmp_path / "setup", f"printf '%b\\n' '{output}'; exit {code}\n")
    with pytest.raises(StackError, match=message):
        rocm_build.setup([str(program)], tmp_path, None, tmp_path / "log", print, 1, 1)
    assert output.split("\\n")[0] in (tmp_path / "log").read_text()


def test_progress_is_told_and_the_log_kept(tmp_path):
    line = "[1/2] Building CXX object CMakeFiles/_C.dir/csrc/x.cpp.o"
    program = script(tmp_path / "setup", f"echo '{line}'; echo \"$WHO\"\n")
    told = []
    rocm_build.setup(
        [str(program)], tmp_path, {"WHO": "me", "PATH": os.environ["PATH"]}, tmp_path / "log",
        told.append, 2, 1,
    )  # fmt: skip
    assert len(told) == 1 and told[0].startswith("1/2 x.cpp, about")
    assert (tmp_path / "log").read_text() == f"{line}\nme\n"


# What is ready


def make_root(path: Path) -> toolchain.Ready:
    path.mkdir(exist_ok=True)
    root = debian.Root(path, (), "http://m/debian", "22")
    return toolchain.Ready("/opt/env/bin/python", "/opt/rocm", {}, root, {"compiler": "clang 22"})


def test_a_build_in_a_root_has_a_fixed_path_and_leaves_nothing(tmp_path):
    ready = make_root(tmp_path / "root")
    (tmp_path / "root/hipstack/build").mkdir(parents=True)
    (tmp_path / "root/hipstack/build/stale").write_text("x")
    with pytest.raises(RuntimeError), ready.work(tmp_path) as place:
        assert ready.inner(place) == toolchain.WORK and list(place.iterdir()) == []
        raise RuntimeError
    assert not place.exists()
    with toolchain.Ready("python3", "/opt/rocm", {}).work(tmp_path) as place:
        assert place == tmp_path
    assert tmp_path.is_dir()


def test_an_architecture_that_the_roots_compiler_does_not_know_is_refused(tmp_path, monkeypatch):
    ready = dataclasses.replace(make_root(tmp_path / "root"), env={"CC": "clang"})
    monkeypatch.setattr(toolchain, "run", lambda words: "Available CPUs: gfx1100 gfx1201")
    ready.check_arches(["gfx1201"])
    with pytest.raises(StackError, match="does not know gfx1250"):
        ready.check_arches(["gfx1201", "gfx1250"])


def test_triton_kernels_come_from_the_folder_that_is_given(tmp_path):
    root = make_root(tmp_path / "root").root
    assert toolchain.triton_kernels(None, None) == ""
    assert toolchain.triton_kernels(root, None) == toolchain.NO_TRITON_KERNELS
    with pytest.raises(StackError, match="is no folder"):
        toolchain.triton_kernels(root, str(tmp_path / "absent"))
    given = tmp_path / "triton_kernels"
    given.mkdir()
    (given / "matmul.py").write_text("1")
    assert toolchain.triton_kernels(None, str(given)) == str(given)
    assert toolchain.triton_kernels(root, str(given)) == "/hipstack/triton-kernels"
    assert (tmp_path / "root/hipstack/triton-kernels/matmul.py").is_file()


@pytest.mark.parametrize(
    ("mode", "how", "tag"),
    [
        ("none", "", "{p}-{p}-linux_"),
        ("precompiled", "", "{p}-{p}-linux_"),
        ("compile", "host", "{p}-abi3-linux_"),
        ("compile", "debian", "{p}-abi3-manylinux_2_35_x86_64"),
    ],
)
def test_the_tag_says_what_the_ops_are(mode, how, tag):
    here = f"cp{HERE[0]}{HERE[1]}"
    assert build.wheel_tag(Extensions(mode, "", toolchain=how)).startswith(tag.format(p=here))
