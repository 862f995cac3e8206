// Rows of scores: which rows go together, which atoms each of them sees, and the scores of a tile.
//
// A panel is a few vectors of rows, one row in each lane. Scores of a tile lie atom by atom, score[atom][lane], so that
// maxima, exponentials and moments of all rows of a panel go on side by side and no sum runs across a vector.
#pragma once
#include <type_traits>

#include "interface.h"
#include "product.h"

namespace massieu::MASSIEU_BUILD {

constexpr double ABSENT = -1e15;  // score of an absent atom: finite, so that no tile ever computes inf - inf
constexpr double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;
constexpr int64_t TILE = 128;          // atoms of a tile: its scores stay in the first cache
constexpr int64_t BLOCK_VECTORS = 12;  // vectors of rows that share a tile of atoms
constexpr int64_t MOST_LANES = WIDEST * Lanes<float>::COUNT;

template <class Input>
struct WeightOf {
    using type = float;
};
template <>
struct WeightOf<double> {
    using type = double;
};
// Log weights and statistics of half precision inputs are float32.
template <class Input>
using Single = typename WeightOf<Input>::type;

// A few rows of one batch entry, counted through its groups: row = group * queries + query.
struct Span {
    int64_t entry, first, count;
};

// All rows of a call, in spans of at most `height`. Long groups are not mixed: their rows see different atoms.
class Spans {
  public:
    Spans(const Rows& rows, int64_t height) : height_(height) {
        const bool mixed = rows.queries < height / 2;
        sets_ = mixed ? 1 : rows.groups;
        length_ = mixed ? rows.groups * rows.queries : rows.queries;
        per_set_ = ceil_div(length_, height);
    }
    int64_t per_entry() const { return sets_ * per_set_; }
    // Within a group the last rows come first: under a causal mask they take longest.
    Span at(int64_t entry, int64_t index) const {
        const int64_t set = index / per_set_, first = (per_set_ - 1 - index % per_set_) * height_;
        return {entry, set * length_ + first, smaller(height_, length_ - first)};
    }

  private:
    int64_t height_, sets_, length_, per_set_;
};

// Goes through the rows of an entry, from one to the next. Of a tensor that is not there, every row starts at zero.
class Walk {
  public:
    Walk(const Rows& rows, const Place& place, int64_t entry, int64_t row)
        : queries_(rows.queries),
          place_(place),
          start_(place.batch ? place.batch[entry] : 0),
          group_(row / queries_),
          query_(row % queries_) {}
    int64_t group() const { return group_; }
    int64_t query() const { return query_; }
    int64_t start() const { return start_ + (place_.group ? place_.group[group_] : 0) + query_ * place_.row; }
    void next() {
        if (++query_ == queries_) query_ = 0, group_++;
    }

  private:
    int64_t queries_;
    Place place_;
    int64_t start_, group_, query_;
};

// Which atoms the rows of a panel see, and where their log weights lie.
template <class Real>
struct Panel {
    int64_t entry, first_row, rows, vectors, lanes;
    int64_t first_atom, last_atom;    // seen by at least one row
    int64_t inner_first, inner_last;  // seen by every row
    typename Bits<Real>::Integer first[MOST_LANES], last[MOST_LANES];
    int64_t query[MOST_LANES], weight[MOST_LANES];  // where each row starts in the queries and in the log weights
    bool one_weight;                                // all rows have the same log weights
    Real sink[MOST_LANES];

    void place(const Rows& call, int64_t entry_, int64_t first_row_, int64_t rows_) {
        entry = entry_, first_row = first_row_, rows = rows_;
        vectors = ceil_div(rows, Lanes<Real>::COUNT), lanes = vectors * Lanes<Real>::COUNT;
        first_atom = call.atoms, last_atom = 0, inner_first = 0, inner_last = call.atoms;
        one_weight = true;
        Walk walk(call, {call.query_batch, call.query_group, call.query_row}, entry, first_row);
        for (int64_t lane = 0; lane < lanes; lane++) {
            const int64_t group = walk.group(), here = walk.query() + call.atoms - call.queries;
            int64_t from = 0, to = call.atoms;
            if (call.lengths) to = smaller(to, call.lengths[entry * call.groups + group]);
            if (call.causal) to = smaller(to, here + 1);
            if (call.window) from = larger(from, here - call.window + 1);
            if (call.window && !call.causal) to = smaller(to, here + call.window);
            first[lane] = from, last[lane] = larger(to, 0);
            first_atom = smaller(first_atom, from), last_atom = larger(last_atom, to);
            inner_first = larger(inner_first, from), inner_last = smaller(inner_last, to);
            query[lane] = walk.start();
            weight[lane] = group * call.weight_group + walk.query() * call.weight_query;
            one_weight = one_weight && weight[lane] == weight[0];
            sink[lane] = call.sink ? Real(larger_real(call.sink[entry * call.groups + group] * LOG2E, ABSENT))
                                   : Real(2 * ABSENT);
            // Lanes beyond the last row repeat it; they are not read.
            if (lane + 1 < rows) walk.next();
        }
        if (call.log_weight)
            for (int64_t lane = 0; lane < lanes; lane++) weight[lane] += call.weight_batch[entry];
    }

