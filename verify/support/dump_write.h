/* SPDX-License-Identifier: MIT OR Unlicense */
/* dump_write.h - the scene of dump_support.h as files, one a rank. */
#ifndef DUMP_WRITE_H
#define DUMP_WRITE_H

static inline void *copy(const void *from, size_t bytes) {
    void *to = malloc(bytes + 1);
    if (!to) exit(1);
    memcpy(to, from, bytes);
    return to;
}

static inline void add(page *p, int64_t micro, const char *name, void *data,
                       seqpar_safetensors_dtype dtype, int64_t count) {
    if (s.without && !strcmp(name, s.without))
        free(data);
    else
        put(p, micro, name, data, dtype, micro >= 0, &count);
}

static inline uint16_t bf16(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    bits += 0x7fff + (bits >> 16 & 1);
    return (uint16_t)(bits >> 16);
}

/* Numbers as they are written down. */
static inline void *as_dtype(const double *x, int64_t n, seqpar_safetensors_dtype dtype) {
    char *out = (char *)malloc((size_t)n * 8 + 1);
    if (!out) exit(1);
    for (int64_t i = 0; i < n; i++) {
        float f = (float)x[i];
        _Float16 half = (_Float16)x[i];
        uint16_t b = bf16(x[i]);
        if (dtype == SEQPAR_SAFETENSORS_F64) memcpy(out + 8 * i, &x[i], 8);
        if (dtype == SEQPAR_SAFETENSORS_F32) memcpy(out + 4 * i, &f, 4);
        if (dtype == SEQPAR_SAFETENSORS_F16) memcpy(out + 2 * i, &half, 2);
        if (dtype == SEQPAR_SAFETENSORS_BF16) memcpy(out + 2 * i, &b, 2);
    }
    return out;
}

static inline int is_odd(int64_t rank, const char *how) {
    return rank == 1 && s.odd && !strcmp(s.odd, how);
}

static inline void add_numbers(page *p, int64_t micro, const char *name, const double *x,
                               int64_t n) {
    int rough = s.rough && !strcmp(s.rough, name);
    seqpar_safetensors_dtype dtype = rough ? SEQPAR_SAFETENSORS_BF16 : s.dtype;
    add(p, micro, name, as_dtype(x, n, dtype), dtype, n);
}

static inline int64_t held_of(int64_t rank, int64_t micro) {
    int none = s.no_row && rank / s.sp == s.dp - 1 && micro == s.micro - 1;
    return none ? 0 : s.held[rank % s.sp];
}

/* Numbers of a rank's tokens; those of s.side are taken as s.source says, and then untrained
   tokens, which no loss uses, have other numbers on each rank. */
static inline void add_tokens(page *p, int64_t rank, int64_t micro, const char *name,
                              const double *x) {
    int64_t r = rank % s.sp, n = held_of(rank, micro);
    double own[TOKENS];
    int source = s.side && !strcmp(s.side, name) ? s.source : SPLIT;
    for (int64_t i = 0; i < n; i++) {
        int untrained = s.of[rank / s.sp][micro].labels[s.index[r][i]] == NONE;
        own[i] = number_from(x, s.index[r][i], source);
        if (untrained && source != SPLIT) own[i] = (double)(100 * r + i);
    }
    if (is_odd(rank, name)) n--;
    add_numbers(p, micro, name, own, n);
}

static inline void add_whole(page *p, int64_t micro, const char *name, const double *x,
                             int64_t n) {
    int64_t wide[2 * DOCS];
    uint8_t narrow[2 * DOCS];
    for (int64_t i = 0; i < n; i++) narrow[i] = (uint8_t)(wide[i] = (int64_t)x[i]);
    if (s.whole == 1)
        add(p, micro, name, copy(wide, sizeof wide), SEQPAR_SAFETENSORS_I64, n);
    else
        add(p, micro, name, copy(narrow, sizeof narrow), SEQPAR_SAFETENSORS_U8, n);
}

static inline void add_documents(page *p, int64_t rank, int64_t micro, const char *name,
                                 const double *x, int64_t n) {
    double own[2 * DOCS];
    char differs[32], more[32];
    snprintf(differs, sizeof differs, "%s differ", name);
    memcpy(own, x, DOCS * sizeof *own);
    for (int64_t i = 0; i < s.empty; i++) own[n++] = (double)(i % 2);
    if (is_odd(rank, differs)) own[1] += 0.25;
    snprintf(more, sizeof more, "%s more", name);
    if (is_odd(rank, more)) own[n++] = 1;
    if (is_odd(rank, name)) n--;
    if (s.whole && (!strcmp(name, "rewards") || !strcmp(name, "desirable")))
        add_whole(p, micro, name, own, n);
    else
        add_numbers(p, micro, name, own, n);
}

static inline void add_groups(page *p, int64_t rank, int64_t micro, const row *r) {
    int64_t own[2 * DOCS], n = r->docs;
    memcpy(own, r->groups, sizeof r->groups);
    for (int64_t i = 0; i < s.empty; i++) own[n++] = 40;
    if (is_odd(rank, "groups differ")) own[1]++;
    add(p, micro, "groups", copy(own, sizeof own), SEQPAR_SAFETENSORS_I64, n);
}

