// Register-blocked products and the gathering of keys: what attention_cpu.cpp is made of.
//
// Owns: the one multiply-add loop and its order. Does not own: vectors (vectors.h), which rows and
// keys, softmax, threads (attention_cpu.cpp, the only file to include this).

#pragma once

#include "vectors.h"

namespace {

constexpr int ROWS = 6;    // rows of a register block: ROWS * COLUMNS accumulators
constexpr int BLOCK = 64;  // keys in a block

// ------------------------------------------------------------------ products

struct Matrix {  // gathered: row k starts at data + k * row
    const float* data;
    int64_t row;
    Vec at(int64_t k, int64_t column) const { return load(data + k * row + column); }
};

// c [n, columns] += a [n, n_k] b [n_k, columns], one chain of multiply-adds over k per element;
// a is read at a[row * a_row + k * a_step], so that it may be a transpose.
template <class Right>
struct Product {
    int64_t n_k;
    const float* a;
    int64_t a_row, a_step;
    Right b;
    float* c;
    int64_t c_row;

    template <int R, int C>  // R rows and C vectors of columns, all in registers
    void block(int64_t row, int column) const {
        const float* left = a + row * a_row;
        float* to = c + row * c_row + column * W;
        Vec sum[R][C];
        for (int i = 0; i < R; i++)
            for (int j = 0; j < C; j++) sum[i][j] = load(to + i * c_row + j * W);
        for (int64_t k = 0; k < n_k; k++) {
            Vec right[C];
            for (int j = 0; j < C; j++) right[j] = b.at(k, (column + j) * W);
            for (int i = 0; i < R; i++) {
                Vec factor = splat(left[i * a_row + k * a_step]);
                for (int j = 0; j < C; j++) sum[i][j] = factor * right[j] + sum[i][j];
            }
        }
        for (int i = 0; i < R; i++)
            for (int j = 0; j < C; j++) store(to + i * c_row + j * W, sum[i][j]);
    }
    template <int C>
    void rows(int64_t n, int column) const {
        int64_t row = 0;
        for (; row + ROWS <= n; row += ROWS) block<ROWS, C>(row, column);
        switch (n - row) {
            case 5: return block<5, C>(row, column);
            case 4: return block<4, C>(row, column);
            case 3: return block<3, C>(row, column);
            case 2: return block<2, C>(row, column);
            case 1: return block<1, C>(row, column);
        }
    }
    void operator()(int64_t n, int columns) const {
        int column = 0;
        for (; column + COLUMNS <= columns; column += COLUMNS) rows<COLUMNS>(n, column);
        switch (columns - column) {
            case 3: return rows<3>(n, column);
            case 2: return rows<2>(n, column);
            case 1: return rows<1>(n, column);
        }
    }
};

// ------------------------------------------------------------------ gathering keys

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Exchanges the off-diagonal S x S blocks of every 2S x 2S block; all powers of two transpose.
template <int S, int... L>
inline void exchange(Vec* rows, std::integer_sequence<int, L...> lanes) {
    for (int i = 0; i < W; i++) {
        if (i & S) continue;
        Vec upper = rows[i], lower = rows[i + S];
        rows[i] = SHUFFLE(upper, lower, ((L & S) ? W + L - S : L)...);
        rows[i + S] = SHUFFLE(upper, lower, ((L & S) ? W + L : L + S)...);
    }
    if constexpr (2 * S < W) exchange<2 * S>(rows, lanes);
}

// The keys (or values) of one block for one key head: where each starts in memory.
template <class T>
struct Keys {
    const T* start[BLOCK];  // from `count` on the last one again, so that vectors can be full
    int count;
    int64_t size;  // elements of a head

    void gather(float* to, int64_t to_row) const {  // to[key][element], zeros up to a full vector
        for (int j = 0; j < count; j++)
            for (int64_t e = 0; e < size; e += W)
                store(to + j * to_row + e, load_part(start[j] + e, size - e));
    }
    // to[element][key], rows of BLOCK. Meanwhile the keys `ahead` are fetched into the cache.
    void gather_transposed(float* to, const Keys& ahead) const {
        for (int j = 0; j < count; j += W) {
            for (int i = 0; i < W; i++)
                for (int64_t e = 0; e < size; e += LINE / sizeof(T))
                    __builtin_prefetch(ahead.start[j + i] + e);
            for (int64_t e = 0; e < size; e += W) {
                Vec square[W];
                for (int i = 0; i < W; i++) square[i] = load_part(start[j + i] + e, size - e);
                exchange<1>(square, std::make_integer_sequence<int, W>());
                for (int i = 0; i < W; i++) store(to + (e + i) * BLOCK + j, square[i]);
            }
        }
    }
};

// The right side of a product straight from the cache of keys, for tiles too small to gather them.
template <class T>
struct Direct {
    const Keys<T>& keys;
    const Keys<T>& ahead;
    Vec at(int64_t k, int64_t column) const {
        __builtin_prefetch(ahead.start[k] + column);
        return load(keys.start[k] + column);
    }
};

}  // namespace
