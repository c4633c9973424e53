#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# The compile matrix: every header alone, in C and C++, once and in several units, with and without threads; the same
# bits from every compiler and optimisation; no sum fused behind our back; and the tidiness of the sources.
cd "$(dirname "$0")/../.." || exit 1
export out=build/test_headers
rm -rf $out; mkdir -p $out/log
. verify/support/jobs.sh

headers="seqpar seqpar_check seqpar_llama seqpar_safetensors"
implement() { # HEADER: the lines that make a unit its implementation
    echo '#define SEQPAR_IMPLEMENTATION'
    [ $1 = seqpar ] || echo "#define $(echo $1 | tr a-z A-Z)_IMPLEMENTATION"
}
# a call into each header: 0 if it does what it says
use() {
    case $1 in
    seqpar) echo '(seqpar_exp(0) != 1)' ;;
    seqpar_check) echo '(seqpar_plan_cost_free(&cost), cost.steps != 0)' ;;
    seqpar_llama) echo '(seqpar_llama_open(&ctx, &model, &config) != SEQPAR_ERR_SIZE)' ;;
    seqpar_safetensors) echo '(seqpar_safetensors_dtype_bytes(SEQPAR_SAFETENSORS_BF16) != 2)' ;;
    esac
}
locals() {
    [ $1 = seqpar_check ] && echo 'static seqpar_plan_cost cost;'
    [ $1 = seqpar_llama ] && echo 'static seqpar_ctx ctx; static seqpar_llama model; static seqpar_llama_config config; static seqpar_error error; ctx.error = &error;'
}
caller() { # HEADER FUNCTION: a unit without implementation that calls into the header
    printf '#include "%s.h"\n#include "%s.h"\nint %s(void);\nint %s(void) { %s return %s; }\n' $1 $1 $2 $2 "$(locals $1)" "$(use $1)"
}
for h in $headers; do
    printf '#include "%s.h"\n#include "%s.h"\nextern int unit;\nint unit = SEQPAR_VERSION_MAJOR;\n' $h $h >$out/api_$h.c
    { implement $h; printf '#include "%s.h"\n#include "%s.h"\n' $h $h; } >$out/impl_$h.c
    caller $h main >$out/main_$h.c
    { implement $h | sed '/define SEQPAR_IMPLEMENTATION/d'; printf '#include "%s.h"\n#include "%s.h"\n' $h $h; } >$out/apart_$h.c
done
all_locals() { for h in $headers; do locals $h; done; }
all_uses() { for h in $headers; do printf '%s || ' "$(use $h)"; done; echo 0; }
{ for h in $headers; do implement $h; done | sort -u; for h in seqpar_safetensors seqpar_check seqpar_llama; do printf '#include "%s.h"\n' $h; done; } >$out/impl_all.c # the first before system headers
{ cat $out/impl_all.c; printf 'int other(void);\nint other(void) { %s return %s; }\n' "$(all_locals)" "$(all_uses)"; } >$out/other_all.c
{ cat $out/impl_all.c; printf 'int other(void);\nint main(void) { %s return other() || %s; }\n' "$(all_locals)" "$(all_uses)"; } >$out/static_all.c
cc_gcc=gcc cxx_gcc=g++ cc_clang=clang cxx_clang=clang++
link="-lcjson -lm -lpthread"

