#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# verify/python: tokens of demos/prepare.py and the trainers upon them, dumps written by numpy and torch, other people's dumps
# converted, seqpar_reference beside numpy, and, where torch is, other people's trainers and loops recorded, and the trainer whose
# steps the oracle judges: all of its tests and all of its mistakes with TEST_ALL=1, some of them otherwise.
cd "$(dirname "$0")/../.." || exit 1
. verify/support/rows.sh
oracle=build/seqpar-verify out=build/test_python
rm -rf $out; mkdir -p $out
export PYTHONPATH=verify/python PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
# run NAME PROGRAM ARGUMENTS...: prints "ok .." and "FAIL .." itself; a line of its own if it breaks off
run() {
    local name=$1; shift
    $python "$@" >"$out/$name.log" 2>&1; local code=$?
    while read -r word line; do
        case $word in
            ok) ok "$line" ;;
            FAIL) fail "${line%%:*}" "${line#*: }" ;;
            skip) skip "${line%%:*}" "${line#*: }" ;;
        esac
    done <"$out/$name.log"
    if [ $code -ne 0 ] && ! grep -q '^FAIL' "$out/$name.log"; then fail "$name" "exit code $code: $(tail -n 1 "$out/$name.log")"; fi
}

# ---- texts to tokens, and the trainers upon them ----
if ! python=$(ci/python_with.sh tokenizers jinja2); then
    skip python_prepare "no python3 here has tokenizers and jinja2"
else
    run prepare verify/python/test_prepare.py $out/prepare "${SEQPAR_DATA:-../shared/data}"
fi

if ! python=$(ci/python_with.sh numpy); then
    skip python "no python3 here has numpy"
    end
fi

# ---- dumps that numpy and torch write ----
cat >$out/dump.want <<'END'
0 right
0 right
1 wrong: shift_after_split
0
3 of the 28 excerpts of 4 tokens in /packed/rank0.safetensors, this dump has only
BF16 [3, 2] True
True True
[3, 5] [3] [3] [3, 2, 4] [3, 2] [2, 3, 2, 4]
0.ids
True True True []
rank 2 of 2, sp 1: rank is 0 to world - 1, and sp divides world
rank 0 of 3, sp 2: rank is 0 to world - 1, and sp divides world
micro-batch 1 of 1
what is label? a micro-batch has index, ids, positions, labels, logits, logp, ref_logp, cu_seqlens, boundaries, loss_sum, loss_count, weights, mean_logp, logits_lse
arrays of complex128 are not written; give one of bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64
{'part.grad.w': '3 6'}
accepted
part of grad.w: 3 elements from 4 on are none of 6
part of grad.w: 3 elements from -1 on are none of 6
part of grad.v: name a tensor of grad, param, after, m or v that is written
part of local.w: name a tensor of grad, param, after, m or v that is written
END
$python verify/python/test_dump.py $oracle $out/dump >$out/dump.got 2>&1
if cmp -s $out/dump.want $out/dump.got; then ok python_dump; else fail python_dump "$(diff $out/dump.want $out/dump.got | head -n 4 | tr '\n' ' ')"; fi

mkdir $out/dump_files
run dump_files verify/python/test_dump_files.py $out/dump_files

# ---- other people's dumps ----
mkdir $out/convert_pt $out/convert
run convert_pt verify/python/test_convert_pt.py $out/convert_pt
run convert verify/python/test_convert.py $oracle $out/convert

# ---- right values, against numpy's: once with torch where it is ----
mkdir $out/reference
python=$(ci/python_with.sh numpy torch) || python=$(ci/python_with.sh numpy)
run reference verify/python/test_reference.py $oracle $out/reference

# ---- other people's trainers, written down by seqpar_trainer ----
if ! python=$(ci/python_with.sh torch transformers trl datasets); then
    skip python_recorder "no python3 here has torch, transformers, trl and datasets"
else
    $python verify/frameworks/trl_sft.py >$out/recorder.log 2>$out/recorder.err
    said=$(awk -F'\t' 'NF == 6 { print $4 }' $out/recorder.log | tr '\n' ' ') # packages print, too
    if [ "$said" = "right right " ]; then ok python_recorder; else fail python_recorder "'$said'; $(tail -n 1 $out/recorder.err)"; fi
fi

if ! python=$(ci/python_with.sh torch transformers accelerate); then
    skip python_recorder_steps "no python3 here has torch, transformers and accelerate"
else
    run recorder_steps verify/python/test_recorder.py $oracle $out/recorder_steps
fi

if ! python=$(ci/python_with.sh torch transformers trl datasets); then
    skip python_recorder_trl "no python3 here has torch, transformers, trl and datasets"
else
    few="dpo dpo_swapped kto kto_own rm rm_margin grpo grpo_own grpo_std"
    run recorder_trl verify/python/test_recorder_trl.py $oracle $out/recorder_trl $([ -n "$TEST_ALL" ] || echo $few)
fi

if ! python=$(ci/python_with.sh numpy torch); then
    skip python_record "no python3 here has torch"
else
    run record verify/python/test_record.py $oracle $out/record
fi

# ---- models that transformers made ----
if ! python=$(ci/python_with.sh torch transformers); then
    skip python_families "no python3 here has torch and transformers"
else
    run families verify/python/test_families.py $oracle $out/families
    run family_steps verify/python/test_family_steps.py build/train_sft $out/family_steps
fi

# ---- the trainer ----
if ! python=$(ci/python_with.sh numpy torch); then
    skip python_trainer "no python3 here has torch"
    end
fi
some="attention losses adamw splits"
run trainer verify/python/test_trainer.py $([ -n "$TEST_ALL" ] || echo $some)
few="--seeds 1 --right 12 --mistakes over_sp shift_after_split mean_of_means stale_kv not_clipped positions_local"
[ -n "$TEST_ALL" ] && few="--seeds 1 --right 200"
$python verify/python/matrix.py $oracle $few >$out/matrix.log 2>&1; code=$?
if [ $code -eq 0 ] && grep -q 'accused: 0$' $out/matrix.log; then ok "python_matrix ($(grep -c '  fp32 ' $out/matrix.log) mistakes)"; else fail python_matrix "exit code $code: $(tail -n 3 $out/matrix.log | tr '\n' ' ')"; fi
end
