"""Built for gfx1201, installed elsewhere, started: nothing compiles.

The tree is the pin with the series; the layer that is started is vLLM's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci import check, patches, paths, pin, tree
from ci.aot import AotError, install_into
from ci.aot.build import compile_list
from ci.aot.lists import segmented_attention
from ci.aot.models import MODELS, Model, from_argument

STAND_IN = paths.STANDIN
LIST = """
from ci.aot.lists import segmented_attention as full

LIST = full.kernel_list("one", [m for m in full.MODELS if m.name == "llama-3.2-1b"])
"""


@pytest.fixture(scope="module")
def patched(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched tree; HIPSTACK_TEST_TREE names one that is there already."""
    pytest.importorskip("triton", reason="the AMD compiler comes with triton")
    if given := os.environ.get("HIPSTACK_TEST_TREE"):
        return Path(given)
    series = patches.load()
    if "attention/prebuilt-kernels" not in series.names:
        pytest.skip("the series lacks attention/prebuilt-kernels")
    base = check.pristine(pin.load(), str(sdist))
    work = tmp_path_factory.mktemp("patched")
    shutil.copytree(base, work / "tree", symlinks=True)
    tree.apply(work / "tree", series, work / "patches")
    return work / "tree"


@pytest.fixture(scope="module")
def made(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "one.py").write_text(LIST)
    # The whole job compiles the same kernels of the same sources: one Triton cache for both.
    cache = paths.BUILD / "triton-cache"
    compile_list(patched, [str(folder / "one.py")], ["gfx1201"], folder / "out", cache=cache)
    return folder / "out"


class Installed:
    """A package in a folder of its own, with an empty Triton cache."""

    def __init__(self, folder: Path, patched: Path, made: Path) -> None:
        self.folder = folder
        self.package = folder / "site" / "vllm"
        skipped = shutil.ignore_patterns("__pycache__", "*.cu", "*.json.gz")
        shutil.copytree(patched / "vllm", self.package, ignore=skipped)
        self.aot = install_into(self.package, made)
        self.fresh_cache()

    def fresh_cache(self) -> None:
        self.cache = self.folder / "cache"
        shutil.rmtree(self.cache, ignore_errors=True)

    def start(self, **environment: str) -> dict[str, int]:
        info = self.folder / "site" / "vllm-0.0.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0+t\n")
        # With bytecode kept, a later start is spared compiling all of vLLM again.
        dropped = ("TRITON_", "VLLM_", "PYTHONDONTWRITEBYTECODE")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        done = subprocess.run(
            [sys.executable, str(paths.ROOT / "tests" / "start_layer.py"), "gfx1201"],
            env={
                **kept,
                "PYTHONPATH": os.pathsep.join(
                    map(str, (self.folder / "site", STAND_IN, paths.ROOT))
                ),
                "FAKE_GFX": "gfx1201",
                "HIP_VISIBLE_DEVICES": "",
                "VLLM_PLUGINS": "",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(self.cache),
                "HF_HUB_OFFLINE": "1",
                **environment,
            },
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        self.log = done.stdout + done.stderr
        result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return result

    @contextlib.contextmanager
    def changed(self, path: Path, data: bytes) -> Iterator[None]:
        """Start afresh with another content of one file."""
        before = path.read_bytes()
        self.fresh_cache()
        path.write_bytes(data)
        try:
            yield
        finally:
            path.write_bytes(before)


@pytest.fixture(scope="module")
def installed(patched: Path, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), patched, made)


@pytest.fixture(scope="module")
def cold(installed: Installed) -> dict[str, int]:
    """What the first start with an empty cache counts."""
    counted = installed.start()
    assert "put into the Triton cache, 0 were there" in installed.log
    return counted


@pytest.mark.build
def test_a_listed_model_compiles_nothing(installed: Installed, cold: dict[str, int]) -> None:
    assert cold["compiled"] == 0
    assert cold["found"] >= 10
    assert installed.start() == cold
    assert "Prebuilt kernels: 0 put into the Triton cache" in installed.log


