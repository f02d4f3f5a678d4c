"""ci.aot on a tiny tree: real compilations by the AMD compiler, and everything that must fail."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci import codeobjects, patches
from ci.aot import (
    AotError,
    KernelObject,
    Manifest,
    __main__,
    compile_list,
    install_into,
    lists,
    verify_manifest,
    verify_wheel,
)
from ci.aot.driver import Target, target_of
from ci.aot.model import MANIFEST_NAME, digest
from ci.aot.resources import lds_occupancy, read_resources

pytest.importorskip("triton", reason="the AMD compiler comes with triton")

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def scores(q, k, out, count, TILE: tl.constexpr, SIZE: tl.constexpr):
    rows = tl.arange(0, 16)
    columns = tl.arange(0, SIZE)
    keys = tl.arange(0, TILE)
    query = tl.load(q + rows[:, None] * SIZE + columns[None, :])
    total = tl.zeros([16, TILE], dtype=tl.float32)
    for start in range(0, count, TILE):
        tile = tl.load(k + (start + keys)[None, :] * SIZE + columns[:, None])
        total += tl.dot(query, tile)
    tl.store(out + rows[:, None] * TILE + keys[None, :], total)


@triton.jit
def halve(x, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + index, tl.load(x + index, mask=index < count) / 2, mask=index < count)


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["count"])
@triton.jit
def tuned(x, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(x + index, 0.0, mask=index < count)


@triton.jit
def greedy(x, y):
    rows = tl.arange(0, 256)
    columns = tl.arange(0, 128)
    tile = tl.load(x + rows[:, None] * 128 + columns[None, :])
    tl.store(y + columns[:, None] * 256 + rows[None, :], tl.trans(tile))


@triton.jit
def broken(x):
    tl.store(x, tl.load(x) @ 1)


def run(q, k, out, count):
    scores[(1,)](q, k, out, count, TILE=32, SIZE=q.shape[1])
    halve[(1,)](out, out.numel(), BLOCK=128)
"""

LIST = """
import importlib
from ci.aot.model import KernelList, Variant

BOTH = ("scores", "halve")


def variants(arch):
    return [
        Variant("small", BOTH, {"count": 3}),
        Variant("even", BOTH, {"count": 64}),
        Variant("one", BOTH, {"count": 1}),
        Variant("large", BOTH, {"count": 3, "rows": 1 << 30}),
    ]


def launch(module, variant, arch):
    torch = importlib.import_module("torch")
    q = torch.empty(16, 32, dtype=torch.float16, device="meta")
    k = torch.empty(variant.params.get("rows", 64), 32, dtype=torch.float16, device="meta")
    out = torch.empty(16, 32, dtype=torch.float32, device="meta")
    module.run(q, k, out, variant.params["count"])


LIST = KernelList("tiny", "vllm.tiny", variants, launch, {"scores": "TILE"})
"""


def make_tree(folder: Path, kernels: str = KERNELS) -> Path:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text("")
    (folder / "vllm/tiny.py").write_text(kernels)
    return folder


def make_list(path: Path, launch: str = "", kernels: str = "BOTH") -> str:
    """The tiny list, or one with a single variant whose launch is this line."""
    text = LIST
    if launch:
        variant = f'Variant("v", {kernels})'
        text += (
            "\n\ndef other(module, variant, arch):\n"
            '    torch = importlib.import_module("torch")\n'
            '    x = torch.empty(128, dtype=torch.float32, device="meta")\n'
            f"    {launch}\n\n\n"
            f'LIST = KernelList("tiny", "vllm.tiny", lambda arch: [{variant}], other)\n'
        )
    path.write_text(text)
    return str(path)


