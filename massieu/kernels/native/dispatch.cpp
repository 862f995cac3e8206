// The functions that the library exports. They check what could crash, and call the best build that this processor
// runs.
#include <cstring>

#include "builds.h"

#ifndef _OPENMP
#include <thread>
#include <vector>
#endif

namespace massieu {

// OpenMP where there is: torch has its threads from the same library, and two sets of threads would fight.
void on_threads(int64_t threads, void (*work)(void*, int64_t), void* context) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(int(threads)) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) work(context, thread);
#else
    std::vector<std::thread> others;
    for (int64_t thread = 1; thread < threads; thread++) others.emplace_back(work, context, thread);
    work(context, 0);
    for (std::thread& other : others) other.join();
#endif
}

static const Build* best_build(const char* limit) {
    const bool any = !limit || !*limit;
#ifdef MASSIEU_HAS_AVX512
    __builtin_cpu_init();
    if ((any || !std::strcmp(limit, "avx512")) && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &builds::avx512;
#endif
#ifdef MASSIEU_HAS_AVX2
    __builtin_cpu_init();
    if ((any || !std::strcmp(limit, "avx2")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &builds::avx2;
#endif
    return any || !std::strcmp(limit, "portable") ? &builds::portable : nullptr;
}

static const Build* current = nullptr;

static bool sound(const Rows& rows) {
    const int64_t sizes[] = {rows.batch, rows.groups, rows.queries, rows.atoms, rows.dim, rows.value_dim, rows.window};
    for (int64_t size : sizes)
        if (size < 0) return false;
    // Positions of atoms are compared in 32 bits.
    return rows.threads > 0 && rows.batch > 0 && rows.groups > 0 && rows.queries > 0 && rows.dim > 0 &&
           rows.atoms + rows.queries < INT32_MAX && (!rows.value || rows.value_dim > 0);
}

}  // namespace massieu

extern "C" {

// Picks a build by name, or the best one for an empty name; returns its name, or null if this processor cannot run it.
__attribute__((visibility("default"))) const char* massieu_build(const char* name) {
    const massieu::Build* build = massieu::best_build(name);
    if (build) massieu::current = build;
    return build ? build->name : nullptr;
}
// How long the structures are here, so that a caller made for another version is found out before it calls.
__attribute__((visibility("default"))) int64_t massieu_sizes(int64_t which) {
    const int64_t sizes[] = {sizeof(massieu::Forward), sizeof(massieu::Backward), sizeof(massieu::Count)};
    return which >= 0 && which < 3 ? sizes[which] : 0;
}
__attribute__((visibility("default"))) int64_t massieu_forward(const massieu::Forward* call) {
    return massieu::current && massieu::sound(call->rows) ? massieu::current->forward(*call) : massieu::BAD_ARGUMENT;
}
__attribute__((visibility("default"))) int64_t massieu_backward(const massieu::Backward* call) {
    return massieu::current && massieu::sound(call->rows) ? massieu::current->backward(*call) : massieu::BAD_ARGUMENT;
}
__attribute__((visibility("default"))) int64_t massieu_count(const massieu::Count* call) {
    return massieu::current && massieu::sound(call->rows) ? massieu::current->count(*call) : massieu::BAD_ARGUMENT;
}
__attribute__((visibility("default"))) int64_t massieu_retrieve(const massieu::Forward* call) {
    const bool sound =
        massieu::sound(call->rows) && call->top >= 0 && (!call->top || (call->top_score && call->top_atom));
    return massieu::current && sound ? massieu::current->retrieve(*call) : massieu::BAD_ARGUMENT;
}
}