# ---- each header, alone: declarations in C99, C11 and C++11; implementation in C11 and C++17, called from another unit ----
matrix() { # FAMILY C-COMPILER C++-COMPILER
    for h in $headers; do
        job api_c99_$1_$h "$2 -std=c99 -pedantic $strict -c $out/api_$h.c -o $out/api_c99_$1_$h.o"
        job api_c11_$1_$h "$2 -std=c11 -pedantic $strict -c $out/api_$h.c -o $out/api_c11_$1_$h.o"
        job api_cxx11_$1_$h "$3 -x c++ -std=c++11 -pedantic $strict -c $out/api_$h.c -o $out/api_cxx11_$1_$h.o"
    done
    # The core is compiled once a standard, with the check that looks into it; the others are units of their own.
    job impl_c11_$1 "$2 -std=c11 $strict -c $out/impl_seqpar_check.c -o $out/c11_$1_core.o && $2 -std=c11 $strict $out/main_seqpar.c $out/c11_$1_core.o -o $out/c11_$1_seqpar $link && $out/c11_$1_seqpar && $2 -std=c11 $strict $out/main_seqpar_check.c $out/c11_$1_core.o -o $out/c11_$1_check $link && $out/c11_$1_check && for h in seqpar_llama seqpar_safetensors; do $2 -std=c11 $strict $out/main_\$h.c $out/apart_\$h.c $out/c11_$1_core.o -o $out/c11_$1_\$h $link && $out/c11_$1_\$h || exit 1; done"
    job impl_cxx17_$1 "$3 -x c++ -std=c++17 $strict -c $out/impl_seqpar_check.c -o $out/cxx17_$1_core.o && $3 -x c++ -std=c++17 $strict $out/main_seqpar.c -x none $out/cxx17_$1_core.o -o $out/cxx17_$1_seqpar $link && $out/cxx17_$1_seqpar && $3 -x c++ -std=c++17 $strict $out/main_seqpar_check.c -x none $out/cxx17_$1_core.o -o $out/cxx17_$1_check $link && $out/cxx17_$1_check && for h in seqpar_llama seqpar_safetensors; do $3 -x c++ -std=c++17 $strict $out/main_\$h.c $out/apart_\$h.c -x none $out/cxx17_$1_core.o -o $out/cxx17_$1_\$h $link && $out/cxx17_$1_\$h || exit 1; done"
}
for family in gcc clang; do
    cc=cc_$family cxx=cxx_$family
    if has ${!cc} && has ${!cxx}; then matrix $family ${!cc} ${!cxx}; else skip matrix_$family "${!cc} and ${!cxx} are not both installed"; fi
done

# ---- units: all functions static in two of them; the model before the core, with an allocator of its own ----
x=$out/two_static
job static_twice "gcc -std=c11 -DSEQPAR_STATIC $strict -c $out/static_all.c -o $x.o && gcc -std=c11 -DSEQPAR_STATIC $strict -c $out/other_all.c -o $x.other.o && gcc $x.o $x.other.o -o $x $link && $x && ! nm -g --defined-only $x.o | grep seqpar"
# The model before the core in the same unit; and refused where it would be useless.
printf '#define SEQPAR_LLAMA_IMPLEMENTATION\n#include "seqpar_llama.h"\n#include "seqpar_llama.h"\n' >$out/apart_llama.c
{ cat $out/apart_llama.c; printf '#define SEQPAR_IMPLEMENTATION\n#include "seqpar.h"\n'; } >$out/before_llama.c
job llama_before "gcc -std=c11 $strict -c $out/before_llama.c -o $out/before_llama.o && gcc -std=c11 $strict $out/main_seqpar_llama.c $out/before_llama.o -o $out/before_llama $link && $out/before_llama"
job llama_allocator "gcc -std=c11 $strict '-DSEQPAR_MALLOC(size)=own_malloc(size)' '-DSEQPAR_FREE(ptr)=own_free(ptr)' -include $out/own_malloc.h -c $out/apart_llama.c -o $out/own_malloc.o && nm -u $out/own_malloc.o | grep own_malloc && ! nm -u $out/own_malloc.o | grep -wE 'malloc|free'"
job llama_static_alone "! gcc -std=c11 -DSEQPAR_STATIC -I. -c $out/apart_llama.c -o $out/static_alone.o && grep -q 'error.*SEQPAR_STATIC' $out/log/llama_static_alone.log"
printf '#include <stddef.h>\nvoid *own_malloc(size_t size);\nvoid own_free(void *ptr);\n' >$out/own_malloc.h

