#!/usr/bin/env bash
# Resolve locks/cpu.in and the engine's own lock, with the hashes of all files of each version. The
# local version suffix of torch's CPU build is dropped, so that the lock also installs where the
# plain version is the CPU build; the hash of that build is in more-hashes.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
resolve() {
  uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.11 \
    --override locks/left-out.txt --no-annotate --no-header --generate-hashes "$@"
}
finish() {
  sed 's/+cpu \\$/ \\/' "$1" | awk '
    NR == FNR { more[$1] = $2; next }
    { print }
    $1 in more { print "    --hash=sha256:" more[$1] " \\"; found[$1] }
    END { for (name in more) if (!(name in found)) { print name " is not resolved" > "/dev/stderr"; exit 1 } }
  ' locks/more-hashes.txt -
}
whole=$(mktemp)
engine=$(mktemp)
trap 'rm -f "$whole" "$engine"' EXIT
resolve "${@}" locks/cpu.in --output-file "$whole" >/dev/null
resolve batchrun/engine/engine-cpu.in --constraint <(grep -o '^[^ ]*==[^ ]*' "$whole") --output-file "$engine" >/dev/null
finish "$whole" > locks/cpu.txt
finish "$engine" > batchrun/engine/engine-cpu.txt
