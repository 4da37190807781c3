// The passes of passes.py over rows of scores, each row once and in the first-level cache: compiled.py builds and calls
// them. Arithmetic is in float (double for double); a row's sums have one order, whatever the number of threads.

#ifdef __clang__
#error "clang brings an OpenMP library of its own beside the one that PyTorch uses"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the halves of a hash would be in another order than the columns"
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

struct Rows {  // as _Rows of compiled.py
    std::int64_t count, width, span, tile;
    const void* bias;  // added to a row's first `biased` scores, in the type of the arithmetic
    std::int64_t biased;
    const std::int32_t* row_keys;  // nullptr: no dropout
    const std::int32_t* pair_keys;
    std::int32_t threshold;
    std::int32_t threads;
    std::int64_t first, length, known;  // row r is query (first + r) % length; `known` positions lie before query 0
};

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

constexpr int LANES = 16;  // partial sums of a row

// A row's numbers, and the hash of its column pairs: two columns of 16 bits each.
template <class A>
struct Scratch {
    std::int64_t padded;
    std::vector<A> values;
    std::vector<std::int32_t> bits;
    explicit Scratch(std::int64_t width)
        : padded((width + LANES - 1) / LANES * LANES), values(padded), bits(padded / 2) {}
};

using Field = std::uint16_t __attribute__((may_alias));  // half a hash, in the order of the columns

// parallel/random.py has the definition of the mask
template <class A>
void drop(const Rows& rows, std::int64_t row, Scratch<A>& scratch) {
    if (rows.row_keys == nullptr) return;
    const std::int32_t key = rows.row_keys[row];
    const std::int32_t* pairs = rows.pair_keys;
    std::int32_t* bits = scratch.bits.data();
    const std::int64_t count = (rows.width + 1) / 2;
#pragma omp simd
    for (std::int64_t p = 0; p < count; ++p) {
        const std::uint32_t y = static_cast<std::uint32_t>(key ^ pairs[p]) * 0x7FEB352Du;
        const std::uint32_t shifted = static_cast<std::uint32_t>(static_cast<std::int32_t>(y) >> 15);
        bits[p] = static_cast<std::int32_t>((y ^ shifted) * 0x846CA68Bu);
    }
    const Field* fields = reinterpret_cast<const Field*>(bits);
    A* x = scratch.values.data();
    const std::int32_t threshold = rows.threshold;
#pragma omp simd
    for (std::int64_t j = 0; j < rows.width; ++j) x[j] = (fields[j] & 0x3FFF) >= threshold ? x[j] : A(0);
}

template <class T, class A>
void store(const A* from, T* to, std::int64_t count) {
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) narrow(from[j], to[j]);
}

// A row of the band: the context's numbers at their positions, zeros beside them
template <class T, class A>
void store_band(const Rows& rows, std::int64_t row, const A* context, T* band) {
    const std::int64_t positions = rows.span + rows.tile - 1, start = row % rows.tile;
    T* out = band + row * positions;
    std::memset(static_cast<void*>(out), 0, start * sizeof(T));
    store(context, out + start, rows.span);
    std::memset(static_cast<void*>(out + start + rows.span), 0, (positions - start - rows.span) * sizeof(T));
}

template <class T>
const T* band_row(const Rows& rows, std::int64_t row, const T* band) {
    return band + row * (rows.span + rows.tile - 1) + row % rows.tile;
}

// A row's numbers: those by position of the band, beside `own` if `both`, and the persistent vectors' of `own`
template <class T, class A>
void gather(const Rows& rows, std::int64_t row, const T* own, const T* band, bool both, A* x) {
    const T* products = band_row(rows, row, band);
    if (both) {
#pragma omp simd
        for (std::int64_t j = 0; j < rows.span; ++j) x[j] = widen(own[j]) + widen(products[j]);
    } else {
#pragma omp simd
        for (std::int64_t j = 0; j < rows.span; ++j) x[j] = widen(products[j]);
    }
#pragma omp simd
    for (std::int64_t j = rows.span; j < rows.width; ++j) x[j] = widen(own[j]);
}

template <class A>
void softmax(Scratch<A>& scratch, std::int64_t width) {
    A* x = scratch.values.data();
    for (std::int64_t j = width; j < scratch.padded; ++j) x[j] = -std::numeric_limits<A>::infinity();
    A lanes[LANES];
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = -std::numeric_limits<A>::infinity();
    for (std::int64_t j = 0; j < scratch.padded; j += LANES)
#pragma omp simd
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = x[j + lane] > lanes[lane] ? x[j + lane] : lanes[lane];
    A largest = lanes[0];
    for (int lane = 1; lane < LANES; ++lane) largest = lanes[lane] > largest ? lanes[lane] : largest;
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = 0;
    for (std::int64_t j = 0; j < scratch.padded; j += LANES)
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
    for (std::int64_t j = 0; j < scratch.padded; ++j) x[j] *= factor;
}

