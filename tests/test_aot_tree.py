"""ci.aot on a real vLLM tree: the lists compile, and compile what the engine would launch.

Needs an environment that can import vLLM; the tree is the pristine pin.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from ci import check, pin
from ci.aot import Manifest, compile_list, verify_manifest

STAND_IN = Path(__file__).parent.parent / "ci/aot/_fake_amdsmi/amdsmi/__init__.py"
NAMES = ("decode-bf16-d64-g4", "decode-bf16-d64-g4-w128", "multi-bf16-d64-g4")

SMOKE = f"""
from dataclasses import replace
from ci.aot.lists.unified_attention import LIST as FULL

LIST = replace(
    FULL,
    name="smoke",
    variants=lambda arch: [v for v in FULL.variants(arch) if v.name in {NAMES!r}],
)
"""

# The same variants, launched by the attention layer's own code instead of the list's.
ENGINE = f"""
import importlib
from dataclasses import replace
from types import SimpleNamespace
from ci.aot.lists import unified_attention as full


def launch(module, variant, arch):
    torch = importlib.import_module("torch")
    backend = importlib.import_module("vllm.v1.attention.backends.triton_attn")

    def empty(*shape, kind=torch.int32):
        return torch.empty(shape, dtype=kind, device="meta")

    params = variant.params
    size, kv_heads = params["head_size"], full.KV_HEADS
    heads = params["group"] * kv_heads
    query_tokens = 1 if params["decode"] else 5
    tokens = full.BATCH * query_tokens
    implementation = backend.TritonAttentionImpl(
        num_heads=heads,
        head_size=size,
        scale=size**-0.5,
        num_kv_heads=kv_heads,
        alibi_slopes=None,
        sliding_window=params["window"],
        kv_cache_dtype="auto",
    )
    builder = SimpleNamespace(threshold=backend.MIN_LAUNCH_GRID_SIZE_2D // kv_heads)
    segments = backend.NUM_PAR_SOFTMAX_SEGMENTS
    parts = (builder.threshold, heads, segments)
    metadata = backend.TritonAttentionMetadata(
        num_actual_tokens=tokens,
        max_query_len=query_tokens,
        query_start_loc=empty(full.BATCH + 1),
        max_seq_len=4096,
        seq_lens=empty(full.BATCH),
        block_table=empty(full.BATCH, 256),
        slot_mapping=empty(tokens, kind=torch.int64),
        seq_threshold_3D=builder.threshold,
        num_par_softmax_segments=segments,
        softmax_segm_output=empty(*parts, size, kind=torch.float32),
        softmax_segm_max=empty(*parts, kind=torch.float32),
        softmax_segm_expsum=empty(*parts, kind=torch.float32),
        causal=True,
        use_cascade=False,
        common_prefix_len=0,
        cu_prefix_query_lens=None,
        prefix_kv_lens=None,
        suffix_kv_lens=None,
    )
    one = empty(kind=torch.float32)
    layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    half = torch.bfloat16
    qkv = empty(tokens, (heads + 2 * kv_heads) * size, kind=half)
    query, key, value = (
        part.view(tokens, -1, size)
        for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    )
    cache = empty(999, kv_heads, full.PAGE, 2 * size, kind=half)
    output = empty(tokens, heads, size, kind=half)
    implementation.forward(layer, query, key, value, cache, metadata, output)


LIST = replace(
    full.LIST,
    name="engine",
    variants=lambda arch: [v for v in full.variants(arch) if v.name in {NAMES!r}],
    launch=launch,
)
"""


@pytest.fixture(scope="module")
def tree(sdist: Path) -> Path:
    pytest.importorskip("triton", reason="the AMD compiler comes with triton")
    return check.pristine(pin.load(), str(sdist))


@pytest.fixture(scope="module")
def made(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("tree")
    (folder / "smoke.py").write_text(SMOKE)
    (folder / "engine.py").write_text(ENGINE)
    before = {path for path in tree.rglob("*") if ".git" not in path.parts}
    manifest = compile_list(
        tree,
        [str(folder / "smoke.py"), str(folder / "engine.py")],
        ["gfx1201", "gfx1100"],
        folder / "out",
        cache=folder / "cache",
    )
    assert verify_manifest(folder / "out") == []
    # The tree is only read.
    assert {path for path in tree.rglob("*") if ".git" not in path.parts} == before
    return manifest


def test_every_object_is_what_the_attention_layer_launches(made: Manifest) -> None:
    for item in made.objects:
        names = {name.partition("/")[2] for name in item.variants}
        assert {name.partition("/")[0] for name in item.variants} == {"engine", "smoke"}
        assert set(item.variants) == {
            f"{which}/{n}" for which in ("engine", "smoke") for n in names
        }
    for arch in made.arches:
        kernels = sorted(item.kernel for item in made.objects if item.arch == arch)
        assert kernels == ["kernel_unified_attention"] * 3 + ["reduce_segments"]


def test_attention_kernels_use_the_matrix_units_and_do_not_spill(made: Manifest) -> None:
    for item in made.objects:
        use = item.resources
        assert (use.vgpr_spills, use.scratch_bytes) == (0, 0)
        if item.kernel == "kernel_unified_attention":
            assert use.matrix_instructions > 0
            assert use.loop_matrix_instructions > 0
            assert use.loop_kv_tokens == (16 if item.constexprs["IS_3D"] else 32)
            assert 5 < (use.instructions_per_kv_token or 0) < 60


def imported_from_amdsmi(tree: Path) -> set[str]:
    names = set()
    for file in ("vllm/platforms/__init__.py", "vllm/platforms/rocm.py"):
        for node in ast.walk(ast.parse((tree / file).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "amdsmi":
                names |= {alias.name for alias in node.names}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names |= {node.attr} if node.value.id == "amdsmi" else set()
    return names


def test_the_stand_in_has_just_what_vllm_asks_for(tree: Path) -> None:
    defined = {
        node.name
        for node in ast.parse(STAND_IN.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }
    assert imported_from_amdsmi(tree) == defined


def test_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("amdsmi_stand_in", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    assert "amdsmi_stand_in" not in sys.modules

    monkeypatch.delenv("FAKE_GFX", raising=False)
    assert library.amdsmi_get_processor_handles() == []
    with pytest.raises(library.AmdSmiException):
        library.amdsmi_get_gpu_asic_info(0)

    monkeypatch.setenv("FAKE_GFX", "gfx1151")
    monkeypatch.setenv("FAKE_VRAM_GIB", "96")
    monkeypatch.setenv("FAKE_GPU_COUNT", "2")
    library.amdsmi_init()
    assert library.amdsmi_get_processor_handles() == [0, 1]
    info = library.amdsmi_get_gpu_asic_info(1)
    assert (info["target_graphics_version"], info["device_id"]) == ("gfx1151", "0x1586")
    vram = library.AmdSmiMemoryType.VRAM
    assert library.amdsmi_get_gpu_memory_total(0, vram) == 96 << 30
    uuids = {library.amdsmi_get_gpu_device_uuid(handle) for handle in (0, 1)}
    assert len(uuids) == 2
    assert library.amdsmi_topo_get_link_type(0, 1) == {"hops": 2, "type": 1}
    assert library.amdsmi_topo_get_numa_node_number(0) == 0
    with pytest.raises(library.AmdSmiException):
        library.amdsmi_get_gpu_device_uuid(2)
    library.amdsmi_shut_down()
