"""The image's recipe, what runs inside it, and the checks of a finished one; no engine needed."""

import base64
import csv
import hashlib
import http.server
import json
import re
import struct
import threading
import zipfile

import pytest
import yaml
from conftest import make_patch, make_series, run_module
from hypothesis import given
from hypothesis import strategies as st

from ci import arches, build, envs, paths
from ci.errors import StackError
from ci.image import check, recipe, standin
from ci.image.engine import Config, Engine, Layer, parse_config, parse_layers
from ci.image.inside import healthcheck, install
from ci.repository import Repository

DOCKERFILE = recipe.DOCKERFILE.read_text()
KNOWN = Repository("https://example.org/owner/name", "c" * 40)
UNKNOWN = Repository("", "c" * 40)


def code_object(mach: int = 0x4E) -> bytes:
    """The smallest AMDGPU ELF file there is: gfx1201 by its number."""
    ident = b"\x7fELF" + bytes([2, 1, 1, 64, 4]) + b"\0" * 7
    return ident + struct.pack("<HHIQQQIHHHHHH", 3, 224, 1, 0, 0, 0, mach, 64, 0, 0, 0, 0, 0)


# --- the recipe


def test_the_dockerfiles_pin_is_the_pin(the_pin):
    declared = recipe.declared_arguments(DOCKERFILE)
    assert declared["PIN"] == the_pin.version
    assert declared["PIN_COMMIT"] == the_pin.commit
    assert f"/{the_pin.version}/" in declared["TORCH_INDEX"]
    assert arches.parse(declared["ARCH"])


def test_the_dockerfile_declares_every_argument_that_is_passed(the_pin):
    passed = recipe.describe(the_pin, "1", make_series(make_patch("core/x")), ("gfx1201",), KNOWN)
    source = (paths.ROOT / "ci" / "image" / "__main__.py").read_text()
    named = set(re.findall(r'arguments\["(\w+)"\]|"([A-Z]+_[A-Z]+|ARCH|[A-Z]{9,})"', source))
    named |= set(re.findall(r'f?"()([A-Z]+_[A-Z]+)=', source))
    names = {a or b for a, b in named} - {"PIP_CERT", "SSL_CERT_FILE", "HF_HOME"}
    declared = set(recipe.declared_arguments(DOCKERFILE))
    assert set(passed) <= declared
    assert {"BASE_IMAGE", "TORCH_INDEX", "TOOLCHAIN", "ANY_TORCH"} <= names
    assert names <= declared


def test_the_dockerfile_calls_build_sh_with_options_that_it_has():
    call = re.search(r"\./build\.sh(.*?)\n\n", DOCKERFILE, re.S)[1]
    options = re.findall(r"--[a-z-]+", call)
    assert {"--arch", "--extensions", "--out", "--toolchain", "--jobs"} == set(options)
    words = [w for o in options for w in (o, {"--jobs": "1", "--arch": "gfx1201"}.get(o, "auto"))]
    assert build.parse_arguments(words).arch == "gfx1201"


def test_the_build_stage_has_the_tools_that_builds_use():
    lines = (paths.ROOT / "ci" / "image" / "inside" / "build-tools.txt").read_text().splitlines()
    assert tuple(x for x in lines if not x.startswith("#")) == envs.BUILD_REQUIREMENTS


def test_each_environment_value_has_its_reason():
    runtime = DOCKERFILE[DOCKERFILE.index("FROM torch AS runtime") :]
    block = re.search(r"^ENV .*?\n\n", runtime, re.S | re.M)[0]
    comments = re.search(r"((?:^#.*\n)+)^ENV ", runtime, re.M)[1]
    for name in re.findall(r"(\w+)=", block):
        family = "MIOPEN_*" if name.startswith("MIOPEN_") else name
        assert re.search(rf"^# [\w, *]*{re.escape(family)}[\w, ]*:", comments, re.M), name


def test_tags_name_the_family_and_are_valid(the_pin):
    version = recipe.version_of(the_pin, "1")
    assert version == "0.31.0-hipstack1"
    assert recipe.image_tag(version, arches.parse("gfx120x")) == f"{version}-gfx120x"
    assert recipe.image_tag(version, ["gfx1100", "gfx1151"]) == f"{version}-gfx1100-gfx1151"
    with pytest.raises(StackError, match="no valid image tag"):
        recipe.image_tag("0.31.0+hipstack1", ["gfx1201"])


@given(st.lists(st.sampled_from(sorted(arches.ARCHES)), min_size=1, unique=True))
def test_every_set_of_architectures_has_one_tag(names):
    tag = recipe.image_tag("0.31.0-hipstack1", names)
    assert tag == recipe.image_tag("0.31.0-hipstack1", names[::-1])


