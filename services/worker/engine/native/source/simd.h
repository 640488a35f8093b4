// Sixteen float lanes on any instruction set that the compiler vectorises for.
//
// The order of every reduction is written out here and does not depend on the width of the registers: on all
// processors with fused multiply-add, results agree to the last bit. Compiled without contraction, so that
// the only fused operation is ``fma``.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fairway {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int LANES = 16;
constexpr int PARTS = LANES / WIDTH;

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

struct Bf16 {
    uint16_t bits;
};

struct Vec {
    Floats part[PARTS];
};

inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline float to_float(float value) { return value; }
inline float to_float(Bf16 value) { return as_float(uint32_t(value.bits) << 16); }

inline void from_float(float value, float* out) { *out = value; }

// To nearest, ties to even; NaN stays NaN.
inline void from_float(float value, Bf16* out) {
    uint32_t bits = as_bits(value);
    out->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Floats splat_part(float x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_set1_ps(x);
#else
    return Floats{x, x, x, x};
#endif
}

inline Floats fma_part(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    Floats result;
    for (int lane = 0; lane < WIDTH; lane++) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return result;
#else
    return a * b + c;
#endif
}

#define FAIRWAY_EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

inline Vec splat(float x) {
    Vec r;
    FAIRWAY_EACH_PART r.part[i] = splat_part(x);
    return r;
}

inline Vec fma(Vec a, Vec b, Vec c) {
    Vec r;
    FAIRWAY_EACH_PART r.part[i] = fma_part(a.part[i], b.part[i], c.part[i]);
    return r;
}

inline Vec operator+(Vec a, Vec b) {
    Vec r;
    FAIRWAY_EACH_PART r.part[i] = a.part[i] + b.part[i];
    return r;
}

inline Vec operator-(Vec a, Vec b) {
    Vec r;
    FAIRWAY_EACH_PART r.part[i] = a.part[i] - b.part[i];
    return r;
}

inline Vec operator*(Vec a, Vec b) {
    Vec r;
    FAIRWAY_EACH_PART r.part[i] = a.part[i] * b.part[i];
    return r;
}

inline Vec operator/(Vec a, Vec b) {
    Vec r;
    FAIRWAY_EACH_PART r.part[i] = a.part[i] / b.part[i];
    return r;
}

// NaN in ``b`` comes through.
inline Vec max(Vec a, Vec b) {
    Vec r;
    FAIRWAY_EACH_PART r.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return r;
}

inline Vec load(const float* from) {
    Vec r;
    FAIRWAY_EACH_PART memcpy(&r.part[i], from + i * WIDTH, sizeof(Floats));
    return r;
}

inline Vec load(const Bf16* from) {
    Vec r;
    FAIRWAY_EACH_PART {
        Halves halves;
        memcpy(&halves, from + i * WIDTH, sizeof(Halves));
        r.part[i] = (Floats)(__builtin_convertvector(halves, Words) << 16);
    }
    return r;
}

inline void store(Vec v, float* to) {
    FAIRWAY_EACH_PART memcpy(to + i * WIDTH, &v.part[i], sizeof(Floats));
}

inline void store(Vec v, Bf16* to) {
    FAIRWAY_EACH_PART {
        Words bits = (Words)v.part[i];
        Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        Halves halves = __builtin_convertvector(v.part[i] != v.part[i] ? Words{} + 0x7fc0 : rounded, Halves);
        memcpy(to + i * WIDTH, &halves, sizeof(Halves));
    }
}

// The first ``count`` lanes; the others are 0.
template <typename T>
inline Vec load(const T* from, int count) {
    if (count >= LANES) return load(from);
    T buffer[LANES] = {};
    memcpy(buffer, from, count * sizeof(T));
    return load(buffer);
}

template <typename T>
inline void store(Vec v, T* to, int count) {
    if (count >= LANES) return store(v, to);
    T buffer[LANES];
    store(v, buffer);
    memcpy(to, buffer, count * sizeof(T));
}

inline float sum(Vec v) {
    float lane[LANES];
    store(v, lane);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

inline float greatest(Vec v) {
    float lane[LANES];
    store(v, lane);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

// Within 2 units in the last place; 0 below -87, exactly 1 at 0. NaN stays NaN. For arguments up to 88.
// Cody-Waite reduction and the polynomial of Cephes' expf.
inline Vec exp(Vec x) {
    Vec r;
    FAIRWAY_EACH_PART {
        Floats v = x.part[i];
        Floats low = splat_part(-87.0f), high = splat_part(88.0f);
        Floats c = v < low ? low : v;
        c = c > high ? high : c;
        Floats shift = splat_part(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
        Floats n = fma_part(c, splat_part(1.44269504088896341f), shift) - shift;
        Floats f = fma_part(n, splat_part(-0.693359375f), c);
        f = fma_part(n, splat_part(2.12194440e-4f), f);
        Floats p = splat_part(1.9875691500e-4f);
        p = fma_part(p, f, splat_part(1.3981999507e-3f));
        p = fma_part(p, f, splat_part(8.3334519073e-3f));
        p = fma_part(p, f, splat_part(4.1665795894e-2f));
        p = fma_part(p, f, splat_part(1.6666665459e-1f));
        p = fma_part(p, f, splat_part(5.0000001201e-1f));
        p = fma_part(p, f * f, f) + splat_part(1.0f);
        Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
        Floats scaled = p * (Floats)exponent;
        r.part[i] = v < low ? splat_part(0.0f) : scaled;
    }
    return r;
}

// Calls ``body`` with ``count``, which is at most ``MOST``, as a constant.
template <int MOST, typename Body>
inline void with_count(int count, Body body) {
    if constexpr (MOST > 1) {
        if (count < MOST) return with_count<MOST - 1>(count, body);
    }
    body(std::integral_constant<int, MOST>{});
}

// x * sigmoid(x).
inline Vec silu(Vec x) {
    return x / (splat(1.0f) + exp(splat(0.0f) - x));
}

}  // namespace fairway
