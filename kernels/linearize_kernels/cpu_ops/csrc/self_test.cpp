// A library that was compiled for another processor ends here, in a process of its own, and not in the user's.
#include "common.h"

// 0 if products and exp come out right.
LZ_EXPORT int64_t lz_self_test() {
    using namespace lz;
    constexpr i64 M = 13, N = 48, K = 7;
    arena().reset();
    float *A = arena().take(M * K), *B = arena().take(K * N), *C = arena().take(M * N);
    for (i64 i = 0; i < M * K; i++) A[i] = static_cast<float>(i % 5 - 2);
    for (i64 i = 0; i < K * N; i++) B[i] = static_cast<float>(i % 7 - 3);
    gemm(M, N, K, A, K, 1, B, N, C, N, SET);
    for (i64 i = 0; i < M; i++)
        for (i64 j = 0; j < N; j++) {
            float expected = 0;
            for (i64 k = 0; k < K; k++) expected += A[i * K + k] * B[k * N + j];
            if (expected != C[i * N + j]) return 1;
        }
    const float e = largest(vexp(splat(-1.0f))), tiny = largest(vexp(splat(-1e30f)));
    return std::fabs(e - 0.36787944f) < 1e-6f && tiny == 0 ? 0 : 2;
}