def test_labels_link_to_the_patches_where_an_address_is_known(the_pin):
    series = make_series(make_patch("core/a"), make_patch("core/b"))
    said = recipe.describe(the_pin, "1", series, ("gfx1200", "gfx1201"), KNOWN)
    assert said["PATCHES"].split()[0] == f"{KNOWN.url}/blob/{KNOWN.commit}/patches/core/a.patch"
    assert said["ARCH"] == "gfx1200,gfx1201"
    assert said["SET_HASH"] == series.set_hash
    bare = recipe.describe(the_pin, "1", series, ("gfx1201",), UNKNOWN)
    assert bare["PATCHES"] == "patches/core/a.patch patches/core/b.patch"
    assert bare["SOURCE"] == ""


def test_a_given_wheel_takes_the_build_stages_place(tmp_path):
    words = recipe.Recipe({"ARCH": "gfx1201"}, ["x:y"], tmp_path).words()
    assert words[words.index("--build-context") + 1] == f"wheel={tmp_path}"
    assert re.search(r"^FROM scratch AS wheel$", DOCKERFILE, re.M)
    assert "--build-context" not in recipe.Recipe({}, ["x:y"]).words()


def test_a_dry_run_prints_the_engines_command_and_an_absent_wheel_is_named(tmp_path):
    done = run_module("ci.image", "build", "--arch", "gfx120x", "--dry-run")
    assert done.returncode == 0
    assert "--build-arg ARCH=gfx1200,gfx1201" in done.stdout
    done = run_module("ci.image", "build", "--arch", "gfx1201", "--wheel", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "there is no vllm-*.whl" in done.stderr


# --- inside the image


def test_a_wheel_is_chosen_by_all_of_its_architectures():
    names = [f"vllm-0.31.0+hipstack1.{a}-cp312-abi3-linux_x86_64.whl"
             for a in ("gfx1201", "gfx1200.gfx1201", "gfx1100")]  # fmt: skip
    assert install.choose([*names, "SHA256SUMS"], "gfx1201") == names[0]
    assert install.choose(names, "gfx1201,gfx1200") == names[1]
    assert install.choose(names[2:], "") == names[2]
    for wanted, count in (("gfx1151", 0), ("", 3)):
        with pytest.raises(install.InstallError, match=f"^{count} wheels for"):
            install.choose(names, wanted)
    twice = [names[0], names[0].replace("cp312", "cp311")]
    with pytest.raises(install.InstallError, match=r"^2 wheels for gfx1201"):
        install.choose(twice, "gfx1201")


def test_what_belongs_to_torch_is_held_and_nothing_else():
    names = ["Torch", "triton", "amd_torch_device_gfx1201", "rocm-sdk-core", "torchao", "numpy"]
    held = install.held(names)
    assert held == ["amd-torch-device-gfx1201", "rocm-sdk-core", "torch", "triton"]
    assert install.constraints({"triton": "3.8", "torch": "2.13.0+x"}) == (
        "torch==2.13.0+x\ntriton==3.8\n"
    )


def test_a_moved_torch_is_named():
    before = {"torch": ["2.13.0+rocm", "a"], "triton": ["3.8", "b"], "amdsmi": ["1", "c"]}
    assert install.moved(before, before | {"numpy": ["1", "z"]}) == []
    assert install.moved(before, {**before, "torch": ["2.13.0", "a"]}) == [
        "torch was 2.13.0+rocm, is 2.13.0"
    ]
    assert install.moved(before, {**before, "triton": ["3.8", "x"]}) == [
        "triton was 3.8, is 3.8 with other files"
    ]
    del before["amdsmi"]
    assert install.moved({**before, "amdsmi": ["1", "c"]}, before) == ["amdsmi was 1, is gone"]


def test_requirements_leave_extras_out():
    text = (
        "Name: vllm\nRequires-Dist: numpy<3\nRequires-Dist: zen; extra == 'zen'\n"
        "Requires-Dist: six; python_version > '3.11'\n\nRequires-Dist: not-a-header\n"
    )
    assert install.requirements(text) == ["numpy<3", "six; python_version > '3.11'"]


def test_an_environment_that_moved_fails_the_build(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "STATE", tmp_path)
    (tmp_path / "held.json").write_text(json.dumps({"torch": ["2.13.0+rocm", "a"]}))
    monkeypatch.setattr(install, "snapshot", lambda: {"torch": ["2.13.0", "b"]})
    assert install.main(["verify"]) == 1
    assert capsys.readouterr().err == "error: torch was 2.13.0+rocm, is 2.13.0\n"
    held = {"torch": ["2.13.0+rocm", "a"]}
    monkeypatch.setattr(install, "snapshot", lambda: held)
    assert install.main(["verify"]) == 0
    monkeypatch.setattr(install, "snapshot", lambda: held | {"torchvision": ["0.28", "c"]})
    assert install.main(["verify"]) == 1
    assert (
        "torchvision did not come with torch: add it to TORCH_PACKAGES" in capsys.readouterr().err
    )


def test_a_torch_without_rocm_is_refused_unless_it_is_a_stand_in(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "STATE", tmp_path)
    (tmp_path / "held.json").write_text(json.dumps({"torch": ["2.13.0", "a"]}))
    monkeypatch.setattr(install, "_ask", lambda code: "")
    with pytest.raises(install.InstallError, match="no ROCm build"):
        install.check_rocm(any_torch=False)
    install.check_rocm(any_torch=True)
    monkeypatch.setattr(install, "_ask", lambda code: "7.2.3")
    install.check_rocm(any_torch=False)


def test_measured_tiles_are_imported_for_the_images_cards_and_readable_by_all(
    tmp_path, monkeypatch
):
    folder, cache = tmp_path / "tuned", tmp_path / "cache"
    folder.mkdir()
    (folder / "README.md").write_text("x")
    cache.mkdir()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache))
    called = []
    monkeypatch.setattr(install, "_run", lambda *words: called.append(words))
    install.install_tuned(folder, "gfx1201")
    assert called == []
    for name in ("b.json", "a.json"):
        (folder / name).write_text("[]")
    (cache / "gfx1201").mkdir()
    (cache / "gfx1201" / "k.json").touch(0o600)
    install.install_tuned(folder, "gfx1201,gfx1200")
    assert [(w[-1][-6:], w[-2]) for w in called] == [
        ("a.json", "gfx1200"), ("a.json", "gfx1201"), ("b.json", "gfx1200"), ("b.json", "gfx1201"),
    ]  # fmt: skip
    assert (cache / "gfx1201").stat().st_mode & 0o7777 == 0o1777
    assert (cache / "gfx1201" / "k.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("vllm serve m", "http://127.0.0.1:8000/health"),
        ("/sbin/docker-init -- python vllm serve m --port 9", "http://127.0.0.1:9/health"),
        ("vllm serve --port=9 --host=0.0.0.0", "http://127.0.0.1:9/health"),
        ("vllm serve --host :: --ssl-certfile c", "https://127.0.0.1:8000/health"),
        ("vllm serve --host ::1", "http://[::1]:8000/health"),
        ("vllm serve --host 10.0.0.2 --port", "http://10.0.0.2:8000/health"),
        ("", "http://127.0.0.1:8000/health"),
    ],
)
def test_the_health_check_asks_where_the_server_listens(words, url):
    assert healthcheck.address(words.split()) == url


