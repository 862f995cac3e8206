// Gradients in query, key and value, by recomputing the scores tile by tile.
//
// The rows of an entry are taken span by span, and what they send to the keys is collected over all of them. When there
// are few entries, each is cut into parts that collect on their own and are added up in a fixed order; the cut depends
// on the shape alone, so the result does not depend on the number of threads.
#pragma once
#include "forward.h"

namespace massieu::MASSIEU_BUILD {

constexpr int64_t BACKWARD_VECTORS = 2 * WIDEST;  // vectors of rows that share a tile of atoms
constexpr int64_t WANTED_TASKS = 8;

// The coefficients of the score gradient, one row in each lane, in base 2.
template <class Real>
struct RowSlopes {
    Real maximum[MOST_LANES], inverse[MOST_LANES], offset[MOST_LANES];
    Real constant[MOST_LANES], linear[MOST_LANES], quadratic[MOST_LANES], weight[MOST_LANES];
};

template <class Input, class Real>
class GradientBlock {
  public:
    static constexpr int64_t L = Lanes<Real>::COUNT, LANES = BACKWARD_VECTORS * L, PANELS = BACKWARD_VECTORS;

    GradientBlock(const Backward& call, Arena& arena)
        : call_(call),
          rows_(call.rows),
          width_(ceil_div(rows_.dim, L) * L),
          value_width_(call.grad_output ? ceil_div(rows_.value_dim, L) * L : 0) {
        panels_ = arena.take<Panel<Real>>(PANELS);
        slopes_ = arena.take<RowSlopes<Real>>(PANELS);
        query_columns_ = arena.take<Real>(LANES * larger(rows_.dim, width_));
        query_rows_ = arena.take<Real>(LANES * width_);
        coming_columns_ = arena.take<Real>(LANES * value_width_);
        coming_rows_ = arena.take<Real>(LANES * value_width_);
        grad_query_ = arena.take<Real>(LANES * width_);
        score_ = arena.take<Real>(TILE * MOST_LANES);
        slope_ = arena.take<Real>(TILE * MOST_LANES);
        keys_ = arena.take<Real>(TILE * width_);
        values_ = arena.take<Real>(TILE * value_width_);
    }

    // Gradients of one span: those of the queries are written, those of keys and values are added up.
    void add(const Span& span, Real* grad_key, Real* grad_value) {
        start(span);
        for (int64_t from = first_atom_; from < last_atom_; from += TILE) {
            const int64_t end = smaller(from + TILE, last_atom_), entry = span.entry;
            const Tile<Real> keys = tile_of<Input, Real>(rows_.key, rows_.key_batch[entry] + from * rows_.key_row,
                                                         rows_.key_row, end - from, rows_.dim, true, keys_);
            Tile<Real> values{};
            if (value_width_)
                values = tile_of<Input, Real>(rows_.value, rows_.value_batch[entry] + from * rows_.value_row,
                                              rows_.value_row, end - from, rows_.value_dim, false, values_);
            for (int64_t p = 0; p < count_; p++) {
                const int64_t start = larger(from, panels_[p].first_atom), stop = smaller(end, panels_[p].last_atom);
                if (start < stop)
                    tile(p, keys.part(start - from), values.part(start - from), start, stop - start,
                         grad_key + start * width_, grad_value + start * value_width_);
            }
        }
        store_queries();
    }

  private:
    void start(const Span& span) {
        const int64_t vectors = ceil_div(span.count, L);
        wide_ = ceil_div(vectors, ceil_div(vectors, WIDEST)) * L;
        count_ = 0, first_atom_ = rows_.atoms, last_atom_ = 0;
        for (int64_t done = 0; done < span.count; done += wide_, count_++) {
            Panel<Real>& panel = panels_[count_];
            panel.place(rows_, span.entry, span.first + done, smaller(wide_, span.count - done));
            first_atom_ = smaller(first_atom_, panel.first_atom), last_atom_ = larger(last_atom_, panel.last_atom);
            load_queries<Input, Real>(rows_, panel, rows_.scale * LOG2E, query_columns_ + count_ * wide_ * width_);
            load_rows(panel, count_ * wide_);
            load_slopes(panel, slopes_[count_], count_ * wide_);
        }
        std::memset(grad_query_, 0, count_ * wide_ * width_ * sizeof(Real));
    }

