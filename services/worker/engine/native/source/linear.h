// y = x W^T + b over a packed weight, by outer products in registers (Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008).
//
// Every output element is one chain of fused multiply-adds over k = 0, 1, ... from 0 on, whatever the number
// of rows, their place in a tile, and the number of threads.
//
// Packed weight: panels of PANEL columns, each [k][PANEL]; columns beyond the last are 0. A gated weight has
// its gate rows first and its up rows after them; a panel holds LANES of one beside LANES of the other.

#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "simd.h"

namespace fairway {

constexpr int PANEL = 2 * LANES;
// Rows of a register tile: two vectors of sums for each, two of weights and one of x fit the registers.
constexpr int TILE_ROWS = WIDTH == 16 ? 14 : WIDTH == 8 ? 3 : 1;
constexpr int64_t CHUNK_BYTES = 1 << 19;  // of packed x that stays in the second-level cache during a pass over the weight
constexpr int64_t DEPTH = 512;             // terms of a sum between two visits to memory
constexpr int64_t PACKED_AT_ONCE = 128;    // numbers of a row that are packed before the next row's
constexpr int64_t NEXT_ROWS = 24;          // of a packed weight, that are asked for ahead

enum Epilogue : int32_t { STORE = 0, ADD = 1, GATE = 2 };

struct LinearCall {
    const void* x;
    int64_t x_stride;
    const void* weight;
    const void* bias;  // null: none
    void* out;
    int64_t out_stride;
    float* scratch;  // rows * k
    int64_t rows, columns, k;
    int32_t epilogue, threads;
};

// Tiles of rows, as even as possible: the first ``longer`` have one row more than the others.
struct Tiles {
    int64_t count, base, longer;
    explicit Tiles(int64_t rows)
        : count((rows + TILE_ROWS - 1) / TILE_ROWS), base(rows / count), longer(rows % count) {}
    int64_t first(int64_t tile) const { return tile * base + std::min(tile, longer); }
    int rows(int64_t tile) const { return int(base + (tile < longer)); }
};

// Whether a number is finite: its exponent is not all ones.
inline bool finite(float value) { return (as_bits(value) & 0x7f800000u) != 0x7f800000u; }

// Rows first to first + count of a weight [n][k] into its panels, which are zero before; returns whether they are
// finite. A group of LANES rows stays in one panel's columns, and PACKED_AT_ONCE numbers of each row keep those lines
// in the first-level cache. One thread: callers pack several weights at once.
template <typename T>
bool pack_weight(const T* weight, T* packed, int64_t first, int64_t count, int64_t n, int64_t k, bool gated) {
    int64_t each = gated ? LANES : PANEL, columns = gated ? n / 2 : n;
    bool all = true;
    for (int64_t from = first; from < first + count;) {
        int64_t to = std::min(first + count, (from / LANES + 1) * LANES);
        for (int64_t begin = 0; begin < k; begin += PACKED_AT_ONCE)
            for (int64_t row = from; row < to; row++) {
                int64_t column = row % columns, lane = column % each + (row < columns ? 0 : each);
                T* panel = packed + column / each * PANEL * k + lane;
                const T* source = weight + (row - first) * k;
                int64_t end = std::min(k, begin + PACKED_AT_ONCE);
                bool these = true;
                for (int64_t i = begin; i < end; i++) these &= finite(to_float(source[i]));
                for (int64_t i = begin; i < end; i++) panel[i * PANEL] = source[i];
                all &= these;
            }
        from = to;
    }
    return all;
}

// [rows of the tile][k] to float [k][rows of the tile].
template <typename T>
void pack_rows(const T* x, int64_t stride, int count, int64_t k, float* to) {
    with_count<TILE_ROWS>(count, [&](auto rows) {
        constexpr int ROWS = decltype(rows)::value;
        for (int64_t i = 0; i < k; i++, to += ROWS)
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; row++) to[row] = to_float(x[row * stride + i]);
    });
}

// Columns of the output that a lane of the panel belongs to, from ``column`` on, ``count`` of them.
struct Side {
    int64_t column;
    int count;
    Side(const LinearCall& call, int64_t panel, int side)
        : column(call.epilogue == GATE ? panel * LANES : panel * PANEL + side * LANES),
          count(int(std::max<int64_t>(0, std::min<int64_t>(call.columns - column, LANES)))) {}
};

template <typename T>
Vec bias_of(const LinearCall& call, const Side& at, int side) {
    if (call.bias == nullptr) return splat(0.0f);
    const T* bias = static_cast<const T*>(call.bias) + (call.epilogue == GATE ? side * call.columns : 0);
    return load(bias + at.column, at.count);
}

// From sums [rows][PANEL] to the output.
template <typename T>
__attribute__((noinline)) void finish(const LinearCall& call, const float* sums, int rows, int64_t row, int64_t panel) {
    Side sides[2] = {Side(call, panel, 0), Side(call, panel, 1)};
    Vec bias[2] = {bias_of<T>(call, sides[0], 0), bias_of<T>(call, sides[1], 1)};
    for (int r = 0; r < rows; r++, sums += PANEL) {
        T* out = static_cast<T*>(call.out) + (row + r) * call.out_stride;
        Vec left = load(sums) + bias[0], right = load(sums + LANES) + bias[1];
        if (call.epilogue == GATE) {
            store(silu(left) * right, out + sides[0].column, sides[0].count);
            continue;
        }
        for (int side = 0; side < 2; side++) {
            T* to = out + sides[side].column;
            Vec value = side ? right : left;
            store(call.epilogue == ADD ? load(to, sides[side].count) + value : value, to, sides[side].count);
        }
    }
}

