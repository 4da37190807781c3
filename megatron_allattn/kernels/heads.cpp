// The heads of one call of the `blocked` backend, forward and backward: compiled.py builds this and compiled_heads.py
// calls it. A thread takes one head after the other, the longest first, with scratch memory of its own; where there are
// fewer heads than threads, all threads work on one head after the other. A head's sums have one order, whatever the
// number of threads, up to the number of heads.
//
// Shape letters as in blocked_heads.py: B streams, M block, H heads, K head size, D hidden size, N persistent vectors;
// of a head S distances; of a unit R rows in G tiles of T rows.

#ifdef __clang__
#error "clang brings an OpenMP library of its own beside the one that PyTorch uses"
#endif

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <numeric>
#include <vector>

#include <omp.h>

#include "products.h"
#include "rows.h"

namespace {

// As _Call of compiled_heads.py. Rows of all heads: [B·M, H·K]; gradients are null in forward; `wide`: float32 at least
struct Call {
    std::int64_t batch, length, tile, heads, size, persistent, hidden;
    std::int64_t rows;                      // of a unit, at most, if a tile has no more
    std::int64_t longest;                   // S of the head that looks farthest
    std::int64_t positions;                 // columns of the table of positions: the last is for distance 1
    std::int64_t known;                     // positions before the block that may be attended to
    const std::int64_t* spans;              // S of every head
    const std::int64_t* biased;             // of every head, how many of its S have a bias: the farthest
    const std::int64_t* edges;              // of every head, the distance whose mask has a gradient at 0, or 0
    const void* bias;                       // wide [H, longest] or null, a head's S at the end
    const void* position_key;               // [K, positions]
    const void* persistent_key;             // [H, K, N]
    const void* persistent_value;           // [H, N, K]
    const void *q, *k, *v;                  // rows of all heads; q divided by √K
    const void *key_weight, *value_weight;  // [H·K, D], of cached hidden states
    const void* cache;                      // [B, cached, D]
    std::int64_t cached, cache_stride, cache_row_stride;
    const void *kept_keys, *kept_values;    // or null: [B, kept S, K] of every head, instead of a cache
    const std::int64_t *kept_spans, *kept_starts;  // of every head: positions that are kept, and the first one's row
    std::int64_t kept_stride;                      // of a stream
    const std::int32_t* row_keys;           // [H, B·M], null: no dropout
    const std::int32_t* pair_keys;          // [(longest + N) / 2], a head's at the end
    std::int64_t threshold;
    std::int64_t shared;                    // whether values have positions too
    std::int64_t threads;
    void* y;                                // rows of all heads, before the scale of dropout
    const void* dy;
    void *dq, *dk, *dv;                     // rows of all heads
    void *dkey_weight, *dvalue_weight;      // [H·K, D], what cached positions give is added
    void *dpersistent_key, *dpersistent_value;
    void* dposition_key;                    // wide [K, positions], is added to
    void* dpositions;                       // scratch [H, K, longest] for it, a head's S at the end
    void* dbias;                            // wide [H, longest], is added to
    void* dedges;                           // wide [H], is added to: of the masks at the edges
    std::int64_t* scored;                   // [H], is added to: elements of scores that were computed
    char message[400];                      // why a head failed
};

// Memory from one block, from front to back; without a block it counts what would be needed
class Arena {
  public:
    explicit Arena(std::byte* base) : base_(base) {}

    template <class T>
    T* take(std::int64_t count) {
        T* found = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
        return found;
    }

    // A matrix with padded rows, whose ends are zero, and a row of zeros behind the last: what products may read
    template <class T>
    View<T> matrix(std::int64_t rows, std::int64_t columns) {
        const std::int64_t stride = padded(columns);
        const View<T> found{take<T>((rows + 1) * stride), rows, columns, stride};
        if (base_ == nullptr) return found;
        if (columns != stride)
            for (std::int64_t row = 0; row < rows; ++row) zero(found.data + row * stride + columns, stride - columns);
        zero(found.data + rows * stride, stride);
        return found;
    }

    std::int64_t used() const { return used_; }

