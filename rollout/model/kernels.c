/* What a decode step on a CPU spends its time on, fp32: attention read straight from the paged cache, linear layers over
   weights as the model stores them, sampling, norms. Compiled by kernels.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* ------------------------------------------------------------------------------------------------------- attention

   Each (request, key head) is one task: the queries of its group go together over blocks of keys, with a running maximum
   and sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Tasks of one key head follow each
   other, so that samples of one prompt, which stand side by side, find its keys in the core's own cache. */

enum { LANES = 16, BLOCK = 32, TILE = 16 };

/* Lowered to what the CPU has; read and written at any address. */
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

INLINE lanes load(const float *p) { return *(const lanes *)p; }
INLINE void store(float *p, lanes x) { *(lanes *)p = x; }

INLINE float sum(lanes x) {
    eight low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const char *)&x + sizeof low, sizeof high);
    low += high;
    four first, second;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, (const char *)&low + sizeof first, sizeof second);
    first += second;
    return (first[0] + first[2]) + (first[1] + first[3]);
}

/* e^x for x <= 0, to 2 units in the last place; 0 below -87. In a form that compilers turn into vector code. */
INLINE float exp_of(float x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    float clamped = x < -87.0f ? -87.0f : x;
    float shifted = clamped * 1.44269504f + round;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    float n = shifted - round;
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f; /* the coefficients of Cephes' expf */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t power = (uint32_t)(bits + 127) << 23;
    float scale;
    memcpy(&scale, &power, sizeof scale);
    return x < -87.0f ? 0.0f : p * scale;
}

/* scores[t] = query . keys[t] for `count` keys. */
INLINE void multiply(const float *query, const float *const *keys, int count, int dim, float *scores) {
    int t = 0;
    for (; t + 4 <= count; t += 4) {
        lanes a = {0}, b = {0}, c = {0}, d = {0};
        int i = 0;
        for (; i + LANES <= dim; i += LANES) {
            lanes x = load(query + i);
            a += x * load(keys[t] + i);
            b += x * load(keys[t + 1] + i);
            c += x * load(keys[t + 2] + i);
            d += x * load(keys[t + 3] + i);
        }
        float s[4] = {sum(a), sum(b), sum(c), sum(d)};
        for (; i < dim; i++)
            for (int u = 0; u < 4; u++) s[u] += query[i] * keys[t + u][i];
        memcpy(scores + t, s, sizeof s);
    }
    for (; t < count; t++) {
        lanes a = {0};
        int i = 0;
        for (; i + LANES <= dim; i += LANES) a += load(query + i) * load(keys[t] + i);
        float s = sum(a);
        for (; i < dim; i++) s += query[i] * keys[t][i];
        scores[t] = s;
    }
}

/* out = decay * out + sum over t of weights[t] * values[t]. */
INLINE void accumulate(float decay, const float *weights, const float *const *values, int count, int dim, float *out) {
    int i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        lanes a = load(out + i) * decay, b = load(out + i + LANES) * decay;
        lanes c = load(out + i + 2 * LANES) * decay, d = load(out + i + 3 * LANES) * decay;
        for (int t = 0; t < count; t++) {
            const float *value = values[t] + i;
            a += weights[t] * load(value);
            b += weights[t] * load(value + LANES);
            c += weights[t] * load(value + 2 * LANES);
            d += weights[t] * load(value + 3 * LANES);
        }
        store(out + i, a), store(out + i + LANES, b), store(out + i + 2 * LANES, c), store(out + i + 3 * LANES, d);
    }
    for (; i + LANES <= dim; i += LANES) {
        lanes a = load(out + i) * decay;
        for (int t = 0; t < count; t++) a += weights[t] * load(values[t] + i);
        store(out + i, a);
    }
    for (; i < dim; i++) {
        float a = out[i] * decay;
        for (int t = 0; t < count; t++) a += weights[t] * values[t][i];
        out[i] = a;
    }
}

/* Up to TILE queries of one key head over all keys of one request; `keys` and `values` point at the head in row 0 of the
   cache. `out` [group, dim] is written. */
