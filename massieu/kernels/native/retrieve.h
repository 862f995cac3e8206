// Few rows over very many atoms: the atoms are split over the threads, and what each thread found is merged.
#pragma once
#include "forward.h"

namespace massieu::MASSIEU_BUILD {

// Take in what another part of the atoms did to the same rows.
template <class Real>
void merge(RowSums<Real>& sums, Real* output, RowSums<Real>& other, const Real* other_output, int64_t rows,
           int64_t width) {
    for (int64_t lane = 0; lane < rows; lane++) {
        const Real maximum = sums.maximum[lane] > other.maximum[lane] ? sums.maximum[lane] : other.maximum[lane];
        const Real drop = sums.maximum[lane] - maximum, other_drop = other.maximum[lane] - maximum;
        const Real decay = Real(std::exp2(double(drop))), other_decay = Real(std::exp2(double(other_drop)));
        sums.move(lane, drop, decay), other.move(lane, other_drop, other_decay);
        sums.maximum[lane] = maximum;
        sums.total[lane] += other.total[lane], sums.first[lane] += other.first[lane];
        sums.second[lane] += other.second[lane], sums.collision[lane] += other.collision[lane];
        for (int64_t c = 0; c < width; c++)
            output[lane * width + c] = output[lane * width + c] * decay + other_output[lane * width + c] * other_decay;
    }
}

// One span of rows. Returns false if its scores turned out too large for this precision.
template <class Input, class Real>
bool retrieve_span(const Forward& call, const Rows* rows, const Span& span, char* memory, int64_t bytes) {
    const int64_t parts = call.rows.threads, size = ceil_div(call.rows.atoms, parts * TILE) * TILE;
    in_parallel(parts, parts, [&](int64_t part, int64_t) {
        Arena arena(memory + part * bytes);
        auto* block = new (arena.take<RowBlock<Input, Real>>(1)) RowBlock<Input, Real>(rows[part > 0], arena, call.top);
        block->start(span);
        block->absorb_atoms(part * size, smaller((part + 1) * size, call.rows.atoms));
        block->finish();
    });
    auto block_of = [&](int64_t part) -> RowBlock<Input, Real>& {
        return *reinterpret_cast<RowBlock<Input, Real>*>(memory + part * bytes);
    };
    RowBlock<Input, Real>& block = block_of(0);
    bool fits = true;
    Walk walk(call.rows, call.output_at, span.entry, span.first);
    for (int64_t p = 0; p < block.panels(); p++) {
        const Panel<Real>& panel = block.panel(p);
        for (int64_t part = 1; part < parts; part++)
            merge(block.sums(p), block.output(p), block_of(part).sums(p), block_of(part).output(p), panel.rows,
                  block.value_width());
        const int64_t first = span.entry * call.rows.groups * call.rows.queries + panel.first_row;
        for (int64_t lane = 0; lane < panel.rows; lane++, walk.next()) {
            const double maximum = block.sums(p).maximum[lane];
            fits = fits && !(std::fabs(maximum) > LARGE_SCORE * LOG2E && maximum > 0.5 * ABSENT);
            finish_row<Input, Real>(call, block.sums(p), lane, block.output(p) + lane * block.value_width(),
                                    static_cast<Input*>(call.output) + walk.start(), first + lane);
            if (!call.top) continue;
            Best& best = block.best(p, lane);
            for (int64_t part = 1; part < parts; part++) {
                const Best& other = block_of(part).best(p, lane);
                for (int64_t i = 0; i < other.count; i++) best.offer(other.heap[i]);
            }
            write_best(best, call.top_score + (first + lane) * call.top, call.top_atom + (first + lane) * call.top);
        }
    }
    return fits;
}

template <class Input>
int64_t retrieve_of(const Forward& call) {
    using Usual = std::conditional_t<sizeof(Input) == 8, double, float>;
    // A sink is one atom: only the first part has it.
    Rows rows[2] = {call.rows, call.rows};
    rows[1].sink = nullptr;
    Arena usual, wide;
    usual.take<RowBlock<Input, Usual>>(1), wide.take<RowBlock<Input, double>>(1);
    RowBlock<Input, Usual>(call.rows, usual, call.top), RowBlock<Input, double>(call.rows, wide, call.top);
    const int64_t bytes = larger(usual.used(), wide.used());
    Memory memory(bytes * call.rows.threads);
    if (!memory.start()) return NO_MEMORY;
    const Spans spans(call.rows, BLOCK_VECTORS * Lanes<Usual>::COUNT),
        half(call.rows, BLOCK_VECTORS * Lanes<double>::COUNT);
    for (int64_t entry = 0; entry < call.rows.batch; entry++) {
        bool fits = true;
        for (int64_t index = 0; index < spans.per_entry(); index++)
            fits = retrieve_span<Input, Usual>(call, rows, spans.at(entry, index), memory.start(), bytes) && fits;
        if (sizeof(Usual) == 4 && !fits)
            for (int64_t index = 0; index < half.per_entry(); index++)
                retrieve_span<Input, double>(call, rows, half.at(entry, index), memory.start(), bytes);
    }
    return DONE;
}

}  // namespace massieu::MASSIEU_BUILD
