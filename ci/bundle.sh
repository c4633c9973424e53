#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Unlicense
# ci/bundle.sh FOLDER: puts the libraries its programs need into FOLDER/lib, strips them and says how large it all is. The C library,
# C++'s, the driver, cuBLAS, cuDNN and NCCL are the other machine's.
cd "$1" || exit 1
theirs='^(linux-vdso|ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libcuda|libcublas|libcublasLt|libcudnn[a-z_]*|libnccl|libnvrtc[a-z-]*)\.so'
# A program that is a script has no libraries.
needed() { ldd "$@" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' | sort -u | grep -vE "$theirs"; }
programs=$(find . -maxdepth 1 -type f -perm -u+x ! -name '*.sh' ! -name '*.py')
needed $programs lib/libseqpar_cuda.so | while read -r name path; do
    [ -e "lib/$name" ] || cp -L "$path" "lib/$name"
done
strip --strip-debug $programs lib/*.so* 2>/dev/null
megabytes=$(($(du -sb . | cut -f 1) / 1000000 + 1))
echo "$(echo "$programs" | wc -l) programs and $(ls lib | wc -l) libraries, $megabytes MB: carry build/gpu to the machine and type: bash build/gpu/gpu.sh build/gpu"
[ $megabytes -lt 64 ] || { echo "gpu-bundle: over 64 MB" >&2; exit 1; }
