// What a decoder does to each token row between its matrix products, forward and backward, for CPUs:
// residual add with RMS norm, rotary positions, the gated activation.
//
// Owns: the arithmetic and its order. Does not own: tensors and the thread pool (the caller,
// rowwise_cpu.py), what the functions mean (rowwise.py).
//
// A row's result depends on that row alone, to the last bit: sums over its elements have 16 lanes,
// whatever the vector width, and no sum goes over rows but that of a gain's gradient, which is taken
// over blocks of 64 rows, whatever the threads. Arithmetic is fp32, rounded where a value is stored.
// A product of few rows takes microseconds; each function is one pass so that it takes less.

#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t GAIN_ROWS = 64;  // rows whose share of a gain's gradient is summed at once

// ------------------------------------------------------------------ residual and norm

// sum = x + delta (not without a delta), normed = gain * (sum / rms(sum)); returns 1 / rms(sum).
template <class T>
float add_norm_row(const T* x, const T* delta, const T* gain, int64_t width, float eps, T* sum,
                   T* normed) {
    LaneSum squares;
    for (int64_t e = 0; e < width; e += W) {
        Vec value = load_part(x + e, width - e);
        if (delta) {
            value = rounded(sum, value + load_part(delta + e, width - e));
            store_part(sum + e, value, width - e);
        }
        squares.at(e) = value * value + squares.at(e);
    }
    if (delta) x = sum;
    const float scale = 1.0f / std::sqrt(squares.folded() / float(width) + eps);
    for (int64_t e = 0; e < width; e += W) {
        Vec unit = rounded(x, load_part(x + e, width - e) * splat(scale));
        store_part(normed + e, load_part(gain + e, width - e) * unit, width - e);
    }
    return scale;
}

// With u = x * scale and g the gradient of gain * u:  x_grad = scale (g gain - u mean(g gain u)),
// gain_grad += g u.
template <class T>
void norm_gradient_row(const T* x, float scale, const T* gain, const T* grad, const T* added,
                       int64_t width, T* x_grad, float* gain_grad) {
    LaneSum dot;
    for (int64_t e = 0; e < width; e += W) {
        Vec unit = load_part(x + e, width - e) * splat(scale), g = load_part(grad + e, width - e);
        Vec both = g * unit;
        store_part(gain_grad + e, load_part(gain_grad + e, width - e) + both, width - e);
        dot.at(e) = both * load_part(gain + e, width - e) + dot.at(e);
    }
    const float mean = dot.folded() / float(width);
    for (int64_t e = 0; e < width; e += W) {
        Vec unit = load_part(x + e, width - e) * splat(scale);
        Vec g = load_part(grad + e, width - e) * load_part(gain + e, width - e);
        Vec out = splat(scale) * (g - unit * splat(mean));
        if (added) out += load_part(added + e, width - e);
        store_part(x_grad + e, out, width - e);
    }
}

template <class T>
void add_norm(Parallel parallel, int64_t threads, int64_t n, int64_t width, float eps, const T* x,
              const T* delta, const T* gain, T* sum, T* normed, float* scales) {
    for_rows(parallel, threads, n, width / W, [=](int64_t row, int64_t end) {
        for (; row < end; row++) {
            int64_t at = row * width;
            float scale = add_norm_row(x + at, delta ? delta + at : delta, gain, width, eps,
                                       sum + at, normed + at);
            if (scales) scales[row] = scale;
        }
    });
}

template <class T>
void norm_gradient(Parallel parallel, int64_t threads, int64_t n, int64_t width, const T* x,
                   const float* scales, const T* gain, const T* grad, const T* added, T* x_grad,
                   T* gain_grad) {
    const int64_t blocks = (n + GAIN_ROWS - 1) / GAIN_ROWS;
    std::vector<float> parts(blocks * width);
    float* part = parts.data();
    for_rows(parallel, threads, blocks, GAIN_ROWS * width / W, [=](int64_t block, int64_t last) {
        for (; block < last; block++) {
            int64_t end = (block + 1) * GAIN_ROWS < n ? (block + 1) * GAIN_ROWS : n;
            for (int64_t row = block * GAIN_ROWS; row < end; row++) {
                int64_t at = row * width;
                norm_gradient_row(x + at, scales[row], gain, grad + at,
                                  added ? added + at : added, width, x_grad + at,
                                  part + block * width);
            }
        }
    });
    for (int64_t e = 0; e < width; e += W) {
        Vec sum = {};
        for (int64_t b = 0; b < blocks; b++) sum += load_part(part + b * width + e, width - e);
        store_part(gain_grad + e, sum, width - e);
    }
}

