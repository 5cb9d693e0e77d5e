#!/usr/bin/env bash
# Resolve locks/cpu.in and the engine's own lock. The local version suffix of torch's CPU build is
# dropped, so that the lock also installs where the plain version is the CPU build.
set -euo pipefail
cd "$(dirname "$0")/.."
resolve() {
  uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.11 \
    --override locks/left-out.txt --no-annotate --no-header "$@"
}
whole=$(mktemp)
trap 'rm -f "$whole"' EXIT
resolve locks/cpu.in --output-file "$whole" >/dev/null
resolve batchrun/engine/engine-cpu.in --constraint "$whole" | sed 's/+cpu$//' > batchrun/engine/engine-cpu.txt
sed 's/+cpu$//' "$whole" > locks/cpu.txt
