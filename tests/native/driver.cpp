// The compiled kernel against plain loops in double, for the sanitizers: no Python, no torch, every array as long as it
// must be and not an element longer. Without arguments it runs all cases; "overread", "overflow" and "race" commit the
// fault of that name, so that a test can see the sanitizer catch it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "interface.h"

extern "C" {
const char* massieu_build(const char* name);
int64_t massieu_forward(const massieu::Forward* call);
int64_t massieu_backward(const massieu::Backward* call);
int64_t massieu_count(const massieu::Count* call);
int64_t massieu_retrieve(const massieu::Forward* call);
}

using namespace massieu;

static void fail(const char* what, double found, double expected) {
    std::printf("%s: found %.17g, expected %.17g\n", what, found, expected);
    std::exit(1);
}
static void require(bool holds, const char* what) {
    if (!holds) fail(what, 0, 1);
}

struct Random {
    uint64_t state;
    uint64_t next() {
        state += 0x9e3779b97f4a7c15u;
        uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t end) { return int64_t(next() % uint64_t(end)); }
    bool coin() { return next() & 1; }
    double normal() {  // close enough to one
        double sum = -6;
        for (int i = 0; i < 12; i++) sum += double(next() >> 11) * 0x1p-53;
        return sum;
    }
};

struct Half {
    uint16_t bits;
};
static double wide(float x) { return x; }
static double wide(double x) { return x; }
static double wide(Half x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
template <class T>
T narrow(double x) {
    return T(x);
}
template <>
Half narrow<Half>(double x) {
    const float value = float(x);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return {uint16_t((bits + 0x8000) >> 16)};
}
template <class T>
struct Kind;
template <>
struct Kind<float> {
    using Single = float;
    static constexpr Type TYPE = FLOAT32;
    static constexpr double RELATIVE = 1e-5, EPS = 0x1p-23, ROUNDING = 0, GRADIENT = 1e-4;
};
template <>
struct Kind<Half> {
    using Single = float;
    static constexpr Type TYPE = BFLOAT16;
    static constexpr double RELATIVE = 1e-5, EPS = 0x1p-23, ROUNDING = 0x1p-8, GRADIENT = 0x1p-5;
};
template <>
struct Kind<double> {
    using Single = double;
    static constexpr Type TYPE = FLOAT64;
    static constexpr double RELATIVE = 1e-12, EPS = 0x1p-52, ROUNDING = 0, GRADIENT = 1e-9;
};

// An array on the heap that ends where it ends.
template <class T>
struct Array {
    std::unique_ptr<T[]> data;
    int64_t size = 0;
    Array() = default;
    explicit Array(int64_t size_) : data(new T[size_]()), size(size_) {}
    T* get() const { return size ? data.get() : nullptr; }
    T& operator[](int64_t i) const {
        require(i >= 0 && i < size, "the driver stays inside its arrays");
        return data[i];
    }
};

// Matrices somewhere in one array, with gaps between rows and between matrices; the last axis is dense.
template <class T>
struct Matrices {
    std::vector<int64_t> first, second;  // where entries, and groups within them, start
    int64_t row = 0, rows, dim;
    Array<T> data;

    Matrices(Random& random, int64_t batch, int64_t groups, int64_t rows_, int64_t dim_, double size,
             int64_t missing = 0, bool written = false)
        : rows(rows_), dim(dim_) {
        const int64_t gap = random.coin() ? 0 : 1 + random.below(5), width = dim + gap, offset = random.below(4);
        int64_t group, entry;
        if (random.coin()) {  // (batch, groups, rows, dim)
            row = width, group = rows * width + random.below(3), entry = groups * group + random.below(3);
        } else {  // (batch, rows, groups, dim)
            group = width, row = groups * width + random.below(3), entry = rows * row + random.below(3);
        }
        if (!written && random.below(4) == 0) entry = 0;  // expanded
        for (int64_t b = 0; b < batch; b++) first.push_back(offset + b * entry);
        for (int64_t g = 0; g < groups; g++) second.push_back(g * group);
        const int64_t last = offset + (batch - 1) * entry + (groups - 1) * group + (rows - 1) * row + dim;
        data = Array<T>((rows ? last : 0) - missing);
        for (int64_t i = 0; i < data.size; i++) data[i] = narrow<T>(size * random.normal());
    }
    double at(int64_t b, int64_t g, int64_t i, int64_t c) const {
        return wide(data[first[b] + second[g] + i * row + c]);
    }
    Place place() const { return {first.data(), second.data(), row}; }
    // All elements without the gaps between them.
    Array<T> dense() const {
        Array<T> found(int64_t(first.size() * second.size()) * rows * dim);
        int64_t at = 0;
        for (int64_t b : first)
            for (int64_t g : second)
                for (int64_t i = 0; i < rows; i++)
                    for (int64_t c = 0; c < dim; c++) found[at++] = data[b + g + i * row + c];
        return found;
    }
};

// Somewhere to write so many matrices.
template <class T>
Matrices<T> room(Random& random, int64_t batch, int64_t groups, int64_t rows, int64_t dim) {
    return Matrices<T>(random, batch, groups, dim ? rows : 0, dim, 1, 0, true);
}

// One random call with everything that it points to.
template <class T>
struct Case {
    using Single = typename Kind<T>::Single;
    Rows rows{};
    Random random;
    std::unique_ptr<Matrices<T>> query, key, value;
    Array<Single> log_weight;
    std::vector<int64_t> weight_batch, lengths;
    std::vector<double> sink;

    explicit Case(uint64_t seed, int64_t missing = 0) : random{seed} {
        rows.batch = 1 + random.below(random.below(4) ? 3 : 10), rows.groups = 1 + random.below(4);
        rows.queries = 1 + random.below(random.below(3) ? 9 : 60),
        rows.atoms = random.below(random.below(3) ? 20 : 290);
        if (missing) rows.atoms = 5;
        rows.dim = 1 + random.below(random.below(3) ? 20 : 70), rows.value_dim = 1 + random.below(40);
        rows.causal = random.coin(), rows.window = random.below(3) ? 0 : 1 + random.below(rows.atoms + 3);
        rows.scale = 1 / std::sqrt(double(rows.dim)), rows.type = Kind<T>::TYPE, rows.threads = 1 + random.below(2);
        const double size = random.below(5) ? 1 : 3000;  // scores beyond a thousand are computed in double
        query = std::make_unique<Matrices<T>>(random, rows.batch, rows.groups, rows.queries, rows.dim, size);
        key = std::make_unique<Matrices<T>>(random, rows.batch, 1, rows.atoms, rows.dim, 1, missing);
        rows.query = query->data.get(), rows.query_batch = query->first.data(), rows.query_group = query->second.data();
        rows.key = key->data.get(), rows.key_batch = key->first.data();
        rows.query_row = query->row, rows.key_row = key->row;
        if (random.below(5)) {
            value = std::make_unique<Matrices<T>>(random, rows.batch, 1, rows.atoms, rows.value_dim, 1);
            rows.value = value->data.get(), rows.value_batch = value->first.data(), rows.value_row = value->row;
        }
        if (!rows.value) value.reset(), rows.value_dim = 0;
        if (random.coin()) {
            for (int64_t i = 0; i < rows.batch * rows.groups; i++) lengths.push_back(random.below(rows.atoms + 1));
            rows.lengths = lengths.data();
        }
        if (random.coin()) {
            for (int64_t i = 0; i < rows.batch * rows.groups; i++)
                sink.push_back(random.below(5) ? random.normal() : -INFINITY);
            rows.sink = sink.data();
        }
        if (random.coin() && rows.atoms) add_log_weights();
    }

    void add_log_weights() {
        const bool by_batch = random.coin(), by_group = random.coin(), by_query = random.coin(),
                   by_atom = random.coin();
        const int64_t step = 1 + random.below(2);
        rows.weight_atom = by_atom ? step : 0;
        const int64_t line = by_atom ? rows.atoms * step : 1;
        rows.weight_query = by_query ? line : 0;
        const int64_t block = by_query ? rows.queries * line : line;
        rows.weight_group = by_group ? block : 0;
        const int64_t whole = by_group ? rows.groups * block : block;
        for (int64_t b = 0; b < rows.batch; b++) weight_batch.push_back(by_batch ? b * whole : 0);
        rows.weight_batch = weight_batch.data();
        log_weight = Array<Single>(weight_index(rows.batch - 1, rows.groups - 1, rows.queries - 1, rows.atoms - 1) + 1);
        for (int64_t i = 0; i < log_weight.size; i++)
            log_weight[i] = random.below(6) ? Single(2 * random.normal()) : Single(-INFINITY);
        rows.log_weight = log_weight.get();
    }
    int64_t weight_index(int64_t b, int64_t g, int64_t i, int64_t j) const {
        return weight_batch[b] + g * rows.weight_group + i * rows.weight_query + j * rows.weight_atom;
    }
    int64_t row_index(int64_t b, int64_t g, int64_t i) const { return (b * rows.groups + g) * rows.queries + i; }
    int64_t num_rows() const { return rows.batch * rows.groups * rows.queries; }
};

// One row of scores by its definition: which atoms it sees (the sink is number `atoms`) and what they weigh.
struct Row {
    std::vector<int64_t> atom;
    std::vector<double> score, weight;
    double log_normalizer = NAN, mean = NAN, entropy = NAN, variance = NAN, peak = NAN, collision = NAN, largest = 0;
};

template <class T>
Row row_of(const Case<T>& c, int64_t b, int64_t g, int64_t i) {
    const Rows& rows = c.rows;
    const int64_t here = i + rows.atoms - rows.queries;
    Row row;
    for (int64_t j = 0; j < rows.atoms; j++) {
        if (rows.causal && j > here) continue;
        if (rows.window && std::llabs(j - here) >= rows.window) continue;
        if (rows.lengths && j >= rows.lengths[b * rows.groups + g]) continue;
        double score = 0;
        for (int64_t k = 0; k < rows.dim; k++) score += c.query->at(b, g, i, k) * c.key->at(b, 0, j, k);
        score *= rows.scale;
        if (rows.log_weight) score += c.log_weight[c.weight_index(b, g, i, j)];
        if (score > -INFINITY) row.atom.push_back(j), row.score.push_back(score);
    }
    if (rows.sink && rows.sink[b * rows.groups + g] > -INFINITY)
        row.atom.push_back(rows.atoms), row.score.push_back(rows.sink[b * rows.groups + g]);
    if (row.atom.empty()) return row;
    const double maximum = *std::max_element(row.score.begin(), row.score.end());
    double total = 0;
    for (double s : row.score) total += std::exp(s - maximum);
    row.log_normalizer = maximum + std::log(total);
    row.mean = maximum, row.entropy = row.variance = row.collision = 0, row.peak = 1 / total;
    for (double s : row.score) {
        const double p = std::exp(s - maximum) / total;
        row.weight.push_back(p);
        row.mean += p * (s - maximum), row.entropy -= p * (s - row.log_normalizer), row.collision += p * p;
        row.largest = std::max(row.largest, std::fabs(s));
    }
    for (size_t k = 0; k < row.score.size(); k++)
        row.variance += row.weight[k] * (row.score[k] - row.mean) * (row.score[k] - row.mean);
    return row;
}

static void compare(const char* what, double found, double expected, double allowed) {
    if (std::isnan(expected) ? !std::isnan(found) : !(std::fabs(found - expected) <= allowed))
        fail(what, found, expected);
}

template <class T>
Matrices<T> check_forward(Case<T>& c, int64_t (*function)(const Forward*),
                          Array<typename Kind<T>::Single>& statistics) {
    using K = Kind<T>;
    const int64_t n = c.num_rows(), dim = c.rows.value_dim;
    Matrices<T> output = room<T>(c.random, c.rows.batch, c.rows.groups, c.rows.queries, dim);
    statistics = Array<typename K::Single>(STATISTICS * n);
    Forward call{c.rows, output.data.get(), output.place(), statistics.get()};
    const int64_t top = function == massieu_retrieve ? 5 : 0;
    Array<double> top_score(n * top);
    Array<int64_t> top_atom(n * top);
    call.top = top, call.top_score = top_score.get(), call.top_atom = top_atom.get();
    require(function(&call) == DONE, "the call is done");
    for (int64_t b = 0; b < c.rows.batch; b++)
        for (int64_t g = 0; g < c.rows.groups; g++)
            for (int64_t i = 0; i < c.rows.queries; i++) {
                const Row row = row_of(c, b, g, i);
                const int64_t at = c.row_index(b, g, i);
                const double expected[] = {row.log_normalizer, row.mean, row.entropy,
                                           row.variance,       row.peak, row.collision};
                const double floor = 4 * K::EPS * std::max(1.0, row.largest);
                for (int s = 0; s < 6; s++)
                    compare("statistic", statistics[s * n + at], expected[s],
                            2 * (K::RELATIVE * std::fabs(expected[s]) + floor));
                std::vector<double> scores;
                for (size_t a = 0; top && a < row.atom.size(); a++)
                    if (row.atom[a] < c.rows.atoms) scores.push_back(row.score[a]);
                std::sort(scores.begin(), scores.end(), std::greater<double>());
                for (int64_t k = 0; k < top; k++) {
                    const bool there = k < int64_t(scores.size());
                    require((top_atom[at * top + k] >= 0) == there, "there are as many best atoms as atoms");
                    if (there)
                        compare("best score", top_score[at * top + k], scores[k],
                                2 * K::RELATIVE * std::fabs(scores[k]) + 2 * floor);
                }
                for (int64_t k = 0; k < dim; k++) {
                    double sum = 0, largest = 1;
                    for (size_t a = 0; a < row.atom.size(); a++)
                        if (row.atom[a] < c.rows.atoms) {
                            const double v = c.value->at(b, 0, row.atom[a], k);
                            sum += row.weight[a] * v, largest = std::max(largest, std::fabs(v));
                        }
                    compare("output", output.at(b, g, i, k), sum,
                            2 * largest * (K::RELATIVE + floor) + K::ROUNDING * std::fabs(sum));
                }
            }
    return output;
}

template <class T>
void check_backward(Case<T>& c, const Matrices<T>& output, const Array<typename Kind<T>::Single>& statistics,
                    bool through_output) {
    using K = Kind<T>;
    using Single = typename K::Single;
    const Rows& rows = c.rows;
    const int64_t n = c.num_rows(), dim = rows.value_dim, through = through_output ? dim : 0;
    Array<Single> coefficients(COEFFICIENTS * n), grad_weight(c.log_weight.size);
    const auto coming = room<T>(c.random, rows.batch, rows.groups, rows.queries, through);
    const auto grad_query = room<T>(c.random, rows.batch, rows.groups, rows.queries, rows.dim);
    const auto grad_key = room<T>(c.random, rows.batch, 1, rows.atoms, rows.dim);
    const auto grad_value = room<T>(c.random, rows.batch, 1, rows.atoms, through);
    const bool sloped = !through_output || c.random.coin();
    for (int64_t i = 0; i < coefficients.size; i++) coefficients[i] = sloped ? Single(c.random.normal()) : Single(0);
    std::vector<int64_t> order(rows.batch);
    std::iota(order.begin(), order.end(), 0);
    Backward call{};
    call.rows = rows, call.moments = statistics.get() + MAXIMUM * n;
    call.coefficients = sloped ? coefficients.get() : nullptr;
    if (through_output) {
        call.output = output.data.get(), call.output_at = output.place();
        call.grad_output = coming.data.get(), call.grad_output_at = coming.place();
        call.grad_value = grad_value.data.get(), call.grad_value_at = grad_value.place();
    }
    call.grad_query = grad_query.data.get(), call.grad_query_at = grad_query.place();
    call.grad_key = grad_key.data.get(), call.grad_key_at = grad_key.place();
    if (rows.log_weight && c.random.coin()) {
        call.grad_weight = grad_weight.get(), call.grad_weight_batch = rows.weight_batch, call.order = order.data();
        call.grad_weight_group = rows.weight_group, call.grad_weight_query = rows.weight_query;
        call.grad_weight_atom = rows.weight_atom;
    }
    require(massieu_backward(&call) == DONE, "the backward call is done");

    const int64_t keys = rows.batch * rows.atoms;
    std::vector<double> to_query(n * rows.dim), to_key(keys * rows.dim), to_value(keys * through),
        to_weight(grad_weight.size);
    for (int64_t b = 0; b < rows.batch; b++)
        for (int64_t g = 0; g < rows.groups; g++)
            for (int64_t i = 0; i < rows.queries; i++) {
                const Row row = row_of(c, b, g, i);
                const int64_t at = c.row_index(b, g, i);
                for (size_t a = 0; a < row.atom.size(); a++) {
                    const int64_t j = row.atom[a];
                    if (j == rows.atoms) continue;
                    const double p = row.weight[a], centered = row.score[a] - row.mean;
                    double slope = coefficients[CONSTANT * n + at] + coefficients[LINEAR * n + at] * centered +
                                   coefficients[QUADRATIC * n + at] * centered * centered +
                                   coefficients[WEIGHT * n + at] * p;
                    for (int64_t k = 0; through_output && k < dim; k++) {
                        const double own = coming.at(b, g, i, k);
                        slope += own * (c.value->at(b, 0, j, k) - output.at(b, g, i, k));
                        to_value[(b * rows.atoms + j) * dim + k] += p * own;
                    }
                    slope *= p;
                    for (int64_t k = 0; k < rows.dim; k++) {
                        to_query[at * rows.dim + k] += slope * rows.scale * c.key->at(b, 0, j, k);
                        to_key[(b * rows.atoms + j) * rows.dim + k] += slope * rows.scale * c.query->at(b, g, i, k);
                    }
                    if (call.grad_weight) to_weight[c.weight_index(b, g, i, j)] += slope;
                }
            }
    // Scores of several thousand are differences of numbers that large, and so are their squares.
    double largest_score = 1;
    for (int64_t b = 0; b < rows.batch; b++)
        for (int64_t g = 0; g < rows.groups; g++)
            for (int64_t i = 0; i < rows.queries; i++)
                largest_score = std::max(largest_score, row_of(c, b, g, i).largest);
    auto compare_all = [&](const char* what, const auto& found, const std::vector<double>& expected) {
        double largest = 1;
        for (double x : expected) largest = std::max(largest, std::fabs(x));
        const double allowed = largest * (K::GRADIENT + 32 * K::EPS * largest_score);
        for (int64_t i = 0; i < found.size; i++) compare(what, wide(found[i]), expected[i], allowed);
    };
    compare_all("gradient of the query", grad_query.dense(), to_query);
    compare_all("gradient of the key", grad_key.dense(), to_key);
    compare_all("gradient of the value", grad_value.dense(), to_value);
    if (call.grad_weight) compare_all("gradient of the log weight", grad_weight, to_weight);
}

template <class T>
void check_count(const Case<T>& c) {
    const double mass = 0.9;
    Array<int64_t> count(c.num_rows());
    const Count call{c.rows, mass, count.get()};
    require(massieu_count(&call) == DONE, "the count is done");
    for (int64_t b = 0; b < c.rows.batch; b++)
        for (int64_t g = 0; g < c.rows.groups; g++)
            for (int64_t i = 0; i < c.rows.queries; i++) {
                Row row = row_of(c, b, g, i);
                const int64_t found = count[c.row_index(b, g, i)];
                if (row.atom.empty() ? found != 0 : found < 1 || found > int64_t(row.atom.size()))
                    fail("count", double(found), double(row.atom.size()));
                std::sort(row.weight.rbegin(), row.weight.rend());
                const double held = std::accumulate(row.weight.begin(), row.weight.begin() + found, 0.0);
                const double slack = 32 * Kind<T>::EPS * (1 + row.largest);
                if (found && (held < mass - slack || held - row.weight[found - 1] > mass + slack))
                    fail("mass", held, mass);
            }
}

template <class T>
void check_all(int64_t cases) {
    for (int64_t seed = 0; seed < cases; seed++) {
        Case<T> c(uint64_t(seed) * 3 + Kind<T>::TYPE);
        Array<typename Kind<T>::Single> statistics;
        check_forward(c, massieu_retrieve, statistics);
        check_count(c);
        const Matrices<T> output = check_forward(c, massieu_forward, statistics);
        check_backward(c, output, statistics, false);
        if (c.rows.value) check_backward(c, output, statistics, true);
    }
    std::printf("%lld cases of type %lld agree\n", (long long)cases, (long long)Kind<T>::TYPE);
}

static void check_refusals() {
    Case<float> c(1);
    const auto output = room<float>(c.random, c.rows.batch, c.rows.groups, c.rows.queries, c.rows.value_dim);
    Array<float> statistics(STATISTICS * c.num_rows());
    auto status = [&](auto change) {
        Forward call{c.rows, output.data.get(), output.place(), statistics.get()};
        change(call.rows);
        Backward back{};
        back.rows = call.rows;
        const Count count{call.rows, 0.9, nullptr};
        const int64_t found = massieu_forward(&call);
        require(massieu_retrieve(&call) == found, "retrieval refuses what the forward pass refuses");
        if (found != DONE) {
            require(massieu_backward(&back) == found, "the backward pass refuses what the forward pass refuses");
            require(massieu_count(&count) == found, "the count refuses what the forward pass refuses");
        }
        return found;
    };
    require(status([](Rows&) {}) == BAD_ARGUMENT, "no call before a build was picked");
    require(massieu_build("nonsense") == nullptr, "there is no build of this name");
    require(status([](Rows&) {}) == BAD_ARGUMENT, "a build that does not exist is not picked");
    require(massieu_build("") != nullptr, "there is a build");
    require(status([](Rows&) {}) == DONE, "the call is sound");
    require(status([](Rows& r) { r.threads = 0; }) == BAD_ARGUMENT, "no threads");
    require(status([](Rows& r) { r.threads = -1; }) == BAD_ARGUMENT, "fewer than no threads");
    require(status([](Rows& r) { r.type = 3; }) == BAD_ARGUMENT, "an unknown type");
    require(status([](Rows& r) { r.batch = 0; }) == BAD_ARGUMENT, "no entries");
    require(status([](Rows& r) { r.groups = -1; }) == BAD_ARGUMENT, "a negative number of groups");
    require(status([](Rows& r) { r.queries = 0; }) == BAD_ARGUMENT, "no queries");
    require(status([](Rows& r) { r.dim = 0; }) == BAD_ARGUMENT, "no columns");
    require(status([](Rows& r) { r.atoms = -1; }) == BAD_ARGUMENT, "a negative number of atoms");
    require(status([](Rows& r) { r.atoms = INT32_MAX; }) == BAD_ARGUMENT, "more atoms than 32 bits count");
    require(status([](Rows& r) { r.window = -1; }) == BAD_ARGUMENT, "a negative window");
    Forward best{c.rows, output.data.get(), output.place(), statistics.get()};
    best.top = 1;
    require(massieu_retrieve(&best) == BAD_ARGUMENT, "best atoms with nowhere to write them");
    require(!c.rows.value || status([](Rows& r) { r.value_dim = 0; }) == BAD_ARGUMENT, "values without columns");
}

static int commit(const char* fault) {
    massieu_build("");
    if (!std::strcmp(fault, "overread")) {  // the last key lacks its last element
        Case<float> c(5, 1);
        c.rows.causal = c.rows.window = 0, c.rows.lengths = nullptr;
        const auto output = room<float>(c.random, c.rows.batch, c.rows.groups, c.rows.queries, c.rows.value_dim);
        Array<float> statistics(STATISTICS * c.num_rows());
        const Forward call{c.rows, output.data.get(), output.place(), statistics.get()};
        return int(massieu_retrieve(&call));
    }
    if (!std::strcmp(fault, "overflow")) {
        volatile int32_t large = INT32_MAX;
        return (large + 1) & 1;
    }
    int64_t shared = 0;
    std::thread other([&] {
        for (int i = 0; i < 1000; i++) shared++;
    });
    for (int i = 0; i < 1000; i++) shared++;
    other.join();
    return int(shared & 1);
}

int main(int count, char** arguments) {
    if (count > 1 && std::strcmp(arguments[1], "cases")) return commit(arguments[1]);
    const int64_t cases = count > 2 ? std::atoll(arguments[2]) : 100;
    check_refusals();
    check_all<float>(cases);
    check_all<Half>(cases);
    check_all<double>(cases);
    return 0;
}
