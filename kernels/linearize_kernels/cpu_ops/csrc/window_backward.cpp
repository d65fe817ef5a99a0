// The backward pass of window_attention.
#include <memory>

#include "window.h"

using namespace lz;

namespace {

// d_out dS dz | WindowInputs | out den top |
// dq dkeys dvalues dphi_q dphi_k dlog_q dlog_k dsink_k dsink_v dgamma dS0 dz0
struct Tensors {
    Tensor d_out, dS, dz;
    WindowInputs x;
    Tensor out, den, top, dq, dkeys, dvalues, dphi_q, dphi_k, dlog_q, dlog_k, dsink_k, dsink_v, dgamma, dS0, dz0;
};

// What one (part, head) adds to the gradients of keys begin .. begin + count, of the sinks, and of gamma. A key is
// seen from more than one part, so these are summed afterwards, in an order that doesn't depend on the threads.
struct Partial {
    i64 begin, count;
    std::unique_ptr<float[]> k, v, sink_k, sink_v;
    std::vector<double> gamma;

    Partial(const Window& w, const Part& p)
        : begin(most<i64>(w.n.before + p.t0 - w.n.window, 0) / CHUNK * CHUNK),
          count((w.n.before + p.t1 - begin + CHUNK - 1) / CHUNK * CHUNK), k(new float[count * w.Dp]),
          v(new float[count * w.Vp]), sink_k(new float[w.n.sinks * w.Dp + CHUNK * w.Dp]),
          sink_v(new float[w.n.sinks * w.Vp + CHUNK * w.Vp]), gamma(w.G, 0.0) {}
    void clear(const Window& w) {
        std::memset(k.get(), 0, count * w.Dp * sizeof(float));
        std::memset(v.get(), 0, count * w.Vp * sizeof(float));
        std::memset(sink_k.get(), 0, (w.n.sinks + CHUNK) * w.Dp * sizeof(float));
        std::memset(sink_v.get(), 0, (w.n.sinks + CHUNK) * w.Vp * sizeof(float));
    }
};

// A score that is the largest of its row, where that is part of the function.
struct Tie { i64 row, column; const KeyTile* tile; };

class Backward {
  public:
    Backward(const Window& w, const Tensors& x, const Part& p, i64 head, Partial& to)
        : w(w), x(x), p(p), head(head), to(to), keys(w, p.b, head, true) {
        const i64 rows = CHUNK * w.G;
        Q = arena().take(rows * w.Dp);
        dQ = arena().take(rows * w.Dp);
        A = arena().take(rows * CHUNK);
        X = arena().take(rows * CHUNK);
        dN = arena().take(rows * w.Vp);
        dD = arena().take(rows);
        top = arena().take(rows);
        row_top = arena().take(rows);
        total = arena().take(rows);
        relative = w.far.mode != LOGS;
    }
    // The exact part of queries t .. t + c; dN, dD and top stay for the caller.
    void exact(i64 t, i64 c);

    const Window& w;
    const Tensors& x;
    const Part& p;
    i64 head;
    Partial& to;
    float *Q, *dQ, *A, *X, *dN, *dD, *top;

