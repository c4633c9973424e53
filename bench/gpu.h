/* SPDX-License-Identifier: MIT OR Unlicense */
/* What bench_gpu measures with: memory full of normal numbers that the host knows too, wall
   time of calls on a queue, a process that does the same with PyTorch, lines of a table. */
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static struct {
    seqpar_ctx ctx; /* its queue is the device's */
    seqpar_comm *self;
    double began, seconds, copy_bytes_per_second;
    const char *gpu, *driver;
} bench;

static inline double wall(void) { return clock_seconds(CLOCK_MONOTONIC); }
static inline double seconds_left(void) { return bench.began + bench.seconds - wall(); }
static inline void must(seqpar_status status) {
    if (status) {
        fprintf(stderr, "bench_gpu: %s\n", bench.ctx.error->text);
        exit(1);
    }
}

/* ---- memory ---- */

/* Normal numbers: on constants a GPU clocks higher. A tensor repeats one of these patterns,
   whose length is prime, so that no two rows are the same. */
enum { STREAMS = 8, PATTERN = 1048583, SHORT_PATTERN = 8191 };
static float *patterns[STREAMS]; /* as stored: rounded where the storage type is narrow */
static inline int64_t pattern_length(void) { return tiny ? SHORT_PATTERN : PATTERN; }

static inline float as_stored(float x, int dtype) {
    return dtype == SEQPAR_DTYPE_BF16 ? seqpar_bf16_to_float(seqpar_bf16_from_float(x)) : x;
}

static inline void make_patterns(void) {
    int64_t n = pattern_length(), i;
    for (int s = 0; s < STREAMS; s++) {
        float *u = random_floats(2 * n, (uint64_t)s + 100);
        patterns[s] = malloc((size_t)n * sizeof(float));
        for (i = 0; i < n; i++)
            patterns[s][i] = as_stored((float)(sqrt(-2 * log(0.5 * fabs(u[2 * i]) + 1e-7)) *
                                               cos(3.14159265358979 * u[2 * i + 1])),
                                       bench.ctx.device->storage);
        free(u);
    }
}

typedef struct tensor {
    char *data;
    int64_t count;
    int dtype, stream;
    float scale; /* of its numbers; a power of two */
} tensor;

static inline void *device_memory(int64_t bytes) {
    void *data = bench.ctx.device->alloc(bench.ctx.device, bytes);
    if (!data) {
        fprintf(stderr, "bench_gpu: %s\n", bench.ctx.error->text);
        exit(1);
    }
    return data;
}

