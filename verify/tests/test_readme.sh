#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The README and the header's doc block are run: samples compiled, outputs compared, tables made anew.
cd "$(dirname "$0")/../.." || exit 1
out=build/test_readme
cc=${CC:-cc}
rm -rf $out; mkdir -p $out
passed=0 failed=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }

for page in README.md demos/README.md verify/pages/design.md; do
    if bash ci/readme.sh $page > $out/page.md && cmp -s $page $out/page.md; then ok "generated_$page"; else fail "generated_$page" "run make readme: $(diff $page $out/page.md | head -n 3 | tr '\n' ' ')"; fi
done
pages="README.md demos/README.md bench/README.md verify/pages/oracle.md verify/pages/design.md"

# The picture is the build's. 120 to 150 lines; what is shown fits 60 columns, the snippet 80.
build/picture > $out/picture.svg && cmp -s $out/picture.svg demos/picture.svg && ok readme_picture || fail readme_picture "run make readme"
lines=$(wc -l < README.md)
[ "$lines" -ge 120 ] && [ "$lines" -le 150 ] && ok "readme_length ($lines lines)" || fail readme_length "$lines lines"
wide=$(awk '/^```[a-z]+$/ { most = /c$/ ? 80 : 60; next } /^```$/ { most = most ? 0 : 60; next } most && length($0) > most { print NR }' README.md | paste -sd' ')
[ -z "$wide" ] && ok readme_width || fail readme_width "lines $wide are wider than 60 columns"

# the header's sample is the demo, and prints what the header says
awk '/^#if 0 \/\* SAMPLE \*\// { on = 1; next } /^#endif \/\* SAMPLE \*\// { exit } on' seqpar.h > $out/sample.c
if cmp -s $out/sample.c demos/01_ring.c; then ok header_sample_is_the_demo; else fail header_sample_is_the_demo "seqpar.h and demos/01_ring.c differ"; fi
awk '/^   SAMPLES:/ { sample = 1 } sample && /The program prints$/ { on = 1; next } on && /^   ===/ { exit } on && NF' seqpar.h | sed 's/^       //' > $out/sample.want
if $cc -std=gnu11 -O2 -I. $out/sample.c -o $out/sample -lm -lpthread 2>$out/sample.log && $out/sample > $out/sample.got && cmp -s $out/sample.want $out/sample.got; then ok header_sample_prints; else fail header_sample_prints "$(diff $out/sample.want $out/sample.got | head -n 4 | tr '\n' ' ')"; fi
[ "$(wc -l < demos/01_ring.c)" -le 100 ] && ok ring_demo_is_short || fail ring_demo_is_short "$(wc -l < demos/01_ring.c) lines"

# so is that of safetensors, and what it writes of a step is what the oracle takes
section() { awk -v title="$1" '$0 == title { on = 1; next } on && /^[A-Z]/ { exit } on' seqpar_safetensors.h | sed 's/^    //'; }
section SAMPLE | awk '/^prints$/ { exit } 1' > $out/file.c
section SAMPLE | awk 'on && NF; /^prints$/ { on = 1 }' > $out/file.want
if $cc -std=gnu11 -O1 -I. $out/file.c -o $out/file -lcjson -lm -lpthread 2>$out/file.log && (cd $out && ./file) > $out/file.got && cmp -s $out/file.want $out/file.got; then ok file_sample_prints; else fail file_sample_prints "$(head -n 1 $out/file.log) $(diff $out/file.want $out/file.got | head -n 2 | tr '\n' ' ')"; fi
section "A DUMP" | awk '/^static/ { on = 1 } on' | sed '/^$/d' > $out/dump_rank.c
cat > $out/dump.c <<'C'
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include <stdio.h>
#include "dump_rank.c"
/* Nine tokens, two documents, a prompt; rank 0 has five. With an argument labels are split first and then shifted. */
int main(int argc, char **argv) {
    static const int64_t index[] = {0, 1, 2, 3, 4, 5, 6, 7, 8}, ids[] = {11, 12, 0, 14, 15, 16, 17, 18, 19}, cu_seqlens[] = {0, 7, 9};
    static const double logp[] = {-1, -2, -1.5, -0.25, -3, -0.5, 0, -0.75, 0};
    int64_t labels[] = {-100, 0, 14, 15, 16, 17, -100, 19, -100};
    double loss = 8.0 / 6;
    if (argc > 1) labels[4] = -100, loss = 5.0 / 5;
    (void)argv;
    return dump_rank("rank0.safetensors", "0", 5, index, ids, labels, logp, cu_seqlens, 2, &loss) ||
           dump_rank("rank1.safetensors", "1", 4, index + 5, ids + 5, labels + 5, logp + 5, cu_seqlens, 2, &loss);
}
C
mkdir -p $out/dumped
if [ "$(wc -l < $out/dump_rank.c)" -le 20 ] && $cc -std=gnu11 -O1 -Wall -Wextra -Wno-missing-field-initializers -Werror -I. -I$out $out/dump.c -o $out/dump -lcjson -lm -lpthread 2>$out/dump.log && (cd $out/dumped && ../dump) && [[ "$(build/seqpar-verify ver $out/dumped | head -n 1)" = "right: "*"; gradients of parameters were NOT judged"* ]] && (cd $out/dumped && ../dump split) && [ "$(build/seqpar-verify ver $out/dumped | head -n 1)" = "wrong: shift_after_split" ]; then ok "file_dumps ($(wc -l < $out/dump_rank.c) lines)"; else fail file_dumps "$(wc -l < $out/dump_rank.c) lines; $(head -n 1 $out/dump.log) $(build/seqpar-verify ver $out/dumped 2>&1 | head -n 2 | tr '\n' ' ')"; fi

