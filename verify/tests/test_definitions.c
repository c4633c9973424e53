/* SPDX-License-Identifier: MIT OR Unlicense */
/* Definitions of losses: every number that OpenRLHF, TRL and LLaMA-Factory gave for the small
   inputs of golden_definitions.tsv, values and derivatives, by the functions that the trainers
   call; and verify/pages/DEFINITIONS.md, which this program writes (--page).

   What a definition refuses is in test_options.c, whole runs by each are in test_absolute.c. */
#define SEQPAR_IMPLEMENTATION
#include "seqpar.h"
#include "trainer/run/options.h"
#include "support/test.h"
#include "trainer/ppo/advantage.h"
#include "second/golden.h"

#define GOLDEN_DEFINITIONS "verify/second/golden_definitions.tsv"
#define PAGE               "verify/pages/DEFINITIONS.md"
enum { MOST = 16, PAIRS_MOST = 8 };

/* ---- what the trainers compute, of numbers ---- */

typedef struct {
    const char *loss;
    int64_t count;
    double chosen[PAIRS_MOST], rejected[PAIRS_MOST], ref_chosen[PAIRS_MOST];
    double ref_rejected[PAIRS_MOST], chosen_length[PAIRS_MOST], rejected_length[PAIRS_MOST];
    double beta, smoothing, gamma, nll;
} pairs;

typedef struct {
    double loss, dchosen[PAIRS_MOST], drejected[PAIRS_MOST];
} pairs_result;

/* -1: the loss is of all pairs, kto_pair */
static int pair_kind(const char *name) {
    for (int kind = 0; kind < SEQPAR_PREFERENCE_COUNT; kind++)
        if (!strcmp(name, seqpar_preference_at(kind)->name)) return kind;
    return -1;
}

static demo_kto_means pairs_means(const pairs *p) {
    double chosen[PAIRS_MOST], rejected[PAIRS_MOST], terms[2 * PAIRS_MOST];
    for (int64_t i = 0; i < p->count; i++) {
        chosen[i] = p->chosen[i] - p->ref_chosen[i];
        rejected[i] = p->rejected[i] - p->ref_rejected[i];
    }
    return demo_kto_means_of(chosen, rejected, p->count, p->beta, terms);
}

static pairs_result pairs_loss(const demo_definition *by, const pairs *p) {
    seqpar_preference_desc d = {.kind = pair_kind(p->loss),
                                .beta = p->beta,
                                .label_smoothing = p->smoothing,
                                .gamma = p->gamma,
                                .nll_coef = p->nll};
    demo_kto_means means = pairs_means(p);
    pairs_result y = {0};
    demo_defined_pair(by, &d, seqpar_mean(p->chosen_length, p->count));
    for (int64_t i = 0; i < p->count; i++) {
        seqpar_preference one = {p->chosen[i],
                                 p->rejected[i],
                                 p->ref_chosen[i],
                                 p->ref_rejected[i],
                                 (int64_t)p->chosen_length[i],
                                 (int64_t)p->rejected_length[i]};
        seqpar_pair_result r = demo_kto_pair(one.chosen - one.ref_chosen,
                                             one.rejected - one.ref_rejected, p->beta, &means);
        if (d.kind >= 0)
            test_expect(!seqpar_preference_loss(NULL, &r, &one, &d), "a pair is refused");
        y.loss += r.loss / (double)p->count;
        y.dchosen[i] = r.dchosen / (double)p->count;
        y.drejected[i] = r.drejected / (double)p->count;
    }
    return y;
}

typedef struct {
    const char *mode, *estimator; /* --loss_agg_mode or NULL */
    bool gspo;
    int64_t texts, tokens, length_max;
    double logp[MOST], old_logp[MOST], advantages[MOST], length[MOST], clip, bound;
} policy;

