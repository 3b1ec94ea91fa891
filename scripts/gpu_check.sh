#!/bin/sh
# Open cases on a real NVIDIA GPU, measured against planned and emulated peaks, in under four minutes.
#
#     cargo build --release && scripts/gpu_check.sh
#
# PYTHON names a Python with torch 2.9 or newer (a CUDA build) and transformers, VRAMLEDGER the binary. Leaves with 0 when
# it could run, whatever it found.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
vramledger=${VRAMLEDGER:-$root/target/release/vramledger}
if ! command -v "$python" >/dev/null; then
    echo "gpu_check: no \`$python\`: set PYTHON to a Python with torch and transformers" >&2
    exit 2
fi
if ! [ -x "$vramledger" ]; then
    echo "gpu_check: no \`$vramledger\`: build it with \`cargo build --release\`, or set VRAMLEDGER" >&2
    exit 2
fi
exec "$python" "$root/scripts/gpu_check.py" "$vramledger"
