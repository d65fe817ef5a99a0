// Linear attention's causal sums, chunk by chunk. `linear_attention` is these sums; windowed attention reads them for
// the keys that have left the window.
//
// Inside a chunk every kind of decay is written into the tiles: with c_t the log decay summed from the chunk's
// second token on, q_t exp(c_t) and k_j exp(-c_j) give a product of exp(c_t - c_j) without a matrix of factors, per
// head or per feature. A chunk ends before exp(-c_j) grows past exp(60), so nothing overflows, and every term is as
// precise as its factors; where gates are that strong, chunks are short. Log scales of keys are the same thing with
// c_t = M_1 - M_t and exp(log_k_j - M_1) for the key, M the running maximum. The state is scaled by `first` when the
// chunk begins (the decay up to its first token) and by `last` when it ends.
#pragma once
#include <functional>
#include <memory>

#include "common.h"

namespace lz {

constexpr float SPREAD = 60.0f;
constexpr i64 GROUP = 16;  // chunks whose states are held at once by a backward pass

enum Mode : i64 { NONE = 0, LOGS = 1, DECAY = 2, DECAYS = 3 };

struct Dims {
    i64 F, Dv, G, Fp, Vp;
    i64 tokens;  // of a chunk at most: fewer where many query heads share a key, so that tiles stay in cache
    Dims(i64 F, i64 Dv, i64 G)
        : F(F), Dv(Dv), G(G), Fp(padded(F)), Vp(padded(Dv)), tokens(G <= 8 ? CHUNK : G <= 16 ? CHUNK / 2 : SUB) {}
    i64 state() const { return F * Vp + Fp; }  // floats of S (F, Vp), then z (Fp)
};

// Factors of one chunk.
struct Gate {
    Mode mode;
    Tensor x;  // log_k or log_decay
    Dims d;
    float q[CHUNK], k[CHUNK];        // by token (all modes but DECAYS)
    float top[CHUNK];                // M_t (LOGS)
    float first, last;               // of the state
    float *qs, *ks, *firsts, *lasts;  // by token and feature, by feature (DECAYS)

    Gate(Mode mode, const Tensor& x, Dims d);
    // The chunk that begins at token t of row b and has at most `room` tokens: its length. m: the running maximum.
    i64 open(i64 b, i64 t, i64 room, i64 head, float& m);
    void scale_q(float* tile, i64 c, i64 G) const;  // rows (token, one of G heads)
    void scale_k(float* tile, i64 c) const;         // rows (token)
    void begin(float* S, float* z) const;           // S, z times `first`
    void finish(float* S, float* z) const;          // S, z times `last`
    float first_of(i64 f) const { return mode == DECAYS ? firsts[f] : first; }
    float last_of(i64 f) const { return mode == DECAYS ? lasts[f] : last; }
};

// The tensors of a head's sums. Key j stands at token j of k and gate, and at token j of v; query t is read together
// with key t - shift.
struct Source {
    Dims d;
    Mode mode;
    Tensor q, k, v, gate;
    i64 shift;
    float scale;
    i64 key(i64 t) const { return most<i64>(t - shift, 0); }
};

// Tiles of a chunk.
struct Tiles {
    Dims d;
    float *Q, *K, *Kt, *V, *Vt;
    Tiles(const Dims& d, bool backward);
    // As scaled by the gate.
    void read_keys(const Source& s, const Gate& gate, i64 b, i64 t, i64 c, i64 head, bool transposed);
    void read_queries(const Source& s, const Gate& gate, i64 b, i64 t, i64 c, i64 head);
};

// A (c G, CHUNK) = the part of Q Kt on and below the diagonal, 0 above it within blocks of SUB; Kt (n, CHUNK).
void causal_scores(const float* Q, i64 n, i64 ldq, const float* Kt, i64 c, i64 G, float* A);
// O (c G, n) += A K, with A as above.
void causal_apply(const float* A, const float* K, i64 n, i64 c, i64 G, float* O);
// O (c, n) += A^T Q.
void causal_apply_t(const float* A, const float* Q, i64 n, i64 c, i64 G, float* O);

// O (c G, Vp) and den (c G), which may be null; A is scratch (CHUNK G, CHUNK).
void chunk_read(const Tiles& x, i64 c, const float* S, const float* z, float* A, float* O, float* den);
// S, z += the chunk's keys.
void chunk_fold(const Tiles& x, i64 c, float* S, float* z);

// Chunks of bfloat16 tensors on processors that multiply matrices of them: chunk_read and chunk_fold, from tensors.
constexpr i64 HALVES = 32;  // bfloat16 numbers in a row of such a matrix
struct Halves {
    const Source& s;
    Dims d = s.d;
    i64 Fx = (d.F + HALVES - 1) / HALVES * HALVES;
    i64 Vx = padded(d.Dv + 1);  // behind the values comes a column of ones, whose sums are z and den
    float *S = arena().take(Fx * Vx), *S_high = words(Fx, Vx), *S_low = words(Fx, Vx);
    float *Q = words(CHUNK * d.G, Fx), *K = words(CHUNK, Fx), *Kt = words(CHUNK, Fx), *V = words(CHUNK, Vx);
    float *K_pairs = words(CHUNK, Fx), *K_rows = words(CHUNK, Fx), *V_pairs = words(CHUNK, Vx);
    float *V_high = words(CHUNK, Vx), *V_low = words(CHUNK, Vx);
    float *A = arena().take(PAD * CHUNK), *A_high = words(PAD, CHUNK), *A_low = words(PAD, CHUNK);

