// Attention and the statistics of its rows: an online softmax over tiles of atoms.
#pragma once
#include <cmath>
#include <new>
#include <type_traits>

#include "best.h"
#include "parallel.h"
#include "rows.h"

namespace massieu::MASSIEU_BUILD {

// What vectors of weights 2^u add up to, lane by lane.
template <class Real>
struct Weights {
    Vector<Real> total{}, first{}, second{}, collision{};

    // Take in one more, and write it.
    void take(Vector<Real> u, Real* at) {
        const Vector<Real> weight = power_of_two<Real>(u), product = weight * u;
        store(at, weight);
        total += weight;
        first += product;
        second += product * u;
        collision += weight * weight;
    }
    void add(const Weights& other) {
        total += other.total, first += other.first, second += other.second, collision += other.collision;
    }
};

// What is known of the rows of a panel after some of their atoms, with u = score - maximum in base 2. A row is summed
// in double: it may have a million atoms.
template <class Real>
struct RowSums {
    Real maximum[MOST_LANES];
    double total[MOST_LANES], first[MOST_LANES], second[MOST_LANES], collision[MOST_LANES];  // 2^u {1, u, u^2}, 4^u

    // Every row starts with its sink. Where the lanes are atoms of one row, only the first has it.
    void start(const Panel<Real>& panel, bool one_row) {
        for (int64_t lane = 0; lane < panel.lanes; lane++) {
            maximum[lane] = panel.sink[lane];
            total[lane] = collision[lane] = panel.sink[lane] > Real(1.5 * ABSENT) && !(one_row && lane) ? 1 : 0;
            first[lane] = second[lane] = 0;
        }
    }

    // Add up lanes that are atoms of one row; they have the same maximum.
    void fold() {
        for (int64_t lane = 1; lane < Lanes<Real>::COUNT; lane++) {
            total[0] += total[lane], first[0] += first[lane];
            second[0] += second[lane], collision[0] += collision[lane];
        }
    }

    // Re-expand the sums about a higher maximum: all u fall by the same.
    void move(int64_t lane, Real drop, Real decay) {
        const double d = drop, r = decay;
        second[lane] = r * (second[lane] + 2 * d * first[lane] + d * d * total[lane]);
        first[lane] = r * (first[lane] + d * total[lane]);
        collision[lane] *= r * r;
        total[lane] *= r;
    }

    void add(int64_t lane, const Weights<Real>& sum) {
        constexpr int64_t L = Lanes<Real>::COUNT;
        Real totals[L], firsts[L], seconds[L], collisions[L];
        store(totals, sum.total), store(firsts, sum.first);
        store(seconds, sum.second), store(collisions, sum.collision);
        for (int64_t i = 0; i < L; i++) {
            total[lane + i] += totals[i];
            first[lane + i] += firsts[i];
            second[lane + i] += seconds[i];
            collision[lane + i] += collisions[i];
        }
    }
};

// Turn the scores of one vector of rows into weights 2^u, and take them into the sums; in `one_row` the lanes are atoms
// of the same row and have one maximum. Returns whether outputs decay.
template <class Real, bool ONE_ROW>
bool absorb(RowSums<Real>& sums, int64_t lane, int64_t count, int64_t stride, Real* score, Real* decay) {
    constexpr int64_t L = Lanes<Real>::COUNT;
    const Vector<Real> old = load(sums.maximum + lane);
    Vector<Real> even = old, odd = old;
    int64_t j = 0;
    for (; j + 2 <= count; j += 2) {
        even = greatest<Real>(even, load(score + j * stride));
        odd = greatest<Real>(odd, load(score + (j + 1) * stride));
    }
    if (j < count) even = greatest<Real>(even, load(score + j * stride));
    Vector<Real> maximum = greatest<Real>(even, odd);
    const bool moved = any<Real>(maximum > old);
    if (ONE_ROW && moved) {
        Real most = maximum[0];
        for (int64_t i = 1; i < L; i++) most = maximum[i] > most ? maximum[i] : most;
        maximum = all<Real>(most);
    }

    Weights<Real> a, b, sum;
    // Atoms too light to matter must not overflow the square.
    auto below = [&](int64_t at) {
        return greatest<Real>(all<Real>(Bits<Real>::SMALLEST), load(score + at * stride) - maximum);
    };
    // Sums of sums: one long sum of equal weights would round the same way at every step.
    for (j = 0; j + 2 <= count;) {
        for (const int64_t stop = smaller(count - 1, j + 16); j < stop; j += 2) {
            a.take(below(j), score + j * stride);
            b.take(below(j + 1), score + (j + 1) * stride);
        }
        a.add(b), sum.add(a);
        a = b = Weights<Real>();
    }
    if (j < count) sum.take(below(j), score + j * stride);

    if (moved) {
        const Vector<Real> drop = old - maximum;
        store(decay, power_of_two<Real>(drop)), store(sums.maximum + lane, maximum);
        for (int64_t i = 0; i < L; i++) sums.move(lane + i, drop[i], decay[i]);
    } else {
        store(decay, all<Real>(1));
    }
    sums.add(lane, sum);
    return moved;
}

// Largest number of rows that are taken one by one: lanes full of atoms are faster than lanes that are mostly padding.
constexpr int64_t FEW_ROWS = 4;
// Numbers in a tile of keys of such a row: it stays in the second cache for the other rows.
constexpr int64_t ROW_TILE = 32 * 1024;
constexpr int64_t STEADY_VECTORS =
    16;  // vectors of atoms whose weights such a row adds up before it rounds to its sums

// A span of rows on its way through the atoms: panels of rows, their sums and their outputs.
template <class Input, class Real>
class RowBlock {
  public:
    static constexpr int64_t L = Lanes<Real>::COUNT, MOST_PANELS = BLOCK_VECTORS;

