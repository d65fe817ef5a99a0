// delta_rule: forward and backward over whole sequences.
//
// A chunk's changes U = (I + A)^-1 (beta (V - K_q S)), with K_q the keys scaled as queries are (exp(c_t)), K those
// scaled as keys are (exp(-c_t)), and A_tj = beta_t K_q_t . K_j for j < t. With U as its values the chunk is read and
// folded like one of linear attention.
#include "sums.h"

using namespace lz;

namespace {

struct Sizes { i64 B, T, H, Hk, F, Dv, N, threads, mode; };

struct Delta {
    Source s;
    Tensor beta;
};

// One chunk's keys and changes; tiles.V holds U.
struct Changes {
    Tiles& tiles;
    float beta[CHUNK];
    float *K_q, *error, *M, *A;  // keys as queries, V - K_q S, K_q K^T, beta times it

    explicit Changes(Tiles& tiles) : tiles(tiles) {
        K_q = arena().take(CHUNK * tiles.d.Fp);
        error = arena().take(CHUNK * tiles.d.Vp);
        M = arena().take(CHUNK * CHUNK);
        A = arena().take(CHUNK * CHUNK);
    }
    // S: the state, times the gate's `first`.
    void solve(const Delta& x, const Gate& gate, i64 b, i64 t, i64 c, i64 head, const float* S) {
        const Dims& d = tiles.d;
        read_tile(x.s.k, b, t, c, head, 1, d.F, K_q, d.Fp);
        std::memcpy(tiles.K, K_q, c * d.Fp * sizeof(float));
        gate.scale_q(K_q, c, 1);
        gate.scale_k(tiles.K, c);
        transpose(tiles.K, c, d.F, d.Fp, tiles.Kt, CHUNK);
        read_tile(x.s.v, b, t, c, head, 1, d.Dv, error, d.Vp);
        gemm(c, d.Vp, d.F, K_q, d.Fp, 1, S, d.Vp, error, d.Vp, SUBTRACT);
        causal_scores(K_q, d.F, d.Fp, tiles.Kt, c, 1, M);
        float* U = tiles.V;
        for (i64 i = 0; i < c; i++) {
            beta[i] = x.beta.value(b, t + i, head);
            for (i64 j = 0; j < padded(i + 1); j++) A[i * CHUNK + j] = beta[i] * M[i * CHUNK + j];
            for (i64 e = 0; e < d.Vp; e++) U[i * d.Vp + e] = beta[i] * error[i * d.Vp + e];
        }
        for (i64 i = 0; i < c; i += SUB) {
            const i64 stop = least(i + SUB, c);
            if (i) gemm(stop - i, d.Vp, i, A + i * CHUNK, CHUNK, 1, U, d.Vp, U + i * d.Vp, d.Vp, SUBTRACT);
            for (i64 r = i + 1; r < stop; r++)
                for (i64 j = i; j < r; j++) axpy(-A[r * CHUNK + j], U + j * d.Vp, U + r * d.Vp, d.Vp);
        }
    }
    // dU becomes the gradient of beta (V - K_q S).
    void solve_back(i64 c, float* dU) const {
        const Dims& d = tiles.d;
        for (i64 i = (c - 1) / SUB * SUB; i >= 0; i -= SUB) {
            const i64 stop = least(i + SUB, c);
            if (stop < c)
                gemm(stop - i, d.Vp, c - stop, A + stop * CHUNK + i, 1, CHUNK, dU + stop * d.Vp, d.Vp, dU + i * d.Vp,
                     d.Vp, SUBTRACT);
            for (i64 r = stop - 1; r > i; r--)
                for (i64 j = i; j < r; j++) axpy(-A[r * CHUNK + j], dU + r * d.Vp, dU + j * d.Vp, d.Vp);
        }
    }
};

Delta delta(const Tensor* x, const Sizes& n, double scale) {
    const Dims d(n.F, n.Dv, n.H / n.Hk);
    return {{d, static_cast<Mode>(n.mode), x[0], x[1], x[2], x[4], 0, static_cast<float>(scale)}, x[3]};
}

}  // namespace

