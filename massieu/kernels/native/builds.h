// The builds of the kernels that one library may contain.
#pragma once
#include "interface.h"

namespace massieu {

struct Build {
    const char* name;
    int64_t (*forward)(const Forward&);
    int64_t (*backward)(const Backward&);
    int64_t (*count)(const Count&);
    int64_t (*retrieve)(const Forward&);
};

namespace builds {
extern const Build portable, avx2, avx512;
}

}  // namespace massieu
