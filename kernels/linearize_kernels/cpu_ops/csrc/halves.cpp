// Chunks of linear attention in bfloat16, by the matrix tiles of Intel's AMX.
//
// Products of bfloat16 are exact there, and sums are float32 ones. What isn't bfloat16 to begin with (scores, states,
// values times a gate's factor) goes in as two of them, whose sum holds 15 bits or more: results are rounded once, at
// the end, as those of float32 products are. A tile multiplies pairs: its 32-bit words hold numbers 2i and 2i + 1 of a
// row of features, and i and i + 16 of 32 tokens, whichever order is the cheaper to make.
#include "sums.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace lz {

namespace {

typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint32_t vu_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(32), aligned(2), may_alias));

struct Config {
    uint8_t palette = 1, row = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A (16, k) of `lda` words a row, B (k, .) likewise.
struct Term { const float* A; i64 lda; const float* B; i64 ldb, k; };

// Registers are named in the instructions: 0 .. 4 hold C, 5 holds A, and 6 and 7 B by turns.
#define LZ_EACH(DO)                   \
    do {                              \
        DO(0, 6);                     \
        if (width > 1) { DO(1, 7); }  \
        if (width > 2) { DO(2, 6); }  \
        if (width > 3) { DO(3, 7); }  \
        if (width > 4) { DO(4, 6); }  \
    } while (0)
#define LZ_ZERO(i, other) _tile_zero(i)
#define LZ_LOAD(i, other) _tile_loadd(i, to + i * PAD, ldc * 4)
#define LZ_STORE(i, other) _tile_stored(i, to + i * PAD, ldc * 4)
#define LZ_MULTIPLY(i, other)                   \
    _tile_loadd(other, B + i * PAD, x.ldb * 4); \
    _tile_dpbf16ps(i, 5, other)

// C (16, n) = the sum of all A B, or += it.
void strip(std::initializer_list<Term> terms, i64 n, float* C, i64 ldc, Store how) {
    __asm__ volatile("" ::: "memory");  // GCC's tile loads don't say that they read memory, nor what
    for (i64 j = 0; j < n; j += 5 * PAD) {
        const i64 width = (n - j) / PAD;
        float* to = C + j;
        if (how == SET) LZ_EACH(LZ_ZERO);
        else LZ_EACH(LZ_LOAD);
        for (const Term& x : terms) {
            const float *A = x.A, *B = x.B + j;
            for (i64 k = 0; k < x.k; k += PAD, A += PAD, B += PAD * x.ldb) {
                _tile_loadd(5, A, x.lda * 4);
                LZ_EACH(LZ_MULTIPLY);
            }
        }
        LZ_EACH(LZ_STORE);
    }
    __asm__ volatile("" ::: "memory");
}

template <class To, class From> To bits(From x) {
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

void put(float* to, vu x) { *reinterpret_cast<vu_any*>(to) = x; }

// W words of a pair of numbers each, and of what their first 8 bits leave out.
void split(vf a, vf b, float* high, float* low) {
    const vu x = bits<vu>(a), y = bits<vu>(b), mask = vu{} + 0xffff0000u;
    put(high, x >> 16 | (y & mask));
    const vu rest_x = bits<vu>(a - bits<vf>(x & mask)) + 0x8000u, rest_y = bits<vu>(b - bits<vf>(y & mask)) + 0x8000u;
    put(low, rest_x >> 16 | (rest_y & mask));
}

vu widened(const float* row, i64 n) {
    return __builtin_convertvector(reinterpret_cast<const vh_any*>(row)[n / W], vu);
}

// to (CHUNK / 2, n): words of tokens i and i + 16 of each HALVES, from rows of n / 2 words.
void pair_tokens(const float* from, i64 n, float* to) {
    for (i64 i = 0; i < CHUNK / 2; i++, to += n) {
        const float *a = from + (i / 16 * HALVES + i % 16) * n / 2, *b = a + 16 * n / 2;
        for (i64 j = 0; j < n; j += W) put(to + j, widened(a, j) | widened(b, j) << 16);
    }
}

// As read_tile, in words. The next chunk's rows are far apart in memory, so they are asked for now.
void read_words(const Tensor& x, i64 b, i64 t0, i64 c, i64 h0, i64 g, i64 n, float* to, i64 ld) {
    for (i64 t = 0; t < c; t++)
        for (i64 h = 0; h < g; h++, to += ld) {
            for (i64 i = 0; i < n; i += 32) __builtin_prefetch(x.at(b, t0 + c + t, h0 + h, i));
            std::memset(to + n / 2, 0, (ld - n / 2) * 4);
            std::memcpy(to, x.at(b, t0 + t, h0 + h), n * 2);
        }
}

}  // namespace

bool Halves::usable(const Source& s) {
    // The process has to ask Linux (ARCH_REQ_XCOMP_PERM) for the tiles' registers (XFEATURE_XTILEDATA).
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed && s.mode != DECAYS && s.q.dtype == BF16 && s.k.dtype == BF16 && s.v.dtype == BF16;
}

Halves::Halves(const Source& s) : s(s) {
    static const Config config;
    _tile_loadconfig(&config);
}

Halves::~Halves() { _tile_release(); }

void Halves::set_state(const float* state) {
    std::memset(S, 0, Fx * Vx * sizeof(float));
    for (i64 f = 0; f < d.F; f++) {
        std::memcpy(S + f * Vx, state + f * d.Vp, d.Dv * sizeof(float));
        S[f * Vx + d.Dv] = state[d.F * d.Vp + f];
    }
}

void Halves::get_state(float* state) const {
    for (i64 f = 0; f < d.F; f++) {
        std::memcpy(state + f * d.Vp, S + f * Vx, d.Dv * sizeof(float));
        state[d.F * d.Vp + f] = S[f * Vx + d.Dv];
    }
}

void Halves::read(const Gate& gate, i64 b, i64 t, i64 c, i64 head) {
    read_words(s.q, b, t, c, head * d.G, d.G, d.F, Q, Fx / 2);
    read_words(s.k, b, t - s.shift, c, head, 1, d.F, K, Fx / 2);
    read_words(s.v, b, t - s.shift, c, head, 1, d.Dv, V, Vx / 2);
    std::memset(K + c * Fx / 2, 0, (CHUNK - c) * Fx / 2 * sizeof(float));
    std::memset(V + c * Vx / 2, 0, (CHUNK - c) * Vx / 2 * sizeof(float));
    const uint16_t one = 0x3f80;
    for (i64 j = 0; j < c; j++) std::memcpy(reinterpret_cast<char*>(V + j * Vx / 2) + d.Dv * 2, &one, 2);
    transpose(K, CHUNK, Fx / 2, Fx / 2, Kt, CHUNK);
    pair_tokens(K, Fx, K_pairs);
    transpose(K_pairs, CHUNK / 2, Fx, Fx, K_rows, CHUNK / 2);
    pair_tokens(V, Vx, V_pairs);
    for (i64 i = 0; s.mode != NONE && i < CHUNK / 2; i++) {
        const i64 j = i / 16 * HALVES + i % 16;
        for (i64 n = 0; n < Vx; n += W) {
            const vu x = bits<vu>(load(V_pairs + i * Vx + n));
            split(bits<vf>(x << 16) * gate.k[j], bits<vf>(x & 0xffff0000u) * gate.k[j + 16], V_high + i * Vx + n,
                  V_low + i * Vx + n);
        }
    }
}

void Halves::run(const Gate& gate, i64 b, i64 t, i64 c, i64 head, float* O, float* den) {
    read(gate, b, t, c, head);
    if (gate.first != 1) multiply(S, gate.first, Fx * Vx);
    for (i64 f = 0; f < Fx / 2; f++)
        for (i64 n = f * Vx; n < (f + 1) * Vx; n += W)
            split(load(S + f * Vx + n), load(S + f * Vx + Vx + n), S_high + n, S_low + n);

    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (i64 r0 = 0; r0 < c * d.G; r0 += PAD) {
        const i64 width = (least(c - 1, (r0 + PAD - 1) / d.G) / HALVES + 1) * HALVES;
        const float* q = Q + r0 * Fx / 2;
        strip({{q, Fx / 2, Kt, CHUNK, Fx / 2}}, width, A, CHUNK, SET);
        for (i64 r = 0; r < PAD; r++)
            for (i64 j = 0; j < width; j += HALVES) {
                const int32_t at = static_cast<int32_t>((r0 + r) / d.G - j);
                const float* a = A + r * CHUNK + j;
                const i64 to = (r * CHUNK + j) / 2;
                split(lanes <= at ? load(a) * load(gate.k + j) : vf{},
                      lanes + 16 <= at ? load(a + 16) * load(gate.k + j + 16) : vf{}, A_high + to, A_low + to);
            }
        strip({{q, Fx / 2, S_high, Vx, Fx / 2},
               {q, Fx / 2, S_low, Vx, Fx / 2},
               {A_high, CHUNK / 2, V_pairs, Vx, width / 2},
               {A_low, CHUNK / 2, V_pairs, Vx, width / 2}},
              Vx, O + r0 * Vx, Vx, SET);
    }
    for (i64 r = 0; r < c * d.G; r++) {
        const float factor = s.scale * gate.q[r / d.G];
        if (factor != 1) multiply(O + r * Vx, factor, Vx);
        den[r] = O[r * Vx + d.Dv];
    }

    const i64 k = (c + HALVES - 1) / HALVES * PAD;
    for (i64 f = 0; f < Fx; f += PAD) {
        const float* keys = K_rows + f * CHUNK / 2;
        if (s.mode == NONE) strip({{keys, CHUNK / 2, V_pairs, Vx, k}}, Vx, S + f * Vx, Vx, ADD);
        else strip({{keys, CHUNK / 2, V_high, Vx, k}, {keys, CHUNK / 2, V_low, Vx, k}}, Vx, S + f * Vx, Vx, ADD);
    }
    if (gate.last != 1) multiply(S, gate.last, Fx * Vx);
}

}  // namespace lz

#else

namespace lz {
bool Halves::usable(const Source&) { return false; }
Halves::Halves(const Source& s) : s(s) {}
Halves::~Halves() {}
void Halves::set_state(const float*) {}
void Halves::get_state(float*) const {}
void Halves::run(const Gate&, i64, i64, i64, i64, float*, float*) {}
}  // namespace lz

#endif
