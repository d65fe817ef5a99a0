#include "common.h"

namespace lz {

static inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

void read_row(const char* from, i64 dtype, float* to, i64 n, float scale) {
    if (dtype == F32) {
        const float* x = reinterpret_cast<const float*>(from);
        for (i64 i = 0; i < n; i++) to[i] = x[i] * scale;
    } else if (dtype == BF16) {
        const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
        for (i64 i = 0; i < n; i++) to[i] = from_bits(static_cast<uint32_t>(x[i]) << 16) * scale;
    } else {
#if defined(__FLT16_MANT_DIG__)
        const _Float16* x = reinterpret_cast<const _Float16*>(from);
        for (i64 i = 0; i < n; i++) to[i] = static_cast<float>(x[i]) * scale;
#endif
    }
}

void write_row(const float* from, char* to, i64 dtype, i64 n) {
    if (dtype == F32) {
        std::memcpy(to, from, n * sizeof(float));
    } else if (dtype == BF16) {
        uint16_t* x = reinterpret_cast<uint16_t*>(to);
        for (i64 i = 0; i < n; i++) x[i] = to_bf16(from[i]);
    } else {
#if defined(__FLT16_MANT_DIG__)
        _Float16* x = reinterpret_cast<_Float16*>(to);
        for (i64 i = 0; i < n; i++) x[i] = static_cast<_Float16>(from[i]);
#endif
    }
}

float Tensor::value(i64 a, i64 b, i64 c) const {
    float x = 0;
    read_row(at(a, b, c), dtype, &x, 1);
    return x;
}

void Tensor::set(float x, i64 a, i64 b, i64 c) const { write_row(&x, at(a, b, c), dtype, 1); }

void read_tile(const Tensor& x, i64 b, i64 t0, i64 c, i64 h0, i64 g, i64 n, float* to, i64 ld, float scale) {
    for (i64 t = 0; t < c; t++)
        for (i64 h = 0; h < g; h++, to += ld) {
            read_row(x.at(b, t0 + t, h0 + h), x.dtype, to, n, scale);
            for (i64 i = n; i < ld; i++) to[i] = 0;
        }
}

void write_tile(const float* from, i64 ld, const Tensor& x, i64 b, i64 t0, i64 c, i64 h0, i64 g, i64 n) {
    for (i64 t = 0; t < c; t++)
        for (i64 h = 0; h < g; h++, from += ld) write_row(from, x.at(b, t0 + t, h0 + h), x.dtype, n);
}

typedef float v4 __attribute__((vector_size(16)));
typedef float v4_any __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t i4 __attribute__((vector_size(16)));

static inline v4 mix(v4 a, v4 b, i4 order) {
#if defined(__clang__)
    v4 out;
    for (int i = 0; i < 4; i++) out[i] = order[i] < 4 ? a[order[i]] : b[order[i] - 4];
    return out;
#else
    return __builtin_shuffle(a, b, order);
#endif
}

void transpose(const float* from, i64 rows, i64 cols, i64 ldf, float* to, i64 ldt) {
    i64 r = 0;
    for (; r + 4 <= rows; r += 4) {
        i64 c = 0;
        for (; c + 4 <= cols; c += 4) {
            v4 x[4];
            for (int i = 0; i < 4; i++) x[i] = *reinterpret_cast<const v4_any*>(from + (r + i) * ldf + c);
            const v4 a = mix(x[0], x[1], i4{0, 4, 1, 5}), b = mix(x[0], x[1], i4{2, 6, 3, 7});
            const v4 d = mix(x[2], x[3], i4{0, 4, 1, 5}), e = mix(x[2], x[3], i4{2, 6, 3, 7});
            x[0] = mix(a, d, i4{0, 1, 4, 5});
            x[1] = mix(a, d, i4{2, 3, 6, 7});
            x[2] = mix(b, e, i4{0, 1, 4, 5});
            x[3] = mix(b, e, i4{2, 3, 6, 7});
            for (int i = 0; i < 4; i++) *reinterpret_cast<v4_any*>(to + (c + i) * ldt + r) = x[i];
        }
        for (; c < cols; c++)
            for (i64 i = r; i < r + 4; i++) to[c * ldt + i] = from[i * ldf + c];
    }
    for (i64 c = 0; c < cols; c++) {
        for (i64 i = r; i < rows; i++) to[c * ldt + i] = from[i * ldf + c];
        for (i64 i = rows; i < ldt; i++) to[c * ldt + i] = 0;
    }
}

float dot(const float* a, const float* b, i64 n) {
    vf s = {};
    for (i64 i = 0; i < n; i += W) s += load(a + i) * load(b + i);
    return sum(s);
}

void axpy(float a, const float* x, float* y, i64 n) {
    for (i64 i = 0; i < n; i++) y[i] += a * x[i];
}

void multiply(float* x, float a, i64 n) {
    for (i64 i = 0; i < n; i++) x[i] *= a;
}

float* Arena::take(i64 floats) {
    const i64 bytes = most<i64>((floats * 4 + 63) / 64 * 64, 64);
#if defined(LZ_CHECKED)  // every piece on its own, and full of NaN, so that sanitizers and tests see wrong reads
    float* piece = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (!piece) throw std::bad_alloc();
    for (i64 i = 0; i < bytes / 4; i++) piece[i] = std::nanf("");
    blocks_.push_back({reinterpret_cast<char*>(piece), bytes});
    return piece;
#else
    while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].size) block_++, used_ = 0;
    if (block_ == blocks_.size()) {
        const i64 size = most<i64>(bytes, i64(1) << 20);
        char* data = static_cast<char*>(std::aligned_alloc(64, size));
        if (!data) throw std::bad_alloc();
        blocks_.push_back({data, size});
        used_ = 0;
    }
    float* piece = reinterpret_cast<float*>(blocks_[block_].data + used_);
    used_ += bytes;
    return piece;