static inline void add_integers(page *p, int64_t rank, int64_t micro, const row *r) {
    int64_t member = rank % s.sp, n = held_of(rank, micro);
    int32_t ids[TOKENS], labels[TOKENS];
    int64_t begins[2 * DOCS + 1], docs = r->docs;
    memcpy(begins, cu_seqlens, sizeof cu_seqlens);
    for (int64_t i = 0; i < s.empty; i++, docs++) begins[docs + 1] = begins[docs];
    if (s.padded) begins[++docs] = TOKENS;
    for (int64_t i = 0; i < n; i++) {
        ids[i] = r->ids[s.index[member][i]];
        labels[i] = r->labels[s.index[member][i]];
    }
    add(p, micro, "index", copy(s.index[member], sizeof ids), SEQPAR_SAFETENSORS_I32, n);
    add(p, micro, "ids", copy(ids, sizeof ids), SEQPAR_SAFETENSORS_I32, n);
    add(p, micro, "labels", copy(labels, sizeof labels), SEQPAR_SAFETENSORS_I32, n);
    if (s.used_docs)
        add(p, micro, "boundaries", copy(begins, sizeof begins), SEQPAR_SAFETENSORS_I64,
            docs + 1);
    if (s.used_docs) memcpy(begins, s.used, sizeof s.used);
    if (s.used_docs) docs = s.used_docs;
    add(p, micro, "cu_seqlens", copy(begins, sizeof begins), SEQPAR_SAFETENSORS_I64, docs + 1);
}

static inline void add_row(page *p, int64_t rank, int64_t micro) {
    row *r = &s.of[rank / s.sp][micro];
    const char *without = s.without;
    if (s.without_below && rank >= s.without_below)
        s.without = s.without_values ? "values" : NULL;
    add_integers(p, rank, micro, r);
    if (!is("rm") && !is("value")) add_tokens(p, rank, micro, "logp", r->logp);
    if (is("value")) add_tokens(p, rank, micro, "old_values", r->old_values);
    if (!is("rm") && !is("sft") && !is("value"))
        add_tokens(p, rank, micro, "ref_logp", r->ref_logp);
    if (is("ppo")) add_tokens(p, rank, micro, "old_logp", r->old_logp);
    if (is("ppo")) add_tokens(p, rank, micro, "advantages", r->advantages);
    if (is("ppo")) add_documents(p, rank, micro, "rewards", r->rewards, r->docs);
    if (is("ppo")) add_groups(p, rank, micro, r);
    if (is("rm")) add_tokens(p, rank, micro, "values", r->values);
    if (is("rm")) add_documents(p, rank, micro, "scores", r->scores, r->docs);
    if (s.with_values) add_tokens(p, rank, micro, "values", r->values);
    if (s.with_values) add_tokens(p, rank, micro, "returns", r->returns);
    if (s.with_token_rewards) add_tokens(p, rank, micro, "token_rewards", r->token_rewards);
    if (s.smoothing > 0) add_tokens(p, rank, micro, "mean_logp", r->mean_logp);
    if (s.z_loss > 0) add_tokens(p, rank, micro, "logits_lse", r->logits_lse);
    if (s.entropy_coef > 0) add_tokens(p, rank, micro, "entropy", r->entropy);
    if (s.with_weights) add_tokens(p, rank, micro, "weights", r->weights);
    if (s.with_margins) add_documents(p, rank, micro, "margins", r->margins, r->docs);
    if (is("kto")) add_documents(p, rank, micro, "desirable", r->desirable, r->docs);
    if (is("kto")) add_documents(p, rank, micro, "kl", r->kl, r->docs);
    s.without = without;
}

static inline void write_rank(int64_t rank) {
    char text[7][32];
    const int64_t whole[] = {rank, s.world, s.sp, s.micro};
    seqpar_safetensors_pair pairs[13 + MORE] = {{"seqpar_dump", "1"},
                                                {"rank", text[0]},
                                                {"world", text[1]},
                                                {"sp", text[2]},
                                                {"accumulation", text[3]},
                                                {"objective", s.grpo ? "grpo" : s.objective},
                                                {"beta", text[4]},
                                                {"kl_coef", text[5]},
                                                {"clip_low", "0.2"},
                                                {"clip_high", "0.3"},
                                                {"reduction_constant", text[6]},
                                                {"reduction", s.reduction},
                                                {"advantage", s.advantage}};
    int64_t count = s.grpo ? 11 : 13; /* grpo implies the last two */
    page p = {.count = 0};
    for (int i = 0; i < 4; i++) snprintf(text[i], sizeof text[i], "%lld", (long long)whole[i]);
    snprintf(text[4], sizeof text[4], "%.17g", s.beta);
    snprintf(text[5], sizeof text[5], "%.17g", s.kl_coef);
    snprintf(text[6], sizeof text[6], "%.17g", s.constant);
    for (int i = 0; i < s.keys; i++)
        pairs[count + i] = (seqpar_safetensors_pair){s.key[i], s.value[i]};
    for (int64_t a = 0; a < s.micro; a++) add_row(&p, rank, a);
    add(&p, -1, "loss", as_dtype(&s.loss[rank], 1, s.loss_dtype), s.loss_dtype, 0);
    save(&p, rank, pairs, count + s.keys);
    free_data(&p);
}

static inline void write_scene(void) { write_ranks(s.world, write_rank); }
#endif
