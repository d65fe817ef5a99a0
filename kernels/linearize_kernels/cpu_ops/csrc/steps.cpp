// One token of every op: states are updated in place. Each reads its state once or twice, and that is its time.
#include "sums.h"

using namespace lz;

namespace {

// Below this many floats of state, waking other threads takes longer than the work.
i64 threads_for(i64 floats, i64 threads) { return floats < (i64(1) << 16) ? 1 : threads; }

// The factors (Fp) of a state's features at a token, from a gate by head or feature.
void factors(Mode mode, const Tensor& gate, i64 b, i64 head, const Dims& d, float* to) {
    if (mode == DECAYS) read_row(gate.at(b, head), gate.dtype, to, d.F);
    for (i64 f = 0; f < d.Fp; f++)
        to[f] = f >= d.F || mode == NONE ? 0 : mode == DECAYS ? to[f] : gate.value(b, head);
    for (i64 f = 0; f < d.Fp; f += W) store(to + f, vexp(load(to + f)));
}

// The sums of one (row, head) after a key, and what G queries read from them.
struct Step {
    Dims d;
    float *k, *v, *decay, *q, *O, *den;
    explicit Step(const Dims& d) : d(d) {
        k = arena().take(d.Fp);
        decay = arena().take(d.Fp);
        v = arena().take(d.Vp);
        q = arena().take(d.G * d.Fp);
        O = arena().take(d.G * d.Vp);
        den = arena().take(d.G);
    }
    // k and decay hold the key and the factors; `log`, if not null, is the key's log scale.
    void run(float* S, float* z, float* m, const float* log) {
        if (log) {
            const float now = most(*m, *log), keep = std::exp(*m - now);
            multiply(k, std::exp(*log - now), d.F);
            for (i64 f = 0; f < d.F; f++) decay[f] = keep;
            *m = now;
        }
        std::memset(O, 0, d.G * d.Vp * sizeof(float));
        for (i64 g = 0; g < d.G; g++) den[g] = 0;
        for (i64 f = 0; f < d.F; f++, S += d.Dv) {
            const float keep = decay[f], key = k[f];
            for (i64 i = 0; i < d.Dv; i++) S[i] = keep * S[i] + key * v[i];
            z[f] = keep * z[f] + key;
            for (i64 g = 0; g < d.G; g++) {
                axpy(q[g * d.Fp + f], S, O + g * d.Vp, d.Dv);
                den[g] += q[g * d.Fp + f] * z[f];
            }
        }
    }
};

}  // namespace

// Tensors: q k v gate S z m | out. Sizes: B H Hk F Dv threads mode normalize.
static int64_t linear_step(const Tensor* x, const i64* n, const double* scalars) {
    const i64 B = n[0], H = n[1], Hk = n[2], F = n[3], Dv = n[4], normalize = n[7];
    const Mode mode = static_cast<Mode>(n[6]);
    const float scale = static_cast<float>(scalars[0]), eps = static_cast<float>(scalars[1]);
    auto body = [&](i64 task) {
        const i64 b = task / Hk, head = task % Hk;
        Step step(Dims(F, Dv, H / Hk));
        const Dims& d = step.d;
        read_row(x[1].at(b, head), x[1].dtype, step.k, F);
        read_row(x[2].at(b, head), x[2].dtype, step.v, Dv);
        for (i64 g = 0; g < d.G; g++)
            read_row(x[0].at(b, head * d.G + g), x[0].dtype, step.q + g * d.Fp, F, scale);
        factors(mode == LOGS ? NONE : mode, x[3], b, head, d, step.decay);
        const float log = mode == LOGS ? x[3].value(b, head) : 0;
        float* m = x[6].floats(b, head);
        step.run(x[4].floats(b, head), x[5].floats(b, head), m, mode == LOGS ? &log : nullptr);
        for (i64 g = 0; g < d.G; g++) {
            float* o = step.O + g * d.Vp;
            if (normalize) multiply(o, 1 / most(eps, step.den[g]), Dv);
            else if (mode == LOGS) multiply(o, std::exp(*m), Dv);
            write_row(o, x[7].at(b, head * d.G + g), x[7].dtype, Dv);
        }
    };
    return parallel(B * Hk, threads_for(B * Hk * F * Dv, n[5]), body) ? 0 : 1;
}

