// window_attention, forward, and the scores that its backward pass shares.
#include <optional>

#include "window.h"

namespace lz {

Window::Window(const Tensor* tensors, const i64* sizes, const double* scalars)
    : x(*reinterpret_cast<const WindowInputs*>(tensors)), n(*reinterpret_cast<const WindowSizes*>(sizes)),
      scale(static_cast<float>(scalars[0])), softcap(static_cast<float>(scalars[1])),
      eps(static_cast<float>(scalars[2])), G(n.H / n.Hk), Dp(padded(n.D)), Vp(padded(n.Dv)),
      first(n.window - n.before),
      far{Dims(n.F, n.Dv, G), static_cast<Mode>(n.mode), x.phi_q, x.phi_k, x.values, x.log_k, first, 1.0f} {}

KeyTiles::KeyTiles(const Window& w, i64 b, i64 head, bool backward) : w_(w), b_(b), head_(head) {
    auto make = [&](bool sink) {
        KeyTile tile{};
        tile.sink = sink;
        tile.begin = -1;
        tile.Kt = arena().take(w.n.D * CHUNK);
        tile.V = arena().take(CHUNK * w.Vp);
        tile.K = arena().take(CHUNK * w.Dp);
        tile.Vt = backward ? arena().take(w.n.Dv * CHUNK) : nullptr;
        return tile;
    };
    const i64 tiles = least((w.n.window + CHUNK - 2) / CHUNK + 2, (w.n.L + CHUNK - 1) / CHUNK);
    for (i64 i = 0; i < tiles; i++) ring_.push_back(make(false));
    for (i64 s = 0; s < w.n.sinks; s += CHUNK) {
        sinks_.push_back(make(true));
        KeyTile& tile = sinks_.back();
        fill(tile, w.x.sink_k, w.x.sink_v, s, least(CHUNK, w.n.sinks - s));
        for (i64 i = 0; i < tile.count; i++) tile.position[i] = w.x.sink_position.integer(b, s + i);
    }
}

void KeyTiles::fill(KeyTile& tile, const Tensor& k, const Tensor& v, i64 begin, i64 count) {
    tile.begin = begin;
    tile.count = count;
    read_tile(k, b_, begin, count, head_, 1, w_.n.D, tile.K, w_.Dp);
    read_tile(v, b_, begin, count, head_, 1, w_.n.Dv, tile.V, w_.Vp);
    std::memset(tile.K + count * w_.Dp, 0, (CHUNK - count) * w_.Dp * sizeof(float));
    std::memset(tile.V + count * w_.Vp, 0, (CHUNK - count) * w_.Vp * sizeof(float));
    transpose(tile.K, CHUNK, w_.n.D, w_.Dp, tile.Kt, CHUNK);
    if (tile.Vt) transpose(tile.V, CHUNK, w_.n.Dv, w_.Vp, tile.Vt, CHUNK);
    tile.all_valid = true;
    for (i64 i = 0; i < count; i++) {
        tile.valid[i] = tile.sink || w_.x.valid.flag(b_, begin + i);
        tile.all_valid = tile.all_valid && tile.valid[i];
    }
}

const std::vector<KeyTile*>& KeyTiles::seen(i64 t0, i64 c) {
    seen_.clear();
    for (KeyTile& tile : sinks_) seen_.push_back(&tile);
    const i64 from = most<i64>(w_.n.before + t0 - w_.n.window + 1, 0), to = w_.n.before + t0 + c;
    for (i64 i = from / CHUNK; i * CHUNK < to; i++) {
        KeyTile& tile = ring_[i % ring_.size()];
        if (tile.begin != i * CHUNK)
            fill(tile, w_.x.keys, w_.x.values, i * CHUNK, least(CHUNK, w_.n.L - i * CHUNK));
        seen_.push_back(&tile);
    }
    return seen_;
}

Span KeyTiles::columns(const KeyTile& tile, i64 t0, i64 t1) const {
    if (tile.sink) {
        for (i64 i = 0; i < tile.count; i++)
            if (tile.position[i] <= t1 - 1 - w_.n.window) return {0, padded(tile.count)};
        return {0, 0};
    }
    const i64 from = w_.n.before + t0 - w_.n.window + 1 - tile.begin, to = w_.n.before + t1 - tile.begin;
    if (from >= CHUNK || to <= 0) return {0, 0};
    return {most<i64>(from, 0) / SUB * SUB, padded(least(to, CHUNK))};
}

void KeyTiles::scores(const KeyTile& tile, Span span, const float* Q, i64 t0, i64 t1, float* A, float* row_top) const {
    const i64 rows = (t1 - t0) * w_.G, width = span.to - span.from;
    gemm(rows, width, w_.n.D, Q, w_.Dp, 1, tile.Kt + span.from, CHUNK, A + span.from, CHUNK, SET);
    for (i64 r = 0; r < rows; r++) {
        float* a = A + r * CHUNK;
        const i64 t = t0 + r / w_.G;
        if (w_.softcap > 0)
            for (i64 j = span.from; j < span.to; j += W)
                store(a + j, vtanh(load(a + j) / w_.softcap) * w_.softcap);
        if (tile.sink) {
            for (i64 j = 0; j < span.to; j++)
                if (j >= tile.count || tile.position[j] > t - w_.n.window) a[j] = LOWEST;
        } else {
            const i64 at = w_.n.before + t - tile.begin;
            for (i64 j = span.from; j < least(span.to, at - w_.n.window + 1); j++) a[j] = LOWEST;
            for (i64 j = most(span.from, at + 1); j < span.to; j++) a[j] = LOWEST;
            if (!tile.all_valid)
                for (i64 j = span.from; j < least(span.to, tile.count); j++)
                    if (!tile.valid[j]) a[j] = LOWEST;
        }
        vf top = splat(LOWEST);
        for (i64 j = span.from; j < span.to; j += W) top = vmax(load(a + j), top);
        row_top[r] = largest(top);
    }
}

// Rows of numerator O (., Vp) and denominator relative to exp(top), after the scores A of a few more keys.
static void add_keys(const KeyTile& tile, Span span, i64 rows, i64 Vp, float* A, const float* row_top, float* O,
                     float* den, float* top) {
    for (i64 r = 0; r < rows; r++) {
        float* a = A + r * CHUNK;
        if (row_top[r] > top[r]) {
            if (top[r] > LOWEST) {
                const float factor = std::exp(top[r] - row_top[r]);
                multiply(O + r * Vp, factor, Vp);
                den[r] *= factor;
            }
            top[r] = row_top[r];
        }
        const vf now = splat(top[r]), none = splat(LOWEST);
        vf total = {};
        for (i64 j = span.from; j < span.to; j += W) {
            const vf s = load(a + j);
            const vf weight = s <= none ? vf{} : vexp(s - now);
            store(a + j, weight);
            total += weight;
        }
        den[r] += sum(total);
    }
    gemm(rows, Vp, span.to - span.from, A + span.from, CHUNK, 1, tile.V + span.from * Vp, Vp, O, Vp, ADD);
}

}  // namespace lz