#endif
}

void Arena::reset() {
#if defined(LZ_CHECKED)
    for (Block& b : blocks_) std::free(b.data);
    blocks_.clear();
#else
    // One block from now on, so that a call with larger tiles doesn't leave the smaller blocks unused behind it.
    if (blocks_.size() > 1) {
        i64 size = 0;
        for (Block& b : blocks_) size += b.size, std::free(b.data);
        blocks_.clear();
        char* data = static_cast<char*>(std::aligned_alloc(64, size));
        if (!data) throw std::bad_alloc();
        blocks_.push_back({data, size});
    }
#endif
    block_ = 0;
    used_ = 0;
}

Arena::~Arena() {
    for (Block& b : blocks_) std::free(b.data);
}

Arena& arena() {
    static thread_local Arena mine;
    return mine;
}

// libgomp's entry point, which LLVM's and Intel's OpenMP runtimes offer, too: Python hands over the address it has in
// the runtime that PyTorch has loaded, so no second one with threads of its own ever comes in.
typedef void (*Team)(void (*)(void*), void*, unsigned, unsigned);
static Team team = nullptr;

namespace {
struct Work {
    std::atomic<i64> next{0};
    std::atomic<bool> failed{false};
    i64 n;
    void (*body)(void*, i64);
    void* context;
};
}  // namespace

static void work_off(void* p) {
    Work& work = *static_cast<Work*>(p);
    try {
        for (i64 i; (i = work.next.fetch_add(1)) < work.n;) work.body(work.context, i);
    } catch (const std::bad_alloc&) {
        work.failed = true;
    }
}

bool run_parallel(i64 n, i64 threads, void (*body)(void*, i64), void* context) {
    Work work;
    work.n = n;
    work.body = body;
    work.context = context;
    threads = least(threads, n);
    if (team && threads > 1)
        team(work_off, &work, static_cast<unsigned>(threads), 0);
    else
        work_off(&work);
    return !work.failed;
}

}  // namespace lz

LZ_EXPORT void lz_set_team(void* address) { lz::team = reinterpret_cast<lz::Team>(address); }

// 1 if float16 can be read and written.
LZ_EXPORT int64_t lz_float16() {
#if defined(__FLT16_MANT_DIG__)
    return 1;
#else
    return 0;
#endif
}