  private:
    std::byte* base_;
    std::int64_t used_ = 0;
};

// All tiles of some streams, or some tiles of one stream
struct Unit {
    std::int64_t first_stream, streams, first_tile, tiles;
};

std::vector<Unit> units(const Call& call) {
    std::vector<Unit> found;
    const std::int64_t tiles = call.length / call.tile;
    const std::int64_t streams = std::max<std::int64_t>(1, call.rows / call.length);
    const std::int64_t step = std::min(tiles, std::max<std::int64_t>(1, call.rows / call.tile));
    for (std::int64_t stream = 0; stream < call.batch; stream += streams)
        for (std::int64_t tile = 0; tile < tiles; tile += step)
            found.push_back({stream, std::min(streams, call.batch - stream), tile, std::min(step, tiles - tile)});
    return found;
}

template <class T>
class Head {
    using A = Wide<T>;
    using Const = View<const T>;

  public:
    // threads: that share the work on rows
    Head(const Call& call, std::int64_t index, Arena& arena, bool backward, int threads)
        : call(call),
          index(index),
          threads(threads),
          span(call.spans[index]),
          width(span + call.persistent),
          first_value(call.shared ? 0 : span),
          all(units(call)),
          edge(call.edges[index] > 0 ? span - call.edges[index] : -1) {
        std::int64_t rows = 0;
        for (const Unit& unit : all) rows = std::max(rows, unit.streams * unit.tiles * call.tile);
        const std::int64_t positions = span + call.tile - 1, remembered = call.batch * (span + call.length);
        keys = arena.matrix<T>(remembered, call.size);
        values = arena.matrix<T>(remembered, call.size);
        table = arena.matrix<T>(call.size, width);
        if (call.shared) value_table = arena.matrix<T>(width, call.size);
        q = arena.matrix<T>(rows, call.size);
        y = arena.matrix<T>(rows, call.size);
        p = arena.matrix<T>(rows, width);
        band = arena.matrix<T>(rows, positions);
        if (backward) {
            dkeys = arena.matrix<T>(remembered, call.size);
            dvalues = arena.matrix<T>(remembered, call.size);
            dtable = arena.matrix<T>(call.size, width);
            dvalue_table = arena.matrix<T>(width - first_value, call.size);
            dy = arena.matrix<T>(rows, call.size);
            ds = arena.matrix<T>(rows, width);
            parts = arena.matrix<T>(rows / call.tile * positions, call.size);
            hidden = arena.take<A>(rows);
        }
        if (!std::is_same_v<T, A>) wide = arena.take<A>(threads * padded(std::max(width, call.size)));
        bits = arena.take<std::int32_t>(threads * padded(width) / 2);
    }

    void forward() {
        remember();
        make_tables();
        for (const Unit& unit : all) {
            const View<T> own = first_rows(y, unit);
            copy(rows_of(static_cast<const T*>(call.q), unit), first_rows(q, unit));
            scores(unit);
            weights(unit, p);
            multiply<T>(own, constant(value_columns(p, unit)), value_rows());
            if (width == first_value) fill_zero(own);
            add_context(own, unit, values);
            copy(constant(own), rows_of(static_cast<T*>(call.y), unit));
        }
    }

    void backward() {
        remember();
        make_tables();
        fill_zero(dkeys);
        fill_zero(dvalues);
        fill_zero(dtable);
        fill_zero(dvalue_table);
        for (const Unit& unit : all) unit_backward(unit);
        give_memory(dkeys, static_cast<T*>(call.dkey_weight), static_cast<T*>(call.dk));
        give_memory(dvalues, static_cast<T*>(call.dvalue_weight), static_cast<T*>(call.dv));
        give_tables();
    }

  private:
    void unit_backward(const Unit& unit) {
        const View<T> own_q = first_rows(q, unit), own_dy = first_rows(dy, unit), dq = first_rows(y, unit);
        const View<T>& dropped = call.row_keys == nullptr ? p : ds;
        copy(rows_of(static_cast<const T*>(call.q), unit), own_q);
        copy(rows_of(static_cast<const T*>(call.dy), unit), own_dy);
        scores(unit);
        weights(unit, dropped);
        multiply_add<T>(dvalue_table, constant(value_columns(dropped, unit).transposed()), constant(own_dy));
        add_to_memory(unit, own_dy, dvalues);

        context_products(unit, own_dy, values);
        multiply<T>(value_columns(ds, unit), constant(own_dy), value_rows().transposed());
        gradients(unit);
        const Const through = constant(first_rows(ds, unit));
        multiply<T>(dq, through, constant(table.transposed()));
        multiply_add<T>(dtable, constant(own_q.transposed()), through);
        add_context(dq, unit, keys);
        add_to_memory(unit, own_q, dkeys);
        copy(constant(dq), rows_of(static_cast<T*>(call.dq), unit));
    }

