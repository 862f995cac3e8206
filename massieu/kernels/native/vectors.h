// Vectors of the width that this build is for, written with the vector extensions of GCC and Clang: the compiler picks
// the instructions. Everything lives in a namespace of the build, so that the linker cannot merge two builds.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if !defined(MASSIEU_BUILD) || !defined(MASSIEU_VECTOR_BYTES)
#error "compile with -DMASSIEU_BUILD=name -DMASSIEU_VECTOR_BYTES=16, 32 or 64"
#endif

namespace massieu::MASSIEU_BUILD {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct bfloat16 {
    uint16_t bits;
};

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

template <class Narrow, class Real>
inline Narrow narrowed(Real x) {
    return Narrow(x);
}
template <>
inline bfloat16 narrowed<bfloat16, float>(float x) {  // to nearest, ties to even; nan stays nan
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
inline bfloat16 narrowed<bfloat16, double>(double x) {
    return narrowed<bfloat16, float>(float(x));
}

template <class Real>
struct Bits;

template <>
struct Bits<float> {
    using Integer = int32_t;
    static constexpr int MANTISSA = 23;
    static constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: added and taken away, it rounds to a whole number
    static constexpr float SMALLEST = -127.0f;   // 2^SMALLEST comes out as zero
    // 2^f = 1 + f P(f) on [-1/2, 1/2], interpolated at Chebyshev nodes: relative error 5e-9.
    static constexpr float POWERS[] = {0.693147188026f,   0.240226507606f,   0.0555035711422f,
                                       0.00961808255728f, 0.00133908633647f, 0.000154531629451f};
};

template <>
struct Bits<double> {
    using Integer = int64_t;
    static constexpr int MANTISSA = 52;
    static constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double SMALLEST = -1023.0;
    // As above: relative error 9e-18.
    static constexpr double POWERS[] = {0.693147180559945309,     0.240226506959100982,   0.0555041086648215943,
                                        0.00961812910760688853,   0.00133335581464169353, 0.000154035304417360502,
                                        0.0000152527338298361184, 1.32154425879216897e-6, 1.01780624458457735e-7,
                                        7.0725859492692237e-9,    4.45496059818651839e-10};
};

template <class Real>
struct Lanes {
    static constexpr int64_t COUNT = MASSIEU_VECTOR_BYTES / sizeof(Real);
    typedef Real Vector __attribute__((vector_size(MASSIEU_VECTOR_BYTES)));
    typedef Real Memory __attribute__((vector_size(MASSIEU_VECTOR_BYTES), aligned(sizeof(Real)), may_alias));
    typedef typename Bits<Real>::Integer Whole __attribute__((vector_size(MASSIEU_VECTOR_BYTES)));
    typedef typename Bits<Real>::Integer WholeMemory
        __attribute__((vector_size(MASSIEU_VECTOR_BYTES), aligned(sizeof(Real)), may_alias));
};
template <class Real>
using Vector = typename Lanes<Real>::Vector;
template <class Real>
using Whole = typename Lanes<Real>::Whole;

template <class Real>
inline Vector<Real> load(const Real* from) {
    return *reinterpret_cast<const typename Lanes<Real>::Memory*>(from);
}
template <class Real>
inline void store(Real* to, Vector<Real> x) {
    *reinterpret_cast<typename Lanes<Real>::Memory*>(to) = x;
}
template <class Real>
inline Vector<Real> all(Real x) {
    return x - Vector<Real>{};  // not plus: zero plus minus zero is plus zero, and the compiler uses that
}
template <class Real>
inline Vector<Real> greatest(Vector<Real> a, Vector<Real> b) {
    return a > b ? a : b;
}

// Whether a comparison holds in at least one lane.
template <class Real>
inline bool any(Whole<Real> holds) {
#ifdef __AVX512F__  // one instruction, which the compiler does not find
    return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds);
#else
    typename Bits<Real>::Integer found = 0;
    for (int64_t i = 0; i < Lanes<Real>::COUNT; i++) found |= holds[i];
    return found;
#endif
}

// Lanes of two vectors that consist of blocks of 2 * HALF: the lower or the upper half of every block.
template <class Real, int64_t HALF, bool UPPER, int64_t... LANE>
inline Vector<Real> halves(Vector<Real> a, Vector<Real> b, std::integer_sequence<int64_t, LANE...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (LANE / HALF * 2 * HALF + LANE % HALF + UPPER * HALF)...);
#else
    return __builtin_shuffle(a, b, Whole<Real>{(LANE / HALF * 2 * HALF + LANE % HALF + UPPER * HALF)...});
#endif
}