@pytest.mark.build
def test_a_changed_manifest_serves_nothing(installed: Installed, cold: dict[str, int]) -> None:
    path = installed.aot / "manifest.json"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    with installed.changed(path, bytes(data)):
        assert installed.start() == {"compiled": cold["found"], "found": 0}
    assert "Prebuilt kernels are not used: " in installed.log


@pytest.mark.build
def test_changed_sources_all_compile(installed: Installed, cold: dict[str, int]) -> None:
    path = installed.package / "v1" / "attention" / "ops" / "segmented_attention.py"
    line = b"# A line more: Triton takes the line of a kernel as part of its source.\n"
    with installed.changed(path, line + path.read_bytes()):
        assert installed.start() == {"compiled": cold["found"], "found": 0}
    assert "ignored: the kernel's source has changed" in installed.log


CONFIGS = {
    "llama": (
        {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
         "hidden_size": 4096},
        Model("llama", 32, 8, 128),
    ),
    "gemma": (
        {"model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "sliding_window": 1024,
            "layer_types": ["sliding_attention", "full_attention"]}},
        Model("gemma", 8, 4, 256, windows=(0, 1024), normed=True),
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 64, "sliding_window": 128},
        Model("gpt-oss", 64, 8, 64, windows=(0, 128), sinks=True),
    ),
    "mistral": (
        {"model_type": "mistral", "num_attention_heads": 32, "num_key_value_heads": 8,
         "hidden_size": 4096, "sliding_window": 4096, "layer_types": ["sliding_attention"]},
        Model("mistral", 32, 8, 128, windows=(4096,)),
    ),
    "qwen": (
        {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "sliding_window": 9, "use_sliding_window": False},
        Model("qwen", 16, 8, 128, normed=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_becomes_a_model(tmp_path: Path, name: str) -> None:
    config, model = CONFIGS[name]
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert from_argument(f"{name}/config.json", tmp_path) == model
    more = from_argument(f"{name}/config.json:tp=1,2:kv=auto,fp8:page=16,1056", tmp_path)
    assert (more.tensor_parallel, more.pages) == ((1, 2), (16, 1056))
    assert more.kv_dtypes == ("auto", "fp8")
    # As build.sh writes it into a list file.
    assert eval(repr(more)) == more


@pytest.mark.parametrize(
    "options", ["tp=0", "tp=3", "kv=int4", "page=17", "page=", "x=1", "tp", "seqs=4"]
)
def test_a_bad_option_is_named(tmp_path: Path, options: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"][0]))
    with pytest.raises(AotError):
        from_argument(f"config.json:{options}", tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"num_attention_heads": 0, "head_dim": 1}',
             '{"num_attention_heads": 7, "num_key_value_heads": 2, "head_dim": 64}']
)  # fmt: skip
def test_another_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(AotError, match=r"config\.json"):
        from_argument("config.json", tmp_path)
    with pytest.raises(AotError, match="No such file"):
        from_argument("nowhere/config.json", tmp_path)


def test_the_tracked_models() -> None:
    """Names tell them apart, fp8 is where the hardware has it, other GPUs get nothing."""
    assert len({model.name for model in MODELS}) == len(MODELS)
    for wanted in ("qwen3-", "qwen3.5", "llama", "gemma", "gpt-oss", "phi"):
        assert any(model.name.startswith(wanted) for model in MODELS)
    fast = segmented_attention.LIST.variants("gfx1201")
    slow = segmented_attention.LIST.variants("gfx1100")
    assert {v.name for v in fast} - {v.name for v in slow} == {
        v.name for v in fast if v.params["kv_dtype"] == "fp8"
    }
    assert segmented_attention.LIST.variants("gfx942") == []
    for variant in fast:
        assert variant.params["heads"] % variant.params["kv_heads"] == 0
