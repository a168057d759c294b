// Causal grouped-query attention over ragged rows, forward and backward, for CPUs.
//
// Owns: the arithmetic and its order. Does not own: tensors, the thread pool (both come from the
// caller, attention_cpu.py), the meaning of rows and keys (attention.py).
//
// One rule holds everywhere: what a row gets depends on its position, its query and the keys and
// values of positions 0..p, and on nothing else (other rows, slots, tiles, threads). So decode,
// prefill and packed training agree bit for bit. It follows from these orders:
//   score    one chain of fused multiply-adds over the head's elements, first to last;
//   softmax  online (Milakov and Gimelshein, 2018) over blocks of 64 keys that start at absolute
//            positions 0, 64, 128, ...; the sum has 16 lanes (position mod 16), folded at the end;
//   output   one chain of fused multiply-adds over the keys, in order of position.
// A vector holds independent chains only, so its width does not matter either. Keys that a row may
// not see get weight exactly 0, and adding 0 * value changes nothing (if the value is finite).
//
// How it is fast: all query heads of a key head are taken together, in tiles of some 96 query rows
// against blocks of 64 keys that are gathered, widened to fp32 and (where elements are summed over)
// transposed into L1 once per tile. Decode reads its values where they lie, and fetches the next
// keys while it computes: there memory is the limit.

#include "attention_cpu.h"

#include <cmath>
#include <cstdlib>
#include <new>
#include <vector>

// ------------------------------------------------------------------ the call