    // Where things are

    static Const constant(const View<T>& view) {
        return {view.data,          view.rows,  view.columns,     view.row_stride,
                view.column_stride, view.batch, view.batch_stride};
    }

    std::int64_t count(const Unit& unit) const { return unit.streams * unit.tiles * call.tile; }

    View<T> first_rows(const View<T>& matrix, const Unit& unit) const { return matrix.row_range(0, count(unit)); }

    // The head's columns of a unit's rows of all heads
    template <class P>
    View<P> rows_of(P* all_heads, const Unit& unit) const {
        const std::int64_t stride = call.heads * call.size;
        const std::int64_t first = unit.first_stream * call.length + unit.first_tile * call.tile;
        return {all_heads + first * stride + index * call.size, count(unit), call.size, stride};
    }

    View<T> value_columns(const View<T>& matrix, const Unit& unit) const {
        return first_rows(matrix, unit).column_range(first_value, width - first_value);
    }

    // What value_columns are multiplied with, [N, K], or [S + N, K] where values have positions
    Const value_rows() const {
        if (call.shared) return constant(value_table);
        const T* own = static_cast<const T*>(call.persistent_value) + index * call.persistent * call.size;
        return {own, call.persistent, call.size, call.size};
    }

    // A stream's part of k or v, or their gradients, [S + M, K]
    View<T> stream_memory(const View<T>& memory, std::int64_t stream) const {
        return memory.row_range(stream * (span + call.length), span + call.length);
    }

    // What a unit's tiles see of one of its streams, [G, S + T − 1, K], and the band's tiles of that stream
    View<T> windows(const View<T>& memory, const Unit& unit, std::int64_t place) const {
        return stream_memory(memory, unit.first_stream + place)
            .row_range(unit.first_tile * call.tile, 0)
            .tiles(unit.tiles, span + call.tile - 1, call.tile);
    }

    View<T> tiles_of(const View<T>& rows, const Unit& unit, std::int64_t place) const {
        return rows.row_range(place * unit.tiles * call.tile, 0).tiles(unit.tiles, call.tile, call.tile);
    }

    static void fill_zero(const View<T>& matrix) {
        for (std::int64_t row = 0; row < matrix.rows; ++row)
            zero(matrix.data + row * matrix.row_stride, matrix.columns);
    }

    template <class P>
    static void copy(const View<P>& from, const View<T>& to) {
        for (std::int64_t row = 0; row < from.rows; ++row)
            std::copy_n(from.data + row * from.row_stride, from.columns, to.data + row * to.row_stride);
    }

    // Before and after the units

    void remember() {
        remember_one(static_cast<const T*>(call.k), call.key_weight, call.kept_keys, keys);
        remember_one(static_cast<const T*>(call.v), call.value_weight, call.kept_values, values);
    }

    // k or v of the S positions before the block and of its own: zeros in front, where nothing is known
    void remember_one(const T* block, const void* weight, const void* kept, const View<T>& memory) {
        const std::int64_t all_heads = call.heads * call.size;
        const std::int64_t known = std::min(span, kept != nullptr ? call.kept_spans[index] : call.cached);
        for (std::int64_t stream = 0; stream < call.batch; ++stream) {
            const View<T> own = stream_memory(memory, stream), before = own.row_range(span - known, known);
            fill_zero(own.row_range(0, span - known));
            if (kept != nullptr) {
                const std::int64_t first = call.kept_starts[index] + call.kept_spans[index] - known;
                const T* rows = static_cast<const T*>(kept) + stream * call.kept_stride + first * call.size;
                copy(Const{rows, known, call.size, call.size}, before);
            } else {
                const T* own_weight = static_cast<const T*>(weight) + index * call.size * call.hidden;
                const Const projection{own_weight, call.size, call.hidden, call.hidden};
                multiply<T>(before, last_cached(stream, known), projection.transposed());
            }
            const T* rows = block + stream * call.length * all_heads + index * call.size;
            copy(Const{rows, call.length, call.size, all_heads}, own.row_range(span, call.length));
        }
    }

    Const last_cached(std::int64_t stream, std::int64_t known) const {
        const T* first = static_cast<const T*>(call.cache) + stream * call.cache_stride;
        return {first + (call.cached - known) * call.cache_row_stride, known, call.hidden, call.cache_row_stride};
    }

