// Feature maps that cost more than they compute when they are written as a row of tensor operations.
#include "common.h"

using namespace lz;

namespace {

struct Sizes { i64 B, T, H, D, E, threads, parts; };

// y (E) to softmax(y) and softmax(-y), padded columns 0.
void both_softmaxes(const float* y, i64 E, float* plus, float* minus) {
    const i64 Ep = padded(E);
    float top = y[0], low = y[0];
    for (i64 i = 1; i < E; i++) top = most(top, y[i]), low = least(low, y[i]);
    vf sum_plus = {}, sum_minus = {};
    for (i64 i = 0; i < Ep; i += W) {
        vf up = vexp(load(y + i) - top), down = vexp(low - load(y + i));
        if (i + W > E) {
            float a[W], b[W];
            std::memcpy(a, &up, sizeof a);
            std::memcpy(b, &down, sizeof b);
            for (i64 j = most<i64>(E - i, 0); j < W; j++) a[j] = b[j] = 0;
            std::memcpy(&up, a, sizeof a);
            std::memcpy(&down, b, sizeof b);
        }
        store(plus + i, up);
        store(minus + i, down);
        sum_plus += up;
        sum_minus += down;
    }
    multiply(plus, 1 / sum(sum_plus), Ep);
    multiply(minus, 1 / sum(sum_minus), Ep);
}

// The weight of a head, (D, Ep).
void read_weight(const Tensor& weight, i64 head, const Sizes& n, float* to) {
    for (i64 d = 0; d < n.D; d++, to += padded(n.E)) {
        read_row(weight.at(head, d), weight.dtype, to, n.E);
        for (i64 i = n.E; i < padded(n.E); i++) to[i] = 0;
    }
}

}  // namespace

// Tensors: x weight | phi.
static int64_t hedgehog_forward(const Tensor* t, const i64* sizes, const double*) {
    const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
    const Tensor &x = t[0], &weight = t[1], &phi = t[2];
    const i64 Dp = padded(n.D), Ep = padded(n.E), chunks = (n.T + CHUNK - 1) / CHUNK;
    auto body = [&](i64 task) {
        const i64 head = task % n.H, b = task / n.H % n.B, part = task / n.H / n.B;
        float *W1 = arena().take(n.D * Ep), *X = arena().take(CHUNK * Dp), *Y = arena().take(CHUNK * Ep);
        float *plus = arena().take(Ep), *minus = arena().take(Ep);
        read_weight(weight, head, n, W1);
        for (i64 i = chunks * part / n.parts; i < chunks * (part + 1) / n.parts; i++) {
            const i64 t0 = i * CHUNK, c = least(CHUNK, n.T - t0);
            read_tile(x, b, t0, c, head, 1, n.D, X, Dp);
            gemm(c, Ep, n.D, X, Dp, 1, W1, Ep, Y, Ep, SET);
            for (i64 r = 0; r < c; r++) {
                both_softmaxes(Y + r * Ep, n.E, plus, minus);
                write_row(plus, phi.at(b, t0 + r, head), phi.dtype, n.E);
                write_row(minus, phi.at(b, t0 + r, head, n.E), phi.dtype, n.E);
            }
        }
    };
    return parallel(n.B * n.H * n.parts, n.threads, body) ? 0 : 1;
}

