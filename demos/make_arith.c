/* SPDX-License-Identifier: MIT OR Unlicense */
/* make_arith - writes arithmetic stories as JSON lines. The same seed gives the same items;
 * ranges that do not overlap give training and evaluation data:
 *     make_arith train.jsonl 5000 1 && make_arith eval.jsonl 200 1 5000
 * A last argument makes a careless teacher: that many of every 100 answers end in a wrong
 * number, which PPO can correct:
 *     make_arith careless.jsonl 5000 1 0 83 */
#define STB_DS_IMPLEMENTATION
#define SEQPAR_IMPLEMENTATION
#include <signal.h>
#include "seqpar.h"
#include "trainer/data/arith.h"
#include "trainer/base/escape.h"

static bool read_count(const char *text, uint64_t *value) {
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return isdigit((unsigned char)*text) && !*end && !errno;
}

int main(int argc, char **argv) {
    uint64_t numbers[4] = {1000, 1, 0, 0}; /* count, seed, first, wrong of 100 */
    demo_error error;
    char shown[4400];
    signal(SIGXFSZ, SIG_IGN); /* a file at its limit is an error with a sentence */
    bool help = argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"));
    if (argc < 2 || argc > 6 || argv[1][0] == '-') {
        fprintf(help ? stdout : stderr,
                "usage: %s FILE.jsonl [COUNT [SEED [FIRST [WRONG]]]]   (default 1000 1 0 0; "
                "WRONG: of 100 answers)\n",
                argv[0]);
        return help ? demo_print_failed("the usage") : 2;
    }
    for (int i = 2; i < argc; i++)
        if (!read_count(argv[i], &numbers[i - 2])) {
            fprintf(stderr, "%s: %s is no whole number\n", argv[0],
                    demo_escape(shown, sizeof shown, argv[i]));
            return 2;
        }
    if (numbers[3] > 100) {
        fprintf(stderr, "%s: %s wrong answers of 100 are too many; give 0 to 100\n", argv[0],
                demo_escape(shown, sizeof shown, argv[5]));
        return 2;
    }
    if (demo_arith_write(argv[1], numbers[1], numbers[2], numbers[0], numbers[3], &error)) {
        fprintf(stderr, "%s: %s\n", argv[0], demo_escape(shown, sizeof shown, error.text));
        return 1;
    }
    return 0;
}