/* GSPO's slope as update.h hands it to a token. */
static double policy_loss(const demo_definition *by, const policy *p, double *dlogp) {
    seqpar_policy_desc clip = demo_defined_clip(by, p->gspo, p->clip, p->clip, p->bound);
    seqpar_aggregate over = {demo_defined_mean(by, p->mode, p->gspo, p->estimator), p->tokens,
                             p->texts, p->length_max};
    double loss = 0;
    for (int64_t i = 0, first = 0; i < p->texts; first += (int64_t)p->length[i++]) {
        int64_t n = (int64_t)p->length[i];
        double change = 0;
        for (int64_t t = first; t < first + n; t++) change += p->logp[t] - p->old_logp[t];
        for (int64_t t = first; t < first + n; t++) {
            seqpar_policy_result r = seqpar_policy_loss(
                p->gspo ? change / (double)n : p->logp[t], p->gspo ? 0.0 : p->old_logp[t],
                p->advantages[i], &clip);
            double weight = demo_defined_weight(by, &over, n);
            loss += r.loss * weight;
            dlogp[t] = r.dlogp * weight;
        }
    }
    return loss;
}

/* ---- golden numbers ---- */

static int seen[DEMO_DEFINITIONS];

static void expect_numbers(const golden_case *c, const char *name, const double *got,
                           int count) {
    double want[MOST], limit[MOST];
    int n = golden_expected(c, name, MOST, want, limit);
    test_expect(n == count, "line %d: %s has %d values, not %d", c->line, name, n, count);
    for (int i = 0; i < n && i < count; i++)
        test_expect(fabs(got[i] - want[i]) <= 1e-12 * fmax(1, fabs(want[i])),
                    "line %d, %s %s[%d]: %.17g, the package has %.17g", c->line, c->objective,
                    name, i, got[i], want[i]);
}

static int numbers(const golden_case *c, const char *name, double *to, int most) {
    int n = golden_array(c, name, most, to);
    test_expect(n > 0, "line %d: no %s", c->line, name);
    return n;
}

static bool visit_pairs(const golden_case *c, const demo_definition *by) {
    pairs p = {.loss = c->objective,
               .beta = golden_number(c, "beta", NAN),
               .smoothing = golden_number(c, "label_smoothing", 0),
               .gamma = golden_number(c, "gamma", 0),
               .nll = golden_number(c, "nll_coef", 0)};
    if (pair_kind(p.loss) < 0 && strcmp(p.loss, "kto_pair")) return false;
    p.count = numbers(c, "chosen", p.chosen, PAIRS_MOST);
    numbers(c, "rejected", p.rejected, PAIRS_MOST);
    numbers(c, "ref_chosen", p.ref_chosen, PAIRS_MOST);
    numbers(c, "ref_rejected", p.ref_rejected, PAIRS_MOST);
    numbers(c, "chosen_length", p.chosen_length, PAIRS_MOST);
    numbers(c, "rejected_length", p.rejected_length, PAIRS_MOST);
    pairs_result y = pairs_loss(by, &p);
    test_expect(demo_list_has(by->pairs, p.loss), "line %d: %s has no %s", c->line, by->name,
                p.loss);
    expect_numbers(c, "loss", &y.loss, 1);
    expect_numbers(c, "dchosen", y.dchosen, (int)p.count);
    expect_numbers(c, "drejected", y.drejected, (int)p.count);
    return true;
}

static bool visit_policy(const golden_case *c, const demo_definition *by) {
    static const char *const modes[] = {"token-mean", "seq-mean-token-mean"};
    policy p = {.estimator = golden_is(c, "mean", "dr_grpo") ? "dr_grpo" : "group_norm",
                .gspo = golden_is(c, "mean", "gspo"),
                .clip = golden_number(c, "clip", NAN),
                .bound = golden_number(c, "bound", 0),
                .length_max = (int64_t)golden_number(c, "length_max", 0)};
    double dlogp[MOST], loss;
    if (strcmp(c->objective, "policy")) return false;
    if (golden_is(c, "mean", modes[1])) p.mode = modes[1]; /* the other is the default */
    p.tokens = numbers(c, "logp", p.logp, MOST);
    p.texts = numbers(c, "length", p.length, MOST);
    numbers(c, "old_logp", p.old_logp, MOST);
    numbers(c, "advantages", p.advantages, MOST);
    loss = policy_loss(by, &p, dlogp);
    expect_numbers(c, "loss", &loss, 1);
    expect_numbers(c, "dlogp", dlogp, (int)p.tokens);
    return true;
}

