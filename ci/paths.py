"""Where things lie in this repository."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN_FILE = ROOT / "vllm-src" / "pin.toml"
SERIES_FILE = ROOT / "series"
PATCHES = ROOT / "patches"
AREAS_FILE = PATCHES / "areas.toml"
QUILTRC = ROOT / "ci" / "quiltrc"
SOURCES = ROOT / "vllm-src"
# build.sh says where the user stands; relative folders are meant from there.
CWD = Path(os.environ.get("HIPSTACK_CWD") or os.getcwd())
BUILD = (CWD / (os.environ.get("HIPSTACK_BUILD_DIR") or ROOT / "build")).resolve()
ENVS = (CWD / (os.environ.get("HIPSTACK_ENV_DIR") or BUILD)).resolve()
STANDIN = ROOT / "ci" / "aot" / "_fake_amdsmi"
DIST = ROOT / "dist"