    static bool usable(const Source& s);
    static float* words(i64 rows, i64 n) { return arena().take(rows * n / 2); }
    explicit Halves(const Source& s);
    ~Halves();
    void set_state(const float* state);
    void get_state(float* state) const;
    void read(const Gate& gate, i64 b, i64 t, i64 c, i64 head);
    // O (c G, Vx) and den (c G); O has room for a multiple of PAD rows. The state moves past the chunk.
    void run(const Gate& gate, i64 b, i64 t, i64 c, i64 head, float* O, float* den);
};

struct ChunkGrads {
    float *A, *X;                 // scratch (CHUNK G, CHUNK)
    float *S_t, *dS_t;            // scratch (Dv, Fp)
    float *dQ, *dK, *dV;          // results, of the scaled tiles; without dV, which may be null, A isn't needed
    ChunkGrads(const Dims& d);
    // dN (c G, Vp), dD (c G): gradients of O and den. dS, dz: of the state after the chunk's keys, and become those
    // of the state before.
    void run(const Tiles& x, i64 c, const float* S, const float* z, const float* dN, const float* dD, float* dS,
             float* dz);
};

void read_state(const Tensor& S, const Tensor& z, i64 n, i64 head, const Dims& d, float* to);
void write_state(const float* from, const Tensor& S, const Tensor& z, i64 n, i64 head, const Dims& d);

// A part of a sequence: tokens t0 .. t1 of row b, sequence n, the `index`th of all parts.
struct Part { i64 n, b, t0, t1, index; bool first, last; };
// Sequences cut so that `heads` of them keep all threads busy; not at all where there are enough anyway.
struct Sequences {
    std::vector<Part> parts;
    std::vector<i64> begin;  // of sequence n in `parts`; n + 1 entries
    i64 count() const { return static_cast<i64>(begin.size()) - 1; }
    bool cut() const { return static_cast<i64>(parts.size()) > count(); }
};
Sequences sequences(i64 N, i64 T, const Tensor& cu, i64 heads, i64 threads, i64 shortest);

// The state before every (part, head), and m there: `state` floats each. Works on all parts at once where sequences
// are cut; where they aren't, these are the initial states.
struct Starts {
    std::unique_ptr<float[]> states;
    std::vector<float> m;
    const float* state(i64 part, i64 head) const { return &states[(part * heads + head) * floats]; }
    i64 heads, floats;
};
bool find_starts(const Sequences& all, const Source& s, const Tensor& S, const Tensor& z, const Tensor& m, i64 heads,
                 i64 threads, Starts& out);

// Reads dN (c G, Vp) and dD (c G), the gradients of the sums' numerator and denominator, of queries t .. t + c:
// (gate of their chunk, row, t, c, head, dN, dD).
using RowGrads = std::function<void(const Gate&, i64, i64, i64, i64, float*, float*)>;
// From dN = the gradient of out = num / max(den, eps) to that of num, in place, and of den.
void ratio_grads(const Tensor& out, const Tensor& den, float eps, const Dims& d, i64 b, i64 t, i64 c, i64 head,
                 float* dN, float* dD);
// The gradient of the state after every (part, head), from the last parts' dS and dz, in the order of Starts.
bool find_ends(const Sequences& all, const Source& s, const Starts& starts, const Tensor& dS, const Tensor& dz,
               const RowGrads& rows, i64 heads, i64 threads, std::unique_ptr<float[]>& ends);

// Adds the keys of tokens t0 .. t1 to the state; `decay` (Fp), if not null, is multiplied by the decay in between.
void walk(const Source& s, i64 b, i64 t0, i64 t1, i64 head, float& m, float* state, float* decay);

// The gradient of log decays from `sums` (float32, shaped like them), what every token adds to the gradient of the
// decays summed up to it. A decay at token t scales every sum from t on, so its gradient is that of the initial
// state's own scale, S . dS + z . dz, minus what came before t. z and dz may be absent.
struct DecayGrads {
    Tensor S, z, dS, dz, sums, to;
    bool run(const Sequences& all, const Dims& d, Mode mode, i64 heads, i64 threads) const;
};

// Takes a state (S, then z) from before the chunk of tokens t .. t + c, whose gate is open, to after it.
using Advance = std::function<void(const Gate&, i64 t, i64 c, float*)>;
Advance fold_keys(const Source& s, i64 b, i64 head);

// The chunks of a part, last first, with the state before each: a backward pass asks for them one by one. Holds the
// states of about sqrt(chunks), recomputes the others.
class Reverse {
  public:
    struct Chunk { i64 t, c; float m; };
    Reverse(Advance advance, Gate& gate, i64 b, i64 t0, i64 t1, i64 head, float m, const float* state);
    bool next(Chunk& chunk, const float*& state);

  private:
    void move(const Chunk& chunk, float* state);
    Advance advance_;
    Gate& gate_;
    i64 b_, head_, floats_, group_, at_, held_group_;
    std::vector<Chunk> chunks_;
    std::vector<float> anchors_;
    float* held_;
};

}  // namespace lz