# ---- every declared function is defined, and no other name is public ----
names_of() { sed '/Everything below is implementation/q; /_IMPLEMENTED)/q' $(ls $1.h verify/$1.h 2>/dev/null) | tr '\n' ' ' | grep -oE 'SEQPAR_DEF [^(;]*\(' | sed -nE 's/.*[ *](seqpar_[a-z0-9_]+)\($/\1/p' | sort -u; }
for h in $headers; do
    names_of $h >$out/names_$h
    [ $h = seqpar ] && sed -n '/^#define SEQPAR_STRUCTS/,/[^\\]$/p' seqpar.h | grep -oE 'X\([a-z0-9_]+\)' | sed -E 's/X\((.*)\)/seqpar_sizeof_\1/' >>$out/names_$h
    {
        printf '#include "%s.h"\n#include <stdio.h>\ntypedef void (*function)(void);\nint main(void) {\n    static const function all[] = {\n' $h
        sed 's/.*/        (function)&,/' $out/names_$h
        printf '    };\n    unsigned i, missing = 0;\n    for (i = 0; i < sizeof all / sizeof *all; i++) missing += !all[i];\n    printf("%%u functions\\n", i);\n    return missing != 0;\n}\n'
    } >$out/names_$h.c
done
sort -u $out/names_seqpar $out/names_seqpar_check $out/names_seqpar_llama $out/names_seqpar_safetensors >$out/names_all
job public_names "gcc -std=c11 -I. -Iverify -c $out/impl_all.c -o $out/names_all.o && nm -g --defined-only $out/names_all.o | awk '{ print \$3 }' | sort -u | diff $out/names_all - && for h in $headers; do [ \$(wc -l <$out/names_\$h) -ge 3 ] && gcc -std=c11 -I. -Iverify $out/names_\$h.c $out/names_all.o -o $out/names_\$h.exe $link && $out/names_\$h.exe || exit 1; done"

# ---- options: no threads, fast math refused, other machines, a CUDA unit ----
job no_threads_symbols "gcc -std=c11 -I. -c $out/impl_seqpar.c -o $out/threads.o && nm $out/threads.o | grep pthread >$out/threads.txt && gcc -std=c11 -DSEQPAR_NO_THREADS $strict -c $out/impl_seqpar.c -o $out/alone.o && ! nm $out/alone.o | grep pthread"
job no_threads_units "gcc -std=c11 -DSEQPAR_NO_THREADS $strict $out/main_seqpar_llama.c $out/impl_seqpar_llama.c -o $out/alone -lm && $out/alone"
for flag in -ffast-math -Ofast; do
    job fast${flag}_refused "! gcc $flag -I. -c $out/impl_seqpar.c -o $out/fast$flag.o && grep -q 'error.*equal bits' $out/log/fast${flag}_refused.log"
    job fast${flag}_refused_llama "! gcc $flag -I. -c $out/apart_llama.c -o $out/fast$flag.llama.o && grep -q 'error.*equal bits' $out/log/fast${flag}_refused_llama.log"
    job fast${flag}_prototypes "for h in $headers; do gcc $flag $strict -c $out/api_\$h.c -o $out/fast$flag.api.o || exit 1; done"