static inline void device_copy(void *to, const void *from, int64_t bytes) {
    bench.ctx.device->copy(bench.ctx.device, to, from, bytes, NULL);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
/* The first period comes from the host, the others from the one before. */
static inline tensor tensor_new(int64_t count, int dtype, int stream, double scale) {
    tensor t = {.data = device_memory(count * seqpar_dtype_bytes(dtype)),
                .count = count,
                .dtype = dtype,
                .stream = stream,
                .scale = (float)scale};
    int64_t size = seqpar_dtype_bytes(dtype), filled = smaller(count, pattern_length());
    float *wide = malloc((size_t)filled * sizeof *wide);
    for (int64_t i = 0; i < filled; i++) {
        wide[i] = patterns[stream][i] * t.scale;
        if (dtype == SEQPAR_DTYPE_BF16) ((uint16_t *)wide)[i] = seqpar_bf16_from_float(wide[i]);
    }
    device_copy(t.data, wide, filled * size);
    free(wide);
    for (; filled < count; filled *= 2)
        device_copy(t.data + filled * size, t.data, smaller(filled, count - filled) * size);
    return t;
}

static inline tensor storage_new(int64_t count, int stream, double scale) {
    return tensor_new(count, bench.ctx.device->storage, stream, scale);
}

static inline tensor accumulator_new(int64_t count, int stream, double scale) {
    return tensor_new(count, bench.ctx.device->accumulator, stream, scale);
}

static inline void tensor_zero(tensor *t) {
    bench.ctx.device->zero(bench.ctx.device, t->data, t->count * seqpar_dtype_bytes(t->dtype),
                           NULL);
}

static inline void tensor_free(tensor *t) {
    bench.ctx.device->free(bench.ctx.device, t->data);
    t->data = NULL;
}

/* Numbers first .. first + count as they were at first. */
static inline void begun_as(const tensor *t, int64_t first, int64_t count, double *x) {
    int64_t n = pattern_length(), at = first % n;
    for (int64_t i = 0; i < count; i++, at = at + 1 == n ? 0 : at + 1)
        x[i] = patterns[t->stream][at] * t->scale;
}

/* And as they are: `rows` of `count`, `stride` numbers apart. */
static inline double *fetch(const tensor *t, int64_t first, int64_t count, int64_t stride,
                            int64_t rows) {
    int64_t size = seqpar_dtype_bytes(t->dtype);
    char *raw = malloc((size_t)(rows * count * size));
    double *x = malloc((size_t)(rows * count) * sizeof *x);
    bench.ctx.device->copy_rows(bench.ctx.device, raw, count * size, t->data + first * size,
                                stride * size, count * size, rows, NULL);
    for (int64_t i = 0; i < rows * count; i++)
        x[i] = t->dtype == SEQPAR_DTYPE_BF16
                   ? (double)seqpar_bf16_to_float(((uint16_t *)raw)[i])
                   : (double)((float *)raw)[i];
    free(raw);
    return x;
}

static inline double dot(const double *a, const double *b, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* a NaN stays */
static inline double worse(double a, double b) { return a == a && !(b <= a) ? b : a; }

/* ---- time ---- */

enum { SAMPLES = 20, TURNS_OF_A_ROW = 2 };
typedef struct sampling {
    double ms[SAMPLES * TURNS_OF_A_ROW];
    int count;
} sampling;

/* All that was asked of the device is done. */
static inline void settle(void) {
    static void *word;
    char here[4];
    if (!word) word = device_memory(4);
    device_copy(here, word, 4);
}

static inline double wall_of(call_fn call, void *user, int64_t times) {
    double began = wall();
    for (int64_t i = 0; i < times; i++) call(user);
    settle();
    return (wall() - began) / (double)times;
}

/* Samples for about so many seconds, each of at least 10 ms. */
static inline void sample(sampling *s, call_fn call, void *user, double seconds) {
    double once = wall_of(call, user, 1), end = wall() + seconds;
    int64_t times = tiny || once <= 0 ? 1 : (int64_t)(0.01 / once) + 1;
    for (int i = 0; i < SAMPLES && s->count < SAMPLES * TURNS_OF_A_ROW &&
                    (i < (tiny ? 1 : 3) || wall() < end);
         i++)
        s->ms[s->count++] = 1e3 * wall_of(call, user, times);
}

static inline double sampled(sampling *s, double part) { /* part 0.5: the median */
    qsort(s->ms, (size_t)s->count, sizeof *s->ms, rising);
    return s->count ? s->ms[(int)(part * (s->count - 1) + 0.5)] : NAN;
}

/* Half of what lies between the 10th and the 90th percentile, over the median. */
static inline double spread(sampling *s) {
    return 0.5 * (sampled(s, 0.9) - sampled(s, 0.1)) / sampled(s, 0.5);
}

/* ---- the peer process ---- */

static struct {
    int to, from;
    pid_t pid;
    char absent[96], said[640];
} peer;

static inline void peer_start(const char *program) {
    int to[2], from[2];
    signal(SIGPIPE, SIG_IGN);
    if (!program || pipe(to) || pipe(from) || (peer.pid = fork()) < 0) {
        snprintf(peer.absent, sizeof peer.absent, "no peer");
        return;
    }
    if (!peer.pid) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        close(to[1]);
        close(from[0]);
        execlp("python3", "python3", program, "--serve", tiny ? "--cpu" : (char *)NULL,
               (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    peer.to = to[1];
    peer.from = from[0];
}

static inline void peer_gone(const char *why) {
    snprintf(peer.absent, sizeof peer.absent, "%s", why);
    kill(peer.pid, SIGKILL);
    waitpid(peer.pid, NULL, 0);
}

/* One line of the peer; NULL: it has ended, or said nothing in time. */
static inline const char *peer_line(double seconds) {
    double end = wall() + seconds;
    size_t n = 0;
    char c;
    for (;;) {
        struct pollfd on = {.fd = peer.from, .events = POLLIN};
        int left = (int)(1e3 * (end - wall()));
        if (left <= 0 || poll(&on, 1, left) <= 0) {
            peer_gone("the peer was too slow");
            return NULL;
        }
        if (read(peer.from, &c, 1) != 1) {
            peer_gone("the peer ended");
            return NULL;
        }
        if (c == '\n') break;
        if (c == '"' || c == '\\' || c == '|')
            c = '\''; /* it goes into JSON and tables as it is */
        if (n + 1 < sizeof peer.said) peer.said[n++] = c;
    }
    peer.said[n] = 0;
    return peer.said;
}

/* Its first line: "ready WHAT", or why there is none. */
static inline void peer_greet(void) {
    if (*peer.absent) return;
    const char *line = peer_line(120);
    if (line && !strncmp(line, "ready ", 6)) {
        printf("peer: %s\n", line + 6);
        return;
    }
    char why[sizeof peer.absent];
    snprintf(why, sizeof why, "%.90s", line ? line : "no torch here");
    peer_gone(why);
}

/* Adds its samples of a case; NULL, or why there are none. */
static inline const char *peer_ask(sampling *s, const char *request, double seconds) {
    char text[320];
    int n = snprintf(text, sizeof text, "%s seconds=%g\n", request, seconds);
    if (*peer.absent) return peer.absent;
    if (write(peer.to, text, (size_t)n) != n || !peer_line(60 + 10 * seconds)) {
        if (!*peer.absent) peer_gone("the peer ended");
        return peer.absent;
    }
    if (strncmp(peer.said, "ok", 2)) return peer.said;
    for (char *at = peer.said + 2, *end; s->count < SAMPLES * TURNS_OF_A_ROW; at = end) {
        double ms = strtod(at, &end);
        if (end == at) break;
        s->ms[s->count++] = ms;
    }
    return NULL;
}

static inline void peer_stop(void) {
    if (*peer.absent) return;
    close(peer.to);
    waitpid(peer.pid, NULL, 0);
}

/* ---- the table ---- */

typedef struct goal {
    const char *name, *peer;
    double must, target;
} goal;

typedef struct line {
    char name[40], shape[40], peer[24], why[100];
    double ms, spread, peer_ms, peer_spread, error, limit, flops, bytes;
    const goal *goal;
} line;

enum { LINES = 256 };
static line lines[LINES];
static int line_count;

static inline line *line_new(const char *name, const char *shape, const char *against) {
    line *l = &lines[line_count < LINES - 1 ? line_count++ : LINES - 1];
    memset(l, 0, sizeof *l);
    snprintf(l->name, sizeof l->name, "%s", name);
    snprintf(l->shape, sizeof l->shape, "%s", shape);
    snprintf(l->peer, sizeof l->peer, "%s", against);
    l->ms = l->spread = l->peer_ms = l->peer_spread = l->error = NAN;
    return l;
}

/* skipped, or near enough */
static inline int line_right(const line *l) { return !(l->limit > 0) || l->error <= l->limit; }
static inline double line_ratio(const line *l) { return l->peer_ms / l->ms; }

static inline const char *line_verdict(const line *l) {
    double ratio = line_ratio(l);
    if (!line_right(l)) return "WRONG";
    if (!l->goal || !(ratio > 0)) return "";
    return ratio >= l->goal->target ? "target" : ratio >= l->goal->must ? "goal" : "below";
}

/* "-" for what was not measured */
static inline void show(char *text, size_t size, const char *format, double x) {
    if (x == x)
        snprintf(text, size, format, x);
    else
        snprintf(text, size, "-");
}

/* What the speed amounts to: of arithmetic, or of memory and of what a copy reaches. */
static inline void show_rate(char *text, size_t size, const line *l) {
    text[0] = 0;
    if (!(l->ms > 0)) return;
    if (l->flops > 0)
        snprintf(text, size, "%.1f TFLOP/s", l->flops / l->ms * 1e-9);
    else if (l->bytes > 0)
        snprintf(text, size, "%.0f GB/s, %.0f%% of a copy", l->bytes / l->ms * 1e-6,
                 1e5 * l->bytes / l->ms / bench.copy_bytes_per_second);
}

static inline void print_line(FILE *out, const line *l, int markdown) {
    char cell[8][48];
    show(cell[0], 48, "%.3f", l->ms);
    show(cell[1], 48, "%.1f%%", 100 * l->spread);
    show(cell[2], 48, "%.3f", l->peer_ms);
    show(cell[3], 48, "%.2f", line_ratio(l));
    show(cell[4], 48, "%.2f", l->goal ? l->goal->must : NAN);
    show(cell[5], 48, "%.2f", l->goal ? l->goal->target : NAN);
    show(cell[6], 48, "%.0e", l->error);
    show_rate(cell[7], 48, l);
    fprintf(out,
            markdown ? "| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s%s%s |\n"
                     : "%-21s %-27s %10s %7s %-19s %10s %7s %5s %6s %-7s %6s  %s%s%s\n",
            l->name, l->shape, cell[0], cell[1], l->peer, cell[2], cell[3], cell[4], cell[5],
            line_verdict(l), cell[6], cell[7], *cell[7] && *l->why ? "; " : "", l->why);
}

static inline void print_table(FILE *out, int markdown) {
    fprintf(out,
            markdown ? "| what | shape | ours ms | spread | peer | peer ms | peer / ours | "
                       "goal | target | verdict | error | note "
                       "|\n|---|---|---:|---:|---|---:|---:|---:|---:|---|---:|---|\n"
                     : "%-21s %-27s %10s %7s %-19s %10s %7s %5s %6s %-7s %6s  %s\n",
            "what", "shape", "ours ms", "spread", "peer", "peer ms", "ratio", "goal", "target",
            "verdict", "error", "note");
    for (int i = 0; i < line_count; i++) print_line(out, &lines[i], markdown);
}