// The sums of as many vectors as there are lanes, one in each lane: halves are added, two vectors to one, until each
// has one lane.
template <class Real, int64_t HALF = Lanes<Real>::COUNT / 2>
inline Vector<Real> lane_sums(Vector<Real>* x) {
    constexpr std::make_integer_sequence<int64_t, Lanes<Real>::COUNT> lanes;
#pragma GCC unroll 8
    for (int64_t i = 0; i < HALF; i++)
        x[i] = halves<Real, HALF, false>(x[2 * i], x[2 * i + 1], lanes) +
               halves<Real, HALF, true>(x[2 * i], x[2 * i + 1], lanes);
    if constexpr (HALF > 1) return lane_sums<Real, HALF / 2>(x);
    return x[0];
}

// Lanes of a and b for a step of a transposition: blocks of SIZE lanes, from a where the block is even.
template <class Real, int64_t SIZE, bool SECOND, int64_t... LANE>
inline Vector<Real> swapped(Vector<Real> a, Vector<Real> b, std::integer_sequence<int64_t, LANE...>) {
    constexpr int64_t L = Lanes<Real>::COUNT;
#ifdef __clang__
    return __builtin_shufflevector(a, b, (LANE & SIZE ? L + LANE - !SECOND * SIZE : LANE + SECOND * SIZE)...);
#else
    return __builtin_shuffle(a, b, Whole<Real>{(LANE & SIZE ? L + LANE - !SECOND * SIZE : LANE + SECOND * SIZE)...});
#endif
}

// As many vectors as there are lanes, transposed in place: blocks off the diagonal change places, half by half.
template <class Real, int64_t SIZE = Lanes<Real>::COUNT / 2>
inline void transpose(Vector<Real>* x) {
    constexpr std::make_integer_sequence<int64_t, Lanes<Real>::COUNT> lanes;
#pragma GCC unroll 16
    for (int64_t i = 0; i < Lanes<Real>::COUNT; i++)
        if (!(i & SIZE)) {
            const Vector<Real> a = x[i], b = x[i + SIZE];
            x[i] = swapped<Real, SIZE, false>(a, b, lanes);
            x[i + SIZE] = swapped<Real, SIZE, true>(a, b, lanes);
        }
    if constexpr (SIZE > 1) transpose<Real, SIZE / 2>(x);
}

// 2^x for x <= 1, within 1.5 units in the last place; exactly zero for x <= SMALLEST.
template <class Real>
inline Vector<Real> power_of_two(Vector<Real> x) {
    using B = Bits<Real>;
    x = greatest<Real>(all<Real>(B::SMALLEST), x);  // in this order nan stays nan
    const Vector<Real> shifted = x + B::ROUND;
    Vector<Real> fraction = x - (shifted - B::ROUND);
    constexpr int degree = sizeof(B::POWERS) / sizeof(Real);
    Vector<Real> sum = all<Real>(B::POWERS[degree - 1]);
#pragma GCC unroll 16
    for (int i = degree - 2; i >= 0; i--) sum = sum * fraction + B::POWERS[i];
    sum = sum * fraction + Real(1);
    // The whole part sits in the lowest bits of `shifted`; moved up, it adds to the exponent.
    const auto power = (Vector<Real>)((Whole<Real>)sum + ((Whole<Real>)shifted << B::MANTISSA));
    return x == x ? power : x;  // of nan, the lowest bits may be anything
}

}  // namespace massieu::MASSIEU_BUILD