done
# linked so, every float of the program is flushed: said when a context is opened, not seen in the bits later
refuses() { job $1 "$2 && { $out/$1 && echo FAIL: it runs; } 2>&1 | tee $out/$1.txt; grep -q '$3' $out/$1.txt"; } # NAME COMMAND SENTENCE
if [ "$(uname -m)" = x86_64 ]; then refuses fast_math_linked "gcc -O2 -I. -c demos/01_ring.c -o $out/linked.o && gcc -ffast-math $out/linked.o -o $out/fast_math_linked -lm -lpthread" "flushes denormal numbers to 0"; fi
job warnings_O2 "gcc -std=gnu11 -O2 $strict -Wno-format-truncation -fopenmp -c $out/impl_all.c -o $out/o2.o"
if has x86_64-w64-mingw32-gcc; then job mingw "x86_64-w64-mingw32-gcc -std=c11 -DSEQPAR_NO_THREADS $strict -c $out/impl_seqpar.c -o $out/mingw.o"; else skip mingw "no x86_64-w64-mingw32-gcc"; fi
if has nvcc; then job nvcc_host_unit "nvcc -x cu -I. -O1 -c $out/impl_seqpar.c -o $out/nvcc.o && nm $out/nvcc.o | grep ' T seqpar_attn_forward'"; else skip nvcc_host_unit "no nvcc"; fi
# x87 keeps intermediate values in 80 bits: refused, and with the flags that the message names the bits are those of one rank
if [ "$(uname -m)" = x86_64 ]; then
    job x87_refused "! gcc -mfpmath=387 -I. -c $out/impl_seqpar.c -o $out/x87.o && grep -q 'error.*Add -msse2 -mfpmath=sse' $out/log/x87_refused.log && gcc -mfpmath=387 $strict -c $out/api_seqpar.c -o $out/x87.api.o"
else skip x87_refused "not an x86-64 machine"; fi
if echo '#include <stdio.h>
int main(void) { return 0; }' | gcc -m32 -x c - -o $out/m32 2>/dev/null && $out/m32; then
    job m32_refused "! gcc -m32 -I. -c $out/impl_seqpar.c -o $out/m32.o && grep -q 'error.*Add -msse2 -mfpmath=sse' $out/log/m32_refused.log"
    job bits_32 "gcc -m32 -msse2 -mfpmath=sse -std=c11 $strict $out/main_seqpar_llama.c $out/impl_seqpar_llama.c -o $out/m32 -lm -lpthread && $out/m32"
    job bits_32_ring "gcc -m32 -msse2 -mfpmath=sse -I. demos/01_ring.c -o $out/m32_ring -lm -lpthread && $out/m32_ring | grep 'identical bits: yes'"
else skip bits_32 "gcc -m32 does not compile and link here; apt-get install gcc-multilib"; fi

# ---- bits: one step of a small model on both devices, from every build ----
cat >$out/model.c <<'C'
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#include "support/run_model.h"

static uint64_t sum_of(const double *x, int64_t count) {
    const unsigned char *byte = (const unsigned char *)x;
    uint64_t h = UINT64_C(1469598103934665603);
    int64_t i;
    for (i = 0; i < count * 8; i++) h = (h ^ byte[i]) * UINT64_C(1099511628211);
    return h;
}

static int run(int reference, int64_t threads) {
    model_task task = {.config = {.layers = 2, .hidden = 24, .heads = 6, .kv_heads = 2, .head_dim = 10, .intermediate = 37, .vocab = 53}, .seed = 7, .lr = .01, .max_norm = .3, .decay = .1};
    model_way way = {.dp = 1, .sp = 1, .accumulation = 2, .threads = threads, .steps = 2, .reference = reference, .layout = SEQPAR_LAYOUT_ZIGZAG};
    model_result r;
    random_batch(&task.batch, 21, 40, 53, 61, 0);
    task.objective.count = task.batch.counts.supervised;
    model_run(&task, &way, &r);
    printf("loss %a norm %a logits %016llx gradient %016llx parameters %016llx %s\n", r.loss, r.norm, (unsigned long long)sum_of(r.logits, r.tokens * r.vocab),
           (unsigned long long)sum_of(r.gradient, r.elements), (unsigned long long)sum_of(r.params, r.elements), r.error.text);
    seqpar_batch_free(&task.batch);
    model_result_free(&r);
    return r.status != 0 || !(r.loss > 0) || !(r.norm > 0);
}

