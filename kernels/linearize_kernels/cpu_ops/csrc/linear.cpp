// linear_attention: forward and backward over whole sequences.
#include <optional>

#include "sums.h"

using namespace lz;

namespace {

struct Sizes { i64 B, T, H, Hk, F, Dv, N, threads, mode, normalize; };

Source source(const Tensor* x, const Sizes& n, double scale) {
    const Dims d(n.F, n.Dv, n.H / n.Hk);
    const Mode mode = static_cast<Mode>(n.mode);
    return {d, mode, x[0], x[1], x[2], x[3], 0, static_cast<float>(scale)};
}

constexpr i64 SHORTEST = 256;  // tokens of a part

}  // namespace

// Tensors: q k v gate S z m cu | out den S z m; gate is log_k or log_decay as `mode` says.
static int64_t linear_forward(const Tensor* x, const i64* sizes, const double* scalars) {
    const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
    const Source s = source(x, n, scalars[0]);
    const float eps = static_cast<float>(scalars[1]);
    const Tensor &m0 = x[6], *out = x + 8;
    const Dims& d = s.d;
    const Sequences all = sequences(n.N, n.T, x[7], n.Hk, n.threads, SHORTEST);
    Starts starts;
    if (!find_starts(all, s, x[4], x[5], m0, n.Hk, n.threads, starts)) return 1;
    auto body = [&](i64 task) {
        const Part& p = all.parts[task / n.Hk];
        const i64 head = task % n.Hk, rows = CHUNK * d.G;
        Gate gate(s.mode, s.gate, d);
        std::optional<Halves> halves;
        if (Halves::usable(s)) halves.emplace(s);
        Tiles tiles(d, false);
        const i64 ldo = halves ? halves->Vx : d.Vp;
        float *state = arena().take(d.state()), *A = arena().take(rows * CHUNK);
        float *O = arena().take(rows * ldo), *den = arena().take(rows);
        float *S = state, *z = state + d.F * d.Vp;
        std::memcpy(state, starts.state(p.index, head), d.state() * sizeof(float));
        if (halves) halves->set_state(state);
        float m = starts.m[p.index * n.Hk + head];
        for (i64 t = p.t0; t < p.t1;) {
            const i64 c = gate.open(p.b, t, p.t1 - t, head, m);
            if (halves) {
                halves->run(gate, p.b, t, c, head, O, den);
            } else {
                tiles.read_queries(s, gate, p.b, t, c, head);
                tiles.read_keys(s, gate, p.b, t, c, head, true);
                gate.begin(S, z);
                chunk_read(tiles, c, S, z, A, O, n.normalize ? den : nullptr);
                chunk_fold(tiles, c, S, z);
                gate.finish(S, z);
            }
            for (i64 r = 0; r < c * d.G; r++) {
                if (n.normalize) multiply(O + r * ldo, 1 / most(eps, den[r]), d.Vp);
                else if (s.mode == LOGS) multiply(O + r * ldo, std::exp(gate.top[r / d.G]), d.Vp);
                if (n.normalize) out[1].set(den[r], p.b, t + r / d.G, head * d.G + r % d.G);
            }
            write_tile(O, ldo, out[0], p.b, t, c, head * d.G, d.G, d.Dv);
            t += c;
        }
        if (p.last) {
            if (halves) halves->get_state(state);
            write_state(state, out[2], out[3], p.n, head, d);
            out[4].set(m, p.n, head);
        }
    };
    return parallel(static_cast<i64>(all.parts.size()) * n.Hk, n.threads, body) ? 0 : 1;
}

namespace {

RowGrads row_grads(const Tensor* x, const Sizes& n, float eps, Dims d) {
    const Tensor d_out = x[0], out = x[11], den = x[12];
    const bool normalize = n.normalize;
    return [=](const Gate& gate, i64 b, i64 t, i64 c, i64 head, float* dN, float* dD) {
        read_tile(d_out, b, t, c, head * d.G, d.G, d.Dv, dN, d.Vp);
        if (normalize) {
            ratio_grads(out, den, eps, d, b, t, c, head, dN, dD);
            return;
        }
        for (i64 r = 0; r < c * d.G; r++) {
            dD[r] = 0;
            if (gate.mode != LOGS) continue;
            const float factor = std::exp(gate.top[r / d.G]);  // may be inf, and inf * 0 isn't the 0 of no gradient
            for (i64 i = r * d.Vp; i < (r + 1) * d.Vp; i++) dN[i] = dN[i] == 0 ? 0 : dN[i] * factor;
        }
    };
}

}  // namespace

