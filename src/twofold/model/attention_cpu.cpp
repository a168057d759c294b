// Causal grouped-query attention over ragged rows, forward and backward, for CPUs.
//
// Owns: the arithmetic and its order. Does not own: tensors, the thread pool (both come from the
// caller, attention_cpu.py), the meaning of rows and keys (attention.py).
//
// One rule holds everywhere: what a row gets depends on its position, its query and the keys and
// values of positions 0..p, and on nothing else (not on other rows, slots, tiles, threads). So decode,
// prefill and packed training agree bit for bit. It follows from these orders:
//   score    = one chain of fused multiply-adds over the head's elements, first to last;
//   softmax  = online (Milakov and Gimelshein, 2018) over blocks of 64 keys that start at absolute
//              positions 0, 64, 128, ...; the sum has 16 lanes (lane = position mod 16), folded
//              pairwise at the end;
//   output   = one chain of fused multiply-adds over the keys, in order of position.
// A vector holds independent chains only, so its width does not matter either. Keys a row may not see
// get weight exactly 0, and adding 0 * value changes nothing.
//
// How it is fast: all query heads of a key head are taken together, in tiles of some 96 query rows
// against blocks of 64 keys that are gathered, widened to fp32 and (where elements are summed over)
// transposed into L1 once per tile. Every product is then the same register-blocked loop, `multiply`.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, COLUMNS = 4;  // floats in a vector; vectors in a register block's row
#elif defined(__AVX__)
constexpr int W = 8, COLUMNS = 2;
#else
constexpr int W = 4, COLUMNS = 4;
#endif
constexpr int ROWS = 6;        // rows of a register block: ROWS * COLUMNS accumulators
constexpr int BLOCK = 64;      // keys in a block
constexpr int LANES = 16;      // lanes of the softmax sum, whatever the vector width
constexpr int LINE = 64;       // bytes in a cache line
constexpr int TILE = 96;       // query rows (rows x heads of one key head) in a tile, about
constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.69314718055994530942f;

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));
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
inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, so this is a broadcast; 0 + x is not
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
    Ints result = load_as<Ints>(&y) + (load_as<Ints>(&shifted) << 23);
    result = (in_range | (x != x)) ? result : Ints{};
    y = load_as<Vec>(&result);
    return x == x ? y : x;
}

// ------------------------------------------------------------------ products

struct Matrix {  // gathered: row k starts at data + k * row
    const float* data;
    int64_t row;
    Vec at(int64_t k, int64_t column) const { return load(data + k * row + column); }
};

// c [n, columns] += a [n, n_k] b [n_k, columns], one chain of multiply-adds over k for every element.
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

// ------------------------------------------------------------------ the call

enum Status { OK = 0, BAD_INDEX = 1, NO_MEMORY = 2 };

}  // namespace

