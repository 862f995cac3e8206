// Work on several threads, and memory for each of them.
#pragma once
#include <atomic>
#include <cstdlib>

#include "vectors.h"

namespace massieu {

// Calls work(context, thread) once on each thread; compiled once, in dispatch.cpp.
void on_threads(int64_t threads, void (*work)(void*, int64_t), void* context);

namespace MASSIEU_BUILD {

// Calls body(index, thread) for every index, in order of index as threads become free. A thread takes a share of what
// is left: neighbors lie in the same lines of memory, and near the end single ones keep all threads busy. The body
// must not throw.
template <class Body>
void in_parallel(int64_t count, int64_t threads, const Body& body) {
    threads = smaller(threads, count);
    if (threads <= 1) {  // no threads at all: those of OpenMP do not survive a fork
        for (int64_t i = 0; i < count; i++) body(i, int64_t(0));
        return;
    }
    struct Work {
        const Body& body;
        int64_t count, threads;
        std::atomic<int64_t> next{0};
    } work{body, count, threads};
    auto run = [](void* context, int64_t thread) {
        Work& shared = *static_cast<Work*>(context);
        for (int64_t first = shared.next.load(std::memory_order_relaxed); first < shared.count;) {
            const int64_t end = first + larger(int64_t(1), (shared.count - first) / (4 * shared.threads));
            if (!shared.next.compare_exchange_weak(first, end, std::memory_order_relaxed)) continue;
            for (int64_t i = first; i < end; i++) shared.body(i, thread);
            first = shared.next.load(std::memory_order_relaxed);
        }
    };
    on_threads(threads, run, &work);
}

// Hands out aligned pieces of one allocation; without memory behind it, it only adds up how much would be needed.
class Arena {
  public:
    explicit Arena(char* start = nullptr) : start_(start) {}
    template <class T>
    T* take(int64_t count) {
        char* piece = start_ ? start_ + used_ : nullptr;
        used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(piece);
    }
    int64_t used() const { return used_; }

  private:
    char* start_;
    int64_t used_ = 0;
};

// One allocation, freed at the end of its scope; null when there is no memory.
class Memory {
  public:
    explicit Memory(int64_t bytes) : start_(static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64))) {}
    ~Memory() { std::free(start_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    char* start() const { return start_; }

  private:
    char* start_;
};

}  // namespace MASSIEU_BUILD
}  // namespace massieu