// ------------------------------------------------------------------ rotary positions

// Element i with element i + half, by the angles of the row; `turn` -1 turns back.
template <class T>
void rotate_head(const T* x, const float* cos, const float* sin, int64_t half, float turn, T* to) {
    for (int64_t e = 0; e < half; e += W) {
        Vec a = load_part(x + e, half - e), b = load_part(x + half + e, half - e);
        Vec c = load_part(cos + e, half - e), s = load_part(sin + e, half - e) * splat(turn);
        store_part(to + e, a * c - b * s, half - e);
        store_part(to + half + e, b * c + a * s, half - e);
    }
}

template <class T>
struct Rotary {  // rows of whole heads, heads contiguous; `row` is the distance of two rows
    int64_t n, heads, kv_heads, size;
    const float *cos, *sin;  // [n, size / 2]
    Parallel parallel;
    int64_t threads;

    template <class Row>
    void each_row(const Row& body) const {
        for_rows(parallel, threads, n, (heads + 2 * kv_heads) * size / W,
                 [&](int64_t row, int64_t end) {
                     for (; row < end; row++) body(row);
                 });
    }
    void turn(const T* from, int64_t n_heads, int64_t row, float turn, T* to) const {
        const int64_t half = size / 2;
        for (int64_t h = 0; h < n_heads; h++)
            rotate_head(from + h * size, cos + row * half, sin + row * half, half, turn,
                        to + h * size);
    }
    // qk holds the queries' heads, then the keys'. Keys and values go to row slots[i] when there are
    // slots, else to row i. False, and nothing is written, when there is no such row.
    bool forward(const T* qk, int64_t qk_row, const T* v, int64_t v_row, T* q_out, int64_t q_row,
                 T* k_out, T* v_out, const int64_t* slots, int64_t n_slots) const {
        const int64_t kv_size = kv_heads * size;
        for (int64_t i = 0; slots && i < n; i++)
            if (uint64_t(slots[i]) >= uint64_t(n_slots)) return false;
        each_row([=](int64_t i) {
            const T* from = qk + i * qk_row;
            const int64_t to = (slots ? slots[i] : i) * kv_size;
            turn(from + heads * size, kv_heads, i, 1.0f, k_out + to);
            std::memcpy(v_out + to, v + i * v_row, kv_size * sizeof(T));
            turn(from, heads, i, 1.0f, q_out + i * q_row);
        });
        return true;
    }
    void backward(const T* q_grad, const T* k_grad, const T* v_grad, T* qk_grad, int64_t qk_row,
                  T* v_out, int64_t v_row) const {
        const int64_t q_size = heads * size, kv_size = kv_heads * size;
        each_row([=](int64_t i) {
            T* to = qk_grad + i * qk_row;
            turn(q_grad + i * q_size, heads, i, -1.0f, to);
            turn(k_grad + i * kv_size, kv_heads, i, -1.0f, to + q_size);
            std::memcpy(v_out + i * v_row, v_grad + i * kv_size, kv_size * sizeof(T));
        });
    }
};

// ------------------------------------------------------------------ gated activation

inline Vec sigmoid(Vec x) {
    const Vec one = splat(1.0f);
    Vec size = x < Vec{} ? -x : x;
    Vec small = exp2_of(size * splat(-1.44269504088896340736f));  // exp(-|x|) does not overflow
    return (x < Vec{} ? small : one) / (one + small);
}

// out = silu(gate) * up; a row of gate_up is gate, then up.
template <class T>
void gated(Parallel parallel, int64_t threads, int64_t n, int64_t width, const T* gate_up, T* out) {
    for_rows(parallel, threads, n, 8 * width / W, [=](int64_t row, int64_t end) {
        for (; row < end; row++) {
            const T *gate = gate_up + 2 * row * width, *up = gate + width;
            for (int64_t e = 0; e < width; e += W) {
                Vec g = load_part(gate + e, width - e), u = load_part(up + e, width - e);
                store_part(out + row * width + e, g * sigmoid(g) * u, width - e);
            }
        }
    });
}