extern "C" {

struct View {  // [rows, heads, head_size]; strides in elements, the last one is 1
    const void* data;
    int64_t row, head;
};

// Mirrored field by field by `_Call` in attention_cpu.py.
struct Call {
    int64_t n_rows, heads, kv_heads, head_size, n_key_rows, n_spans, n_key_index;
    int64_t is_bfloat16, threads;
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

enum Status { OK = 0, BAD_INDEX = 1, NO_MEMORY = 2 };  // what the two functions return

constexpr int TILE = 96;  // query rows (rows x heads of one key head) in a tile, about
constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.69314718055994530942f;

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
    const int64_t padded = (size + LANES - 1) / LANES * LANES;
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
            const int64_t n_keys = span[1] ? span[2] + span[1] : 0;
            if (span[0] < 0 || span[1] < 0 || span[2] < 0 || start < 0) return false;
            if (span[0] + span[1] > call.n_rows || start + n_keys > call.n_key_index) return false;
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
    // Query row i of a tile is row i / group of the task, head i % group of the key head's group.
    int64_t row_of(const Task& task, int64_t i) const { return task.first_row + i / group; }
    int64_t head_of(const Task& task, int64_t i) const { return task.kv_head * group + i % group; }
    int64_t place_of(const Task& task, int64_t i) const {
        return row_of(task, i) * call.heads + head_of(task, i);
    }
    // to[query row][:] = factor * view, zeros up to the padded size
    void gather_rows(const View& view, const Task& task, float factor, float* to) const {
        for (int64_t i = 0; i < task.n_rows * group; i++) {
            const T* from = at(view, row_of(task, i), head_of(task, i));
            for (int64_t e = 0; e < padded; e += W)
                store(to + i * padded + e,
                      e < size ? load_part(from + e, size - e) * splat(factor) : Vec{});
        }
    }
    // to (contiguous [row, head, element], as `out`) = factor * from
    void scatter_row(void* to, const Task& task, int64_t i, const float* from, float factor) const {
        T* start = static_cast<T*>(to) + place_of(task, i) * size;
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
        const Vec lane = lane_numbers();
        Vec best = splat(-INFINITY);
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
    void forward(const Task& task, const Task* next_task) {
        int64_t n = task.n_rows * group, n_keys = task.first_position + task.n_rows;
        const int64_t tile_floats = tile * padded, block_floats = BLOCK * padded;
        float* q = scratch.take(2 * tile_floats + 2 * block_floats + tile * sizeof(Softmax) / 4);
        if (!q) return void(status = NO_MEMORY);
        float *out = q + tile_floats, *keys = out + tile_floats, *values = keys + block_floats;
        Softmax* state = reinterpret_cast<Softmax*>(values + block_floats);
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
            int n_seen = seen(task, i + r, first);
            float shrink = weigh(scores + r * BLOCK, n_seen, state[i + r]);
            for (int j = vectors(n_seen) * W; j < most; j++) scores[r * BLOCK + j] = 0;
            float* row = out + (i + r) * padded;
            for (int64_t e = 0; e < padded && shrink != 1.0f; e += W)
                store(row + e, load(row + e) * splat(shrink));
        }
        Product<Values>{most, scores, BLOCK, 1, values, out + i * padded, padded}(rows,
                                                                                int(padded / W));
    }
    void finish(const Task& task, int64_t i, float* out, const Softmax& state) const {
        float sum = fold(state.sum);
        scatter_row(call.out, task, i, out, 1.0f / sum);
        if (call.lse) call.lse[place_of(task, i)] = state.max + std::log2(sum);
    }

    // ---------------------------------------------------------------- backward

    // With P the weights and D = out_grad . out of a row (Dao et al., FlashAttention, 2022):
    // v_grad = P^T out_grad, S_grad = P * (out_grad v^T - D), q_grad = S_grad k,
    // k_grad = S_grad^T q.
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
            float lanes[LANES] = {};
            const float *left = t.q + i * padded, *right = t.out_grad + i * padded;
            for (int64_t e = 0; e < padded; e += W)
                store(lanes + e % LANES,
                      load(left + e) * load(right + e) + load(lanes + e % LANES));
            t.dot[i] = fold(lanes);
            t.lse[i] = call.lse[place_of(task, i)];
        }
        gather_rows(call.q, task, scale, t.q);
        std::memset(t.q_grad, 0, n * padded * sizeof(float));
        for (int64_t first = 0; first < n_keys; first += BLOCK)
            if (!backward_block(task, part, first, t)) return;
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
            const float *q = t.q + i * padded, *out_grad = t.out_grad + i * padded;
            Product<Matrix>{size, q, padded, 1, {t.keys_t, BLOCK}, p, BLOCK}(few, vectors(most));
            Product<Matrix>{size, out_grad, padded, 1, {t.values_t, BLOCK}, g, BLOCK}(
                few, vectors(most));
            for (int64_t r = 0; r < few; r++)
                score_gradient(p + r * BLOCK, g + r * BLOCK, seen(task, i + r, first),
                               vectors(most), t.lse[i + r], t.dot[i + r]);
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
    static void score_gradient(float* weights, float* grad, int n_seen, int n, float lse,
                               float dot) {
        const Vec lane = lane_numbers();
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
    void in_parallel(const Body& body) const {
        auto work = [](void* data) { (*static_cast<const Body*>(data))(); };
        if (call.parallel && call.threads > 1 && worth_it())
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
        in_parallel([this] {
            for (size_t t = next++, then; t < tasks.size(); t = then) {
                then = next++;  // known early, so that its keys can be on their way
                forward(tasks[t], then < tasks.size() ? &tasks[then] : nullptr);
            }
        });
        return status;
    }

    // Key gradients are summed per part, parts in their order: the same for a given `threads`,
    // however many threads really come. Key heads are outermost: few parts touch the same head.
    int run_backward() {
        if (!spans_are_valid()) return BAD_INDEX;
        for (int64_t h = 0; h < call.kv_heads; h++)
            for (int64_t s = 0; s < call.n_spans; s++) add_tasks(s, h);
        split();
        in_parallel([this] {
            for (size_t p; (p = next++) + 1 < part_starts.size();) run_part(p);
        });
        if (!call.partial || status) return status;
        next = 0;
        in_parallel([this] {
            const size_t chunk = 64, n = call.n_key_rows;
            for (size_t row; (row = chunk * next++) < n;)
                for (size_t r = row; r < n && r < row + chunk; r++) sum_parts(int64_t(r));
        });
        return status;
    }
    // Contiguous parts of about equal cost, at most one a thread.
    void split() {
        int64_t all = 0, done = 0;
        for (const Task& task : tasks) all += task.cost();
        part_starts.push_back(0);
        for (size_t t = 0; t < tasks.size(); t++) {
            done += tasks[t].cost();
            if (done * call.threads >= all * int64_t(part_starts.size()))
                part_starts.push_back(t + 1);
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
    // Key and value gradients of one key row.
    void sum_parts(int64_t row) const {
        for (int64_t i = 0; i < 2 * call.kv_heads; i++) {
            const int64_t which = i % 2, kv_head = i / 2;  // 0: keys, 1: values
            // q was gathered with the scale and log2(e) in it: only ln(2) is left to apply
            const Vec factor = splat(which ? 1.0f : LN2);
            T* to = static_cast<T*>(which ? call.v_grad : call.k_grad);
            to += (row * call.kv_heads + kv_head) * size;
            for (int64_t e = 0; e < size; e += W) {
                Vec sum = {};
                for (size_t p = 0; p + 1 < part_starts.size(); p++)
                    if (touches(p, kv_head))
                        sum += load(partial(p, which, kv_head) + row * padded + e);
                store_part(to + e, sum * factor, size - e);
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