int main(int argc, char **argv) { return run(0, argc > 1 ? atoi(argv[1]) : 1) || run(1, 1); }
C
bits() { job "$1" "$2 -I. -Iverify $out/model.c -o $out/$1 -lm -lpthread && $out/$1 $3 >$out/$1.txt && cat $out/$1.txt"; } # NAME COMPILER THREADS
machine=""
if grep -qw avx2 /proc/cpuinfo 2>/dev/null && grep -qw fma /proc/cpuinfo; then machine="-march=x86-64-v3"; else skip x86_64_v3 "this machine has no AVX2 and FMA"; fi
bits bits_gcc_O2 "gcc -std=gnu11 -O2 $machine"
bits bits_gcc_O0 "gcc -std=gnu11 -O0 $machine"
bits bits_gcc_O3 "gcc -std=gnu11 -O3 $machine"
bits bits_gcc_O2_openmp "gcc -std=gnu11 -O2 -fopenmp $machine" 2
bits bits_gcc_O2_no_threads "gcc -std=gnu11 -O2 -DSEQPAR_NO_THREADS $machine"
grep -v '^#define' $out/model.c >$out/model_calls.c # three units: who calls, the core, the model
job bits_gcc_O2_units "gcc -std=gnu11 -O2 $machine -I. -Iverify $out/model_calls.c $out/impl_seqpar.c $out/apart_llama.c -o $out/bits_gcc_O2_units -lm -lpthread && $out/bits_gcc_O2_units >$out/bits_gcc_O2_units.txt && cat $out/bits_gcc_O2_units.txt"
bits bits_gcc_O2_contract_off "gcc -std=gnu11 -O2 -ffp-contract=off $machine" # gnu11 alone means fast
if has clang; then bits bits_clang_O2 "clang -std=gnu11 -O2 $machine"; bits bits_clang_O3 "clang -std=gnu11 -O3 $machine"; fi
# The products of these two have other vectors, so their fp32 bits are their own; test_attn must be green all the same.
# check: what is of fp32 and not of the host alone.
only=""
[ -n "$TEST_ALL" ] || only="env TEST_ONLY='test_truth(0)+test_bits(0)+test_product+test_vanishing+test_lengths+test_long_cells(1)+test_relaxed_truth(0)'"
if [ -n "$machine" ]; then job attn_x86_64_v3 "gcc -std=gnu11 -O2 $machine -I. -Iverify verify/tests/test_attn.c -o $out/attn_v3 -lm -lpthread && $only $out/attn_v3"; fi
job attn_baseline "gcc -std=gnu11 -O2 -I. -Iverify verify/tests/test_attn.c -o $out/attn_base -lm -lpthread && $only $out/attn_base"

# ---- contraction: without SEQPAR_NO_FMA the compiler may add no fused operation, with it there may be none at all ----
fused() { echo "objdump -d --no-show-raw-insn $1 | { grep -cE 'vfn?m(add|sub)' || true; }"; }
level=-O2 # where compilers begin to fuse; check-all: -O3
[ -n "$TEST_ALL" ] && level=-O3
contraction() { # NAME COMPILER FLAGS [none: only under SEQPAR_NO_FMA, where a single one is too many]
    local x=$out/$1
    job $1 "$2 $level -march=x86-64-v3 -I. -Iverify $3 -DSEQPAR_NO_FMA -c $out/impl_all.c -o $x.o && n=\$($(fused $x.o)) && echo FAIL: \$n fused instructions under SEQPAR_NO_FMA && [ \$n = 0 ]"
    [ "$4" = none ] && [ -z "$TEST_ALL" ] && return
    job ${1}_own "$2 $level -march=x86-64-v3 -I. -Iverify $3 -c $out/impl_all.c -o $x.fast.o && $2 $level -march=x86-64-v3 -I. -Iverify -ffp-contract=off -c $out/impl_all.c -o $x.off.o && a=\$($(fused $x.fast.o)) && b=\$($(fused $x.off.o)) && echo FAIL: \$a fused instructions, written were \$b && [ \$a = \$b ] && [ \$a -gt 100 ]"
}
if [ "$(uname -m)" != x86_64 ] || ! has objdump; then skip contraction "needs objdump on x86-64"
else
    contraction contraction_gcc "gcc -std=gnu11" "-ffp-contract=fast"
    contraction contraction_gxx "g++ -x c++ -std=c++17" "-ffp-contract=fast" none
    if has clang; then
        contraction contraction_clang "clang -std=gnu11" "-ffp-contract=on"
        # it disregards every pragma under -ffp-contract=fast: no header can hold it back, but a context is refused
        if [ -n "$machine" ]; then refuses contraction_clang_fast "clang -std=gnu11 -O2 $machine -ffp-contract=fast -I. demos/01_ring.c -o $out/contraction_clang_fast -lm -lpthread" "fuses products and sums"; fi
    else skip contraction_clang "no clang"; fi