    // The gradients of a memory to where they come from
    void give_memory(const View<T>& dmemory, T* dweight, T* block) {
        const std::int64_t all_heads = call.heads * call.size, known = std::min(span, call.cached);
        const View<T> own_dweight{dweight + index * call.size * call.hidden, call.size, call.hidden, call.hidden};
        for (std::int64_t stream = 0; stream < call.batch; ++stream) {
            const View<T> own = stream_memory(dmemory, stream);
            if (known > 0)
                multiply_add<T>(own_dweight, constant(own.row_range(span - known, known).transposed()),
                                last_cached(stream, known));
            T* rows = block + stream * call.length * all_heads + index * call.size;
            copy(constant(own.row_range(span, call.length)), View<T>{rows, call.length, call.size, all_heads});
        }
    }

    // The vectors that every row meets: those of positions, which may be fewer than S, beside the persistent ones
    void make_tables() {
        const std::int64_t known = std::min(span, call.positions), first = span - known, N = call.persistent;
        const T* of_positions = static_cast<const T*>(call.position_key) + call.positions - known;
        const T* of_vectors = static_cast<const T*>(call.persistent_key) + index * call.size * N;
        for (std::int64_t i = 0; i < call.size; ++i) {
            T* row = table.data + i * table.row_stride;
            zero(row, first);
            std::copy_n(of_positions + i * call.positions, known, row + first);
            std::copy_n(of_vectors + i * N, N, row + span);
        }
        if (!call.shared) return;
        for (std::int64_t j = 0; j < span; ++j)
            for (std::int64_t i = 0; i < call.size; ++i)
                value_table.data[j * value_table.row_stride + i] = table.data[i * table.row_stride + j];
        const T* vectors = static_cast<const T*>(call.persistent_value) + index * N * call.size;
        copy(Const{vectors, N, call.size, call.size}, value_table.row_range(span, N));
    }

    void give_tables() {
        const std::int64_t N = call.persistent;
        T* of_positions = static_cast<T*>(call.dpositions) + index * call.size * call.longest + call.longest - span;
        T* of_vectors = static_cast<T*>(call.dpersistent_key) + index * call.size * N;
        for (std::int64_t i = 0; i < call.size; ++i) {
            T* row = dtable.data + i * dtable.row_stride;
            if (call.shared)
                for (std::int64_t j = 0; j < span; ++j)
                    narrow(widen(row[j]) + widen(dvalue_table.data[j * dvalue_table.row_stride + i]), row[j]);
            std::copy_n(row, span, of_positions + i * call.longest);
            std::copy_n(row + span, N, of_vectors + i * N);
        }
        T* vectors = static_cast<T*>(call.dpersistent_value) + index * N * call.size;
        copy(constant(dvalue_table.row_range(span - first_value, N)), View<T>{vectors, N, call.size, call.size});
    }

    // Products of a unit

    // The context's scores lack k in `p`: those are in `band`, by position
    void scores(const Unit& unit) {
        const View<T> own = first_rows(q, unit);
        multiply<T>(first_rows(p, unit), constant(own), constant(table));
        context_products(unit, own, keys);
        call.scored[index] += count(unit) * width;
    }

    void context_products(const Unit& unit, const View<T>& rows, const View<T>& memory) {
        for (std::int64_t place = 0; place < unit.streams; ++place)
            multiply<T>(tiles_of(band, unit, place), constant(tiles_of(rows, unit, place)),
                        constant(windows(memory, unit, place).transposed()));
    }

    void add_context(const View<T>& out, const Unit& unit, const View<T>& memory) {
        for (std::int64_t place = 0; place < unit.streams; ++place)
            multiply_add<T>(tiles_of(out, unit, place), constant(tiles_of(band, unit, place)),
                            constant(windows(memory, unit, place)));
    }

    // bandᵀ · rows, by tile, added where their windows lie
    void add_to_memory(const Unit& unit, const View<T>& rows, const View<T>& memory) {
        const std::int64_t positions = span + call.tile - 1;
        for (std::int64_t place = 0; place < unit.streams; ++place) {
            const View<T> by_tile = parts.tiles(unit.tiles, positions, positions);
            multiply<T>(by_tile, constant(tiles_of(band, unit, place).transposed()),
                        constant(tiles_of(rows, unit, place)));
            const View<T> seen = windows(memory, unit, place);
            const std::int64_t reached = (unit.tiles - 1) * call.tile + positions;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
            for (std::int64_t row = 0; row < reached; ++row) add_parts(row, unit.tiles, seen);
        }
    }

