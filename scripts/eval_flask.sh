#!/usr/bin/env bash
# FLASK: MODEL's answers scored by JUDGE, skill by skill; see scripts/eval_bench.sh:
#   MODEL=moa/lite JUDGE=gpt-4o bash scripts/eval_flask.sh --questions FILE --skills FILE --limit 8
exec bash "$(dirname "$0")/eval_bench.sh" flask "$@"