fi

run_jobs
for x in $out/bits_*.txt; do
    name=same_$(basename $x .txt)
    [ $x = $out/bits_gcc_O2.txt ] || if [ -s $x ] && cmp -s $x $out/bits_gcc_O2.txt; then ok $name; else fail $name "$(diff $x $out/bits_gcc_O2.txt | sed -n 2p)"; fi
done

# ---- tidy ----
sources() { git ls-files -co --exclude-standard 2>/dev/null || find . -type f -not -path './build/*' -not -path './.git/*'; }
tidy() { if [ -z "$2" ]; then ok $1; else fail $1 "$(echo "$2" | tr '\n' ' ' | cut -c1-250)"; fi; } # NAME WHAT-IS-WRONG
tidy tidy_spdx "$(sources | grep -vE '^(\./)?LICENSE$' | while read -r f; do [ -f "$f" ] && grep -qI . "$f" && ! grep -q 'SPDX-License-Identifier' "$f" && echo "$f"; done)"
tidy tidy_no_notes "$(grep -nwE 'T[O]DO|F[I]XME|X[X]X' ./*.h demos/*.* demos/*/*.* demos/*/*/*.* verify/*.* verify/*/*.* verify/*/*/*.* bench/*.* ci/*.* 2>/dev/null | head -n 3)"
# What stands in a unit of its own uses what seqpar.h declares alone, and its own private names say whose they are.
declared=$(sed '/^#endif .* SEQPAR_H /q' seqpar.h | sed -nE 's/^SEQPAR_DEF .*seqpar__([a-z0-9_]+)\(.*/\1/p' | paste -sd '|')
strangers() { grep -noE '\b(seqpar|SEQPAR)__[A-Za-z0-9_]+' $1.h | grep -viE ":seqpar__($2_|${1#seqpar_}_IMPLEMENTED$|($declared)$)" | sed "s/^/$1.h:/"; }
tidy tidy_private_names "$(strangers seqpar_llama llama; strangers seqpar_safetensors st; strangers seqpar_nccl nccl)"
# Part I, the subject, and part II, devices, share nothing private but what stands before both.
private_in() { { grep -E '^(static|SEQPAR__)' "$1" | grep -oE 'seqpar__[a-z0-9_]+\('; grep -oE '^} seqpar__[a-z0-9_]+;' "$1"; } | grep -oE 'seqpar__[a-z0-9_]+' | sort -u; }
awk -v out=$out '/^   >>plan /{ part = 1 } /You may stop here/{ part = 2 } { print >(out "/part_" part + 0) }' seqpar.h
for x in 0 1 2; do private_in $out/part_$x >$out/private_$x; done
uses() { comm -12 <(grep -oE 'seqpar__[a-z0-9_]+' $out/part_$1 | sort -u) <(comm -23 $out/private_$2 <(sort -u $out/private_$1 $out/private_0)); }
tidy tidy_parts "$(uses 1 2)$(uses 2 1)$(for x in 0 1 2; do [ "$(wc -l <$out/private_$x)" -gt 50 ] || echo "part $x has hardly a private name"; done)"
tidy tidy_chapters "$(for c in api table calls util fold pack split comm ctx plan attn sight program exec kernel ulysses call loss objective blocks gradient update state shards device ref cpu product pass tile rows half user; do grep -qE "^   >>$c  " seqpar.h || echo "no chapter $c"; done)"