    // What the tiles give to a row of their windows, in one order
    void add_parts(std::int64_t row, std::int64_t tiles, const View<T>& seen) {
        const std::int64_t positions = seen.rows, first = row < positions ? 0 : (row - positions) / call.tile + 1;
        T* own = seen.data + row * seen.row_stride;
        A* total = wide_row(own);
        if constexpr (!std::is_same_v<T, A>) load(own, total, call.size);
        for (std::int64_t g = first; g < tiles && g * call.tile <= row; ++g)
            add(parts.data + (g * positions + row - g * call.tile) * parts.row_stride, total, call.size);
        if constexpr (!std::is_same_v<T, A>) store(total, own, call.size);
    }

    // Rows of a unit

    // A row in the type of the arithmetic: itself, or room for it
    A* wide_row(T* own) const {
        if constexpr (std::is_same_v<T, A>)
            return own;
        else
            return wide + thread() * padded(std::max(width, call.size));
    }

    std::int64_t thread() const { return threads > 1 ? omp_get_thread_num() : 0; }

    T* band_row(std::int64_t row) const { return band.data + row * band.row_stride; }

    // Row r of a unit is this query of its stream
    std::int64_t query(const Unit& unit, std::int64_t row) const {
        return (unit.first_tile * call.tile + row) % call.length;
    }

    void drop_row(const Unit& unit, std::int64_t row, const A* x, A* out) const {
        const std::int64_t first = unit.first_stream * call.length + unit.first_tile * call.tile;
        const std::int32_t key = call.row_keys[index * call.batch * call.length + first + row];
        drop(x, out, width, key, call.pair_keys + (call.longest - span) / 2,
             static_cast<std::int32_t>(call.threshold), bits + thread() * padded(width) / 2);
    }

    // A row's context, by distance, to the band, by position, with zeros beside it
    void store_band(std::int64_t row, const A* context) const {
        const std::int64_t start = row % call.tile, behind = start + span;
        T* out = band_row(row);
        zero(out, start);
        store(context, out + start, span);
        zero(out + behind, band.row_stride - behind);
    }

    // scores in p and band → softmax in p, and dropped in `out`, which may be p; its context in the band
    void weights(const Unit& unit, const View<T>& out) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (std::int64_t row = 0; row < count(unit); ++row) {
            T* own = p.data + row * p.row_stride;
            T* result = out.data + row * out.row_stride;
            A* x = wide_row(own);
            if constexpr (!std::is_same_v<T, A>) load(own, x, width);
            add(band_row(row) + row % call.tile, x, span);
            const A at_edge = x[edge < 0 ? 0 : edge];
            if (call.bias != nullptr) {
                const A* bias = static_cast<const A*>(call.bias) + (index + 1) * call.longest - span;
                add(bias, x, call.biased[index]);
            }
            const std::int64_t empty = span - call.known - query(unit, row);
            std::fill_n(x, std::clamp<std::int64_t>(empty, 0, span), -std::numeric_limits<A>::infinity());
            A sum = std::numeric_limits<A>::infinity();  // the logarithm of the row's
            if (empty >= width)  // the first token, with nothing to look at
                zero(x, padded(width));
            else
                sum = softmax(x, width);
            if (hidden != nullptr && edge >= 0)
                hidden[row] = edge < empty ? A(0) : std::exp(std::min(at_edge - sum, A(LARGEST_HIDDEN)));
            if constexpr (!std::is_same_v<T, A>)
                if (result != own) store(x, own, width);
            if (call.row_keys != nullptr) {
                A* dropped = std::is_same_v<T, A> ? wide_row(result) : x;
                drop_row(unit, row, x, dropped);
                x = dropped;
            }
            if constexpr (!std::is_same_v<T, A>) store(x, result, width);
            store_band(row, x);
        }
    }

