// What happens to rows of scores between matrix products: softmax, dropout and their gradients, a row at a time in the
// first-level cache. Arithmetic is in float (double for double). A row's sums have one order.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the halves of a hash would be in another order than the columns"
#endif

struct BFloat16 {
    std::uint16_t bits;
};

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float x, float& out) { out = x; }
inline void narrow(double x, double& out) { out = x; }
inline void narrow(float x, BFloat16& out) {  // to the nearest, ties to even
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    out.bits = static_cast<std::uint16_t>(x != x ? 0x7FC0 : rounded);
}

inline double exponential(double x) { return std::exp(x); }

// e^x for x ≤ 0 within 2 units of the last place, 0 below e^-87: 2^n · e^r with |r| ≤ ln 2 / 2. Adding 1.5 · 2^23 rounds
// x / ln 2 to n and leaves n in the low bits.
inline float exponential(float x) {
    const float shifted = x * 1.44269504f + 12582912.0f;
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float e = 1.0f / 5040;
    e = e * r + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : e * power;
}

constexpr double LARGEST_HIDDEN = 27.725887222397812;  // see interface.py

constexpr std::int64_t LANES = 16;  // partial sums of a row

// How far apart rows lie that have this width. What is behind the width is zero: oneDNN reads bfloat16 in pairs, and an
// element behind an odd width times nothing is not nothing if it is NaN.
inline std::int64_t padded(std::int64_t width) { return (width + LANES - 1) / LANES * LANES; }

template <class T>
void zero(T* x, std::int64_t count) {
    if (count > 0) std::memset(static_cast<void*>(x), 0, count * sizeof(T));
}

using Field = std::uint16_t __attribute__((may_alias));  // half a hash, in the order of the columns

// x, in `out`, with zeros for what is dropped: parallel/random.py has the definition of the mask. bits: scratch of
// padded(width) / 2.
template <class A>
void drop(const A* x, A* out, std::int64_t width, std::int32_t key, const std::int32_t* pairs, std::int32_t threshold,
          std::int32_t* bits) {
    const std::int64_t count = (width + 1) / 2;
#pragma omp simd
    for (std::int64_t p = 0; p < count; ++p) {
        const std::uint32_t y = static_cast<std::uint32_t>(key ^ pairs[p]) * 0x7FEB352Du;
        const std::uint32_t shifted = static_cast<std::uint32_t>(static_cast<std::int32_t>(y) >> 15);
        bits[p] = static_cast<std::int32_t>((y ^ shifted) * 0x846CA68Bu);
    }
    const Field* fields = reinterpret_cast<const Field*>(bits);
#pragma omp simd
    for (std::int64_t j = 0; j < width; ++j) out[j] = (fields[j] & 0x3FFF) >= threshold ? x[j] : A(0);
}

// x [width] → its softmax, and returns log Σ e^x; x has room for padded(width), which is zero afterwards
template <class A>
A softmax(A* x, std::int64_t width) {
    const std::int64_t whole = padded(width);
    for (std::int64_t j = width; j < whole; ++j) x[j] = -std::numeric_limits<A>::infinity();
    A lanes[LANES];
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = -std::numeric_limits<A>::infinity();
    for (std::int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = x[j + lane] > lanes[lane] ? x[j + lane] : lanes[lane];
    A largest = lanes[0];
    for (int lane = 1; lane < LANES; ++lane) largest = lanes[lane] > largest ? lanes[lane] : largest;
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = 0;
    for (std::int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int lane = 0; lane < LANES; ++lane) {
            const A e = exponential(x[j + lane] - largest);
            x[j + lane] = e;
            lanes[lane] += e;
        }
    A total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += lanes[lane];
    const A factor = A(1) / total;
#pragma omp simd
    for (std::int64_t j = 0; j < whole; ++j) x[j] *= factor;
    return largest + std::log(total);
}

// Gradient x of what a softmax p [width] gave → gradient of what it was made of; returns Σ p x
template <class T, class A>
A back_through_softmax(const T* p, A* x, std::int64_t width) {
    A lanes[LANES] = {};
    const std::int64_t whole = width / LANES * LANES;
    for (std::int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] += widen(p[j + lane]) * x[j + lane];
    for (std::int64_t j = whole; j < width; ++j) lanes[j - whole] += widen(p[j]) * x[j];
    A mean = 0;
    for (int lane = 0; lane < LANES; ++lane) mean += lanes[lane];
#pragma omp simd
    for (std::int64_t j = 0; j < width; ++j) x[j] = widen(p[j]) * (x[j] - mean);
    return mean;
}

template <class A>
void add_sum(const A* x, std::int64_t count, A* total) {
    for (std::int64_t j = 0; j < count; ++j) *total += x[j];
}

template <class T, class A>
void add(const T* from, A* to, std::int64_t count) {
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) to[j] += widen(from[j]);
}

template <class T, class A>
void load(const T* from, A* to, std::int64_t count) {
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) to[j] = widen(from[j]);
}

template <class T, class A>
void store(const A* from, T* to, std::int64_t count) {
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) narrow(from[j], to[j]);
}