  private:
    void block(const KeyTile& tile, Span span, i64 r0, i64 rows);
    float* grad_k(const KeyTile& tile) {
        return tile.sink ? &to.sink_k[tile.begin * w.Dp] : &to.k[(tile.begin - to.begin) * w.Dp];
    }
    float* grad_v(const KeyTile& tile) {
        return tile.sink ? &to.sink_v[tile.begin * w.Vp] : &to.v[(tile.begin - to.begin) * w.Vp];
    }
    KeyTiles keys;
    float *row_top, *total;
    bool relative;
    std::vector<Tie> ties;
};

// A (scores) becomes the weights, X the gradient of the scores, in rows r0 .. r0 + rows and these columns.
void Backward::block(const KeyTile& tile, Span span, i64 r0, i64 rows) {
    gemm(rows, span.to - span.from, w.n.Dv, dN + r0 * w.Vp, w.Vp, 1, tile.Vt + span.from, CHUNK,
         X + r0 * CHUNK + span.from, CHUNK, SET);
    for (i64 r = r0; r < r0 + rows; r++) {
        float *a = A + r * CHUNK, *xs = X + r * CHUNK;
        const float gamma = x.x.gamma.value(head * w.G + r % w.G);
        if (relative && row_top[r - r0] == top[r])
            for (i64 j = span.from; j < span.to; j++)
                if (a[j] == top[r] && a[j] > LOWEST) ties.push_back({r, j, &tile});
        const vf now = splat(top[r]), none = splat(LOWEST), add = splat(dD[r]);
        vf gathered = {};
        for (i64 j = span.from; j < span.to; j += W) {
            const vf s = load(a + j);
            const vf e = s <= none ? vf{} : vexp(s - now);
            vf ds = s <= none ? vf{} : e * (load(xs + j) + add);
            gathered += ds;
            ds *= gamma;
            if (w.softcap > 0) ds = s <= none ? vf{} : ds * (1.0f - (s / w.softcap) * (s / w.softcap));
            store(a + j, e * gamma);
            store(xs + j, ds);
        }
        const float here = sum(gathered);
        total[r] += gamma * here;
        to.gamma[r % w.G] += here;
    }
    gemm(rows, w.Dp, span.to - span.from, X + r0 * CHUNK + span.from, CHUNK, 1, tile.K + span.from * w.Dp, w.Dp,
         dQ + r0 * w.Dp, w.Dp, ADD);
}

void Backward::exact(i64 t, i64 c) {
    const i64 rows = c * w.G, h0 = head * w.G;
    read_tile(x.x.q, p.b, t, c, h0, w.G, w.n.D, Q, w.Dp, w.scale);
    std::memset(dQ, 0, rows * w.Dp * sizeof(float));
    for (i64 r = 0; r < rows; r++) {
        total[r] = 0;
        top[r] = x.top.value(p.b, t + r / w.G, h0 + r % w.G);
    }
    ties.clear();
    for (const KeyTile* tile : keys.seen(t, c)) {
        Span spans[CHUNK / SUB];
        for (i64 i = 0; i < c; i += SUB) {
            const i64 stop = least(i + SUB, c), r = i * w.G;
            const Span span = spans[i / SUB] = keys.columns(*tile, t + i, t + stop);
            if (span.from == span.to) continue;
            keys.scores(*tile, span, Q + r * w.Dp, t + i, t + stop, A + r * CHUNK, row_top);
            block(*tile, span, r, (stop - i) * w.G);
        }
        // Queries that see a block of keys are neighbours: one product for all of them.
        for (i64 j = 0; j < CHUNK; j += SUB) {
            i64 begin = c, end = 0;
            for (i64 i = 0; i < c; i += SUB)
                if (spans[i / SUB].from <= j && j < spans[i / SUB].to) {
                    begin = least(begin, i);
                    end = least(i + SUB, c);
                }
            if (begin >= end) continue;
            const i64 r = begin * w.G, k = (end - begin) * w.G, size = least(SUB, tile->count - j);
            gemm(size, w.Vp, k, A + r * CHUNK + j, 1, CHUNK, dN + r * w.Vp, w.Vp, grad_v(*tile) + j * w.Vp, w.Vp, ADD);
            gemm(size, w.Dp, k, X + r * CHUNK + j, 1, CHUNK, Q + r * w.Dp, w.Dp, grad_k(*tile) + j * w.Dp, w.Dp, ADD);
        }
    }
    // The largest score is subtracted from all, and what that changes goes to the keys that attain it, equally.
    std::vector<i64> count(rows, 0);
    for (const Tie& tie : ties) count[tie.row]++;
    for (const Tie& tie : ties) {
        float back = -total[tie.row] / static_cast<float>(count[tie.row]);
        if (w.softcap > 0) back *= 1 - (top[tie.row] / w.softcap) * (top[tie.row] / w.softcap);
        axpy(back, tie.tile->K + tie.column * w.Dp, dQ + tie.row * w.Dp, w.Dp);
        axpy(back, Q + tie.row * w.Dp, grad_k(*tie.tile) + tie.column * w.Dp, w.Dp);
    }
    multiply(dQ, w.scale, rows * w.Dp);
    write_tile(dQ, w.Dp, x.dq, p.b, t, c, h0, w.G, w.n.D);
}

// dN, dD times the factor that the sums have in numerator and denominator.
void scale_far(const Window& w, const Tensors& x, const Gate& gate, i64 b, i64 t, i64 c, i64 head, float* dN,
               float* dD) {
    if (w.far.mode != LOGS) return;
    for (i64 r = 0; r < c * w.G; r++) {
        const i64 at = t + r / w.G, h = head * w.G + r % w.G;
        const float factor = std::exp(x.x.log_q.value(b, at, h) + gate.top[r / w.G] - x.top.value(b, at, h));
        multiply(dN + r * w.Vp, factor, w.Vp);
        dD[r] *= factor;
    }
}

void sum_partials(const Window& w, const Tensors& x, const Sequences& all, const std::vector<Partial>& partials,
                  i64 task) {
    const i64 tiles = (w.n.L + CHUNK - 1) / CHUNK;
    const i64 b = task / (w.n.Hk * tiles), head = task / tiles % w.n.Hk, begin = task % tiles * CHUNK;
    const i64 count = least(CHUNK, w.n.L - begin);
    float *dk = arena().take(CHUNK * w.Dp), *dv = arena().take(CHUNK * w.Vp);
    std::memset(dk, 0, CHUNK * w.Dp * sizeof(float));
    std::memset(dv, 0, CHUNK * w.Vp * sizeof(float));
    for (i64 i = all.begin[b]; i < all.begin[b + 1]; i++) {
        const Partial& from = partials[i * w.n.Hk + head];
        if (begin < from.begin || begin >= from.begin + from.count) continue;
        axpy(1, &from.k[(begin - from.begin) * w.Dp], dk, CHUNK * w.Dp);
        axpy(1, &from.v[(begin - from.begin) * w.Vp], dv, CHUNK * w.Vp);
    }
    write_tile(dk, w.Dp, x.dkeys, b, begin, count, head, 1, w.n.D);
    write_tile(dv, w.Vp, x.dvalues, b, begin, count, head, 1, w.n.Dv);
    if (begin) return;
    std::vector<float> row(most(w.Dp, w.Vp));
    for (i64 s = 0; s < w.n.sinks; s++) {
        row.assign(row.size(), 0.0f);
        for (i64 i = all.begin[b]; i < all.begin[b + 1]; i++)
            axpy(1, &partials[i * w.n.Hk + head].sink_k[s * w.Dp], row.data(), w.Dp);
        write_row(row.data(), x.dsink_k.at(b, s, head), x.dsink_k.dtype, w.n.D);
        row.assign(row.size(), 0.0f);
        for (i64 i = all.begin[b]; i < all.begin[b + 1]; i++)
            axpy(1, &partials[i * w.n.Hk + head].sink_v[s * w.Vp], row.data(), w.Vp);
        write_row(row.data(), x.dsink_v.at(b, s, head), x.dsink_v.dtype, w.n.Dv);
    }
}

}  // namespace

