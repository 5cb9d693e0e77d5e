#!/usr/bin/env bash
# Resolve locks/cpu.in, the engine's own lock and those of fleets and of others' routers, with the
# hashes of all files of each version. The
# local version suffix of torch's CPU build is dropped, so that the lock also installs where the
# plain version is the CPU build; only-hashes.txt has the hash of the one file that may be taken.
set -euo pipefail
cd "$(dirname "$0")/.."
resolve() {
  uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.11 \
    --override locks/left-out.txt --no-annotate --no-header --generate-hashes "$@"
}
finish() {
  sed 's/+cpu \\$/ \\/' "$1" | awk '
    NR == FNR { only[$1] = $2; next }
    /^[^ ]/ { is_left_out = 0 }
    is_left_out { next }
    { print }
    $1 in only { print "    --hash=sha256:" only[$1]; found[$1]; is_left_out = 1 }
    END { for (name in only) if (!(name in found)) { print name " is not resolved" > "/dev/stderr"; exit 1 } }
  ' locks/only-hashes.txt -
}
# Leaves out what another lock has in the same version.
beyond() {
  awk '
    /^[^ ]/ { is_left_out = NR != FNR && $1 in known; if (NR == FNR) known[$1] = 1 }
    NR != FNR && !is_left_out { print }
  ' "$1" "$2"
}
whole=$(mktemp)
engine=$(mktemp)
ray=$(mktemp)
trap 'rm -f "$whole" "$engine" "$ray"' EXIT
resolve "${@}" locks/cpu.in --output-file "$whole" >/dev/null
resolve batchrun/engine/engine-cpu.in --constraint <(grep -o '^[^ ]*==[^ ]*' "$whole") --output-file "$engine" >/dev/null
resolve locks/rivals.in --output-file locks/rivals.txt >/dev/null
resolve locks/ray.in --constraint <(grep -o '^[^ ]*==[^ ]*' "$whole") --output-file "$ray" >/dev/null
finish "$whole" > locks/cpu.txt
beyond locks/cpu.txt "$ray" > locks/ray.txt
finish "$engine" > batchrun/engine/engine-cpu.txt
