// Vectors of floats, their sums and exponentials, and rows shared out to threads: what all the CPU
// kernels are made of.
//
// Owns: conversion between bfloat16 and fp32, the order of a sum over elements, exp2, the split of
// rows over the caller's thread pool. Does not own: any kernel. Compiler vector extensions only, no
// intrinsics: AVX-512, AVX2 and NEON from one text.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>

// GOMP_parallel of the OpenMP runtime in use; null: there is none, work stays in the calling thread.
extern "C" typedef void (*Parallel)(void (*work)(void*), void* data, unsigned threads, unsigned);

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, COLUMNS = 4;  // floats in a vector; vectors in a register block's row
#elif defined(__AVX__)
constexpr int W = 8, COLUMNS = 2;
#else
constexpr int W = 4, COLUMNS = 4;
#endif
constexpr int LANES = 16;  // lanes of a sum over elements, whatever the vector width
constexpr int LINE = 64;   // bytes in a cache line

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));
typedef double Doubles __attribute__((vector_size(8 * W)));
typedef uint16_t BFloat16;

template <class To, class From>
inline To load_as(const From* from) {
    To to;
    std::memcpy(&to, from, sizeof to);
    return to;
}
inline Vec load(const float* from) { return load_as<Vec>(from); }
inline Vec load(const BFloat16* from) {
    Bits wide = __builtin_convertvector(load_as<Halves>(from), Bits) << 16;
    return load_as<Vec>(&wide);
}
inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }
inline void store(BFloat16* to, Vec x) {  // to nearest, ties to even; NaN stays NaN
    Bits bits = load_as<Bits>(&x);
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Halves half = __builtin_convertvector(x == x ? rounded : Bits{} + 0x7fc0, Halves);
    std::memcpy(to, &half, sizeof half);
}
inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x: a plain broadcast, as 0 + x is not
inline Vec lane_numbers() {
    Vec lanes = {};
    for (int l = 0; l < W; l++) lanes[l] = float(l);
    return lanes;
}
inline int vectors(int64_t elements) { return int((elements + W - 1) / W); }

// The first `count` (<= W) elements, zeros after them.
template <class T>
inline Vec load_part(const T* from, int64_t count) {
    if (count >= W) return load(from);
    T padded[W] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}
template <class T>
inline void store_part(T* to, Vec x, int64_t count) {
    if (count >= W) return store(to, x);
    T padded[W];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

// 2^x for x <= about 0, below 2^-126 exactly 0. Relative error about 1e-7: 2^(x - round(x)) by the
// Taylor polynomial of degree 7 (remainder 5e-9), times a power of two made in the exponent bits.
inline Vec exp2_of(Vec x) {
    const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Ints in_range = x >= splat(-126.0f);
    Vec clamped = in_range ? x : Vec{};
    Vec shifted = clamped + shifter;
    Vec f = clamped - (shifted - shifter);
    Vec y = splat(1.52527338e-5f);
    y = y * f + splat(1.54035304e-4f);
    y = y * f + splat(1.33335581e-3f);
    y = y * f + splat(9.61812911e-3f);
    y = y * f + splat(5.55041087e-2f);
    y = y * f + splat(2.40226507e-1f);
    y = y * f + splat(6.93147181e-1f);
    y = y * f + splat(1.0f);
    Bits bits = load_as<Bits>(&y) + (load_as<Bits>(&shifted) << 23);
    y = in_range ? load_as<Vec>(&bits) : Vec{};
    return x == x ? y : x;
}

// Sum of 16 lanes, pairwise in a fixed order.
template <class Float>
inline Float fold(const Float* lanes) {
    Float sum[LANES];
    std::memcpy(sum, lanes, sizeof sum);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sum[l] += sum[l + half];
    return sum[0];
}

// A sum over elements that come a vector at a time, `e` elements into the row: 16 lanes (e mod 16).
template <class Lanes, class Float>
struct Sum {
    alignas(64) Lanes lanes[LANES / W] = {};
    Lanes& at(int64_t e) { return lanes[e / W % (LANES / W)]; }
    Float folded() const { return fold(reinterpret_cast<const Float*>(lanes)); }
};
typedef Sum<Vec, float> LaneSum;
typedef Sum<Doubles, double> WideLaneSum;
inline Doubles widened(Vec x) { return __builtin_convertvector(x, Doubles); }

// x as it comes back from memory.
inline Vec rounded(const float*, Vec x) { return x; }
inline Vec rounded(const BFloat16*, Vec x) {
    BFloat16 half[W];
    store(half, x);
    return load(half);
}

// ------------------------------------------------------------------ threads

// Calls body(first, end) for ranges of rows that cover 0..rows, in the threads of the caller's pool.
// `cost`: about how many vectors' worth of work a row is; little work is not worth waking others.
template <class Body>
void for_rows(Parallel parallel, int64_t threads, int64_t rows, int64_t cost, const Body& body) {
    if (!parallel || threads <= 1 || rows * cost < 20000) return body(int64_t(0), rows);
    const int64_t step = (rows + 4 * threads - 1) / (4 * threads);
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t row; (row = next.fetch_add(step)) < rows;)
            body(row, row + step < rows ? row + step : rows);
    };
    parallel([](void* data) { (*static_cast<decltype(work)*>(data))(); }, &work,
             unsigned(threads), 0);
}

}  // namespace
