// What every kernel here shares: tensors as Python describes them, vectors, threads and scratch memory.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "vec.h"

#define LZ_EXPORT extern "C" __attribute__((visibility("default")))

namespace lz {

using i64 = int64_t;

constexpr i64 PAD = 16;     // the columns of every tile are padded with zeros to a multiple of this
constexpr i64 CHUNK = 64;   // tokens worked on at once
constexpr i64 SUB = 16;     // blocks of tokens whose part above the diagonal isn't multiplied
constexpr float LOWEST = std::numeric_limits<float>::lowest();
inline i64 padded(i64 n) { return (n + PAD - 1) / PAD * PAD; }
template <class T> T least(T a, T b) { return b < a ? b : a; }
template <class T> T most(T a, T b) { return a < b ? b : a; }

enum Dtype : i64 { F32 = 0, BF16 = 1, F16 = 2, I64 = 3, BOOL = 4 };

// As packed by call.py: address, dtype, four strides in elements (0 for dims that aren't there).
struct Tensor {
    char* data;
    i64 dtype;
    i64 stride[4];

    explicit operator bool() const { return data != nullptr; }
    i64 size() const { return dtype == F32 ? 4 : dtype == I64 ? 8 : dtype == BOOL ? 1 : 2; }
    char* at(i64 a, i64 b = 0, i64 c = 0, i64 d = 0) const {
        return data + (a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]) * size();
    }
    float* floats(i64 a = 0, i64 b = 0, i64 c = 0) const { return reinterpret_cast<float*>(at(a, b, c)); }
    i64 integer(i64 a, i64 b = 0) const { return *reinterpret_cast<const i64*>(at(a, b)); }
    bool flag(i64 a, i64 b = 0) const { return *at(a, b) != 0; }
    float value(i64 a, i64 b = 0, i64 c = 0) const;
    void set(float x, i64 a, i64 b = 0, i64 c = 0) const;
};

// Rows of n numbers of a dtype, as float32, times `scale`.
void read_row(const char* from, i64 dtype, float* to, i64 n, float scale = 1.0f);
void write_row(const float* from, char* to, i64 dtype, i64 n);

// Tokens t0 .. t0 + c of heads h0 .. h0 + g of x (B, T, heads, n) as rows (token, head) of `ld` floats, padded with 0.
void read_tile(const Tensor& x, i64 b, i64 t0, i64 c, i64 h0, i64 g, i64 n, float* to, i64 ld, float scale = 1.0f);
void write_tile(const float* from, i64 ld, const Tensor& x, i64 b, i64 t0, i64 c, i64 h0, i64 g, i64 n);
// to (cols, ldt) = from (rows, ldf) transposed, columns rows .. ldt set to 0.
void transpose(const float* from, i64 rows, i64 cols, i64 ldf, float* to, i64 ldt);

float dot(const float* a, const float* b, i64 n);                // n a multiple of PAD
void axpy(float a, const float* x, float* y, i64 n);             // y += a x
void multiply(float* x, float a, i64 n);                         // x *= a

enum Store { SET, ADD, SUBTRACT };
// C (m, n) =, += or -= A (m, k) B (k, n), n a multiple of PAD; A has any strides, the rows of B and C are contiguous.
// Every element is one chain of fused multiply-adds over k, whatever the sizes: equal inputs give equal bits.
void gemm(i64 m, i64 n, i64 k, const float* A, i64 row_a, i64 col_a, const float* B, i64 ldb, float* C, i64 ldc,
          Store how);

// Scratch memory of a thread. It stays with the thread, so that calls don't pay for fresh pages.
class Arena {
  public:
    float* take(i64 floats);
    void reset();
    ~Arena();

  private:
    struct Block { char* data; i64 size; };
    std::vector<Block> blocks_;
    size_t block_ = 0;
    i64 used_ = 0;
};
Arena& arena();

// body(i) for i in 0 .. n, on PyTorch's own threads; false if memory ran out. Which thread takes which i is up to
// chance, so results must not depend on it.
bool run_parallel(i64 n, i64 threads, void (*body)(void*, i64), void* context);
template <class Body> bool parallel(i64 n, i64 threads, Body& body) {
    return run_parallel(n, threads, [](void* b, i64 i) { arena().reset(); (*static_cast<Body*>(b))(i); }, &body);
}

}  // namespace lz

// Exports a function of (tensors, sizes, scalars) that returns 0, or 1 if memory ran out.
#define LZ_OP(name, function)                                                                                  \
    LZ_EXPORT int64_t name(const lz::Tensor* tensors, const int64_t* sizes, const double* scalars) {           \
        try {                                                                                                  \
            return function(tensors, sizes, scalars);                                                          \
        } catch (const std::bad_alloc&) {                                                                      \
            return 1;                                                                                          \
        }                                                                                                      \
    }