def test_only_status_200_is_healthy(monkeypatch, capsys):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response({"/health": 200, "/busy": 503}.get(self.path, 404))
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy is not asked
    try:
        assert healthcheck.answers(f"{base}/health") == ""
        assert "Service Unavailable" in healthcheck.answers(f"{base}/busy")
    finally:
        server.shutdown()
        server.server_close()
    monkeypatch.setenv(healthcheck.VARIABLE, f"{base}/health")
    assert healthcheck.main() == 1
    assert "refused" in capsys.readouterr().err
    assert healthcheck.answers("nonsense") != ""


# --- engines


def test_what_an_image_says_is_read_and_gaps_are_no_error():
    config = parse_config("id", {"Labels": None, "Env": ["A=b=c"], "User": "2000:2000",
                                 "Volumes": {"/cache": {}}, "Entrypoint": ["vllm", "serve"],
                                 "Healthcheck": {"Test": ["CMD", "x"]}})  # fmt: skip
    assert config.env == {"A": "b=c"}
    assert config.volumes == ("/cache",)
    assert config.healthcheck == ("CMD", "x")
    assert parse_config("id", {}).entrypoint == ()


def test_sizes_belong_to_the_layers_that_are_not_empty():
    history = [{"created_by": "ADD  a"}, {"created_by": "ENV", "empty_layer": True}, {}]
    assert parse_layers(history, [5, 7, 9]) == [Layer("ADD a", 5), Layer("", 7), Layer("", 9)]


def test_an_absent_engine_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StackError, match=r"none of docker, podman, buildah is installed"):
        Engine()


# --- checks


