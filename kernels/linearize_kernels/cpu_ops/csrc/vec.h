// Vectors of W floats, and what is done with them.
#pragma once
#include <cstdint>
#include <cstring>

namespace lz {

// Vectors of W floats, by the compilers' own vector types: the same source for every instruction set.
#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vf_any __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
inline vf splat(float x) { return x - vf{}; }  // x - 0, since -0 + 0 would be 0
inline vf vmax(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf x) {
    float s[W];
    std::memcpy(s, &x, sizeof s);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] += s[i + n];
    return s[0];
}

inline float largest(vf x) {
    float s[W];
    std::memcpy(s, &x, sizeof s);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] = s[i + n] > s[i] ? s[i + n] : s[i];
    return s[0];
}

// 0 below -87, NaN where x is NaN. exp(x) = 2^n exp(r), |r| <= ln(2) / 2, by the Taylor series up to r^7: what is left
// out is below 1e-8.
inline vf vexp(vf x) {
    const vf low = splat(-87.0f), high = splat(88.0f);
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf y = x < low ? low : x;
    y = y > high ? high : y;
    const vf n = (y * 1.44269504f + magic) - magic;
    const vf r = (y - n * 0.693145751953125f) - n * 1.42860682e-6f;
    vf p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    vf power;
    std::memcpy(&power, &exponent, sizeof power);
    return x < low ? vf{} : p * power;
}

inline vf vtanh(vf x) {
    const vf e = vexp((x > 0 ? x : -x) * -2.0f);
    const vf size = (1.0f - e) / (1.0f + e);
    const vf x2 = x * x;  // near 0 the difference 1 - e loses digits
    const vf series = x * (1.0f + x2 * (-1.0f / 3 + x2 * (2.0f / 15 + x2 * (-17.0f / 315 + x2 * (62.0f / 2835)))));
    return x2 < 0.0625f ? series : (x > 0 ? size : -size);
}

}  // namespace lz