    // Queries and incoming gradients, as rows and the latter as columns, too.
    void load_rows(const Panel<Real>& panel, int64_t first) {
        for (int64_t row = 0; row < panel.rows; row++)
            load_row<Input, Real>(query_at<Input>(rows_, panel, row), rows_.dim, rows_.scale,
                                  query_rows_ + (first + row) * width_);
        if (!value_width_) return;
        const Input* coming[MOST_LANES];
        Walk walk(rows_, call_.grad_output_at, panel.entry, panel.first_row);
        for (int64_t row = 0; row < panel.rows; row++, walk.next()) {
            coming[row] = static_cast<const Input*>(call_.grad_output) + walk.start();
            load_row<Input, Real>(coming[row], rows_.value_dim, 1, coming_rows_ + (first + row) * value_width_);
        }
        load_columns<Input, Real>(
            panel, [&](int64_t row) { return coming[row]; }, rows_.value_dim, 1,
            coming_columns_ + first * value_width_);
    }

    void load_slopes(const Panel<Real>& panel, RowSlopes<Real>& slopes, int64_t first) {
        using Stored = Single<Input>;
        const int64_t all_rows = rows_.batch * rows_.groups * rows_.queries;
        for (int64_t lane = 0; lane < panel.lanes; lane++) {
            const int64_t row = row_index(panel) + lane;
            const Stored* moment = static_cast<const Stored*>(call_.moments) + row;
            // Nobody's row, or one without atoms. A row with nan in it is another matter, and goes on.
            if (lane >= panel.rows || moment[0] == -INFINITY) {
                slopes.maximum[lane] = Real(-ABSENT);
                slopes.inverse[lane] = slopes.offset[lane] = slopes.constant[lane] = 0;
                slopes.linear[lane] = slopes.quadratic[lane] = slopes.weight[lane] = 0;
                continue;
            }
            slopes.maximum[lane] = moment[0];
            slopes.inverse[lane] = Real(1 / double(moment[all_rows]));
            slopes.offset[lane] = moment[2 * all_rows];
            if (!call_.coefficients) {
                slopes.constant[lane] = slopes.linear[lane] = slopes.quadratic[lane] = slopes.weight[lane] = 0;
                continue;
            }
            const Stored* coefficient = static_cast<const Stored*>(call_.coefficients) + row;
            slopes.constant[lane] = coefficient[CONSTANT * all_rows];
            slopes.linear[lane] = Real(coefficient[LINEAR * all_rows] * LN2);
            slopes.quadratic[lane] = Real(coefficient[QUADRATIC * all_rows] * (LN2 * LN2));
            slopes.weight[lane] = coefficient[WEIGHT * all_rows];
        }
        if (!value_width_) return;
        Walk walk(rows_, call_.output_at, panel.entry, panel.first_row);
        for (int64_t lane = 0; lane < panel.rows; lane += L)
            store(slopes.constant + lane,
                  load(slopes.constant + lane) -
                      inner(walk, smaller(L, panel.rows - lane), coming_rows_ + (first + lane) * value_width_));
    }

    // The next few outputs times the gradients that come to them.
    Vector<Real> inner(Walk& walk, int64_t rows, const Real* coming) const {
        Vector<Real> products[L] = {};
        for (int64_t i = 0; i < rows; i++, walk.next(), coming += value_width_) {
            const Input* output = static_cast<const Input*>(call_.output) + walk.start();
            for (int64_t c = 0; c < rows_.value_dim; c += L)
                products[i] += load_part<Input, Real>(output + c, rows_.value_dim - c) * load(coming + c);
        }
        return lane_sums<Real>(products);
    }