# A header includes others at its top alone, and none that includes it again.
layers=$(echo demos/trainer/*/*.h demos/program/*.h verify/oracle/*/*.h)
cat >$out/late_includes.awk <<'AWK'
FNR == 1 { code = comment = 0 }
/^\/\*/ { comment = 1 }
comment || /^#/ || /^ *$/ { if (/\*\/ *$/) comment = 0; if (code && /^#include ".*\.h"/) print FILENAME ": " $0; next }
{ code = 1 }
AWK
tidy tidy_includes_on_top "$(awk -f $out/late_includes.awk $layers)"
included() { # FILE FILE: a header, and one that it includes
    grep -HoE '^#include ".*\.h"' $layers | sed -E 's/:#include "(.*)"/ \1/' | while read -r file name; do
        for folder in $(dirname $file) demos verify; do [ -f $folder/$name ] && { echo $file $folder/$name; break; }; done
    done
}
tidy tidy_no_include_cycle "$(included | tsort 2>&1 >/dev/null)"

# lines of every function: from the line its head begins to the one its last brace closes
cat >$out/functions.awk <<'AWK'
/^[ \t]*#/ || directive { directive = /\\$/; next }
{
    text = comment ? "/*" $0 : $0
    gsub(/'(\\.|[^'\\])'/, "", text)
    gsub(/"([^"\\]|\\.)*"/, "", text)
    gsub(/\/\*([^*]|\*+[^*\/])*\*+\//, " ", text)
    comment = sub(/\/\*.*/, "", text)
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (depth == 0 && head == "") { if (c ~ /[ \t]/) continue; begin = NR; said = before ~ /\*\/$/ }
        if (depth == 0) head = head c
        if (c == "{" && head ~ /^[ \t]*extern *\{/) { head = ""; continue }
        if (c == "{" && depth++ == 0) is_function = head ~ /\(/ && head !~ /=/ && head !~ /^[ \t]*(typedef|struct|enum|union)[^(]*\{/
        if (c == "}" && depth > 0 && --depth == 0 && is_function) { split(head, part, "("); n = split(part[1], word, /[ *]+/); print NR - begin + 1, word[n] (said || head ~ /SEQPAR_DEF/ ? "" : " unsaid") }
        if (depth == 0 && (c == "}" || c == ";")) head = ""
    }
    before = $0
}
END { if (depth) print "9999 braces_do_not_match" }
AWK
awk -f $out/functions.awk seqpar.h | sort -n >$out/functions
count=$(wc -l <$out/functions)
median=$(awk -v half=$(((count + 1) / 2)) 'NR == half { print $1 }' $out/functions)
longest=$(tail -n 1 $out/functions)
echo "# seqpar.h: $count functions, median $median lines, longest $longest"
[ "$count" -ge 200 ] && [ "$median" -le 14 ] && tidy tidy_functions_median "" || tidy tidy_functions_median "$count functions, median $median lines"
# Why it is as it is stands above every private function of 25 lines and more; of a check its name says it.
tidy tidy_functions_said "$(awk '$3 == "unsaid" && $1 >= 25 && $2 !~ /_check_|^SEQPAR__/' $out/functions)"
[ "${longest%% *}" -le 120 ] && tidy tidy_functions_longest "" || tidy tidy_functions_longest "$longest lines"

printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
[ $failed -eq 0 ]
