// How many of the heaviest atoms of a row hold a given mass.
//
// Positive floats are ordered like their bit patterns, so the lightest weight that is needed is found by bisection over
// patterns: each step adds up what weighs at least so much, for a whole vector of rows at a time.
#pragma once
#include "forward.h"

namespace massieu::MASSIEU_BUILD {

template <class Input, class Real>
class MassCount {
  public:
    static constexpr int64_t L = Lanes<Real>::COUNT;
    using Integer = typename Bits<Real>::Integer;

    MassCount(const Count& call, Arena& arena) : call_(call), rows_(call.rows) {
        panel_ = arena.take<Panel<Real>>(1);
        queries_ = arena.take<Real>(L * ceil_div(rows_.dim, L) * L);
        weight_ = arena.take<Real>((rows_.atoms + 1) * L);
        keys_ = arena.take<Real>(TILE * ceil_div(rows_.dim, L) * L);
    }

    void count(const Span& span) {
        panel_->place(rows_, span.entry, span.first, span.count);
        load_queries<Input, Real>(rows_, *panel_, rows_.scale * LOG2E, queries_);
        weigh();
        if (kept_) bisect();
        const int64_t first = span.entry * rows_.groups * rows_.queries + span.first;
        for (int64_t lane = 0; lane < span.count; lane++)
            call_.count[first + lane] = kept_ && maximum_[lane] > Real(0.5 * ABSENT) ? found_[lane] : 0;
    }

  private:
    struct Held {
        double mass[L];
        int64_t atoms[L];
    };

    // Weights 2^(score - maximum) of all atoms that any of the rows sees, weight_[atom][lane].
    void weigh() {
        kept_ = 0;
        for (int64_t from = panel_->first_atom; from < panel_->last_atom; from += TILE) {
            const int64_t size = smaller(TILE, panel_->last_atom - from);
            const Tile<Real> keys =
                tile_of<Input, Real>(rows_.key, rows_.key_batch[panel_->entry] + from * rows_.key_row, rows_.key_row,
                                     size, rows_.dim, false, keys_);
            tile_scores<Input, Real>(rows_, *panel_, queries_, keys, from, size, weight_ + kept_ * L);
            kept_ += size;
        }
        if (rows_.sink) store(weight_ + kept_++ * L, load(panel_->sink));
        Vector<Real> maximum = all<Real>(Real(2 * ABSENT));
        for (int64_t j = 0; j < kept_; j++) maximum = greatest<Real>(maximum, load(weight_ + j * L));
        for (int64_t j = 0; j < kept_; j++) store(weight_ + j * L, power_of_two<Real>(load(weight_ + j * L) - maximum));
        store(maximum_, maximum);
    }

    // Mass and number of the atoms that weigh at least so much.
    Held held(const Integer* pattern) const {
        Held sum{};
        const Vector<Real> least = *reinterpret_cast<const typename Lanes<Real>::Memory*>(pattern);
        for (int64_t start = 0; start < kept_; start += TILE) {
            Vector<Real> mass{};
            Whole<Real> atoms{};
            for (int64_t j = start; j < smaller(start + TILE, kept_); j++) {
                const Vector<Real> weight = load(weight_ + j * L);
                mass += weight >= least ? weight : Vector<Real>{};
                atoms -= (Whole<Real>)(weight >= least);
            }
            for (int64_t lane = 0; lane < L; lane++) sum.mass[lane] += mass[lane], sum.atoms[lane] += atoms[lane];
        }
        return sum;
    }

    void bisect() {
        // Light enough: mass(low) >= needed. Too heavy: mass(high) < needed. No weight is above one.
        Integer low[L], high[L], middle[L];
        for (int64_t lane = 0; lane < L; lane++) {
            const Real one = 1;
            low[lane] = 0;
            std::memcpy(&high[lane], &one, sizeof one);
            high[lane]++;
        }
        Held light = held(low), heavy{};
        double needed[L];
        // Equal weights often meet the mass exactly (9 of 10 atoms at 0.9): rounding must not add one more.
        const double slack = 1 - 16 * (sizeof(Real) == 4 ? 0x1p-23 : 0x1p-52);
        for (int64_t lane = 0; lane < L; lane++) needed[lane] = light.mass[lane] * call_.mass * slack;
        for (;;) {
            bool open = false;
            for (int64_t lane = 0; lane < L; lane++) {
                open = open || (high[lane] - low[lane] > 1 && light.atoms[lane] - heavy.atoms[lane] > 1);
                middle[lane] = low[lane] + (high[lane] - low[lane]) / 2;
            }
            if (!open) break;
            const Held now = held(middle);
            for (int64_t lane = 0; lane < L; lane++) {
                const bool enough = now.mass[lane] >= needed[lane];
                (enough ? low : high)[lane] = middle[lane];
                (enough ? light : heavy).mass[lane] = now.mass[lane];
                (enough ? light : heavy).atoms[lane] = now.atoms[lane];
            }
        }
        for (int64_t lane = 0; lane < L; lane++) {
            // What is left between the two are atoms of one and the same weight; some of them may do.
            Real weight;
            std::memcpy(&weight, &low[lane], sizeof weight);
            const int64_t tied = light.atoms[lane] - heavy.atoms[lane];
            const double missing = needed[lane] - heavy.mass[lane];
            found_[lane] = needed[lane] != needed[lane] ? 0  // nan
                           : tied <= 1 || !(weight > 0)
                               ? light.atoms[lane]
                               : heavy.atoms[lane] + smaller(tied, int64_t(std::ceil(missing / weight)));
        }
    }

    const Count& call_;
    const Rows& rows_;
    Panel<Real>* panel_;
    Real *queries_, *weight_, *keys_;
    Real maximum_[L];
    int64_t found_[L], kept_ = 0;
};

template <class Input>
int64_t count_of(const Count& call) {
    return by_precision<Input>(call.rows, [&](auto real, const LargeScores<Input>& large, bool wanted) -> int64_t {
        using Real = decltype(real);
        Arena need;
        MassCount<Input, Real>(call, need);
        const int64_t bytes = need.used();
        Memory memory(bytes * call.rows.threads);
        if (!memory.start()) return NO_MEMORY;
        const Spans spans(call.rows, Lanes<Real>::COUNT);
        const int64_t count = spans.per_entry();
        in_parallel(call.rows.batch * count, call.rows.threads, [&](int64_t task, int64_t thread) {
            if (large.in(task / count) != wanted) return;
            Arena arena(memory.start() + thread * bytes);
            MassCount<Input, Real>(call, arena).count(spans.at(task / count, task % count));
        });
        return DONE;
    });
}

}  // namespace massieu::MASSIEU_BUILD
