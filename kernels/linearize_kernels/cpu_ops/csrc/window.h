// The exact part of windowed attention: scores of queries against tiles of keys, masked.
#pragma once
#include "sums.h"

namespace lz {

struct WindowSizes { i64 B, T, H, Hk, D, Dv, F, L, before, sinks, window, threads, mode; };

// q keys values valid phi_q phi_k log_q log_k sink_k sink_v sink_position gamma S z m, in this order.
struct WindowInputs {
    Tensor q, keys, values, valid, phi_q, phi_k, log_q, log_k, sink_k, sink_v, sink_position, gamma, S, z, m;
};

// One call: its tensors, sizes and options.
struct Window {
    const WindowInputs& x;
    const WindowSizes& n;
    float scale, softcap, eps;
    i64 G, Dp, Vp, first;  // query `first` is the first that reads the sums
    Source far;

    Window(const Tensor* x, const i64* sizes, const double* scalars);
    // Queries t .. stop without sums, as many as fit a chunk, or 0 where the sums begin.
    i64 exact_only(i64 t, i64 stop) const { return least(least(first, stop) - t, far.d.tokens); }
};

// Up to CHUNK keys of one head, zeros behind the last. `keys`: 0, or the sinks, which are tiles of their own.
struct KeyTile {
    bool sink;
    i64 begin, count;  // indices of keys, or of sinks
    bool all_valid;
    i64 position[CHUNK];  // of sinks
    bool valid[CHUNK];
    float *K, *Kt, *V, *Vt;  // (CHUNK, Dp), (D, CHUNK), (CHUNK, Vp), (Dv, CHUNK); K and Vt for backward passes
};

// Columns from .. to of a tile, multiples of SUB.
struct Span { i64 from, to; };

// The tiles that a chunk of queries sees, in a ring of as many as a window covers.
class KeyTiles {
  public:
    KeyTiles(const Window& w, i64 b, i64 head, bool backward);
    // All tiles that queries t0 .. t0 + c see, sinks first.
    const std::vector<KeyTile*>& seen(i64 t0, i64 c);
    // The columns of a tile that some query of t0 .. t1 sees.
    Span columns(const KeyTile& tile, i64 t0, i64 t1) const;
    // A (rows (token, head), CHUNK): scores of queries Q (., Dp) of t0 .. t1 in these columns, LOWEST where a query
    // doesn't see the key; the largest of each row.
    void scores(const KeyTile& tile, Span span, const float* Q, i64 t0, i64 t1, float* A, float* row_top) const;

  private:
    void fill(KeyTile& tile, const Tensor& k, const Tensor& v, i64 begin, i64 count);
    const Window& w_;
    i64 b_, head_;
    std::vector<KeyTile> ring_, sinks_;
    std::vector<KeyTile*> seen_;
};

}  // namespace lz
