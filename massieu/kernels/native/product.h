// Matrix products on small blocks that stay in registers: C (+)= A B, with nothing packed.
#pragma once
#include "vectors.h"

namespace massieu::MASSIEU_BUILD {

enum class Order { BY_ROW, BY_COLUMN };  // A(r, k) = a[r * stride + k], or a[k * stride + r]

// Number of rows for a number of vectors of columns, so that sums and operands fill the registers and no more.
constexpr int rows_with(int vectors) {
    constexpr bool many = MASSIEU_VECTOR_BYTES == 64;  // 32 registers, else 16
    return vectors >= 4   ? (many ? 6 : 2)
           : vectors == 3 ? (many ? 8 : 4)
           : vectors == 2 ? (many ? 12 : 6)
                          : (many ? 16 : 8);
}
// The widest block of columns that is still efficient.
constexpr int64_t WIDEST = MASSIEU_VECTOR_BYTES == 64 ? 4 : 3;
// Depth of a product that is done in one go: its part of B stays in the first cache.
constexpr int64_t DEEPEST = 256;

template <class Real>
struct Operands {
    const Real* a;
    int64_t a_stride;
    const Real* b;
    int64_t b_stride;
    Real* c;
    int64_t c_stride;
};

template <class Real, Order ORDER, int ROWS, int VECTORS>
inline void block(const Operands<Real>& x, int64_t depth, bool add) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    Vector<Real> sum[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v] = add ? load(x.c + r * x.c_stride + v * L) : Vector<Real>{};
    const Real *a[ROWS], *b = x.b;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) a[r] = ORDER == Order::BY_ROW ? x.a + r * x.a_stride : x.a + r;
    for (int64_t k = 0; k < depth; k++) {
        Vector<Real> right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) right[v] = load(b + v * L);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const Real left = ORDER == Order::BY_ROW ? a[r][k] : a[0][k * x.a_stride + r];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] += left * right[v];
        }
        b += x.b_stride;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(x.c + r * x.c_stride + v * L, sum[r][v]);
}

template <class Real, Order ORDER, int ROWS, int VECTORS>
void remaining_rows(int64_t rows, const Operands<Real>& x, int64_t depth, bool add) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            block<Real, ORDER, ROWS, VECTORS>(x, depth, add);
        else
            remaining_rows<Real, ORDER, ROWS - 1, VECTORS>(rows, x, depth, add);
    }
}

template <class Real, Order ORDER, int VECTORS>
void columns(int64_t rows, Operands<Real> x, int64_t depth, bool add) {
    constexpr int ROWS = rows_with(VECTORS);
    const int64_t a_step = ORDER == Order::BY_ROW ? ROWS * x.a_stride : ROWS;
    for (; rows >= ROWS; rows -= ROWS) {
        block<Real, ORDER, ROWS, VECTORS>(x, depth, add);
        x.a += a_step;
        x.c += ROWS * x.c_stride;
    }
    remaining_rows<Real, ORDER, ROWS - 1, VECTORS>(rows, x, depth, add);
}

// C (+)= A B with `rows` rows of A, `vectors` vectors of columns of B and C.
template <class Real, Order ORDER>
void product(int64_t rows, int64_t vectors, int64_t depth, Operands<Real> x, bool add) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    for (int64_t start = 0; start == 0 || start < depth; start += DEEPEST) {
        const int64_t deep = smaller(DEEPEST, depth - start);
        Operands<Real> part = x;
        part.a += ORDER == Order::BY_ROW ? start : start * x.a_stride;
        part.b += start * x.b_stride;
        for (int64_t left = vectors; left > 0;) {
            // Five vectors go as three and two, not as four and one.
            const int64_t wide = left <= WIDEST ? left : left < 2 * WIDEST ? ceil_div(left, 2) : WIDEST;
            switch (wide) {
                case 1:
                    columns<Real, ORDER, 1>(rows, part, deep, add);
                    break;
                case 2:
                    columns<Real, ORDER, 2>(rows, part, deep, add);
                    break;
                case 3:
                    columns<Real, ORDER, 3>(rows, part, deep, add);
                    break;
                default:
                    columns<Real, ORDER, 4>(rows, part, deep, add);
                    break;
            }
            part.b += wide * L;
            part.c += wide * L;
            left -= wide;
        }
        add = true;
    }
}

}  // namespace massieu::MASSIEU_BUILD