static bool visit_advantages(const golden_case *c, const demo_definition *by) {
    double x[MOST], value[MOST], got[MOST], back[MOST];
    bool whitens = !strcmp(c->objective, "whiten"), grouped = golden_find(c->inputs, "reward");
    int n, samples = (int)golden_number(c, "samples", 1);
    if (!whitens && !grouped) return false;
    n = numbers(c, whitens ? "rewards" : "reward", x, MOST);
    for (int i = 0; grouped && i < n; i += samples)
        test_expect(!group_advantages(NULL, got + i, x + i, samples,
                                      strcmp(c->objective, "group_norm") ? ADVANTAGE_MEAN
                                                                         : ADVANTAGE_GRPO,
                                      by->group_eps),
                    "line %d: a group is refused", c->line);
    if (whitens) {
        numbers(c, "values", value, MOST);
        gae(got, back, x, value, n, &(gae_desc){1, 0.95});
        whiten(got, n, by->whiten);
    }
    expect_numbers(c, "advantage", got, n);
    return true;
}

static bool visit_kl(const golden_case *c, const demo_definition *by) {
    static const char *const kinds[] = {"k1", "k2", "k3"};
    double logp[MOST], ref[MOST], kl[MOST], dlogp[MOST];
    int kind = 0, n;
    if (strcmp(c->objective, "kl")) return false;
    while (kind < 3 && !golden_is(c, "kind", kinds[kind])) kind++;
    n = numbers(c, "logp", logp, MOST);
    numbers(c, "ref_logp", ref, MOST);
    for (int i = 0; i < n; i++) kl[i] = demo_defined_kl(by, logp[i], ref[i], kind, &dlogp[i]);
    expect_numbers(c, "kl", kl, n);
    expect_numbers(c, "dlogp", dlogp, n);
    return true;
}

static void visit(const golden_case *c, void *unused) {
    char program[32] = "";
    (void)unused;
    sscanf(golden_text(c, "program") ? golden_text(c, "program") : "", "%31[^ ]", program);
    const demo_definition *by = demo_defined(program);
    bool known = visit_pairs(c, by) || visit_policy(c, by) || visit_advantages(c, by) ||
                 visit_kl(c, by);
    test_expect(known && !strcmp(by->name, program), "line %d: %s of %s is unknown", c->line,
                c->objective, program);
    seen[by - demo_definitions]++;
    test_end("definitions_%s_%s, line %d", program, c->objective, c->line);
}

static void test_golden(void) {
    int cases = golden_each(GOLDEN_DEFINITIONS, visit, NULL);
    test_expect(cases >= 40, "%d cases", cases);
    for (int i = 1; i < DEMO_DEFINITIONS; i++)
        test_expect(seen[i] >= 10, "%d cases of %s", seen[i], demo_definitions[i].name);
    test_end("definitions_golden: %d cases", cases);
}

/* ---- derivatives through means that are cut ---- */

/* By differences: the means of kto_pair are moved by every response, one of them below 0. */
static void test_kto_pair(double shift) {
    pairs p = {.loss = "kto_pair", .count = 3, .beta = 0.3};
    for (int i = 0; i < 3; i++) {
        p.chosen[i] = test_normal() + shift;
        p.rejected[i] = test_normal() - shift;
    }
    pairs_result y = pairs_loss(&demo_definitions[DEMO_DEFINED_HERE], &p);
    for (int i = 0; i < 6; i++) {
        double *x = i < 3 ? &p.chosen[i] : &p.rejected[i - 3], at = *x, sides[2];
        double got = i < 3 ? y.dchosen[i] : y.drejected[i - 3];
        for (int side = 0; side < 2; side++) {
            *x = at + (side ? 1e-5 : -1e-5);
            sides[side] = pairs_loss(&demo_definitions[DEMO_DEFINED_HERE], &p).loss;
        }
        *x = at;
        test_expect(fabs((sides[1] - sides[0]) / 2e-5 - got) <= 1e-9,
                    "by response %d: %.12g, not %.12g", i, got, (sides[1] - sides[0]) / 2e-5);
    }
    test_end("definitions_kto_pair %g", shift);
}

