/* SPDX-License-Identifier: MIT OR Unlicense */
/* `seqpar-verify run`: every operation against numbers that are worked out here, on tokens
   dealt to ranks at random; steps that gen asks and the operations answer; planted mistakes
   undone. test_dump_run_input.c has bad input, and what stays as it was. */
#define FOLDER "build/test_dump_run.d"
#include "support/run_dumps.h"

/* ---- positions, labels ---- */

static void test_tokens(void) {
    double wrong[MOST];
    for (int64_t sp = 1; sp <= 5; sp++) {
        make(sp, 1 + sp % 2, 1 + sp % 3);
        for (int64_t i = 0; i < rows(); i++) {
            put_row(i, "ids", s.of[i].ids, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
            for (int64_t t = 0; t < s.of[i].n; t++) /* wrong ones, masked where they are */
                wrong[t] = s.of[i].labels[t] == -100 ? -100 : 5 - floor(s.of[i].labels[t] / 2);
            put_row(i, "labels", wrong, SEQPAR_SAFETENSORS_I32, 1, 1, 1);
        }
        write_books("in", &made);
        runs("positions", "in", "mid", "");
        runs("labels", "mid", "out", "");
        open_result();
        for (int64_t i = 0; i < rows(); i++) {
            const row *w = &s.of[i];
            double places[MOST];
            for (int64_t t = 0; t < w->n; t++)
                places[t] = (double)(t - w->cu[document_of(w, t)]);
            compare(i, "positions", places, 1, 0);
            compare(i, "labels", w->labels, 1, 0);
        }
        test_expect(find(&got.rank[0], "0.labels")->dtype == SEQPAR_SAFETENSORS_I32,
                    "labels are no I32 any more");
        runs("labels", "mid", "out", "--unmasked");
        open_result();
        for (int64_t i = 0; i < rows(); i++) {
            const row *w = &s.of[i];
            double all[MOST];
            for (int64_t t = 0; t < w->n; t++)
                all[t] = t + 1 < w->n && document_of(w, t) == document_of(w, t + 1)
                             ? w->ids[t + 1]
                             : -100;
            compare(i, "labels", all, 1, 0);
        }
        test_end("run_positions_and_labels_P%lld", (long long)sp);
    }
}

/* ---- attention ---- */

static double of_dout(const row *w) {
    static double out[MOST * HEADS * OUT], lse[MOST * HEADS];
    double sum = 0;
    attend(w, NULL, -1, out, lse);
    for (int64_t i = 0; i < w->cu[w->docs] * HEADS * OUT; i++) sum += out[i] * w->dout[i];
    return sum;
}

/* By central differences. */
static void slopes(row *w, double *x, int64_t n, double *to) {
    for (int64_t i = 0; i < n; i++) {
        double at = x[i], step = 1e-4, f[4];
        for (int k = 0; k < 4; k++) {
            x[i] = at + step * (double)(k < 2 ? k - 2 : k - 1);
            f[k] = of_dout(w);
        }
        x[i] = at;
        to[i] = (8 * (f[2] - f[1]) - (f[3] - f[0])) / (12 * step);
        if (fabs(to[i]) < 1e-9) to[i] = 0; /* differences of nothing */
    }
}

static void test_attention(void) {
    static double out[MOST * HEADS * OUT], lse[MOST * HEADS], dx[MOST * HEADS * DIM];
    for (int64_t sp = 1; sp <= 5; sp++) {
        make(sp, 1 + sp % 2, 1 + sp % 2);
        scale = sp % 2 ? 1 / sqrt(DIM) : 0.8;
        softcap = sp == 3 || sp == 4 ? 1.5 : 0;
        window = sp > 1 && sp < 5 ? 3 : 0;
        if (!(sp % 2)) say_all("softmax_scale", "%.17g", scale);
        if (softcap > 0) say_all("softcap", "%.17g", softcap);
        if (window) say_all("window", "%.0f", (double)window);
        for (int64_t i = 0; i < rows(); i++) {
            put_row(i, "q", s.of[i].q, SEQPAR_SAFETENSORS_F64, 3, HEADS, DIM);
            put_row(i, "k", s.of[i].k, SEQPAR_SAFETENSORS_F64, 3, KV, DIM);
            put_row(i, "v", s.of[i].v, SEQPAR_SAFETENSORS_F64, 3, KV, OUT);
            put_row(i, "dout", s.of[i].dout, SEQPAR_SAFETENSORS_F64, 3, HEADS, OUT);
            put_row(i, "out", s.of[i].q, SEQPAR_SAFETENSORS_F32, 3, HEADS, OUT);
        }
        write_books("in", &made);
        runs("attention", "in", "mid", "");
        runs("attention-gradient", "mid", "out", "");
        open_result();
        for (int64_t i = 0; i < rows(); i++) {
            row *w = &s.of[i];
            attend(w, NULL, -1, out, lse);
            compare(i, "out", out, HEADS * OUT, 0x1p-23); /* it replaces F32 */
            compare(i, "lse", lse, HEADS, 1e-14);
            slopes(w, w->q, w->n * HEADS * DIM, dx);
            compare(i, "dq", dx, HEADS * DIM, 1e-9);
            slopes(w, w->k, w->n * KV * DIM, dx);
            compare(i, "dk", dx, KV * DIM, 1e-9);
            slopes(w, w->v, w->n * KV * OUT, dx);
            compare(i, "dv", dx, KV * OUT, 1e-9);
        }
        test_end("run_attention_P%lld", (long long)sp);
    }
}

static void test_merge(void) {
    static double out[MOST * HEADS * OUT], lse[MOST * HEADS];
    scale = 3; /* scores are far apart */
    softcap = 0;
    window = 0;
    for (int64_t sp = 1; sp <= 5; sp++) {
        make(sp, 1, 2);
        for (int64_t i = 0; i < rows(); i++) put_parts(i, sp);
        write_books("in", &made);
        runs("merge", "in", "out", "");
        open_result();
        for (int64_t i = 0; i < rows(); i++) {
            attend(&s.of[i], NULL, -1, out, lse);
            compare(i, "out", out, HEADS * OUT, 1e-14);
            compare(i, "lse", lse, HEADS, 1e-14);
        }
        test_end("run_merge_P%lld", (long long)sp);
    }
}

/* ---- losses ---- */

static double loss_of_pairs(int rm) {
    double sum = 0, count = 0;
    for (int64_t i = 0; i < rows(); i++)
        for (int64_t k = 0; k < s.of[i].docs; k += 2) {
            const row *w = &s.of[i];
            double h = rm ? w->values[w->cu[k + 1] - 1] - w->values[w->cu[k + 2] - 1]
                          : 0.3 * (margin(w, k) - margin(w, k + 1));
            sum += softplus(-h);
            count++;
        }
    return sum / count;
}

static double loss_of_kto(void) {
    double sum = 0, count = 0;
    for (int64_t a = 0; a < s.accumulation; a++) {
        double z = 0, docs = 0;
        for (int64_t dp = 0; dp < s.dp; dp++) {
            const row *w = &s.of[dp * s.accumulation + a];
            for (int64_t k = 0; k < w->docs; k++) z += w->kl[k];
            docs += (double)w->docs;
        }
        z = z > 0 ? z / docs : 0;
        for (int64_t dp = 0; dp < s.dp; dp++) {
            const row *w = &s.of[dp * s.accumulation + a];
            for (int64_t k = 0; k < w->docs; k++) {
                double x = 0.3 * (margin(w, k) - z);
                sum += 1 - 1 / (1 + exp(w->desirable[k] > 0 ? -x : x));
            }
        }
        count += docs;
    }
    return sum / count;
}

static void expect_loss(const char *what, double want) {
    write_books("in", &made);
    runs("loss", "in", "out", "");
    open_result();
    for (int64_t r = 0; r < got.world; r++) {
        item *t = find(&got.rank[r], "loss");
        test_expect(t && t->dims == 0 && fabs(t->x[0] - want) <= 1e-13 * (1 + fabs(want)),
                    "rank %lld: loss is %.17g, not %.17g", (long long)r, t ? t->x[0] : NAN,
                    want);
    }
    test_end("run_loss_%s_P%lld", what, (long long)s.sp);
}

static void test_losses(void) {
    for (int64_t sp = 1; sp <= 5; sp++) {
        make(sp, 1 + sp % 2, 1 + sp % 3);
        put_loss_inputs();
        expect_loss("sft", loss_of_tokens(0, 0));
        say_all("reduction", "sequence", 0);
        expect_loss("sft_by_sequence", loss_of_tokens(0, 1));
        say_all("objective", "ppo", 0);
        say_all("clip_low", "%.17g", 0.1);
        say_all("clip_high", "%.17g", 0.3);
        say_all("kl_coef", "%.17g", 0.05);
        expect_loss("ppo_by_sequence", loss_of_tokens(1, 1));
        say_all("reduction", "token", 0);
        expect_loss("ppo", loss_of_tokens(1, 0));
        say_all("objective", "dpo", 0);
        say_all("beta", "%.17g", 0.3);
        expect_loss("dpo", loss_of_pairs(0));
        say_all("objective", "kto", 0);
        expect_loss("kto", loss_of_kto());
        say_all("objective", "rm", 0);
        for (int64_t i = 0; i < rows(); i++) /* wrong ones, which are not asked */
            put_documents(i, "scores", s.of[i].kl, s.of[i].docs, SEQPAR_SAFETENSORS_F32);
        expect_loss("rm", loss_of_pairs(1));
        for (int64_t i = 0; i < rows(); i++)
            for (int64_t m = 0; m < sp; m++) {
                char name[64];
                item *t;
                snprintf(name, sizeof name, "%lld.scores", (long long)(i % s.accumulation));
                t = find(&got.rank[i / s.accumulation * sp + m], name);
                for (int64_t k = 0; k < s.of[i].docs; k++)
                    test_expect(t && (float)t->x[k] ==
                                         (float)s.of[i].values[s.of[i].cu[k + 1] - 1],
                                "score %lld is not the value at the last token", (long long)k);
            }
        test_end("run_scores_P%lld", (long long)sp);
    }
}

/* SimPO's margin is of mean log-probs, without a reference. */
static double loss_of_simpo(double beta, double gamma) {
    double sum = 0, count = 0;
    for (int64_t i = 0; i < rows(); i++)
        for (int64_t k = 0; k < s.of[i].docs; k += 2, count++) {
            const row *w = &s.of[i];
            double mean[2] = {0, 0};
            for (int side = 0; side < 2; side++) {
                double n = 0;
                for (int64_t t = w->cu[k + side]; t < w->cu[k + side + 1]; t++) {
                    mean[side] += w->labels[t] != -100 ? w->logp[t] : 0;
                    n += w->labels[t] != -100;
                }
                mean[side] = n > 0 ? mean[side] / n : 0;
            }
            sum += softplus(gamma - beta * (mean[0] - mean[1]));
        }
    return sum / count;
}

static void test_simpo(void) {
    for (int64_t sp = 1; sp <= 4; sp++) {
        make(sp, 1 + sp % 2, 1 + sp % 3);
        for (int64_t i = 0; i < rows(); i++) {
            put_row(i, "labels", s.of[i].labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
            put_row(i, "logp", s.of[i].logp, SEQPAR_SAFETENSORS_F64, 1, 1, 1);
        }
        say_all("objective", "dpo", 0);
        say_all("loss_type", "simpo", 0);
        say_all("beta", "%.17g", 2);
        say_all("simpo_gamma", "%.17g", 0.7);
        expect_loss("simpo", loss_of_simpo(2, 0.7));
    }
}

/* ---- advantages ---- */

static double advantage_of(int64_t i, int64_t k, int divide) {
    double sum = 0, count = 0, squares = 0, group = s.of[i].groups[k];
    for (int64_t j = 0; j < rows(); j++)
        for (int64_t d = 0; d < s.of[j].docs; d++)
            if (s.of[j].groups[d] == group) {
                sum += s.of[j].rewards[d];
                count++;
            }
    for (int64_t j = 0; j < rows(); j++)
        for (int64_t d = 0; d < s.of[j].docs; d++)
            if (s.of[j].groups[d] == group) squares += pow(s.of[j].rewards[d] - sum / count, 2);
    sum = s.of[i].rewards[k] - sum / count;
    return divide ? sum / (sqrt(squares / count) + 1e-3) : sum;
}

static void test_advantages(void) {
    for (int64_t sp = 1; sp <= 5; sp++)
        for (int divide = 0; divide < 2; divide++) {
            make(sp, 1 + sp % 2, 1 + sp % 3);
            say_all("objective", "ppo", 0);
            say_all("advantage", divide ? "group" : "group_mean", 0);
            say_all("advantage_eps", "%.17g", 1e-3);
            for (int64_t i = 0; i < rows(); i++) {
                row *w = &s.of[i];
                put_documents(i, "rewards", w->rewards, w->docs, SEQPAR_SAFETENSORS_I32);
                put_documents(i, "groups", w->groups, w->docs, SEQPAR_SAFETENSORS_I64);
                put_row(i, "labels", w->labels, SEQPAR_SAFETENSORS_I64, 1, 1, 1);
            }
            write_books("in", &made);
            runs("advantages", "in", "out", "--dtype float64");
            open_result();
            for (int64_t i = 0; i < rows(); i++) {
                row *w = &s.of[i];
                double want[MOST] = {0};
                for (int64_t t = 0; t < w->cu[w->docs]; t++)
                    if (w->labels[t] != -100)
                        want[t] = advantage_of(i, document_of(w, t), divide);
                compare(i, "advantages", want, 1, 1e-13);
            }
            test_end("run_advantages_%s_P%lld", divide ? "group" : "group_mean", (long long)sp);
        }
}

/* ---- norm, optimizer ---- */

static double stepped(int64_t i, int sgd, double norm) {
    double g = weights[0][i] * (norm > 2 ? 2 / (norm + 1e-6) : 1), p = weights[1][i];
    double m = 0.8 * weights[2][i] + 0.2 * g, v = 0.95 * weights[3][i] + 0.05 * g * g;
    if (sgd) return p - 0.1 * (g + 0.25 * p);
    m /= 1 - 0.8 * 0.8 * 0.8;
    v /= 1 - 0.95 * 0.95 * 0.95;
    return p * (1 - 0.1 * 0.25) - 0.1 * m / (sqrt(v) + 1e-3);
}

static void test_step(void) {
    for (int64_t sp = 1; sp <= 5; sp++)
        for (int way = 0; way < 4; way++) {
            int sgd = way % 2, sharded = way / 2;
            double norm = 0;
            make(sp, 1 + sp % 2, 1);
            say_all("optimizer", sgd ? "sgd" : "adamw", 0);
            if (sp == 2) say_all("lr", "%.17g", 0.7); /* w has its own settings */
            if (sp == 2) say_all("weight_decay", "%.17g", 0.9);
            say_all(sp == 2 ? "lr.w" : "lr", "%.17g", 0.1);
            say_all(sp == 2 ? "weight_decay.w" : "weight_decay", "%.17g", 0.25);
            say_all("beta1", "%.17g", 0.8);
            say_all("beta2", "%.17g", 0.95);
            say_all("eps", "%.17g", 1e-3);
            say_all("max_norm", "%.17g", sharded ? 2 : 1e3);
            say_all("step", "3", 0);
            for (int k = 0; k < 3; k++) fill(weights[k], WEIGHTS, 1);
            for (int64_t i = 0; i < WEIGHTS; i++) {
                weights[3][i] = fabs(test_normal());
                norm += weights[0][i] * weights[0][i];
            }
            norm = sqrt(norm);
            for (int64_t r = 0; r < made.world; r++) {
                put_weights(r, "grad", weights[0], sharded, SEQPAR_SAFETENSORS_F64);
                put_weights(r, "param", weights[1], 0, SEQPAR_SAFETENSORS_F64);
                put_weights(r, "m", weights[2], sharded, SEQPAR_SAFETENSORS_F64);
                put_weights(r, "v", weights[3], sharded, SEQPAR_SAFETENSORS_F64);
                if (sharded) put_weights(r, "after", weights[0], 1, SEQPAR_SAFETENSORS_F32);
            }
            write_books("in", &made);
            runs("norm", "in", "mid", "");
            runs("optimizer", "mid", "out", "");
            open_result();
            for (int64_t r = 0; r < got.world; r++) {
                item *n = find(&got.rank[r], "norm"), *after = find(&got.rank[r], "after.w");
                int64_t first = sharded ? WEIGHTS * r / got.world : 0;
                int64_t last = sharded ? WEIGHTS * (r + 1) / got.world : WEIGHTS;
                test_expect(n && fabs(n->x[0] - norm) < 1e-13 * norm, "norm %g, not %g",
                            n ? n->x[0] : NAN, norm);
                test_expect(after && after->count == last - first, "after is of other size");
                for (int64_t i = first; after && i < last; i++) {
                    double want = stepped(i, sgd, sharded ? norm : 0);
                    test_expect(fabs(after->x[i - first] - want) <=
                                    (sharded ? 0x1p-24 : 1e-14) * (1 + fabs(want)),
                                "after %lld is %.17g, not %.17g", (long long)i,
                                after->x[i - first], want);
                }
            }
            test_end("run_norm_and_optimizer_%s_%s_P%lld", sgd ? "sgd" : "adamw",
                     sharded ? "shards" : "whole", (long long)sp);
        }
}

/* ---- split, gather, pack ---- */

static void same_item(const item *a, const item *b) {
    if (!test_expect(a && b && a->count == b->count && a->dtype == b->dtype &&
                         a->dims == b->dims,
                     "tensor %s is not there or another", a ? a->name : "?"))
        return;
    test_expect(!memcmp(a->x, b->x, (size_t)a->count * sizeof *a->x), "%s differs", a->name);
}

static int is_of_documents(const char *what) {
    return !strcmp(what, "groups") || !strcmp(what, "scores") || !strcmp(what, "desirable") ||
           !strcmp(what, "kl") || !strcmp(what, "cu_seqlens");
}

/* A row of the one-rank dump on rank m of sp: index by the layout's rule, all else by index. */
static void check_share(int64_t i, int layout, int64_t sp, int64_t m) {
    const row *w = &s.of[i];
    const book *from = &made.rank[i / s.accumulation];
    const book *to = &got.rank[i / s.accumulation * sp + m];
    int64_t micro = i % s.accumulation, at = 0;
    char name[64], prefix[16];
    const item *index;
    snprintf(prefix, sizeof prefix, "%lld.", (long long)micro);
    snprintf(name, sizeof name, "%sindex", prefix);
    if (!test_expect((index = find(to, name)) != NULL, "no index")) return;
    for (int64_t t = 0; t < w->n; t++)
        if (deal_rank(layout, sp, w->n, w->cu, w->docs, t) == m)
            test_expect(at < index->count && index->x[at++] == (double)t,
                        "row %lld, rank %lld: token %lld is not where it belongs", (long long)i,
                        (long long)m, (long long)t);
    test_expect(at == index->count, "rank %lld holds others, too", (long long)m);
    for (int64_t k = 0; k < from->count && !*test_why; k++) {
        const item *a = &from->of[k], *b = find(to, a->name);
        int64_t each = a->count / a->shape[0];
        if (strncmp(a->name, prefix, strlen(prefix)) || !strcmp(a->name, name)) continue;
        if (is_of_documents(a->name + strlen(prefix))) {
            same_item(a, b);
            continue;
        }
        test_expect(b && b->count == index->count * each, "%s has another size", a->name);
        for (int64_t l = 0; !*test_why && l < index->count; l++) {
            int64_t t = s.of[i].local[(int64_t)index->x[l]];
            test_expect(!memcmp(b->x + l * each, a->x + t * each, (size_t)each * 8),
                        "%s of local row %lld is another token's", a->name, (long long)l);
        }
    }
}

static void test_split(void) {
    for (int64_t sp = 1; sp <= 8; sp += sp == 5 ? 3 : 1)
        for (int layout = 0; layout < SEQPAR_LAYOUT_COUNT; layout++) {
            char options[64];
            make(1, sp == 8 ? 1 : 2, 2);
            put_everything();
            write_books("in", &made);
            books_free(&made);
            read_books("in", &made); /* as it is rounded there */
            snprintf(options, sizeof options, "--sp %lld --layout %s", (long long)sp,
                     seqpar_layout_name(layout));
            for (int64_t i = 0, most = 0; i < rows(); i++) {
                if (s.of[i].n > most) most = s.of[i].n;
                if (i + 1 == rows() && most < sp) s.of[0].n = 0; /* too few tokens */
            }
            if (!s.of[0].n) {
                layout--;
                continue;
            }
            runs("split", "in", "out", options);
            open_result();
            test_expect(got.world == s.dp * sp, "world is %lld", (long long)got.world);
            for (int64_t i = 0; i < rows(); i++)
                for (int64_t m = 0; m < sp; m++) check_share(i, layout, sp, m);
            for (int64_t r = 0; r < got.world; r++) {
                same_item(find(&made.rank[r / sp], "grad.w"), find(&got.rank[r], "grad.w"));
                same_item(find(&made.rank[r / sp], "loss"), find(&got.rank[r], "loss"));
                test_expect(!find(&got.rank[r], "local.w"), "a local gradient was copied");
            }
            test_expect(strstr(said, "left out: local.NAME") != NULL, "'%s'", said);
            runs("gather", "out", "back", "");
            books_free(&got);
            read_books("back", &got);
            for (int64_t i = 0; i < rows(); i++) check_share(i, 0, 1, 0);
            test_end("run_split_%s_P%lld", seqpar_layout_name(layout), (long long)sp);
        }
}

/* Ranges of parameters on several ranks become one. */
static void test_gather(void) {
    for (int64_t sp = 2; sp <= 5; sp++) {
        make(sp, 2, 1);
        for (int k = 0; k < 2; k++) fill(weights[k], WEIGHTS, 1);
        for (int64_t r = 0; r < made.world; r++)
            put_weights(r, "grad", weights[0], 1, SEQPAR_SAFETENSORS_F64);
        write_books("in", &made);
        runs("gather", "in", "out", "");
        open_result();
        test_expect(got.world == 2, "world is %lld", (long long)got.world);
        for (int64_t r = 0; r < got.world; r++) {
            item *t = find(&got.rank[r], "grad.w");
            test_expect(t && t->count == WEIGHTS &&
                            !memcmp(t->x, weights[0], sizeof weights[0]) &&
                            !said_of(&got.rank[r], "part.grad.w"),
                        "grad.w is not whole");
        }
        test_end("run_gather_P%lld", (long long)sp);
    }
}

/* The document of the dump that begins with this log-prob. */
static int document_with(double logp, int64_t *i, int64_t *k) {
    for (*i = 0; *i < rows(); ++*i)
        for (*k = 0; *k < s.of[*i].docs; ++*k)
            if (s.of[*i].logp[s.of[*i].cu[*k]] == logp) return 1;
    return 0;
}

static item *of_row(int64_t micro, const char *what) {
    char name[64];
    item *t;
    snprintf(name, sizeof name, "%lld.%s", (long long)micro, what);
    t = find(&got.rank[0], name);
    test_expect(t != NULL, "no %s", name);
    if (!t) test_end("run_pack");
    if (!t) exit(1);
    return t;
}

static void check_packed_document(int64_t micro, int64_t d, int pairs, int *times) {
    item *cu = of_row(micro, "cu_seqlens"), *logp = of_row(micro, "logp");
    item *q = of_row(micro, "q");
    int64_t begin = (int64_t)cu->x[d], n = (int64_t)cu->x[d + 1] - begin, i = 0, k = 0;
    const row *w;
    if (!test_expect(document_with(logp->x[begin], &i, &k), "a document of nowhere")) return;
    w = &s.of[i];
    times[i * DOCS + k]++;
    test_expect(n == w->cu[k + 1] - w->cu[k], "a document has %lld tokens", (long long)n);
    test_expect(!pairs || d % 2 == k % 2, "the sides of a pair are changed");
    test_expect(of_row(micro, "groups")->x[d] == w->groups[k] &&
                    of_row(micro, "kl")->x[d] == w->kl[k],
                "numbers of documents did not move along");
    for (int64_t t = 0; t < n; t++) {
        int64_t from = w->cu[k] + t;
        test_expect(of_row(micro, "ids")->x[begin + t] == w->ids[from] &&
                        of_row(micro, "index")->x[begin + t] == (double)(begin + t) &&
                        of_row(micro, "positions")->x[begin + t] == (double)t &&
                        of_row(micro, "labels")->x[begin + t] == w->labels[from] &&
                        logp->x[begin + t] == w->logp[from] &&
                        !memcmp(q->x + (begin + t) * HEADS * DIM, w->q + from * HEADS * DIM,
                                HEADS * DIM * sizeof *q->x),
                    "token %lld of document %lld is another", (long long)t, (long long)d);
    }
}

static void test_pack(void) {
    for (int way = 0; way < 8; way++) {
        int pairs = way % 2, times[ROWS * DOCS] = {0};
        int64_t most = pairs ? 14 : 7 + way, last = most + 1, micros;
        char options[32];
        make(1, 1, 2 + way / 2);
        put_everything();
        say_all("objective", pairs ? "dpo" : "kto", 0);
        write_books("in", &made);
        snprintf(options, sizeof options, "--tokens %lld", (long long)most);
        runs("pack", "in", "out", options);
        open_result();
        micros = atoi(said_of(&got.rank[0], "accumulation"));
        for (int64_t a = 0; a < micros && !*test_why; a++) {
            item *cu = of_row(a, "cu_seqlens");
            int64_t tokens = (int64_t)cu->x[cu->count - 1];
            test_expect(tokens <= most && (pairs || tokens + last > most),
                        "row %lld has %lld tokens", (long long)a, (long long)tokens);
            last = tokens;
            for (int64_t d = 0; d + 1 < cu->count; d++)
                check_packed_document(a, d, pairs, times);
        }
        for (int64_t i = 0; i < rows(); i++)
            for (int64_t k = 0; k < s.of[i].docs; k++)
                test_expect(times[i * DOCS + k] == 1, "a document is there %d times",
                            times[i * DOCS + k]);
        test_expect(!find(&got.rank[0], "loss") && find(&got.rank[0], "param.w"),
                    "what is of the old micro-batches stays, or what is not goes");
        test_end("run_pack_%s_%lld", pairs ? "pairs" : "documents", (long long)most);
    }
}

/* ---- steps that gen makes ---- */

/* One operation after the other, from FOLDER/in; to FOLDER/out at the end. */
static void run_all(const char *in, const char *operations) {
    char list[300], folder[2][16] = {"even", "odd"};
    int turn = 0;
    snprintf(list, sizeof list, "%s", operations);
    for (char *one = strtok(list, ","); one; one = strtok(NULL, ",")) {
        char *options = strchr(one, ' ');
        if (options) *options++ = 0;
        runs(one, turn ? folder[turn % 2] : in, folder[(turn + 1) % 2], options ? options : "");
        turn++;
    }
    if (system("rm -rf " FOLDER "/out")) exit(1);
    snprintf(list, sizeof list, FOLDER "/%s", folder[turn % 2]);
    test_expect(!rename(list, FOLDER "/out"), "%s is not there", list);
}

static void expect_answers(void) {
    books want;
    read_books("gen/got", &want);
    books_free(&got);
    read_books("out", &got);
    for (int64_t r = 0; r < want.world && !*test_why; r++)
        for (int64_t i = 0; i < want.rank[r].count; i++) {
            const item *a = &want.rank[r].of[i], *b = find(&got.rank[r], a->name);
            double far;
            if (!strncmp(a->name, "param.", 6) || !strncmp(a->name, "after.", 6) ||
                !strncmp(a->name, "m.", 2) || !strncmp(a->name, "v.", 2))
                continue;
            far = b && b->count == a->count && b->dims == a->dims
                      ? test_distance(b->x, a->x, a->count)
                      : HUGE_VAL;
            test_expect(far <= 1e-12, "%s of rank %lld is %g from gen's", a->name, (long long)r,
                        far);
        }
    books_free(&want);
}

#define ANSWERS \
    "positions,labels,attention,attention-gradient,step --model " FOLDER "/questions/model," \
    "loss,norm"
static void test_questions(void) {
    static const char *const options[] = {
        "--sp 1",
        "--sp 2 --layout contiguous --tokens 53 --docs 3",
        "--sp 3 --layout zigzag --dp 2 --accumulation 3 --tokens 37",
        "--sp 4 --layout zigzag-doc --objective dpo",
        "--sp 5 --layout stripe --dp 2 --objective dpo --tokens 71 --docs 6",
        "--sp 3 --layout stripe --accumulation 2 --docs 7"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char with[160];
        snprintf(with, sizeof with, "%s --questions", options[i]);
        test_expect(!gen("questions", with) && !gen("gen", options[i]), "%s", said);
        run_all("questions/got", ANSWERS);
        expect_answers();
        judged("out", "questions/model", i ? "right: " : "insufficient"); /* of one rank */
        test_expect(!strstr(said, " wrong: "), "%s", said);
        test_end("run_questions (%s)", options[i]);
    }
}

static void move_along(item *t, double by) {
    for (int64_t i = 0; t && i < t->count; i++) t->x[i] += by * sin((double)(i + 1)) * 1e-3;
}

/* Finite differences of the loss are what the gradient says. The model's folder, which is to be
   what the dump began with, moves with it. */
static void test_slope(void) {
    static const double parts[] = {-2, -1, 1, 2};
    const char *name = "model.layers.1.self_attn.k_proj.weight";
    const char *weights = FOLDER "/gen/model/model.safetensors";
    char param[100], grad[100];
    double loss[4] = {0}, along = 0, slope;
    books b;
    book model;
    item *g, *from;
    snprintf(param, sizeof param, "param.%s", name);
    snprintf(grad, sizeof grad, "grad.%s", name);
    test_expect(!gen("gen", "--sp 2 --objective dpo"), "%s", said);
    read_books("gen/got", &b);
    read_book(weights, &model);
    runs("step", "gen/got", "mid", "--model " FOLDER "/gen/model");
    from = find(&b.rank[0], param);
    for (int k = 0; k < 4 && !*test_why; k++) {
        double by = parts[k] - (k ? parts[k - 1] : 0);
        for (int64_t r = 0; r < b.world; r++) move_along(find(&b.rank[r], param), by);
        move_along(find(&model, name), by);
        write_book(weights, &model);
        write_books("in", &b);
        books_free(&got);
        runs("step", "in", "out", "--model " FOLDER "/gen/model");
        read_books("out", &got);
        g = find(&got.rank[0], "loss");
        if (test_expect(g != NULL, "no loss")) loss[k] = g->x[0];
    }
    books_free(&got);
    read_books("mid", &got);
    g = find(&got.rank[0], grad);
    for (int64_t i = 0; g && from && i < g->count; i++)
        along += g->x[i] * sin((double)(i + 1)) * 1e-3;
    slope = (8 * (loss[2] - loss[1]) - (loss[3] - loss[0])) / 12;
    test_expect(fabs(slope - along) <= 1e-7 * fabs(along) && along != 0,
                "the slope is %.12g, and the gradient says %.12g", slope, along);
    book_free(&model);
    books_free(&b);
    test_end("run_step_slope");
}

/* ---- mistakes undone ---- */

#define STEP "step --model " FOLDER "/gen/model"
static void test_mistakes(void) {
    static const struct {
        const char *name, *objective, *operations;
    } all[] = {{"positions_local", "sft", "positions," STEP},
               {"positions_run_on", "dpo", "positions," STEP},
               {"shift_after_split", "sft", "labels --unmasked," STEP},
               {"labels_not_shifted", "sft", "labels," STEP},
               {"labels_shifted_twice", "dpo", "labels," STEP},
               {"labels_cross_documents", "sft", "labels," STEP},
               {"hop_lost", "sft", "attention,attention-gradient," STEP},
               {"causal_by_local_row", "dpo", "attention,attention-gradient," STEP},
               {"own_tokens_only", "sft", "attention,attention-gradient," STEP},
               {"documents_ignored", "sft", "positions,attention,attention-gradient," STEP},
               {"dkv_not_returned", "sft", "attention-gradient," STEP},
               {"delta_missing", "dpo", "attention-gradient," STEP},
               {"mean_of_means", "sft", "loss," STEP},
               {"all_tokens_counted", "sft", "loss"},
               {"losses_added", "sft", "loss"},
               {"sigmoid_of_parts", "dpo", STEP},
               {"reference_missing", "dpo", STEP},
               {"over_sp", "sft", STEP},
               {"never_synchronised", "sft", STEP},
               {"norm_counts_copies", "sft", "norm"},
               {"norm_after_clip", "dpo", "norm"},
               {"not_clipped", "sft", "optimizer"},
               {"bias_correction_missing", "sft", "optimizer"},
               {"decay_coupled", "sft", "optimizer"},
               {"decay_after_step", "dpo", "optimizer"},
               {"eps_inside_root", "sft", "optimizer"},
               {"steps_counted_by_micro_batches", "sft", "optimizer"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char options[200];
        snprintf(options, sizeof options,
                 "--sp 3 --dp 2 --accumulation 3 --tokens 37 --objective %s --mistake %s",
                 all[i].objective, all[i].name);
        test_expect(!gen("gen", options), "%s", said);
        judged("gen/got", "gen/model", "wrong: ");
        test_expect(strstr(said, all[i].name) != NULL, "%s is not named", all[i].name);
        run_all("gen/got", all[i].operations);
        judged("out", "gen/model", "right: ");
        test_end("run_undoes_%s", all[i].name);
    }
}

int main(int argc, char **argv) {
    test_begin(argc, argv);
    if (system("rm -rf " FOLDER)) return 1;
    mkdir(FOLDER, 0777);
    TEST(test_tokens());
    TEST(test_attention());
    TEST(test_merge());
    TEST(test_losses());
    TEST(test_simpo());
    TEST(test_advantages());
    TEST(test_step());
    TEST(test_split());
    TEST(test_gather());
    TEST(test_pack());
    TEST(test_questions());
    TEST(test_slope());
    TEST(test_mistakes());
    books_free(&made);
    books_free(&got);
    return test_summary();
}
