// Matrix products of tiles that are in cache: no packing, registers hold a block of C over the whole of k.
#include "common.h"

namespace lz {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 6, COLS = 4;  // 24 sums, 4 vectors of B and 1 of A in 32 registers
#else
constexpr int ROWS = 6, COLS = 2;  // 12, 2 and 1 in 16
#endif

template <int R, int V>
static void block(i64 k, const float* A, i64 row_a, i64 col_a, const float* B, i64 ldb, float* C, i64 ldc, Store how) {
    vf sums[R][V] = {};
    for (i64 i = 0; i < k; i++) {
        vf b[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) b[v] = load(B + i * ldb + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vf a = splat(A[r * row_a + i * col_a]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] += a * b[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float* c = C + r * ldc + v * W;
            store(c, how == SET ? sums[r][v] : how == ADD ? load(c) + sums[r][v] : load(c) - sums[r][v]);
        }
}

typedef void (*Block)(i64, const float*, i64, i64, const float*, i64, float*, i64, Store);

template <int V> static Block block_of(i64 rows) {
    switch (rows) {
        case 1: return block<1, V>;
        case 2: return block<2, V>;
        case 3: return block<3, V>;
        case 4: return block<4, V>;
        case 5: return block<5, V>;
        default: return block<6, V>;
    }
}

void gemm(i64 m, i64 n, i64 k, const float* A, i64 row_a, i64 col_a, const float* B, i64 ldb, float* C, i64 ldc,
          Store how) {
    for (i64 j = 0; j < n;) {
        const i64 left = (n - j) / W, width = left < COLS ? left : COLS;
        for (i64 i = 0; i < m; i += ROWS) {
            const i64 rows = least<i64>(ROWS, m - i);
            const Block f = width == 1   ? block_of<1>(rows)
                            : width == 2 ? block_of<2>(rows)
                            : width == 3 ? block_of<(COLS < 3 ? COLS : 3)>(rows)
                                         : block_of<COLS>(rows);
            f(k, A + i * row_a, row_a, col_a, B + j, ldb, C + i * ldc + j, ldc, how);
        }
        j += width * W;
    }
}

}  // namespace lz