// scores [R, S + N], band (q · k by position) → softmax in scores, or dropped in out; dropped context in band
template <class T>
void weights(const Rows& rows, T* scores, T* band, T* out) {
    using A = Wide<T>;
    const std::int64_t width = rows.width;
#pragma omp parallel num_threads(rows.threads)
    {
        Scratch<A> scratch(width);
        A* x = scratch.values.data();
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < rows.count; ++row) {
            T* own = scores + row * width;
            const A* bias = static_cast<const A*>(rows.bias);
            gather(rows, row, own, band, true, x);
#pragma omp simd
            for (std::int64_t j = 0; j < rows.biased; ++j) x[j] += bias[j];
            const std::int64_t empty = rows.span - rows.known - (rows.first + row) % rows.length;
            for (std::int64_t j = 0; j < empty; ++j) x[j] = -std::numeric_limits<A>::infinity();
            if (empty >= width) {  // the first token, with nothing to look at
                for (std::int64_t j = 0; j < width; ++j) x[j] = 0;
            } else {
                softmax(scratch, width);
            }
            if (out != scores) store(x, own, width);
            drop(rows, row, scratch);
            store(x, out + row * width, width);
            store_band(rows, row, x, band);
        }
    }
}

// softmax p, gradient of what it became in grads (of the context in band, too if `both`) → gradient of scores in grads
// and of the context's in band
template <class T>
void gradients(const Rows& rows, const T* p, T* grads, T* band, bool both) {
    using A = Wide<T>;
    const std::int64_t width = rows.width;
#pragma omp parallel num_threads(rows.threads)
    {
        Scratch<A> scratch(width);
        A* x = scratch.values.data();
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < rows.count; ++row) {
            const T* weight = p + row * width;
            T* own = grads + row * width;
            gather(rows, row, own, band, both, x);
            drop(rows, row, scratch);
            A lanes[LANES] = {};
            const std::int64_t whole = width / LANES * LANES;
            for (std::int64_t j = 0; j < whole; j += LANES)
#pragma omp simd
                for (int lane = 0; lane < LANES; ++lane) lanes[lane] += widen(weight[j + lane]) * x[j + lane];
            for (std::int64_t j = whole; j < width; ++j) lanes[j - whole] += widen(weight[j]) * x[j];
            A mean = 0;
            for (int lane = 0; lane < LANES; ++lane) mean += lanes[lane];
#pragma omp simd
            for (std::int64_t j = 0; j < width; ++j) x[j] = widen(weight[j]) * (x[j] - mean);
            store(x, own, width);
            store_band(rows, row, x, band);
        }
    }
}

// parts [tiles, positions, size], those of tile g from row g · tile of memory on, are added to it; a row's in one order
template <class T>
void add_windows(T* memory, const T* parts, std::int64_t tiles, std::int64_t positions, std::int64_t size,
                 std::int64_t tile, std::int64_t stride, int threads) {
    using A = Wide<T>;
#pragma omp parallel num_threads(threads)
    {
        std::vector<A> sum(size);
        A* total = sum.data();
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < (tiles - 1) * tile + positions; ++row) {
            T* own = memory + row * stride;
#pragma omp simd
            for (std::int64_t j = 0; j < size; ++j) total[j] = widen(own[j]);
            const std::int64_t first = row < positions ? 0 : (row - positions) / tile + 1;
            for (std::int64_t g = first; g < tiles && g * tile <= row; ++g) {
                const T* part = parts + (g * positions + row - g * tile) * size;
#pragma omp simd
                for (std::int64_t j = 0; j < size; ++j) total[j] += widen(part[j]);
            }
            store(total, own, size);
        }
    }
}

}  // namespace

#define PASSES(TYPE, NAME)                                                                                     \
    extern "C" void weights_##NAME(const Rows* rows, void* scores, void* band, void* out) {                    \
        weights(*rows, static_cast<TYPE*>(scores), static_cast<TYPE*>(band), static_cast<TYPE*>(out));         \
    }                                                                                                          \
    extern "C" void gradients_##NAME(const Rows* rows, const void* p, void* grads, void* band, bool both) {    \
        gradients(*rows, static_cast<const TYPE*>(p), static_cast<TYPE*>(grads), static_cast<TYPE*>(band), both); \
    }                                                                                                          \
    extern "C" void add_windows_##NAME(void* memory, const void* parts, std::int64_t tiles,                    \
                                       std::int64_t positions, std::int64_t size, std::int64_t tile,           \
                                       std::int64_t stride, int threads) {                                     \
        add_windows(static_cast<TYPE*>(memory), static_cast<const TYPE*>(parts), tiles, positions, size, tile, \
                    stride, threads);                                                                          \
    }

PASSES(float, float32)
PASSES(double, float64)
PASSES(BFloat16, bfloat16)
