// Normalisation, rotation and masks of logits. Rows are independent of each other; sums go over LANES * 4
// running sums.

#pragma once

#include <algorithm>

#include "simd.h"

namespace fairway {

struct RotateCall {
    void* x;  // [rows][row_stride], the first heads * dim elements of each row are rotated in place
    int64_t row_stride;
    const void *q_norm, *k_norm;  // [dim], or null
    const void *cos, *sin;        // [rows][dim]; the first half of sin is negated
    int32_t rows, q_heads, k_heads, dim, threads;
    float eps;
};

// 1 / sqrt(mean(x^2) + eps)
template <typename T>
float inverse_rms(const T* x, int64_t n, float eps) {
    Vec sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (int64_t i = 0, lane = 0; i < n; i += LANES, lane++) {
        Vec each = load(x + i, int(std::min<int64_t>(n - i, LANES)));
        sums[lane % 4] = fma(each, each, sums[lane % 4]);
    }
    return 1.0f / sqrtf(sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(n) + eps);
}

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t n, float eps) {
    Vec inverse = splat(inverse_rms(x, n, eps));
    for (int64_t i = 0; i < n; i += LANES) {
        int count = int(std::min<int64_t>(n - i, LANES));
        store(load(x + i, count) * inverse * load(weight + i, count), out + i, count);
    }
}

template <typename T>
void norm(const T* x, const T* weight, T* out, int64_t rows, int64_t n, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * n, weight, out + row * n, n, eps);
}

template <typename T>
void rotate_head(T* x, const T* cos, const T* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        int count = int(std::min<int64_t>(half - i, LANES));
        Vec low = load(x + i, count), high = load(x + half + i, count);
        store(fma(high, load(sin + i, count), low * load(cos + i, count)), x + i, count);
        store(fma(low, load(sin + half + i, count), high * load(cos + half + i, count)), x + half + i, count);
    }
}

template <typename T>
void rotate(const RotateCall& call) {
    int heads = call.q_heads + call.k_heads;
#pragma omp parallel for schedule(static) num_threads(call.threads)
    for (int64_t row = 0; row < call.rows; row++) {
        T* x = static_cast<T*>(call.x) + row * call.row_stride;
        const T* cos = static_cast<const T*>(call.cos) + row * call.dim;
        const T* sin = static_cast<const T*>(call.sin) + row * call.dim;
        for (int head = 0; head < heads; head++, x += call.dim) {
            const T* weight = static_cast<const T*>(head < call.q_heads ? call.q_norm : call.k_norm);
            if (weight != nullptr) norm_row(x, weight, x, call.dim, call.eps);
            rotate_head(x, cos, sin, call.dim / 2);
        }
    }
}

struct RuleOutCall {
    float* logits;           // [..][vocabulary]
    const uint8_t* allowed;  // [rows][row_bytes], a bit per token, the lowest first
    const int64_t* places;   // [rows] of the logits
    int64_t rows, row_bytes, vocabulary;
    int32_t threads;
};

// Where the lowest bits are 0 minus infinity is added: what is no number stays none.
inline void rule_out_part(float* logits, int32_t bits) {
    Ints each;
    for (int lane = 0; lane < WIDTH; lane++) each[lane] = bits >> lane & 1;
    Floats x;
    memcpy(&x, logits, sizeof x);
    x = each != 0 ? x : x + splat_part(-INFINITY);
    memcpy(logits, &x, sizeof x);
}

inline void rule_out_row(float* logits, const uint8_t* allowed, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        int32_t bits = allowed[i / 8] | (n - i > 8 ? allowed[i / 8 + 1] << 8 : 0xff00);
        if (bits == 0xffff) continue;
        if (n - i >= LANES) {
            for (int part = 0; part < PARTS; part++)
                rule_out_part(logits + i + part * WIDTH, bits >> part * WIDTH);
        } else {
            for (int64_t lane = 0; lane < n - i; lane++)
                if (!(bits >> lane & 1)) logits[i + lane] += -INFINITY;
        }
    }
}

inline void rule_out(const RuleOutCall& call) {
#pragma omp parallel for schedule(static) num_threads(call.threads)
    for (int64_t row = 0; row < call.rows; row++)
        rule_out_row(call.logits + call.places[row] * call.vocabulary, call.allowed + row * call.row_bytes,
                     call.vocabulary);
}

}  // namespace fairway