static int64_t window_backward(const Tensor* tensors, const i64* sizes, const double* scalars) {
    const Tensors& x = *reinterpret_cast<const Tensors*>(tensors);
    const Window w(tensors + 3, sizes, scalars);
    const WindowSizes& n = w.n;
    const Dims& d = w.far.d;
    const Sequences all = sequences(n.B, n.T, Tensor{}, n.Hk, n.threads, most(8 * CHUNK, n.window));
    const i64 tasks = static_cast<i64>(all.parts.size()) * n.Hk;
    Starts starts;
    if (!find_starts(all, w.far, x.x.S, x.x.z, x.x.m, n.Hk, n.threads, starts)) return 1;
    const RowGrads rows = [&](const Gate& gate, i64 b, i64 t, i64 c, i64 head, float* dN, float* dD) {
        read_tile(x.d_out, b, t, c, head * w.G, w.G, n.Dv, dN, w.Vp);
        ratio_grads(x.out, x.den, w.eps, d, b, t, c, head, dN, dD);
        scale_far(w, x, gate, b, t, c, head, dN, dD);
    };
    std::unique_ptr<float[]> ends;
    if (!find_ends(all, w.far, starts, x.dS, x.dz, rows, n.Hk, n.threads, ends)) return 1;
    std::vector<Partial> partials;
    for (i64 i = 0; i < tasks; i++) partials.emplace_back(w, all.parts[i / n.Hk]);

    auto body = [&](i64 task) {
        const Part& p = all.parts[task / n.Hk];
        const i64 head = task % n.Hk, floats = d.state();
        Partial& to = partials[task];
        to.clear(w);
        Backward backward(w, x, p, head, to);
        Gate gate(w.far.mode, w.far.gate, d);
        Tiles tiles(d, true);
        ChunkGrads chunk(d);
        float *state = arena().take(floats), *S = state, *z = state + d.F * d.Vp;
        float *dS = &ends[task * floats], *dz = dS + d.F * d.Vp;
        auto exact = [&](i64 t, i64 c) {
            read_tile(x.d_out, p.b, t, c, head * w.G, w.G, n.Dv, backward.dN, w.Vp);
            ratio_grads(x.out, x.den, w.eps, d, p.b, t, c, head, backward.dN, backward.dD);
            backward.exact(t, c);
        };
        const i64 k0 = w.far.key(p.t0), k1 = w.far.key(p.t1);
        Reverse reverse(fold_keys(w.far, p.b, head), gate, p.b, k0, k1, head, starts.m[task],
                        starts.state(p.index, head));
        Reverse::Chunk at;
        for (const float* before; reverse.next(at, before);) {
            const i64 c = at.c, t = at.t + w.first;
            float m = at.m;
            exact(t, c);
            gate.open(p.b, at.t, c, head, m);
            tiles.read_queries(w.far, gate, p.b, t, c, head);
            tiles.read_keys(w.far, gate, p.b, at.t, c, head, true);
            scale_far(w, x, gate, p.b, t, c, head, backward.dN, backward.dD);
            std::memcpy(state, before, floats * sizeof(float));
            gate.begin(S, z);
            gate.finish(dS, dz);
            chunk.run(tiles, c, S, z, backward.dN, backward.dD, dS, dz);
            gate.begin(dS, dz);
            if (w.far.mode == LOGS)
                for (i64 i = 0; i < c; i++) {
                    x.dlog_k.set(dot(tiles.K + i * d.Fp, chunk.dK + i * d.Fp, d.Fp), p.b, at.t + i, head);
                    for (i64 r = i * w.G; r < (i + 1) * w.G; r++)
                        x.dlog_q.set(dot(tiles.Q + r * d.Fp, chunk.dQ + r * d.Fp, d.Fp), p.b, t + i,
                                     head * w.G + r % w.G);
                }
            gate.scale_q(chunk.dQ, c, d.G);
            gate.scale_k(chunk.dK, c);
            write_tile(chunk.dQ, d.Fp, x.dphi_q, p.b, t, c, head * w.G, w.G, d.F);
            write_tile(chunk.dK, d.Fp, x.dphi_k, p.b, at.t, c, head, 1, d.F);
            axpy(1, chunk.dV, &to.v[(at.t - to.begin) * w.Vp], c * w.Vp);  // key j of the sums is key j of all
        }
        // Queries before the first folded key, which read no sums.
        std::memset(chunk.dQ, 0, CHUNK * w.G * d.Fp * sizeof(float));
        for (i64 stop = least(w.first, p.t1); stop > p.t0;) {
            const i64 t = most(stop - d.tokens, p.t0);
            exact(t, stop - t);
            write_tile(chunk.dQ, d.Fp, x.dphi_q, p.b, t, stop - t, head * w.G, w.G, d.F);
            for (i64 r = 0; w.far.mode == LOGS && r < (stop - t) * w.G; r++)
                x.dlog_q.set(0, p.b, t + r / w.G, head * w.G + r % w.G);
            stop = t;
        }
        if (p.first) write_state(dS, x.dS0, x.dz0, p.n, head, d);
    };
    if (!parallel(tasks, n.threads, body)) return 1;

    auto join = [&](i64 task) { sum_partials(w, x, all, partials, task); };
    if (!parallel(n.B * n.Hk * ((n.L + CHUNK - 1) / CHUNK), n.threads, join)) return 1;
    for (i64 h = 0; h < n.H; h++) {
        double sum = 0;
        for (size_t i = 0; i < all.parts.size(); i++) sum += partials[i * n.Hk + h / w.G].gamma[h % w.G];
        x.dgamma.set(static_cast<float>(sum), h);
    }
    return 0;
}

LZ_OP(lz_window_backward, window_backward)