static void test_not_a_number(void) {
    pairs p = {.loss = "kto_pair", .count = 2, .beta = 0.3, .chosen = {NAN, 1}};
    pairs_result y = pairs_loss(&demo_definitions[DEMO_DEFINED_HERE], &p);
    double dlogp = 0;
    test_expect(y.loss != y.loss && y.drejected[0] != y.drejected[0],
                "a NaN is lost in kto_pair: %g, %g", y.loss, y.drejected[0]);
    for (int i = 0; i < DEMO_DEFINITIONS; i++) {
        const demo_definition *by = &demo_definitions[i];
        seqpar_policy_desc clip = demo_defined_clip(by, false, .2, .2, 1.5);
        seqpar_policy_result r = seqpar_policy_loss(NAN, -1, 1, &clip);
        double kl = demo_defined_kl(by, NAN, -1, SEQPAR_KL_K3, &dlogp);
        test_expect(r.loss != r.loss && r.dlogp != r.dlogp, "%s's policy loses a NaN",
                    by->name);
        test_expect(kl != kl && dlogp != dlogp, "%s's KL loses a NaN", by->name);
    }
    test_end("definitions_not_a_number");
}

/* ---- the page ---- */

static const pairs example = {.count = 3,
                              .chosen = {-12.5, -7.25, -31},
                              .rejected = {-15.25, -6.5, -30},
                              .ref_chosen = {-13, -7.75, -30.5},
                              .ref_rejected = {-14.5, -6.75, -31.25},
                              .chosen_length = {5, 3, 11},
                              .rejected_length = {8, 2, 9},
                              .beta = 0.3,
                              .gamma = 0.5};
static const policy texts = {.estimator = "group_norm",
                             .texts = 2,
                             .tokens = 6,
                             .length_max = 8,
                             .logp = {-1, -.5, -2, -.9, -3, -.25},
                             .old_logp = {-1.3, -.4, -1.95, -.5, -1.5, -2.5},
                             .advantages = {.7, -1.1},
                             .length = {4, 2},
                             .clip = .2};

static const double refused = HUGE_VAL;

static double pairs_value(const demo_definition *by, const char *loss, double smoothing,
                          double nll) {
    pairs p = example;
    p.loss = loss;
    p.smoothing = smoothing;
    p.nll = nll;
    if (!demo_list_has(by->pairs, loss)) return refused;
    if (smoothing > 0 && !demo_list_has(by->smoothed, loss)) return refused;
    if (nll > 0 && !demo_list_has(by->with_nll, loss)) return refused;
    return pairs_loss(by, &p).loss;
}

static double policy_value(const demo_definition *by, policy p) {
    double dlogp[MOST];
    if (p.bound > 0 && !by->bounded) return refused;
    if (p.gspo && !demo_list_has(by->policies, "gspo")) return refused;
    if (p.mode && !demo_list_has(by->means, p.mode)) return refused;
    if (!strcmp(p.estimator, "dr_grpo") && !demo_list_has(by->estimators, "dr_grpo"))
        return refused;
    return policy_loss(by, &p, dlogp);
}

static double group_value(const demo_definition *by) {
    const double reward[] = {.3, .3, .30001, .3};
    double a[4];
    if (!demo_list_has(by->estimators, "group_norm")) return refused;
    group_advantages(NULL, a, reward, 4, ADVANTAGE_GRPO, by->group_eps);
    return a[2];
}

static double whitened_value(const demo_definition *by) {
    double x[] = {1.042375, 1.0025, 1.35, .9};
    whiten(x, 4, by->whiten);
    return x[2];
}

static double far_value(const demo_definition *by, bool gspo) {
    policy p = texts;
    p.gspo = gspo;
    p.old_logp[4] = p.logp[4] - 21;
    if (gspo) p.old_logp[5] = p.logp[5] - 24.25;
    return policy_value(by, p);
}

static double page_value(int number, const demo_definition *by) {
    policy bound = texts, long_bound = texts, dr = texts, over_texts = texts;
    bound.bound = 1.1;
    long_bound.bound = 3;
    dr.estimator = "dr_grpo";
    over_texts.mode = "seq-mean-token-mean";
    switch (number) {
    case 0: return pairs_value(by, "ipo", 0, 0);
    case 1: return pairs_value(by, "sigmoid", 0, 0.7);
    case 2: return pairs_value(by, "sigmoid", 0.1, 0);
    case 3: return pairs_value(by, "robust", 0.1, 0);
    case 4: return pairs_value(by, "hinge", 0, 0);
    case 5: return pairs_value(by, "simpo", 0, 0);
    case 6: return pairs_value(by, "kto_pair", 0, 0);
    case 7: return policy_value(by, texts);
    case 8: return policy_value(by, over_texts);
    case 9: return policy_value(by, dr);
    case 10: return policy_value(by, long_bound);
    case 11: return policy_value(by, bound);
    case 12: return far_value(by, false);
    case 13: return far_value(by, true);
    case 14: return group_value(by);
    case 15: return whitened_value(by);
    default: return demo_defined_kl(by, -1, -30, SEQPAR_KL_K1, NULL);
    }
}

