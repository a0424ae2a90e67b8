#!/usr/bin/env bash
# The tool on both real engines, in one minute: a true finding, its fix, the attribution, and a report in demo/.
set -euo pipefail
cd "$(dirname "$0")/.."
SECONDS=0
exec 3>&1 # what the demo itself says, also where a command's output goes to a file

say() { printf '\n== %s\n' "$*" >&3; }

# expect CODE COMMAND...: shows the command, runs it, and ends the demo unless it exits with CODE.
expect() {
  local want=$1 got=0
  shift
  printf '$ %s\n' "$*" >&3
  "$@" || got=$?
  if ((got != want)); then
    echo "demo: the command above exited $got; $want was expected" >&2
    exit 1
  fi
  printf 'exit code %d, as expected\n' "$got" >&3
}

rm -rf demo
mkdir demo
say "a checkpoint for both engines: random weights, 2 layers, a vocabulary of 1100 that is no multiple of 128"
expect 0 python -m fixtures.make tiny-qwen3

probe=(rlmismatch probe --ckpt fixtures/tiny-qwen3 --trainer-tp 2 --rollout-tp 2)
say "1. both engines as they come, on 2 ranks each: Megatron's own loss counts the padded vocabulary rows, vLLM cuts them off"
expect 4 "${probe[@]}" --oracle off --out demo/as-they-come

say "2. the padded rows masked in the trainer too: comparable; which operations make the drift that is left?"
expect 0 "${probe[@]}" --vocab-padding-policy mask --attribute --out demo/masked

say "3. the same run as files; no engine starts for that"
expect 0 rlmismatch report demo/masked --format markdown >demo/report.md
expect 0 rlmismatch report demo/masked --format json >demo/report.json

printf '\nreports: demo/report.md, demo/report.json; captures and logs: demo/as-they-come, demo/masked; %d s\n' "$SECONDS"