    // Gradient of the dropped weights in ds, the context's in the band (and in ds, where values have positions) →
    // gradient of the scores in ds, and the context's in the band
    void gradients(const Unit& unit) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (std::int64_t row = 0; row < count(unit); ++row) {
            T* own = ds.data + row * ds.row_stride;
            A* x = wide_row(own);
            if (!call.shared) zero(own, span);
            if constexpr (!std::is_same_v<T, A>) load(own, x, width);
            add(band_row(row) + row % call.tile, x, span);
            if (call.row_keys != nullptr) drop_row(unit, row, x, x);
            const A at_edge = x[edge < 0 ? 0 : edge];
            const A mean = back_through_softmax(p.data + row * p.row_stride, x, width);
            if (edge >= 0) hidden[row] *= at_edge - mean;
            if constexpr (!std::is_same_v<T, A>) store(x, own, width);
            store_band(row, x);
        }
        if (edge >= 0) add_sum(hidden, count(unit), static_cast<A*>(call.dedges) + index);
        if (call.bias == nullptr) return;
        A* dbias = static_cast<A*>(call.dbias) + (index + 1) * call.longest - span;
        for (std::int64_t row = 0; row < count(unit); ++row)
            add(ds.data + row * ds.row_stride, dbias, call.biased[index]);
    }

    const Call& call;
    const std::int64_t index;
    const int threads;
    const std::int64_t span, width;     // S, S + N
    const std::int64_t first_value;     // the first column that has a value beside the context's: 0, or S
    const std::vector<Unit> all;
    View<T> keys, values, table, value_table, q, y, p, band;
    View<T> dkeys, dvalues, dtable, dvalue_table, dy, ds, parts;
    const std::int64_t edge;  // the column whose mask has a gradient at 0, or -1
    A* hidden = nullptr;      // of every row of a unit: e^score over the row's sum there, then its part of the gradient
    A* wide = nullptr;
    std::int32_t* bits;
};

// Scratch memory of a thread, or of all if they work together
template <class T>
std::int64_t scratch_of_one(const Call& call, bool backward, int team) {
    Arena arena(nullptr);
    const std::int64_t longest = std::max_element(call.spans, call.spans + call.heads) - call.spans;
    Head<T>(call, longest, arena, backward, team);
    return arena.used();
}

// The table's gradient: what every head gives, in the order of the heads
template <class T>
void sum_positions(const Call& call) {
    using A = Wide<T>;
#pragma omp parallel for num_threads(static_cast<int>(call.threads)) schedule(static)
    for (std::int64_t i = 0; i < call.size; ++i)
        for (std::int64_t head = 0; head < call.heads; ++head) {
            const T* own = static_cast<const T*>(call.dpositions) + (head * call.size + i + 1) * call.longest;
            const std::int64_t known = std::min(call.spans[head], call.positions);
            add(own - known, static_cast<A*>(call.dposition_key) + (i + 1) * call.positions - known, known);
        }
}

struct Split {
    int workers, team;  // heads at a time, threads of each
    explicit Split(const Call& call)
        : workers(call.heads < call.threads ? 1 : static_cast<int>(call.threads)),
          team(call.heads < call.threads ? static_cast<int>(call.threads) : 1) {}
};

template <class T>
std::int64_t scratch_bytes(const Call& call, bool backward) {
    const Split split(call);
    return split.workers * scratch_of_one<T>(call, backward, split.team);
}

// Returns whether no head failed
template <class T>
bool run(Call& call, std::byte* scratch, bool backward) {
    const Split split(call);
    const std::int64_t size = scratch_of_one<T>(call, backward, split.team);
    std::vector<std::int64_t> order(call.heads);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return call.spans[a] > call.spans[b]; });
    std::atomic<bool> failed = false;
#pragma omp parallel for num_threads(split.workers) schedule(dynamic) if (split.workers > 1)
    for (std::int64_t i = 0; i < call.heads; ++i) {
        try {
            Arena arena(scratch + omp_get_thread_num() * size);
            Head<T> head(call, order[i], arena, backward, split.team);
            if (backward)
                head.backward();
            else
                head.forward();
        } catch (const std::exception& error) {
            if (!failed.exchange(true)) std::strncpy(call.message, error.what(), sizeof call.message - 1);
        }
    }
    if (backward) sum_positions<T>(call);
    return !failed;
}

}  // namespace

#define HEADS(TYPE, NAME)                                                                        \
    extern "C" std::int64_t scratch_bytes_##NAME(const Call* call, std::int32_t backward) {      \
        return scratch_bytes<TYPE>(*call, backward != 0);                                        \
    }                                                                                            \
    extern "C" std::int32_t run_##NAME(Call* call, void* scratch, std::int32_t backward) {       \
        return run<TYPE>(*call, static_cast<std::byte*>(scratch), backward != 0);                \
    }

extern "C" std::int32_t call_bytes() { return static_cast<std::int32_t>(sizeof(Call)); }

HEADS(float, float32)
HEADS(double, float64)
HEADS(BFloat16, bfloat16)