static const char *const page_rows[] = {
    "`--pref_loss ipo`",
    "`--nll_loss_coef 0.7`",
    "`--label_smoothing 0.1` (cDPO)",
    "`--pref_loss robust --label_smoothing 0.1`",
    "`--pref_loss hinge`",
    "`--pref_loss simpo`",
    "`--pref_loss kto_pair`",
    "policy loss",
    "`--loss_agg_mode seq-mean-token-mean`",
    "`--advantage_estimator dr_grpo`, `--generate_max_len 8`",
    "`--dual_clip 3`",
    "`--dual_clip 1.1`, below 1 + `--eps_clip`",
    "a log-ratio of 21, advantage -1.1",
    "`--policy_loss_type gspo`, its mean log-ratio 22.625",
    "`--advantage_estimator group_norm`, rewards 0.3 0.3 0.30001 0.3: the third's advantage",
    "whitened 1.042375 1.0025 1.35 0.9: the third",
    "KL k1 of a log-ratio of 29"};

static void page_write(FILE *page) {
    fprintf(
        page,
        "# Definitions of losses\n\n"
        "<!-- SPDX-License-Identifier: MIT OR Unlicense -->\n"
        "<!-- written by build/test_definitions --page (make readme) -->\n\n"
        "`--loss_definition openrlhf|trl|llamafactory` says whose definition of a loss holds "
        "where they differ;\n`--from` says it, too (axolotl trains by TRL). Without either it "
        "is the first column. The numbers are what\n`demos/trainer/objective/definitions.h` makes of "
        "one example; `verify/second/golden_definitions.tsv` has those of the packages\nthemselves, "
        "and `verify/second/golden/definitions.py` how they were made. What a definition has no "
        "meaning for is\nrefused by name; a resume with another definition is refused.\n\n"
        "Read from ");
    for (int i = 1; i < DEMO_DEFINITIONS; i++)
        fprintf(page, "%s%s", demo_definitions[i].releases, i < 3 ? "; " : ".\n\n");
    fprintf(page,
            "Pairs (beta 0.3): log-probs of the chosen ones -12.5 -7.25 -31 over 5, 3 and "
            "11 tokens, of the rejected ones\n-15.25 -6.5 -30 over 8, 2 and 9; under the "
            "reference -13 -7.75 -30.5 and -14.5 -6.75 -31.25. Texts (eps_clip\n0.2): "
            "log-ratios 0.3 -0.1 -0.05 -0.4 with advantage 0.7, and -1.5 2.25 with "
            "advantage -1.1.\n\n|");
    for (int i = -1; i < DEMO_DEFINITIONS; i++)
        fprintf(page, " %s |", i < 0 ? "what" : demo_definitions[i].name);
    fprintf(page, "\n|---|---:|---:|---:|---:|\n");
    for (size_t k = 0; k < sizeof page_rows / sizeof *page_rows; k++) {
        fprintf(page, "| %s |", page_rows[k]);
        for (int i = 0; i < DEMO_DEFINITIONS; i++) {
            double value = page_value((int)k, &demo_definitions[i]);
            if (value == refused)
                fprintf(page, " refused |");
            else
                fprintf(page, " %.10g |", value);
        }
        fprintf(page, "\n");
    }
    fprintf(page, "| the padding token's row of the embedding learns from inputs |");
    for (int i = 0; i < DEMO_DEFINITIONS; i++)
        fprintf(page, " %s |", demo_definitions[i].padding ? "no" : "yes");
    fprintf(page, "\n");
}

