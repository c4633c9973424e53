/* SPDX-License-Identifier: MIT OR Unlicense */
/* The headers' implementation as one object, for programs and suites that need the public
   API alone (make: LINKED). */
#define SEQPAR_IMPLEMENTATION
#define SEQPAR_LLAMA_IMPLEMENTATION
#define SEQPAR_CHECK_IMPLEMENTATION
#define SEQPAR_SAFETENSORS_IMPLEMENTATION
#include "seqpar_safetensors.h"
#include "seqpar_check.h"
#include "seqpar_llama.h"