    RowBlock(const Rows& call, Arena& arena, int64_t top = 0)
        : call_(call),
          width_(ceil_div(call.dim, L) * L),
          value_width_(call.value ? ceil_div(call.value_dim, L) * L : 0),
          row_tile_(larger(L, smaller(TILE * MOST_LANES, ROW_TILE / larger(width_, value_width_)) / L * L)),
          best_(top, arena) {
        const int64_t lanes = BLOCK_VECTORS * L;
        panels_ = arena.take<Panel<Real>>(MOST_PANELS);
        sums_ = arena.take<RowSums<Real>>(MOST_PANELS);
        queries_ = arena.take<Real>(lanes * width_);
        score_ = arena.take<Real>(TILE * MOST_LANES);
        output_ = arena.take<Real>(lanes * value_width_);
        keys_ = arena.take<Real>(larger(TILE, row_tile_) * width_);
        values_ = arena.take<Real>(larger(TILE, row_tile_) * value_width_);
    }

    void start(const Span& span) {
        count_ = 0, first_atom_ = call_.atoms, last_atom_ = 0;
        one_row_ = span.count <= FEW_ROWS;
        best_.start();
        const int64_t vectors = ceil_div(span.count, L);
        wide_ = one_row_ ? 1 : ceil_div(vectors, ceil_div(vectors, WIDEST)) * L;
        for (int64_t done = 0; done < span.count; done += wide_, count_++) {
            Panel<Real>& panel = panels_[count_];
            panel.place(call_, span.entry, span.first + done, smaller(wide_, span.count - done));
            sums_[count_].start(panel, one_row_);
            first_atom_ = smaller(first_atom_, panel.first_atom), last_atom_ = larger(last_atom_, panel.last_atom);
            if (one_row_)
                load_row<Input, Real>(query_at<Input>(call_, panel, 0), call_.dim, call_.scale * LOG2E,
                                      queries(count_));
            else
                load_queries<Input, Real>(call_, panel, call_.scale * LOG2E, queries(count_));
        }
        std::memset(output_, 0, count_ * wide_ * value_width_ * sizeof(Real));
    }

    // Take in the atoms of a range, as far as the rows see them.
    void absorb_atoms(int64_t from, int64_t to) {
        from = larger(from, first_atom_), to = smaller(to, last_atom_);
        const int64_t entry = panels_[0].entry;
        const int64_t step = one_row_ ? row_tile_ : TILE;
        for (; from < to; from += step) {
            const int64_t end = smaller(from + step, to);
            const Tile<Real> keys = tile_of<Input, Real>(call_.key, call_.key_batch[entry] + from * call_.key_row,
                                                         call_.key_row, end - from, call_.dim, one_row_, keys_);
            Tile<Real> values{};
            if (value_width_)
                values = tile_of<Input, Real>(call_.value, call_.value_batch[entry] + from * call_.value_row,
                                              call_.value_row, end - from, call_.value_dim, true, values_);
            for (int64_t p = 0; p < count_; p++) {
                // Only what this panel sees of the tile.
                const int64_t start = larger(from, panels_[p].first_atom), stop = smaller(end, panels_[p].last_atom);
                if (start >= stop) continue;
                const Tile<Real> key = keys.part(start - from), value = values.part(start - from);
                one_row_ ? row_tile(p, key, value, start, stop - start) : tile(p, key, value, start, stop - start);
            }
        }
    }