static const char *const page_end =
    "\n"
    "- **IPO**: OpenRLHF compares sums of log-probs, TRL and LLaMA-Factory means over tokens.\n"
    "- **The NLL beside a preference**: of a response its mean, then the mean over pairs "
    "(OpenRLHF's `nll_loss_coef`,\n"
    "  LLaMA-Factory's `pref_ftx`); TRL's `sft` is one mean over all chosen tokens, here of the "
    "optimizer step, there\n"
    "  of a micro-batch.\n"
    "- **Label smoothing**: OpenRLHF and LLaMA-Factory make cDPO of `sigmoid`; TRL 1.16.0 leaves "
    "it out there, and has\n"
    "  it in `robust`.\n"
    "- **kto_pair**: OpenRLHF up to 0.8.11 (`VanillaKTOLoss`, which no trainer of that release "
    "takes) and TRL 0.8.6\n"
    "  below LLaMA-Factory. LLaMA-Factory 0.9.5 still offers the name, but the releases of TRL "
    "that it accepts do not:\n"
    "  0.18 and 0.19 end with an error. The means are those of the optimizer step.\n"
    "- **LLaMA-Factory 0.9.5 with TRL 0.20 to 0.24**: those hand `loss_type` to `dpo_loss` as "
    "an argument, which\n"
    "  LLaMA-Factory does not give, so that every `pref_loss` (`hinge`, `ipo`, `kto_pair`) "
    "is computed as `sigmoid`.\n"
    "  The definition here is that with TRL 0.18 or 0.19.\n"
    "- **Dual clip**: OpenRLHF bounds the ratio where the advantage is negative; TRL's `delta` "
    "bounds it before the\n"
    "  smaller of the two terms is taken. They differ where the bound is below 1 + eps_clip.\n"
    "- **What a policy loss is a mean over**: the tokens of the step by default everywhere; "
    "`seq-mean-token-mean` is\n"
    "  OpenRLHF's other mode and TRL's `loss_type grpo`. TRL's `dr_grpo` divides by texts x "
    "longest text. With gspo, or\n"
    "  over texts, OpenRLHF's KL and entropy terms stay means over tokens.\n"
    "- **Log-ratios**: seqpar and OpenRLHF cut those of tokens at +-20, OpenRLHF not those of "
    "gspo's texts, torch none.\n"
    "- **KL of a token**: OpenRLHF's is within +-10.\n"
    "- **Deviations**: of a group's rewards + 1e-9 (OpenRLHF) or 1e-4 (TRL); whitening by the "
    "population's, at least\n"
    "  1e-4 (OpenRLHF), or by n - 1 with 1e-8 beside the variance (TRL 0.24.0 and 0.9.6).\n"
    "- **Padding**: transformers opens the embedding with `padding_idx` where config.json names "
    "a `pad_token_id`, for all\n"
    "  three programs alike. Chat models often pad with the token that ends a turn, whose row "
    "then learns nothing from\n"
    "  inputs; a tied projection still teaches it. A pad token that a program sets later, on "
    "the tokenizer or the\n"
    "  config of a model that is open, changes nothing. Models that began from nothing have "
    "none.\n"
    "- **KTO, SFT**: alike in all, but for padding. Reward models: margins are OpenRLHF's and "
    "TRL's, `logexp` is\n"
    "  OpenRLHF's.\n"
    "- **Not followed**: means over a micro-batch or a rank where the step is meant, float32 "
    "inside of a loss, one\n"
    "  model for actor and critic with `vf_coef` (TRL 0.9.6, 0.24.0), TRL's RLOO and "
    "DPO variants beyond the table.\n";

static void test_page(void) {
    char *want = NULL, got[16384];
    size_t size = 0, count = 0;
    FILE *memory = open_memstream(&want, &size), *file = fopen(PAGE, "rb");
    page_write(memory);
    fputs(page_end, memory);
    fclose(memory);
    if (file) count = fread(got, 1, sizeof got, file);
    if (file) fclose(file);
    test_expect(size > 1000 && count == size && !memcmp(got, want, size),
                "%s is not what build/test_definitions --page writes; make readme", PAGE);
    free(want);
    test_end("definitions_page");
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "--page"))
        return page_write(stdout), fputs(page_end, stdout) < 0;
    test_begin(argc, argv);
    TEST(test_golden());
    TEST(test_kto_pair(1));
    TEST(test_kto_pair(-1));
    TEST(test_not_a_number());
    TEST(test_page());
    return test_summary();
}