// sums [ROWS][PANEL] += x [k][ROWS] times weight [k][PANEL]; FIRST: they were 0. Meanwhile the weight's next rows come
// into the first-level cache, and its next part, from ``ahead`` on in steps of ``step`` bytes, into the second.
template <typename T, int ROWS, bool FIRST>
void multiply(const float* x, const T* weight, int64_t k, float* sums, const char* ahead, int64_t step) {
    Vec sum[ROWS][2];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        sum[row][0] = FIRST ? splat(0.0f) : load(sums + row * PANEL);
        sum[row][1] = FIRST ? splat(0.0f) : load(sums + row * PANEL + LANES);
    }
    for (int64_t i = 0; i < k; i++) {
        Vec left = load(weight + i * PANEL), right = load(weight + i * PANEL + LANES);
        __builtin_prefetch(ahead + i * step, 0, 2);
        __builtin_prefetch(weight + (i + NEXT_ROWS) * PANEL, 0, 3);
        __builtin_prefetch(weight + (i + NEXT_ROWS) * PANEL + LANES, 0, 3);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            Vec each = splat(x[i * ROWS + row]);
            sum[row][0] = fma(each, left, sum[row][0]);
            sum[row][1] = fma(each, right, sum[row][1]);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        store(sum[row][0], sums + row * PANEL);
        store(sum[row][1], sums + row * PANEL + LANES);
    }
}

// One panel of columns for the tiles first..last.
template <typename T>
void panel_of_tiles(const LinearCall& call, const Tiles& tiles, int64_t first, int64_t last, int64_t panel, float* sums) {
    const T* weight = static_cast<const T*>(call.weight) + panel * PANEL * call.k;
    int64_t first_row = tiles.first(first), step = last - first == 1 ? 64 : PANEL * int64_t(sizeof(T)) / (last - first);
    for (int64_t begin = 0; begin < call.k; begin += DEPTH) {
        int64_t depth = std::min<int64_t>(DEPTH, call.k - begin);
        const char* ahead = reinterpret_cast<const char*>(weight + PANEL * call.k + begin * PANEL);
        for (int64_t tile = first; tile < last; tile++, ahead += depth * step) {
            int64_t row = tiles.first(tile);
            with_count<TILE_ROWS>(tiles.rows(tile), [&](auto rows) {
                constexpr int ROWS = decltype(rows)::value;
                const float* x = call.scratch + row * call.k + begin * ROWS;
                float* to = sums + (row - first_row) * PANEL;
                if (begin == 0)
                    multiply<T, ROWS, true>(x, weight, depth, to, ahead, step);
                else
                    multiply<T, ROWS, false>(x, weight + begin * PANEL, depth, to, ahead, step);
            });
        }
    }
    finish<T>(call, sums, int(tiles.first(last) - first_row), first_row, panel);
}

// How many of a thread's tasks are taken, in a cache line of its own.
struct alignas(64) Taken {
    std::atomic<int64_t> count{0};
};

template <typename T>
void linear(const LinearCall& call) {
    if (call.rows == 0) return;
    Tiles tiles(call.rows);
    int64_t each = call.epilogue == GATE ? LANES : PANEL;
    int64_t panels = (call.columns + each - 1) / each;
    int64_t in_chunk = std::max<int64_t>(1, CHUNK_BYTES / (call.k * TILE_ROWS * int64_t(sizeof(float))));
    int64_t tasks = (tiles.count + in_chunk - 1) / in_chunk * panels;
    std::unique_ptr<Taken[]> taken(new Taken[call.threads]);
#pragma omp parallel num_threads(call.threads)
    {
        std::unique_ptr<float[]> sums(new float[std::min(in_chunk, tiles.count) * TILE_ROWS * PANEL]);
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles.count; tile++) {
            int64_t row = tiles.first(tile);
            pack_rows(static_cast<const T*>(call.x) + row * call.x_stride, call.x_stride, tiles.rows(tile), call.k,
                      call.scratch + row * call.k);
        }
        // A thread has a range of tasks, so that the panel it asks for ahead is its own next one; then it takes what
        // the others have left.
#pragma omp for schedule(static) nowait
        for (int32_t self = 0; self < call.threads; self++)
            for (int32_t turn = 0; turn < call.threads; turn++) {
                int32_t whose = (self + turn) % call.threads;
                int64_t begin = tasks * whose / call.threads, end = tasks * (whose + 1) / call.threads;
                for (int64_t task; (task = begin + taken[whose].count.fetch_add(1, std::memory_order_relaxed)) < end;) {
                    int64_t first = task / panels * in_chunk;
                    panel_of_tiles<T>(call, tiles, first, std::min(first + in_chunk, tiles.count), task % panels,
                                      sums.get());
                }
            }
    }
}

}  // namespace fairway