// Tensors: q k v beta gate S cu | out S.
static int64_t delta_forward(const Tensor* x, const i64* sizes, const double* scalars) {
    const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
    const Delta op = delta(x, n, scalars[0]);
    const Dims& d = op.s.d;
    // A part of a sequence can't begin before the state at its start is known: one thread per sequence and head.
    const Sequences all = sequences(n.N, n.T, x[6], n.Hk, 1, n.T);
    auto body = [&](i64 task) {
        const Part& p = all.parts[task / n.Hk];
        const i64 head = task % n.Hk;
        Gate gate(op.s.mode, op.s.gate, d);
        Tiles tiles(d, false);
        Changes changes(tiles);
        float *state = arena().take(d.state()), *S = state, *z = state + d.F * d.Vp;
        float *A = arena().take(CHUNK * d.G * CHUNK), *O = arena().take(CHUNK * d.G * d.Vp);
        read_state(x[5], Tensor{}, p.n, head, d, state);
        float m = 0;
        for (i64 t = p.t0; t < p.t1;) {
            const i64 c = gate.open(p.b, t, p.t1 - t, head, m);
            tiles.read_queries(op.s, gate, p.b, t, c, head);
            gate.begin(S, z);
            changes.solve(op, gate, p.b, t, c, head, S);
            chunk_read(tiles, c, S, z, A, O, nullptr);
            write_tile(O, d.Vp, x[7], p.b, t, c, head * d.G, d.G, d.Dv);
            chunk_fold(tiles, c, S, z);
            gate.finish(S, z);
            std::memset(z, 0, d.Fp * sizeof(float));  // nothing reads it
            t += c;
        }
        write_state(state, x[8], Tensor{}, p.n, head, d);
    };
    return parallel(n.N * n.Hk, n.threads, body) ? 0 : 1;
}