using namespace lz;

// Tensors: WindowInputs | out den top S z m.
static int64_t window_forward(const Tensor* tensors, const i64* sizes, const double* scalars) {
    const Window w(tensors, sizes, scalars);
    const WindowInputs& x = w.x;
    const WindowSizes& n = w.n;
    const Tensor* out = tensors + 15;
    const Dims& d = w.far.d;
    const Sequences all = sequences(n.B, n.T, Tensor{}, n.Hk, n.threads, 4 * CHUNK);
    Starts starts;
    if (!find_starts(all, w.far, x.S, x.z, x.m, n.Hk, n.threads, starts)) return 1;
    auto body = [&](i64 task) {
        const Part& p = all.parts[task / n.Hk];
        const i64 head = task % n.Hk, h0 = head * w.G, most_rows = CHUNK * w.G;
        Gate gate(w.far.mode, w.far.gate, d);
        Tiles tiles(d, false);
        std::optional<Halves> halves;
        if (Halves::usable(w.far)) halves.emplace(w.far);
        const i64 ldo = halves ? halves->Vx : w.Vp;
        KeyTiles keys(w, p.b, head, false);
        float *state = arena().take(d.state()), *S = state, *z = state + d.F * d.Vp;
        float *Q = arena().take(most_rows * w.Dp), *A = arena().take(most_rows * CHUNK);
        float *O = arena().take(most_rows * w.Vp), *den = arena().take(most_rows), *top = arena().take(most_rows);
        float *O_far = arena().take(most_rows * ldo), *den_far = arena().take(most_rows);
        float* row_top = arena().take(most_rows);
        std::memcpy(state, starts.state(p.index, head), d.state() * sizeof(float));
        if (halves) halves->set_state(state);
        float m = starts.m[task];
        for (i64 t = p.t0; t < p.t1;) {
            const bool far = t >= w.first;
            const i64 c = far ? gate.open(p.b, t - w.first, p.t1 - t, head, m) : w.exact_only(t, p.t1);
            const i64 rows = c * w.G;
            if (far && halves) {
                halves->run(gate, p.b, t, c, head, O_far, den_far);
            } else if (far) {
                tiles.read_queries(w.far, gate, p.b, t, c, head);
                tiles.read_keys(w.far, gate, p.b, t - w.first, c, head, true);
                gate.begin(S, z);
                chunk_read(tiles, c, S, z, A, O_far, den_far);
                chunk_fold(tiles, c, S, z);
                gate.finish(S, z);
            }
            read_tile(x.q, p.b, t, c, h0, w.G, n.D, Q, w.Dp, w.scale);
            std::memset(O, 0, rows * w.Vp * sizeof(float));
            for (i64 r = 0; r < rows; r++) den[r] = 0, top[r] = LOWEST;
            for (const KeyTile* tile : keys.seen(t, c))
                for (i64 i = 0; i < c; i += SUB) {
                    const i64 stop = least(i + SUB, c), r = i * w.G;
                    const Span span = keys.columns(*tile, t + i, t + stop);
                    if (span.from == span.to) continue;
                    keys.scores(*tile, span, Q + r * w.Dp, t + i, t + stop, A, row_top);
                    add_keys(*tile, span, (stop - i) * w.G, w.Vp, A, row_top, O + r * w.Vp, den + r, top + r);
                }
            for (i64 r = 0; r < rows; r++) {
                const i64 at = t + r / w.G, h = h0 + r % w.G;
                float near = x.gamma.value(h), old = far ? 1.0f : 0.0f, highest = top[r];
                if (far && w.far.mode == LOGS) {
                    const float far_scale = x.log_q.value(p.b, at, h) + gate.top[r / w.G];
                    highest = most(top[r], far_scale);
                    near *= std::exp(top[r] - highest);
                    old = std::exp(far_scale - highest);
                }
                float *o = O + r * w.Vp, total = near * den[r];
                multiply(o, near, w.Vp);
                if (far) {
                    axpy(old, O_far + r * ldo, o, w.Vp);
                    total += old * den_far[r];
                }
                multiply(o, 1 / most(w.eps, total), w.Vp);
                out[1].set(total, p.b, at, h);
                out[2].set(highest, p.b, at, h);
            }
            write_tile(O, w.Vp, out[0], p.b, t, c, h0, w.G, n.Dv);
            t += c;
        }
        if (p.last) {
            if (halves) halves->get_state(state);
            write_state(state, out[3], out[4], p.n, head, d);
            out[5].set(m, p.n, head);
        }
    };
    return parallel(static_cast<i64>(all.parts.size()) * n.Hk, n.threads, body) ? 0 : 1;
}

LZ_OP(lz_window_forward, window_forward)