static void attend_group(const float *query, int64_t query_head, int group, const float *keys, const float *values,
                         int64_t row, const int64_t *rows, int64_t num_keys, int dim, float scale, float softcap,
                         float *out) {
    float highest[TILE], total[TILE], weights[BLOCK];
    const float *key[BLOCK], *value[BLOCK];
    for (int g = 0; g < group; g++) highest[g] = -INFINITY, total[g] = 0.0f;
    memset(out, 0, sizeof(float) * group * dim);
    for (int64_t start = 0; start < num_keys; start += BLOCK) {
        int count = num_keys - start < BLOCK ? (int)(num_keys - start) : BLOCK;
        for (int t = 0; t < count; t++) {
            key[t] = keys + rows[start + t] * row;
            value[t] = values + rows[start + t] * row;
            for (int i = 0; i < dim; i += 16) __builtin_prefetch(value[t] + i);
        }
        for (int g = 0; g < group; g++) {
            multiply(query + g * query_head, key, count, dim, weights);
            float top = highest[g], added = 0.0f;
            for (int t = 0; t < count; t++) weights[t] *= scale;
            if (softcap > 0.0f)
                for (int t = 0; t < count; t++) weights[t] = softcap * tanhf(weights[t] / softcap);
            for (int t = 0; t < count; t++) top = weights[t] > top ? weights[t] : top;
            for (int t = 0; t < count; t++) weights[t] = exp_of(weights[t] - top);
            for (int t = 0; t < count; t++) added += weights[t];
            float decay = exp_of(highest[g] - top);
            highest[g] = top;
            total[g] = total[g] * decay + added;
            accumulate(decay, weights, value, count, dim, out + (int64_t)g * dim);
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < dim; i++) out[(int64_t)g * dim + i] /= total[g];
}

/* queries: request i's head h at queries + batch_rows[i] * query_row + h * query_head.
   keys, values [cache rows, kv_heads, dim]: request i's are at rows[starts[i]] .. rows[stops[i] - 1].
   out [any, kv_heads * group, dim]: its rows batch_rows[0..] are written. softcap 0: none. */
void rollsync_attend(const float *queries, int64_t query_row, int64_t query_head, const float *keys, const float *values,
                     const int64_t *rows, const int64_t *batch_rows, const int64_t *starts, const int64_t *stops,
                     int64_t num_requests, int64_t kv_heads, int64_t group, int64_t dim, float scale, float softcap,
                     float *out, int num_threads) {
    (void)num_threads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads)
    for (int64_t task = 0; task < num_requests * kv_heads; task++) {
        int64_t head = task / num_requests, i = task % num_requests;
        for (int64_t g = 0; g < group; g += TILE) {
            int64_t first = head * group + g;
            attend_group(queries + batch_rows[i] * query_row + first * query_head, query_head,
                         (int)(group - g < TILE ? group - g : TILE), keys + head * dim, values + head * dim,
                         kv_heads * dim, rows + starts[i], stops[i] - starts[i], (int)dim, scale, softcap,
                         out + (batch_rows[i] * kv_heads * group + first) * dim);
        }
    }
}

/* --------------------------------------------------------------------------------------------------- linear layers

   The inputs, which are few, are packed into panels of PANEL of them, transposed; the weights are read where they are, each
   broadcast to a panel: no copy of them is made, packed or kept, and every output is one sum in one order, whatever else
   is in the batch. The outer product of ROWS weights and a panel fills the registers. */

#if defined(__AVX512F__)
enum { WIDE = 16, ROWS = 12 };
#elif defined(__AVX__)
enum { WIDE = 8, ROWS = 6 };
#elif defined(__aarch64__)
enum { WIDE = 4, ROWS = 12 };
#else
enum { WIDE = 4, ROWS = 6 };
#endif
enum { PANEL = 2 * WIDE, STRIP = 64 };

typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

/* Outputs `first`.. of `num_rows` weight rows for the `count` inputs of one panel. `vectors` is 1 where one holds them. */
INLINE void tile(const float *weight, int64_t dim, const float *panel, const float *bias, const int num_rows,
                 const int vectors, int64_t count, float *out, int64_t out_row) {
    wide sums[ROWS][2];
    float part[ROWS][PANEL];
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < vectors; j++) sums[i][j] = (wide){0};
    for (int64_t p = 0; p < dim; p++) {
        wide x[2];
        for (int j = 0; j < vectors; j++) x[j] = *(const wide *)(panel + p * PANEL + j * WIDE);
        for (int i = 0; i < num_rows; i++)
            for (int j = 0; j < vectors; j++) sums[i][j] += weight[i * dim + p] * x[j];
    }
    for (int i = 0; i < num_rows; i++)
        for (int j = 0; j < vectors; j++) *(wide *)(part[i] + j * WIDE) = sums[i][j] + (bias ? bias[i] : 0.0f);
    for (int64_t r = 0; r < count; r++)
        for (int i = 0; i < num_rows; i++) out[r * out_row + i] = part[i][r];
}

static void pack(const float *inputs, int64_t num_inputs, int64_t dim, int64_t from, int64_t to, float *panel) {
    for (int64_t r = 0; r < PANEL; r++)
        for (int64_t p = from; p < to; p++) panel[p * PANEL + r] = r < num_inputs ? inputs[r * dim + p] : 0.0f;
}

/* Floats that rollsync_linear needs as scratch. */
int64_t rollsync_linear_scratch(int64_t num_inputs, int64_t dim) {
    return (num_inputs + PANEL - 1) / PANEL * PANEL * dim;
}

/* out [num_inputs, num_outputs] = inputs [num_inputs, dim] * weight [num_outputs, dim]^T + bias [num_outputs], or no bias
   where it is null. */