    void finish() {
        for (int64_t p = 0; one_row_ && p < count_; p++) sums_[p].fold();
    }

    int64_t panels() const { return count_; }
    const Panel<Real>& panel(int64_t p) const { return panels_[p]; }
    RowSums<Real>& sums(int64_t p) { return sums_[p]; }
    Real* output(int64_t p) { return output_ + p * wide_ * value_width_; }
    int64_t value_width() const { return value_width_; }
    Best& best(int64_t p, int64_t lane) { return best_[p * wide_ + lane]; }

  private:
    void tile(int64_t p, Tile<Real> keys, Tile<Real> values, int64_t from, int64_t count) {
        const Panel<Real>& panel = panels_[p];
        const int64_t lanes = panel.lanes;
        Real decay[MOST_LANES];
        bool moved = false;
        tile_scores<Input, Real>(call_, panel, queries(p), keys, from, count, score_);
        best_.absorb(p * wide_, panel.rows, lanes, score_, from, count);
        for (int64_t lane = 0; lane < lanes; lane += L)
            moved = absorb<Real, false>(sums_[p], lane, count, lanes, score_ + lane, decay + lane) || moved;
        add_values(p, lanes, values, count, moved ? decay : nullptr);
    }

    // The same for a panel of one row. A vector of atoms at a time: they serve as values while they are in the first
    // cache, and the next ones come from memory meanwhile.
    void row_tile(int64_t p, Tile<Real> keys, Tile<Real> values, int64_t from, int64_t count) {
        for (int64_t few; count; count -= few, from += few, keys = keys.part(few), values = values.part(few)) {
            if ((few = steady(p, keys, values, count))) continue;
            few = smaller(count, L);
            Real decay[L];
            row_scores<Input, Real>(call_, panels_[p], queries(p), keys, from, few, score_);
            best_.absorb_row(p, score_, from, few);
            const bool moved = absorb<Real, true>(sums_[p], 0, 1, L, score_, decay);
            add_values(p, 1, values, few, moved ? decay : nullptr);
        }
    }

    // Take in atoms of one row as long as none of them is among the best so far: nothing decays then, and all that is
    // added up stays in registers. Returns how many were taken in; none if the row is too wide for that.
    int64_t steady(int64_t p, Tile<Real> keys, Tile<Real> values, int64_t count) {
        if ((value_width_ && width_ != value_width_) || call_.log_weight) return 0;
        switch (width_ / L) {
            case 1:
                return value_width_ ? steady_run<1, 1>(p, keys, values, count)
                                    : steady_run<1, 0>(p, keys, values, count);
            case 2:
                return value_width_ ? steady_run<2, 2>(p, keys, values, count)
                                    : steady_run<2, 0>(p, keys, values, count);
            case 3:
                return value_width_ ? steady_run<3, 3>(p, keys, values, count)
                                    : steady_run<3, 0>(p, keys, values, count);
            case 4:
                return value_width_ ? steady_run<4, 4>(p, keys, values, count)
                                    : steady_run<4, 0>(p, keys, values, count);
            default:
                return 0;
        }
    }

    template <int64_t VECTORS, int64_t VALUES>
    int64_t steady_run(int64_t p, Tile<Real> keys, Tile<Real> values, int64_t count) {
        const Vector<Real> maximum = load(sums_[p].maximum);
        const Vector<Real> bar = best_.most() ? all<Real>(best_.bar(p)) : maximum;
        Vector<Real> output[VALUES + 1];
#pragma GCC unroll 4
        for (int64_t v = 0; v < VALUES; v++) output[v] = load(this->output(p) + v * L);
        Weights<Real> sum;
        int64_t done = 0;
        for (count = smaller(count, STEADY_VECTORS * L); done + L <= count; done += L) {
            const Vector<Real> score = vector_of_scores<Real>(queries(p), keys, L, VECTORS * L);
            if (any<Real>(score > bar)) break;
            Real weight[L];
            sum.take(greatest<Real>(all<Real>(Bits<Real>::SMALLEST), score - maximum), weight);
#pragma GCC unroll 16
            for (int64_t k = 0; k < L; k++)
#pragma GCC unroll 4
                for (int64_t v = 0; v < VALUES; v++)
                    output[v] += weight[k] * load(values.data + k * values.stride + v * L);
            keys = keys.part(L), values = values.part(L);
        }
#pragma GCC unroll 4
        for (int64_t v = 0; v < VALUES; v++) store(this->output(p) + v * L, output[v]);
        sums_[p].add(0, sum);
        return done;
    }

