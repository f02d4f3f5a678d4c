#!/usr/bin/env bash
# Turn the pinned vLLM and this patch stack into a ROCm wheel.  See ./build.sh --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! command -v python3 >/dev/null; then
  echo "error: python3 is not installed (try: apt-get install -y python3 python3-venv git g++)" >&2
  exit 1
fi
# python3 -m looks into the current folder first, which may have a `ci` of its own.
export HIPSTACK_CWD=$PWD
cd "$root"
exec python3 -m ci.build "$@"
