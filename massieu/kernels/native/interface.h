// The plain C interface: structures of pointers, strides and sizes. Strides count elements, not bytes.
// massieu/kernels/compiled.py mirrors these structures field by field; every field takes eight bytes.
#pragma once
#include <cstdint>

namespace massieu {

enum Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT64 = 2 };

// Rows of scores s_ij = scale <q_i, k_j> + log h_ij, grouped by the keys that they share: `groups` sets of queries see
// the same atoms. The last axis of query, key and value is dense; where a batch entry or a group starts is free.
struct Rows {
    const void *query, *key, *value;                  // value may be null: statistics only
    const int64_t *query_batch, *query_group;         // where entries and groups start, (batch) and (groups)
    const int64_t *key_batch, *value_batch;           // (batch)
    int64_t query_row, key_row, value_row;            // from one row to the next
    const void* log_weight;                           // null, or float32 (float64 for float64 inputs)
    const int64_t* weight_batch;                      // where the log weights of an entry start, (batch)
    int64_t weight_group, weight_query, weight_atom;  // zero where log weights broadcast
    const int64_t* lengths;                           // null, or atoms present, (batch, groups)
    const double* sink;                               // null, or log weight of an atom at the origin, (batch, groups)
    int64_t batch, groups, queries, atoms, dim, value_dim;
    int64_t causal, window;  // no window is 0
    double scale;
    int64_t type, threads;
};

// Where the rows of a tensor lie; the last axis is dense. Keys and values have no groups.
struct Place {
    const int64_t *batch, *group;  // where entries and groups start, (batch) and (groups)
    int64_t row;                   // from one row to the next
};

// Statistics of a row, in this order, each (batch, groups, queries) and dense: float32, or float64 for float64 inputs.
// A row without atoms has nan everywhere. The last three are what the backward pass starts from, in base 2.
enum Statistic {
    LOG_NORMALIZER,
    SCORE_MEAN,
    ENTROPY,
    SCORE_VARIANCE,
    PEAK,
    COLLISION,
    MAXIMUM,
    TOTAL,
    OFFSET,
    STATISTICS
};

struct Forward {
    Rows rows;
    void* output;  // (batch, groups, queries, value_dim), of the type of the inputs
    Place output_at;
    void* statistics;  // (STATISTICS, batch, groups, queries)
    // What only the retrieval gives: the atoms of the highest scores, best first, (batch, groups, queries, top).
    int64_t top = 0;
    double* top_score = nullptr;
    int64_t* top_atom = nullptr;
};

// Gradient of a loss in the scores: ds_j = p_j (g . (v_j - o) + constant + linear c_j + quadratic c_j^2 + weight p_j)
// with c_j = s_j - E[s]. Coefficients are stacked in this order, each (batch, groups, queries), like statistics.
enum Coefficient { CONSTANT, LINEAR, QUADRATIC, WEIGHT, COEFFICIENTS };

struct Backward {
    Rows rows;
    const void* moments;                       // MAXIMUM, TOTAL and OFFSET of the statistics
    const void* coefficients;                  // null if all of them are zero
    const void *output, *grad_output;          // of the type of the inputs; both null if no gradient reaches the output
    void *grad_query, *grad_key, *grad_value;  // of the type of the inputs
    Place output_at, grad_output_at, grad_query_at, grad_key_at, grad_value_at;
    void* grad_weight;  // null, or like log_weight and zero at first; its strides are its own
    const int64_t *grad_weight_batch,
        *order;  // (batch); in this order entries that share log weights follow each other
    int64_t grad_weight_group, grad_weight_query, grad_weight_atom;
};

struct Count {
    Rows rows;
    double mass;
    int64_t* count;  // (batch, groups, queries)
};

// What a library call can come back with.
enum Status : int64_t { DONE = 0, NO_MEMORY = 1, BAD_ARGUMENT = 2 };

}  // namespace massieu