# outputs shown are those of the programs, digit for digit: programs show as many as all builds have in common
shown() { awk -v program="<!-- output: $1 -->" '$0 == program { on = 1; next } on && /^```$/ { if (++fences == 2) exit; next } on' README.md; }
program=build/06_curves_lie # lines of it
if $program > $out/shown.txt && [ "$(shown $program | grep -cxFf $out/shown.txt)" = "$(shown $program | wc -l)" ] && [ "$(shown $program | wc -l)" -ge 4 ]; then ok readme_shows_06_curves_lie; else fail readme_shows_06_curves_lie "$(shown $program | grep -vxFf $out/shown.txt | head -n 3 | tr '\n' ' ')"; fi
program=build/verify_sp # some of its lines: all that are shown are there, the head and six more at least
# Of all rows every cell is equal but that of 2D on 3 ranks, which there is not. Rows: loss and gradient of every objective
# and of experts and adapters, logits, step and two first DPO losses; and every gradient once more, packed otherwise.
lines_of() { awk -v head="#define $1(" 'index($0, head) == 1 { on = 1; next } on && /^    X\(/ { n++ } on && !/\\$/ { print n; exit }' "$2"; }
want_rows=$((2 * ($(lines_of OBJECTIVES_EACH verify/support/run_objective.h) + $(lines_of SEQPAR_PREFERENCES seqpar.h) + 2) + 4))
if $program > $out/shown.txt && [ "$(shown $program | grep -cxFf $out/shown.txt)" = "$(shown $program | wc -l)" ] && [ "$(shown $program | wc -l)" -ge 6 ] && [ "$(grep -cE ' +2 3 4 8  2 3 4 8  2 3 4 8  2 - 4 8$' $out/shown.txt)" = "$want_rows" ] && [ $((2 * $(grep -cE ' yes   121 260 720 +2 3 4$' $out/shown.txt) + 4)) = "$want_rows" ]; then ok readme_shows_verify_sp; else fail readme_shows_verify_sp "$(shown $program | grep -vxFf $out/shown.txt | head -n 3 | tr '\n' ' ')"; fi
program="build/seqpar-verify law --norm --got 2.0249 --want 8.0997 --sp 4"
$program > $out/shown.txt
shown "$program" > $out/law.txt
if [ "$(head -n 1 $out/law.txt)" = "\$ ${program#build/}" ] && [ "$(tail -n +2 $out/law.txt | grep -cxFf $out/shown.txt)" = 3 ] && [ "$(sed -n 2p $out/law.txt)" = "$(head -n 1 $out/shown.txt)" ] && [ "$(wc -l < $out/law.txt)" = 4 ]; then ok readme_shows_law; else fail readme_shows_law "$(shown "$program" | grep -vxFf $out/shown.txt | head -n 3 | tr '\n' ' ')"; fi

