// Attention over paged KV, with the softmax taken tile by tile (FlashAttention, Dao et al. 2022; PagedAttention,
// Kwon et al. 2023).
//
// Tiles of TILE_KEYS keys lie at multiples of TILE_KEYS positions. For one row and head, a score is one chain
// of fused multiply-adds over the head's dimensions, a tile's weights are summed in one tree, and an output
// element is one chain over the keys that the row sees, rescaled at each tile. None of it depends on what other
// rows are computed with it, on where its blocks lie, or on the number of threads.
//
// The pool of one layer: keys [blocks][kv_heads][dim][block_size], so that LANES keys are one vector; values
// [blocks][kv_heads][block_size][dim].

#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "simd.h"

namespace fairway {

constexpr int TILE_KEYS = 64;
constexpr int STRIPS = TILE_KEYS / LANES;
constexpr int QUERIES = WIDTH == 16 ? 6 : WIDTH == 8 ? 3 : 1;  // a register tile: (row, head) pairs ...
constexpr int VECTORS = WIDTH == 16 ? 4 : WIDTH == 8 ? 2 : 1;  // ... by vectors of keys or of dimensions

struct Span {
    int64_t first_row, rows, length;
    const int32_t* table;
};

struct Tile {
    int32_t span, first_row, rows;
};

struct AttentionCall {
    const void *q, *k, *v;
    int64_t row_stride;  // of q, k and v
    void *keys, *values, *out;
    const int64_t* slots;
    const int64_t *first_rows, *span_rows, *lengths;  // of each span: its rows of the step end at ``lengths``
    const int32_t* tables;                            // [spans][table_stride]: the blocks of each span
    int64_t table_stride;
    const Tile* tiles;
    int32_t rows, tile_count, most_pairs, heads, kv_heads, dim, block_size, window, threads;
    float scale;
};

template <typename T>
void write_kv(const AttentionCall& call, int64_t row) {
    const T* k = static_cast<const T*>(call.k) + row * call.row_stride;
    const T* v = static_cast<const T*>(call.v) + row * call.row_stride;
    int64_t size = call.block_size, dim = call.dim;
    int64_t block = call.slots[row] / size, offset = call.slots[row] % size;
    for (int head = 0; head < call.kv_heads; head++, k += dim, v += dim) {
        int64_t start = (block * call.kv_heads + head) * dim * size;
        T* keys = static_cast<T*>(call.keys) + start + offset;
        for (int64_t d = 0; d < dim; d++) keys[d * size] = k[d];
        memcpy(static_cast<T*>(call.values) + start + offset * dim, v, dim * sizeof(T));
    }
}

// Where the keys and values of one tile are. The distances, in bytes, lead from an element of a strip to one of the
// values of its block, and to one of the strip that follows in the next tile; 0 where there is none.
template <typename T>
struct KeyTile {
    const T* strip[STRIPS];  // [dim][stride]
    int64_t stride;
    const T* value[TILE_KEYS];
    int64_t to_values, to_next[STRIPS];
};

// Asks for what lies at that distance. A block's keys of one head may be no more than a page, and the processor does
// not guess beyond it. Of the queries of a tile only the first ask: the others read what came for these.
template <bool ASKS, typename T>
void ask(const T* from, int64_t distance) {
    if constexpr (ASKS) __builtin_prefetch(reinterpret_cast<const char*>(from) + distance, 0, 2);
}

// What a thread computes with: q as [queries][dim][QUERIES], scores, and the running softmax of each pair.
struct Workspace {
    std::unique_ptr<float[]> q, scores, out, keys;
    std::unique_ptr<float[]> greatest, total, rescale;
    std::unique_ptr<int32_t[]> low, high;
    Workspace(int pairs, int dim)
        : q(new float[(pairs + QUERIES) * dim]),
          scores(new float[(pairs + QUERIES) * TILE_KEYS]),
          out(new float[pairs * dim]),
          keys(new float[TILE_KEYS * dim]),
          greatest(new float[pairs]),
          total(new float[pairs]),
          rescale(new float[pairs]),
          low(new int32_t[pairs]),
          high(new int32_t[pairs]) {}
};

// scores[query][strip] = q . keys, each one chain over the dimensions, for WIDE strips from ``first`` on. Meanwhile
// the tile's values come nearer.
template <typename T, bool ASKS, int ROWS, int WIDE>
void score_tile(const float* q, const KeyTile<T>& tile, int first, int dim, float* scores) {
    Vec sums[ROWS][WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int s = 0; s < WIDE; s++) sums[r][s] = splat(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        Vec keys[WIDE];
#pragma GCC unroll 4
        for (int s = 0; s < WIDE; s++) {
            const T* at = tile.strip[first + s] + d * tile.stride;
            keys[s] = load(at);
            ask<ASKS>(at, tile.to_values);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            Vec each = splat(q[d * ROWS + r]);
#pragma GCC unroll 4
            for (int s = 0; s < WIDE; s++) sums[r][s] = fma(each, keys[s], sums[r][s]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int s = 0; s < WIDE; s++) store(sums[r][s], scores + r * TILE_KEYS + (first + s) * LANES);
}

// out[query][column..] = out * rescale + sum over keys begin..end of weight * value, one chain. Meanwhile the next
// tile's keys come nearer.
template <typename T, bool ASKS, int ROWS, int WIDE>
void value_tile(const float* weights, const KeyTile<T>& tile, int begin, int end, const float* rescale, float* out,
                int column, int dim) {
    Vec sums[ROWS][WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int s = 0; s < WIDE; s++) {
            int at = column + s * LANES;
            sums[r][s] = load(out + r * dim + at, WIDE == 1 ? dim - at : LANES) * splat(rescale[r]);
        }
    for (int key = begin; key < end; key++) {
        Vec values[WIDE];
#pragma GCC unroll 4
        for (int s = 0; s < WIDE; s++) {
            int at = column + s * LANES;
            values[s] = load(tile.value[key] + at, WIDE == 1 ? dim - at : LANES);
            ask<ASKS>(tile.strip[key / LANES] + (at + key % LANES) * tile.stride, tile.to_next[key / LANES]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            Vec each = splat(weights[r * TILE_KEYS + key]);
#pragma GCC unroll 4
            for (int s = 0; s < WIDE; s++) sums[r][s] = fma(each, values[s], sums[r][s]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int s = 0; s < WIDE; s++) {
            int at = column + s * LANES;
            store(sums[r][s], out + r * dim + at, WIDE == 1 ? dim - at : LANES);
        }
}

// From scores to weights, for keys low..high of the tile; the others weigh 0.
inline void softmax_tile(float* scores, int low, int high, float* greatest_so_far, float* total, float* rescale) {
    const float nothing = -std::numeric_limits<float>::infinity();
    for (int key = 0; key < low; key++) scores[key] = nothing;
    for (int key = high; key < TILE_KEYS; key++) scores[key] = nothing;
    Vec strip[STRIPS];
    for (int s = 0; s < STRIPS; s++) strip[s] = load(scores + s * LANES);
    float before = *greatest_so_far;
    float now = std::max(before, greatest(max(max(strip[0], strip[1]), max(strip[2], strip[3]))));
    for (int s = 0; s < STRIPS; s++) {
        strip[s] = exp(strip[s] - splat(now));
        store(strip[s], scores + s * LANES);
    }
    float lane[LANES];
    store(exp(splat(before - now)), lane);
    *rescale = before == nothing ? 0.0f : lane[0];
    *total = *total * *rescale + sum((strip[0] + strip[1]) + (strip[2] + strip[3]));
    *greatest_so_far = now;
}

// Of the keys base..end; the rows see ``last`` of them in all.
template <typename T>
KeyTile<T> key_tile(const AttentionCall& call, const Span& span, int head, int base, int end, int last, T* buffer) {
    KeyTile<T> tile = {};
    int64_t size = call.block_size, dim = call.dim;
    const int32_t* table = span.table;
    bool in_place = size % LANES == 0;
    tile.stride = in_place ? size : LANES;
    auto at = [&](int position) { return (int64_t(table[position / size]) * call.kv_heads + head) * dim * size; };
    for (int s = 0; s < STRIPS; s++) {
        int position = base + s * LANES;
        if (position >= end) {
            tile.strip[s] = tile.strip[0];
        } else if (in_place) {
            tile.strip[s] = static_cast<const T*>(call.keys) + at(position) + position % size;
        } else {
            T* strip = buffer + s * LANES * dim;
            for (int lane = 0; lane < LANES; lane++) {
                bool is_there = position + lane < end;
                const T* from = static_cast<const T*>(call.keys);
                if (is_there) from += at(position + lane) + (position + lane) % size;
                for (int64_t d = 0; d < dim; d++) strip[d * LANES + lane] = is_there ? from[d * size] : T{};
            }
            tile.strip[s] = strip;
        }
    }
    if (in_place) {
        tile.to_values = static_cast<const char*>(call.values) - static_cast<const char*>(call.keys);
        for (int s = 0; s < STRIPS; s++) {
            int position = base + TILE_KEYS + s * LANES;
            if (position >= last) break;
            const T* next = static_cast<const T*>(call.keys) + at(position) + position % size;
            tile.to_next[s] = reinterpret_cast<const char*>(next) - reinterpret_cast<const char*>(tile.strip[s]);
        }
    }
    for (int key = 0; key < TILE_KEYS && base + key < end; key++)
        tile.value[key] = static_cast<const T*>(call.values) + at(base + key) + (base + key) % size * dim;
    return tile;
}

// Weighted values of ``count`` queries that see the same keys of a tile.
template <typename T, bool ASKS>
void add_values(const Workspace& work, const KeyTile<T>& tile, int query, int count, int begin, int end, int dim) {
    int whole = dim / LANES * LANES;
    with_count<QUERIES>(count, [&](auto rows) {
        const float* weights = work.scores.get() + query * TILE_KEYS;
        float* out = work.out.get() + query * dim;
        const float* rescale = work.rescale.get() + query;
        int column = 0;
        while (column < dim) {
            int wide = std::max(1, std::min(VECTORS, (whole - column) / LANES));
            with_count<VECTORS>(wide, [&](auto vectors) {
                value_tile<T, ASKS, decltype(rows)::value, decltype(vectors)::value>(weights, tile, begin, end, rescale, out,
                                                                               column, dim);
            });
            column += wide * LANES;
        }
    });
}

// One tile of keys for the queries from ``query`` on, at most QUERIES.
template <typename T, bool ASKS>
void attend_queries(const AttentionCall& call, const Workspace& work, const KeyTile<T>& tile, int query, int count,
                    int base) {
    int begin[QUERIES] = {}, end[QUERIES] = {}, last = 0;
    bool same = true;
    for (int i = 0; i < count; i++) {
        begin[i] = std::max(0, work.low[query + i] - base);
        end[i] = std::min(TILE_KEYS, work.high[query + i] - base);
        last = std::max(last, end[i]);
        same = same && begin[i] == begin[0] && end[i] == end[0];
    }
    float* scores = work.scores.get() + query * TILE_KEYS;
    with_count<QUERIES>(count, [&](auto rows) {
        for (int strip = 0; strip * LANES < last; strip += VECTORS) {
            int wide = std::min(VECTORS, (last - strip * LANES + LANES - 1) / LANES);
            with_count<VECTORS>(wide, [&](auto vectors) {
                score_tile<T, ASKS, decltype(rows)::value, decltype(vectors)::value>(work.q.get() + query * call.dim, tile,
                                                                               strip, call.dim, scores);
            });
        }
    });
    for (int i = 0; i < count; i++)
        if (begin[i] < end[i])
            softmax_tile(scores + i * TILE_KEYS, begin[i], end[i], &work.greatest[query + i], &work.total[query + i],
                         &work.rescale[query + i]);
    if (same && begin[0] < end[0]) return add_values<T, ASKS>(work, tile, query, count, begin[0], end[0], call.dim);
    for (int i = 0; i < count; i++)
        if (begin[i] < end[i]) add_values<T, ASKS>(work, tile, query + i, 1, begin[i], end[i], call.dim);
}

// The rows of a tile for the query heads that share one KV head.
template <typename T>
void attend_tile(const AttentionCall& call, const Tile& part, int kv_head, const Workspace& work) {
    Span span = {call.first_rows[part.span], call.span_rows[part.span], call.lengths[part.span],
                 call.tables + part.span * call.table_stride};
    int group = call.heads / call.kv_heads, pairs = part.rows * group, dim = call.dim;
    int least = std::numeric_limits<int32_t>::max(), most = 0;
    const T* q = static_cast<const T*>(call.q) + int64_t(kv_head) * group * dim;
    for (int pair = 0; pair < pairs; pair++) {
        int row = part.first_row + pair / group, first = pair / QUERIES * QUERIES;
        int wide = std::min(QUERIES, pairs - first);
        const T* from = q + row * call.row_stride + pair % group * dim;
        for (int d = 0; d < dim; d++) work.q[first * dim + d * wide + pair - first] = to_float(from[d]) * call.scale;
        work.high[pair] = int32_t(span.length - span.rows + row - span.first_row + 1);
        work.low[pair] = call.window > 0 ? std::max(0, work.high[pair] - call.window) : 0;
        work.greatest[pair] = -std::numeric_limits<float>::infinity();
        work.total[pair] = 0.0f;
        least = std::min(least, work.low[pair]);
        most = std::max(most, work.high[pair]);
    }
    std::fill(work.out.get(), work.out.get() + pairs * dim, 0.0f);
    for (int base = least / TILE_KEYS * TILE_KEYS; base < most; base += TILE_KEYS) {
        int end = std::min(most, base + TILE_KEYS);
        KeyTile<T> tile = key_tile(call, span, kv_head, base, end, most, reinterpret_cast<T*>(work.keys.get()));
        attend_queries<T, true>(call, work, tile, 0, std::min(QUERIES, pairs), base);
        for (int query = QUERIES; query < pairs; query += QUERIES)
            attend_queries<T, false>(call, work, tile, query, std::min(QUERIES, pairs - query), base);
    }
    for (int pair = 0; pair < pairs; pair++) {
        int64_t row = part.first_row + pair / group, head = int64_t(kv_head) * group + pair % group;
        T* to = static_cast<T*>(call.out) + (row * call.heads + head) * dim;
        for (int d = 0; d < dim; d++) from_float(work.out[pair * dim + d] / work.total[pair], to + d);
    }
}

template <typename T>
void attend(const AttentionCall& call) {
#pragma omp parallel num_threads(call.threads)
    {
        Workspace work(call.most_pairs, call.dim);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < call.rows; row++) write_kv<T>(call, row);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t task = 0; task < int64_t(call.tile_count) * call.kv_heads; task++)
            attend_tile<T>(call, call.tiles[task / call.kv_heads], int(task % call.kv_heads), work);
    }
}

}  // namespace fairway