    void tile(int64_t p, Tile<Real> keys, Tile<Real> values, int64_t from, int64_t count, Real* grad_key,
              Real* grad_value) {
        const Panel<Real>& panel = panels_[p];
        const int64_t lanes = panel.lanes, first = p * wide_;
        tile_scores<Input, Real>(rows_, panel, query_columns_ + first * width_, keys, from, count, score_);
        if (value_width_)
            product<Real, Order::BY_ROW>(
                count, panel.vectors, rows_.value_dim,
                {values.data, values.stride, coming_columns_ + first * value_width_, lanes, slope_, lanes}, false);
        for (int64_t lane = 0; lane < lanes; lane += L) weigh(slopes_[p], lane, count, lanes);
        if (call_.grad_weight) add_weight_gradient(panel, from, count);
        if (value_width_)
            product<Real, Order::BY_ROW>(
                count, value_width_ / L, panel.rows,
                {score_, lanes, coming_rows_ + first * value_width_, value_width_, grad_value, value_width_}, true);
        product<Real, Order::BY_ROW>(count, width_ / L, panel.rows,
                                     {slope_, lanes, query_rows_ + first * width_, width_, grad_key, width_}, true);
        product<Real, Order::BY_COLUMN>(panel.rows, width_ / L, count,
                                        {slope_, lanes, keys.data, keys.stride, grad_query_ + first * width_, width_},
                                        true);
    }

    // Scores become weights, and what came through the values becomes the gradient of the scores.
    void weigh(const RowSlopes<Real>& slopes, int64_t lane, int64_t count, int64_t lanes) {
        const Vector<Real> maximum = load(slopes.maximum + lane), inverse = load(slopes.inverse + lane),
                           offset = load(slopes.offset + lane);
        const Vector<Real> constant = load(slopes.constant + lane), linear = load(slopes.linear + lane);
        const Vector<Real> quadratic = load(slopes.quadratic + lane), collision = load(slopes.weight + lane);
        for (int64_t j = 0; j < count; j++) {
            Real *score = score_ + j * lanes + lane, *slope = slope_ + j * lanes + lane;
            const Vector<Real> below = greatest<Real>(all<Real>(Bits<Real>::SMALLEST), load(score) - maximum);
            const Vector<Real> weight = power_of_two<Real>(below) * inverse, centered = below - offset;
            const Vector<Real> through = value_width_ ? load(slope) + constant : constant;
            store(score, weight);
            store(slope, weight * (through + centered * (linear + centered * quadratic) + collision * weight));
        }
    }

    // A log weight is added to its score, so they have the same gradient, summed over whatever shares the weight.
    void add_weight_gradient(const Panel<Real>& panel, int64_t from, int64_t count) {
        for (int64_t lane = 0; lane < panel.rows; lane++) {
            const int64_t row = panel.first_row + lane, group = row / rows_.queries, query = row % rows_.queries;
            auto* to = static_cast<Single<Input>*>(call_.grad_weight) + call_.grad_weight_batch[panel.entry] +
                       group * call_.grad_weight_group + query * call_.grad_weight_query +
                       from * call_.grad_weight_atom;
            for (int64_t j = 0; j < count; j++)
                to[j * call_.grad_weight_atom] += Single<Input>(slope_[j * panel.lanes + lane]);
        }
    }

    void store_queries() {
        for (int64_t p = 0; p < count_; p++) {
            Walk walk(rows_, call_.grad_query_at, panels_[p].entry, panels_[p].first_row);
            for (int64_t lane = 0; lane < panels_[p].rows; lane++, walk.next()) {
                const Real* from = grad_query_ + (p * wide_ + lane) * width_;
                Input* row = static_cast<Input*>(call_.grad_query) + walk.start();
                for (int64_t c = 0; c < rows_.dim; c++) row[c] = narrowed<Input, Real>(from[c] * Real(rows_.scale));
            }
        }
    }

    int64_t row_index(const Panel<Real>& panel) const {
        return panel.entry * rows_.groups * rows_.queries + panel.first_row;
    }

    const Backward& call_;
    const Rows& rows_;
    int64_t width_, value_width_, count_ = 0, wide_ = 0, first_atom_ = 0, last_atom_ = 0;
    Panel<Real>* panels_;
    RowSlopes<Real>* slopes_;
    Real *query_columns_, *query_rows_, *coming_columns_, *coming_rows_, *grad_query_, *score_, *slope_, *keys_,
        *values_;
};

// Gradients of one entry or part of it; `parts` of them are added up before they are written.
template <class Input, class Real>
struct Collected {
    const Backward& call;
    int64_t width, value_width;

    Collected(const Backward& call_)
        : call(call_),
          width(ceil_div(call.rows.dim, Lanes<Real>::COUNT) * Lanes<Real>::COUNT),
          value_width(call.grad_output ? ceil_div(call.rows.value_dim, Lanes<Real>::COUNT) * Lanes<Real>::COUNT : 0) {}
    int64_t size() const { return ceil_div(call.rows.atoms * (width + value_width), 16) * 16; }
    Real* values(Real* part) const { return part + call.rows.atoms * width; }

