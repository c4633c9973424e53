#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# A page (README.md, demos/README.md, verify/pages/design.md) with its generated parts made anew, to stdout. `make readme` puts
# them in place; verify/tests/test_readme.sh compares.
cd "$(dirname "$0")/.." || exit 1
chapters() {
    printf '\n| chapter of `seqpar.h` | what | lines, about | how it is checked |\n|---|---|---:|---|\n'
    awk '
        /^   >>[a-z]+  / { tag = substr($1, 3); if (tag != "doc") { if (!(tag in first)) order[++n] = tag; first[tag] = NR; name[NR] = tag } }
        { last = NR }
        END { for (line = 1; line <= last; line++) { if (line in name) at = name[line]; if (at) lines[at]++ }
              for (i = 1; i <= n; i++) print order[i], 50 * int(lines[order[i]] / 50 + 0.5) }' seqpar.h | while read -r tag lines; do
        case $tag in
        api) what="prototypes: errors, messages, folds, rows, shares"; check="compile matrix: C99, C11, C++11, C++17, static, two units" ;;
        table) what="prototypes: what a device does"; check="the same" ;;
        calls) what="prototypes: what a rank calls"; check="the same; every pointer as NULL" ;;
        util) what="errors, random numbers, exp and log"; check="known answers, long double" ;;
        fold) what="one order for every sum"; check="any order, any split of the leaves: equal bits" ;;
        pack) what="documents to rows, targets shifted once"; check="independent packer, multiset of targets" ;;
        split) what="who holds which token"; check="golden vectors, bijection for every S and P" ;;
        comm) what="one rank, threads of one process"; check="random exchanges, deadlocks, ThreadSanitizer" ;;
        ctx) what="one rank: mesh, memory counters"; check="memory suite" ;;
        device) what="fold machine, attention driver"; check="every entry by finite differences" ;;
        ref) what="reference device: naive, fp64 and bf16"; check="slow.h" ;;
        cpu) what="fast device: vectors"; check="compile matrix: the same bits at every optimisation" ;;
        product) what="fast device: products, and weight gradients"; check="reference device; each row alone and among others" ;;
        pass) what="fast device: passes over rows; exp"; check="against long double; each row alone and among others" ;;
        tile) what="fast device: attention in tiles"; check="reference device; P by memcmp" ;;
        rows) what="fast device: norm, SwiGLU, loss, update"; check="reference device; each row alone and among others" ;;
        shards) what="parameters at their owners alone"; check="every D x P by memcmp; memory suite: bytes held and sent" ;;
        half) what="fast device in bf16: widened, computed in fp32, rounded"; check="each operation against fp64; D x P by memcmp" ;;
        user) what="a block kernel or product of the user's"; check="slow.h, in fp64, fp32 and bf16; kernels that misbehave" ;;
        plan) what="ring and llama3 as data"; check="all ranks simulated, P up to 1,024" ;;
        attn) what="what an attention is made of"; check="P = 1, 2, 3, 4, 5, 8 by memcmp; slow.h" ;;
        sight) what="who sees whom, and which keys travel"; check="pairs counted one by one; bytes by formula" ;;
        program) what="what each rank adds, and in which order"; check="P = 1, 2, 3, 4, 5, 8 by memcmp; steps counted" ;;
        exec) what="a plan is run: ring and llama3"; check="late and failing messages; memory by formula" ;;
        kernel) what="an attention kernel of the user's"; check="slow.h; every layout and schedule" ;;
        ulysses) what="tokens for heads, and back"; check="P = 2 to 8, replicated heads, by memcmp" ;;
        call) what="open, forward, backward"; check="refusals; every allocation fails once" ;;
        loss) what="token log-probs in pieces, SFT seeds"; check="slow.h, golden vectors" ;;
        objective) what="sums per document; DPO, KTO, RM, PPO, GRPO"; check="slow_loss.h, golden vectors, identities" ;;
        blocks) what="parameter blocks and their owners"; check="every world size; refusals" ;;
        gradient) what="a step's gradients, to their owners"; check="D x P x A x ZeRO by memcmp; slow.h" ;;
        update) what="norm, clip, AdamW and SGD"; check="slow.h; offloaded and quantized by memcmp and rule" ;;
        state) what="reading and writing parameters and moments"; check="kills and resumes by memcmp" ;;
        *) echo "ci/readme.sh: chapter >>$tag has no description; add a line" >&2; exit 1 ;;
        esac
        echo "| \`>>$tag\` | $what | $lines | $check |"
    done
}
# What is wrong in published packages: a line of findings.tsv, its version and whether it is reported from RESULTS.md.
found() {
    printf '| package | what is wrong | reported |\n|---|---|---|\n'
    awk -F'\t' '
        function trimmed(text) { gsub(/^ +| +$/, "", text); return text }
        FNR == NR { if (/^[^#]/) { name[++n] = $1; check[n] = $2; words[n] = $3 } ; next }
        /^\| / { split($0, cell, /\|/)
            for (i = 1; i <= n; i++) if (trimmed(cell[2]) == name[i] && index(trimmed(cell[4]), check[i]) == 1 && trimmed(cell[5]) ~ /^wrong/ && !(i in version)) {
                version[i] = trimmed(cell[3]); reported[i] = cell[7] ~ /new/ ? "no" : "yes" } }
        END { for (i = 1; i <= n; i++) {
                  if (!(i in version)) { print "ci/readme.sh: RESULTS.md has no wrong line of " name[i] ", " check[i] >"/dev/stderr"; exit 1 }
                  print "| " name[i] " " version[i] " | " words[i] " | " reported[i] " |" } }' verify/frameworks/findings.tsv verify/frameworks/RESULTS.md
}
# The machines there is a page of: what ran on a GPU, what was timed on a CPU.
speed() {
    local page gpus=0
    for page in bench/results/*.md; do
        [ -e "$page" ] || continue
        if grep -q 'ci/gpu.sh' "$page"; then gpus=1; fi
        echo "[$(head -n 1 "$page" | cut -c3-)]($page): $(grep -m 1 '^Summary: ' "$page" | cut -c10-)" | fold -s -w 118 | sed 's/ *$//'
    done
    [ $gpus -eq 1 ] || printf 'Nothing has run on a GPU yet: the CUDA kernels and the NCCL\ntransport are built, and tested thread by thread on the CPU.\n'
}
# What becomes of the options and keys of each program's pages, counted in the option table; another name for an option that is
# refused or without effect is so, too.
options() { # table or sentence
    awk -F'\t' -v how="$1" '
        function stop(text) { print "ci/readme.sh: options.tsv: " text >"/dev/stderr"; failed = 1; exit 1 }
        BEGIN { split("openrlhf-0.5 openrlhf-0.8 openrlhf-head 360lf axolotl", page, " ")
                split("OpenRLHF 0.5,OpenRLHF 0.8,OpenRLHF 0.11,360-LLaMA-Factory,axolotl", title, ",")
                split("real alias prepared noeffect refused", class, " ") }
        FNR == 1 { next }
        FNR == NR { first[$1] = $3; next }
        { kind = $3; sub(/:.*/, "", kind); there = "," $5 ","; counted = 0
          if (kind == "alias") {
              to = substr($3, 7)
              if (!(to in first) || first[to] ~ /^alias/) stop($1 " is another name for " to ", which is none of the options")
              of = first[to]; sub(/:.*/, "", of)
              if (of == "noeffect" || of == "refused") kind = of }
          for (c = 1; c <= 5 && class[c] != kind; c++);
          if (c > 5) stop("class " kind " has no column")
          for (p = 1; p <= 5; p++) if (index(there, "," page[p] ",")) { n[p, kind]++; counted = 1 }
          all[kind] += counted }
        END { if (failed) exit 1
              if (how == "sentence") {
                  printf "Options of OpenRLHF, 360-LLaMA-Factory and axolotl: %d taken, %d without effect (said), %d refused by name.\n",
                      all["real"] + all["alias"] + all["prepared"], all["noeffect"], all["refused"]
                  exit }
              print "| options and keys of | taken | by another name here | taken by `prepare.py` | no effect, which is said | refused by name |"
              print "|---|---:|---:|---:|---:|---:|"
              for (p = 1; p <= 5; p++) {
                  printf "| %s |", title[p]
                  for (c = 1; c <= 5; c++) printf " %d |", n[p, class[c]]
                  print "" } }' demos/trainer/run/options.tsv demos/trainer/run/options.tsv
}
page=${1:-README.md}
wanted() { if grep -q "^<!-- generated: $1 -->" "$page"; then "${@:2}"; fi; } # NAME COMMAND: only what the page shows
table() { "$@" --table | grep '^|'; }
# A part that cannot be made ends this, before a page is written.
chapters=$(wanted chapters chapters) || exit
layouts=$(wanted layouts build/02_layouts 16 4 1) || exit
found=$(wanted found found) || exit
speed=$(wanted speed speed) || exit
options=$(wanted options options table) || exit
counted=$(wanted counted options sentence) || exit
modes=$(wanted modes table build/test_attn) || exit
costs=$(wanted costs table build/test_plan) || exit
awk -v chapters="$chapters" -v layouts="$layouts" -v found="$found" -v speed="$speed" -v modes="$modes" -v costs="$costs" -v options="$options" -v counted="$counted" '
    skipping == "table" && /^<!-- end -->/ { skipping = "" }
    skipping == "block" { if (/^```$/ && ++fences == 2) { skipping = "" } ; next }
    skipping == "table" { next }
    { print }
    /^<!-- generated: chapters -->/ { print chapters "\n"; skipping = "table" }
    /^<!-- generated: found -->/ { print found; skipping = "table" }
    /^<!-- generated: speed -->/ { print speed; skipping = "table" }
    /^<!-- generated: options -->/ { print "\n" options "\n"; skipping = "table" }
    /^<!-- generated: counted -->/ { print counted; skipping = "table" }
    /^<!-- generated: modes -->/ { print "\n" modes "\n"; skipping = "table" }
    /^<!-- generated: costs -->/ { print "\n" costs "\n"; skipping = "table" }
    /^<!-- generated: snippet -->/ { print "```c"; while ((getline line < "demos/snippet.c") > 0) if (lines++) print line; print "```"; skipping = "block"; fences = 1 }
    /^<!-- generated: layouts -->/ { print "```\n" layouts "\n```"; skipping = "block"; fences = 0 }' "$page"