// Tensors: d_out dS dz | q k v gate S z m cu | out den | dq dk dv dgate dS0 dz0 sums far; `sums` float32, as
// dgate. `far` (B, T, H), the sum of q dq over the features, may be absent, and dv.
static int64_t linear_backward(const Tensor* x, const i64* sizes, const double* scalars) {
    const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
    const Source s = source(x + 3, n, scalars[0]);
    const float eps = static_cast<float>(scalars[1]);
    const Tensor* grads = x + 13;
    const Dims& d = s.d;
    const Sequences all = sequences(n.N, n.T, x[10], n.Hk, n.threads, 2 * SHORTEST);
    const i64 tasks = static_cast<i64>(all.parts.size()) * n.Hk, floats = d.state();
    Starts starts;
    if (!find_starts(all, s, x[7], x[8], x[9], n.Hk, n.threads, starts)) return 1;

    const RowGrads rows = row_grads(x, n, eps, d);
    std::unique_ptr<float[]> ends;
    if (!find_ends(all, s, starts, x[1], x[2], rows, n.Hk, n.threads, ends)) return 1;

    auto body = [&](i64 task) {
        const Part& p = all.parts[task / n.Hk];
        const i64 head = task % n.Hk;
        Gate gate(s.mode, s.gate, d);
        Tiles tiles(d, true);
        ChunkGrads chunk(d);
        if (!grads[2]) chunk.dV = nullptr;
        float *dN = arena().take(CHUNK * d.G * d.Vp), *dD = arena().take(CHUNK * d.G);
        float *state = arena().take(floats), *S = state, *z = state + d.F * d.Vp;
        float *dS = &ends[task * floats], *dz = dS + d.F * d.Vp;
        const float* start = starts.state(p.index, head);
        Reverse reverse(fold_keys(s, p.b, head), gate, p.b, p.t0, p.t1, head, starts.m[task], start);
        Reverse::Chunk at;
        for (const float* before; reverse.next(at, before);) {
            const i64 c = at.c, t = at.t;
            float m = at.m;
            gate.open(p.b, t, c, head, m);
            tiles.read_queries(s, gate, p.b, t, c, head);
            tiles.read_keys(s, gate, p.b, t, c, head, true);
            rows(gate, p.b, t, c, head, dN, dD);
            std::memcpy(state, before, floats * sizeof(float));
            gate.begin(S, z);
            gate.finish(dS, dz);
            chunk.run(tiles, c, S, z, dN, dD, dS, dz);
            gate.begin(dS, dz);
            // A scaled tile times the gradient of the scaled tile is what the unscaled ones give.
            if (s.mode == LOGS)
                for (i64 j = 0; j < c; j++)
                    grads[3].set(dot(tiles.K + j * d.Fp, chunk.dK + j * d.Fp, d.Fp), p.b, t + j, head);
            if (s.mode == DECAY || s.mode == DECAYS)
                for (i64 j = 0; j < c; j++) {
                    float *to = grads[6].floats(p.b, t + j, head), total = 0;
                    for (i64 f = 0; f < d.F; f++) {
                        float one = -tiles.K[j * d.Fp + f] * chunk.dK[j * d.Fp + f];
                        for (i64 r = j * d.G; r < (j + 1) * d.G; r++)
                            one += tiles.Q[r * d.Fp + f] * chunk.dQ[r * d.Fp + f];
                        if (s.mode == DECAYS) to[f] = one;
                        total += one;
                    }
                    if (s.mode == DECAY) to[0] = total;
                }
            for (i64 r = 0; grads[7] && r < c * d.G; r++)
                grads[7].set(dot(tiles.Q + r * d.Fp, chunk.dQ + r * d.Fp, d.Fp), p.b, t + r / d.G,
                             head * d.G + r % d.G);
            gate.scale_q(chunk.dQ, c, d.G);
            gate.scale_k(chunk.dK, c);
            multiply(chunk.dQ, s.scale, c * d.G * d.Fp);
            write_tile(chunk.dQ, d.Fp, grads[0], p.b, t, c, head * d.G, d.G, d.F);
            write_tile(chunk.dK, d.Fp, grads[1], p.b, t, c, head, 1, d.F);
            if (chunk.dV) write_tile(chunk.dV, d.Vp, grads[2], p.b, t, c, head, 1, d.Dv);
        }
        if (p.first) write_state(dS, grads[4], grads[5], p.n, head, d);
    };
    if (!parallel(tasks, n.threads, body)) return 1;
    if (s.mode != DECAY && s.mode != DECAYS) return 0;
    const DecayGrads to{x[7], x[8], grads[4], grads[5], grads[6], grads[3]};
    return to.run(all, d, s.mode, n.Hk, n.threads) ? 0 : 1;
}

LZ_OP(lz_linear_forward, linear_forward)
LZ_OP(lz_linear_backward, linear_backward)