    // Weights times values; before that, outputs decay where a maximum moved.
    void add_values(int64_t p, int64_t lanes, Tile<Real> values, int64_t count, const Real* decay) {
        if (!value_width_) return;
        const int64_t rows = panels_[p].rows;
        Real* output = this->output(p);
        if (decay)
            for (int64_t row = 0; row < rows; row++)
                for (int64_t c = 0; c < value_width_; c += L)
                    store<Real>(output + row * value_width_ + c,
                                load<Real>(output + row * value_width_ + c) * decay[row]);
        product<Real, Order::BY_COLUMN>(rows, value_width_ / L, count,
                                        {score_, lanes, values.data, values.stride, output, value_width_}, true);
    }

    Real* queries(int64_t p) { return queries_ + p * wide_ * width_; }

    const Rows& call_;
    bool one_row_ = false;  // panels of one row, whose lanes are atoms
    int64_t width_, value_width_, row_tile_, count_ = 0, wide_ = 0, first_atom_ = 0, last_atom_ = 0;
    BestOfRows<Real> best_;
    Panel<Real>* panels_;
    RowSums<Real>* sums_;
    Real *queries_, *score_, *output_, *keys_, *values_;
};

// Write the output of one finished row where it belongs, and its statistics.
template <class Input, class Real>
void finish_row(const Forward& call, const RowSums<Real>& sums, int64_t lane, const Real* output, Input* to,
                int64_t row) {
    using Stored = Single<Input>;
    const int64_t rows = call.rows.batch * call.rows.groups * call.rows.queries,
                  dim = call.rows.value ? call.rows.value_dim : 0;
    Stored* statistic = static_cast<Stored*>(call.statistics) + row;
    const double maximum = sums.maximum[lane], total = sums.total[lane];
    if (maximum < 0.5 * ABSENT && total == total) {  // a score that was nan left its mark in the total
        for (int64_t c = 0; c < dim; c++) to[c] = narrowed<Input, Real>(0);
        for (int64_t s = 0; s < STATISTICS; s++) statistic[s * rows] = Stored(NAN);
        statistic[MAXIMUM * rows] = Stored(-INFINITY);
        return;
    }
    const Real inverse = Real(1 / total);
    for (int64_t c = 0; c < dim; c++) to[c] = narrowed<Input, Real>(output[c] * inverse);
    const double log_total = std::log(total), offset = sums.first[lane] / total;
    const double spread = sums.second[lane] / total - offset * offset;
    statistic[LOG_NORMALIZER * rows] = Stored(LN2 * maximum + log_total);
    statistic[SCORE_MEAN * rows] = Stored(LN2 * (maximum + offset));
    statistic[ENTROPY * rows] = Stored(log_total - LN2 * offset);  // total >= 1 and offset <= 0: never negative
    statistic[SCORE_VARIANCE * rows] = Stored(LN2 * LN2 * (spread < 0 ? 0 : spread));
    statistic[PEAK * rows] = Stored(1 / total);
    statistic[COLLISION * rows] = Stored(sums.collision[lane] / (total * total));
    // The backward pass starts from the maximum as it is stored, so the sums refer to that one.
    const Stored kept = Stored(maximum);
    const double lost = maximum - double(kept);
    statistic[MAXIMUM * rows] = kept;
    statistic[TOTAL * rows] = Stored(lost == 0 ? total : total * std::exp2(lost));
    statistic[OFFSET * rows] = Stored(offset + lost);
}

template <class Input, class Real>
void forward_span(const Forward& call, const Span& span, char* memory) {
    Arena arena(memory);
    RowBlock<Input, Real> block(call.rows, arena);
    block.start(span);
    block.absorb_atoms(0, call.rows.atoms);
    block.finish();
    int64_t row = span.entry * call.rows.groups * call.rows.queries + span.first;
    Walk walk(call.rows, call.output_at, span.entry, span.first);
    for (int64_t p = 0; p < block.panels(); p++)
        for (int64_t lane = 0; lane < block.panel(p).rows; lane++, walk.next())
            finish_row<Input, Real>(call, block.sums(p), lane, block.output(p) + lane * block.value_width(),
                                    static_cast<Input*>(call.output) + walk.start(), row++);
}

// Scores beyond this are computed in double: float32 rounds them by more than 1e-4, and weights with them.
constexpr double LARGE_SCORE = 1000;

// Whether scores of an entry may be large, by the norms of its longest query and key. Computed by the first
// thread; two threads at once compute the same.
template <class Input>
class LargeScores {
  public:
    LargeScores(const Rows& call, char* memory) : call_(call), known_(reinterpret_cast<std::atomic<int8_t>*>(memory)) {
        for (int64_t entry = 0; entry < call.batch; entry++) new (known_ + entry) std::atomic<int8_t>(UNKNOWN);
    }

