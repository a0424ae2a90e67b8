#!/usr/bin/env bash
# Every test, in two sessions beside each other: the whole runs, which go two at a time, and all other tests, one at a time. Alone, the
# second would leave one of two cores idle. Its output follows when both are done. Fails if either does, or started no real engine.
set -euo pipefail
cd "$(dirname "$0")/.."
whole_runs=(tests/e2e tests/faults tests/*/test_*_runs.py tests/test_preloaded.py)

log=$(mktemp)
pytest --require-engine-runs -p no:cacheprovider "${whole_runs[@]/#/--ignore=}" </dev/null >"$log" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null || true; rm -f "$log"' EXIT

failed=0
pytest --require-engine-runs "${whole_runs[@]}" || failed=$?
wait "$others" || failed=$?
cat "$log"
exit "$failed"