// Tensors: q k v beta gate S | out. Sizes: B H Hk F Dv threads mode.
static int64_t delta_step(const Tensor* x, const i64* n, const double* scalars) {
    const i64 B = n[0], H = n[1], Hk = n[2], F = n[3], Dv = n[4];
    const Mode mode = static_cast<Mode>(n[6]);
    const float scale = static_cast<float>(scalars[0]);
    auto body = [&](i64 task) {
        const i64 b = task / Hk, head = task % Hk;
        const Dims d(F, Dv, H / Hk);
        float *k = arena().take(d.Fp), *v = arena().take(d.Vp), *decay = arena().take(d.Fp);
        float *held = arena().take(d.Vp), *q = arena().take(d.Fp * d.G), *O = arena().take(d.Vp * d.G);
        read_row(x[1].at(b, head), x[1].dtype, k, F);
        read_row(x[2].at(b, head), x[2].dtype, v, Dv);
        for (i64 g = 0; g < d.G; g++) read_row(x[0].at(b, head * d.G + g), x[0].dtype, q + g * d.Fp, F, scale);
        factors(mode, x[4], b, head, d, decay);
        std::memset(held, 0, d.Vp * sizeof(float));
        std::memset(O, 0, d.G * d.Vp * sizeof(float));
        float* S = x[5].floats(b, head);
        for (i64 f = 0; f < F; f++) {
            if (mode != NONE) multiply(S + f * Dv, decay[f], Dv);
            axpy(k[f], S + f * Dv, held, Dv);
        }
        const float beta = x[3].value(b, head);
        for (i64 i = 0; i < Dv; i++) v[i] = beta * (v[i] - held[i]);
        for (i64 f = 0; f < F; f++) {
            axpy(k[f], v, S + f * Dv, Dv);
            for (i64 g = 0; g < d.G; g++) axpy(q[g * d.Fp + f], S + f * Dv, O + g * d.Vp, Dv);
        }
        for (i64 g = 0; g < d.G; g++) write_row(O + g * d.Vp, x[6].at(b, head * d.G + g), x[6].dtype, Dv);
    };
    return parallel(B * Hk, threads_for(B * Hk * F * Dv, n[5]), body) ? 0 : 1;
}