    bool in(int64_t entry) const {
        int8_t answer = known_[entry].load(std::memory_order_relaxed);
        if (answer == UNKNOWN) {
            answer = sizeof(Input) < sizeof(double) && bound(entry) ? YES : NO;
            known_[entry].store(answer, std::memory_order_relaxed);
        }
        return answer == YES;
    }
    bool any() const {
        for (int64_t entry = 0; entry < call_.batch; entry++)
            if (known_[entry].load(std::memory_order_relaxed) == YES) return true;
        return false;
    }

  private:
    enum : int8_t { UNKNOWN, NO, YES };

    bool bound(int64_t entry) const {
        // What no row exceeds is found faster than what the longest one has, and mostly says enough.
        for (const bool exact : {false, true}) {
            const double most = square(entry, exact);
            if (std::fabs(call_.scale) * std::sqrt(most) <= LARGE_SCORE) return false;
        }
        return true;  // nan counts as large
    }

    // The squared norms of the longest query and the longest key, multiplied; or more, unless exact.
    double square(int64_t entry, bool exact) const {
        const Input *key = static_cast<const Input*>(call_.key) + call_.key_batch[entry],
                    *query = static_cast<const Input*>(call_.query) + call_.query_batch[entry];
        double most = 0;
        for (int64_t group = 0; group < call_.groups; group++)
            most = longer(most, longest(query + call_.query_group[group], call_.query_row, call_.queries, exact));
        return most * longest(key, call_.key_row, call_.atoms, exact);
    }

    // The largest squared norm of the rows. Unless exact, each lane takes the most of any row, which is more.
    double longest(const Input* row, int64_t stride, int64_t count, bool exact) const {
        constexpr int64_t L = Lanes<float>::COUNT;
        double most = 0;
        Vector<float> lanes{}, nothing{};  // zero, or nan where a row has nan
        for (int64_t i = 0; i < count; i++, row += stride) {
            Vector<float> sum{};
            for (int64_t c = 0; c < call_.dim; c += L) {
                const Vector<float> part = load_part<Input, float>(row + c, call_.dim - c);
                sum += part * part;
            }
            lanes = greatest<float>(sum, lanes), nothing += sum - sum;
            if (exact) most = longer(most, total(sum));
        }
        return exact ? most : total(lanes + nothing);
    }

    static double total(Vector<float> x) {
        double sum = 0;
        for (int64_t i = 0; i < Lanes<float>::COUNT; i++) sum += x[i];
        return sum;
    }
    static double longer(double most, double own) { return own <= most || most != most ? most : own; }
    const Rows& call_;
    std::atomic<int8_t>* known_;
};

// Runs a pass in the precision that each entry needs: the entry alone decides, not what else is in the batch. The pass
// gets a value of the type to compute in, and leaves out the entries for which large.in(entry) is not `wanted`.
template <class Input, class Pass>
int64_t by_precision(const Rows& rows, const Pass& pass) {
    Memory memory(rows.batch * int64_t(sizeof(std::atomic<int8_t>)));
    if (!memory.start()) return NO_MEMORY;
    const LargeScores<Input> large(rows, memory.start());
    using Usual = std::conditional_t<sizeof(Input) == sizeof(double), double, float>;
    const int64_t status = pass(Usual(), large, false);
    return status == DONE && large.any() ? pass(double(), large, true) : status;
}

template <class Input>
int64_t forward_of(const Forward& call) {
    return by_precision<Input>(call.rows, [&](auto real, const LargeScores<Input>& large, bool wanted) -> int64_t {
        using Real = decltype(real);
        Arena need;
        RowBlock<Input, Real>(call.rows, need);
        const int64_t bytes = need.used();
        Memory memory(bytes * call.rows.threads);
        if (!memory.start()) return NO_MEMORY;
        const Spans spans(call.rows, BLOCK_VECTORS * Lanes<Real>::COUNT);
        const int64_t count = spans.per_entry();
        in_parallel(call.rows.batch * count, call.rows.threads, [&](int64_t task, int64_t thread) {
            if (large.in(task / count) == wanted)
                forward_span<Input, Real>(call, spans.at(task / count, task % count), memory.start() + thread * bytes);
        });
        return DONE;
    });
}

}  // namespace massieu::MASSIEU_BUILD
