#!/usr/bin/env bash
# MT-Bench: every turn of MODEL's answers graded by JUDGE; see scripts/eval_bench.sh:
#   MODEL=moa/lite JUDGE=gpt-4o bash scripts/eval_mt_bench.sh --questions FILE --question_end 8
exec bash "$(dirname "$0")/eval_bench.sh" mt_bench "$@"