def good(**changes) -> tuple[Config, dict]:
    stack = {"arches": ["gfx1201"], "set_hash": "f" * 64, "extensions": "none",
             "pin": {"version": "0.31.0", "commit": "d" * 40},
             "patches": [{"name": "core/a"}, {"name": "core/b"}]}  # fmt: skip
    labels = {
        "org.opencontainers.image.title": "hipstack",
        "org.opencontainers.image.version": "v",
        "org.opencontainers.image.revision": "r",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": "b",
        "hipstack.arches": "gfx1201",
        "hipstack.set-hash": "f" * 64,
        "hipstack.pin": "0.31.0",
        "hipstack.pin.commit": "d" * 40,
        "hipstack.patches": "https://h/o/n/blob/c/patches/core/a.patch patches/core/b.patch",
    } | changes.pop("labels", {})
    config = {"id": "i", "labels": labels, "env": {}, "user": "2000:2000", "volumes": ("/cache",),
              "entrypoint": ("vllm", "serve"),
              "healthcheck": ("CMD", "healthcheck.py")}  # fmt: skip
    return Config(**{**config, **changes}), stack


def failed(results) -> set[str]:
    return {r.name for r in results if not r.ok}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"labels": {"hipstack.set-hash": "0" * 64}}, "labels"),
        ({"labels": {"hipstack.arches": "gfx1100"}}, "labels"),
        ({"labels": {"hipstack.patches": "patches/core/a.patch"}}, "labels"),
        ({"labels": {"org.opencontainers.image.revision": "unknown"}}, "labels"),
        ({"user": ""}, "user"),
        ({"user": "0:0"}, "user"),
        ({"user": "vllm"}, "user"),
        ({"entrypoint": ("sh",)}, "entry point"),
        ({"healthcheck": ()}, "health check"),
        ({"volumes": ()}, "volumes"),
    ],
)
def test_each_fault_of_an_image_is_found(changes, name):
    assert failed(check.check_config(*good())) == set()
    assert failed(check.check_config(*good(**changes))) == {name}


def test_the_code_in_the_installed_files_must_be_for_the_cards(tmp_path):
    kernel = tmp_path / "hipstack" / "aot" / "k.hsaco"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(code_object())
    assert check.check_code(tmp_path, ["gfx1201"], "none").ok
    assert not check.check_code(tmp_path, ["gfx1100"], "none").ok
    assert not check.check_code(tmp_path, ["gfx1201"], "compile").ok  # no library at all
    (tmp_path / "_C.abi3.so").write_bytes(code_object())
    assert check.check_code(tmp_path, ["gfx1201"], "compile").ok
    assert not check.check_code(tmp_path, ["gfx1201"], "none").ok
    (tmp_path / "_rocm_C.abi3.so").write_bytes(code_object(0x41))  # gfx1100
    result = check.check_code(tmp_path, ["gfx1201"], "compile")
    assert not result.ok
    assert "_rocm_C.abi3.so holds gfx1100" in result.detail


def test_the_pages_flags_are_vllms_and_those_of_docker_are_not():
    text = (
        "docker run --rm $GPU $IMAGE \\\n  m --port=1 --kernel-config.x=True '{\"a\": 1}'\n"
        "docker run --rm --entrypoint python $IMAGE -m doctor --json   # not vLLM's\n"
    )
    assert check.documented_flags(text) == ["--kernel-config", "--port"]
    page = check.documented_flags((paths.ROOT / "docs" / "image.md").read_text())
    assert {"--attention-backend", "--speculative-config", "--tensor-parallel-size"} <= set(page)


def test_compose_names_flags_of_the_page_and_asks_for_the_groups():
    services = yaml.safe_load((paths.ROOT / "compose.yaml").read_text())["services"]
    page = set(check.documented_flags((paths.ROOT / "docs" / "image.md").read_text()))
    assert set(services) == {"one-card", "two-cards"}
    for service in services.values():
        assert {w for w in service["command"] if w.startswith("--")} <= page
        assert any("RENDER_GID:?" in group for group in service["group_add"])
        assert service["devices"] == ["/dev/kfd", "/dev/dri"]


# --- the stand-in


def test_the_stand_ins_wheel_is_a_wheel(tmp_path):
    made = standin.make_wheel("amdsmi", "0", paths.STANDIN / "amdsmi", tmp_path)
    with zipfile.ZipFile(made) as archive:
        rows = list(csv.reader(archive.read("amdsmi-0.dist-info/RECORD").decode().splitlines()))
        assert {row[0] for row in rows} == set(archive.namelist())
        for path, digest, size in rows[:-1]:
            data = archive.read(path)
            wanted = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={wanted}", len(data))


def test_a_python_without_a_debian_release_is_refused():
    assert standin.suite_of((3, 11)) == "bookworm"
    with pytest.raises(StackError, match=r"no Debian release has Python 3\.12"):
        standin.suite_of((3, 12))