// Tensors: d_out dS | q k v beta gate S cu | dq dk dv dbeta dgate dS0 sums; `sums` float32, as dgate.
static int64_t delta_backward(const Tensor* x, const i64* sizes, const double* scalars) {
    const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
    const Delta op = delta(x + 2, n, scalars[0]);
    const Tensor* grads = x + 9;
    const Dims& d = op.s.d;
    const Sequences all = sequences(n.N, n.T, x[8], n.Hk, 1, n.T);
    auto body = [&](i64 task) {
        const Part& p = all.parts[task / n.Hk];
        const i64 head = task % n.Hk, most_rows = CHUNK * d.G;
        Gate gate(op.s.mode, op.s.gate, d);
        Tiles tiles(d, true);
        Changes changes(tiles);
        ChunkGrads chunk(d);
        float *first = arena().take(d.state()), *state = arena().take(d.state()), *grad = arena().take(d.state());
        float *S = state, *z = state + d.F * d.Vp, *dS = grad, *dz = grad + d.F * d.Vp;
        float *dN = arena().take(most_rows * d.Vp), *dD = arena().take(most_rows);
        float *X = arena().take(CHUNK * CHUNK), *dK_q = arena().take(CHUNK * d.Fp);
        for (i64 r = 0; r < most_rows; r++) dD[r] = 0;
        read_state(x[7], Tensor{}, p.n, head, d, first);
        read_state(x[1], Tensor{}, p.n, head, d, grad);
        const Advance advance = [&](const Gate& open, i64 t, i64 c, float* to) {
            float* unread = to + d.F * d.Vp;
            open.begin(to, unread);
            changes.solve(op, open, p.b, t, c, head, to);
            chunk_fold(tiles, c, to, unread);
            open.finish(to, unread);
            std::memset(unread, 0, d.Fp * sizeof(float));
        };
        Reverse reverse(advance, gate, p.b, p.t0, p.t1, head, 0, first);
        Reverse::Chunk at;
        for (const float* before; reverse.next(at, before);) {
            const i64 c = at.c, t = at.t;
            float m = 0;
            gate.open(p.b, t, c, head, m);
            std::memcpy(state, before, d.state() * sizeof(float));
            gate.begin(S, z);
            changes.solve(op, gate, p.b, t, c, head, S);
            tiles.read_queries(op.s, gate, p.b, t, c, head);
            transpose(tiles.V, c, d.Dv, d.Vp, tiles.Vt, CHUNK);
            read_tile(x[0], p.b, t, c, head * d.G, d.G, d.Dv, dN, d.Vp);
            gate.finish(dS, dz);
            chunk.run(tiles, c, S, z, dN, dD, dS, dz);

            float *dR = chunk.dV, *K_q = changes.K_q;
            changes.solve_back(c, dR);
            causal_scores(dR, d.Dv, d.Vp, tiles.Vt, c, 1, X);  // minus the gradient of A
            for (i64 i = 0; i < c; i++) {
                X[i * CHUNK + i] = 0;
                float d_beta = dot(dR + i * d.Vp, changes.error + i * d.Vp, d.Vp);
                for (i64 j = 0; j < i; j++) d_beta -= X[i * CHUNK + j] * changes.M[i * CHUNK + j];
                grads[3].set(d_beta, p.b, t + i, head);
                multiply(dR + i * d.Vp, changes.beta[i], d.Vp);
                multiply(X + i * CHUNK, -changes.beta[i], padded(i + 1));
            }
            gemm(d.F, d.Vp, c, K_q, 1, d.Fp, dR, d.Vp, dS, d.Vp, SUBTRACT);
            gemm(c, d.Fp, d.Dv, dR, d.Vp, 1, chunk.S_t, d.Fp, dK_q, d.Fp, SET);
            multiply(dK_q, -1, c * d.Fp);
            causal_apply(X, tiles.K, d.Fp, c, 1, dK_q);
            causal_apply_t(X, K_q, d.Fp, c, 1, chunk.dK);
            gate.begin(dS, dz);

            for (i64 i = 0; i < c && op.s.mode != NONE; i++) {
                float *to = grads[6].floats(p.b, t + i, head), total = 0;
                for (i64 f = 0; f < d.F; f++) {
                    const i64 k = i * d.Fp + f;
                    float one = K_q[k] * dK_q[k] - tiles.K[k] * chunk.dK[k];
                    for (i64 r = i * d.G; r < (i + 1) * d.G; r++) one += tiles.Q[r * d.Fp + f] * chunk.dQ[r * d.Fp + f];
                    if (op.s.mode == DECAYS) to[f] = one;
                    total += one;
                }
                if (op.s.mode == DECAY) to[0] = total;
            }
            gate.scale_q(chunk.dQ, c, d.G);
            gate.scale_q(dK_q, c, 1);
            gate.scale_k(chunk.dK, c);
            axpy(1, dK_q, chunk.dK, c * d.Fp);
            multiply(chunk.dQ, op.s.scale, c * d.G * d.Fp);
            write_tile(chunk.dQ, d.Fp, grads[0], p.b, t, c, head * d.G, d.G, d.F);
            write_tile(chunk.dK, d.Fp, grads[1], p.b, t, c, head, 1, d.F);
            write_tile(dR, d.Vp, grads[2], p.b, t, c, head, 1, d.Dv);
        }
        write_state(grad, grads[5], Tensor{}, p.n, head, d);
    };
    if (!parallel(n.N * n.Hk, n.threads, body)) return 1;
    if (op.s.mode == NONE) return 0;
    const DecayGrads to{x[7], Tensor{}, grads[5], Tensor{}, grads[6], grads[4]};
    return to.run(all, d, op.s.mode, n.Hk, n.threads) ? 0 : 1;
}

LZ_OP(lz_delta_forward, delta_forward)
LZ_OP(lz_delta_backward, delta_backward)
