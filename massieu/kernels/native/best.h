// The atoms of the highest scores of a row, found on the way through its tiles.
#pragma once
#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "rows.h"

namespace massieu::MASSIEU_BUILD {

struct Scored {
    double score;
    int64_t atom;
};

// Of equal scores the earlier atom wins, however the atoms are split.
inline bool better(const Scored& a, const Scored& b) {
    return a.score > b.score || (a.score == b.score && a.atom < b.atom);
}

// The best atoms of one row so far: a heap with the worst of them in front.
struct Best {
    Scored* heap;
    int64_t most, count;

    void offer(Scored atom) {
        if (count == most) {
            if (!better(atom, heap[0])) return;
            std::pop_heap(heap, heap + count--, better);
        }
        heap[count++] = atom;
        std::push_heap(heap, heap + count, better);
    }
    // What a later atom has to exceed; an absent one never does.
    double bar() const { return count < most ? 0.5 * ABSENT : heap[0].score; }
};

// The best atoms of all rows of a block.
template <class Real>
class BestOfRows {
  public:
    static constexpr int64_t L = Lanes<Real>::COUNT, MOST_ROWS = BLOCK_VECTORS * L;

    BestOfRows(int64_t most, Arena& arena) : most_(most) {
        best_ = arena.take<Best>(most ? MOST_ROWS : 0);
        bars_ = arena.take<Real>(most ? MOST_ROWS : 0);
        heaps_ = arena.take<Scored>(MOST_ROWS * most);
    }

    void start() {
        for (int64_t row = 0; most_ && row < MOST_ROWS; row++) {
            best_[row] = {heaps_ + row * most_, most_, 0};
            bars_[row] = Real(best_[row].bar());
        }
    }

    // Scores of a tile, score[atom][lane], for a panel whose first row is `row` of the block. Hardly any tile has a
    // new best: the maximum of every lane decides whether its scores are looked at one by one.
    void absorb(int64_t row, int64_t rows, int64_t lanes, const Real* score, int64_t from, int64_t count) {
        if (!most_) return;
        for (int64_t lane = 0; lane < lanes; lane += L) {
            Vector<Real> maximum = all<Real>(Real(2 * ABSENT));
            for (int64_t j = 0; j < count; j++) maximum = greatest<Real>(load(score + j * lanes + lane), maximum);
            for (int64_t i = 0; i < L && lane + i < rows; i++)
                if (maximum[i] > bars_[row + lane + i]) look(row + lane + i, score + lane + i, lanes, from, count);
        }
    }

    // The same for one row whose scores lie side by side, filled up with absent ones.
    void absorb_row(int64_t row, const Real* score, int64_t from, int64_t count) {
        if (!most_) return;
        Vector<Real> maximum = all<Real>(Real(2 * ABSENT));
        for (int64_t j = 0; j < count; j += L) maximum = greatest<Real>(load(score + j), maximum);
        if (any<Real>(maximum > all<Real>(bars_[row]))) look(row, score, 1, from, count);
    }

    Best& operator[](int64_t row) { return best_[row]; }
    int64_t most() const { return most_; }
    Real bar(int64_t row) const { return bars_[row]; }

  private:
    void look(int64_t row, const Real* score, int64_t stride, int64_t from, int64_t count) {
        Best& best = best_[row];
        Real bar = bars_[row];
        for (int64_t j = 0; j < count; j++)
            if (score[j * stride] > bar) {
                best.offer({double(score[j * stride]), from + j});
                bar = Real(best.bar());
            }
        bars_[row] = bar;
    }

    int64_t most_;
    Best* best_;
    Real* bars_;
    Scored* heaps_;
};

// Write what was found of one row, the best first; what is missing has minus infinity and no atom.
inline void write_best(Best& best, double* score, int64_t* atom) {
    std::sort_heap(best.heap, best.heap + best.count, better);
    for (int64_t i = 0; i < best.most; i++) {
        score[i] = i < best.count ? best.heap[i].score * LN2 : -INFINITY;
        atom[i] = i < best.count ? best.heap[i].atom : -1;
    }
}

}  // namespace massieu::MASSIEU_BUILD