  private:
    static double larger_real(double a, double b) { return a > b ? a : b; }
};

// Rows of keys or values as a product reads them: in place where that is possible, else converted and padded.
template <class Real>
struct Tile {
    const Real* data;
    int64_t stride;
    Tile part(int64_t first) const { return {data + first * stride, stride}; }
};
template <class Input, class Real>
Tile<Real> tile_of(const void* base, int64_t start, int64_t stride, int64_t count, int64_t dim, bool padded,
                   Real* scratch) {
    const Input* from = static_cast<const Input*>(base) + start;
    if constexpr (sizeof(Input) == sizeof(Real))
        if (!padded || dim % Lanes<Real>::COUNT == 0) return {from, stride};
    const int64_t width = ceil_div(dim, Lanes<Real>::COUNT) * Lanes<Real>::COUNT;
    for (int64_t j = 0; j < count; j++) {
        for (int64_t c = 0; c < dim; c++) scratch[j * width + c] = Real(widened(from[j * stride + c]));
        for (int64_t c = dim; c < width; c++) scratch[j * width + c] = 0;
    }
    return {scratch, width};
}

// A log weight in base 2; below about -7e14 the atom is absent.
template <class Real>
inline Real base_two(Real log_weight) {
    return log_weight > Real(ABSENT * LN2) ? log_weight * Real(LOG2E) : Real(ABSENT);
}

// Log weights of one row, whose scores lie `stride` apart.
template <class Input, class Real>
void add_row_weights(const Rows& call, int64_t start, int64_t from, int64_t count, Real* score, int64_t stride) {
    const Single<Input>* own = static_cast<const Single<Input>*>(call.log_weight) + start + from * call.weight_atom;
    for (int64_t j = 0; j < count; j++) score[j * stride] += base_two(Real(own[j * call.weight_atom]));
}

template <class Input, class Real>
void add_log_weights(const Rows& call, const Panel<Real>& panel, int64_t from, int64_t count, Real* score) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    if (!panel.one_weight) {
        for (int64_t lane = 0; lane < panel.rows; lane++)
            add_row_weights<Input, Real>(call, panel.weight[lane], from, count, score + lane, panel.lanes);
        return;
    }
    const auto* weight = static_cast<const Single<Input>*>(call.log_weight) + panel.weight[0];
    for (int64_t j = 0; j < count; j++) {
        const Real added = base_two(Real(weight[(from + j) * call.weight_atom]));
        Real* row = score + j * panel.lanes;
        for (int64_t lane = 0; lane < panel.lanes; lane += L) store<Real>(row + lane, load<Real>(row + lane) + added);
    }
}

template <class Real>
void hide(const Panel<Real>& panel, int64_t from, int64_t start, int64_t stop, Real* score) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    using Integer = typename Bits<Real>::Integer;
    using Loose = const typename Lanes<Real>::WholeMemory;
    for (int64_t j = start; j < stop; j++)
        for (int64_t v = 0; v < panel.lanes; v += L) {
            const Whole<Real> atom = Integer(from + j) - Whole<Real>{};
            const auto seen = (atom >= *reinterpret_cast<Loose*>(panel.first + v)) &
                              (atom < *reinterpret_cast<Loose*>(panel.last + v));
            Real* at = score + j * panel.lanes + v;
            store<Real>(at, seen ? load<Real>(at) : all<Real>(Real(ABSENT)));
        }
}

// A row times a factor, filled up with zeros to whole vectors.
template <class Input, class Real>
void load_row(const Input* from, int64_t dim, double factor, Real* to) {
    for (int64_t c = 0; c < dim; c++) to[c] = Real(widened(from[c])) * Real(factor);
    for (int64_t c = dim; c % Lanes<Real>::COUNT; c++) to[c] = 0;
}

// The next lanes of a row with `left` entries; the rest is zero.
template <class Input, class Real>
Vector<Real> load_part(const Input* from, int64_t left) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    if constexpr (std::is_same_v<Input, Real>)
        if (left >= L) return load(from);
    Real part[L] = {};
    for (int64_t i = 0; i < smaller(left, L); i++) part[i] = Real(widened(from[i]));
    return load(part);
}