def snapshot(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("tree") / "vllm-tree")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_list(tmp_path_factory.mktemp("lists") / "tiny.py")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(
    tree: Path, tiny: str, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """The result for two kinds of architecture, and the progress that was reported."""
    out = tmp_path_factory.mktemp("made") / "aot"
    seen: list[str] = []
    compile_list(tree, [tiny], ["gfx1201", "gfx942"], out, cache=cache, progress=seen.append)
    return out, seen


@pytest.fixture
def copied(made: tuple[Path, list[str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "copy"))


def test_result(made: tuple[Path, list[str]], tree: Path, tiny: str) -> None:
    out, seen = made
    assert verify_manifest(out) == []
    manifest = Manifest.load(out)
    assert manifest.arches == ("gfx1201", "gfx942")
    assert manifest.lists == {"tiny": hashlib.sha256(Path(tiny).read_bytes()).hexdigest()}
    assert seen == [
        f"{arch} tiny/{name}"
        for arch in ("gfx1201", "gfx942")
        for name in ("small", "even", "one", "large")
    ]
    # One `scores` for each variant; all share one `halve`.
    for arch in manifest.arches:
        kernels = [item.kernel for item in manifest.objects if item.arch == arch]
        assert sorted(kernels) == ["halve"] + ["scores"] * 4
    shared = next(item for item in manifest.objects if item.kernel == "halve")
    assert shared.variants == ("tiny/even", "tiny/large", "tiny/one", "tiny/small")
    assert not list(tree.rglob("__pycache__"))
    assert [path.name for path in out.parent.iterdir()] == ["aot"]


def test_code_is_for_the_architecture_of_its_folder(made: tuple[Path, list[str]]) -> None:
    for path in made[0].glob("*/*.hsaco"):
        (item,) = codeobjects.scan_file(path)
        assert (item.arch, item.kernels) == (path.parent.name, 1)


def test_variants_are_what_a_launch_specialises_on(made: tuple[Path, list[str]]) -> None:
    found = {
        item.variants[0].removeprefix("tiny/"): item
        for item in Manifest.load(made[0]).objects
        if item.arch == "gfx1201" and item.kernel == "scores"
    }
    assert found["small"].attrs["count"] == []
    assert found["even"].attrs["count"] == [["tt.divisibility", 16]]
    assert found["one"].constexprs["count"] == 1
    near = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
    assert found["small"].attrs["k"] == near
    # A tensor beyond 2 GiB: no buffer loads, as the engine's launch would have none either.
    assert found["large"].attrs["k"] == near[:1]
    assert found["small"].signature["q"] == "*fp16"
    assert found["small"].constexprs["TILE"] == 32


def test_the_target_is_the_architecture_or_another() -> None:
    assert target_of("gfx1201") == Target("hip", "gfx1201", 32)
    assert target_of("gfx942").warp_size == 64
    assert target_of("gfx1201", "cuda:90") == Target("cuda", 90, 32)
    for wrong in ("", "cuda", "cuda:", "hip:gfx1201", "cuda:9", "cuda:90a"):
        with pytest.raises(AotError, match="another GPU"):
            target_of("gfx1201", wrong)


def test_code_of_another_gpu_has_its_own_form(made: tuple[Path, list[str]]) -> None:
    data = json.loads((made[0] / MANIFEST_NAME).read_text())["objects"][0]
    other = {**data, "target": {"backend": "cuda", "arch": 90, "warp_size": 32}}
    item = KernelObject.from_json({**other, "resources": None})
    assert item.file == f"90/{item.id}.cubin"
    for target in ({"backend": "metal"}, {"backend": "cuda", "arch": "gfx1201"}):
        with pytest.raises(AotError, match="target names no"):
            KernelObject.from_json({**data, "target": {**data["target"], **target}})


def test_resources_are_read(made: tuple[Path, list[str]]) -> None:
    for item in Manifest.load(made[0]).objects:
        use = item.resources
        assert use.vgprs > 0
        assert use.sgprs > 0
        assert use.code_bytes > 0
        assert 1 <= use.occupancy <= 16
        assert use.lds_bytes == item.metadata["shared"]
        if item.kernel == "scores":
            assert use.matrix_instructions > 0
            assert use.loop_kv_tokens == 32
            per_token = use.instructions_per_kv_token
            # A pass with a constant trip count of one has no loop left.
            assert per_token is None or per_token == use.loop_instructions / 32
            assert (per_token is None) == (item.constexprs.get("count") == 1)
        else:
            assert use.matrix_instructions == 0
            assert use.instructions_per_kv_token is None


def test_no_path_of_this_machine_gets_in(made: tuple[Path, list[str]], tree: Path) -> None:
    out, _ = made
    marks = [str(tree), str(Path.home()), sys.prefix, str(Path(__file__).parent.parent), ".py\0"]
    for path in out.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [mark for mark in marks if mark.encode() in data], path


def test_same_inputs_give_same_bytes(
    made: tuple[Path, list[str]],
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Another place, no cache, work split over processes, and variables that would matter.
    for name, value in (
        ("TRITON_INTERPRET", "1"),
        ("AMDGCN_USE_BUFFER_OPS", "0"),
        ("TRITON_DEFAULT_FP_FUSION", "0"),
        ("FAKE_GFX", "gfx90a"),
        ("PYTHONHASHSEED", "7"),
    ):
        monkeypatch.setenv(name, value)
    tree = make_tree(tmp_path / "elsewhere")
    out = tmp_path / "out"
    compile_list(tree, [tiny], ["gfx1201"], out, jobs=2)
    before = Manifest.load(made[0])
    objects = tuple(item for item in before.objects if item.arch == "gfx1201")
    expected = replace(before, arches=("gfx1201",), objects=objects)
    assert (out / "manifest.json").read_text() == expected.dumps()
    assert snapshot(out / "gfx1201") == snapshot(made[0] / "gfx1201")


def test_another_source_gives_other_objects(
    made: tuple[Path, list[str]], tiny: str, cache: Path, tmp_path: Path
) -> None:
    tree = make_tree(tmp_path / "tree", KERNELS.replace("/ 2", "/ 4"))
    manifest = compile_list(tree, [tiny], ["gfx1201"], tmp_path / "out", cache=cache)

    def ids(items: Manifest, kernel: str) -> set[str]:
        return {i.id for i in items.objects if i.arch == "gfx1201" and i.kernel == kernel}

    before = Manifest.load(made[0])
    assert not ids(manifest, "halve") & ids(before, "halve")
    assert ids(manifest, "scores") == ids(before, "scores")


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> None:
    """Change the manifest's JSON, with a digest that fits again unless told not to."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    if sign:
        data["digest"] = digest({key: value for key, value in data.items() if key != "digest"})
    path.write_text(json.dumps(data))


def test_every_changed_byte_of_the_manifest_is_seen(copied: Path) -> None:
    path = copied / "manifest.json"
    data = path.read_bytes()
    for place in range(0, len(data), len(data) // 60):
        if data[place : place + 1].isspace():
            continue
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert verify_manifest(copied), place


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["objects"][0]["constexprs"].update(EXTRA=1), "does not fit what it stands"),
        (lambda m: m["environment"].clear(), "does not fit what it stands"),
        (lambda m: m["triton"].update(key="0" * 64), "does not fit what it stands"),
        (lambda m: m["arches"].append("gfx1100"), "no object for gfx1100"),
        (lambda m: m["arches"].remove("gfx942"), "is not one of the manifest's arch"),
        (lambda m: m["objects"].append(m["objects"][0]), "listed twice"),
        (lambda m: m["objects"].pop(), "not in the manifest"),
        (lambda m: m["objects"][0].update(id="../../../../etc/passwd"), "id is not a hash"),
        (lambda m: m["objects"][0]["metadata"].update(name="other"), "does not define other"),
        (lambda m: m["objects"][0].pop("sha256"), "unfit fields: sha256"),
        (lambda m: m["objects"][0].update(size="1"), "size is not of type int"),
        (lambda m: m["objects"][0]["resources"].update(vgprs=None), "vgprs is not of type int"),
        (lambda m: m["objects"][0]["target"].update(arch="../gfx1201"), "names no architecture"),
        (lambda m: m.update(schema=99), "schema 99"),
        (lambda m: m.update(objects={}), "objects is not a list"),
    ],
)
def test_dishonest_manifests(
    copied: Path, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    rewrite(copied, change)
    assert any(text in problem for problem in verify_manifest(copied))


def test_tampered_missing_and_foreign_files(copied: Path) -> None:
    first, other = sorted((copied / "gfx1201").iterdir())[:2]
    honest = first.read_bytes()

    first.write_bytes(honest[:-1] + bytes([honest[-1] ^ 1]))
    assert verify_manifest(copied) == [f"gfx1201/{first.name}: was changed"]

    first.unlink()
    assert verify_manifest(copied) == [f"gfx1201/{first.name}: missing"]

    first.symlink_to(other)
    assert verify_manifest(copied) == [f"gfx1201/{first.name}: missing"]
    first.unlink()

    first.write_bytes(honest)
    (copied / "gfx1201/extra.hsaco").write_bytes(b"")
    assert verify_manifest(copied) == ["gfx1201/extra.hsaco: not in the manifest"]


def test_code_of_another_architecture_is_seen(copied: Path) -> None:
    """Hashes that fit do not help a code object that is for another chip."""
    foreign = next((copied / "gfx942").iterdir()).read_bytes()

    def swap(data: dict[str, Any]) -> None:
        item = next(i for i in data["objects"] if i["target"]["arch"] == "gfx1201")
        item.update(size=len(foreign), sha256=hashlib.sha256(foreign).hexdigest())
        (copied / f"gfx1201/{item['id']}.hsaco").write_bytes(foreign)

    rewrite(copied, swap)
    assert any("holds gfx942, asked for gfx1201" in text for text in verify_manifest(copied))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 99999, b'{"schema": NaN}'])
def test_unreadable_manifests(copied: Path, content: bytes) -> None:
    (copied / "manifest.json").write_bytes(content)
    assert len(verify_manifest(copied)) == 1
    (copied / "manifest.json").unlink()
    assert "No such file" in verify_manifest(copied)[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_json_is_a_manifest_or_an_error(
    made: tuple[Path, list[str]], data: st.DataObject
) -> None:
    document = json.loads((made[0] / "manifest.json").read_text())
    document["objects"] = document["objects"][:1]
    place: Any = data.draw(
        st.sampled_from([document, document["objects"][0], document["objects"][0]["resources"]])
    )
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    with contextlib.suppress(ValueError):  # floats that have no JSON form
        document["digest"] = digest({k: v for k, v in document.items() if k != "digest"})
    before = copy.deepcopy(document)
    with contextlib.suppress(AotError):
        Manifest.from_json(document).dumps()
    assert repr(document) == repr(before)


@pytest.mark.parametrize(
    ("launch", "kernels", "text"),
    [
        (
            "module.halve[(1,)](x, 9, BLOCK=64)",
            "BOTH",
            "launched halve, the list says scores, halv",
        ),
        ("pass", '("halve",)', "launched nothing"),
        ("module.broken[(1,)](x)", '("broken",)', "tiny/v on gfx1201: "),
        ("module.tuned[(1,)](x, 9)", '("tuned",)', "wants to autotune"),
        ("module.absent()", '("halve",)', "AttributeError: "),
        ("import os; os._exit(7)", '("halve",)', "ended with status 7"),
        (
            "module.greedy[(1,)](x, x)",
            '("greedy",)',
            "OutOfResources",
        ),
    ],
)
def test_a_failing_variant_is_named_and_nothing_is_left(
    tree: Path, cache: Path, tmp_path: Path, launch: str, kernels: str, text: str
) -> None:
    name = make_list(tmp_path / "list.py", launch, kernels)
    target = tmp_path / "new" / "out"
    with pytest.raises(AotError) as caught:
        compile_list(tree, [name], ["gfx1201"], target, cache=cache)
    assert text in str(caught.value)
    assert not target.exists()


def test_an_earlier_result_stays_when_the_next_one_fails(
    tree: Path, cache: Path, copied: Path, tmp_path: Path
) -> None:
    before = snapshot(copied)
    name = make_list(tmp_path / "list.py", "module.absent()", '("halve",)')
    with pytest.raises(AotError):
        compile_list(tree, [name], ["gfx1201"], copied, cache=cache)
    assert snapshot(copied) == before
    good = make_list(tmp_path / "list.py", "module.halve[(1,)](x, 9, BLOCK=64)", '("halve",)')
    compile_list(tree, [good], ["gfx1201"], copied, cache=cache)
    assert len(snapshot(copied)) == 2
    assert verify_manifest(copied) == []


def test_bad_requests(tree: Path, tiny: str, tmp_path: Path) -> None:
    def refused(text: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(AotError, match=text):
            compile_list(*arguments, **options)

    out = tmp_path / "out"
    refused("not a vLLM source tree", tmp_path, [tiny], ["gfx1201"], out)
    refused("'gfx12:xnack' is not the name", tree, [tiny], ["gfx12:xnack"], out)
    refused("no architecture gfx1299 is known", tree, [tiny], ["gfx1201", "gfx1299"], out)
    refused("name at least one", tree, [], ["gfx1201"], out)
    refused("name at least one", tree, [tiny], [], out)
    refused(
        "no kernel list 'absent'; there are: segmented_attention, unified_attention",
        tree, ["absent"], ["gfx942"], out,
    )  # fmt: skip
    refused("no kernel list", tree, ["../model"], ["gfx942"], out)
    refused("two kernel lists are named tiny", tree, [tiny, tiny], ["gfx942"], out)
    (tmp_path / "odd.py").write_text("LIST = 1")
    refused("LIST is not a KernelList", tree, [str(tmp_path / "odd.py")], ["gfx942"], out)
    (tmp_path / "odd.py").write_text("import absent_module")
    refused("absent_module", tree, [str(tmp_path / "odd.py")], ["gfx942"], out)
    refused("No such file", tree, [tiny], ["gfx942"], out, python=str(tmp_path / "python"))
    assert not out.exists()
    refused("holds other files", tree, [tiny], ["gfx1201"], tmp_path)
    refused("is not a folder", tree, [tiny], ["gfx1201"], tmp_path / "odd.py")


def test_install(copied: Path, tmp_path: Path) -> None:
    package = tmp_path / "tree/vllm"
    package.mkdir(parents=True)
    with pytest.raises(AotError, match="not the folder of a Python package"):
        install_into(package, copied)
    (package / "__init__.py").write_text("")
    for _ in range(2):
        target = install_into(package, copied)
        assert target == package / "hipstack/aot"
        assert snapshot(target) == snapshot(copied)
        assert [path.name for path in target.parent.iterdir()] == ["aot"]
    # The package data that the series gives setup.py finds all of it.
    identity = patches.load().get("core/stack-identity")
    added = [x for c in identity.changes if c.path == "setup.py" for x in c.added]
    patterns = re.findall(r'"(hipstack/aot/[^"]+)"', "".join(added))
    matched = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in matched if path.is_file()} == {
        path for path in package.rglob("*") if path.is_file()
    } - {package / "__init__.py"}
    next((copied / "gfx1201").iterdir()).write_bytes(b"changed")
    with pytest.raises(AotError, match="was changed"):
        install_into(package, copied)
    assert verify_manifest(target) == []


def test_wheel(copied: Path, tmp_path: Path) -> None:
    def pack() -> Path:
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
            for path in copied.rglob("*"):
                archive.write(path, f"vllm/hipstack/aot/{path.relative_to(copied)}")
        return tmp_path / "a.whl"

    assert verify_wheel(pack(), ["gfx942", "gfx1201"]) == []
    assert verify_wheel(pack(), ["gfx1201"]) == ["is for gfx1201, gfx942, asked for gfx1201"]
    item = next((copied / "gfx1201").iterdir())
    item.unlink()
    assert verify_wheel(pack(), ["gfx942", "gfx1201"]) == [f"gfx1201/{item.name}: missing"]
    (copied / "manifest.json").unlink()
    (problem,) = verify_wheel(pack(), ["gfx1201"])
    assert problem == "vllm/hipstack/aot/manifest.json: No such file or directory"
    (tmp_path / "b.whl").write_bytes(b"")
    assert "not a readable wheel" in verify_wheel(tmp_path / "b.whl", ["gfx1201"])[0]


def test_command_line(
    made: tuple[Path, list[str]],
    tree: Path,
    tiny: str,
    cache: Path,
    copied: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["--tree", str(tree), "--list", tiny, "--cache", str(cache), "--out", str(copied)]
    assert __main__.main([*common, "--arch", "gfx1201", "--table"]) == 0
    printed = capsys.readouterr()
    assert "[4] gfx1201 tiny/large" in printed.err
    header, *rows = printed.out.splitlines()
    assert header.split()[:3] == ["ARCH", "VARIANT", "KERNEL"]
    assert len([row for row in rows if row.startswith("gfx1201")]) == 5
    assert rows[0].split()[1:4] == ["tiny/even", "+3", "halve"]
    assert rows[-1].startswith("5 code objects for gfx1201, ")
    assert __main__.main(["--verify", "--out", str(copied)]) == 0
    next((copied / "gfx1201").iterdir()).unlink()
    assert __main__.main(["--verify", "--out", str(copied)]) == 1
    assert "missing" in capsys.readouterr().err
    assert __main__.main([*common, "--arch", "gfx"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit):
        __main__.main(["--out", str(copied)])


def test_lists_of_the_package_are_valid() -> None:
    assert "unified_attention" in lists.available()
    for name in lists.available():
        kernels, _ = lists.load(name)
        assert kernels.name == name
        for arch in ("gfx1100", "gfx1151", "gfx1201", "gfx942"):
            names = [variant.name for variant in kernels.variants(arch)]
            assert len(set(names)) == len(names)
            # The segmented backend is for RDNA.
            assert bool(names) == (name == "unified_attention" or arch != "gfx942")


def test_fp8_variants_are_for_gfx12_only() -> None:
    kernels, _ = lists.load("unified_attention")
    for arch, expected in (("gfx1100", 0), ("gfx1151", 0), ("gfx942", 0), ("gfx1201", 48)):
        names = [variant.name for variant in kernels.variants(arch)]
        assert sum("kvfp8" in name for name in names) == expected
        assert len(names) == 48 + expected


ASSEMBLY = """
\t.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx1201"
kernel:
\ts_load_b64 s[0:1], s[2:3], 0x0
.LBB0_1:                                ; outer
\ts_mov_b32 s0, 0
\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:11], v[12:15], v[0:7]
.LBB0_2:                                ; inner, the main loop
\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:11], v[12:15], v[0:7]
\tv_wmma_f32_16x16x16_f16 v[0:7], v[8:11], v[12:15], v[0:7]
\tv_swmmac_f32_16x16x32_f16 v[0:7], v[8:11], v[12:15], v16
\ts_cbranch_scc1 .LBB0_2
.LBB0_3:                                ; long, but without matrix instructions
\tv_add_f32_e32 v0, v1, v2
\tv_add_f32_e32 v0, v1, v2
\tv_add_f32_e32 v0, v1, v2
\tv_add_f32_e32 v0, v1, v2
\tv_add_f32_e32 v0, v1, v2
\ts_cbranch_vccnz .LBB0_3
\ts_cbranch_scc0 .LBB0_4
.LBB0_4:
\ts_endpgm
; codeLenInByte = 1234
; Occupancy: 9
\t.vgpr_count:     101
\t.sgpr_count:     57
\t.vgpr_spill_count: 3
\t.sgpr_spill_count: 4
\t.private_segment_fixed_size: 16
"""


def test_reading_assembly() -> None:
    use = read_resources(ASSEMBLY, lds_bytes=8192, num_warps=4, kv_tokens=16)
    assert (use.vgprs, use.sgprs, use.vgpr_spills, use.sgpr_spills) == (101, 57, 3, 4)
    assert (use.scratch_bytes, use.code_bytes, use.occupancy) == (16, 1234, 9)
    assert (use.matrix_instructions, use.loop_instructions, use.loop_matrix_instructions) == (
        4,
        4,
        3,
    )
    assert use.instructions_per_kv_token == 0.25
    assert read_resources(ASSEMBLY, lds_bytes=65536, num_warps=4, kv_tokens=0).occupancy == 2


def test_an_outer_loop_with_more_matrix_instructions_is_the_main_loop() -> None:
    text = ASSEMBLY.replace("s_cbranch_scc0 .LBB0_4", "s_cbranch_scc0 .LBB0_1")
    use = read_resources(text, lds_bytes=0, num_warps=4, kv_tokens=0)
    assert (use.loop_matrix_instructions, use.loop_instructions) == (4, 13)


def test_loops_without_matrix_instructions_and_no_loop() -> None:
    plain = ASSEMBLY.replace("v_wmma", "v_fma").replace("v_swmmac", "v_fma")
    use = read_resources(plain, lds_bytes=0, num_warps=4, kv_tokens=16)
    assert (use.matrix_instructions, use.loop_instructions) == (0, 6)
    straight = "\n".join(line for line in ASSEMBLY.splitlines() if "cbranch" not in line)
    use = read_resources(straight, lds_bytes=0, num_warps=4, kv_tokens=16)
    assert (use.loop_instructions, use.instructions_per_kv_token) == (0, None)


@pytest.mark.parametrize("missing", ["vgpr_count", "codeLenInByte", "Occupancy", "amdgcn_target"])
def test_assembly_of_an_unknown_form_is_refused(missing: str) -> None:
    with pytest.raises(AotError, match="assembly text"):
        read_resources(ASSEMBLY.replace(missing, "x"), lds_bytes=0, num_warps=4, kv_tokens=0)


@pytest.mark.parametrize(
    ("arch", "lds", "warps", "waves"),
    [
        ("gfx1201", 65536, 4, 2),
        ("gfx1201", 32768, 4, 4),
        ("gfx1100", 8192, 8, 32),
        ("gfx1151", 65536, 1, 1),
        ("gfx942", 65536, 4, 1),
        ("gfx950", 65536, 4, 2),
        ("gfx1201", 0, 4, 1024),
    ],
)
def test_occupancy_by_shared_memory(arch: str, lds: int, warps: int, waves: int) -> None:
    assert lds_occupancy(arch, lds, warps) == waves
