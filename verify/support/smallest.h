/* SPDX-License-Identifier: MIT OR Unlicense */
/* Smallest sizes of blocks, tiles, ring buffers and staging buffers, for a separate build
   (-include): there every loop over blocks runs more than once, even at the suites' sizes. They
   change no format, no number of ranks and no grid. Some change bits (attention's tiles, the
   vocabulary's blocks), but on all ranks alike. The comment behind each size is its default,
   which the header must have. If a smaller size is legal, too, it would take minutes.
   verify/support/constants.awk fails for a number of the headers that is neither defined here
   nor in this list of numbers that stay, with reasons: by name (a regular expression) or, for
   a number without a name, as file:number.

   Limits that refuse inputs. A build may set those with an #ifndef, but smaller ones would
   refuse the suites' own inputs:
   SEQPAR_MAX_(TOKENS|WIDTH|VOCAB|LAYERS|DOCUMENTS|PARTS|RANKS|CHOICES)  sizes whose products stay below 2^63
   SEQPAR_SAFETENSORS_MAX_(DIMS|HEADER)                  what a file may have
   DEMO_(CONFIG_BYTES|INDEX_BYTES|INDEX_TENSORS|MOST_TEXTS|ANSWER_LIMIT|MOST)  files, options and answers
   DEMO_REWARD_MOST                                      of a server
   DUMP_TOKENS_MAX|LAW_GROUPS|SHARES|SWAP_RANKS|WHERE_(RANKS|PAIRS)|SECOND_WORK  of a dump
   ATTENTION_(ALL|ROOM|PART|WAY|ELEMENTS|KEYS)|POLICY_(POWERS|BINS)  how much of a dump is judged: the verdict says less
   SEQPAR_MPI_GRACE                                      seconds

   Grids and formats, which are promised:
   SEQPAR_PARAM_BLOCK|SEQPAR_QUANTIZE_GROUP|SEQPAR_NF4_(GROUP|STEP)|SEQPAR__(CELL|ROW)_BITS|SEQPAR__MAX_ROWS  what bits and checkpoints hang on
   SEQPAR_NCCL__MAGIC|SEQPAR_MPI__(COMMS|ROUND)            between processes; a tag has 15 bits in MPI
   DEMO_SCORED                                             what a score is measured on
   DEMO_(BOS|EOS|PAD|VOCAB|DIGEST_EMPTY|MT_WORDS|RUN_ID|SECTIONS|TOKENS_ALIGNED)  of files, or of a generator
   VALUE_(TENSOR|METADATA)|TENSOR_STRING                   fields of TensorBoard's format
   ROW_MAJOR|NO_TRANS|TRANS                                CBLAS's

   What the machine has, and what follows from a constant above:
   SEQPAR__(VL|MR|NR|SUMS)|STEP_SUMS  a vector; tiles and sums are made of vectors
   seqpar\.h:(13|14|16|64)        lanes of a row's sums; coefficients of exp
   SEQPAR__(AC|VOCAB_AHEAD)     a distance in the cache: what is read early
   ATTEND_(TILE|EXP)            lanes; what a cost is
   SEQPAR__LLAMA_TWO_PI|SEQPAR__TOO_MANY|DEMO_PLAN_FIRST|DEMO_TROUBLE  a number of mathematics, numbers that are none
   SEQPAR_ADAPT_.*|OF_(OUT|LSE|DQ|DK|DV)|SEES_LOCAL_(WINDOW|BOUND)|VERDICT_CLOSE  bits of a set, and a kind

   Lengths of lists that are written down, and of texts:
   SEQPAR__(ST_SHOWN|LLAMA_NAME_BYTES|LLAMA_SCORE_LETTERS)|SEQPAR_NCCL__HOST  texts
   DEMO_(STORY|NAME|THING)_COUNT|DEMO_ARITH_TEXT|DEMO_PATH_LIMIT|DEMO_NAME_LIMIT  texts
   DEMO_(LORA_TEXT|COMMAND_SAID|ERROR_NEXT|PARTS_LIMIT|BAR_LIMIT|BAR_LEAST|LINE_LIMIT|SHARD_NAME|WEIGHTS_PATH)  texts
   DEMO_(ROPE_KEYS|FAMILY_KEYS|COLUMNS|MODEL_NUMBERS|NOTES|FIGURES|REWARDS|INPUTS)|UPDATE_COLUMNS|NUMBERS  lists
   DEMO_TOKEN_MAPS              maps whose loss has a sentence; one more has none
   ADVANTAGE_WAYS|ANSWERS|APARTS|SHARE_FORMS|WAY_REPORTED|VERDICT_LINES|VERDICT_TRIED  lists
   PAGE|GALLERY_COLUMN|CHART_.*|STRIP_.*|TENSORS_SHOWN|report_pictures\.h:(16|18)|plot\.h:64  pages and pictures
   TOKENS|HEAD_DIM|seqpar\.h:999  the sample in seqpar.h

   How sure the oracle is, and --dry_run; another number is another verdict:
   DEMO_WALKED                                             steps that --dry_run walks
   COARSE_NUMBERS|LIMIT_.*|MOVED_ROWS|FACTOR_SHOWS|GRADIENT_ROUNDINGS|NARROW|SAME_TOKENS|LOGITS_MOST|NEAR_SHOWS|RUN_SHOWS|BLOCK_ROW|WRITTEN_.*|MADE_VOCAB  bounds */
