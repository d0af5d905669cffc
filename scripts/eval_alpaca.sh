#!/usr/bin/env bash
# AlpacaEval 2 from answers to win rate: MODEL and REFERENCE answer, JUDGE compares, in both orders:
#   MODEL=moa/lite REFERENCE=gpt4.json JUDGE=gpt-4o QUESTIONS=alpaca_eval.json bash scripts/eval_alpaca.sh
# All questions, up to LIMIT (805); length-controlled rates need 100 or more. For a quick look: LIMIT=8.
# Without settings: our own 30 questions, a mixture of the shipped experts against their base, which judges
# too and is far too small for it. REFERENCE may be a file of answers. Finished steps are skipped;
# arguments go to the model's generate, READING=text is for judges without log probabilities.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
model=${MODEL:-moa/local} reference=${REFERENCE:-local/base} judge=${JUDGE:-local/base}
out=${OUT:-outputs/alpaca_eval}
alpaca() { "$python" -m swarm.judge alpaca_eval "$@"; }
file() { echo "$out/${1//[\/:]/_}.json"; }
answer() {
    alpaca generate --model "$1" --output "$(file "$1")" --limit "${LIMIT:-805}" \
        --questions "${QUESTIONS:-data/questions/alpaca_eval.json}" "${@:2}"
}
answer "$model" "$@"
if [ ! -f "$reference" ]; then
    answer "$reference"
    reference=$(file "$reference")
fi
alpaca judge --outputs "$(file "$model")" --reference "$reference" --judge "$judge" \
    --reading "${READING:-logprobs}" --out "$out/judged"
