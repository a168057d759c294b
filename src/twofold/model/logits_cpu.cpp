// What is read out of a row of logits, for CPUs: the log-prob of a token, the entropy, a draw, and
// the gradient of a log-prob.
//
// Owns: the arithmetic and its order. Does not own: the product that makes the logits, tensors and the
// thread pool (the caller, logits_cpu.py), what the numbers mean (step/logprob.py, step/sampling.py).
//
// With m the largest logit x of a row and T the temperature, everything is made of exp((x - m) / T):
// their sum, in float64 (16 lanes) because a draw must find tokens of probability 1e-9 beside one of
// 1, is kept by blocks of 256 tokens. A row is read twice, from the cache the second time, and no other
// tensor of its length is made. A row's result depends on that row alone, to the last bit.

#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t TOKENS = 256;  // tokens in a block
constexpr double LOG2E = 1.44269504088896340736;

template <class T>
struct Row {
    const T* logits;
    int64_t vocab;
    float max, factor;  // factor: log2(e) / T

    Row(const T* logits, int64_t vocab, double temperature)
        : logits(logits), vocab(vocab), max(largest()), factor(float(LOG2E / temperature)) {}

    float largest() const {
        Vec best = splat(-INFINITY);
        for (int64_t e = 0; e + W <= vocab; e += W) {
            Vec x = load(logits + e);
            best = x > best ? x : best;
        }
        float most = best[0];
        for (int l = 1; l < W; l++) most = best[l] > most ? best[l] : most;
        for (int64_t e = vocab / W * W; e < vocab; e++) {
            Vec x = load_part(logits + e, 1);
            most = x[0] > most ? x[0] : most;
        }
        return most;
    }
    // (x - m) of the vector at e, minus infinity beyond the vocabulary.
    Vec below(int64_t e) const {
        Vec x = load_part(logits + e, vocab - e);
        if (vocab - e < W) x = lane_numbers() < splat(float(vocab - e)) ? x : splat(-INFINITY);
        return x - splat(max);
    }
    Vec weights(int64_t e) const { return exp2_of(below(e) * splat(factor)); }
    // Sum of the weights of block b; `slope` += sum of weight * (x - m).
    template <bool WITH_SLOPE>
    double block(int64_t b, double& slope) const {
        WideLaneSum sum;
        LaneSum products;
        const int64_t end = (b + 1) * TOKENS < vocab ? (b + 1) * TOKENS : vocab;
        for (int64_t e = b * TOKENS; e < end; e += W) {
            Vec gap = below(e), weight = exp2_of(gap * splat(factor));
            sum.at(e) += widened(weight);
            if (WITH_SLOPE) products.at(e) += weight > Vec{} ? weight * gap : Vec{};
        }
        if (WITH_SLOPE) slope += products.folded();
        return sum.folded();
    }
    int64_t n_blocks() const { return (vocab + TOKENS - 1) / TOKENS; }
    template <bool WITH_SLOPE>
    double all(double* blocks, double& slope) const {
        double sum = 0;
        for (int64_t b = 0; b < n_blocks(); b++) {
            double mass = block<WITH_SLOPE>(b, slope);
            if (blocks) blocks[b] = mass;
            sum += mass;
        }
        return sum;
    }
    float logprob(int64_t token, double sum, double temperature) const {
        float gap = load_part(logits + token, 1)[0] - max;
        return float(double(gap) / temperature - std::log(sum));
    }
};

// The first of n masses at which their running sum exceeds the target, or the last with any mass
// where rounding leaves the target unreached; an entry without mass never. `before`: the sum there.
int64_t pick(const double* masses, int64_t n, double target, double& before) {
    double reached = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(masses[i] > 0)) continue;
        last = i;
        before = reached;
        reached += masses[i];
        if (reached > target) break;
    }
    return last;
}