build/03_own_kernel > $out/own.txt && tail -n 1 $out/own.txt | grep -q ': yes$' && ok own_kernel_demo || fail own_kernel_demo "$(tail -n 1 $out/own.txt)"
build/07_own_attention > $out/attend.txt && tail -n 1 $out/attend.txt | grep -q ': yes$' && ok own_attention_demo || fail own_attention_demo "$(tail -n 1 $out/attend.txt)"
build/08_own_trainer > $out/trainer.txt && tail -n 1 $out/trainer.txt | grep -q ': yes$' && ok own_trainer_demo || fail own_trainer_demo "$(tail -n 1 $out/trainer.txt)"
build/04_own_transport > $out/processes.txt && tail -n 1 $out/processes.txt | grep -q ': yes$' && ok own_transport_demo || fail own_transport_demo "$(tail -n 1 $out/processes.txt)"


[ "$(awk '/^static seqpar_status rank_main/,/^}/' demos/05_attention.c | wc -l)" -le 40 ] && build/05_attention > $out/attention.txt && ok attention_demo || fail attention_demo "$(tail -n 1 $out/attention.txt)"

planted=$(grep -E '^[0-9]+' verify/faults.tsv | cut -f1 | sort -u | wc -l)
tr "\n" " " < verify/pages/design.md | grep -q "plants $planted known" && ok "readme_counts_faults ($planted)" || fail readme_counts_faults "verify/faults.tsv has $planted"

# what the oracle is said to say
law=$(tr '\n' ' ' < verify/pages/oracle.md | grep -oE '`seqpar-verify law [^`]*` says `[^`]*`')
if [ "$(build/$(echo "$law" | cut -d'`' -f2) | head -n 1)" = "$(echo "$law" | cut -d'`' -f4)" ] && [ -n "$law" ]; then ok readme_law; else fail readme_law "$law"; fi

# the story in PyTorch, where that is: the mistake is named, and its fix is right
python=$(ci/python_with.sh torch numpy || echo "${PYTHON:-python3}") skipped=0
mkdir -p $out/story
awk '$0 == "<!-- story -->" { on = 1; next } on && /^```/ { if (++fences == 2) exit; next } on' verify/pages/oracle.md > $out/story/train.py
awk '$0 == "<!-- story says -->" { on = 1; next } on && /^```/ { if (++fences == 2) exit; next } on' verify/pages/oracle.md > $out/story/says.txt
fix=$(sed -nE 's/.*after the fix, `(labels = [^`]*)`.*/\1/p' verify/pages/oracle.md)
sed "s/^labels = .*/$fix/" $out/story/train.py > $out/story/fixed.py
if $python -c 'import torch, numpy' 2>/dev/null; then
    ranks() { (cd $out/story && PYTHONPATH=$OLDPWD/verify/python OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 $OLDPWD/ci/limit.sh 600 $python -m torch.distributed.run --nproc_per_node 2 "$1" >"$1.log" 2>&1); }
    ranks train.py; build/seqpar-verify ver $out/story/dump > $out/story/got.txt
    if [ -s $out/story/says.txt ] && [ "$(grep -cxFf $out/story/got.txt $out/story/says.txt)" = "$(wc -l < $out/story/says.txt)" ] && [ "$(head -n 1 $out/story/got.txt)" = "$(head -n 1 $out/story/says.txt)" ]; then ok readme_story; else fail readme_story "$(grep -vxFf $out/story/got.txt $out/story/says.txt | head -n 2 | tr '\n' ' ') $(tail -n 1 $out/story/train.py.log)"; fi
    ranks fixed.py
    if [ -n "$fix" ] && build/seqpar-verify ver $out/story/dump | tr -s ' \n' ' ' | grep -q '^right: .*; gradients of parameters were NOT judged: give --want or --model'; then ok readme_story_fixed; else fail readme_story_fixed "$(build/seqpar-verify ver $out/story/dump | head -n 1)"; fi
else echo "skip readme_story: $python has no torch"; skipped=1; fi

# every option the pages name is known, here or to torchrun, mpirun, srun and pkg-config
{ for trainer in sft dpo kto kd prm rm ppo; do build/train_$trainer --help; done; build/generate --help; cat bench/bench.h; for verb in law ver gen run mutants list; do build/seqpar-verify $verb --help; done; build/seqpar-verify --help; build/seqpar --help; grep -oE -- '"--[a-z0-9_]+' demos/prepare.py | tr -d '"'; echo "--nproc_per_node --hostfile --mpi --mca --cflags --libs "; } > $out/help.txt
unknown=$(cat $pages | grep -oE -- '--[a-z][a-z0-9_]+' | sort -u | while read -r o; do grep -qE -- "$o( |$)" $out/help.txt || [ "$o" = --help ] || echo "$o"; done)
[ -z "$unknown" ] && ok readme_options || fail readme_options "not in --help: $unknown"
for f in $(grep -ohE '`(demos|verify|ci|bench)/[a-zA-Z0-9_./]+`' $pages | tr -d '`' | sort -u); do [ -e "$f" ] || missing="$missing $f"; done
[ -z "$missing" ] && ok readme_files || fail readme_files "not there:$missing"

