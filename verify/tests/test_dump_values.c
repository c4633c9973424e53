/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of PPO's critic: right ones in every layout, golden numbers, and
   one with each mistake. */
#define FOLDER "build/test_dump_values.d"
#include "support/dump_support.h"

static void make_values(const char *reduction, double clip, int layout, int64_t sp, int64_t dp,
                        int64_t micro) {
    begin("value", sp, dp, micro);
    s.reduction = reduction;
    s.clip_value = clip;
    s.with_values = 1;
    say("clip_value", clip);
    deal(layout);
    fill();
    EACH_ROW(d, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[d][a];
        r->old_values[t] = r->values[t] + 0.4 * test_normal();
        r->returns[t] = r->values[t] + test_normal() + 0.3 * s.member[t];
    }
    set_loss(right_loss());
}

static void test_right(const char *reduction) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= SP; sp++) {
            make_values(reduction, (double)(layout % 2) * 0.2, layout, sp,
                        1 + (sp + layout) % 3, 2);
            expect(0, "right", "loss right: got");
            test_end("values_right_%s_%s_P%lld", reduction, seqpar_layout_name(layout),
                     (long long)sp);
        }
    make_values(reduction, 0.2, SEQPAR_LAYOUT_STRIPE, 3, 2, 2);
    s.dtype = s.loss_dtype = SEQPAR_SAFETENSORS_F32;
    expect_right("values_of_F32", "loss right: got");
    s.dtype = SEQPAR_SAFETENSORS_BF16;
    expect_right("values_of_BF16", "rounding to 16 bits");
    s.dtype = SEQPAR_SAFETENSORS_F64;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++)
        if (s.of[dp][a].labels[t] == NONE) s.of[dp][a].values[t] = NAN;
    expect_right("values_of_untrained_nan", "loss right: got");
}

static void test_golden(void) {
    static const double V[] = {0.5, 1, -0.2}, old[] = {0.1, 0.95, -0.6}, G[] = {1, 0.2, -0.5};
    row *r = &s.of[0][0];
    make_values("token", 0.2, SEQPAR_LAYOUT_STRIPE, 2, 1, 1);
    for (int64_t t = 0; t < TOKENS; t++) r->labels[t] = NONE;
    for (int64_t i = 0; i < 3; i++) {
        int64_t t = cu_seqlens[2] + 3 + i;
        r->labels[t] = r->ids[t + 1];
        r->values[t] = V[i];
        r->old_values[t] = old[i];
        r->returns[t] = G[i];
    }
    set_loss(0.61 / 3);
    expect_right("values_golden", "the sums 0.61 over the counts 3");
    expect_loss(0.61 / 3 + 0.01, "unknown", "loss wrong");
}

static void test_mistakes(const char *reduction) {
    make_values(reduction, 0.2, SEQPAR_LAYOUT_ZIGZAG, 3, 2, 2);
    expect_loss(mean_loss(WRONG_SIDE), "clip_wrong_side", "loss wrong");
    expect_loss(mean_loss(NO_CLIP), "clip_missing", "loss wrong");
    for (s.source = FIRST; s.source <= CONTIGUOUS; s.source++) {
        expect_loss(mean_loss(SIDE_RETURNS), "side_tensor_not_split", "returns: ");
        expect_loss(mean_loss(SIDE_OLD_VALUES), "side_tensor_not_split", "old_values: ");
    }
    s.source = SPLIT;
    expect_loss(by_sequence() ? mean_of_tokens(RIGHT) : mean_of_documents(RIGHT),
                by_sequence() ? "mean_over_tokens" : "mean_over_sequences", "loss wrong");
    expect_loss(mean_of_groups(RIGHT, 0),
                by_sequence() ? "row_taken_for_sequence" : "mean_of_means", "loss wrong");
    expect_loss(right_loss() / 3, "shares_averaged", "over the ranks of a sequence");
    expect_loss(right_loss() * 2.31, "unknown", "loss wrong");
    expect_loss(NAN, by_sequence() ? "nan_of_an_empty_rank" : "unknown", "got nan");
    set_loss(right_loss());
    s.without = "old_values";
    expect_right("values_without_old", "loss not judged");
    s.without = "returns";
    expect_right("values_without_returns", "loss not judged");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    TEST(test_right("token"));
    TEST(test_right("sequence"));
    TEST(test_golden());
    TEST(test_mistakes("token"));
    TEST(test_mistakes("sequence"));
    return test_summary();
}