extern "C" {

typedef void (*Parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

struct View {  // [rows, heads, head_size]; strides in elements, the last one is 1
    const void* data;
    int64_t row, head;
};

// Mirrored field by field by `_Call` in attention_cpu.py.
struct Call {
    int64_t n_rows, heads, kv_heads, head_size, n_key_rows, n_spans, n_key_index, is_bfloat16, threads;
    Parallel parallel;  // GOMP_parallel of the OpenMP runtime in use, or null: one thread
    View q, k, v;
    const int64_t *spans, *key_starts, *key_index;
    void* out;   // [n_rows, heads, head_size]: written by forward, read by backward
    float* lse;  // [n_rows, heads] log2 of the sum of 2^score; may be null in forward
    View out_grad;
    void *q_grad, *k_grad, *v_grad;  // contiguous; k_grad and v_grad are null when not wanted
    float* partial;                  // [threads, 2, kv_heads, n_key_rows, padded head size]
};
}

namespace {

struct Task {  // consecutive rows of one sequence, with all query heads of one key head
    int64_t sequence, first_row, n_rows, first_position, kv_head;
    int64_t cost() const { return n_rows * (first_position + n_rows) + 8; }
};

struct Scratch {
    float* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
    float* take(size_t floats) {  // kept by the thread: fresh pages would cost more than the work
        if (floats > size) {
            std::free(data);
            data = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
            size = data ? floats : 0;
        }
        return data;
    }
};
thread_local Scratch scratch;

template <class T>
struct Attention {
    const Call& call;
    const int64_t size = call.head_size, group = call.heads / call.kv_heads;
    const int64_t padded = (size + 15) / 16 * 16;
    const int64_t tile_rows = group < TILE ? TILE / group : 1;
    const int64_t tile = tile_rows * group;
    const float scale = LOG2E / std::sqrt(float(size));  // softmax works in powers of two
    std::vector<Task> tasks;
    std::vector<size_t> part_starts;  // backward: part p has tasks part_starts[p] .. [p + 1]
    std::atomic<size_t> next{0};
    std::atomic<int> status{OK};

    explicit Attention(const Call& c) : call(c) {}

    const T* at(const View& view, int64_t row, int64_t head) const {
        return static_cast<const T*>(view.data) + row * view.row + head * view.head;
    }

    // Longest rows first within a sequence, so that the last tasks to be handed out are short.
    void add_tasks(int64_t sequence, int64_t kv_head) {
        const int64_t* span = call.spans + 3 * sequence;
        for (int64_t done = span[1]; done > 0;) {
            int64_t n = (done - 1) % tile_rows + 1;
            done -= n;
            tasks.push_back({sequence, span[0] + done, n, span[2] + done, kv_head});
        }
    }
    bool spans_are_valid() const {
        for (int64_t s = 0; s < call.n_spans; s++) {
            const int64_t *span = call.spans + 3 * s, start = call.key_starts[s];
            if (span[0] < 0 || span[1] < 0 || span[2] < 0 || span[0] + span[1] > call.n_rows)
                return false;
            if (span[1] && (start < 0 || start + span[2] + span[1] > call.n_key_index)) return false;
        }
        return true;
    }

    struct Block {  // the keys and values of positions `first` .. of a task's sequence
        int64_t rows[BLOCK];
        Keys<T> k, v;
    };
    // False when a key row does not exist.
    bool find_block(const Task& task, int64_t first, Block& block) {
        int64_t left = task.first_position + task.n_rows - first;
        int count = int(left < BLOCK ? left : BLOCK);
        const int64_t* index = call.key_index + call.key_starts[task.sequence] + first;
        block.k.count = block.v.count = count;
        block.k.size = block.v.size = size;
        bool valid = true;
        for (int j = 0; j < count; j++) {
            block.rows[j] = index[j];
            valid &= uint64_t(index[j]) < uint64_t(call.n_key_rows);
        }
        for (int j = count; j < BLOCK; j++) block.rows[j] = block.rows[count - 1];
        if (!valid) {
            status = BAD_INDEX;
            return false;
        }
        const T *k = at(call.k, 0, task.kv_head), *v = at(call.v, 0, task.kv_head);
        const int64_t k_row = call.k.row, v_row = call.v.row;
        for (int j = 0; j < BLOCK; j++) block.k.start[j] = k + block.rows[j] * k_row;
        for (int j = 0; j < BLOCK; j++) block.v.start[j] = v + block.rows[j] * v_row;
        return true;
    }
    // to[row * group + head][:] = factor * view, zeros up to the padded size
    void gather_rows(const View& view, const Task& task, float factor, float* to) const {
        for (int64_t i = 0; i < task.n_rows * group; i++) {
            const T* from = at(view, task.first_row + i / group, task.kv_head * group + i % group);
            for (int64_t e = 0; e < padded; e += W)
                store(to + i * padded + e,
                      e < size ? load_part(from + e, size - e) * splat(factor) : Vec{});
        }
    }
    // to (contiguous [row, head, element], as `out`) = factor * from
    void scatter_row(void* to, const Task& task, int64_t i, const float* from, float factor) const {
        int64_t row = task.first_row + i / group, head = task.kv_head * group + i % group;
        T* start = static_cast<T*>(to) + (row * call.heads + head) * size;
        for (int64_t e = 0; e < size; e += W)
            store_part(start + e, load(from + e) * splat(factor), size - e);
    }
    // How many keys of the block that starts at position `block` query row i of the tile sees.
    int seen(const Task& task, int64_t i, int64_t block) const {
        int64_t n = task.first_position + i / group - block + 1;
        return int(n < 0 ? 0 : n > BLOCK ? BLOCK : n);
    }
    int64_t first_seeing(const Task& task, int64_t block) const {
        int64_t rows_before = block - task.first_position;
        return rows_before > 0 ? rows_before * group : 0;
    }

    // ---------------------------------------------------------------- forward

    struct Softmax {  // running state of one query row
        float max, sum[LANES];
    };

    // scores [BLOCK] become weights; returns what the output so far must be multiplied with.
    static float __attribute__((noinline)) weigh(float* scores, int n_seen, Softmax& state) {
        Vec lane = Vec{}, best = splat(-INFINITY);
        for (int l = 0; l < W; l++) lane[l] = float(l);
        int n = vectors(n_seen);
        for (int j = 0; j < n; j++) {
            Vec x = load(scores + j * W);
            x = lane < splat(float(n_seen - j * W)) ? x : splat(-INFINITY);
            store(scores + j * W, x);
            best = x > best ? x : best;
        }
        float block_max = best[0];
        for (int l = 1; l < W; l++) block_max = best[l] > block_max ? best[l] : block_max;
        float shrink = 1.0f;
        if (block_max > state.max) {
            shrink = exp2_of(splat(state.max - block_max))[0];
            state.max = block_max;
            for (float& s : state.sum) s *= shrink;
        }
        for (int j = 0; j < n; j++) {
            Vec weight = exp2_of(load(scores + j * W) - splat(state.max));
            store(scores + j * W, weight);
            float* sum = state.sum + j * W % LANES;
            store(sum, load(sum) + weight);
        }
        return shrink;
    }
    static float total(const Softmax& state) {
        float sum[LANES];
        std::memcpy(sum, state.sum, sizeof sum);
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) sum[l] += sum[l + half];
        return sum[0];
    }

    void forward(const Task& task, const Task* next_task) {
        int64_t n = task.n_rows * group, n_keys = task.first_position + task.n_rows;
        float* q = scratch.take(2 * tile * padded + 2 * BLOCK * padded + tile * sizeof(Softmax) / 4);
        if (!q) return void(status = NO_MEMORY);
        float *out = q + tile * padded, *keys = out + tile * padded, *values = keys + BLOCK * padded;
        Softmax* state = reinterpret_cast<Softmax*>(values + BLOCK * padded);
        gather_rows(call.q, task, scale, q);
        std::memset(out, 0, n * padded * sizeof(float));
        for (int64_t i = 0; i < n; i++) state[i] = {-INFINITY, {}};
        const bool direct = n <= ROWS && size == padded;
        Block blocks[2];
        if (!find_block(task, 0, blocks[0])) return;
        for (int64_t first = 0; first < n_keys; first += BLOCK) {
            Block &here = blocks[first / BLOCK % 2], &ahead = blocks[(first / BLOCK + 1) % 2];
            here.k.gather_transposed(keys, here.v);
            const bool last = first + BLOCK >= n_keys;
            if (last && !next_task) ahead = here;
            else if (!find_block(last ? *next_task : task, last ? 0 : first + BLOCK, ahead)) return;
            if (direct) {
                forward_block(task, first, 0, n, q, keys, Direct<T>{here.v, ahead.k}, out, state);
                continue;
            }
            here.v.gather(values, padded);
            for (int64_t i = first_seeing(task, first); i < n; i += ROWS)
                forward_block(task, first, i, n - i < ROWS ? n - i : ROWS, q, keys,
                              Matrix{values, padded}, out, state);
        }
        for (int64_t i = 0; i < n; i++) finish(task, i, out + i * padded, state[i]);
    }
    template <class Values>
    void forward_block(const Task& task, int64_t first, int64_t i, int64_t rows, const float* q,
                       const float* keys, Values values, float* out, Softmax* state) const {
        alignas(64) float scores[ROWS * BLOCK] = {};
        int most = seen(task, i + rows - 1, first);
        Product<Matrix>{size, q + i * padded, padded, 1, {keys, BLOCK}, scores, BLOCK}(rows,
                                                                                     vectors(most));
        for (int64_t r = 0; r < rows; r++) {
            float* row = out + (i + r) * padded;
            int n_seen = seen(task, i + r, first);
            float shrink = weigh(scores + r * BLOCK, n_seen, state[i + r]);
            for (int j = vectors(n_seen) * W; j < most; j++) scores[r * BLOCK + j] = 0;
            if (shrink != 1.0f)
                for (int64_t e = 0; e < padded; e += W) store(row + e, load(row + e) * splat(shrink));
        }
        Product<Values>{most, scores, BLOCK, 1, values, out + i * padded, padded}(rows,
                                                                                int(padded / W));
    }
    void finish(const Task& task, int64_t i, float* out, const Softmax& state) const {
        float sum = total(state);
        scatter_row(call.out, task, i, out, 1.0f / sum);
        if (call.lse) {
            int64_t row = task.first_row + i / group, head = task.kv_head * group + i % group;
            call.lse[row * call.heads + head] = state.max + std::log2(sum);
        }
    }

    // ---------------------------------------------------------------- backward

    // With P the weights and D = out_grad . out of a row (Dao et al., FlashAttention, 2022):
    // v_grad = P^T out_grad, S_grad = P * (out_grad v^T - D), q_grad = S_grad k, k_grad = S_grad^T q.
    struct Tile {
        float *q, *out_grad, *q_grad, *lse, *dot, *weights, *score_grad;  // of the tile's rows
        float *keys, *keys_t, *values_t, *product;                        // of a block of keys
    };

    bool take_tile(Tile& t) const {
        float* p = scratch.take(tile * (3 * padded + 2 + 2 * BLOCK) + 4 * BLOCK * padded + 16 * 11);
        if (!p) return false;
        auto cut = [&p](int64_t floats) { return std::exchange(p, p + (floats + 15) / 16 * 16); };
        t.q = cut(tile * padded), t.out_grad = cut(tile * padded), t.q_grad = cut(tile * padded);
        t.weights = cut(tile * BLOCK), t.score_grad = cut(tile * BLOCK);
        t.keys = cut(BLOCK * padded), t.keys_t = cut(BLOCK * padded);
        t.values_t = cut(BLOCK * padded), t.product = cut(BLOCK * padded);
        t.lse = cut(tile), t.dot = cut(tile);
        return true;
    }
    float* partial(size_t part, int which, int64_t kv_head) const {
        return call.partial +
               ((part * 2 + which) * call.kv_heads + kv_head) * call.n_key_rows * padded;
    }

    void backward(const Task& task, size_t part) {
        Tile t;
        if (!take_tile(t)) return void(status = NO_MEMORY);
        int64_t n = task.n_rows * group, n_keys = task.first_position + task.n_rows;
        View out = {call.out, call.heads * size, size};
        gather_rows(out, task, 1.0f, t.q);
        gather_rows(call.out_grad, task, 1.0f, t.out_grad);
        for (int64_t i = 0; i < n; i++) {
            Vec sum = {};
            for (int64_t e = i * padded; e < (i + 1) * padded; e += W)
                sum = load(t.q + e) * load(t.out_grad + e) + sum;
            t.dot[i] = 0;
            for (int l = 0; l < W; l++) t.dot[i] += sum[l];
            int64_t row = task.first_row + i / group, head = task.kv_head * group + i % group;
            t.lse[i] = call.lse[row * call.heads + head];
        }
        gather_rows(call.q, task, scale, t.q);
        std::memset(t.q_grad, 0, n * padded * sizeof(float));
        for (int64_t block = 0; block < n_keys; block += BLOCK)
            if (!backward_block(task, part, block, t)) return;
        for (int64_t i = 0; i < n; i++)
            scatter_row(call.q_grad, task, i, t.q_grad + i * padded, scale * LN2);
    }
    bool backward_block(const Task& task, size_t part, int64_t first, const Tile& t) {
        Block block;
        if (!find_block(task, first, block)) return false;
        block.k.gather_transposed(t.keys_t, block.v);
        block.k.gather(t.keys, padded);
        block.v.gather_transposed(t.values_t, block.v);
        int64_t n = task.n_rows * group;
        int64_t start = first_seeing(task, first), rows = n - start;
        float *weights = t.weights + start * BLOCK, *score_grad = t.score_grad + start * BLOCK;
        std::memset(weights, 0, rows * BLOCK * sizeof(float));
        std::memset(score_grad, 0, rows * BLOCK * sizeof(float));
        for (int64_t i = start; i < n; i += ROWS) {
            int64_t few = n - i < ROWS ? n - i : ROWS;
            int most = seen(task, i + few - 1, first);
            float *p = t.weights + i * BLOCK, *g = t.score_grad + i * BLOCK;
            Product<Matrix>{size, t.q + i * padded, padded, 1, {t.keys_t, BLOCK}, p, BLOCK}(
                few, vectors(most));
            Product<Matrix>{size, t.out_grad + i * padded, padded, 1, {t.values_t, BLOCK}, g, BLOCK}(
                few, vectors(most));
            for (int64_t r = 0; r < few; r++)
                score_gradient(p + r * BLOCK, g + r * BLOCK, seen(task, i + r, first), vectors(most),
                               t.lse[i + r], t.dot[i + r]);
            Product<Matrix>{most, g, BLOCK, 1, {t.keys, padded}, t.q_grad + i * padded, padded}(
                few, int(padded / W));
        }
        if (!call.partial) return true;
        float *from = t.q + start * padded, *grad = t.out_grad + start * padded;
        add_to_keys(weights, rows, grad, block, t.product, partial(part, 1, task.kv_head));
        add_to_keys(score_grad, rows, from, block, t.product, partial(part, 0, task.kv_head));
        return true;
    }
    // In: scores and out_grad v^T. Out: weights and gradient of the (natural, unscaled) scores.
    static void score_gradient(float* weights, float* grad, int n_seen, int n, float lse, float dot) {
        Vec lane = Vec{};
        for (int l = 0; l < W; l++) lane[l] = float(l);
        for (int j = 0; j < n; j++) {
            Vec x = load(weights + j * W) - splat(lse);
            x = lane < splat(float(n_seen - j * W)) ? exp2_of(x) : Vec{};
            store(weights + j * W, x);
            store(grad + j * W, x * (load(grad + j * W) - splat(dot)));
        }
    }
    // sums[row of key j] += sum over rows r of left[r][j] * right[r], rows of BLOCK and of `padded`
    void add_to_keys(const float* left, int64_t rows, const float* right, const Block& block,
                     float* product, float* sums) const {
        int count = block.k.count;
        std::memset(product, 0, count * padded * sizeof(float));
        Product<Matrix>{rows, left, 1, BLOCK, {right, padded}, product, padded}(count,
                                                                              int(padded / W));
        for (int j = 0; j < count; j++) {
            float *to = sums + block.rows[j] * padded, *from = product + j * padded;
            for (int64_t e = 0; e < padded; e += W) store(to + e, load(to + e) + load(from + e));
        }
    }

    // ---------------------------------------------------------------- threads

    template <class Body>
    void in_parallel(const Body& body, bool worth_it) const {
        auto work = [](void* data) { (*static_cast<const Body*>(data))(); };
        if (worth_it && call.parallel && call.threads > 1)
            call.parallel(work, const_cast<Body*>(&body), unsigned(call.threads), 0);
        else
            body();
    }
    // Below some 10 microseconds of work, waking the others costs more than it saves.
    bool worth_it() const {
        int64_t cost = 0;
        for (const Task& task : tasks) cost += task.cost();
        return cost * group * size > 400000;
    }

    int run_forward() {
        if (!spans_are_valid()) return BAD_INDEX;
        for (int64_t s = 0; s < call.n_spans; s++)
            for (int64_t h = 0; h < call.kv_heads; h++) add_tasks(s, h);
        in_parallel(
            [this] {
                for (size_t t = next++, then; t < tasks.size(); t = then) {
                    then = next++;  // known early, so that its keys can be on their way
                    forward(tasks[t], then < tasks.size() ? &tasks[then] : nullptr);
                }
            },
            worth_it());
        return status;
    }

    // Key gradients are summed per part, parts in their order: the same for a given `threads`,
    // however many threads really come. Key heads are outermost: few parts touch the same head.
    int run_backward() {
        if (!spans_are_valid()) return BAD_INDEX;
        for (int64_t h = 0; h < call.kv_heads; h++)
            for (int64_t s = 0; s < call.n_spans; s++) add_tasks(s, h);
        split();
        in_parallel(
            [this] {
                for (size_t p; (p = next++) + 1 < part_starts.size();) run_part(p);
            },
            worth_it());
        if (!call.partial || status) return status;
        next = 0;
        const size_t chunk = 64, n = (call.n_key_rows + chunk - 1) / chunk;
        in_parallel(
            [this, n] {
                for (size_t c; (c = next++) < n;)
                    for (int64_t h = 0; h < call.kv_heads; h++)
                        for (size_t r = c * chunk; r < (c + 1) * chunk; r++)
                            if (int64_t(r) < call.n_key_rows) sum_parts(int64_t(r), h);
            },
            worth_it());
        return status;
    }
    void split() {
        int64_t all = 0, done = 0;
        for (const Task& task : tasks) all += task.cost();
        part_starts.push_back(0);
        for (size_t t = 0; t < tasks.size(); t++) {
            done += tasks[t].cost();
            if (done * call.threads >= all * int64_t(part_starts.size())) part_starts.push_back(t + 1);
        }
    }
    bool touches(size_t part, int64_t kv_head) const {
        size_t first = part_starts[part], end = part_starts[part + 1];
        return first < end && tasks[first].kv_head <= kv_head && kv_head <= tasks[end - 1].kv_head;
    }
    void run_part(size_t part) {
        for (int64_t h = 0; call.partial && h < call.kv_heads; h++)
            for (int which = 0; which < 2 && touches(part, h); which++)
                std::memset(partial(part, which, h), 0, call.n_key_rows * padded * sizeof(float));
        for (size_t t = part_starts[part]; t < part_starts[part + 1]; t++) backward(tasks[t], part);
    }
    void sum_parts(int64_t row, int64_t kv_head) const {
        for (int which = 0; which < 2; which++) {
            T* to = static_cast<T*>(which ? call.v_grad : call.k_grad) +
                    (row * call.kv_heads + kv_head) * size;
            for (int64_t e = 0; e < size; e += W) {
                Vec sum = {};
                for (size_t p = 0; p + 1 < part_starts.size(); p++)
                    if (touches(p, kv_head)) sum += load(partial(p, which, kv_head) + row * padded + e);
                // q was gathered with the scale and log2(e) in it, so only ln(2) is left to apply
                store_part(to + e, which ? sum : sum * splat(LN2), size - e);
            }
        }
    }
};

template <class Run>
int guarded(const Run& run) {
    try {
        return run();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

}  // namespace

extern "C" int twofold_attention_forward(const Call* call) {
    return guarded([call] {
        return call->is_bfloat16 ? Attention<BFloat16>(*call).run_forward()
                                 : Attention<float>(*call).run_forward();
    });
}

extern "C" int twofold_attention_backward(const Call* call) {
    return guarded([call] {
        return call->is_bfloat16 ? Attention<BFloat16>(*call).run_backward()
                                 : Attention<float>(*call).run_backward();
    });
}