namespace {

struct WindowStep {
    Tensor q, k, v, valid, phi_q, phi_k, log_q, log_k, gamma, S, z, m, ring_k, ring_v, ring_valid, sink_k, sink_v, age,
        start, out;
};
struct StepSizes { i64 B, H, Hk, D, Dv, F, window, sinks, threads, logs; };

// The slot of the oldest position, within the ring whatever `start` says.
i64 oldest(const WindowStep& x, const StepSizes& n, i64 b) {
    return (x.start.integer(b) % n.window + n.window) % n.window;
}

// The slot that the row's new token becomes as a sink, or -1. Slots are filled in order.
i64 free_sink(const WindowStep& x, const StepSizes& n, i64 b) {
    for (i64 i = 0; i < n.sinks; i++)
        if (x.age.integer(b, i) <= 0) return x.valid.flag(b) ? i : -1;
    return -1;
}

void window_head(const WindowStep& x, const StepSizes& n, float scale, float softcap, float eps, i64 b, i64 head) {
    Step step(Dims(n.F, n.Dv, n.H / n.Hk));
    const Dims& d = step.d;
    const i64 slot = oldest(x, n, b), h0 = head * d.G, Dp = padded(n.D), all = n.window + n.sinks;
    // The oldest token leaves the window: into the sums, unless it is padding or a sink.
    bool counts = x.ring_valid.flag(b, slot);
    for (i64 i = 0; i < n.sinks; i++) counts = counts && x.age.integer(b, i) != n.window;
    for (i64 f = 0; f < d.Fp; f++) step.k[f] = 0, step.decay[f] = 1;
    for (i64 i = 0; i < d.Vp; i++) step.v[i] = 0;
    if (counts) {
        read_row(x.phi_k.at(b, head), x.phi_k.dtype, step.k, n.F);
        read_row(x.ring_v.at(b, slot, head), x.ring_v.dtype, step.v, n.Dv);
    }
    for (i64 g = 0; g < d.G; g++) read_row(x.phi_q.at(b, h0 + g), x.phi_q.dtype, step.q + g * d.Fp, n.F);
    const float log = n.logs && counts ? x.log_k.value(b, head) : -1e30f;
    float* m = x.m.floats(b, head);
    step.run(x.S.floats(b, head), x.z.floats(b, head), m, n.logs ? &log : nullptr);

    float *row = arena().take(most(Dp, d.Vp)), *q = arena().take(d.G * Dp), *scores = arena().take(d.G * padded(all));
    float* O = arena().take(d.G * d.Vp);
    std::memset(O, 0, d.G * d.Vp * sizeof(float));
    std::memset(q, 0, d.G * Dp * sizeof(float));
    std::memset(row, 0, most(Dp, d.Vp) * sizeof(float));
    // The new token takes the oldest one's slot; rows are rounded to the ring's dtype before they are read.
    read_row(x.k.at(b, head), x.k.dtype, row, n.D);
    write_row(row, x.ring_k.at(b, slot, head), x.ring_k.dtype, n.D);
    const i64 sink = free_sink(x, n, b);
    if (sink >= 0) write_row(row, x.sink_k.at(b, sink, head), x.sink_k.dtype, n.D);
    read_row(x.v.at(b, head), x.v.dtype, row, n.Dv);
    write_row(row, x.ring_v.at(b, slot, head), x.ring_v.dtype, n.Dv);
    if (sink >= 0) write_row(row, x.sink_v.at(b, sink, head), x.sink_v.dtype, n.Dv);

    auto seen = [&](i64 i) {
        if (i < n.window) return i == slot ? x.valid.flag(b) : x.ring_valid.flag(b, i);
        return x.age.integer(b, i - n.window) >= n.window;  // one more after this token
    };
    for (i64 g = 0; g < d.G; g++) {
        read_row(x.q.at(b, h0 + g), x.q.dtype, q + g * Dp, n.D, scale);
        for (i64 i = all; i < padded(all); i++) scores[g * padded(all) + i] = LOWEST;
    }
    for (i64 i = 0; i < all; i++) {
        const bool use = seen(i);
        const Tensor& from = i < n.window ? x.ring_k : x.sink_k;
        for (i64 j = n.D; j < Dp; j++) row[j] = 0;
        if (use) read_row(from.at(b, i < n.window ? i : i - n.window, head), from.dtype, row, n.D);
        for (i64 g = 0; g < d.G; g++) scores[g * padded(all) + i] = use ? dot(row, q + g * Dp, Dp) : LOWEST;
    }
    std::vector<float> top(d.G), near(d.G);
    for (i64 g = 0; g < d.G; g++) {
        float* s = scores + g * padded(all);
        if (softcap > 0)
            for (i64 i = 0; i < padded(all); i += W) {
                const vf x = load(s + i);
                store(s + i, x <= LOWEST ? x : vtanh(x / softcap) * softcap);
            }
        vf largest_of = splat(LOWEST), total = {};
        for (i64 i = 0; i < padded(all); i += W) largest_of = vmax(load(s + i), largest_of);
        top[g] = largest(largest_of);
        for (i64 i = 0; i < padded(all); i += W) {
            const vf x = load(s + i), weight = x <= LOWEST ? vf{} : vexp(x - top[g]);
            store(s + i, weight);
            total += weight;
        }
        near[g] = sum(total);
    }
    for (i64 i = 0; i < all; i++) {
        if (!seen(i)) continue;
        const Tensor& from = i < n.window ? x.ring_v : x.sink_v;
        read_row(from.at(b, i < n.window ? i : i - n.window, head), from.dtype, row, n.Dv);
        for (i64 g = 0; g < d.G; g++) axpy(scores[g * padded(all) + i], row, O + g * d.Vp, n.Dv);
    }
    for (i64 g = 0; g < d.G; g++) {
        float weight = x.gamma.value(h0 + g), old = 1;
        if (n.logs) {
            const float far = x.log_q.value(b, h0 + g) + *m, highest = most(top[g], far);
            weight *= std::exp(top[g] - highest);
            old = std::exp(far - highest);
        }
        float* o = O + g * d.Vp;
        multiply(o, weight, n.Dv);
        axpy(old, step.O + g * d.Vp, o, n.Dv);
        multiply(o, 1 / most(eps, weight * near[g] + old * step.den[g]), n.Dv);
        write_row(o, x.out.at(b, h0 + g), x.out.dtype, n.Dv);
    }
}

}  // namespace

static int64_t window_step(const Tensor* tensors, const i64* sizes, const double* scalars) {
    const WindowStep& x = *reinterpret_cast<const WindowStep*>(tensors);
    const StepSizes& n = *reinterpret_cast<const StepSizes*>(sizes);
    auto body = [&](i64 task) {
        window_head(x, n, static_cast<float>(scalars[0]), static_cast<float>(scalars[1]),
                    static_cast<float>(scalars[2]), task / n.Hk, task % n.Hk);
    };
    const i64 floats = n.B * n.Hk * (n.F * n.Dv + n.window * (n.D + n.Dv));
    if (!parallel(n.B * n.Hk, threads_for(floats, n.threads), body)) return 1;
    // What all heads share is updated when none of them reads it any more.
    for (i64 b = 0; b < n.B; b++) {
        const i64 slot = oldest(x, n, b), sink = free_sink(x, n, b);
        *x.ring_valid.at(b, slot) = x.valid.flag(b);
        *reinterpret_cast<i64*>(x.start.at(b)) = (slot + 1) % n.window;
        for (i64 i = 0; i < n.sinks; i++) {
            i64& age = *reinterpret_cast<i64*>(x.age.at(b, i));
            age = i == sink ? 1 : age > 0 ? age + 1 : age;
        }
    }
    return 0;
}

LZ_OP(lz_linear_step, linear_step)
LZ_OP(lz_delta_step, delta_step)
LZ_OP(lz_window_step, window_step)
