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
BUILD = Path(os.environ.get("HIPSTACK_BUILD_DIR") or ROOT / "build")
DIST = ROOT / "dist"