// Tensors: d_phi x weight phi | dx (or nothing), and what each (part, row) adds to the gradient of the weight:
// (parts B, H, D, E) float32.
static int64_t hedgehog_backward(const Tensor* t, const i64* sizes, const double*) {
    const Sizes& n = *reinterpret_cast<const Sizes*>(sizes);
    const Tensor &d_phi = t[0], &x = t[1], &weight = t[2], &phi = t[3], &dx = t[4], &dw = t[5];
    const i64 Dp = padded(n.D), Ep = padded(n.E), chunks = (n.T + CHUNK - 1) / CHUNK;
    auto body = [&](i64 task) {
        const i64 head = task % n.H, b = task / n.H % n.B, part = task / n.H / n.B;
        float *Wt = arena().take(n.E * Dp), *W1 = arena().take(n.D * Ep), *X = arena().take(CHUNK * Dp);
        float *dY = arena().take(CHUNK * Ep), *dX = arena().take(CHUNK * Dp), *dW = arena().take(n.D * Ep);
        float *p = arena().take(2 * Ep), *dp = arena().take(2 * Ep);
        std::memset(dW, 0, n.D * Ep * sizeof(float));
        std::memset(p, 0, 2 * Ep * sizeof(float));
        std::memset(dp, 0, 2 * Ep * sizeof(float));
        if (dx) {
            read_weight(weight, head, n, W1);
            transpose(W1, n.D, n.E, Ep, Wt, Dp);
        }
        for (i64 i = chunks * part / n.parts; i < chunks * (part + 1) / n.parts; i++) {
            const i64 t0 = i * CHUNK, c = least(CHUNK, n.T - t0);
            read_tile(x, b, t0, c, head, 1, n.D, X, Dp);
            for (i64 r = 0; r < c; r++) {
                for (i64 side = 0; side < 2; side++) {
                    read_row(phi.at(b, t0 + r, head, side * n.E), phi.dtype, p + side * Ep, n.E);
                    read_row(d_phi.at(b, t0 + r, head, side * n.E), d_phi.dtype, dp + side * Ep, n.E);
                }
                const float plus = dot(p, dp, Ep), minus = dot(p + Ep, dp + Ep, Ep);
                for (i64 j = 0; j < Ep; j++)
                    dY[r * Ep + j] = p[j] * (dp[j] - plus) - p[Ep + j] * (dp[Ep + j] - minus);
            }
            gemm(n.D, Ep, c, X, 1, Dp, dY, Ep, dW, Ep, ADD);
            if (!dx) continue;
            gemm(c, Dp, n.E, dY, Ep, 1, Wt, Dp, dX, Dp, SET);
            write_tile(dX, Dp, dx, b, t0, c, head, 1, n.D);
        }
        for (i64 d = 0; d < n.D; d++) write_row(dW + d * Ep, dw.at(part * n.B + b, head, d), F32, n.E);
    };
    return parallel(n.B * n.H * n.parts, n.threads, body) ? 0 : 1;
}

namespace {

struct FavorSizes { i64 B, T, H, D, M, threads, parts, hyperbolic; };

void read_omega(const Tensor& omega, const FavorSizes& n, float scale, float* to, i64 ld) {
    for (i64 i = 0; i < n.M; i++, to += ld) {
        read_row(omega.at(i), omega.dtype, to, n.D, scale);
        for (i64 d = n.D; d < ld; d++) to[d] = 0;
    }
}

}  // namespace

