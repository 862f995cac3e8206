// Work on several threads, and memory for each of them.
#pragma once
#include <atomic>
#include <cstdlib>

#include "vectors.h"

namespace massieu {

// Calls work(context, thread) once on each of so many threads; compiled once, in dispatch.cpp.
void on_threads(int64_t threads, void (*work)(void*, int64_t), void* context);

namespace MASSIEU_BUILD {

// Calls body(index, thread) for every index, in order of index as threads become free. The body must not throw.
template <class Body>
void in_parallel(int64_t count, int64_t threads, const Body& body) {
    if (smaller(threads, count) <= 1) {  // no threads at all: those of OpenMP do not survive a fork
        for (int64_t i = 0; i < count; i++) body(i, int64_t(0));
        return;
    }
    struct Work {
        const Body& body;
        int64_t count;
        std::atomic<int64_t> next{0};
    } work{body, count};
    auto run = [](void* context, int64_t thread) {
        Work& shared = *static_cast<Work*>(context);
        for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.count;)
            shared.body(i, thread);
    };
    on_threads(smaller(threads, count), run, &work);
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