template <class T>
int64_t draw(const Row<T>& row, const double* blocks, double target) {
    double before = 0, unused;
    const int64_t b = pick(blocks, row.n_blocks(), target, before);
    double masses[TOKENS] = {};
    for (int64_t e = 0; e < TOKENS && b * TOKENS + e < row.vocab; e += W) {
        Vec weight = row.weights(b * TOKENS + e);
        for (int l = 0; l < W; l++) masses[e + l] = weight[l];
    }
    return b * TOKENS + pick(masses, TOKENS, target - before, unused);
}

struct Out {  // float32 [n] each; what is null is not wanted
    float *logprobs, *entropy, *max, *inverse_sum;
};

template <class T>
void read(Parallel parallel, int64_t threads, int64_t n, int64_t vocab, double temperature,
          const T* logits, const double* uniforms, int64_t* tokens, Out out) {
    for_rows(parallel, threads, n, vocab / W * 10, [=](int64_t i, int64_t end) {
        std::vector<double> blocks((vocab + TOKENS - 1) / TOKENS);
        for (; i < end; i++) {
            Row<T> row(logits + i * vocab, vocab, temperature);
            double slope = 0;
            double sum = out.entropy ? row.template all<true>(blocks.data(), slope)
                                     : row.template all<false>(blocks.data(), slope);
            if (uniforms) tokens[i] = draw(row, blocks.data(), sum * uniforms[i]);
            out.logprobs[i] = row.logprob(tokens[i], sum, temperature);
            // -sum p log p, of two terms that are both positive: nothing cancels
            if (out.entropy) out.entropy[i] = float(std::log(sum) - slope / sum / temperature);
            if (out.max) out.max[i] = row.max, out.inverse_sum[i] = float(1 / sum);
        }
    });
}

// logits become scale (onehot(token) - softmax(logits / T)) / T.
template <class T>
void gradient(Parallel parallel, int64_t threads, int64_t n, int64_t vocab, double temperature,
              T* logits, const int64_t* tokens, const float* max, const float* inverse_sum,
              const float* scale) {
    const float factor = float(LOG2E / temperature);
    for_rows(parallel, threads, n, vocab / W * 10, [=](int64_t i, int64_t end) {
        for (; i < end; i++) {
            T* row = logits + i * vocab;
            const float share = float(scale[i] / temperature), minus = -share * inverse_sum[i];
            auto slope = [&](Vec x) {
                return exp2_of((x - splat(max[i])) * splat(factor)) * splat(minus);
            };
            const Vec chosen = slope(load_part(row + tokens[i], 1)) + splat(share);
            for (int64_t e = 0; e < vocab; e += W)
                store_part(row + e, slope(load_part(row + e, vocab - e)), vocab - e);
            store_part(row + tokens[i], chosen, 1);
        }
    });
}

}  // namespace

// Mirrored argument by argument in logits_cpu.py; one set per element type.
#define EXPORT(T, NAME)                                                                           \
    extern "C" void twofold_read_logits_##NAME(                                                   \
        Parallel parallel, int64_t threads, int64_t n, int64_t vocab, double temperature,         \
        const T* logits, const double* uniforms, int64_t* tokens, float* logprobs,                \
        float* entropy, float* max, float* inverse_sum) {                                         \
        read(parallel, threads, n, vocab, temperature, logits, uniforms, tokens,                  \
             Out{logprobs, entropy, max, inverse_sum});                                           \
    }                                                                                             \
    extern "C" void twofold_logit_gradient_##NAME(                                                \
        Parallel parallel, int64_t threads, int64_t n, int64_t vocab, double temperature,         \
        T* logits, const int64_t* tokens, const float* max, const float* inverse_sum,             \
        const float* scale) {                                                                     \
        gradient(parallel, threads, n, vocab, temperature, logits, tokens, max, inverse_sum,      \
                 scale);                                                                          \
    }
EXPORT(float, float32)
EXPORT(BFloat16, bfloat16)
