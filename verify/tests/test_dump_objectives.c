/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify ver` on dumps of every objective: right ones in every layout and that look
   odd, side tensors that are not split, what shows nothing, and files that are refused. */
#define FOLDER "build/test_dump_objectives.d"
#include "support/dump_support.h"

static void test_right(const char *objective, const char *reduction) {
    for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++)
        for (int64_t sp = 1; sp <= SP; sp++) {
            int64_t dp = 1 + (sp + layout) % 3, micro = 1 + layout % 2;
            int dpo = !strcmp(objective, "dpo");
            int tokens = !strcmp(objective, "ppo") && !strcmp(reduction, "token");
            int alone = sp * dp * micro == 1 && (dpo || tokens);
            begin(objective, sp, dp, micro);
            s.reduction = reduction;
            deal(layout);
            fill();
            expect(alone ? 4 : 0, alone ? "insufficient" : "right",
                   !alone ? "loss right: got"
                   : dpo  ? "one rank has nothing"
                          : "a mean of means is the same here");
            test_end("objectives_right_%s_%s_%s_P%lld", objective, reduction,
                     seqpar_layout_name(layout), (long long)sp);
        }
}

/* ---- side tensors that tell of themselves ---- */

/* As in the first step: policy, reference and the policy at sampling time are one. */
static void make_first_step(const char *objective) {
    begin(objective, 3, 2, 1);
    deal(SEQPAR_LAYOUT_ZIGZAG);
    fill();
    EACH_ROW(dp, a) {
        row *r = &s.of[dp][a];
        memcpy(r->ref_logp, r->logp, sizeof r->logp);
        memcpy(r->old_logp, r->logp, sizeof r->logp);
        memset(r->kl, 0, sizeof r->kl);
        for (int64_t t = 0; t < TOKENS; t++)
            if (r->labels[t] == NONE) r->logp[t] = -50; /* nobody trains it */
    }
    set_loss(right_loss());
}

/* The dump's own ref_logp or old_logp are not split, and the loss is made of them. */
static void unsplit(const char *what, int source) {
    s.source = source;
    s.side = what;
    if (is("ppo")) set_loss(mean_loss(!strcmp(what, "ref_logp") ? SIDE_REFERENCE : SIDE_OLD));
    if (is("dpo") || is("kto")) set_loss(right_loss());
}

static void test_sides(void) {
    static const char *const objectives[] = {"dpo", "kto", "ppo"};
    for (int i = 0; i < 3; i++) {
        make(objectives[i], SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        unsplit("ref_logp", FIRST);
        expect_named("side_tensor_not_split", "ref_logp: ranks have the same");
        make_first_step(objectives[i]);
        unsplit("ref_logp", CONTIGUOUS);
        expect_named("side_tensor_not_split", "what a contiguous split would give it");
        if (i < 2) continue;
        make(objectives[i], SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        unsplit("old_logp", FIRST);
        expect_named("side_tensor_not_split", "old_logp: ranks have the same");
        make_first_step(objectives[i]);
        unsplit("old_logp", CONTIGUOUS);
        expect_named("side_tensor_not_split", "old_logp: it is logp of token");
    }
    /* one rank alone holds the row in an order that is not its own */
    make_first_step("dpo");
    s.sp = s.world = 1;
    s.dp = 1;
    s.held[0] = TOKENS;
    for (int32_t t = 0; t < TOKENS; t++) s.index[0][t] = TOKENS - 1 - t;
    note_places();
    unsplit("ref_logp", FIRST);
    expect_named("side_tensor_not_split", "each rank takes the first n of the row");
}

/* ---- right steps that look odd ---- */

static int64_t last_is_empty(int64_t t) { return t % 5 == 0; }
static int64_t documents_whole(int64_t t) {
    int64_t d = 0;
    while (d < DOCS && cu_seqlens[d + 1] <= t) d++;
    return d % 3;
}

/* Right, though ranks have the same ref_logp: for all, for equal texts, or by chance. */

static void test_sides_alike(void) {
    int64_t half;
    make("dpo", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) s.of[dp][a].ref_logp[t] = -3;
    set_loss(right_loss());
    expect_right("reference_of_one_number", "loss right: got");
    make("dpo", SEQPAR_LAYOUT_CONTIGUOUS, 2, 2, 1);
    half = s.held[0];
    EACH_ROW(dp, a)
    for (int64_t t = half; t < TOKENS; t++) {
        s.of[dp][a].ref_logp[t] = s.of[dp][a].ref_logp[t - half];
        s.of[dp][a].logp[t] = s.of[dp][a].logp[t - half];
    }
    set_loss(right_loss());
    expect_right("equal_texts", "loss right: got");
    make("dpo", SEQPAR_LAYOUT_CONTIGUOUS, 2, 2, 1);
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        row *r = &s.of[dp][a];
        if (t % half != 5 && t % half != 9) r->labels[t] = NONE;
        if (t >= half) r->ref_logp[t] = r->ref_logp[t - half];
    }
    set_loss(right_loss());
    s.without = "ids";
    expect_right("two_by_chance", "loss right: got");
}

static void each_objective(void (*step)(const char *objective, const char *reduction)) {
    static const char *const all[][2] = {{"sft", "sequence"}, {"rm", "token"},
                                         {"kto", "token"},    {"ppo", "token"},
                                         {"ppo", "sequence"}, {"dpo", "token"}};
    for (int i = 0; i < 6; i++) step(all[i][0], all[i][1]);
}

static void odd_but_right(const char *objective, const char *reduction) {
    static const seqpar_safetensors_dtype types[] = {
        SEQPAR_SAFETENSORS_F32, SEQPAR_SAFETENSORS_F16, SEQPAR_SAFETENSORS_BF16};
    for (int i = 0; i < 3; i++) {
        begin(objective, 3, 2, 2);
        s.reduction = reduction;
        deal(SEQPAR_LAYOUT_STRIPE);
        fill();
        s.dtype = s.loss_dtype = types[i];
        if (i && !strcmp(objective, "dpo")) /* whose means are as near as that */
            expect(4, "insufficient", "numbers of 16 bits hide it, too");
        else
            expect(0, "right", i ? "rounding to 16 bits" : "loss right: got");
        test_end("objectives_%s_%s_of_%s", objective, reduction,
                 seqpar_safetensors_dtype_name(types[i]));
    }
    begin(objective, 3, 2, 1);
    s.reduction = reduction;
    deal_by(last_is_empty);
    expect(0, "right", "loss right: got");
    test_end("objectives_%s_%s_of_an_empty_rank", objective, reduction);
    s.empty = 2;
    expect(0, "right", "loss right: got");
    test_end("objectives_%s_%s_with_empty_documents", objective, reduction);
    s.empty = 0;
    EACH_ROW(dp, a) { /* what nobody trains may be anything */
        row *r = &s.of[dp][a];
        for (int64_t t = 0; t < TOKENS; t++)
            if (r->labels[t] == NONE)
                r->logp[t] = r->ref_logp[t] = r->old_logp[t] = r->advantages[t] = NAN;
    }
    expect(0, "right", "loss right: got");
    test_end("objectives_%s_%s_of_untrained_nan", objective, reduction);
    EACH_ROW(dp, a) /* one document has no answer */
    for (int64_t t = cu_seqlens[3]; t < cu_seqlens[4]; t++) s.of[dp][a].labels[t] = NONE;
    set_loss(right_loss());
    expect(0, "right", "loss right: got");
    test_end("objectives_%s_%s_without_an_answer", objective, reduction);
}

/* A loss that is none of ours is not judged, all else is. */
static void test_other(void) {
    make("sft", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.objective = "other";
    set_loss(1e9);
    expect(0, "right", "labels right");
    test_end("objectives_other");
    s.of[1][0].labels[7] = 1 + s.of[1][0].ids[8];
    expect(1, "wrong: unknown", "labels wrong");
    test_end("objectives_other_labels");
}

/* PPO by another name, with GRPO's advantages and mean. */
static void test_grpo(void) {
    make_ppo("group");
    s.reduction = "sequence";
    set_loss(right_loss());
    s.grpo = 1;
    expect(0, "right",
           "objective grpo stands for ppo, with advantage group and reduction sequence");
    test_end("objectives_grpo");
}

/* What the package took for documents, beside those that are meant. */
static void test_boundaries(void) {
    static const struct {
        int64_t docs, used[DOCS + 1];
        const char *headline, *text;
    } table[] = {
        {DOCS, {0, 23, 24, 47, 53, 72, 79, 98, 107}, NULL, "the 8 documents of boundaries"},
        {1, {0, 107}, "documents_ignored", "lacks 7 offsets of boundaries, first 23"},
        {7, {0, 23, 24, 47, 72, 79, 98, 107}, "documents_ignored", "lacks 1 offsets of bou"},
        {8, {0, 23, 24, 48, 53, 72, 79, 98, 107}, "unknown", "boundaries has not, first 48"},
        {8,
         {0, 23, 24, 47, 53, 72, 79, 98, 106},
         "unknown",
         "lacks 1 offsets of boundaries, "
         "first 107"}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        char headline[40] = "right";
        make("sft", SEQPAR_LAYOUT_ZIGZAG, 3, 1, 1);
        s.used_docs = table[i].docs;
        memcpy(s.used, table[i].used, sizeof s.used);
        if (table[i].headline)
            snprintf(headline, sizeof headline, "wrong: %s", table[i].headline);
        expect(table[i].headline != NULL, headline, table[i].text);
        test_end("objectives_boundaries_%zu", i);
    }
}

/* The sampler's log-probs are to be those of training. */
static void test_on_policy(void) {
    make_ppo("group");
    EACH_ROW(dp, a)
    memcpy(s.of[dp][a].old_logp, s.of[dp][a].logp, sizeof s.of[dp][a].logp);
    s.dtype = SEQPAR_SAFETENSORS_F32;
    set_loss(right_loss());
    say_word("on_policy", "yes");
    expect(0, "right", "on_policy: ");
    test_end("objectives_on_policy");
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) s.of[dp][a].old_logp[t] *= 1 + 1e-6;
    set_loss(right_loss());
    expect(0, "right", "on_policy: |logp - old_logp|: mean");
    test_end("objectives_on_policy_nearly");
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) s.of[dp][a].old_logp[t] *= 1.1;
    set_loss(right_loss());
    expect(1, "wrong: unknown", "a temperature or a penalty that one side alone applies");
    test_end("objectives_on_policy_scaled");
    s.keys = 0;
    expect(0, "right", "loss right");
    test_end("objectives_on_policy_not_said");
}

/* A token without a label has Inf, and its loss is multiplied by 0. */
static void test_nan_times_mask(void) {
    static const char *const objectives[] = {"sft", "dpo", "kto", "ppo"};
    for (int i = 0; i < 4; i++) {
        row *r = &s.of[1][0];
        int64_t t = 0;
        make(objectives[i], SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
        while (r->labels[t] != NONE) t++;
        r->logp[t] = -INFINITY;
        expect(0, "right", "loss right: got");
        set_loss(NAN);
        expect(1, "wrong: nan_times_mask", "which has no label, is -inf");
        test_end("objectives_%s_nan_times_mask", objectives[i]);
        (i < 3 ? r->ref_logp : r->advantages)[t] = NAN;
        r->logp[t] = 0;
        if (i) expect(1, "wrong: nan_times_mask", "which has no label, is nan");
        if (i) test_end("objectives_%s_nan_times_mask_elsewhere", objectives[i]);
    }
}

static void test_forms(void) {
    static const char *const objectives[] = {"dpo", "sft", "kto", "ppo"};
    for (int i = 0; i < 4; i++) {
        begin(objectives[i], 3, 2, 1);
        s.reduction = is("sft") ? "sequence" : "token";
        s.padded = i < 2;
        s.whole = i - 1;
        deal(SEQPAR_LAYOUT_ZIGZAG);
        fill();
        EACH_ROW(dp, a)
        for (int64_t d = 0; d < DOCS; d++)
            s.of[dp][a].rewards[d] = floor(s.of[dp][a].rewards[d] * 2);
        set_advantages(in_group, 0);
        set_loss(right_loss());
        expect_right(i < 2 ? "padding_is_a_document" : "integers", "loss right: got");
    }
}

/* Numbers are rounded as they are written, and the loss was made of what they were before. */

static void test_rounding(void) {
    static const char *const objectives[] = {"sft", "dpo", "kto", "ppo"};
    static const char *const rough[][2] = {
        {"rm", "scores"}, {"rm", "values"}, {"ppo", "advantages"}, {"ppo", "rewards"}};
    for (int i = 0; i < 4; i++) {
        make(objectives[i], SEQPAR_LAYOUT_STRIPE, 3, 2, 1);
        EACH_ROW(dp, a)
        for (int64_t t = 0; t < TOKENS; t++) {
            s.of[dp][a].logp[t] -= 9;
            s.of[dp][a].ref_logp[t] -= 9;
            s.of[dp][a].old_logp[t] -= 9;
        }
        set_loss(right_loss());
        s.dtype = SEQPAR_SAFETENSORS_BF16;
        write_scene();
        test_expect(ask(said, sizeof said) != 1, "'%.600s'", said);
        test_end("objectives_%s_of_large_numbers", objectives[i]);
    }
    for (int i = 0; i < 4; i++) {
        make(rough[i][0], SEQPAR_LAYOUT_STRIPE, 3, 2, 1);
        s.rough = rough[i][1];
        for (int64_t d = 0; d < DOCS; d++) s.of[0][0].rewards[d] += 7.031;
        set_advantages(in_group, 0);
        set_loss(right_loss());
        expect_right(rough[i][1], "rewards right: ");
    }
    for (int i = 0; i < 12; i++) { /* the loss alone is rounded */
        begin("rm", 3, 2, 1);
        test_state += (uint64_t)i;
        deal(SEQPAR_LAYOUT_ZIGZAG);
        fill();
        s.loss_dtype = SEQPAR_SAFETENSORS_BF16;
        write_scene(); /* which may hide a mean of means */
        test_expect(ask(said, sizeof said) != 1, "'%.600s'", said);
        test_end("objectives_right_rm_loss_of_BF16");
    }
}

static double kto_of_trained(void) {
    double sum = 0, count = 0, n;
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < s.of[dp][a].docs; d++) {
        double h = h_of(&s.of[dp][a], d, 0, s.sp, 1, &n), x = s.beta * (h - z_of(dp, a, Z));

        if (n == 0) continue;
        sum += 1 - 1 / (1 + exp(s.of[dp][a].desirable[d] != 0 ? -x : x));
        count++;
    }
    return sum / count;
}

/* Means and deviations without the documents that have no token supervised. */
static void leave_out(void) {
    EACH_ROW(dp, a)
    for (int64_t d = 1; d < s.of[dp][a].docs; d += 2) {
        if (d == 3)
            for (int64_t t = cu_seqlens[d]; t < cu_seqlens[d + 1]; t++)
                s.of[dp][a].labels[t] = NONE;
        if (d <= 3) s.of[dp][a].groups[d] += 1000; /* in no other's, while they are made */
    }
    set_advantages(in_group, 0);
    EACH_ROW(dp, a)
    for (int64_t d = 1; d <= 3; d += 2) s.of[dp][a].groups[d] -= 1000;
    set_loss(right_loss());
}

static void leave_one_out(void) {
    double mean, pop, unbiased;
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < cu_seqlens[s.of[dp][a].docs]; t++) {
        row *r = &s.of[dp][a];
        int64_t d = document_of(r, t);
        double n;
        moments(in_group, dp, a, d, &mean, &pop, &unbiased);
        n = unbiased > 0 ? 1 / (1 - pop * pop / unbiased / unbiased) : 1;
        r->advantages[t] = (r->rewards[d] - mean) * n / (n - 1);
    }
    set_loss(right_loss());
}

static void test_accepted(void) {
    make("kto", SEQPAR_LAYOUT_STRIPE, 3, 2, 1);
    EACH_ROW(dp, a)
    for (int64_t t = cu_seqlens[3]; t < cu_seqlens[4]; t++) s.of[dp][a].labels[t] = NONE;
    set_loss(kto_of_trained());
    expect_right("of_trained_documents", "without a supervised token are left out: no mistake");
    make_ppo("group");
    leave_out();
    expect_right("of_trained_documents", "without a supervised token are left out: no mistake");
    make_ppo("group_mean");
    leave_one_out();
    expect_right("leave_one_out", "the mean of the others: no mistake");
    make_ppo("group");
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t += 9) s.of[dp][a].ref_logp[t] = s.of[dp][a].logp[t] + 4;
    set_loss(mean_loss(K3_CUT));
    expect_right("kl_cut", "cut at 10, as verl and OpenRLHF do: no mistake");
    make_ppo("group"); /* the sum of all is about 0: what rounding makes is no mistake */
    EACH_ROW(dp, a)
    for (int64_t t = 0; t < TOKENS; t++) {
        s.of[dp][a].old_logp[t] = s.of[dp][a].ref_logp[t] = s.of[dp][a].logp[t];
        s.of[dp][a].advantages[t] = s.of[dp][a].ids[t] % 2 ? 1 : -1;
    }
    s.advantage = "given";
    set_loss(right_loss() + 5e-6);
    expect_right("about_0",
                 "so not excluded: kl_missing, ratio_inverted, clip_wrong_side, clip_missing");
}

/* ---- what shows nothing ---- */

static void test_shows_nothing(void) {
    make_first_step("dpo");
    expect_nothing("first_step", "policy and reference are so close");
    set_loss(0.71);
    expect_named("unknown", "so the loss should be ln 2");
    make_first_step("kto");
    expect_nothing("first_step", "policy and reference are close");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    EACH_ROW(dp, a) {
        memset(s.of[dp][a].values, 0, sizeof s.of[dp][a].values);
        memset(s.of[dp][a].scores, 0, sizeof s.of[dp][a].scores);
    }
    set_loss(log(2));
    expect_nothing("of_zeros", "all values are the same");
    s.without = "values";
    expect_nothing("scores_of_zeros", "the scores of a pair are so close");
    begin("sft", 3, 2, 1);
    s.reduction = "sequence";
    deal_by(documents_whole);
    expect_nothing("documents_whole", "by each rank's own counts are the same here");
}

static void test_rewards_show_nothing(void) {
    make_ppo("group");
    EACH_ROW(dp, a)
    for (int64_t d = 0; d < DOCS; d++) s.of[dp][a].rewards[d] = 0.7;
    set_advantages(in_group, 0);
    set_loss(right_loss());
    expect_nothing("equal_rewards", "rewards are so alike");
    make_ppo("group");
    s.of[0][1].rewards[2] = INFINITY;
    expect_nothing("rewards_of_inf", "what advantages are made of is NaN or Inf already");
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.of[0][0].kl[2] = NAN;
    set_loss(NAN);
    expect_nothing("kl_of_nan", "NaN or Inf already");
    make_ppo("group");
    s.of[0][0].old_logp[2] = NAN;
    set_loss(NAN);
    expect_nothing("old_logp_of_nan", "NaN or Inf already");
    begin("ppo", 1, 1, 1);
    s.reduction = "sequence";
    deal(SEQPAR_LAYOUT_CONTIGUOUS);
    fill();
    EACH_ROW(dp, a) {
        memset(s.of[dp][a].advantages, 0, sizeof s.of[dp][a].advantages);
        memcpy(s.of[dp][a].ref_logp, s.of[dp][a].logp, sizeof s.of[dp][a].logp);
    }
    s.advantage = "given";
    set_loss(right_loss());
    expect_nothing("of_zeros", "all known mistakes give the same here");
}

/* Nobody says where documents begin: what needs it is not judged, and the rest is. */
static void test_without_documents(void) {
    static const char *const of_documents[] = {"dpo", "rm", "kto", "ppo"};
    static const char *const rewards[] = {"rewards", "rewards not judged: it takes cu_seqlens",
                                          "rewards", "rewards not judged: it takes cu_seqlens"};
    for (int i = 0; i < 4; i++)
        for (int some = 0; some < 2; some++) {
            make(of_documents[i], SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
            s.reduction = "sequence";
            s.without = "cu_seqlens";
            s.without_below = some ? 3 : 0; /* of one replica's ranks alone */
            EACH_ROW(dp, a)                 /* labels are right without documents, too */
            for (int64_t t = 0; t + 1 < TOKENS; t++) {
                row *r = &s.of[dp][a];
                if (r->labels[t] != NONE) r->ids[t + 1] = r->labels[t];
            }
            expect(0, "right", "loss not judged: it takes cu_seqlens");
            /* dpo and kto have no such stage */
            test_expect(!strstr(said, rewards[i]) == (i % 2 == 0), "'%s': '%s'", rewards[i],
                        said);
            test_end("objectives_%s_without_documents_%d", s.objective, some);
        }
    make_ppo("group"); /* the mean over tokens needs no documents */
    s.without = "cu_seqlens";
    expect_right("without_documents", "loss right: got");
    set_loss(right_loss() + 0.3);
    expect(1, "wrong: unknown", "loss wrong: got");
    test_end("objectives_ppo_wrong_without_documents");
}

static void test_not_judged(void) {
    static const char *const lacks[][2] = {
        {"dpo", "ref_logp"}, {"kto", "kl"},         {"kto", "desirable"},  {"ppo", "old_logp"},
        {"ppo", "ref_logp"}, {"ppo", "advantages"}, {"sft", "cu_seqlens"}, {"rm", "loss"},
        {"ppo", "rewards"},  {"ppo", "groups"}};
    for (int i = 0; i < 10; i++) {
        int reward = i >= 8;
        begin(lacks[i][0], 3, 2, 1);
        s.reduction = is("sft") ? "sequence" : "token";
        deal(SEQPAR_LAYOUT_CONTIGUOUS);
        fill();
        s.without = lacks[i][1];
        expect(0, "right", reward ? "rewards not judged" : "loss not judged");
        test_end("objectives_%s_without_%s", lacks[i][0], lacks[i][1]);
    }
    test_without_documents();
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.without = "kl";
    s.without_below = 3; /* by one replica's ranks alone */
    expect_right("without_kl_in_a_replica", "loss not judged");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    s.without = "scores";
    s.without_below = 3;
    expect_right("scores_of_one_replica", "rewards not judged");
    s.without_values = 1; /* the other has scores alone */
    expect_right("scores_or_values", "loss not judged");
    make_ppo("given");
    expect_right("advantages_given", "rewards not judged");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    EACH_ROW(dp, a) s.of[dp][a].docs--;
    s.without = "labels";
    expect_nothing("odd", "a document without a partner");
}

/* ---- files ---- */

static void test_files(void) {
    static const char *const of_tokens[] = {"ref_logp", "old_logp", "advantages"};
    char text[200];
    make_ppo("group");
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "tensor 0.%s has %lld elements and 0.index %lld",
                 of_tokens[i], (long long)s.held[1] - 1, (long long)s.held[1]);
        expect_refused(of_tokens[i], text);
    }
    expect_refused("rewards", "0.rewards has 7 elements and its row 8 documents");
    expect_refused("rewards differ", "0.rewards differs from another rank's of the sequence at "
                                     "document 1; write what is used");
    expect_refused("groups differ", "0.groups differs from another rank's");
    make("rm", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_refused("values", "tensor 0.values has");
    expect_refused("scores", "0.scores has 7 elements and its row 8 documents");
    expect_refused("scores more", "0.scores has 9 elements and its row 8 documents");
    expect_refused("scores differ", "0.scores differs from another rank's");
    make("kto", SEQPAR_LAYOUT_ZIGZAG, 3, 2, 1);
    expect_refused("kl", "0.kl has 7 elements and its row 8 documents");
    expect_refused("kl differ", "0.kl differs from another rank's");
    s.of[0][0].desirable[3] = 2;
    s.odd = NULL;
    s.without = "none";
    expect_refused(NULL, "0.desirable has 2 at document 3; write 1 or 0");
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    each_objective(test_right);
    TEST(test_sides());
    each_objective(odd_but_right);
    TEST(test_boundaries());
    TEST(test_on_policy());
    TEST(test_other());
    TEST(test_grpo());
    TEST(test_nan_times_mask());
    TEST(test_forms());
    TEST(test_rounding());
    TEST(test_sides_alike());
    TEST(test_accepted());
    TEST(test_shows_nothing());
    TEST(test_rewards_show_nothing());
    TEST(test_not_judged());
    TEST(test_files());
    return test_summary();
}
