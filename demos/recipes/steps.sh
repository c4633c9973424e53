# SPDX-License-Identifier: MIT OR Unlicense
# steps.sh - what the recipes share: steps that are done are not done again, and one that was killed goes on to the same bytes.
# Sourced by the recipes, which say what they read from the environment.
set -eu
fail() { echo "error: $*" >&2; exit 2; }
build=${BUILD:-$(cd "$(dirname "$0")/../../build" && pwd)}
[ -x "$build/generate" ] || fail "there is no $build/generate; type make demos, or give BUILD=folder"
for name in MODEL PROMPTS REWARD OUT; do
    [ -n "${!name:-}" ] || fail "$name is not set; the first lines of $0 say what it is"
done
# step NAME COMMAND...: once; NAME.done says that it ended. Its own words go into NAME.log.
step() {
    local name=$1; shift
    [ -e "$OUT/$name.done" ] && { echo "$name: done before"; return; }
    mkdir -p "$(dirname "$OUT/$name")"
    local code=0; "$@" >>"$OUT/$name.log" 2>&1 || code=$?
    [ $code = 0 ] || { echo "$name: exit code $code: $(tail -n 1 "$OUT/$name.log")" >&2; exit $code; }
    touch "$OUT/$name.done"
    echo "$name: $(tail -n 1 "$OUT/$name.log")"
}
# texts NAME MODEL OPTIONS...: OUT/NAME.jsonl, of the prompts of round $round
texts() {
    local name=$1 model=$2; shift 2
    step "$name" "$build/seqpar" generate --pretrain "$model" --dataset "$PROMPTS" --input_key "${KEY:-question}" --iter "$round" \
        --rollout_batch_size "${BATCH:-1024}" --output_path "$OUT/$name.jsonl" --resume $REWARD "$@" ${GENERATE:-} ${BOTH:-}
}
# train NAME TRAINER OPTIONS...: OUT/NAME is the model. Prompts in texts are in their form already.
train() {
    local name=$1 trainer=$2; shift 2
    step "$name" "$build/seqpar" "train_$trainer" --input_template '{}' --save_path "$OUT/$name" --load_checkpoint "$@" ${TRAIN:-} ${BOTH:-}
}