template <class T>
void gated_gradient(Parallel parallel, int64_t threads, int64_t n, int64_t width, const T* gate_up,
                    const T* grad, T* gate_up_grad) {
    for_rows(parallel, threads, n, 10 * width / W, [=](int64_t row, int64_t end) {
        for (; row < end; row++) {
            const T *gate = gate_up + 2 * row * width, *up = gate + width;
            T *gate_grad = gate_up_grad + 2 * row * width, *up_grad = gate_grad + width;
            for (int64_t e = 0; e < width; e += W) {
                Vec g = load_part(gate + e, width - e), u = load_part(up + e, width - e);
                Vec o = load_part(grad + row * width + e, width - e), s = sigmoid(g);
                Vec slope = s + g * s * (splat(1.0f) - s);
                store_part(gate_grad + e, o * u * slope, width - e);
                store_part(up_grad + e, o * g * s, width - e);
            }
        }
    });
}

}  // namespace

// Mirrored argument by argument in rowwise_cpu.py; one set per element type.
#define EXPORT(T, NAME)                                                                           \
    extern "C" void twofold_add_norm_##NAME(Parallel parallel, int64_t threads, int64_t n,        \
                                            int64_t width, float eps, const T* x, const T* delta, \
                                            const T* gain, T* sum, T* normed, float* scales) {    \
        add_norm(parallel, threads, n, width, eps, x, delta, gain, sum, normed, scales);          \
    }                                                                                             \
    extern "C" void twofold_norm_gradient_##NAME(                                                 \
        Parallel parallel, int64_t threads, int64_t n, int64_t width, const T* x,                 \
        const float* scales, const T* gain, const T* grad, const T* added, T* x_grad,             \
        T* gain_grad) {                                                                           \
        norm_gradient(parallel, threads, n, width, x, scales, gain, grad, added, x_grad,          \
                      gain_grad);                                                                 \
    }                                                                                             \
    extern "C" int twofold_rotary_##NAME(                                                         \
        Parallel parallel, int64_t threads, int64_t n, int64_t heads, int64_t kv_heads,           \
        int64_t size, const float* cos, const float* sin, const T* qk, int64_t qk_row,            \
        const T* v, int64_t v_row, T* q_out, int64_t q_row, T* k_out, T* v_out,                   \
        const int64_t* slots, int64_t n_slots) {                                                  \
        return Rotary<T>{n, heads, kv_heads, size, cos, sin, parallel, threads}.forward(          \
            qk, qk_row, v, v_row, q_out, q_row, k_out, v_out, slots, n_slots);                    \
    }                                                                                             \
    extern "C" void twofold_rotary_gradient_##NAME(                                               \
        Parallel parallel, int64_t threads, int64_t n, int64_t heads, int64_t kv_heads,           \
        int64_t size, const float* cos, const float* sin, const T* q_grad, const T* k_grad,       \
        const T* v_grad, T* qk_grad, int64_t qk_row, T* v_out, int64_t v_row) {                   \
        Rotary<T>{n, heads, kv_heads, size, cos, sin, parallel, threads}.backward(                \
            q_grad, k_grad, v_grad, qk_grad, qk_row, v_out, v_row);                               \
    }                                                                                             \
    extern "C" void twofold_gated_##NAME(Parallel parallel, int64_t threads, int64_t n,           \
                                         int64_t width, const T* gate_up, T* out) {               \
        gated(parallel, threads, n, width, gate_up, out);                                         \
    }                                                                                             \
    extern "C" void twofold_gated_gradient_##NAME(Parallel parallel, int64_t threads, int64_t n,  \
                                                  int64_t width, const T* gate_up, const T* grad, \
                                                  T* gate_up_grad) {                              \
        gated_gradient(parallel, threads, n, width, gate_up, grad, gate_up_grad);                 \
    }
EXPORT(float, float32)
EXPORT(BFloat16, bfloat16)