#ifndef SMALLEST_H
#define SMALLEST_H

/* lists and memory */
#define SEQPAR_CACHED_BUFFERS 1  /* 256 */
#define SEQPAR__GROW_FROM     1  /* 16 */
#define SEQPAR__PROGRAM_BLOCK 1  /* 8192 */
#define SEQPAR__WRITE_FEW     4  /* 256 */
#define SEQPAR__WRITE_MANY    16 /* 65536 */
#define SEQPAR__ZEROS_BYTES   64 /* 65536 */
#define SEQPAR__MOVES         1  /* 32 */

/* plans */
#define SEQPAR__STRIPE_PAIRS 64 /* (INT64_C(1) << 23) */
#define SEQPAR__RELAXED_TILE 3  /* 128 */

/* jobs of a host device */
#define SEQPAR__FOLD_COLUMNS     64                    /* 4096 */
#define SEQPAR__REF_WEIGHTS      32                    /* 1024 */
#define SEQPAR__TABLE_ROWS       2                     /* 32 */
#define SEQPAR__GAIN_COLUMNS     8                     /* 256 */
#define SEQPAR__CPU_GAIN_COLUMNS 8                     /* 64 */
#define SEQPAR__ROW_JOB          3                     /* 32 */
#define SEQPAR__ADD_JOB          64                    /* 65536 */
#define SEQPAR__QUANTIZE_JOB     SEQPAR_QUANTIZE_GROUP /* (16 * SEQPAR_QUANTIZE_GROUP) */

/* products */
#define SEQPAR__KC            8          /* 512 */
#define SEQPAR__NC            SEQPAR__NR /* 320 */
#define SEQPAR__MC            SEQPAR__MR /* (8 * SEQPAR__MR) */
#define SEQPAR__FAR_ROWS      1          /* 256 */
#define SEQPAR__JOB_ROWS      5          /* 64 */
#define SEQPAR__JOB_ROWS_WIDE 7          /* 256 */
#define SEQPAR__JOB_COLUMNS   1          /* (8 * SEQPAR__MR) */
#define SEQPAR__WB_OUT        12         /* 192 */
#define SEQPAR__WB_LEAST      4          /* 48 */
#define SEQPAR__WB_IN         SEQPAR__NR /* 256 */
#define SEQPAR__USER_ROWS     1          /* (1 << 20) */

/* attention and the vocabulary, whose sums these cut */
#define SEQPAR__QT          SEQPAR__NR /* 32 */
#define SEQPAR__KT          32         /* 128 */
#define SEQPAR__VOCAB_BLOCK 64         /* 128 */

/* bf16 */
#define SEQPAR__HALF_BLOCK   256 /* (1 << 19) */
#define SEQPAR__HALF_LEAST   2   /* 32 */
#define SEQPAR__HALF_COLUMNS 8   /* 32 */
#define SEQPAR__HALF_WEIGHTS 8   /* 64 */
#define SEQPAR__HALF_RUN     2   /* 16 */

/* the model, files, transports */
#define SEQPAR__LLAMA_WRITE_VALUES 16   /* 256 */
#define SEQPAR__LLAMA_PROMPT_ROWS  1    /* 512 */
#define SEQPAR__LLAMA_MERGE_ROWS   1    /* 64 */
#define SEQPAR__LLAMA_TILE         3    /* 256 */
#define SEQPAR__ST_CHUNK           7    /* 2048 */
#define SEQPAR_MPI_PIECE           1003 /* (INT64_C(1) << 30) */
#define SEQPAR_NCCL__PINNED        1    /* 4096 */

/* trainers */
#define DEMO_VALUES       61   /* (1 << 17) */
#define DEMO_TABLE_PART   16   /* 4096 */
#define DEMO_AVERAGE_PART 61   /* (1 << 15) */
#define DEMO_DIGEST_PART  16   /* 4096 */
#define DEMO_HANDED_BYTES 1024 /* (1 << 24) */
#define DEMO_SUMMED_BYTES 512  /* (1 << 20) */

/* the oracle */
#define ATTEND_QUERIES  3 /* 16 */
#define ATTEND_KEYS     5 /* 64 */
#define ATTEND_LARGE    1 /* 60000000 */
#define ATTENTION_CHUNK 1 /* (1 << 16) */
#define STEP_BLOCK      9 /* 256 */

#endif