// Rows of a panel times a factor, by column: (dim filled up to whole vectors, lanes). Lanes beyond the last row are
// zero.
template <class Input, class Real, class RowAt>
void load_columns(const Panel<Real>& panel, const RowAt& row_at, int64_t dim, double factor, Real* columns) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    for (int64_t first = 0; first < panel.lanes; first += L)
        for (int64_t c = 0; c < dim; c += L) {
            Vector<Real> block[L] = {};
            for (int64_t i = 0; i < smaller(L, panel.rows - first); i++)
                block[i] = load_part<Input, Real>(row_at(first + i) + c, dim - c) * Real(factor);
            transpose<Real>(block);
            for (int64_t i = 0; i < L; i++) store(columns + (c + i) * panel.lanes + first, block[i]);
        }
}

// Where the query of a row of the panel lies.
template <class Input, class Real>
const Input* query_at(const Rows& call, const Panel<Real>& panel, int64_t row) {
    return static_cast<const Input*>(call.query) + panel.query[row];
}

template <class Input, class Real>
void load_queries(const Rows& call, const Panel<Real>& panel, double factor, Real* columns) {
    auto query = [&](int64_t row) { return query_at<Input>(call, panel, row); };
    load_columns<Input, Real>(panel, query, call.dim, factor, columns);
}

// Base-2 scores of a tile, score[atom][lane], log weights and absent atoms included.
template <class Input, class Real>
void tile_scores(const Rows& call, const Panel<Real>& panel, const Real* columns, Tile<Real> keys, int64_t from,
                 int64_t count, Real* score) {
    product<Real, Order::BY_ROW>(count, panel.vectors, call.dim,
                                 {keys.data, keys.stride, columns, panel.lanes, score, panel.lanes}, false);
    if (call.log_weight) add_log_weights<Input, Real>(call, panel, from, count, score);
    hide(panel, from, 0, smaller(count, panel.inner_first - from), score);
    hide(panel, from, larger(0, panel.inner_last - from), count, score);
}

// The products of a query and a key, added up lane by lane. Half a vector at a time where a vector is a whole line of
// the cache: the processor fetches ahead from memory far better along lines that are touched twice.
template <class Real>
class Products {
  public:
    static constexpr int64_t L = Lanes<Real>::COUNT;
#if MASSIEU_VECTOR_BYTES == 64 && (defined(__clang__) || __GNUC__ >= 12)
    void take(const Real* query, const Real* key) {
        low_ += half(query) * half(key);
        high_ += half(query + L / 2) * half(key + L / 2);
    }
    Vector<Real> sum() const { return joined(std::make_integer_sequence<int64_t, L>()); }

  private:
    typedef Real Half __attribute__((vector_size(32)));
    typedef Real Memory __attribute__((vector_size(32), aligned(sizeof(Real)), may_alias));
    static Half half(const Real* from) { return *reinterpret_cast<const Memory*>(from); }
    template <int64_t... LANE>
    Vector<Real> joined(std::integer_sequence<int64_t, LANE...>) const {
        return __builtin_shufflevector(low_, high_, LANE...);
    }
    Half low_{}, high_{};
#else
    void take(const Real* query, const Real* key) { sum_ += load(query) * load(key); }
    Vector<Real> sum() const { return sum_; }

  private:
    Vector<Real> sum_{};
#endif
};

// Scores of as many keys as there are lanes; of fewer, the last one is repeated.
template <class Real>
inline Vector<Real> vector_of_scores(const Real* query, Tile<Real> keys, int64_t count, int64_t dim) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    Vector<Real> products[L];
#pragma GCC unroll 1  // key after key, in the order in which they come from memory
    for (int64_t k = 0; k < L; k++) {
        const Real* key = keys.data + smaller(k, count - 1) * keys.stride;
        Products<Real> sum;
        for (int64_t c = 0; c < dim; c += L) sum.take(query + c, key + c);
        products[k] = sum.sum();
    }
    return lane_sums<Real>(products);
}

// The same for a panel of one row, with one atom in each lane: score[atom], filled up with absent atoms. The panel sees
// what its row sees, so nothing is left to hide.
template <class Input, class Real>
void row_scores(const Rows& call, const Panel<Real>& panel, const Real* query, Tile<Real> keys, int64_t from,
                int64_t count, Real* score) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    for (int64_t j = 0; j < count; j += L)
        store(score + j, vector_of_scores<Real>(query, keys.part(j), count - j, call.dim));
    if (call.log_weight) add_row_weights<Input, Real>(call, panel.weight[0], from, count, score, 1);
    for (int64_t j = count; j % Lanes<Real>::COUNT; j++) score[j] = Real(ABSENT);
}

}  // namespace massieu::MASSIEU_BUILD
