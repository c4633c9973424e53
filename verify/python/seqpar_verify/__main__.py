# SPDX-License-Identifier: MIT OR Unlicense
from seqpar_verify import main

main()
