#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# What others build with: `make install` into a folder, a small project with pkg-config and with CMake, the shared library
# from C and from Python, and that files of two versions, or structs of two sizes, are refused.
cd "$(dirname "$0")/../.." || exit 1
out=$PWD/build/test_install cc=${CC:-cc}
tree=$out/root/usr/local library=$out/root/usr/local/lib/libseqpar.so
rm -rf "$out"; mkdir -p "$out/project"
passed=0 failed=0 skipped=0
ok() { echo "ok $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }
has() { command -v "$1" >/dev/null 2>&1; }
check() { if [ -z "$2" ]; then ok "$1"; else fail "$1" "$(echo "$2" | tr '\n' ' ' | cut -c1-250)"; fi; } # NAME WHAT-IS-WRONG
make() { command make --no-print-directory -s PREFIX=/usr/local LIBDIR=/usr/local/lib DESTDIR="$out/root" SHARED="$out/libseqpar.so" OPT=-O0 "$@"; }
version=$(sed -nE 's/^#define SEQPAR_VERSION +"(.*)"/\1/p' seqpar.h)
minor=${version%.*}

if make install >"$out/install.log" 2>&1; then ok make_install; else fail make_install "$(head -n 3 "$out/install.log" | tr '\n' ' ')"; fi
installed() { (cd "$1" && find . ! -type d | sort); }
{ # what is to be there; headers: every one of the top folder
    for file in seqpar*.h seqpar_cuda.cu; do echo "./include/$file"; done
    printf './%s\n' lib/libseqpar.so{,.$minor,.$version} lib/pkgconfig/seqpar-shared.pc share/cmake/seqpar/seqpar-config{,-version}.cmake share/doc/seqpar/LICENSE share/pkgconfig/seqpar.pc
} | sort >"$out/want.txt"
check installed_files "$(installed "$tree" | diff "$out/want.txt" -)"

# ---- a project: the demo, out of reach of this folder's seqpar.h ----
cp demos/01_ring.c "$out/project/ring.c"
grep -v '^#define SEQPAR_IMPLEMENTATION' demos/01_ring.c >"$out/project/calls.c"
cat >"$out/project/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.14)
project(ring C)
if(FETCH)
    include(FetchContent)
    FetchContent_Declare(seqpar SOURCE_DIR ${FETCH})
    FetchContent_MakeAvailable(seqpar)
else()
    find_package(seqpar ${WANTED} REQUIRED)
endif()
add_executable(ring ring.c)
target_link_libraries(ring seqpar::seqpar)
CMAKE
$cc -I. "$out/project/calls.c" -o "$out/ring" "$library" && LD_LIBRARY_PATH=$tree/lib "$out/ring" >"$out/ring.txt"
grep -q 'identical bits: yes' "$out/ring.txt" && ok shared_ring || fail shared_ring "$(tail -n 1 "$out/ring.txt")"
prints() { # NAME PROGRAM...: the same, to the last digit shown
    local name=$1; shift
    "$@" >"$out/$name.txt" 2>&1
    check "$name" "$(diff "$out/ring.txt" "$out/$name.txt" 2>&1)"
}

if has pkg-config; then
    export PKG_CONFIG_PATH=$tree/share/pkgconfig:$tree/lib/pkgconfig
    (cd "$out/project" && $cc ring.c $(pkg-config --cflags --libs seqpar) -o ../by_pkg_config) >"$out/pkg_config.log" 2>&1 && prints pkg_config "$out/by_pkg_config" || fail pkg_config "$(head -n 1 "$out/pkg_config.log")"
    (cd "$out/project" && $cc calls.c $(pkg-config --cflags --libs seqpar-shared) -o ../by_library) >"$out/pkg_config_shared.log" 2>&1 && LD_LIBRARY_PATH=$tree/lib prints pkg_config_shared "$out/by_library" || fail pkg_config_shared "$(head -n 1 "$out/pkg_config_shared.log")"
    check pkg_config_version "$([ "$(pkg-config --modversion seqpar seqpar-shared | sort -u)" = "$version" ] || pkg-config --modversion seqpar seqpar-shared)"
else skip pkg_config "no pkg-config"; fi

if has cmake; then
    by_cmake() { cmake -S "$out/project" -B "$out/$1" -DCMAKE_PREFIX_PATH="$tree" "${@:2}" >"$out/$1.log" 2>&1 && cmake --build "$out/$1" >>"$out/$1.log" 2>&1; } # FOLDER OPTION...
    by_cmake find_package -DWANTED=$minor && prints cmake_find_package "$out/find_package/ring" || fail cmake_find_package "$(grep -m 1 -iE 'error' "$out/find_package.log")"
    by_cmake fetch -DFETCH="$PWD" && prints cmake_fetch_content "$out/fetch/ring" || fail cmake_fetch_content "$(grep -m 1 -iE 'error' "$out/fetch.log")"
    for other in 0.0.1 ${minor%.*}.$((${minor#*.} + 1)) $version.1 $((${minor%.*} + 1)).${minor#*.}; do
        if ! cmake -S "$out/project" -B "$out/other" -DCMAKE_PREFIX_PATH="$tree" -DWANTED=$other >"$out/other.log" 2>&1 && grep -q "version: $version" "$out/other.log"; then ok "cmake_refuses_$other"; else fail "cmake_refuses_$other" "$(tail -n 1 "$out/other.log")"; fi
        rm -rf "$out/other"
    done
    # the source tree by itself: nothing to build, and what it installs is what make does, but for the library
    cmake -S . -B "$out/top" >"$out/top.log" 2>&1 && cmake --build "$out/top" >>"$out/top.log" 2>&1 && DESTDIR=$out/cmake cmake --install "$out/top" --prefix /usr/local >>"$out/top.log" 2>&1
    check cmake_install "$(diff -r "$tree" "$out/cmake/usr/local" 2>&1 | grep -vxF "Only in $tree: lib")"
    check cmake_builds_nothing "$(find "$out/top" -name '*.o' -o -name '*.a' -o -name '*.so*')"
else skip cmake "no cmake"; fi

# ---- the shared library: what it exports is what the header declares ----
$cc -E -P -DSEQPAR_DEF=SEQPAR_PUBLIC seqpar.h | tr '\n' ' ' | grep -oE 'SEQPAR_PUBLIC [^(;]*\(' | sed -nE 's/.*[ *](seqpar_[a-z0-9_]+) *\($/\1/p' | sort >"$out/declared.txt"
check shared_names "$([ "$(wc -l <"$out/declared.txt")" -ge 100 ] || echo too few names; nm -D --defined-only "$library" | awk '{ print $3 }' | sort | diff "$out/declared.txt" -)"
check shared_soname "$(readelf -d "$library" | grep -qF "soname: [libseqpar.so.$minor]" || echo "another soname than libseqpar.so.$minor")"
cat >"$out/project/sizes.c" <<'C'
#include "seqpar.h"
#include <stdio.h>
#include <string.h>
int main(void) {
    int count = 0, wrong = strcmp(seqpar_version(), SEQPAR_VERSION) != 0;
#define SIZE(name) count++, wrong += seqpar_sizeof_##name() != (int64_t)sizeof(seqpar_##name);
    SEQPAR_STRUCTS(SIZE)
    printf("%d structs, %d wrong\n", count, wrong);
    return wrong != 0;
}
C
sizes() { $cc -I"$1" "$out/project/sizes.c" -o "$out/sizes" "$library" && LD_LIBRARY_PATH=$tree/lib "$out/sizes"; } # FOLDER-OF-THE-HEADER
if sizes . >"$out/sizes.txt" 2>&1; then ok "shared_sizes ($(cat "$out/sizes.txt"))"; else fail shared_sizes "$(tail -n 1 "$out/sizes.txt")"; fi
mkdir -p "$out/other_struct" "$out/other_version"
sed 's/^typedef struct seqpar_attn_desc {/&\n    int64_t one_more;/' seqpar.h >"$out/other_struct/seqpar.h"
sizes "$out/other_struct" >"$out/sizes.txt" 2>&1; grep -q ', 1 wrong' "$out/sizes.txt" && ok shared_sizes_of_another_header || fail shared_sizes_of_another_header "$(tail -n 1 "$out/sizes.txt")"

# Every struct has its size but those of a device's operations; every enum has a name.
public() { awk '/^#ifndef SEQPAR_.*H$/ { on = 1 } !on { next } /Everything below is implementation|_IMPLEMENTED\)/ { exit } 1' "$1"; }
public seqpar.h | sed -nE 's/^(typedef )?struct seqpar_([a-z0-9_]+) \{.*/\2/p' | grep -vE '_args$|^(mat|fold_call|attn_keys|attn_task)$' | sort >"$out/structs.txt"
check structs_have_sizes "$(sed -n 's/^seqpar_sizeof_//p' "$out/declared.txt" | sort | diff "$out/structs.txt" -)"
check enums_have_names "$(for header in seqpar*.h; do public $header | grep -nE '\benum( *\{|$)' | sed "s/^/$header:/"; done)"

# ---- the same from Python ----
if has python3; then
    ring() { PYTHONDONTWRITEBYTECODE=1 timeout 100 python3 "$1" "$library"; }
    prints python_ring ring demos/ring.py
    refused() { # NAME SED-SCRIPT SENTENCE: ring.py, changed, says so and does nothing
        sed -E "$2" demos/ring.py >"$out/$1.py"
        if ring "$out/$1.py" >"$out/$1.txt" 2>&1; then fail $1 "it runs"
        elif [ "$(wc -l <"$out/$1.txt")" = 1 ] && grep -qE "$3" "$out/$1.txt"; then ok $1
        else fail $1 "$(tail -n 1 "$out/$1.txt")"; fi
    }
    refused python_other_struct 's/"softcap dropout"/"softcap"/' '^ring.py: seqpar_attn_desc has [0-9]+ bytes here and [0-9]+ in .*; compare its fields with seqpar.h$'
    refused python_other_version 's/^VERSION = "[0-9.]+"/VERSION = "9.9.9"/' "^ring.py: .* is seqpar $version, but the structs in ring.py are those of 9.9.9$"
    refused python_error 's/heads=HEADS,/heads=3,/' '^3 heads over 2 kv_heads; '
    library=$out/none.so refused python_no_library '' 'none.so: cannot open shared object file.*; make shared builds'
else skip python "no python3"; fi

# ---- headers of one version beside a seqpar.h of another ----
for part in MAJOR MINOR PATCH; do
    sed -E "s/^(#define SEQPAR_VERSION_$part) .*/\1 77/" seqpar.h >"$out/other_version/seqpar.h"
    for sibling in seqpar_*.h seqpar_cuda.cu; do
        cp $sibling "$out/other_version"
        sentence="#error \"$sibling $version needs seqpar.h $version; take both from one release\""
        $cc -x c++ -E "$out/other_version/$sibling" 2>&1 >/dev/null | grep -qF "$sentence" && ok "refuses_another_${part}_$sibling" || fail "refuses_another_${part}_$sibling" "it is taken"
    done
done
check siblings_agree "$(for sibling in seqpar_*.h seqpar_cuda.cu; do $cc -x c++ -I. -E $sibling 2>&1 >/dev/null | grep -F "needs seqpar.h"; done)"

make uninstall >"$out/uninstall.log" 2>&1
check make_uninstall "$(installed "$tree"; head -n 3 "$out/uninstall.log")"

printf '%d passed, %d failed' $passed $failed; [ $skipped -gt 0 ] && printf ', %d skipped' $skipped; echo
[ $failed -eq 0 ]