void rollsync_linear(const float *inputs, const float *weight, const float *bias, float *out, int64_t num_inputs,
                     int64_t num_outputs, int64_t dim, float *scratch, int num_threads) {
    int64_t panels = (num_inputs + PANEL - 1) / PANEL, strips = (dim + STRIP - 1) / STRIP;
    (void)num_threads;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < panels * strips; task++) {
            int64_t q = task / strips, from = task % strips * STRIP, to = from + STRIP < dim ? from + STRIP : dim;
            pack(inputs + q * PANEL * dim, num_inputs - q * PANEL, dim, from, to, scratch + q * PANEL * dim);
        }
#pragma omp for schedule(dynamic, 2)
        for (int64_t task = 0; task < (num_outputs + ROWS - 1) / ROWS; task++) {
            int64_t first = task * ROWS;
            for (int64_t q = 0; q < panels; q++) {
                int64_t count = num_inputs - q * PANEL < PANEL ? num_inputs - q * PANEL : PANEL;
                const float *rows = weight + first * dim, *panel = scratch + q * PANEL * dim;
                const float *shift = bias ? bias + first : 0;
                float *to = out + q * PANEL * num_outputs + first;
                if (num_outputs - first < ROWS)
                    for (int64_t i = 0; i < num_outputs - first; i++)
                        tile(rows + i * dim, dim, panel, shift ? shift + i : 0, 1, 2, count, to + i, num_outputs);
                else if (count <= WIDE)
                    tile(rows, dim, panel, shift, ROWS, 1, count, to, num_outputs);
                else
                    tile(rows, dim, panel, shift, ROWS, 2, count, to, num_outputs);
            }
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- sampling */

enum { CHUNK = 256 };

/* The sum of e^(x / temperature - top) over up to CHUNK logits, each also in `weights`. */
INLINE double weigh(const float *logits, int64_t count, float temperature, float top, float *weights) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) weights[i] = exp_of(logits[i] / temperature - top);
    int64_t i = 0;
    lanes sums = {0};
    for (; i + LANES <= count; i += LANES) sums += load(weights + i);
    for (; i < count; i++) total += weights[i];
    return total + sum(sums);
}

/* The first token whose cumulative weight exceeds `goal`. */
static int64_t draw_token(const float *logits, int64_t vocab, float temperature, float top, double goal) {
    float weights[CHUNK];
    double reached = 0.0;
    int64_t last = 0;
    for (int64_t start = 0; start < vocab; start += CHUNK) {
        int64_t count = vocab - start < CHUNK ? vocab - start : CHUNK;
        double added = weigh(logits + start, count, temperature, top, weights);
        if (reached + added > goal)
            for (int64_t i = 0; i < count; i++) {
                if (weights[i] > 0.0f) last = start + i; /* a token of no weight is never drawn, whatever the rounding */
                reached += weights[i];
                if (reached > goal) return last;
            }
        else
            reached += added;
    }
    return last;
}

/* The next token of each of `num_rows` rows of logits [num_rows, vocab] and its log-prob: the most likely one where the
   temperature is 0, else the one at `uniforms[row]` of the cumulative distribution. */
void rollsync_sample(const float *logits, const float *temperatures, const double *uniforms, int64_t num_rows,
                     int64_t vocab, int64_t *tokens, float *logprobs, int num_threads) {
    (void)num_threads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = logits + row * vocab;
        float temperature = temperatures[row] > 0.0f ? temperatures[row] : 1.0f, weights[CHUNK];
        float tops[LANES];
        for (int j = 0; j < LANES; j++) tops[j] = -INFINITY;
        int64_t i = 0, token = 0;
        for (; i + LANES <= vocab; i += LANES)
            for (int j = 0; j < LANES; j++) tops[j] = x[i + j] > tops[j] ? x[i + j] : tops[j];
        float highest = -INFINITY;
        for (int j = 0; j < LANES; j++) highest = tops[j] > highest ? tops[j] : highest;
        for (; i < vocab; i++) highest = x[i] > highest ? x[i] : highest;
        float top = highest / temperature;
        double total = 0.0;
        for (int64_t start = 0; start < vocab; start += CHUNK)
            total += weigh(x + start, vocab - start < CHUNK ? vocab - start : CHUNK, temperature, top, weights);
        if (temperatures[row] > 0.0f)
            token = draw_token(x, vocab, temperature, top, uniforms[row] * total);
        else
            while (token < vocab - 1 && x[token] != highest) token++;
        tokens[row] = token;
        logprobs[row] = x[token] / temperature - top - (float)log(total);
    }
}

/* ----------------------------------------------------------------------------------------------------------- norms */

/* out = x / sqrt(mean(x^2) + epsilon) * (offset + weight), row by row. */
void rollsync_rms_norm(const float *inputs, const float *weight, float offset, float epsilon, float *out,
                       int64_t num_rows, int64_t dim, int num_threads) {
    (void)num_threads;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *x = inputs + row * dim;
        float *y = out + row * dim, total = 0.0f;
        lanes squares = {0};
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) squares += load(x + i) * load(x + i);
        for (; i < dim; i++) total += x[i] * x[i];
        float factor = 1.0f / sqrtf((total + sum(squares)) / (float)dim + epsilon);
        for (i = 0; i < dim; i++) y[i] = x[i] * factor * (offset + weight[i]);
    }
}
