#include "sums.h"

namespace lz {

Gate::Gate(Mode mode, const Tensor& x, Dims d) : mode(mode), x(x), d(d), first(1), last(1) {
    if (mode == DECAYS) {
        qs = arena().take(CHUNK * d.Fp);
        ks = arena().take(CHUNK * d.Fp);
        firsts = arena().take(d.Fp);
        lasts = arena().take(d.Fp);
    }
    for (i64 i = 0; i < CHUNK; i++) q[i] = k[i] = 1;
}

// exp of a gate below this is 0 in float32, and sums of such gates stay finite.
static float clamped(float gate) { return gate < -200.0f ? -200.0f : gate; }

i64 Gate::open(i64 b, i64 t, i64 room, i64 head, float& m) {
    const i64 most_tokens = least(room, d.tokens);
    if (mode == NONE) return most_tokens;
    i64 c = 0;
    if (mode == LOGS) {
        const float before = m, start = most(m, x.value(b, t, head));
        for (; c < most_tokens; c++) {
            const float log = x.value(b, t + c, head), now = most(m, log);
            if (now - start > SPREAD) break;
            m = top[c] = now;
            k[c] = std::exp(log - start);
            q[c] = std::exp(start - now);
        }
        first = std::exp(before - start);
        last = std::exp(start - m);
    } else if (mode == DECAY) {
        double total = 0;
        for (; c < most_tokens; c++) {
            const double next = c ? total + clamped(x.value(b, t + c, head)) : 0;
            if (next < -SPREAD) break;
            total = next;
            q[c] = std::exp(static_cast<float>(total));
            k[c] = 1 / q[c];
        }
        first = std::exp(clamped(x.value(b, t, head)));
        last = q[c - 1];
    } else {
        // lasts holds the sums while they are made.
        read_row(x.at(b, t, head), x.dtype, firsts, d.F);
        for (i64 f = 0; f < d.F; f++) firsts[f] = clamped(firsts[f]);
        for (i64 f = d.F; f < d.Fp; f++) firsts[f] = 0;
        for (i64 f = 0; f < d.Fp; f++) lasts[f] = 0;
        for (; c < most_tokens; c++) {
            float *to = qs + c * d.Fp, lowest = 0;
            for (i64 f = d.F; f < d.Fp; f++) to[f] = 0;
            if (c) {
                read_row(x.at(b, t + c, head), x.dtype, to, d.F);
                for (i64 f = 0; f < d.F; f++) to[f] = clamped(to[f]) + lasts[f];
            } else {
                for (i64 f = 0; f < d.F; f++) to[f] = 0;
            }
            for (i64 f = 0; f < d.F; f++) lowest = least(lowest, to[f]);
            if (lowest < -SPREAD) break;
            for (i64 f = 0; f < d.Fp; f++) lasts[f] = to[f];
        }
        for (i64 i = 0; i < c * d.Fp; i += W) {
            const vf factor = vexp(load(qs + i));
            store(qs + i, factor);
            store(ks + i, 1.0f / factor);
        }
        for (i64 f = 0; f < d.Fp; f += W) {
            store(firsts + f, vexp(load(firsts + f)));
            store(lasts + f, vexp(load(lasts + f)));
        }
    }
    return c;
}

void Gate::scale_q(float* tile, i64 c, i64 G) const {
    if (mode == NONE) return;
    for (i64 t = 0; t < c; t++)
        for (i64 g = 0; g < G; g++, tile += d.Fp) {
            if (mode != DECAYS) multiply(tile, q[t], d.Fp);
            else for (i64 f = 0; f < d.Fp; f++) tile[f] *= qs[t * d.Fp + f];
        }
}

void Gate::scale_k(float* tile, i64 c) const {
    if (mode == NONE) return;
    for (i64 t = 0; t < c; t++, tile += d.Fp) {
        if (mode != DECAYS) multiply(tile, k[t], d.Fp);
        else for (i64 f = 0; f < d.Fp; f++) tile[f] *= ks[t * d.Fp + f];
    }
}

static void scale_state(float* S, float* z, const Dims& d, float one, const float* each) {
    if (!each && one == 1) return;
    for (i64 f = 0; f < d.F; f++) {
        multiply(S + f * d.Vp, each ? each[f] : one, d.Vp);
        if (z) z[f] *= each ? each[f] : one;
    }
}

void Gate::begin(float* S, float* z) const { scale_state(S, z, d, first, mode == DECAYS ? firsts : nullptr); }
void Gate::finish(float* S, float* z) const { scale_state(S, z, d, last, mode == DECAYS ? lasts : nullptr); }

Tiles::Tiles(const Dims& d, bool backward) : d(d) {
    Q = arena().take(CHUNK * d.G * d.Fp);
    K = arena().take(CHUNK * d.Fp);
    Kt = arena().take(CHUNK * d.F);
    V = arena().take(CHUNK * d.Vp);
    Vt = backward ? arena().take(CHUNK * d.Dv) : nullptr;
}

void Tiles::read_keys(const Source& s, const Gate& gate, i64 b, i64 t, i64 c, i64 head, bool transposed) {
    read_tile(s.k, b, t, c, head, 1, d.F, K, d.Fp);
    gate.scale_k(K, c);
    read_tile(s.v, b, t, c, head, 1, d.Dv, V, d.Vp);
    if (transposed) {
        transpose(K, c, d.F, d.Fp, Kt, CHUNK);
        if (Vt) transpose(V, c, d.Dv, d.Vp, Vt, CHUNK);
    }
}

void Tiles::read_queries(const Source& s, const Gate& gate, i64 b, i64 t, i64 c, i64 head) {
    read_tile(s.q, b, t, c, head * d.G, d.G, d.F, Q, d.Fp, s.scale);
    gate.scale_q(Q, c, d.G);
}

void causal_scores(const float* Q, i64 n, i64 ldq, const float* Kt, i64 c, i64 G, float* A) {
    for (i64 t = 0; t < c; t += SUB) {
        const i64 stop = least(t + SUB, c), width = t + SUB;
        float* rows = A + t * G * CHUNK;
        gemm((stop - t) * G, width, n, Q + t * G * ldq, ldq, 1, Kt, CHUNK, rows, CHUNK, SET);
        for (i64 i = t; i < stop; i++)
            for (i64 g = 0; g < G; g++)
                for (i64 j = i + 1; j < width; j++) rows[((i - t) * G + g) * CHUNK + j] = 0;
    }
}

void causal_apply(const float* A, const float* K, i64 n, i64 c, i64 G, float* O) {
    for (i64 t = 0; t < c; t += SUB) {
        const i64 stop = least(t + SUB, c);
        gemm((stop - t) * G, n, stop, A + t * G * CHUNK, CHUNK, 1, K, n, O + t * G * n, n, ADD);
    }
}

void causal_apply_t(const float* A, const float* Q, i64 n, i64 c, i64 G, float* O) {
    for (i64 t = 0; t < c; t += SUB) {
        const i64 stop = least(t + SUB, c);
        gemm(stop - t, n, (c - t) * G, A + t * G * CHUNK + t, 1, CHUNK, Q + t * G * n, n, O + t * n, n, ADD);
    }
}

void chunk_read(const Tiles& x, i64 c, const float* S, const float* z, float* A, float* O, float* den) {
    const Dims& d = x.d;
    gemm(c * d.G, d.Vp, d.F, x.Q, d.Fp, 1, S, d.Vp, O, d.Vp, SET);
    causal_scores(x.Q, d.F, d.Fp, x.Kt, c, d.G, A);
    causal_apply(A, x.V, d.Vp, c, d.G, O);
    if (!den) return;
    for (i64 r = 0; r < c * d.G; r++) {
        vf total = {};
        for (i64 j = 0; j < padded(r / d.G + 1); j += W) total += load(A + r * CHUNK + j);
        den[r] = sum(total) + dot(x.Q + r * d.Fp, z, d.Fp);
    }
}

void chunk_fold(const Tiles& x, i64 c, float* S, float* z) {
    const Dims& d = x.d;
    gemm(d.F, d.Vp, c, x.K, 1, d.Fp, x.V, d.Vp, S, d.Vp, ADD);
    for (i64 j = 0; j < c; j++) axpy(1, x.K + j * d.Fp, z, d.Fp);
}

ChunkGrads::ChunkGrads(const Dims& d) {
    A = arena().take(CHUNK * d.G * CHUNK);
    X = arena().take(CHUNK * d.G * CHUNK);
    S_t = arena().take(d.Dv * d.Fp);
    dS_t = arena().take(d.Dv * d.Fp);
    dQ = arena().take(CHUNK * d.G * d.Fp);
    dK = arena().take(CHUNK * d.Fp);
    dV = arena().take(CHUNK * d.Vp);
}

void ChunkGrads::run(const Tiles& x, i64 c, const float* S, const float* z, const float* dN, const float* dD,
                     float* dS, float* dz) {
    const Dims& d = x.d;
    const i64 rows = c * d.G;
    transpose(S, d.F, d.Dv, d.Vp, S_t, d.Fp);
    transpose(dS, d.F, d.Dv, d.Vp, dS_t, d.Fp);
    causal_scores(dN, d.Dv, d.Vp, x.Vt, c, d.G, X);
    for (i64 r = 0; r < rows; r++)
        for (i64 j = 0; j <= r / d.G; j++) X[r * CHUNK + j] += dD[r];

    if (dV) {
        causal_scores(x.Q, d.F, d.Fp, x.Kt, c, d.G, A);
        gemm(c, d.Vp, d.F, x.K, d.Fp, 1, dS, d.Vp, dV, d.Vp, SET);
        causal_apply_t(A, dN, d.Vp, c, d.G, dV);
    }

    gemm(c, d.Fp, d.Dv, x.V, d.Vp, 1, dS_t, d.Fp, dK, d.Fp, SET);
    for (i64 j = 0; j < c; j++) axpy(1, dz, dK + j * d.Fp, d.Fp);
    causal_apply_t(X, x.Q, d.Fp, c, d.G, dK);

    gemm(rows, d.Fp, d.Dv, dN, d.Vp, 1, S_t, d.Fp, dQ, d.Fp, SET);
    for (i64 r = 0; r < rows; r++) axpy(dD[r], z, dQ + r * d.Fp, d.Fp);
    causal_apply(X, x.K, d.Fp, c, d.G, dQ);

    gemm(d.F, d.Vp, rows, x.Q, 1, d.Fp, dN, d.Vp, dS, d.Vp, ADD);
    for (i64 r = 0; r < rows; r++) axpy(dD[r], x.Q + r * d.Fp, dz, d.Fp);
}

void ratio_grads(const Tensor& out, const Tensor& den, float eps, const Dims& d, i64 b, i64 t, i64 c, i64 head,
                 float* dN, float* dD) {
    float row[256];
    for (i64 r = 0; r < c * d.G; r++, dN += d.Vp) {
        const i64 at = t + r / d.G, h = head * d.G + r % d.G;
        const float total = den.value(b, at, h);
        multiply(dN, 1 / most(eps, total), d.Vp);
        dD[r] = 0;
        if (total < eps) continue;  // at the floor, which doesn't move
        for (i64 i = 0; i < d.Dv; i += 256) {
            const i64 n = least<i64>(256, d.Dv - i);
            read_row(out.at(b, at, h, i), out.dtype, row, n);
            for (i64 j = n; j < padded(n); j++) row[j] = 0;
            dD[r] -= dot(dN + i, row, padded(n));
        }
    }
}

void read_state(const Tensor& S, const Tensor& z, i64 n, i64 head, const Dims& d, float* to) {
    for (i64 f = 0; f < d.F; f++, to += d.Vp) {
        read_row(S.at(n, head, f), S.dtype, to, d.Dv);
        for (i64 i = d.Dv; i < d.Vp; i++) to[i] = 0;
    }
    for (i64 f = 0; f < d.Fp; f++) to[f] = f < d.F && z ? z.value(n, head, f) : 0;
}

void write_state(const float* from, const Tensor& S, const Tensor& z, i64 n, i64 head, const Dims& d) {
    for (i64 f = 0; f < d.F; f++, from += d.Vp) write_row(from, S.at(n, head, f), S.dtype, d.Dv);
    if (z) write_row(from, z.at(n, head), z.dtype, d.F);
}

}  // namespace lz