# one version, and its names: those in the table of changes are declared, and no other
version=$(sed -nE 's/^#define SEQPAR_VERSION +"(.*)"/\1/p' seqpar.h)
parts=$(sed -nE 's/^#define SEQPAR_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)/\2/p' seqpar.h | paste -sd.)
first=$(for h in seqpar*.h verify/seqpar_check.h; do sed -nE "1s/^\/\* ${h##*/} - v([0-9.]+) - .*/\1/p" $h; done | sort -u)
[ -n "$version" ] && [ "$parts" = "$version" ] && [ "$first" = "$version" ] && [ "$(sed -nE 's/^## ([^ ]*).*/\1/p' CHANGES.md | head -n 1)" = "$version" ] && ok "one_version ($version)" || fail one_version "seqpar.h has $version and $parts, the first lines $first, CHANGES.md $(sed -n 's/^## //p' CHANGES.md | head -n 1)"
unknown=$(awk -F'|' '/^## /{n++} n == 1 { print (NF > 3 ? $3 : $0) }' CHANGES.md | sed -E 's#`[^`]*/[^`]*`##g' | grep -oE '\b(seqpar|SEQPAR)_[a-zA-Z0-9_]+' | sort -u | grep -v '_$' | while read -r name; do grep -qwF -- "$name" seqpar*.h seqpar_cuda.cu || [ -d "verify/python/$name" ] || [ -e "verify/python/$name.py" ] || echo "$name"; done)
[ -z "$unknown" ] && ok changes_names || fail changes_names "CHANGES.md names what is in no header and no Python module: $unknown"
unknown=$(grep -oE -- '--[a-z][a-z0-9_]+' CHANGES.md | sort -u | while read -r o; do grep -qE -- "$o( |$)" $out/help.txt || echo "$o"; done)
[ -z "$unknown" ] && ok changes_options || fail changes_options "not in --help: $unknown"

# the main job
number() { sed -nE "s/.*\"$1\": ([^,]*),?/\1/p" build/demo/summary.json; }
if make --no-print-directory demo > $out/demo.log 2>&1; then
    want=$(grep -A4 'ends with' README.md | grep -E '^(identical bits|first DPO loss)')
    [ "$(tail -n 2 $out/demo.log)" = "$want" ] && ok demo_last_lines || fail demo_last_lines "$(tail -n 2 $out/demo.log)"
    speeds=$(awk '/^ +tokens\/s   processor time a token$/ { rows = 2; next } rows-- > 0 && NF == 5 && $3 > 0 && $4 > 0 { n++ } END { print n + 0 }' $out/demo.log)
    [ "$speeds" = 2 ] && grep -q "^4 ranks share the $(getconf _NPROCESSORS_ONLN) cores" $out/demo.log && ok demo_speed || fail demo_speed "$(grep -A 4 tokens/s $out/demo.log | tail -n 5 | tr '\n' ' ')"
    [ "$(number dpo_first_loss_is_ln2_bitwise)" = true ] && ok demo_dpo_first_loss || fail demo_dpo_first_loss "$(number dpo_first_loss)"
    if awk "BEGIN { exit !($(number loss_last) <= 0.35 * $(number loss_first) && $(number steps) >= 100 && $(number sp) == 4) }"; then ok "demo_learns ($(number loss_first) -> $(number loss_last))"; else fail demo_learns "$(tr -d '\n' < build/demo/summary.json)"; fi
    [ "$(number loss_bits_equal)$(number param_bits_equal)" = truetrue ] && ok demo_bits || fail demo_bits "$(tr -d '\n' < build/demo/summary.json)"
    [ -f build/demo/sp1/model.safetensors ] && [ -f build/demo/sp4/model.safetensors ] && grep -q '</svg>' build/demo/loss.svg && ok demo_files || fail demo_files "a file is missing under build/demo"
else fail demo "$(tail -n 2 $out/demo.log | tr '\n' ' ')"; fi

if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ $failed -eq 0 ]