// Tensors: x omega | phi log. Scalars: the factor of x.
static int64_t favor_forward(const Tensor* t, const i64* sizes, const double* scalars) {
    const FavorSizes& n = *reinterpret_cast<const FavorSizes*>(sizes);
    const Tensor &x = t[0], &omega = t[1], &phi = t[2], &log = t[3];
    const i64 Dp = padded(n.D), Mp = padded(n.M), chunks = (n.T + CHUNK - 1) / CHUNK;
    const float scale = scalars[0], factor = 1 / std::sqrt(float(n.hyperbolic ? 2 * n.M : n.M));
    auto body = [&](i64 task) {
        const i64 head = task % n.H, b = task / n.H % n.B, part = task / n.H / n.B;
        float *rows = arena().take(n.M * Dp), *columns = arena().take(n.D * Mp), *X = arena().take(CHUNK * Dp);
        float *Y = arena().take(CHUNK * Mp), *side = arena().take(Mp);
        read_omega(omega, n, 1, rows, Dp);
        transpose(rows, n.M, n.D, Dp, columns, Mp);
        for (i64 i = chunks * part / n.parts; i < chunks * (part + 1) / n.parts; i++) {
            const i64 t0 = i * CHUNK, c = least(CHUNK, n.T - t0);
            read_tile(x, b, t0, c, head, 1, n.D, X, Dp, scale);
            gemm(c, Mp, n.D, X, Dp, 1, columns, Mp, Y, Mp, SET);
            for (i64 r = 0; r < c; r++) {
                float* y = Y + r * Mp;
                float top = y[0], low = y[0];
                for (i64 j = 1; j < n.M; j++) top = most(top, y[j]), low = least(low, y[j]);
                if (n.hyperbolic) top = most(top, -low);
                const float square = dot(X + r * Dp, X + r * Dp, Dp);
                log.set(top - square / 2, b, t0 + r, head);
                if (n.hyperbolic) {
                    for (i64 j = 0; j < Mp; j += W) store(side + j, vexp(-load(y + j) - top) * factor);
                    write_row(side, phi.at(b, t0 + r, head, n.M), phi.dtype, n.M);
                }
                for (i64 j = 0; j < Mp; j += W) store(side + j, vexp(load(y + j) - top) * factor);
                write_row(side, phi.at(b, t0 + r, head), phi.dtype, n.M);
            }
        }
    };
    return parallel(n.B * n.H * n.parts, n.threads, body) ? 0 : 1;
}

// Tensors: d_phi d_log x omega phi | dx.
static int64_t favor_backward(const Tensor* t, const i64* sizes, const double* scalars) {
    const FavorSizes& n = *reinterpret_cast<const FavorSizes*>(sizes);
    const Tensor &d_phi = t[0], &d_log = t[1], &x = t[2], &omega = t[3], &phi = t[4], &dx = t[5];
    const i64 Dp = padded(n.D), Mp = padded(n.M), chunks = (n.T + CHUNK - 1) / CHUNK;
    const float scale = scalars[0];
    auto body = [&](i64 task) {
        const i64 head = task % n.H, b = task / n.H % n.B, part = task / n.H / n.B;
        float *rows = arena().take(n.M * Dp), *X = arena().take(CHUNK * Dp), *dX = arena().take(CHUNK * Dp);
        float *dY = arena().take(CHUNK * Mp), *p = arena().take(Mp), *dp = arena().take(Mp);
        read_omega(omega, n, scale, rows, Dp);
        for (i64 i = chunks * part / n.parts; i < chunks * (part + 1) / n.parts; i++) {
            const i64 t0 = i * CHUNK, c = least(CHUNK, n.T - t0);
            read_tile(x, b, t0, c, head, 1, n.D, X, Dp, -scale * scale);
            for (i64 r = 0; r < c; r++) {
                float* dy = dY + r * Mp;
                for (i64 side = 0; side <= n.hyperbolic; side++) {
                    read_row(phi.at(b, t0 + r, head, side * n.M), phi.dtype, p, n.M);
                    read_row(d_phi.at(b, t0 + r, head, side * n.M), d_phi.dtype, dp, n.M);
                    for (i64 j = 0; j < n.M; j++) dy[j] = side ? dy[j] - p[j] * dp[j] : p[j] * dp[j];
                }
                multiply(X + r * Dp, d_log.value(b, t0 + r, head), Dp);
            }
            gemm(c, Dp, n.M, dY, Mp, 1, rows, Dp, dX, Dp, SET);
            for (i64 j = 0; j < c * Dp; j++) dX[j] += X[j];
            write_tile(dX, Dp, dx, b, t0, c, head, 1, n.D);
        }
    };
    return parallel(n.B * n.H * n.parts, n.threads, body) ? 0 : 1;
}

LZ_OP(lz_favor_forward, favor_forward)
LZ_OP(lz_favor_backward, favor_backward)
LZ_OP(lz_hedgehog_forward, hedgehog_forward)
LZ_OP(lz_hedgehog_backward, hedgehog_backward)