    void write(Real* parts, int64_t count, int64_t entry) const {
        for (int64_t p = 1; p < count; p++)
            for (int64_t i = 0; i < size(); i++) parts[i] += parts[p * size() + i];
        write(parts, width, static_cast<Input*>(call.grad_key), call.grad_key_at, entry, call.rows.dim);
        if (call.grad_value && value_width)
            write(values(parts), value_width, static_cast<Input*>(call.grad_value), call.grad_value_at, entry,
                  call.rows.value_dim);
    }

  private:
    void write(const Real* from, int64_t stride, Input* to, const Place& at, int64_t entry, int64_t dim) const {
        to += at.batch[entry];
        for (int64_t j = 0; j < call.rows.atoms; j++, to += at.row)
            for (int64_t c = 0; c < dim; c++) to[c] = narrowed<Input, Real>(from[j * stride + c]);
    }
};

template <class Input, class Real>
void backward_part(const Backward& call, int64_t entry, int64_t part, int64_t parts, char* memory, Real* collected) {
    Arena arena(memory);
    GradientBlock<Input, Real> block(call, arena);
    const Collected<Input, Real> layout(call);
    const Spans spans(call.rows, BACKWARD_VECTORS * Lanes<Real>::COUNT);
    std::memset(collected, 0, layout.size() * sizeof(Real));
    // Every so-manieth span, since under a causal mask the later ones take longer.
    for (int64_t index = part; index < spans.per_entry(); index += parts)
        block.add(spans.at(entry, index), collected, layout.values(collected));
}

// Gradients of all entries that are computed in this precision.
template <class Input, class Real>
int64_t backward_in(const Backward& call, const LargeScores<Input>& large, bool wanted) {
    const Rows& rows = call.rows;
    Arena need;
    GradientBlock<Input, Real>(call, need);
    const Collected<Input, Real> layout(call);
    const int64_t bytes = need.used(), size = layout.size();
    const Spans spans(rows, BACKWARD_VECTORS * Lanes<Real>::COUNT);
    const int64_t parts = call.grad_weight ? 1 : smaller(ceil_div(WANTED_TASKS, rows.batch), spans.per_entry());
    // A part keeps what it collected until its entry is whole; whole entries write at once and need one place per
    // thread.
    const int64_t places = parts > 1 ? rows.batch * parts : rows.threads;
    Memory memory(bytes * rows.threads), collected(places * size * int64_t(sizeof(Real)));
    if (!memory.start() || !collected.start()) return NO_MEMORY;
    Real* place = reinterpret_cast<Real*>(collected.start());
    auto run = [&](int64_t entry, int64_t part, int64_t thread) {
        if (large.in(entry) != wanted) return;
        Real* own = place + (parts > 1 ? entry * parts + part : thread) * size;
        backward_part<Input, Real>(call, entry, part, parts, memory.start() + thread * bytes, own);
        if (parts == 1) layout.write(own, 1, entry);
    };
    if (call.grad_weight) {
        // Entries that share log weights add to the same gradient, so one thread takes them, one after the other.
        auto shares = [&](int64_t i, int64_t k) {
            return call.grad_weight_batch[call.order[i]] == call.grad_weight_batch[call.order[k]];
        };
        in_parallel(rows.batch, rows.threads, [&](int64_t first, int64_t thread) {
            if (first > 0 && shares(first - 1, first)) return;
            for (int64_t i = first; i < rows.batch && shares(first, i); i++) run(call.order[i], 0, thread);
        });
        return DONE;
    }
    in_parallel(rows.batch * parts, rows.threads,
                [&](int64_t task, int64_t thread) { run(task / parts, task % parts, thread); });
    if (parts > 1)
        for (int64_t entry = 0; entry < rows.batch; entry++)
            if (large.in(entry) == wanted) layout.write(place + entry * parts * size, parts, entry);
    return DONE;
}

template <class Input>
int64_t backward_of(const Backward& call) {
    return by_precision<Input>(call.rows, [&](auto real, const LargeScores<Input>& large, bool wanted) {
        return backward_in<Input, decltype(real)>(call, large, wanted);
    });
}

}  // namespace massieu::MASSIEU_BUILD
